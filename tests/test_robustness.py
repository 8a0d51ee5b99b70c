"""What servers, shells, disks, users and damaged files can do: no traceback, no hang, and nothing measured is lost."""

import contextlib
import copy
import functools
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, FakeServer, Speculation
from tests.support import (
    PROGRAM,
    SAVE,
    Program,
    answer,
    canned,
    compare,
    findings,
    http,
    measure,
    measure_canned,
    no_windows,
    of_answers,
    plain,
    run_main,
    saved_run,
    stream,
    strict,
)

ALARMS = ("--fail-on", "slower,changed-text,regression")
NEVER_PAYS = ("--fail-on", "slower", "--min-gain", "99")
HUGE = 10**400
TEXT = "one two three four five six seven eight"
CHANGED = "one two three four FIVE six seven eight"


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


class OddNumbers(unittest.TestCase):
    NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")

    def assert_recorded(self, outcome):
        self.assertNotIn("Traceback", outcome.err)
        records = strict(outcome.files["labbook.md"])
        self.assertGreaterEqual(len(records), 2)
        strict(outcome.files["run.jsonl"])
        return records

    def test_a_number_that_is_none_in_a_streams_statistics_becomes_null_and_ends_nothing(self):
        good = stream()
        for number in self.NUMBERS:
            for event in (
                '{"choices":[],"timings":{"predicted_n":4,"predicted_ms":12,"x":%s}}',
                '{"choices":[],"stats":{"deep":[{"x":%s}]}}',
                '{"choices":[],"timings":{"predicted_n":%s,"predicted_ms":%s,"draft_n":%s,"draft_n_accepted":%s}}',
            ):
                with self.subTest(number, event=event):
                    records = self.assert_recorded(
                        measure_canned(
                            good,
                            http(stream(event.replace("%s", number)), "text/event-stream"),
                            *SAVE,
                        )
                    )
                    self.assertEqual((records[1]["completed"], records[1]["failed"]), (2, 0))
                    self.assertEqual(records[1]["output_tokens"], 6)

    def test_a_decode_time_that_cannot_be_is_none_and_the_run_file_stays_readable(self):
        for told in ("-1", "-1e15", "1e15", "0"):
            with self.subTest(told):
                bad = http(
                    stream('{"choices":[],"timings":{"predicted_n":3,"predicted_ms":%s}}' % told),
                    "text/event-stream",
                )
                outcome = measure_canned(http(stream(), "text/event-stream"), bad, *SAVE)
                self.assertIsNone(outcome.endpoint("speculative")["decode_tokens_per_s"])
                again = run_main(
                    "compare", "run.jsonl", files={"run.jsonl": outcome.files["run.jsonl"]}
                )
                self.assertEqual((again.code, len(again.records)), (0, 3), again.err)

    def test_such_a_number_in_a_plain_answer_costs_at_most_that_answer(self):
        for number in self.NUMBERS:
            with self.subTest(number):
                bad = http(plain('"timings": {"x": %s}' % number))
                records = self.assert_recorded(
                    measure_canned(http(plain()), bad, "--no-stream", *SAVE)
                )
                self.assertEqual(records[0]["completed"], 2)

    def test_such_a_number_in_a_request_is_refused_before_anything_is_sent(self):
        for number in self.NUMBERS:
            for flags, files in (
                (("--extra-body", '{"a": %s}' % number), {}),
                (
                    ("--prompts", "p.jsonl"),
                    {"p.jsonl": '{"messages": [{"role": "user", "content": %s}]}' % number},
                ),
            ):
                with self.subTest(number, flags=flags), FakeServer("plain") as server:
                    outcome = measure(server, None, *flags, files=files)
                    self.assertEqual((outcome.code, server.requests), (2, []), outcome.err)

    def test_such_a_number_on_a_side_page_is_left_alone(self):
        for path in ("/props", "/version", "/v1/models"):
            page = (
                200,
                "application/json",
                b'{"data": [{"id": "m", "n": 1e999}], "build_info": 1e999, "model_ftype": 1e999}',
            )
            with self.subTest(path), FakeServer("llama.cpp", pages={path: page}) as server:
                outcome = measure(server, None, "--model", "m", *SAVE, prompts=["one"])
                self.assertEqual(
                    (outcome.code, len(strict(outcome.files["labbook.md"]))), (0, 1), outcome.err
                )
                strict(outcome.files["run.jsonl"])


class DeepNesting(unittest.TestCase):
    LEVELS = (400, 900, 990, 100_000)

    def deep(self, levels):
        return "[" * levels + "]" * levels

    def test_deep_statistics_cost_no_answer(self):
        for levels in self.LEVELS:
            for flags in ((), ("--concurrency", "2")):
                with self.subTest(levels=levels, flags=flags):
                    bad = http(
                        stream('{"choices":[],"timings":{"x":%s}}' % self.deep(levels)),
                        "text/event-stream",
                    )
                    outcome = measure_canned(
                        http(stream()),
                        bad,
                        *SAVE,
                        *flags,
                        env={"SPEC_API_KEY": "a-long-secret-key"},
                    )
                    self.assertEqual(outcome.code, 0, outcome.err)
                    self.assertEqual([r["failed"] for r in outcome.records[:2]], [0, 0])
                    self.assertEqual(len(outcome.records), 3)

    def test_deep_objects_and_plain_answers_end_nothing_either(self):
        for levels in self.LEVELS:
            deep = '{"a":' * levels + "1" + "}" * levels
            with self.subTest(levels=levels):
                outcome = measure_canned(
                    http(plain()), http(plain('"timings": ' + deep)), "--no-stream", *SAVE
                )
                self.assertNotIn("Traceback", outcome.err)
                self.assertGreaterEqual(len(outcome.records), 2)

    def test_deep_side_pages_are_left_alone(self):
        for levels in self.LEVELS:
            for path in ("/props", "/v1/models"):
                page = (
                    200,
                    "application/json",
                    (
                        '{"data": [{"id": "m", "x": %s}], "x": %s}' % ((self.deep(levels),) * 2)
                    ).encode(),
                )
                with (
                    self.subTest(path, levels=levels),
                    FakeServer("llama.cpp", pages={path: page}) as server,
                ):
                    outcome = measure(
                        server,
                        None,
                        "--model",
                        "m",
                        *SAVE,
                        prompts=["one"],
                        env={"SPEC_API_KEY": "a-long-secret-key"},
                    )
                    self.assertEqual((outcome.code, len(outcome.records)), (0, 1), outcome.err)


class OddCounters(unittest.TestCase):
    def test_a_histogram_of_50000_entries_costs_no_time_and_no_sums(self):
        long = [1] * 50_000
        for statistics in (
            {
                "metrics": {
                    "speculative_decoding": {
                        "num_spec_steps": 30,
                        "num_draft_tokens": 60,
                        "num_accepted_draft_tokens": 48,
                        "acceptance_histogram": long,
                    }
                }
            },
            {
                "sglext": {
                    "spec_tokens_details": {
                        "spec_verify_ct": 30,
                        "spec_num_proposed_drafts": 60,
                        "spec_num_correct_drafts": 48,
                        "spec_correct_drafts_histogram": long,
                    }
                }
            },
            {
                "choice": {
                    "num_spec_steps": 30,
                    "total_draft_tokens": 60,
                    "total_accepted_draft_tokens": 48,
                    "acceptance_histogram": long,
                }
            },
        ):
            with self.subTest(list(statistics)):
                started = time.process_time()
                found = ms.acceptance_of_answer(statistics)
                self.assertLess(time.process_time() - started, 0.5)
                self.assertEqual((found.steps, found.drafted, found.accepted), (30, 60, 48))

    def test_a_draft_position_that_is_no_small_number_is_no_position(self):
        """Series with odd labels beside good ones: the run goes on, and the good ones count."""
        stem = "vllm:spec_decode_num_"
        odd = ("\u00b2", "\u0663", "9" * 5000, "-1", "", "1.5", "0x1", " 1", "None", "1e3")

        def page(server):
            n = len(server.chats)
            lines = [
                "# TYPE %s%s counter" % (stem, name)
                for name in (
                    "drafts_total",
                    "draft_tokens_total",
                    "accepted_tokens_total",
                    "accepted_tokens_per_pos_total",
                )
            ]
            lines += [
                "# TYPE vllm:generation_tokens_total counter",
                "vllm:generation_tokens_total %d" % (100 * n),
            ]
            lines += [
                "%s%s_total %d" % (stem, name, n * count)
                for name, count in (("drafts", 30), ("draft_tokens", 60), ("accepted_tokens", 33))
            ]
            lines += [
                '%saccepted_tokens_per_pos_total{position="%s"} %d' % (stem, position, n * count)
                for position, count in (("0", 22), ("1", 11), *((each, 7) for each in odd))
            ]
            return "\n".join(lines) + "\n"

        with FakeServer("plain", words=100) as server:
            server.pages["/metrics"] = lambda: page(server)
            outcome = measure(None, server, "--warmup", "0", "--max-tokens", "200", prompts=["one"])
        self.assertEqual(outcome.code, 0, outcome.err)
        told = outcome.endpoint("speculative")["acceptance"]
        self.assertEqual((told["steps"], told["drafted"], told["accepted"]), (30, 60, 33))
        self.assertEqual([round(30 * rate) for rate in told["per_position"]], [22, 11])

    def test_alpha_is_null_where_drafts_vary_in_length_whatever_the_positions_say(self):
        """C03's fan-out page: 48 of 60 in 30 drafts of up to 3. At most 12 steps ended in a rejection, so 48/63 is impossible."""
        pages = [
            ms.snapshot_of((CASES / "C03" / name).read_text("utf-8"), {}, "a")
            for name in ("fan_before.txt", "fan_after.txt")
        ]
        found = ms.acceptance_of_counters(ms.counter_growth(*pages), 1)
        self.assertEqual(
            (found.accepted, found.drafted, found.steps, found.per_position),
            (48, 60, 30, (22, 15, 11)),
        )
        record = ms.acceptance_record(of_answers(found, 100, 1))
        self.assertIsNone(record["alpha"])
        self.assertAlmostEqual(record["rate"], 0.8)

    def test_alpha_stays_known_where_every_draft_had_the_same_length(self):
        """30 drafts of 2, accepted 2, 1 or 0: 15 steps accepted both, so 33 accepted and 15 rejected tests: 33/48."""
        record = ms.acceptance_record(
            of_answers(ms.Acceptance("metrics", 30, 60, 33, (18, 15)), 100, 1)
        )
        self.assertAlmostEqual(record["alpha"], 33 / 48)


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
                "--baseline-url",
                a.url,
                "--speculative-url",
                b.url,
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


class FilesThatCoincide(unittest.TestCase):
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
class Pipes(unittest.TestCase):
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

    def test_ctrl_c_while_the_lock_is_waited_for_prints_the_records(self):
        with mock.patch.object(ms, "append_records", side_effect=KeyboardInterrupt):
            outcome = compare(*slow_pair().items(), flags=("--quiet",))
        self.assertEqual((outcome.code, len(strict(outcome.out.encode()))), (130, 3), outcome.err)
        self.assertIn("standard output", outcome.err)

    def test_a_lock_that_is_given_back_in_time_is_waited_for(self):
        outcome, book = self.held(8, release_after=0.2)
        self.assertEqual((outcome.code, outcome.err, len(strict(book))), (0, "", 3))


class HostNames(unittest.TestCase):
    def test_a_host_name_that_is_none_is_said_in_plain_words(self):
        for host in ("a..b", "a" * 64 + ".test"):
            for option in ("--baseline-url", "--speculative-url"):
                with self.subTest(host, option=option):
                    outcome = run_main(option, "http://%s/v1" % host)
                    self.assertEqual(
                        (outcome.code, len(outcome.err.splitlines())), (2, 1), outcome.err
                    )
                    self.assertIn("host name", outcome.err)
                    self.assertNotRegex(outcome.err, "codec|idna|Unicode|HTTP server")

    def test_as_a_metrics_address_it_ends_nothing(self):
        with FakeServer("plain") as server:
            outcome = measure(
                server, None, "--baseline-metrics-url", "http://a..b/metrics", prompts=["one"]
            )
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("host name", findings(outcome.endpoint())["metrics-unavailable"]["detail"])


class InterruptedAfterTheReadings(unittest.TestCase):
    GAP = {"finding": "near-tie", "gap_nats": 0.25, "baseline_token": "a", "speculative_token": "b"}

    def measured(self, effects, *flags, prompts=("one", "two")):
        """Both prompts' texts differ; each request for log probabilities meets the next effect."""
        answers = dict.fromkeys(prompts, TEXT)
        with (
            FakeServer("plain", answers=answers) as a,
            FakeServer("plain", answers=dict.fromkeys(prompts, CHANGED)) as b,
            mock.patch.object(ms, "ask_for_gap", side_effect=effects),
        ):
            return measure(a, b, *flags, *SAVE, prompts=list(prompts))

    def test_ctrl_c_while_log_probabilities_are_asked_loses_no_reading(self):
        outcome = self.measured([KeyboardInterrupt])
        self.assertEqual(
            (outcome.code, [r["kind"] for r in outcome.records]),
            (130, ["endpoint", "endpoint", "comparison"]),
            outcome.err,
        )
        self.assertEqual([r["completed"] for r in outcome.records[:2]], [2, 2])
        self.assertEqual(outcome.comparison()["text_comparison"]["divergent"], 2)
        self.assertIn("2", outcome.out)
        self.assertNotIn("Traceback", outcome.err)

    def test_what_was_found_before_ctrl_c_stays(self):
        texts = self.measured([self.GAP, KeyboardInterrupt]).comparison()["text_comparison"]
        self.assertEqual(
            [found["triage"] and found["triage"]["gap_nats"] for found in texts["divergences"]],
            [0.25, None],
        )

    def test_levels_of_load_that_were_finished_are_recorded_and_no_further_one_begins(self):
        outcome = self.measured(
            [self.GAP, KeyboardInterrupt], "--concurrency", "1,2,4", prompts=("one",)
        )
        self.assertEqual(outcome.code, 130)
        self.assertEqual([r["concurrency"] for r in outcome.records], [1, 1, 1, 2, 2, 2])

    def test_ctrl_c_between_two_levels_loses_no_level(self):
        real, calls = ms.conditions_of, []

        def conditions(*args):
            calls.append(args)
            if len(calls) > 2:
                raise KeyboardInterrupt
            return real(*args)

        with mock.patch.object(ms, "conditions_of", conditions):
            outcome = self.measured([self.GAP] * 9, "--concurrency", "1,2")
        self.assertEqual((outcome.code, len(outcome.records)), (130, 3), outcome.err)


@no_windows
class Signals(unittest.TestCase):
    def signalled(self, name, action=None, delay=0.03, then=()):
        """Send the signal while the third request of one of the servers is under way."""
        number, prompts = getattr(signal, name), b"\n".join(b"prompt %d" % i for i in range(8))

        def before():
            for each in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(each, signal.SIG_DFL)
            signal.signal(number, action or signal.SIG_DFL)

        with (
            FakeServer("plain", words=2, token_delay_s=delay) as a,
            FakeServer("plain", words=2, token_delay_s=delay) as b,
            Program({"p.txt": prompts}) as program,
        ):
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(PROGRAM),
                    "--baseline-url",
                    a.url,
                    "--speculative-url",
                    b.url,
                    "--prompts",
                    "p.txt",
                    "--warmup",
                    "0",
                    *SAVE,
                ],
                cwd=program.path,
                preexec_fn=before,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            try:
                limit = time.monotonic() + 20
                while len(a.chats) + len(b.chats) < 6:
                    self.assertLess(time.monotonic(), limit)
                    time.sleep(0.005)
                for each in (number, *then):
                    process.send_signal(each)
                    time.sleep(0.01)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
                process.communicate()
            self.assertNotIn(b"Traceback", err)
            return process.returncode, program.records(), out

    def test_a_stopped_service_and_a_lost_terminal_keep_what_was_finished(self):
        for name in ("SIGTERM", "SIGHUP"):
            with self.subTest(name):
                code, records, out = self.signalled(name)
                self.assertEqual(
                    (code, [r["kind"] for r in records]),
                    (130, ["endpoint", "endpoint", "comparison"]),
                )
                self.assertEqual([r["interrupted"] for r in records], [True] * 3)
                self.assertGreaterEqual(records[2]["speedup"]["prompts"], 2)
                self.assertIn(b"interrupted", out)

    def test_one_of_them_followed_by_the_other_at_once_is_one_end(self):
        code, records, _ = self.signalled("SIGTERM", then=[signal.SIGHUP, signal.SIGTERM])
        self.assertEqual((code, len(records)), (130, 3))

    def test_an_impatient_hand_loses_nothing(self):
        for name in ("SIGINT", "SIGTERM"):
            code, records, out = self.signalled(name, then=[signal.SIGINT] * 5)
            self.assertEqual((code, len(records)), (130, 3))
            self.assertIn(b"interrupted", out)

    def test_under_nohup_a_lost_terminal_stops_nothing(self):
        code, records, _ = self.signalled("SIGHUP", signal.SIG_IGN, delay=0.01)
        self.assertEqual((code, [r["interrupted"] for r in records]), (0, [False] * 3))
        self.assertEqual(records[2]["speedup"]["prompts"], 8)


class DamagedHistory(unittest.TestCase):
    """`--fail-on regression` reads what older versions, editors and full disks have left in the notebook."""

    @classmethod
    def setUpClass(cls):
        fast = {
            "plain.jsonl": slow_pair()["plain.jsonl"],
            "slow.jsonl": same_speed("slow", seconds=0.5, drafted=200, accepted=150),
        }
        cls.fast = strict(compare(*fast.items()).files["labbook.md"])

    def now(self, earlier):
        """Compare the slow pair with these records in the notebook; the Outcome, and the records it appended."""
        book = b"".join(json.dumps(record).encode() + b"\n" for record in earlier)
        outcome = (
            compare(*slow_pair().items(), flags=("--fail-on", "regression"))
            if not earlier
            else run_main(
                "compare",
                *slow_pair(),
                "--fail-on",
                "regression",
                files=dict(slow_pair(), **{"labbook.md": book}),
            )
        )
        return outcome, strict(outcome.files["labbook.md"][len(book) :])

    def damaged(self, **fields):
        return [dict(record, **fields) for record in copy.deepcopy(self.fast)]

    def test_a_damaged_older_record_costs_no_measurement(self):
        whole = {"ratio": 9.0, "tokens_per_s": 900.0, "low": 8.0, "high": 10.0}
        for value in (
            5,
            "x",
            True,
            [],
            [1, 2],
            {},
            {"ratio": 1},
            {"tokens_per_s": 1},
            dict(whole, ratio="fast", tokens_per_s=[]),
            dict(whole, low="x"),
            dict(whole, high="x"),
            dict(whole, high=None),
            dict(whole, low={}),
            dict(whole, low=True),
        ):
            with self.subTest(value):
                outcome, records = self.now(self.damaged(speedup=value, speed=value))
                self.assertIn(outcome.code, (0, 1, 3))
                self.assertEqual(len(records), 3)
                self.assertIn("Drafts", outcome.out)
                self.assertEqual(outcome.code == 0, not outcome.err, outcome.err)

    def test_other_odd_fields_cost_none_either(self):
        for name in (
            "label",
            "model",
            "prompts_sha256",
            "max_tokens",
            "concurrency",
            "engine_version",
            "recorded_at",
            "kind",
            "repeats",
        ):
            for value in (None, [], {}, 5, "\ud800"):
                with self.subTest(name, value=value):
                    self.assertEqual(len(self.now(self.damaged(**{name: value}))[1]), 3)

    def test_a_damaged_record_hides_no_regression_against_the_good_one_before_it(self):
        outcome, _ = self.now(self.fast)
        self.assertEqual(outcome.code, 3, "the planted regression")
        outcome, _ = self.now(self.fast + self.damaged(speedup=5))
        self.assertEqual(outcome.code, 3, outcome.err)
        self.assertIn("REGRESSION", outcome.err)


# ---- wrong types in files ----

ODD = (
    None,
    True,
    0,
    -1,
    0.5,
    HUGE,
    -HUGE,
    1e308,
    -1e308,
    10**17,
    "",
    "x",
    "\ud800",
    "\u00e9\n```",
    [],
    [[]],
    [None],
    {},
    {"a": None},
    {"x": [1]},
    "DELETE",
)


def mutated(dice, value):
    """A copy of a JSON value with one of its parts, at any depth, replaced by something odd, and what was done."""
    value = copy.deepcopy(value)
    where, path = value, []
    while True:
        key = dice.choice(sorted(where) if isinstance(where, dict) else range(len(where)))
        path.append(key)
        if not isinstance(where[key], (dict, list)) or not where[key] or dice.random() < 0.3:
            break
        where = where[key]
    odd = dice.choice(ODD)
    if odd == "DELETE":
        del where[key]
    else:
        where[key] = odd
    return value, (path, odd if odd not in (HUGE, -HUGE) else "10**400")


class Quiet:
    """main() in one folder, again and again."""

    def __init__(self, stack):
        self.path = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(self.path)

    def __call__(self, *words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = ms.main(list(words))
        return code, out.getvalue(), err.getvalue()


class WrongTypesInFiles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        prompts = ["one", "two", "three"]
        texts, changed = dict.fromkeys(prompts, TEXT), {"one": TEXT, "two": CHANGED, "three": TEXT}
        with (
            FakeServer("vllm", answers=texts, gaps={4: (" FIVE", 0.125)}) as a,
            FakeServer("vllm", answers=changed, speculation=Speculation(4, (4, 2, 0))) as b,
        ):
            outcome = measure(a, b, "--repeats", "2", *SAVE, prompts=prompts)
        assert outcome.code == 0, outcome.err
        cls.lines, cls.earlier = strict(outcome.files["run.jsonl"]), outcome.files["labbook.md"]
        assert {line["kind"] for line in cls.lines} == {
            "run",
            "reading",
            "counted",
            "end",
            "triage",
        }
        with FakeServer("plain") as a, FakeServer("vllm", speculation=Speculation()) as b:
            levels = measure(a, b, "--concurrency", "1,2", prompts=prompts)
        cls.records = outcome.records + levels.records

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.program = Quiet(stack)

    def compared(self, lines):
        (self.program.path / "run.jsonl").write_bytes(
            b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        )
        (self.program.path / "book.md").write_bytes(self.earlier)
        done = self.program(
            "compare", "run.jsonl", "--labbook", "book.md", "--divergence-report", "d.md", *ALARMS
        )
        strict((self.program.path / "book.md").read_bytes())
        return done

    def assert_refused_or_compared(self, code, out, err):
        self.assertIn(code, (0, 1, 2, 3), err)
        self.assertNotIn("Traceback", err)
        if code == 2:
            self.assertEqual(out, "")
            self.assertRegex(err, r"run\.jsonl|run file|cannot be compared")

    def altered(self, kind, **fields):
        lines = copy.deepcopy(self.lines)
        next(line for line in lines if line["kind"] == kind).update(fields)
        return lines

    def test_an_untouched_file_is_compared(self):
        self.assertEqual(self.compared(self.lines)[0], 3, "its text changed")

    def test_readings_whose_figures_are_none_are_refused(self):
        for name, values in (
            ("latency_s", (HUGE, 1e308, 1e9, -1, "x", [], None, True)),
            ("ttft_s", (HUGE, -1, {})),
            ("decode_s", (HUGE, 1e308, {})),
            ("cached_tokens", ([], "1", 0.5, -1)),
            ("prompt_tokens", ([], "1", HUGE)),
            ("completion_tokens", ([1], -1, HUGE)),
            ("decode_tokens", ({}, "x")),
            ("prompt_index", (None, -1, "0", [])),
            ("repeat", (None, 0.5)),
            ("content", (7, None)),
        ):
            for value in values:
                with self.subTest(name, value=str(value)[:20]):
                    code, out, err = self.compared(self.altered("reading", **{name: value}))
                    self.assertEqual((code, out), (2, ""), err)
                    self.assertIn("run.jsonl", err)

    def test_the_other_lines_may_hold_anything(self):
        prompts = self.lines[0]["prompts"]
        for kind, fields in (
            ("triage", {"triage": []}),
            ("triage", {"triage": "x"}),
            ("triage", {"triage": None}),
            ("triage", {"triage": {"gap_nats": []}}),
            (
                "triage",
                {
                    "triage": {
                        "finding": [],
                        "gap_nats": [],
                        "baseline_token": [],
                        "speculative_token": [],
                    }
                },
            ),
            ("run", {"prompts": [dict(prompt, workload=None) for prompt in prompts]}),
            ("run", {"prompts": [None]}),
            ("run", {"base_url": []}),
            ("run", {"model": "\ud800"}),
            ("run", {"engine": {"a": 1}}),
            ("run", {"server": []}),
            ("run", {"request": None}),
            ("run", {"concurrency": []}),
            ("run", {"findings": [1]}),
            ("run", {"arm": []}),
            ("run", {"host": None}),
            ("run", {"repeats": "x"}),
            ("reading", {"workload": None}),
            ("reading", {"arm": "nobody"}),
            ("reading", {"statistics": []}),
            ("reading", {"prompt_id": []}),
            ("reading", {"waited_s": "x"}),
            ("counted", {"before": None}),
            ("counted", {"tokens": "x"}),
            ("counted", {"elapsed_s": []}),
            ("end", {"interrupted": []}),
        ):
            with self.subTest(kind, fields=fields):
                self.assert_refused_or_compared(*self.compared(self.altered(kind, **fields)))

    def test_300_run_files_with_one_odd_value_anywhere_give_no_traceback(self):
        dice, refused = random.Random(15), 0
        for number in range(300):
            lines = list(self.lines)
            at = dice.randrange(len(lines))
            lines[at], what = mutated(dice, lines[at])
            with self.subTest(number=number, kind=self.lines[at]["kind"], what=what), at_most(10):
                code, out, err = self.compared(lines)
                self.assert_refused_or_compared(code, out, err)
                refused += code == 2
        self.assertGreater(refused, 50)

    def reported(self, records, *flags):
        (self.program.path / "book.md").write_bytes(
            b"".join(json.dumps(record).encode() + b"\n" for record in records)
        )
        for form in ("markdown", "csv", "json"):
            code, out, err = self.program("report", "book.md", "--format", form, *flags)
            self.assertIn(code, (0, 2), err)
            self.assertNotIn("Traceback", err)
            yield form, code, out, err

    def test_report_names_a_record_that_it_cannot_show_and_shows_the_others(self):
        sound = [
            dict(record, label="sound/" + record["label"].rsplit("/", 1)[-1])
            for record in self.records[:3]
        ]
        for fields in (
            {"label": 5},
            {"label": None},
            {"label": []},
            {"latency_p50_s": []},
            {"latency_p50_s": {"baseline": "x", "speculative": 1}},
            {"speedup": 5},
            {"text_comparison": None},
            {"workloads": "x"},
            {"concurrency": "x"},
            {"break_even": []},
        ):
            with self.subTest(fields):
                odd = [
                    dict(record, **fields)
                    for record in self.records
                    if record["kind"] == "comparison"
                ]
                for form, code, out, err in self.reported(odd + sound):
                    self.assertEqual(code, 0, err)
                    self.assertIn("damaged", err, form)
                    self.assertIn("sound", out, form)

    def test_a_record_without_any_one_field_stops_no_report(self):
        for name in sorted(set().union(*self.records)):
            with self.subTest(name):
                odd = [
                    {key: value for key, value in record.items() if key != name}
                    for record in self.records
                ]
                for label in ((), ("--label", "measured")):
                    list(self.reported(odd, *label))

    def test_100_notebooks_with_one_odd_value_in_each_record_stop_no_report(self):
        dice = random.Random(16)
        for number in range(100):
            pairs = [mutated(dice, record) for record in self.records]
            with self.subTest(number=number, what=[what for _, what in pairs]), at_most(10):
                list(
                    self.reported(
                        [record for record, _ in pairs], *dice.choice(((), ("--label", "measured")))
                    )
                )


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


class RequestsThatFail(unittest.TestCase):
    def test_a_server_that_dies_halfway_is_said_even_to_cron(self):
        with (
            FakeServer("plain") as a,
            FakeServer(
                "vllm", speculation=Speculation(), faults=[None] * 4 + ["refuse"], repeat_fault=True
            ) as b,
        ):
            outcome = measure(
                a,
                b,
                "--quiet",
                "--warmup",
                "0",
                *ALARMS,
                prompts=["prompt %d" % i for i in range(12)],
            )
        self.assertEqual(outcome.endpoint("speculative")["failed"], 8)
        self.assertRegex(outcome.err, "8 of 12 requests failed")
        self.assertIn("closed the connection", outcome.err)
        self.assertEqual(outcome.out, "")


class NamesInReports(unittest.TestCase):
    """Prompt ids and kinds of work come from files: they may hold line ends and the marks of Markdown."""

    def outcome(self):
        entry = {"prompt": "one", "id": "```\n# x", "workload": "kind\n```\n# y"}
        with (
            FakeServer("plain", answers={"one": TEXT}) as a,
            FakeServer("plain", answers={"one": "```\n# z " + CHANGED}) as b,
        ):
            return measure(
                a,
                b,
                "--divergence-report",
                "d.md",
                "--include-prompts",
                "--prompts",
                "p.jsonl",
                files={"p.jsonl": json.dumps(entry)},
            )

    def test_they_begin_no_line_of_the_terminal(self):
        for line in self.outcome().out.splitlines():
            self.assertNotRegex(line, "^ *# [xyz]")

    def test_they_break_out_of_no_fence_of_the_divergence_report(self):
        inside, seen = None, 0
        for line in self.outcome().files["d.md"].decode("utf-8").splitlines():
            line = line[3:].lstrip(" ") if line.startswith("   ") else line.lstrip(" ")
            mark = line[: len(line) - len(line.lstrip("`"))]
            if inside is None and len(mark) >= 3:
                inside = mark
            elif inside is not None and len(mark) >= len(inside) and not line.strip("`"):
                inside, seen = None, seen + 1
            else:
                self.assertNotRegex(line, "^# [xyz]")
        self.assertIsNone(inside, "a fence is left open")
        self.assertEqual(seen, 2)


class Labels(unittest.TestCase):
    def test_a_label_that_is_none_is_refused_before_a_request(self):
        for label in ("", "L\n# x", "a\tb", "\x1b[31m"):
            with self.subTest(label), FakeServer("plain") as server:
                outcome = measure(server, None, "--label", label, prompts=["one"])
                self.assertEqual((outcome.code, server.requests), (2, []), outcome.err)

    def test_a_label_in_a_notebook_begins_no_line_of_the_report(self):
        records = [
            dict(record, label="L\n# x" + record["label"])
            for record in strict(compare(*slow_pair().items()).files["labbook.md"])
        ]
        report = run_main(
            "report",
            "b.md",
            files={"b.md": "".join(json.dumps(record) + "\n" for record in records)},
        )
        self.assertEqual(report.code, 0, report.err)
        self.assertNotRegex(report.out, "(?m)^# x")


# ---- what the handed cases brought to light ----


class StreamsThatWereHeldBack(unittest.TestCase):
    def record(self, **entry):
        raw = http(stream(texts=[" word%d" % i for i in range(20)], usage=20), "text/event-stream")
        if entry:
            entry["split"] = [raw.index(b' word%d"' % i) for i in (1, 10)]
        with canned(raw, **entry) as server:
            outcome = measure(server, None, "--model", "m", "--warmup", "0", prompts=["one"])
        self.assertEqual(outcome.code, 0, outcome.err)
        return outcome.endpoint()

    def test_a_stream_that_arrives_in_one_piece_has_no_decode_time(self):
        record = self.record()
        self.assertEqual(
            (record["output_tokens"], record["decode_tokens_per_s"], record["decode_source"]),
            (20, None, None),
        )
        self.assertIsNotNone(record["output_tokens_per_s"])

    def test_a_stream_that_arrives_in_pieces_has_one(self):
        record = self.record(delay_ms=30)
        self.assertEqual(record["decode_source"], "stream-approximate")
        self.assertLess(record["decode_tokens_per_s"], 19 / 0.03)


class CountsThatDoNotFitTheText(unittest.TestCase):
    REMARK = "identical texts? came with different token counts"

    def compared(self, first, second, text=TEXT):
        return compare(
            ("plain.jsonl", saved_run("baseline", [[answer(first, 0.5, content=TEXT)]])),
            (
                "other.jsonl",
                saved_run("other", [[answer(second, 0.5, drafted=40, accepted=20, content=text)]]),
            ),
        )

    def test_one_text_with_two_token_counts_is_remarked(self):
        outcome = self.compared(503, 545)
        self.assertEqual(outcome.comparison()["text_comparison"]["counts_differ"], 1)
        self.assertEqual(outcome.comparison()["text_comparison"]["identical"], 1)
        self.assertRegex(outcome.out, self.REMARK)

    def test_equal_counts_unknown_counts_and_differing_texts_are_not(self):
        for first, second, text in ((503, 503, TEXT), (503, 545, CHANGED)):
            with self.subTest(text, second=second):
                outcome = self.compared(first, second, text)
                self.assertEqual(outcome.comparison()["text_comparison"]["counts_differ"], 0)
                self.assertNotRegex(outcome.out, self.REMARK)
        unknown = measure_canned(http(plain()), http(plain('"usage": {}')), "--no-stream")
        self.assertEqual(unknown.comparison()["text_comparison"]["counts_differ"], 0)


class OneServerAsBothArms(unittest.TestCase):
    NOISE = "measures the noise"

    def measured(self, *flags):
        with FakeServer("vllm", speculation=Speculation(only_with="speculate")) as server:
            return measure(server, server, *flags, prompts=["prompt %d" % i for i in range(3)])

    def test_requests_that_switch_the_draft_make_it_no_noise_check(self):
        outcome = self.measured("--speculative-extra-body", '{"speculate": true}')
        found = findings(outcome.comparison())["same-server"]
        self.assertNotIn(self.NOISE, found["detail"])
        self.assertNotIn(self.NOISE, outcome.out)
        self.assertNotIn("nothing to explain", outcome.out)
        self.assertIsNotNone(outcome.comparison()["verdict"])
        self.assertGreater(outcome.comparison()["acceptance"]["drafted"], 0)

    def test_a_switch_that_switched_nothing_is_said(self):
        outcome = self.measured("--speculative-extra-body", '{"other": true}')
        self.assertIn("not-drafting", findings(outcome.comparison()))
        self.assertIsNone(outcome.comparison()["verdict"])

    def test_the_same_requests_make_it_one(self):
        for flags in ((), ("--extra-body", '{"speculate": true}')):
            outcome = self.measured(*flags)
            self.assertIn(self.NOISE, findings(outcome.comparison())["same-server"]["detail"])


class WordsThatContradict(unittest.TestCase):
    def compared(self, step_ms, accepted, drafted=100):
        """A baseline of 101 tokens at 24.69 ms each, and 100 steps that accept so many in all (case A14)."""
        return compare(
            ("b.jsonl", saved_run("baseline", [[answer(101, 2.469)]])),
            (
                "s.jsonl",
                saved_run(
                    "s",
                    [[answer(101 + accepted, step_ms / 10, drafted=drafted, accepted=accepted)]],
                ),
            ),
        )

    def test_a_step_that_costs_nothing_more_is_not_said_to_cost_time(self):
        out = self.compared(22.90, 0).out
        self.assertNotIn("only costs time", out)
        self.assertIn("any acceptance pays", out)

    def test_drafting_in_vain_is_said_where_a_step_costs_more(self):
        self.assertIn("only costs time", self.compared(30.0, 0).out)

    def test_no_advice_is_announced_that_does_not_come(self):
        """Case A06: two chain lengths give a fit; a gated candidate, whose drafts vary, gets no advice from it."""
        files = [
            ("b.jsonl", saved_run("baseline", [[answer(301, 300 / 26.4)]])),
            (
                "k1.jsonl",
                saved_run("k1", [[answer(301, 170 * 1.3 / 26.4, drafted=170, accepted=130)]]),
            ),
            (
                "k4.jsonl",
                saved_run("k4", [[answer(301, 100 * 1.9 / 26.4, drafted=400, accepted=200)]]),
            ),
            (
                "gated.jsonl",
                saved_run("gated", [[answer(301, 178 * 1.5 / 26.4, drafted=130, accepted=122)]]),
            ),
        ]
        outcome = compare(*files)
        records = {
            r["candidate"]: r["break_even"] for r in outcome.records if r["kind"] == "comparison"
        }
        self.assertIsNotNone(records["k4"]["fit"])
        self.assertIsNone(records["gated"]["predicted"])
        parts = {part.split(" ")[0]: part for part in outcome.out.split("\n== ")}
        self.assertIn("advice below rests on this fit", parts["k4"])
        self.assertIn("Fitted over 2 candidates: verifying", parts["gated"])
        self.assertNotIn("advice below", parts["gated"])

    def test_acceptance_that_is_known_is_not_called_missing_where_the_step_cost_is(self):
        """Cases C12 and C13: plain answers and a metrics page tell the acceptance, and nothing tells a decode time."""
        for accepted, alpha in (((2, 0, 1), None), ((0,), 0.0)):
            with (
                self.subTest(accepted),
                FakeServer("vllm", details=False) as a,
                FakeServer("vllm", details=False, speculation=Speculation(3, accepted)) as b,
            ):
                why = measure(a, b, "--no-stream", prompts=["one", "two"]).comparison()[
                    "break_even"
                ]
                self.assertNotEqual(why["applies"], "no-acceptance")
                self.assertIsNone(why["step_cost"])
                self.assertIsNotNone(why["alpha"])
                if alpha is not None:
                    self.assertEqual(why["alpha"], alpha)

    def test_the_way_out_of_an_unknown_model_is_another_model(self):
        for pages, way_out in (
            ({}, "m1, m2"),
            ({"/v1/models": (404, "application/json", b"{}")}, "check --model"),
        ):
            with (
                self.subTest(way_out),
                FakeServer("vllm", models=["m1", "m2"], pages=pages) as server,
            ):
                outcome = measure(server, None, "--model", "n", prompts=["one"])
                self.assertEqual((outcome.code, outcome.records), (2, []))
                self.assertIn(way_out, outcome.err.splitlines()[-1])
                self.assertNotIn("null removes", outcome.err)

    def test_a_server_that_loads_is_waited_for_in_few_words(self):
        with (
            FakeServer(
                "plain", faults=["503-retry-after"], retry_after_s=1, repeat_fault=True
            ) as server,
            mock.patch.object(time, "sleep"),
        ):
            outcome = measure(server, None, "--warmup", "0", prompts=["one"])
        self.assertEqual(outcome.code, 1)
        self.assertLess(len(outcome.err.splitlines()), 12)

    def test_a_page_that_is_no_metrics_page_is_named_by_its_address(self):
        for page in ([], "<html>", "no samples here"):
            with self.subTest(page), FakeServer("plain", pages={"/metrics": page}) as server:
                found = findings(measure(server, None, prompts=["one"]).endpoint())[
                    "metrics-unavailable"
                ]
                self.assertIn("%s/" % server.root, found["detail"])

    def test_servers_split_over_different_numbers_of_devices_are_told_apart(self):
        """Case A08: the same model on one and on four devices is no comparison of speculation."""

        def info(size):
            return {
                "/server_info": {"version": "0.5", "tp_size": size},
                "/get_server_info": {"version": "0.5", "tp_size": size},
            }

        for sizes in ((1, 4), (4, 4)):
            with (
                self.subTest(sizes),
                FakeServer("sglang", pages=info(sizes[0])) as a,
                FakeServer("sglang", pages=info(sizes[1]), speculation=Speculation()) as b,
            ):
                details = [
                    entry["detail"]
                    for entry in measure(a, b, prompts=["one", "two"]).comparison()["audit"]
                ]
                self.assertEqual(
                    any("tensor parallel size" in detail for detail in details),
                    sizes[0] != sizes[1],
                )

    def test_the_markdown_report_names_the_mean_that_its_ratio_is(self):
        """Case A20: its ratio over all is a geometric mean, and not the quotient of the two speeds beside it."""
        book = compare(*slow_pair().items()).files["labbook.md"]
        self.assertIn("geometric mean", run_main("report", "book.md", files={"book.md": book}).out)


if __name__ == "__main__":
    unittest.main()
