"""The lab notebook, and files and locks at large: nothing that was measured is lost, torn, mixed or written over."""

import builtins
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, FakeServer
from tests.support import (
    CHANGED,
    PROGRAM,
    at_most,
    compare,
    measure,
    no_windows,
    run_main,
    slow_pair,
    strict,
    urls_of,
)

E02 = CASES / "E02"
WORKERS, APPENDS, VICTIMS = 8, 200, 6

WORKER = """
import os, sys, time
import measure_speculative as ms
name, book, go = sys.argv[1:]
for n in range(%d):
    while n == %d and not os.path.exists(go):       # the second half comes when the victims are dead
        time.sleep(0.005)
    ms.append_records(book, [{"worker": name, "n": n, "text": name * 300}])
""" % (APPENDS, APPENDS // 2)


# Dies with half its bytes in the file and the lock in its hand, as under kill -9.
VICTIM = """
import io, os, signal, sys
import measure_speculative as ms
class Torn(io.FileIO):
    def write(self, data):
        super().write(data[:len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL) if hasattr(signal, "SIGKILL") else os._exit(9)
name, book = sys.argv[1:]
for n in range(3):
    ms.append_records(book, [{"victim": name, "n": n}])
ms.open = lambda path, mode, **options: Torn(path, mode.replace("b", ""))
ms.append_records(book, [{"victim": name, "n": 3, "text": name * 500}])
"""


def script(code, *words):
    env = dict(os.environ, PYTHONPATH=str(PROGRAM.parent))
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], env=env)


class NotebookInAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.book = self.folder / "labbook.md"

    def copy(self, name):
        shutil.copyfile(E02 / name, self.book)
        return self.book.read_bytes()

    def read(self):
        """(records, warnings)"""
        warnings = []
        lines = ms.read_json_lines(str(self.book), warnings.append)
        return [record for _, record in lines], warnings


class Appending(NotebookInAFolder):
    def test_e02_a_torn_last_line_is_ended_and_kept(self):
        old = self.copy("torn.jsonl")
        ms.append_records(str(self.book), [{"new": 1}])
        self.assertFalse(old.endswith(b"\n"))
        self.assertEqual(self.book.read_bytes(), old + b'\n{"new": 1}\n')
        self.assertEqual([r.get("new") for r in self.read()[0]], [None, 1])

    def test_e02_a_whole_last_line_without_its_end_is_kept_whole(self):
        self.copy("no_newline.jsonl")
        ms.append_records(str(self.book), [{"new": 1}])
        records, warnings = self.read()
        self.assertEqual((len(records), warnings), (3, []))

    def test_prose_and_old_bytes_stay_and_records_follow_in_order(self):
        old = b"# My notes\r\n\r\nTuesday: new card.\n\xff\n"
        self.book.write_bytes(old)
        ms.append_records(str(self.book), [{"n": 1}, {"n": 2}])
        ms.append_records(str(self.book), [{"n": 3}])
        self.assertEqual(self.book.read_bytes(), old + b'{"n": 1}\n{"n": 2}\n{"n": 3}\n')

    def test_a_new_notebook_is_made(self):
        ms.append_records(str(self.book), [{"n": "\u00e9\U0001f389\ud83c\n"}])
        self.assertEqual(self.book.read_bytes(), b'{"n": "\\u00e9\\ud83c\\udf89\\ud83c\\n"}\n')

    def test_records_hold_no_nan(self):
        with self.assertRaises(ValueError):
            ms.append_records(str(self.book), [{"n": 1}, {"x": float("nan")}])
        self.assertFalse(self.book.exists() and self.book.read_bytes())

    def test_all_records_go_out_in_one_write(self):
        sizes, real = [], builtins.open

        def watched(*args, **options):
            file = real(*args, **options)
            write = file.write
            counted = mock.Mock(
                wraps=file, write=lambda data: (sizes.append(len(data)), write(data))[1]
            )
            counted.__enter__, counted.__exit__ = lambda _: counted, lambda _, *exc: file.close()
            return counted

        with mock.patch.object(ms, "open", watched, create=True):
            ms.append_records(str(self.book), [{"n": n, "text": "x" * 5000} for n in range(9)])
        self.assertEqual(sizes, [self.book.stat().st_size])

    def test_eight_jobs_at_once_lose_tear_and_mix_nothing_while_others_are_killed(self):
        self.book.write_bytes(b"# Notes")
        go = self.folder / "go"
        names = "abcdefgh"[:WORKERS]
        workers = [script(WORKER, name, self.book, go) for name in names]
        victims = [script(VICTIM, "vwxyzu"[i], self.book) for i in range(VICTIMS)]
        try:
            self.assertFalse(
                [code for code in (victim.wait(60) for victim in victims) if code == 0]
            )
            go.write_bytes(b"")
            self.assertEqual([worker.wait(60) for worker in workers], [0] * WORKERS)
        finally:
            for process in workers + victims:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        data = self.book.read_bytes()
        self.assertTrue(data.endswith(b"\n"))
        records, warnings = self.read()
        kept = [r for r in records if "worker" in r]
        for name in names:
            mine = [r for r in kept if r["worker"] == name]
            self.assertEqual([r["n"] for r in mine], list(range(APPENDS)))
            self.assertTrue(all(r["text"] == name * 300 for r in mine))
        self.assertEqual(len(kept), WORKERS * APPENDS)
        self.assertEqual(len([r for r in records if "victim" in r]), 3 * VICTIMS)
        self.assertEqual(len(warnings), VICTIMS)  # each torn line stands alone and is named
        self.assertEqual(data.count(b"\n"), 1 + len(records) + VICTIMS)


class Reading(NotebookInAFolder):
    def test_e02_glued_lines_are_reported_and_a_good_one_is_kept(self):
        self.copy("glued.jsonl")
        records, warnings = self.read()
        self.assertEqual(records[0]["tok_s"], 40.0)
        self.assertRegex(" ".join(warnings), r"labbook\.md:2\b")

    def test_e02_a_number_cut_short_is_no_value(self):
        self.copy("digits_cut.jsonl")
        records, warnings = self.read()
        self.assertEqual([r["tok_s"] for r in records], [40.0])
        self.assertRegex(warnings[0], r"labbook\.md:2\b")

    def test_prose_is_skipped_in_silence_and_damaged_lines_are_named(self):
        self.book.write_bytes(
            b'# Notes\n\n{"n": 1}\n- a list\n{"n": 2\n  {"n": 3}\r\n{"n": NaN}\n{"n": "\xff\n\n{"n": 4}'
        )
        records, warnings = self.read()
        self.assertEqual([r["n"] for r in records], [1, 3, 4])
        self.assertEqual([w.split(":")[-2] for w in warnings], ["5", "7", "8"])

    def test_a_line_of_zero_bytes_from_a_power_cut_is_named(self):
        self.book.write_bytes(b'{"n": 1}\n' + b"\0" * 50 + b'{"n": 2}\n{"n": 3}\n')
        records, warnings = self.read()
        self.assertIn(3, [r["n"] for r in records])
        self.assertRegex(" ".join(warnings), r"labbook\.md:2\b")

    def test_a_byte_order_mark_does_not_hide_the_first_record(self):
        self.book.write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n')
        self.assertEqual([r["n"] for r in self.read()[0]], [1, 2])

    def test_report_names_damaged_lines(self):
        outcome = run_main("report", "book.md", files={"book.md": '# x\n{"lab": 1\n'})
        self.assertEqual(outcome.code, 0)
        self.assertIn("book.md:2", outcome.err)

    def test_the_regression_alarm_names_damaged_lines_too(self):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(
                a, b, "--fail-on", "regression", prompts=["p"], files={"labbook.md": '{"lab": \n'}
            )
        self.assertIn("labbook.md:1", outcome.err)


class NotebookRefused(unittest.TestCase):
    def refused(self, path, files=None):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(a, b, "--labbook", path, prompts=["p"], files=files)
            self.assertEqual((a.requests, b.requests), ([], []))
        self.assertEqual((outcome.code, outcome.out), (2, ""))
        self.assertEqual(len(outcome.err.splitlines()), 1)
        self.assertIn(path, outcome.err)
        return outcome

    def test_a_notebook_in_a_missing_folder_is_refused_before_a_request(self):
        self.refused("no/such/folder/labbook.md")

    def test_a_folder_in_place_of_the_notebook_is_refused_before_a_request(self):
        self.refused(".")

    def test_a_read_only_notebook_is_refused_before_a_request(self):
        """Denied by hand: a test run as root could write to it."""
        real = builtins.open

        def denied(path, mode="r", *args, **options):
            if str(path) == "book.md" and ("a" in mode or "w" in mode or "+" in mode):
                raise PermissionError(13, "Permission denied", path)
            return real(path, mode, *args, **options)

        with mock.patch.object(builtins, "open", denied):
            outcome = self.refused("book.md")
        self.assertIn("Permission denied", outcome.err)

    def test_compare_refuses_a_notebook_that_cannot_be_written(self):
        with FakeServer() as a, FakeServer() as b:
            saved = measure(a, b, "--save-run", "run.jsonl", prompts=["p"]).files["run.jsonl"]
        outcome = run_main(
            "compare", "run.jsonl", "--labbook", "no/book.md", files={"run.jsonl": saved}
        )
        self.assertEqual((outcome.code, outcome.out), (2, ""))

    def test_checking_a_notebook_leaves_an_old_one_as_it_is(self):
        with FakeServer() as a:
            outcome = run_main(
                "--baseline-url",
                a.url,
                "--model",
                "wrong",
                "--prompts",
                "none.txt",
                files={"labbook.md": "# Notes"},
            )
        self.assertEqual((outcome.code, outcome.files["labbook.md"]), (2, b"# Notes"))

    def test_checking_a_notebook_never_deletes_what_another_job_wrote(self):
        """Another job starts the notebook while this one checks that it could."""
        real = builtins.open
        with tempfile.TemporaryDirectory() as folder:
            book = os.path.join(folder, "labbook.md")

            def slow(path, *args, **options):
                file = real(path, *args, **options)
                with real(book, "ab") as other:
                    other.write(b'{"other": 1}\n')
                return file

            with mock.patch.object(builtins, "open", slow):
                ms.check_appendable(book)
            self.assertTrue(os.path.exists(book), "the other job's record is gone")
            self.assertIn(b'{"other": 1}', pathlib.Path(book).read_bytes())

    def test_an_unwritable_labbook_is_named_with_the_way_out(self):
        with tempfile.TemporaryDirectory() as folder:
            book = pathlib.Path(folder) / "labbook.md"
            book.write_text("# notes\n", "utf-8")
            book.chmod(0o444)
            refused = mock.patch(
                "builtins.open", side_effect=PermissionError(13, "Permission denied")
            )
            with (
                (
                    refused
                    if os.access(book, os.W_OK)
                    else mock.patch.object(ms, "SETTLE_PAUSE_S", 0.0)
                ),
                self.assertRaises(ms.UsageError) as caught,
            ):
                ms.check_appendable(str(book))
            self.assertIn("labbook.md", str(caught.exception))
            self.assertIn("--labbook", str(caught.exception))
            self.assertEqual(book.read_text("utf-8"), "# notes\n")


class NotebookThatCannotBeWritten(unittest.TestCase):
    def assert_printed(self, code, out, err, count=3):
        printed = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        self.assertEqual(code, 1)
        self.assertEqual(len(printed), count)
        self.assertEqual([r["kind"] for r in printed][-1], "comparison")
        self.assertRegex(err, "(?i)cannot append to .*standard output")
        self.assertNotIn("Traceback", err)

    def test_records_that_cannot_be_appended_are_printed_and_that_is_said(self):
        for flags in ((), ("--quiet",)):
            with (
                self.subTest(flags),
                FakeServer() as a,
                FakeServer() as b,
                mock.patch.object(
                    ms, "append_records", side_effect=OSError(28, "No space left on device")
                ),
            ):
                outcome = measure(a, b, *flags, prompts=["p"])
                self.assert_printed(outcome.code, outcome.out, outcome.err)
                self.assertIn("No space left on device", outcome.err)

    def test_a_write_that_fails_half_way_is_taken_back(self):
        """A real limit on the size of a file, 200 bytes above what is there."""
        try:
            import resource  # noqa: F401  (not on Windows)
        except ImportError:
            self.skipTest("no resource limits here")
        code = (
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); import measure_speculative as ms; "
            "ms.SETTLE_PAUSE_S = 0; resource.setrlimit(resource.RLIMIT_FSIZE, (215, 215)); sys.exit(ms.main(sys.argv[1:]))"
        )
        with tempfile.TemporaryDirectory() as folder, FakeServer() as a, FakeServer() as b:
            book = pathlib.Path(folder) / "labbook.md"
            book.write_bytes(b'# Notes\n{"n": 1')
            done = subprocess.run(
                [sys.executable, "-c", code, *urls_of(a, b)],
                cwd=folder,
                env=dict(os.environ, PYTHONPATH=str(PROGRAM.parent), PYTHONDONTWRITEBYTECODE="1"),
                capture_output=True,
                timeout=60,
                encoding="ascii",
            )
            self.assert_printed(done.returncode, done.stdout, done.stderr)
            self.assertEqual(book.read_bytes(), b'# Notes\n{"n": 1')

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_records_for_a_full_device_are_printed(self):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(a, b, "--labbook", "/dev/full", prompts=["p"])
        self.assert_printed(outcome.code, outcome.out, outcome.err)
        self.assertIn("No space left", outcome.err)

    def test_the_null_device_is_a_notebook_for_those_who_want_none(self):
        with FakeServer() as a, FakeServer() as b:
            self.assertEqual(measure(a, b, "--labbook", os.devnull, prompts=["p"]).code, 0)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_records_that_find_no_room_are_handed_back_to_be_printed(self):
        lines, trouble, stopped = ms.append_or_show("/dev/full", [{"label": "x"}])
        self.assertEqual((lines, stopped), (['{"label": "x"}'], False))
        self.assertIn("/dev/full: No space left", trouble)


class FilesThatCoincide(unittest.TestCase):
    """No file that is read is ever written to, whatever the flags name."""

    PROMPTS = {"prompts.txt": b"one\ntwo\n", "old.md": b'# Notes\n{"n": 1}\n'}

    def refused(self, outcome, files, *parts):
        self.assertEqual((outcome.code, outcome.out), (2, ""), outcome.err)
        self.assertEqual(len(outcome.err.splitlines()), 1)
        self.assertEqual(outcome.files, files)
        for part in parts:
            self.assertIn(part, outcome.err)

    def test_an_output_of_a_measurement_that_is_another_file_is_refused_before_a_request(self):
        book, report, run = "--labbook", "--divergence-report", "--save-run"
        for flags, named in (
            ((book, "old.md", report, "old.md"), (book, report)),
            ((book, "old.md", report, "./old.md"), (book, report)),
            ((book, "new", run, "new"), (book, run)),
            ((report, "new", run, "new"), (report, run)),
            ((report, "prompts.txt"), (report,)),
            ((book, "prompts.txt"), (book,)),
            ((run, "prompts.txt"), (run,)),
        ):
            with self.subTest(flags), FakeServer("plain") as a:
                outcome = measure(a, None, *flags, "--prompts", "prompts.txt", files=self.PROMPTS)
                self.refused(outcome, self.PROMPTS, *named)
                self.assertEqual(a.requests, [])

    def test_a_report_is_written_over_an_earlier_report_only(self):
        report = ("--divergence-report", "r.md")
        with FakeServer("plain", words=3) as a, FakeServer("plain", words=3) as b:
            for text in (b"", b"x", b'# Notes\n{"n": 1}\n', b"\n# No text changed with spec", b"#"):
                del a.requests[:]
                outcome = measure(a, b, *report, prompts=["one"], files={"r.md": text})
                with self.subTest(text):
                    self.assertEqual(outcome.code, 2 if text else 0, outcome.err)
                    self.assertEqual(bool(a.requests), not text)
                    self.assertEqual(outcome.files["r.md"] == text, bool(text))
            again = {"r.md": measure(a, b, *report, prompts=["one"]).files["r.md"] + b"mine"}
            outcome = measure(a, b, *report, prompts=["one"], files=again)
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertNotIn(b"mine", outcome.files["r.md"])
        with FakeServer("plain", answers=lambda p, n: CHANGED) as b, FakeServer("plain") as a:
            again = {"r.md": measure(a, b, *report, prompts=["one"]).files["r.md"]}
            self.assertEqual(measure(a, b, *report, prompts=["one"], files=again).code, 0)

    @no_windows
    def test_hard_links_of_one_file_are_one_file(self):
        with tempfile.TemporaryDirectory() as folder, FakeServer("plain") as a:
            path = pathlib.Path(folder)
            for data in (b"", b"# Notes\n"):
                (path / "book.md").write_bytes(data)
                os.link(path / "book.md", path / "link.md")
                outcome = measure(
                    a, None, "--labbook", path / "book.md", "--divergence-report", path / "link.md"
                )
                self.assertEqual((outcome.code, a.requests), (2, []), outcome.err)
                self.assertEqual((path / "book.md").read_bytes(), data)
                (path / "link.md").unlink()

    @no_windows
    def test_a_link_and_a_file_in_a_folder_of_prompts_are_seen_through(self):
        with tempfile.TemporaryDirectory() as folder, FakeServer("plain") as a:
            path = pathlib.Path(folder)
            (path / "p.txt").write_bytes(b"one\n")
            (path / "link.md").symlink_to(path / "p.txt")
            for output in (path / "link.md", path / "p.txt"):
                outcome = measure(a, None, "--divergence-report", output, "--prompts", folder)
                self.assertEqual((outcome.code, a.requests), (2, []), outcome.err)
                self.assertEqual((path / "p.txt").read_bytes(), b"one\n")

    def test_compare_never_writes_into_a_run_file(self):
        for flag in ("--divergence-report", "--labbook"):
            for name in slow_pair():
                with self.subTest(flag, name=name):
                    self.refused(
                        compare(*slow_pair().items(), flags=(flag, name)), slow_pair(), name
                    )

    def test_records_never_go_into_any_run_file(self):
        files = dict(slow_pair(), **{"third.jsonl": slow_pair()["plain.jsonl"]})
        outcome = run_main(
            "compare", "plain.jsonl", "slow.jsonl", "--labbook", "third.jsonl", files=files
        )
        self.refused(outcome, files, "third.jsonl")

    def test_nobody_is_told_to_remove_what_stands_in_the_way(self):
        for path in ("old.md", os.devnull):
            with self.subTest(path), FakeServer("plain") as a:
                outcome = measure(a, None, "--save-run", path, prompts=["one"], files=self.PROMPTS)
                self.assertEqual(outcome.code, 2)
                self.assertNotIn("remove", outcome.err)


@no_windows
class PipesAndDevices(unittest.TestCase):
    """Pipes and devices in place of files."""

    def test_a_fifo_in_place_of_a_file_is_refused_and_not_waited_for(self):
        with tempfile.TemporaryDirectory() as folder:
            fifo = os.path.join(folder, "fifo")
            os.mkfifo(fifo)
            for words in (
                ("compare", "plain.jsonl", "slow.jsonl", "--labbook", fifo),
                ("compare", "plain.jsonl", "slow.jsonl", "--divergence-report", fifo),
                ("compare", fifo, "slow.jsonl"),
                ("compare", "plain.jsonl", fifo),
                ("report", fifo),
                ("calibrate", "--labbook", fifo),
            ):
                with self.subTest(words), at_most(5):
                    outcome = run_main(*words, files=slow_pair())
                    self.assertEqual((outcome.code, outcome.out), (2, ""))
                    self.assertIn(fifo, outcome.err)

    @unittest.skipUnless(os.path.exists("/dev/zero"), "no /dev/zero here")
    def test_a_file_without_end_is_refused_as_input(self):
        for words in (
            ("--baseline-url", "http://127.0.0.1:9", "--prompts", "/dev/zero"),
            ("report", "/dev/zero"),
            ("compare", "/dev/zero", "/dev/zero"),
        ):
            outcome = run_main(*words)
            self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1), outcome.err)
            self.assertIn("device", outcome.err)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_a_notebook_that_is_a_device_is_not_read_for_regressions(self):
        with FakeServer("plain") as a, FakeServer("plain") as b:
            outcome = measure(
                a, b, "--labbook", "/dev/full", "--fail-on", "regression", prompts=["one"]
            )
        self.assertEqual((outcome.code, outcome.out.count('"kind": "comparison"')), (1, 1))


@no_windows
class HeldLock(unittest.TestCase):
    def held(self, limit, release_after=None):
        import fcntl

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(ms, "LOCK_LIMIT_S", limit),
            at_most(10),
        ):
            book = pathlib.Path(folder) / "book.md"
            book.write_bytes(b"# Notes\n")
            holder = os.open(book, os.O_RDWR)
            fcntl.flock(holder, fcntl.LOCK_EX)
            timer = threading.Timer(release_after or 60, lambda: fcntl.flock(holder, fcntl.LOCK_UN))
            timer.daemon = True
            timer.start()
            try:
                return compare(
                    *slow_pair().items(), flags=("--quiet", "--labbook", book)
                ), book.read_bytes()
            finally:
                timer.cancel()
                os.close(holder)

    def test_a_notebook_that_stays_locked_is_given_up_and_the_records_are_printed(self):
        outcome, book = self.held(0.1)
        self.assertEqual((outcome.code, book), (1, b"# Notes\n"))
        self.assertRegex(outcome.err, "cannot append to .*lock.*standard output")
        self.assertEqual(
            [record["kind"] for record in strict(outcome.out.encode())],
            ["endpoint", "endpoint", "comparison"],
        )

    def test_a_file_system_without_locks_is_written_to_with_a_word(self):
        for number in (errno.ENOLCK, errno.ENOTSUP):
            error = OSError(number, os.strerror(number))
            for quiet in ((), ("--quiet",)):
                with (
                    self.subTest(number, quiet=quiet),
                    mock.patch("fcntl.flock", side_effect=error),
                ):
                    outcome = compare(*slow_pair().items(), flags=quiet)
                self.assertEqual((outcome.code, len(outcome.records)), (0, 3), outcome.err)
                self.assertEqual("without locks" in outcome.err, not quiet)

    def test_a_lock_that_is_given_back_in_time_is_waited_for(self):
        outcome, book = self.held(8, release_after=0.2)
        self.assertEqual((outcome.code, outcome.err, len(strict(book))), (0, "", 3))


if __name__ == "__main__":
    unittest.main()
