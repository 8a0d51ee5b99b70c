"""The HTTP client where an answer fails: one clear line that names the server and what to do, and never a speed."""

import errno
import json
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, HUGE_BYTES, FakeServer, ReplayServer
from tests.support import (
    BOUND,
    DEADLINE,
    PATIENCE,
    SAVE,
    TIMEOUT,
    FaultyServers,
    http,
    measure,
    measure_canned,
    plain,
    run_main,
    stream,
    strict,
)

CUT_OFF = ("ended without a finish reason", "See its log")
NOT_JSON = ("is this the base URL of an OpenAI-compatible server",)
MOVED = ("redirects to", "not followed", "give the final URL")
TOO_MANY = ("HTTP 429", "fault 429", "after waiting", "try again")
LOADING = ("HTTP 503", "Loading model", "after waiting", "try again when the model is loaded")
CLOSED = ("closed the connection", "server's log")


# fault of every chat request, what the line says where a stream was asked for, and where it was not
CHAT = [
    ("refuse", CLOSED, CLOSED),
    ("hang", DEADLINE, DEADLINE),
    ("stall", DEADLINE, DEADLINE),
    ("dribble-headers", DEADLINE, DEADLINE),
    ("close-mid-body", CUT_OFF, CLOSED),
    ("html", ("an HTML page",) + NOT_JSON, ("an HTML page",) + NOT_JSON),
    ("half-json", ("no valid JSON",) + NOT_JSON, ("no valid JSON",) + NOT_JSON),
    ("huge-body", ("more than 4 MiB", "--max-tokens"), ("more than 4 MiB", "--max-tokens")),
    (
        "error-in-stream",
        ("the engine failed while it generated", "log"),
        ("HTTP 500", "the engine failed while it generated", "log"),
    ),
    ("no-finish", CUT_OFF, None),
    ("500", ("HTTP 500", "fault 500", "log"), ("HTTP 500", "fault 500", "log")),
    ("502", ("HTTP 502", "fault 502", "log"), ("HTTP 502", "fault 502", "log")),
    ("redirect", MOVED, MOVED),
    ("429", TOO_MANY, TOO_MANY),
    ("429-retry-after", TOO_MANY, TOO_MANY),
    ("503", LOADING, LOADING),
    ("503-retry-after", LOADING, LOADING),
]


class FaultyAnswers(FaultyServers):
    """Each fault of every answer, streamed and plain."""

    def test_a_body_of_300_mb_is_beyond_the_bound(self):
        self.assertLess(BOUND, HUGE_BYTES / 2)

    def check_fault(self, fault, words, *flags):
        with FakeServer("plain", faults=[fault], repeat_fault=True, words=6) as server:
            started = time.perf_counter()
            outcome = measure(
                server,
                None,
                "--timeout",
                TIMEOUT if words == DEADLINE else PATIENCE,
                *flags,
                prompts=["a", "b"],
            )
            elapsed = time.perf_counter() - started
        self.assertEqual(outcome.code, 1, outcome.err)
        self.check_clean(outcome)
        self.check_line(outcome.err, server, words)
        self.assertLess(elapsed, 3 * TIMEOUT + 20)  # a warm-up and two prompts
        record = outcome.endpoint()
        self.assertEqual(
            tuple(record[name] for name in ("requests", "completed", "failed")), (2, 0, 2)
        )
        self.check_no_number(record)
        self.check_line(record["first_error"], server, words)
        self.assertLessEqual(sum(self.slept), 3 * 60)

    def test_each_fault_of_a_stream_is_one_clear_line_and_no_number(self):
        for fault, words, _ in CHAT:
            with self.subTest(fault):
                del self.slept[:]
                self.check_fault(fault, words)

    def test_each_fault_of_a_plain_answer_is_one_clear_line_and_no_number(self):
        for fault, _, words in CHAT:
            if words:
                with self.subTest(fault):
                    del self.slept[:]
                    self.check_fault(fault, words, "--no-stream")

    def test_a_429_is_not_called_a_loading_model(self):
        with FakeServer("plain", faults=["429"], repeat_fault=True) as server:
            outcome = measure(server, None, prompts=["a"])
        self.assertNotIn("loaded", outcome.endpoint()["first_error"])

    def test_a_server_that_only_fails_leaves_no_comparison(self):
        for broken in (0, 1):
            for fault in ("refuse", "error-in-stream", "html"):
                with self.subTest(fault, broken=broken):
                    servers = [FakeServer("plain", words=6) for _ in range(2)]
                    servers[broken].faults, servers[broken].repeat_fault = [fault], True
                    with servers[0], servers[1]:
                        outcome = measure(*servers, prompts=["a", "b"])
                    self.assertEqual(outcome.code, 1)
                    self.assertEqual(
                        [record["kind"] for record in outcome.records], ["endpoint", "endpoint"]
                    )
                    self.check_clean(outcome)
                    self.assertNotRegex(outcome.out, "PAYS|UNDECIDED|[0-9]x\\b")
                    arms = ("baseline", "speculative")
                    self.check_no_number(outcome.endpoint(arms[broken]))
                    good = outcome.endpoint(arms[1 - broken])
                    self.assertEqual((good["completed"], good["output_tokens"]), (2, 12))

    def test_one_failed_request_leaves_its_pair_out_of_every_figure_and_shifts_no_other(self):
        faults = [
            (fault, 1.0 if words == DEADLINE else PATIENCE)
            for fault, words, _ in CHAT
            if fault[:3] not in ("429", "503", "red")
        ]
        for fault, timeout in faults:
            with self.subTest(fault):
                # the warm-up, then "a" to "d": the second is lost on one side
                with (
                    FakeServer("plain", words=6) as base,
                    FakeServer("plain", words=6, faults=[None, None, fault]) as drafting,
                ):
                    outcome = measure(
                        base, drafting, "--timeout", timeout, prompts=["a", "b", "c", "d"]
                    )
                self.assertEqual(outcome.code, 0, outcome.err)
                self.check_clean(outcome)
                texts = outcome.comparison()["text_comparison"]
                self.assertEqual(
                    tuple(texts[k] for k in ("compared", "identical", "divergent", "failed")),
                    (3, 3, 0, 1),
                )
                self.assertEqual(outcome.comparison()["speedup"]["prompts"], 3)
                self.assertEqual(
                    tuple(
                        outcome.endpoint()[k]
                        for k in ("requests", "completed", "failed", "output_tokens")
                    ),
                    (4, 4, 0, 24),
                )
                lost = outcome.endpoint("speculative")
                self.assertEqual(
                    tuple(lost[k] for k in ("requests", "completed", "failed", "output_tokens")),
                    (4, 3, 1, 18),
                )
                self.assertIn(drafting.url, lost["first_error"])
                self.assertLess(lost["latency_s"]["max"], timeout)

    def test_errors_of_one_server_never_name_the_other(self):
        with (
            FakeServer("plain", words=6) as base,
            FakeServer("plain", faults=["500"], repeat_fault=True) as drafting,
        ):
            outcome = measure(base, drafting, prompts=["a"])
        self.assertNotIn(base.url, outcome.err)
        self.assertIn(drafting.url, outcome.err)

    def test_what_a_server_says_cannot_break_out_of_its_line(self):
        message = "first\nsecond\r\x1b[31mred \u2028 " + "long " * 400
        with FakeServer("plain", reject={"model": message}) as server:
            outcome = measure(server, None, prompts=["a"])
        self.assertEqual(outcome.code, 2)
        (line,) = [line for line in outcome.err.splitlines() if "first" in line]
        self.assertIn("second", line)
        self.assertLess(len(line), 700)
        self.assertTrue(outcome.err.isascii() and "\x1b" not in outcome.err)


class FailuresInStreams(unittest.TestCase):
    """What a stream says between its tokens: a failure never becomes a speed."""

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


class OddNumbers(unittest.TestCase):
    """Numbers that JSON does not know, or that no clock can have told."""

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

    def test_a_number_that_is_none_in_a_plain_answer_costs_at_most_that_answer(self):
        for number in self.NUMBERS:
            with self.subTest(number):
                bad = http(plain('"timings": {"x": %s}' % number))
                records = self.assert_recorded(
                    measure_canned(http(plain()), bad, "--no-stream", *SAVE)
                )
                self.assertEqual(records[0]["completed"], 2)

    def test_a_number_that_is_none_in_a_request_is_refused_before_anything_is_sent(self):
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

    def test_a_number_that_is_none_on_a_side_page_is_left_alone(self):
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


class LimitsOfThisMachine(unittest.TestCase):
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


class MissingModel(unittest.TestCase):
    """Case D14: 404, the model does not exist."""

    def test_a_missing_model_is_shown_in_the_servers_words_and_nothing_is_measured(self):
        for routes in ("routes.json", "routes_old.json"):
            with self.subTest(routes), ReplayServer(routes, CASES / "D14") as server:
                outcome = run_main("--baseline-url", server.url, "--model", "n", prompts=["a", "b"])
                self.assertEqual((outcome.code, outcome.records, outcome.out), (2, [], ""))
                self.assertIn("The model `n` does not exist.", outcome.err)
                self.assertEqual(len([r for r in server.requests if r["method"] == "POST"]), 1)

    def test_where_the_model_goes_away_how_many_requests_succeeded_is_said(self):
        with ReplayServer("routes_mixed.json", CASES / "D14") as server:
            outcome = run_main(
                "--baseline-url",
                server.url,
                "--model",
                "n",
                "--warmup",
                "0",
                prompts=["a", "b", "c"],
            )
        record = outcome.endpoint()
        self.assertEqual(
            tuple(record[name] for name in ("requests", "completed", "failed")), (3, 1, 2)
        )
        self.assertIn("does not exist", record["first_error"])
        self.assertRegex(outcome.out, r"2 of 3|1 of 3|2 failed")

    def test_only_prompts_that_both_completed_are_compared(self):
        with (
            FakeServer("plain", faults=[None, "500"], words=8) as base,
            FakeServer("plain", faults=[None, None, "500"], words=8) as drafting,
        ):
            outcome = measure(base, drafting, prompts=["a", "b", "c", "d"])
        texts = outcome.comparison()["text_comparison"]
        self.assertEqual(
            tuple(texts[name] for name in ("compared", "identical", "divergent", "failed")),
            (2, 2, 0, 2),
        )
        self.assertEqual(outcome.comparison()["speedup"]["prompts"], 2)


if __name__ == "__main__":
    unittest.main()
