"""What several test files share: running the program, in this process, in a folder of its own."""

import contextlib
import io
import json
import os
import pathlib
import tempfile
from typing import NamedTuple
from unittest import mock

import measure_speculative

PROGRAM = pathlib.Path(measure_speculative.__file__).resolve()


class Outcome(NamedTuple):
    code: int
    out: str
    err: str
    records: list       # the JSON lines of labbook.md, in order
    files: dict         # name: bytes of every file in the folder afterwards

    def comparison(self):
        """The only comparison record."""
        (record,) = [r for r in self.records if r["kind"] == "comparison"]
        return record

    def endpoint(self, arm="baseline"):
        """The only endpoint record of an arm."""
        (record,) = [r for r in self.records if r["kind"] == "endpoint" and r["label"].endswith("/" + arm)]
        return record


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_main(*argv, files=None, prompts=None, env=None, terminal=False):
    """main(argv) in a temporary folder that holds `files` {name: text or bytes}; `prompts` is a list of texts that
    becomes a prompt file. No waiting for metrics to settle."""
    argv = [str(word) for word in argv]
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folder = pathlib.Path(folder)
        files = dict(files or {})
        if prompts is not None:
            files["prompts.json"] = json.dumps([{"prompt": text} for text in prompts])
            argv += ["--prompts", "prompts.json"]
        for name, data in files.items():
            (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
        out, err = io.StringIO(), Terminal() if terminal else io.StringIO()
        stack.enter_context(mock.patch.object(measure_speculative, "SETTLE_PAUSE_S", 0.0))
        stack.enter_context(mock.patch.dict(os.environ, env or {}))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            os.chdir(folder)
            code = measure_speculative.main(argv)
        finally:
            os.chdir(here)
        left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        lines = left.get("labbook.md", b"").splitlines()
        return Outcome(code, out.getvalue(), err.getvalue(), [json.loads(x) for x in lines if x.startswith(b"{")], left)


def measure(baseline, candidate, *flags, **options):
    """Measure two fake servers (either may be None) and return the Outcome."""
    urls = ["--baseline-url", baseline.url] if baseline else []
    urls += ["--speculative-url", candidate.url] if candidate else []
    return run_main(*urls, *flags, **options)
