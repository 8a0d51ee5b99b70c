"""What several test files share: running the program, in this process, in a folder of its own."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import unittest
import zlib
from typing import NamedTuple
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, FakeServer, ReplayServer

PROGRAM = pathlib.Path(ms.__file__).resolve()
SAVE = ("--save-run", "run.jsonl")
ALARMS = ("--fail-on", "slower,changed-text,regression")
NEVER_PAYS = ("--fail-on", "slower", "--min-gain", "99")
TEXT = "one two three four five six seven eight"
CHANGED = "one two three four FIVE six seven eight"
PROMPTS = ["first prompt", "second prompt", "third prompt", "fourth prompt"]
no_windows = unittest.skipIf(os.name == "nt", "POSIX only")


def of_answers(acceptance, tokens, answers):
    """The acceptance as that of so many answers, with so many tokens in them."""
    return acceptance and dataclasses.replace(acceptance, tokens=tokens, answers=answers)


def findings(*records):
    """The audit of these records, by the name of the finding."""
    return {entry["finding"]: entry for record in records for entry in record["audit"]}


@contextlib.contextmanager
def at_most(seconds):
    """Fail instead of hanging (where there are alarms)."""
    if os.name == "nt":
        yield
        return

    def late(number, frame):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    records: list  # the JSON lines of labbook.md, in order
    files: dict  # name: bytes of every file in the folder afterwards

    def comparison(self):
        """The only comparison record."""
        (record,) = self.comparisons()
        return record

    def comparisons(self):
        """All comparison records, in order."""
        return [record for record in self.records if record["kind"] == "comparison"]

    def endpoint(self, arm="baseline"):
        """The only endpoint record of an arm."""
        (record,) = [
            r for r in self.records if r["kind"] == "endpoint" and r["label"].endswith("/" + arm)
        ]
        return record


def assert_conforms(name, data):
    """AssertionError where what the program itself wrote, a notebook or a run file, is not of its schema."""
    for number, line in enumerate(data.splitlines(), 1):
        if not line.startswith(b"{"):
            continue
        value = json.loads(line)
        kind = value.get("kind")
        if value.get("lab") == ms.LAB:
            wrong = ms.misfit(value, ms.RECORD_SHAPES[kind])
        else:
            if kind == "triage":  # as it is read
                value["triage"] = {**ms.UNKNOWN_GAP, **value["triage"]}
            wrong = ms.line_misfit(kind, value)
        if wrong:
            raise AssertionError(f"{name}:{number}: {kind}: {wrong} is not of the schema: {value}")


def assert_written_conforms(before, after):
    """The same of what stands in the files {name: bytes} of a notebook or run file behind what stood there before."""
    for name, data in after.items():
        old = before.get(name, b"")
        own = name == "labbook.md" or name.endswith(".jsonl")
        if own and data.startswith(old) and data != old:
            assert_conforms(name, data[len(old) :])


class Clock:
    """Seconds that pass only where the program sleeps: waiting in model time."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds or 0.2  # run_main sets the pause between two reads to 0

    @contextlib.contextmanager
    def runs(self):
        """While this lasts, the program sleeps and waits by this clock."""
        with (
            mock.patch.object(ms.time, "sleep", self.sleep),
            mock.patch.object(ms.time, "monotonic", self),
        ):
            yield


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_main(*argv, files=None, prompts=None, env=None, terminal=False, clocks=False):
    """main(argv) in a temporary folder that holds `files` {name: text or bytes}; `prompts` is a list of texts that
    becomes a prompt file. No waiting for metrics to settle. Recorded and claimed times come at once, so they are held
    against the clock only with `clocks`."""
    argv = [str(word) for word in argv]
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folder = pathlib.Path(folder)
        files = dict(files or {})
        if prompts is not None:
            files["prompts.json"] = json.dumps([{"prompt": text} for text in prompts])
            argv += ["--prompts", "prompts.json"]
        given = {
            name: data if isinstance(data, bytes) else data.encode("utf-8")
            for name, data in files.items()
        }
        for name, data in given.items():
            (folder / name).write_bytes(data)
        out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
        stack.enter_context(mock.patch.object(ms, "SETTLE_PAUSE_S", 0.0))
        if not clocks:
            stack.enter_context(mock.patch.object(ms, "CLOCKS_APART_S", math.inf))
        stack.enter_context(mock.patch.dict(os.environ, env or {}))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            os.chdir(folder)
            code = ms.main(argv)
        finally:
            os.chdir(here)
        left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert_written_conforms(given, left)
        records = []
        for line in left.get("labbook.md", b"").splitlines():
            with contextlib.suppress(ValueError):  # a damaged line may be there on purpose
                records += [json.loads(line)] if line.startswith(b"{") else []
        return Outcome(code, out.getvalue(), err.getvalue(), records, left)


def urls_of(baseline, candidate):
    """The flags that name two servers; either may be None."""
    urls = ["--baseline-url", baseline.url] if baseline else []
    return urls + (["--speculative-url", candidate.url] if candidate else [])


def measure(baseline, candidate, *flags, **options):
    """Measure two fake servers (either may be None) and return the Outcome."""
    return run_main(*urls_of(baseline, candidate), *flags, **options)


# ---- answers in raw bytes ----


def http(body, kind="application/json", status="200 OK"):
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nConnection: close\r\n\r\n%s" % (
        status.encode(),
        kind.encode(),
        body,
    )


def stream(*extra, texts=("one two", " three"), usage=3):
    """A streamed answer in OpenAI's format with these raw JSON objects as further events."""
    events = [json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    events += [
        json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        *extra,
        json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": usage}}),
        "[DONE]",
    ]
    return b"".join(b"data: %s\n\n" % event.encode() for event in events)


def plain(*fields, text="one two three", usage=3):
    """A plain answer with these raw `"name": value` beside its own."""
    own = json.dumps(
        {
            "choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": usage},
        }
    )
    return (own[:-1] + "".join(", " + each for each in fields) + "}").encode()


@contextlib.contextmanager
def canned(raw, **entry):
    """A server whose every answer is these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "chat").write_bytes(raw)
        with ReplayServer(
            [dict({"method": "POST", "path": "/v1/chat/completions", "file": "chat"}, **entry)],
            folder,
        ) as server:
            yield server


def replayed(name):
    """A server that gives a recorded JSON body of the cases as every answer."""
    return canned(http((CASES / name).read_bytes()))


def measure_canned(baseline, candidate, *flags, **options):
    """Measure two servers of canned answers."""
    with canned(baseline) as a, canned(candidate) as b:
        return measure(
            a,
            b,
            "--model",
            "m",
            "--warmup",
            "0",
            *flags,
            **dict({"prompts": ["one", "two"]}, **options),
        )


# ---- the program as users start it ----


def strict(data):
    """The JSON lines of a notebook or run file; ValueError for NaN and Infinity."""
    return [
        json.loads(line, parse_constant=float.fromhex)
        for line in data.splitlines()
        if line.startswith(b"{")
    ]


class Program:
    """The program in a process of its own, in a temporary folder with these files."""

    def __init__(self, files=None):
        self._folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self._folder.name)
        self.given = dict(files or {})
        for name, data in self.given.items():
            (self.path / name).write_bytes(data)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._folder.cleanup()

    def start(self, *words, closing="", **options):
        """A process of it; `closing` is shell for its descriptors, as in ">&-"."""
        command = [sys.executable, str(PROGRAM), *map(str, words)]
        if closing:
            command = ["/bin/sh", "-c", 'exec "$@" ' + closing, "sh", *command]
        options = dict({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, **options)
        return subprocess.Popen(command, cwd=self.path, **options)

    def run(self, *words, **options):
        """Its result, once it has ended; `options` as for `start`."""
        with self.start(*words, **options) as process:
            try:
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def records(self, name="labbook.md"):
        book = self.path / name
        if not book.exists():
            return []
        data = book.read_bytes()
        assert_written_conforms(self.given, {name: data})
        return strict(data)


# ---- run files with planted figures ----


@functools.cache
def real_lines():
    """One line of each kind from a real run file: what planted runs are made of."""
    with FakeServer("plain") as server:
        saved = measure(server, None, "--save-run", "run.jsonl", prompts=["one"]).files["run.jsonl"]
    return {line["kind"]: line for line in map(json.loads, saved.splitlines())}


def answer(tokens, seconds, drafted=None, accepted=None, content="the same text", **fields):
    """A planted answer whose whole time is decode time by the server's clock; `fields` go over those of a reading."""
    timings = {"predicted_n": tokens, "predicted_ms": 1000 * seconds}
    if drafted is not None:
        timings.update(draft_n=drafted, draft_n_accepted=accepted)
    return dict(
        {
            "content": content,
            "latency_s": seconds,
            "ttft_s": None,
            "decode_s": seconds,
            "decode_tokens": tokens - 1,
            "decode_source": "timings",
            "completion_tokens": tokens,
            "statistics": {"timings": timings},
            "timings": timings,
        },
        **fields,
    )


def saved_run(arm, answers, workloads=None, request=(), end=True, **conditions):
    """A run file of one arm: answers[i] lists the repeats of prompt i, each an `answer` or the text of an error.

    Arms of one test are of one run and of servers of their own, if `conditions` does not say otherwise.
    """
    real = real_lines()
    conditions = dict({"run_id": "planted", "host_number": zlib.crc32(arm.encode())}, **conditions)
    workloads = workloads or ["work"] * len(answers)
    prompts = [
        {"id": "p%d" % i, "workload": name, "sha256": "%016x" % i}
        for i, name in enumerate(workloads)
    ]
    header = dict(
        real["run"],
        arm=arm,
        prompts=prompts,
        repeats=max(map(len, answers)),
        findings=[],
        **conditions,
    )
    header["request"] = {**header["request"], "max_tokens": 100_000, **dict(request)}
    lines = [header]
    for repeat in range(header["repeats"]):
        for i, repeats in enumerate(answers):
            if repeat < len(repeats):
                fields = repeats[repeat]
                fields = {"error": fields} if isinstance(fields, str) else dict(fields, error=None)
                lines.append(
                    dict(
                        real["reading"],
                        arm=arm,
                        prompt_index=i,
                        prompt_id="p%d" % i,
                        workload=workloads[i],
                        repeat=repeat,
                        place=0,
                        **fields,
                    )
                )
    lines += [dict(real["end"], arm=arm)] if end else []
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def compare(*runs, flags=()):
    """`compare` on run files given as {name: bytes} or (name, bytes) pairs, the baseline first; returns the Outcome."""
    return run_main("compare", *(name for name, _ in runs), *flags, files=dict(runs))


DRAFTS = {"drafted": 400, "accepted": 99}


def speeds(ratio, spread=0.01, prompts=12, seed=0, base=20.0, **drafts):
    """One repeat of each prompt, `ratio` times as fast as `base`, scattered."""
    chance = random.Random(seed)
    return [
        [answer(200, 200 / (base * ratio * math.exp(chance.gauss(0, spread))), **drafts)]
        for _ in range(prompts)
    ]


def same_speed(arm, text=TEXT, seconds=1.0, **fields):
    """A run file of 4 prompts with planted, equal times."""
    return saved_run(
        arm, [[answer(100, seconds * (1 + 0.001 * i), content=text, **fields)] for i in range(4)]
    )


@functools.lru_cache(None)
def slow_pair():
    """Run files whose comparison does not pay: the candidate takes twice as long."""
    return {
        "plain.jsonl": same_speed("baseline"),
        "slow.jsonl": same_speed("slow", seconds=2.0, drafted=200, accepted=20),
    }


@functools.lru_cache(None)
def faster_pair():
    """Run files, as (name, bytes), whose comparison pays: the candidate is half as fast again."""
    return (
        ("plain.jsonl", saved_run("baseline", speeds(1.0))),
        ("draft.jsonl", saved_run("speculative", speeds(1.5, **DRAFTS))),
    )


# ---- servers that misbehave ----

TIMEOUT = 0.2  # where it is to be exceeded; elsewhere a busy machine gets
PATIENCE = 30.0
BOUND = ms.MAX_BODY_BYTES  # as it is; the tests lower it, for speed
DEADLINE = ("no answer within 0.2 s", "--timeout")
REFUSED = http(b'{"error": "no such field"}', status="400 Bad Request")


class FaultyServers(unittest.TestCase):
    """Servers that misbehave: one clear line that names the server and what to do; never a traceback, a hang or a number."""

    def setUp(self):
        self.slept = []
        for patch in (
            mock.patch.object(ms.time, "sleep", self.slept.append),
            mock.patch.object(ms, "MAX_BODY_BYTES", 4 << 20),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def check_line(self, text, server, words):
        """One line holds all the words, and it names the server."""
        for line in text.splitlines():
            if all(word in line for word in words) and server.root in line:
                self.assertLess(len(line), 600)
                return
        self.fail(f"no line names {server.root} and says {words}:\n{text[-500:]}")

    def check_clean(self, outcome):
        for text in (outcome.out, outcome.err):
            self.assertNotIn("Traceback", text)
            self.assertNotRegex(
                text, r"\b(?:urllib|http\.client|socket\.|Errno|Exception|object at 0x)"
            )
        self.assertNotRegex(outcome.out, r"(?i)\bnan\b|\binf\b")

    def check_no_number(self, record):
        for name in ("output_tokens_per_s", "decode_tokens_per_s"):
            self.assertIsNone(record[name], name)
        for name in ("latency_s", "ttft_s"):
            self.assertFalse(any((record[name] or {}).values()), name)
        self.assertFalse(record["output_tokens"])


# ---- benchmarks ----


class Bounds:
    """The bounds of a benchmark: each is printed with the figure seen, and those that broke decide the exit code."""

    def __init__(self):
        self.broken = []

    def hold(self, what, seen, words, well):
        print(
            "%s %s: %.4g (bound: %s)" % ("ok  " if well else "FAIL", what, seen, words), flush=True
        )
        if not well:
            self.broken.append(what)

    def most(self, what, seen, limit):
        self.hold(what, seen, "at most %g" % limit, seen <= limit)

    def least(self, what, seen, limit):
        self.hold(what, seen, "at least %g" % limit, seen >= limit)

    def exit_code(self):
        print(
            "%d bounds broken%s"
            % (len(self.broken), "".join("\n  " + what for what in self.broken))
        )
        return 1 if self.broken else 0
