"""Ctrl-C, signals and lost terminals: what was finished is kept, reported and recorded, whenever the end comes."""

import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation
from tests.support import (
    CHANGED,
    PROGRAM,
    PROMPTS,
    REFUSED,
    SAVE,
    TEXT,
    Program,
    canned,
    compare,
    measure,
    no_windows,
    run_main,
    slow_pair,
    strict,
    urls_of,
)


def interrupted_after(count):
    """Ctrl-C when so many requests of the plan have been carried out."""
    real, taken = ms.take_reading, []

    def take(endpoint, prompt, *rest, **options):
        if prompt.id != "warm-up":
            if len(taken) == count:
                raise KeyboardInterrupt
            taken.append(prompt)
        return real(endpoint, prompt, *rest, **options)

    return mock.patch.object(ms, "take_reading", take)


def signalled_run(program, servers, is_time, signals, *flags, actions=None):
    """Measure p.txt on both servers in a process that gets the signals once it is time; (exit code, out, err)."""

    def before():
        # a suite that runs in the background of a shell has SIGINT ignored, and children inherit that
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, (actions or {}).get(each, signal.SIG_DFL))

    process = program.start(
        *urls_of(*servers), "--prompts", "p.txt", *SAVE, *flags, encoding="ascii", preexec_fn=before
    )
    try:
        limit = time.monotonic() + 20
        while not is_time():
            assert time.monotonic() < limit, "the requests do not come"
            time.sleep(0.005)
        for each in signals:
            process.send_signal(each)
            time.sleep(0.01)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in err, err
    return process.returncode, out, err


class InterruptedWhileMeasuring(unittest.TestCase):
    """Ctrl-C at a certain request of the plan."""

    def test_a_dead_candidate_does_not_cost_the_others_when_interrupted(self):
        with (
            FakeServer("plain") as a,
            FakeServer("plain") as b,
            canned(REFUSED.replace(b"400 Bad Request", b"500 No")) as dead,
            interrupted_after(7),
        ):
            outcome = run_main(
                "--baseline-url",
                a.url,
                "--speculative-url",
                "k2=" + dead.url,
                "--speculative-url",
                "k4=" + b.url,
                "--model",
                "m",
                prompts=["one", "two", "three", "four"],
            )
        self.assertEqual(
            [(r["label"].split("/", 1)[1], r.get("completed")) for r in outcome.records],
            [("baseline", 2), ("k2", 0), ("k4", 3), ("k4/comparison", None)],
        )
        self.assertEqual(outcome.code, 130)
        self.assertIn("k2: no request completed", outcome.err)

    def test_an_interrupted_first_server_is_recorded_in_sequential_order(self):
        with FakeServer("plain") as a, FakeServer("plain") as b, interrupted_after(2):
            outcome = measure(a, b, "--order", "sequential", prompts=["one", "two", "three"])
        self.assertEqual(
            (outcome.code, [(r["label"], r["completed"]) for r in outcome.records]),
            (130, [("speculative-run/baseline", 2)]),
        )

    def test_the_line_to_quote_says_that_it_was_interrupted(self):
        with FakeServer("plain") as a, FakeServer("plain") as b, interrupted_after(5):
            outcome = measure(a, b, prompts=["one", "two", "three"])
        self.assertRegex(outcome.out.splitlines()[-1], "BUT .*interrupted")


@no_windows
class InterruptedFromOutside(unittest.TestCase):
    """SIGINT to a process that measures, with a request in flight."""

    def interrupt(self, baseline_chats, speculative_chats, *flags):
        """Send SIGINT once the servers have had so many chat requests; (code, out, err, records, lines of the run file)."""
        prompts = "\n".join(PROMPTS).encode()
        with (
            FakeServer(words=4, token_delay_s=0.05) as a,
            FakeServer(words=4, token_delay_s=0.05, speculation=Speculation()) as b,
            Program({"p.txt": prompts}) as program,
        ):
            code, out, err = signalled_run(
                program,
                (a, b),
                lambda: len(a.chats) >= baseline_chats and len(b.chats) >= speculative_chats,
                [signal.SIGINT],
                *flags,
            )
            return code, out, err, program.records(), program.records("run.jsonl")

    def test_what_was_finished_is_kept_reported_and_recorded(self):
        """The third pair is the baseline's first: its fourth request (with the warm-up) is in flight."""
        code, out, err, records, run = self.interrupt(4, 3)
        self.assertEqual(code, 130, err)
        self.assertNotIn("Traceback", err)
        self.assertEqual([r["kind"] for r in records], ["endpoint", "endpoint", "comparison"])
        self.assertEqual([r["interrupted"] for r in records], [True] * 3)
        self.assertEqual([r["completed"] for r in records[:2]], [2, 2])
        self.assertEqual(records[2]["speedup"]["prompts"], 2)
        self.assertIn("interrupted", [f["finding"] for f in records[2]["audit"]])
        self.assertIn("interrupted", out)
        self.assertEqual(sum(line["kind"] == "reading" for line in run), 4)

    def test_an_interrupted_pair_is_counted_and_stays_out_of_the_figures(self):
        """The second pair begins with the speculative server: the baseline's half of it is in flight."""
        code, _, err, records, _ = self.interrupt(3, 3)
        self.assertEqual(code, 130, err)
        self.assertEqual([r["completed"] for r in records[:2]], [1, 2])
        self.assertEqual(records[2]["speedup"]["prompts"], 1)
        self.assertEqual(
            [r["latency_s"]["mean"] == r["latency_s"]["max"] for r in records[:2]], [True, True]
        )

    def test_before_the_first_finished_pair_nothing_is_recorded(self):
        for chats in ((1, 0), (2, 1), (2, 2)):
            with self.subTest(chats):
                code, out, err, records, _ = self.interrupt(*chats)
                self.assertEqual((code, records, out), (130, [], ""))
                self.assertIn("interrupted", err)
                self.assertNotIn("Traceback", err)

    def test_under_load_it_ends_at_once_and_records_what_was_finished(self):
        code, _, err, records, _ = self.interrupt(7, 9, "--concurrency", "2", "--repeats", "2")
        self.assertEqual(code, 130, err)  # blocks of 4: A, B, B are done, the second of A is not
        self.assertNotIn("Traceback", err)
        self.assertEqual(
            [(r["interrupted"], r["kind"]) for r in records],
            [(True, "endpoint")] * 2 + [(True, "comparison")],
        )
        self.assertEqual((records[1]["completed"], records[2]["speedup"]["prompts"]), (8, 1))


@no_windows
class SignalsOfTheSystem(unittest.TestCase):
    """SIGTERM, SIGHUP and impatient hands: they end a measurement as Ctrl-C does."""

    def signalled(self, name, action=signal.SIG_DFL, delay=0.03, then=()):
        """Send the signal while the third request of one of the servers is under way; (code, records, out)."""
        number, prompts = getattr(signal, name), b"\n".join(b"prompt %d" % i for i in range(8))
        with (
            FakeServer("plain", words=2, token_delay_s=delay) as a,
            FakeServer("plain", words=2, token_delay_s=delay) as b,
            Program({"p.txt": prompts}) as program,
        ):
            code, out, _ = signalled_run(
                program,
                (a, b),
                lambda: len(a.chats) + len(b.chats) >= 6,
                [number, *then],
                "--warmup",
                "0",
                actions={number: action},
            )
            return code, program.records(), out

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
                self.assertIn("interrupted", out)

    def test_one_of_them_followed_by_the_other_at_once_is_one_end(self):
        code, records, _ = self.signalled("SIGTERM", then=[signal.SIGHUP, signal.SIGTERM])
        self.assertEqual((code, len(records)), (130, 3))

    def test_an_impatient_hand_loses_nothing(self):
        for name in ("SIGINT", "SIGTERM"):
            code, records, out = self.signalled(name, then=[signal.SIGINT] * 5)
            self.assertEqual((code, len(records)), (130, 3))
            self.assertIn("interrupted", out)

    def test_under_nohup_a_lost_terminal_stops_nothing(self):
        code, records, _ = self.signalled("SIGHUP", signal.SIG_IGN, delay=0.01)
        self.assertEqual((code, [r["interrupted"] for r in records]), (0, [False] * 3))
        self.assertEqual(records[2]["speedup"]["prompts"], 8)


class InterruptedAfterTheReadings(unittest.TestCase):
    """Ctrl-C while texts are triaged, alarms looked for or records written."""

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

    def test_all_levels_are_measured_before_texts_are_asked_about_so_none_is_lost(self):
        outcome = self.measured(
            [self.GAP, KeyboardInterrupt], "--concurrency", "1,2,4", prompts=("one",)
        )
        self.assertEqual(outcome.code, 130)
        self.assertEqual([r["concurrency"] for r in outcome.records], [1, 1, 1, 2, 2, 2, 4, 4, 4])

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

    def test_ctrl_c_while_alarms_are_looked_for_loses_nothing(self):
        with (
            FakeServer("plain") as a,
            FakeServer("plain") as b,
            mock.patch.object(ms, "alarms_of", side_effect=KeyboardInterrupt),
        ):
            outcome = measure(a, b, prompts=["one"])
        self.assertEqual((outcome.code, len(outcome.records)), (130, 3))
        self.assertIn("tokens/s", outcome.out)

    def test_ctrl_c_while_calibrate_appends_is_an_interruption(self):
        with (
            mock.patch.object(
                ms, "measure_reference", return_value=(mock.Mock(result=ms.Result([], [])), [])
            ),
            mock.patch.object(ms, "calibration_rows", return_value=[]),
            mock.patch.object(ms, "cpu_share", return_value=1.0),
            mock.patch.object(ms, "append_records", side_effect=KeyboardInterrupt),
        ):
            self.assertEqual(run_main("calibrate", "--labbook", "book.md").code, 130)

    def test_ctrl_c_while_the_lock_is_waited_for_prints_the_records(self):
        with mock.patch.object(ms, "append_records", side_effect=KeyboardInterrupt):
            outcome = compare(*slow_pair().items(), flags=("--quiet",))
        self.assertEqual((outcome.code, len(strict(outcome.out.encode()))), (130, 3), outcome.err)
        self.assertIn("standard output", outcome.err)


@no_windows
class InterruptedAtTheStart(unittest.TestCase):
    def test_ctrl_c_while_the_rest_is_imported_ends_it_without_a_traceback(self):
        """Until main() can handle it, the signal has its plain effect."""
        head = PROGRAM.read_text("utf-8").partition("import argparse\n")[0]
        tail = "import time\nprint('up', flush=True)\ntime.sleep(20)\n"
        process = subprocess.Popen(
            [sys.executable, "-c", head + tail], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.readline()
        process.send_signal(2)
        self.assertEqual((process.communicate(timeout=20)[1], process.returncode), (b"", -2))

    def test_ctrl_c_before_the_first_line_of_main_and_behind_its_last_is_an_end(self):
        """A second one as well, shortly after."""
        source = PROGRAM.read_text("utf-8")
        kill = "os.kill(os.getpid(), 2)\n"
        early = source.replace(
            "        return run_command(words)\n", f"        {kill}        {kill}"
        )
        late = source.replace("        code = main()\n", f"        code = main()\n        {kill}")
        with tempfile.TemporaryDirectory() as folder:
            for text in (early, late):
                self.assertNotEqual(text, source)
                path = pathlib.Path(folder) / "program.py"
                path.write_text(text, "utf-8")
                done = subprocess.run(
                    [sys.executable, str(path), "break-even"], capture_output=True, timeout=60
                )
                self.assertNotIn(b"Traceback", done.stderr)
                self.assertEqual(done.returncode, 130)


if __name__ == "__main__":
    unittest.main()
