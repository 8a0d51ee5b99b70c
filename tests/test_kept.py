"""What was measured is kept whatever ends it, what failed is no speed, and what cannot be is refused in one line."""

import errno
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer
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
    run_main,
    saved_run,
    stream,
)

REFUSED = http(b'{"error": "no such field"}', status="400 Bad Request")


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


class Kept(unittest.TestCase):
    def test_a_terminal_that_is_gone_costs_no_reading(self):
        gone = mock.Mock(
            write=mock.Mock(side_effect=OSError(5, "Input/output error")), isatty=lambda: True
        )
        with mock.patch.object(sys, "stderr", gone):
            recorder = ms.Recorder(print, show=True)
            recorder.begin((), 1)
            recorder.add(ms.Reading("baseline", 0, "p", "w", 0, 0))
            recorder.clear_progress()
        self.assertEqual(1, len(recorder.readings))
        self.assertTrue(gone.write.called)

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

    def test_a_refusal_after_something_was_measured_is_a_failed_request(self):
        with FakeServer("plain") as a, canned(REFUSED) as b:
            for flags in (("--order", "sequential"), ("--concurrency", "2,1")):
                outcome = measure(
                    a, b, "--model", "m", "--warmup", "0", *flags, prompts=["one", "two"]
                )
                self.assertEqual(outcome.code, 1)
                self.assertEqual(
                    (outcome.records[0]["failed"], outcome.records[1]["completed"]), (0, 0)
                )
                self.assertIn("a null removes a field", outcome.records[1]["first_error"])

    def test_a_first_request_that_is_refused_ends_it_while_no_server_has_answered_twice(self):
        for bad_first in (True, False):
            with canned(REFUSED) as bad, FakeServer("plain") as good:
                outcome = measure(
                    *((bad, good) if bad_first else (good, bad)),
                    "--model",
                    "m",
                    "--warmup",
                    "0",
                    *SAVE,
                    prompts=["one", "two"],
                )
            self.assertEqual((outcome.code, outcome.records), (2, []))
            self.assertIn("a null removes a field", outcome.err)
            self.assertEqual("run.jsonl" in outcome.files, not bad_first)

    def test_ctrl_c_while_alarms_are_looked_for_loses_nothing(self):
        with (
            FakeServer("plain") as a,
            FakeServer("plain") as b,
            mock.patch.object(ms, "alarms_of", side_effect=KeyboardInterrupt),
        ):
            outcome = measure(a, b, prompts=["one"])
        self.assertEqual((outcome.code, len(outcome.records)), (130, 3))
        self.assertIn("tokens/s", outcome.out)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_records_that_find_no_room_are_handed_back_to_be_printed(self):
        lines, trouble, stopped = ms.append_or_show("/dev/full", [{"label": "x"}])
        self.assertEqual((lines, stopped), (['{"label": "x"}'], False))
        self.assertIn("/dev/full: No space left", trouble)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_what_went_wrong_with_the_run_file_is_said_beside_what_else_went_wrong(self):
        recorder = ms.Recorder(
            lambda words: None, mock.Mock(write=mock.Mock(side_effect=OSError(28, "No space left")))
        )
        recorder.write({"kind": "run"})
        server = mock.Mock(endpoint=ms.Endpoint("baseline", "http://x/v1", "http://x"))
        with (
            mock.patch.object(ms, "warm_up", return_value=[None]),
            mock.patch.object(ms, "conditions_of", return_value={}),
            mock.patch.object(
                ms,
                "measure_level",
                side_effect=[mock.Mock(interrupted=False), ms.MeasureError("no threads")],
            ),
        ):
            settings = ms.Settings(arms=(), prompts=(), warmup=0, levels=(1, 300))
            ms.measure_levels(settings, [server], recorder, "x", 0.0)
        self.assertRegex(recorder.trouble, "run file could not be written.*no threads")

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

    def test_a_level_named_twice_is_refused_since_a_run_file_could_not_tell_them_apart(self):
        with FakeServer("plain") as a:
            outcome = measure(a, None, "--concurrency", "2,1,2", *SAVE, prompts=["one"])
        self.assertEqual((outcome.code, a.requests), (2, []))
        self.assertIn("twice", outcome.err)

    def test_an_empty_run_file_does_not_stand_in_the_way_of_the_next_try(self):
        with canned(REFUSED) as a:
            outcome = measure(a, None, "--model", "m", *SAVE, prompts=["one"])
        self.assertEqual((outcome.code, "run.jsonl" in outcome.files), (2, False))

    def test_a_system_without_further_threads_keeps_the_levels_before(self):
        real = threading.Thread.start

        def start(thread):
            if thread._target.__name__ == "work":
                raise RuntimeError("can't start new thread")
            real(thread)

        for levels, records in (("2", 0), ("1,2", 3)):
            with (
                self.subTest(levels),
                FakeServer("plain") as a,
                FakeServer("plain") as b,
                mock.patch.object(threading.Thread, "start", start),
            ):
                outcome = measure(a, b, "--concurrency", levels, prompts=["one", "two"])
                self.assertEqual((outcome.code, len(outcome.records)), (1, records), outcome.err)
                self.assertRegex(outcome.err, "lower --concurrency")


class FailuresAreNoSpeed(unittest.TestCase):
    END = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    TEXT = b'data: {"choices": [{"index": 0, "delta": {"content": "hello"}}]}\n\n'

    def failed(self, piece, words):
        outcome = measure_canned(
            http(stream(), "text/event-stream"),
            http(self.TEXT + piece + self.END, "text/event-stream"),
        )
        record = outcome.endpoint("speculative")
        self.assertEqual(
            (outcome.code, record["completed"], record["output_tokens_per_s"]), (1, 0, None)
        )
        self.assertRegex(record["first_error"], words)

    def test_an_error_in_a_stream_is_a_failure_however_it_is_spelled(self):
        for piece in (
            b"error: out of memory\n\n",
            b'event: error\ndata: {"message": "out of memory", "code": 500}\n\n',
            b"event: error\ndata: out of memory\n\n",
            b'data: {"detail": "out of memory"}\n\n',
            b'data: {"message": "out of memory"}\n\n',
            b'error: {"message": "out of memory"}\n\n',
            b'data: {"usage": {"completion_tokens": 3}, "message": "out of memory"}\n\n',
        ):
            with self.subTest(piece):
                self.failed(piece, "sent an error instead of an answer: out of memory")

    def test_an_error_without_words_is_a_failure_too(self):
        for piece in (
            b'data: {"object": "error", "code": 500}\n\n',
            b'data: {"type": "error", "code": 500}\n\n',
            b"event: error\ndata: [DONE]\n\n",
            b"event: error\ndata: null\n\n",
        ):
            with self.subTest(piece):
                self.failed(piece, "sent an error instead of an answer: ")

    def test_a_server_that_gave_up_has_not_answered(self):
        for reason in (
            '"error"',
            '"abort"',
            '"ERROR"',
            '"cancelled"',
            '"timed_out"',
            '{"type": "abort"}',
        ):
            with self.subTest(reason):
                self.failed(
                    b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": %s}]}\n\n'
                    % reason.encode(),
                    "gave up, with the finish reason ",
                )

    def test_a_text_that_lacks_a_piece_is_not_compared(self):
        piece = b'{"choices": [{"index": 0, "delta": {"content": " mid"}, "x": %s}]}'
        for damaged in (
            piece[:48],
            piece[9:] % b"1",
            piece % (b"9" * 5000),
            piece % (b"[" * 100000 + b"]" * 100000),
        ):
            with self.subTest(damaged[:60]):
                self.failed(b"data: " + damaged + b"\n\n", "lacks a piece")

    def test_what_only_looks_like_a_failure_is_none(self):
        for piece in (
            b"event: errors-none\ndata: {}\n\n",
            b"event: error\n\n",
            b'data: {"message": "x", "choices": [{"index": 0}]}\n\n',
            b'data: {"message": "x", "choices": []}\n\n',
            b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: {"usage": {"pro\n\n',
        ):
            raw = http(self.TEXT + piece + self.END, "text/event-stream")
            outcome = measure_canned(http(stream(), "text/event-stream"), raw)
            self.assertEqual(
                (outcome.code, outcome.endpoint("speculative")["completed"]), (0, 2), piece
            )

    def test_a_comment_or_a_ping_between_events_harms_nothing(self):
        raw = http(
            self.TEXT + b": ping\n\ndata: ping\n\nevent: ping\ndata: \n\n" + self.END,
            "text/event-stream",
        )
        outcome = measure_canned(http(stream(), "text/event-stream"), raw)
        self.assertEqual((outcome.code, outcome.endpoint("speculative")["completed"]), (0, 2))

    def test_a_choice_whose_index_is_null_is_the_first(self):
        for index in (b"null", b'"0"'):
            raw = http(
                self.TEXT.replace(b'"index": 0', b'"index": ' + index) + self.END,
                "text/event-stream",
            )
            outcome = measure_canned(http(stream(), "text/event-stream"), raw, *SAVE)
            readings = [
                json.loads(line)
                for line in outcome.files["run.jsonl"].splitlines()
                if b'"kind": "reading"' in line
            ]
            self.assertIn(("hello", 3), {(r["content"], r["completion_tokens"]) for r in readings})


class AbsurdFigures(unittest.TestCase):
    def test_a_decode_time_of_nothing_is_unknown(self):
        bad = http(
            stream('{"choices":[],"timings":{"predicted_n":3,"predicted_ms":1e-320}}'),
            "text/event-stream",
        )
        outcome = measure_canned(http(stream(), "text/event-stream"), bad)
        self.assertEqual(
            (
                outcome.code,
                outcome.endpoint("speculative")["decode_source"] in (None, "stream-approximate"),
            ),
            (0, True),
        )

    def test_counters_and_gauges_beyond_all_measure_end_nothing(self):
        for lines in (
            "vllm:num_requests_running 1e308\nvllm:num_requests_waiting 1e308\n",
            "vllm:num_requests_running -5\n",
            'vllm:spec_decode_num_draft_tokens_total{a="1"} 1e308\nvllm:spec_decode_num_draft_tokens_total{a="2"} 1e308\n',
            'vllm:generation_tokens_total{a="1"} 1e308\nvllm:generation_tokens_total{a="2"} 1e308\n',
            'vllm:cache_config_info{num_gpu_blocks="\u00b2",block_size="16"} 1\n',
            'vllm:cache_config_info{num_gpu_blocks="%s",block_size="16"} 1\n' % ("9" * 5000),
        ):
            page = (200, "text/plain", lines.encode())
            with self.subTest(lines[:60]), FakeServer("vllm", pages={"/metrics": page}) as server:
                outcome = measure(server, None, prompts=["one"])
                self.assertEqual((outcome.code, len(outcome.records)), (0, 1), outcome.err)
                self.assertNotIn("busy", findings(outcome.endpoint()))

    def test_an_interval_without_end_is_still_a_number(self):
        told = ms.over_prompts([[-60.0], [60.0]])
        self.assertTrue(0 < told.low < told.ratio < told.high < float("inf"))

    def test_damaged_run_files_are_refused_or_read_but_never_a_traceback(self):
        sound = saved_run("baseline", [[answer(100, 1.0)], [answer(100, 1.1)]])
        other = saved_run(
            "speculative", [[answer(100, 0.9, content="another")], [answer(100, 1.0)]]
        )
        tiny = other.replace(b'"decode_s": 0.9', b'"decode_s": 1e-320')
        self.assertNotEqual(tiny, other)
        self.assertEqual(compare(("b.jsonl", sound), ("s.jsonl", tiny)).code, 2)
        triage = {
            "kind": "triage",
            "arm": "speculative",
            "prompt_index": 0,
            "triage": {"finding": "near-tie", "gap_nats": 0.1},
        }
        outcome = compare(
            ("b.jsonl", sound),
            ("s.jsonl", other + json.dumps(triage).encode() + b"\n"),
            flags=("--divergence-report", "d.md"),
        )
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn(b"other token not known", outcome.files["d.md"])

    def test_a_ratio_beyond_all_measure_in_a_notebook_leaves_the_report_whole(self):
        with FakeServer("plain") as a, FakeServer("plain") as b:
            book = measure(a, b, prompts=["one", "two"]).files["labbook.md"]
        wild = json.loads(book.splitlines()[-1])
        wild["speedup"]["ratio"] = -1e308
        lines = book + json.dumps(wild).encode() + b"\n" + book
        outcome = run_main("report", "book.md", files={"book.md": lines})
        self.assertEqual(outcome.code, 0)
        self.assertIn("History, `", outcome.out)

    def test_the_arithmetic_ends_and_stays_json_at_its_limits(self):
        for words in (
            ("--alpha", "0.99999999", "--draft-cost", "1e-9"),
            ("--alpha", "0.9999999", "--draft-cost", "1e-300"),
            ("--measured-step-cost", "1e-6", "--tokens-per-step", "1e6"),
        ):
            with self.subTest(words):
                outcome = run_main("break-even", "--json", *words)
                self.assertEqual(outcome.code, 0)
                json.loads(outcome.out, parse_constant=self.fail)
        self.assertEqual(
            run_main("break-even", "--measured-step-cost", "5e-324", "--tokens-per-step", "1").code,
            2,
        )


class Refused(unittest.TestCase):
    def test_prompts_nested_too_deep_are_named(self):
        for levels in (60, 985, 5000):
            deep = "[" * levels + "]" * levels
            outcome = run_main(
                "--baseline-url",
                "http://127.0.0.1:9",
                "--prompts",
                "p.jsonl",
                files={"p.jsonl": '{"messages": [{"role": "user", "content": %s}]}' % deep},
            )
            self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1), outcome.err)
            self.assertRegex(outcome.err, "p.jsonl:1: .*too deep")

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
    def test_a_pipe_serves_as_prompts(self):
        with FakeServer("plain") as server, tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "prompts")
            os.mkfifo(pipe)
            writer = threading.Thread(
                target=lambda: pathlib.Path(pipe).write_text("one\ntwo\n", encoding="utf-8")
            )
            writer.start()
            outcome = measure(server, None, "--prompts", pipe)
            writer.join()
        self.assertEqual((outcome.code, outcome.endpoint()["completed"]), (0, 2))

    def test_a_path_that_is_not_ascii_is_named_and_not_the_host(self):
        for words in (
            ("--baseline-url", "http://127.0.0.1:9/\u00fc/v1"),
            (
                "--baseline-url",
                "http://127.0.0.1:9",
                "--baseline-metrics-url",
                "http://127.0.0.1:9/m\u00fc",
            ),
        ):
            outcome = run_main(*words)
            self.assertEqual(outcome.code, 2)
            self.assertIn("non-ASCII", outcome.err)

    def test_a_wrong_command_line_is_one_line_and_says_where_help_is(self):
        for words in (
            ("--bogus",),
            ("--repeats", "x"),
            ("compare",),
            ("report", "a", "b"),
            ("break-even", "--chain", "x"),
            ("calibrate", "--step-ms", "0"),
        ):
            outcome = run_main(*words)
            self.assertEqual(
                (outcome.code, outcome.err.count("\n"), outcome.out), (2, 1, ""), outcome.err
            )
            self.assertIn("--help", outcome.err)

    def test_a_key_that_was_typed_into_the_command_line_is_shown_and_recorded_nowhere(self):
        key = "sk-a-long-secret-key"
        with FakeServer("plain") as server:
            for words, env in (
                (("--bogus=" + key,), "SPEC_API_KEY"),
                (("--label", key), "SPEC_API_KEY"),
                ((key,), "SPEC_API_KEY"),
                (("--api-key-env", "OTHER", "--model", key), "OTHER"),
                (("--api-key-env=OTHER", "--engine", key), "OTHER"),
            ):
                outcome = measure(server, None, *words, env={env: key}, prompts=["one"])
                said = outcome.out + outcome.err + b"".join(outcome.files.values()).decode()
                self.assertEqual((outcome.code, key in said), (2, False), words)
        self.assertEqual(server.requests, [])

    def test_a_limit_of_this_machine_is_not_blamed_on_the_server(self):
        for number in (errno.EMFILE, errno.ENFILE):
            with (
                FakeServer("plain") as server,
                mock.patch.object(
                    ms,
                    "complete",
                    side_effect=ms.RequestFailed(
                        ms._connection_trouble(OSError(number, "Too many open files"), 1.0, "")
                    ),
                ),
            ):
                outcome = measure(server, None, "--warmup", "0", prompts=["one"])
            self.assertRegex(
                outcome.err, "this machine allows no more open connections; lower --concurrency"
            )

    def test_the_command_that_is_not_for_users_says_so(self):
        for words in ((), ("x",), ("{}",), ("[]",)):
            outcome = run_main("reference-server", *words)
            self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1), outcome.err)

    def test_a_key_with_quotes_stays_secret_in_errors_that_are_objects(self):
        key = "k'e\"y-se<c>r&et12/3\\4"
        raw = http(
            b"data: " + json.dumps({"error": {"why": [key]}}).encode() + b"\n\n",
            "text/event-stream",
        )
        outcome = measure_canned(raw, raw, *SAVE, env={"SPEC_API_KEY": key})
        said = outcome.out + outcome.err + b"".join(outcome.files.values()).decode()
        self.assertNotIn("se<c>r", said)
        self.assertIn("[key]", said)


@no_windows
class Shells(unittest.TestCase):
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


class Calibration(unittest.TestCase):
    def test_long_chains_leave_the_names_of_the_rows(self):
        rows = [
            ms.Calibrated(
                quantity=name,
                true=[0.5] * 64,
                measured=[0.5] * 64,
                error=None,
                unit="exact",
                within=True,
            )
            for name in ("baseline tokens/s", "accepted per position")
        ]
        (table,) = ms.calibration_lines(rows)
        self.assertIn("accepted per position", table)
        self.assertLessEqual(max(map(len, table.splitlines())), 100 + 60)


if __name__ == "__main__":
    unittest.main()
