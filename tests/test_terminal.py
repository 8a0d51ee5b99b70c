"""The terminal: what is printed, and pipes, full disks, terminals that close, names and locales of any kind."""

import contextlib
import json
import os
import sys
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, FakeServer, Speculation
from tests.support import (
    ALARMS,
    CHANGED,
    NEVER_PAYS,
    PROMPTS,
    TEXT,
    Program,
    compare,
    measure,
    no_windows,
    saved_run,
    slow_pair,
    urls_of,
)
from tests.test_texts import replayed


class ProgressLine(unittest.TestCase):
    def test_progress_is_one_rewritten_line_on_a_terminal_only(self):
        with FakeServer() as a, FakeServer() as b:
            on, off = (
                measure(a, b, prompts=PROMPTS, terminal=terminal) for terminal in (True, False)
            )
        self.assertIn("\r", on.err)
        self.assertIn("8/8", on.err)
        self.assertNotIn("\n", on.err)
        self.assertTrue(on.err.endswith("\r"), "the line is wiped at the end")
        self.assertEqual(off.err, "")

    def test_a_terminal_that_is_gone_costs_no_reading(self):
        gone = mock.Mock(
            write=mock.Mock(side_effect=OSError(5, "Input/output error")), isatty=lambda: True
        )
        with mock.patch.object(sys, "stderr", gone):
            recorder = ms.Recorder(print, show=True)
            recorder.begin((), 1)
            recorder.add(ms.Reading("baseline", 0, "p", "w", 0, 0))
            recorder.clear_progress()
        self.assertEqual(len(recorder.readings), 1)
        self.assertTrue(gone.write.called)


class QuietRuns(unittest.TestCase):
    def test_quiet_prints_nothing_at_all(self):
        with (
            FakeServer(busy=(1, 1), usage=False, metrics=False) as a,
            FakeServer("llama.cpp", faults=["503-retry-after"]) as b,
        ):
            outcome = measure(a, b, "--quiet", prompts=PROMPTS[:2], terminal=True)
        self.assertEqual((outcome.code, outcome.out, outcome.err), (0, "", ""))
        self.assertEqual(len(outcome.records), 3)

    def test_quiet_prints_nothing_where_nothing_is_wrong(self):
        with (
            FakeServer("vllm", words=3) as base,
            FakeServer("vllm", words=3, speculation=Speculation(2, (1,))) as drafting,
        ):
            outcome = measure(base, drafting, "--quiet", prompts=["x", "y"])
        self.assertEqual(
            (outcome.code, outcome.out, outcome.err, len(outcome.records)), (0, "", "", 3)
        )


@no_windows
class HelpAndUsage(unittest.TestCase):
    """`--help` and wrong flags, whatever became of the standard streams."""

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_help_that_cannot_be_written_is_said(self):
        for words in (("--help",), ("--version",), ("compare", "--help"), ("report", "--version")):
            for closing in (">/dev/full", ">&-"):
                with self.subTest(words=words, closing=closing), Program() as program:
                    done = program.run(*words, closing=closing)
                    if closing == ">&-" and done.returncode == 0:
                        continue  # Python has put something in its place
                    self.assertEqual(
                        (done.returncode, done.stderr.count(b"\n")), (1, 1), done.stderr
                    )
                    self.assertIn(b"cannot write to standard output", done.stderr)

    def test_a_wrong_flag_is_exit_2_whatever_became_of_stderr(self):
        closings = ["2>&-"] + ["2>/dev/full"] * os.path.exists("/dev/full")
        for words in (("--bog\u00fcs",), ("--max-tokens", "\u00fc")):
            for closing in closings:
                with self.subTest(words=words, closing=closing), Program() as program:
                    self.assertEqual(program.run(*words, closing=closing).returncode, 2)


@no_windows
class ClosedStreams(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.book = compare(*slow_pair().items()).files["labbook.md"]

    def test_closed_standard_output_and_error_stop_no_command(self):
        for words in (
            ("compare", "plain.jsonl", "slow.jsonl"),
            ("report", "book.md"),
            ("break-even",),
        ):
            for closing in (">&-", ">&- 2>&-")[words[0] == "break-even" :]:
                with (
                    self.subTest(words[0], closing=closing),
                    Program(dict(slow_pair(), **{"book.md": self.book})) as program,
                ):
                    done = program.run(*words, closing=closing)
                    self.assertEqual((done.returncode, done.stdout, done.stderr), (0, b"", b""))
                    self.assertEqual(len(program.records()), 3 if words[0] == "compare" else 0)

    def test_a_measurement_without_any_stream_is_recorded(self):
        with (
            FakeServer("plain") as a,
            FakeServer("plain") as b,
            Program({"p.txt": b"one\ntwo"}) as program,
        ):
            done = program.run(
                *urls_of(a, b),
                "--prompts",
                "p.txt",
                closing=">&- 2>&-",
            )
            self.assertEqual((done.returncode, len(program.records())), (0, 3))

    def test_closed_streams_keep_the_exit_code_of_an_alarm(self):
        with Program(slow_pair()) as program:
            self.assertEqual(
                program.run(
                    "compare", "plain.jsonl", "slow.jsonl", *NEVER_PAYS, closing=">&- 2>&-"
                ).returncode,
                3,
            )


@no_windows
class StreamsThatTakeNothing(unittest.TestCase):
    def compared(self, stdout, *flags, files=None):
        with Program(files or slow_pair()) as program:
            done = program.run("compare", *(files or slow_pair()), *flags, stdout=stdout)
            err = done.stderr.decode("ascii")
            self.assertNotIn("Traceback", err)
            self.assertNotIn("Exception ignored", err)
            return done.returncode, err, program.records()

    @contextlib.contextmanager
    def closed_pipe(self):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            yield writer
        finally:
            os.close(writer)

    def test_a_reader_that_has_gone_changes_neither_alarms_nor_exit_code(self):
        dead = dict(slow_pair(), **{"slow.jsonl": saved_run("slow", [["refused"]] * 4)})
        for files, flags, code, words in (
            (None, (), 0, ""),
            (None, NEVER_PAYS, 3, "SLOWER "),
            (dead, (), 1, "no request completed"),
        ):
            with self.subTest(code), self.closed_pipe() as pipe:
                seen, err, records = self.compared(pipe, *flags, files=files)
                self.assertEqual(seen, code, err)
                self.assertIn(words, err)
                self.assertGreaterEqual(len(records), 2)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_a_full_device_is_said_beside_the_alarms(self):
        with open("/dev/full", "wb") as full:
            code, err, records = self.compared(full, *NEVER_PAYS)
        self.assertEqual((code, len(records)), (1, 3))
        self.assertIn("SLOWER ", err)
        self.assertIn("cannot write to standard output", err)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_records_that_find_no_place_at_all_are_said_to_be_lost(self):
        with open("/dev/full", "wb") as full:
            code, err, _ = self.compared(full, "--labbook", "/dev/full")
        self.assertEqual(code, 1)
        self.assertIn("cannot append to /dev/full", err)
        self.assertIn("cannot write to standard output", err)


class Locales(unittest.TestCase):
    def measured_under(self, env):
        """What the program did in this environment: its result, the notebook, and the first prompt that was asked."""
        with (
            Program() as program,
            replayed("E04/baseline.json") as a,
            replayed("E04/spec.json") as b,
        ):
            done = program.run(
                *urls_of(a, b),
                "--model",
                "m",
                "--warmup",
                "0",
                "--prompts",
                CASES / "E04" / "prompts.txt",
                "--divergence-report",
                "bug.md",
                "--include-prompts",
                env=env,
            )
            asked = a.chats[0]["body"]["messages"][0]["content"]
            return done, (program.path / "labbook.md").read_bytes(), asked

    def test_e04_without_a_locale_the_result_is_the_same_and_all_output_ascii(self):
        words = json.loads((CASES / "E04" / "env.json").read_text())["env"].split()[2:]
        bare = dict(word.split("=", 1) for word in words)
        utf8 = dict(os.environ, PYTHONUTF8="1", PYTHONIOENCODING="utf-8")
        if os.name == "nt":
            bare["SYSTEMROOT"] = os.environ.get("SYSTEMROOT", "")
        done, book, asked = self.measured_under(bare)
        self.assertEqual(
            (done.returncode, asked), (0, "Wie gro\u00df ist ein Bakterium?"), done.stderr
        )
        for stream in (done.stdout, done.stderr, book):
            stream.decode("ascii")
            self.assertNotIn(b"Traceback", stream)
        self.assertIn(b"\\u2192 ok", done.stdout)
        found = json.loads(book.splitlines()[-1])["text_comparison"]
        (first,) = found["divergences"]
        self.assertEqual(
            (first["first_difference_at_char"], first["first_difference_at_byte"]), (12, 15)
        )
        self.assertEqual(first["baseline_tail"], "\u2192 ok \U0001f389")
        _, other, _ = self.measured_under(utf8)
        self.assertEqual(json.loads(other.splitlines()[-1])["text_comparison"], found)


class OddNames(unittest.TestCase):
    """Half a surrogate pair, from a command line or from JSON, is no reason to lose a report."""

    def measured(self, *flags, **options):
        with (
            FakeServer("llama.cpp", answers={"one": TEXT}) as a,
            FakeServer(
                "llama.cpp", answers={"one": CHANGED}, speculation=Speculation(), **options
            ) as b,
        ):
            return measure(a, b, *flags, "--divergence-report", "d.md", *ALARMS, prompts=["one"])

    def test_the_divergence_report_and_the_alarms_come_whatever_the_engine_is_called(self):
        models = (200, "application/json", b'{"data": [{"id": "\\ud800"}]}')
        for flags, pages in (
            (("--engine", "\udcff"), {}),
            ((), {"/v1/models": models}),
            ((), {"/props": (200, "application/json", b'{"build_info": "\\udfff"}')}),
        ):
            with self.subTest(flags=flags, pages=list(pages)):
                outcome = self.measured(*flags, pages=pages)
                self.assertEqual((outcome.code, len(outcome.records)), (3, 3), outcome.err)
                self.assertIn("CHANGED TEXT", outcome.err)
                self.assertIn("FIVE", outcome.files["d.md"].decode("utf-8"))

    def test_a_router_that_wants_such_a_model_name_ends_nothing(self):
        pages = {
            "/v1/models": (200, "application/json", b'{"data": [{"id": "\\ud800"}]}'),
            "/metrics": (
                400,
                "application/json",
                b'{"error": {"message": "model name is missing"}}',
            ),
        }
        self.assertEqual(len(self.measured(pages=pages).records), 3)


if __name__ == "__main__":
    unittest.main()
