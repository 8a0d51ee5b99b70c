"""The HTTP client: every quirk of streams and plain answers, requests, deadlines, waiting, addresses."""

import contextlib
import gzip
import json
import math
import os
import pathlib
import re
import tempfile
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, FakeServer, ReplayServer
from tests.support import (
    SAVE,
    canned,
    findings,
    http,
    measure,
    measure_canned,
    of_answers,
    run_main,
    stream,
)

HI = ({"role": "user", "content": "hi"},)
CHAT = "/v1/chat/completions"
WARM_UP_WORDS = "Count from one to twenty"


def endpoint(server, **more):
    return ms.Endpoint("baseline", server.url, server.root, "n", **more)


def replayed(case, routes="routes.json", **more):
    """complete() against a recorded case, whose timings are not of this clock."""
    with (
        ReplayServer(routes, CASES / case) as server,
        mock.patch.object(ms, "CLOCKS_APART_S", math.inf),
    ):
        return ms.complete(endpoint(server, **more), HI)


def paused(case, file, before, seconds):
    """complete() against a recording that pauses before a text of it."""
    at = (CASES / case / file).read_bytes().index(before)
    at = (CASES / case / file).read_bytes().rindex(b"data:", 0, at)
    entry = {
        "method": "POST",
        "path": CHAT,
        "file": file,
        "split": [at],
        "delay_ms": seconds * 1000,
    }
    with ReplayServer([entry], CASES / case) as server:
        return ms.complete(endpoint(server), HI)


def answered(raw):
    """complete() against these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "x.http").write_bytes(raw)
        with ReplayServer([{"method": "POST", "path": CHAT, "file": "x.http"}], folder) as server:
            return ms.complete(endpoint(server), HI)


def stream_of(*events):
    """A streamed response with these events (JSON values, or bytes as they are)."""
    data = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return head + b"".join(b"data: " + part + b"\n\n" for part in data)


def delta(content=None, finish=None, **more):
    return dict(
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": content} if content else {},
                    "finish_reason": finish,
                }
            ]
        },
        **more,
    )


class WholeStreams(unittest.TestCase):
    """Cases A17, B11, B13 and D."""

    HELLO = [  # case, routes, completion tokens
        ("D01", "routes.json", 3),
        ("D02", "routes_nospace.json", 3),
        ("D02", "routes_crlf.json", 3),
        ("D02", "routes_cr_only.json", 3),
        ("D03", "routes.json", 3),
        ("D07", "routes_none.json", None),
        ("D07", "routes_null.json", 3),
        ("D07", "routes_partial.json", None),
        ("D07", "routes_finish.json", 3),
        ("D11", "routes_a.json", 3),
        ("D11", "routes_b.json", 3),
        ("D11", "routes_e.json", 3),
        ("D11", "routes_f.json", 3),
        ("D11", "routes_h.json", 3),
        ("D16", "routes.json", 4),
        ("D16", "routes_stream.json", 4),
        ("D18", "routes_gz.json", 3),
        ("D18", "routes_liar.json", 3),
    ]

    def test_a_whole_answer_is_read_whatever_its_shape(self):
        for case, routes, tokens in self.HELLO:
            with self.subTest(case, routes=routes):
                answer = replayed(case, routes)
                self.assertEqual(
                    (
                        answer.content,
                        answer.reasoning,
                        answer.finish_reason,
                        answer.completion_tokens,
                    ),
                    ("Hello world", "", "stop", tokens),
                )

    def test_d01_a_chunk_without_choices_is_not_the_first_token(self):
        self.assertGreaterEqual(paused("D01", "chat.http", b'"Hello"', 0.1).ttft_s, 0.09)

    def test_d03_keep_alive_comments_are_not_the_first_token(self):
        self.assertGreaterEqual(paused("D03", "chat.http", b'"Hello"', 0.1).ttft_s, 0.09)

    def test_an_empty_first_delta_is_not_the_first_token(self):
        self.assertGreaterEqual(paused("D11", "a_full.http", b'"Hello"', 0.1).ttft_s, 0.09)

    def test_d06_reasoning_is_kept_apart_under_either_name(self):
        for routes, content, reasoning, tokens, finish in (
            ("routes_null.json", "", "Let me think.", 64, "length"),
            ("routes_only.json", "", "Let me think.", 3, "length"),
            ("routes_field.json", "42", "Let me think.", 4, "stop"),
        ):
            with self.subTest(routes):
                answer = replayed("D06", routes)
                self.assertEqual(
                    (
                        answer.content,
                        answer.reasoning,
                        answer.completion_tokens,
                        answer.finish_reason,
                    ),
                    (content, reasoning, tokens, finish),
                )

    def test_d06_the_first_token_is_the_first_reasoning_token(self):
        answer = paused("D06", "stream_reasoning_field.http", b'"42"', 0.1)
        self.assertGreaterEqual(answer.latency_s - answer.ttft_s, 0.09)
        self.assertGreaterEqual(answer.decode_s, 0.09)

    def test_both_names_for_the_same_reasoning_do_not_double_it(self):
        twice = {
            "choices": [
                {
                    "index": 0,
                    "delta": {"reasoning_content": "so", "reasoning": "so"},
                    "finish_reason": "stop",
                }
            ]
        }
        self.assertEqual(answered(stream_of(twice, b"[DONE]")).reasoning, "so")

    def test_d07_a_missing_count_is_never_guessed_from_chunks(self):
        for flags in ([], ["--no-stream"]):
            with ReplayServer("routes_none.json", CASES / "D07") as server:
                outcome = run_main(
                    "--baseline-url", server.url, "--model", "n", *flags, prompts=["a", "b"]
                )
            record = outcome.endpoint()
            self.assertEqual((outcome.code, record["completed"]), (0, 2))
            self.assertEqual(
                [
                    record[name]
                    for name in ("output_tokens", "output_tokens_per_s", "decode_tokens_per_s")
                ],
                [None, None, None],
            )
            self.assertIs(record["tokens_counted_by_server"], False)

    def test_d11_a_stream_that_breaks_off_is_a_failed_request(self):
        for routes in ("routes_c.json", "routes_i.json", "routes_g.json"):
            with self.subTest(routes), self.assertRaises(ms.RequestFailed) as caught:
                replayed("D11", routes)
            self.assertRegex(
                str(caught.exception), "ended without a finish reason|closed the connection"
            )
            self.assertIn("log", str(caught.exception))

    def test_text_without_finish_reason_and_without_done_is_a_failed_request(self):
        with (
            FakeServer("plain", faults=["no-finish"]) as server,
            self.assertRaises(ms.RequestFailed),
        ):
            ms.complete(endpoint(server), HI)

    def test_a_stream_that_cannot_be_read_is_never_an_empty_answer(self):
        with self.assertRaises(ms.RequestFailed):
            answered(stream_of(b"{oops", b"{", b"[DONE]"))

    def test_the_done_mark_ends_the_answer_although_the_connection_stays_open(self):
        raw = stream_of(delta("Hello", "stop"), b"[DONE]", delta(" never read"))
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "x.http").write_bytes(raw)
            entry = {
                "method": "POST",
                "path": CHAT,
                "file": "x.http",
                "split": [raw.index(b"[DONE]") + 8],
                "delay_ms": 5000,
            }
            with ReplayServer([entry], folder) as server:
                started = time.perf_counter()
                self.assertEqual(ms.complete(endpoint(server), HI).content, "Hello")
                self.assertLess(time.perf_counter() - started, 4.5)

    def test_an_event_may_have_several_data_lines(self):
        parts = (
            b'{"choices": [{"index": 0,\n',
            b' "delta": {"content": "Hello"},\n',
            b'"finish_reason": "stop"}]}\n\n',
            b"[DONE]\n\n",
        )
        self.assertEqual(answered(stream_of() + b"data: " + b"data: ".join(parts)).content, "Hello")

    def test_a17_chunks_are_not_tokens(self):
        answer = replayed("A17")
        self.assertEqual(
            (answer.completion_tokens, answer.content, answer.finish_reason),
            (12, "one two three four five six seven eight nine ten eleven twelve", "length"),
        )
        self.assertEqual(answer.decode_source, "timings")
        self.assertAlmostEqual(answer.decode_tokens / answer.decode_s, 48.0, 9)

    def test_a17_acceptance_comes_from_the_servers_timings(self):
        answer = replayed("A17")
        record = ms.acceptance_record(
            of_answers(ms.acceptance_of_answer(answer.statistics), answer.completion_tokens, 1)
        )
        self.assertEqual(
            tuple(record[k] for k in ("drafted", "accepted", "rate", "tokens_per_target_step")),
            (15, 9, 0.6, 5.5),
        )

    def test_a17_without_usage_and_timings_there_is_no_speed(self):
        events = [delta("one two "), delta("three four ", "length"), b"[DONE]"]
        answer = answered(stream_of(*events))
        self.assertEqual(
            (answer.completion_tokens, answer.decode_s, answer.decode_tokens), (None, None, None)
        )

    def test_b11_an_emoji_cut_by_the_network_is_whole_again(self):
        expected = json.loads((CASES / "B11" / "baseline.json").read_text("utf-8"))["choices"][0][
            "message"
        ]["content"]
        self.assertEqual(expected, "Done \U0001f389 bye")
        for routes in ("routes_b.json", "routes_c.json"):
            with self.subTest(routes):
                answer = replayed("B11", routes)
                self.assertEqual((answer.content, answer.undecodable), (expected, False))

    def test_b11_every_cut_of_the_stream_gives_the_same_text(self):
        raw = (CASES / "B11" / "b_spec_stream.http").read_bytes()
        start = raw.index(b"\r\n\r\n") + 4
        for at in range(start + 1, len(raw), 5):
            builder = ms.AnswerBuilder(0.0)
            builder.add_stream(raw[start:at], iter([raw[at : at + 1], raw[at + 1 :]]))
            self.assertEqual(builder.answer(True).content, "Done \U0001f389 bye")

    def test_b11_half_a_pair_becomes_a_mark_and_a_finding_and_no_error(self):
        answer = replayed("B11", "routes_d.json")
        self.assertEqual((answer.content, answer.undecodable), ("Done \ufffd", True))
        with ReplayServer("routes_d.json", CASES / "B11") as server:
            outcome = measure(
                server,
                server,
                "--model",
                "n",
                "--save-run",
                "run.jsonl",
                prompts=["a", "b"],
            )
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn(
            "undecodable-text", [entry["finding"] for entry in outcome.endpoint()["audit"]]
        )
        for name in ("labbook.md", "run.jsonl"):
            outcome.files[name].decode("ascii")
        readings = [json.loads(line) for line in outcome.files["run.jsonl"].splitlines()]
        self.assertEqual(
            {line["content"] for line in readings if line["kind"] == "reading"}, {"Done \ufffd"}
        )

    def test_bytes_that_are_not_utf_8_are_marked_and_no_error(self):
        for streamed in (True, False):
            with FakeServer("plain", faults=["bad-utf8"], answers=lambda p, n: "a b c") as server:
                answer = ms.complete(endpoint(server, stream=streamed), HI)
            self.assertTrue(answer.undecodable)
            self.assertIn("\ufffd", answer.content)

    def test_b13_the_choice_with_index_0_is_taken_and_others_never_joined(self):
        answer = replayed("B13")
        self.assertEqual(answer.content, "Blue.")
        self.assertIsNone(answer.completion_tokens, "the count covers all choices")
        two = {
            "choices": [
                {"index": 1, "delta": {"content": "Red."}},
                {"index": 0, "delta": {"content": "Blue."}},
            ]
        }
        answer = answered(stream_of(two, delta(None, "stop"), b"[DONE]"))
        self.assertEqual(answer.content, "Blue.")

    def test_a_finish_reason_of_another_choice_does_not_end_the_answer(self):
        other = {"choices": [{"index": 1, "delta": {"content": "Red."}, "finish_reason": "stop"}]}
        with self.assertRaises(ms.RequestFailed):
            answered(stream_of(delta("Blue"), other))

    def test_nulls_and_wrong_types_where_objects_belong_are_no_crash(self):
        for event in (
            {"choices": None},
            {"choices": {}},
            {"choices": [None]},
            {"choices": [{"delta": None}]},
            [],
            None,
            7,
            "x",
            {"choices": [{"delta": {"content": 7, "reasoning": {}}}]},
            {"usage": []},
            {"usage": {"completion_tokens": "3"}},
            {"choices": [], "usage": {"completion_tokens": -1}},
            {"timings": [1]},
            {"error": None, "choices": []},
            {
                "choices": [],
                "usage": {
                    "completion_tokens": True,
                    "prompt_tokens_details": 3,
                    "completion_tokens_details": [],
                },
            },
            {"choices": [], "timings": {"predicted_ms": "NaN", "predicted_n": None}},
        ):
            with self.subTest(event=event):
                answer = answered(stream_of(delta("Hello"), event, delta(None, "stop"), b"[DONE]"))
                self.assertEqual((answer.content, answer.completion_tokens), ("Hello", None))

    def test_numbers_that_json_does_not_know_are_no_crash(self):
        for event in (
            b'{"choices": [], "usage": {"completion_tokens": NaN}}',
            b'{"choices": [], "usage": {"completion_tokens": 1e400}, "timings": {"predicted_ms": Infinity, "predicted_n": 5}}',
            b'{"choices": [], "usage": {"completion_tokens": ' + b"9" * 5000 + b"}}",
        ):
            with self.subTest(event=event[:60]):
                answer = answered(stream_of(delta("Hello"), event, delta(None, "stop"), b"[DONE]"))
                self.assertEqual((answer.content, answer.completion_tokens), ("Hello", None))
                self.assertIsNone(answer.decode_s)

    def test_an_error_object_in_a_stream_is_a_failure_whatever_came_before(self):
        for error in (
            {"error": {"message": "out of memory"}},
            {"error": "out of memory"},
            {"object": "error", "message": "out of memory"},
        ):
            with self.subTest(error=error), self.assertRaises(ms.RequestFailed) as caught:
                answered(stream_of(delta("Hello"), error, b"[DONE]"))
            self.assertIn("out of memory", str(caught.exception))
        raw = stream_of(delta("Hello")) + b'error: {"message": "out of memory"}\n\n'
        with self.assertRaisesRegex(ms.RequestFailed, "out of memory"):
            answered(raw)


class PlainAnswers(unittest.TestCase):
    def test_plain_json_is_read_where_a_stream_was_asked_for(self):
        answer = replayed("D05", [{"method": "POST", "path": CHAT, "file": "chat.http"}])
        self.assertEqual(
            (
                answer.content,
                answer.completion_tokens,
                answer.streamed,
                answer.ttft_s,
                answer.decode_s,
            ),
            ("Hello world", 3, False, None, None),
        )

    def test_a_stream_is_read_where_plain_json_was_asked_for(self):
        answer = replayed("D11", "routes_a.json", stream=False)
        self.assertEqual((answer.content, answer.streamed), ("Hello world", True))

    def test_an_answer_without_choices_is_a_failed_request(self):
        for body in (
            b"{}",
            b"[]",
            b'{"choices": []}',
            b'{"object": "list", "data": []}',
            b"null",
            b"",
            b"  \n",
        ):
            raw = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            with self.subTest(body), self.assertRaises(ms.RequestFailed):
                answered(raw)

    def test_streamed_and_plain_answers_of_one_server_are_equal(self):
        with FakeServer("llama.cpp") as server:
            streamed, plain = (
                ms.complete(endpoint(server, stream=stream), HI) for stream in (True, False)
            )
        self.assertEqual(
            (streamed.content, streamed.completion_tokens, True),
            (plain.content, plain.completion_tokens, True),
        )
        self.assertEqual((streamed.streamed, plain.streamed), (True, False))


class Requests(unittest.TestCase):
    def bodies(self, *flags, engine="plain"):
        with FakeServer(engine, words=3) as server:
            outcome = measure(server, None, *flags, prompts=["hi"])
            self.assertEqual(outcome.code, 0, outcome.err)
            return [chat["body"] for chat in server.chats]

    def test_the_request_is_greedy_streamed_and_asks_for_usage_and_nothing_else(self):
        expected = {
            "model": "fake-model",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 192,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.assertEqual(self.bodies()[1], expected)

    def test_warm_up_differs_in_the_prompt_only(self):
        warm, measured = self.bodies()
        self.assertNotEqual(warm.pop("messages"), measured.pop("messages"))
        self.assertEqual(warm, measured)

    def test_no_stream_asks_for_no_stream_and_no_stream_options(self):
        for body in self.bodies("--no-stream"):
            self.assertFalse(body["stream"])
            self.assertNotIn("stream_options", body)

    def test_extra_body_is_merged_and_null_removes_a_field(self):
        body = self.bodies(
            "--extra-body",
            '{"seed": null, "ignore_eos": true, "temperature": 0.5, "stream_options": null}',
        )[1]
        self.assertEqual((body["ignore_eos"], body["temperature"]), (True, 0.5))
        self.assertFalse({"seed", "stream_options"} & set(body))

    def test_the_extras_of_an_arm_go_to_that_arm_only_and_win(self):
        with FakeServer("plain", words=3) as base, FakeServer("plain", words=3) as drafting:
            measure(
                base,
                drafting,
                "--extra-body",
                '{"a": 1, "b": 1}',
                "--baseline-extra-body",
                '{"b": 2}',
                "--speculative-extra-body",
                '{"c": 3}',
                prompts=["hi"],
            )
            found = [
                {k: chat["body"].get(k) for k in "abc"}
                for server in (base, drafting)
                for chat in server.chats[1:]
            ]
        self.assertEqual(found, [{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 1, "c": 3}])

    def test_seed_and_length_are_those_asked_for(self):
        body = self.bodies("--seed", "7", "--max-tokens", "5")[1]
        self.assertEqual((body["seed"], body["max_tokens"]), (7, 5))

    def test_a_field_that_the_server_rejects_is_named_with_the_way_out(self):
        with FakeServer("plain", reject={"seed": "no seed here"}, words=3) as server:
            outcome = measure(server, None, prompts=["hi"])
            self.assertEqual(outcome.code, 2)
            for words in ("no seed here", "--extra-body", "null", server.url):
                self.assertIn(words, outcome.err)
            self.assertEqual(outcome.records, [])
            self.assertEqual(
                measure(server, None, "--extra-body", '{"seed": null}', prompts=["hi"]).code, 0
            )

    def test_every_request_asks_for_one_choice(self):
        self.assertTrue(all(body.get("n", 1) == 1 for body in self.bodies()))


class WithoutUsage(unittest.TestCase):
    """A server whose streamed warm-up carries no usage is measured without streaming, both servers then alike."""

    def setUp(self):
        # usage in plain answers only: the first request, the warm-up, is the streamed one
        self.shy = FakeServer("plain", words=3)
        self.shy.answers = lambda prompt, n: setattr(
            self.shy, "usage", not prompt.startswith(WARM_UP_WORDS)
        )

    def check(self, base, drafting):
        with base, drafting:
            outcome = measure(base, drafting, prompts=["a", "b"])
            for server in (base, drafting):
                self.assertEqual(
                    [chat["body"]["stream"] for chat in server.chats], [True, False, False]
                )
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("without streaming", outcome.err)
        for arm in ("baseline", "speculative"):
            record = outcome.endpoint(arm)
            self.assertIn("usage-missing", [entry["finding"] for entry in record["audit"]])
            self.assertEqual((record["ttft_s"], record["output_tokens"]), (None, 6))
        self.assertIsNotNone(outcome.comparison()["speedup"])

    def test_a_baseline_without_usage_switches_both_servers(self):
        self.check(self.shy, FakeServer("plain", words=3))

    def test_a_drafting_server_without_usage_switches_both_servers(self):
        self.check(FakeServer("plain", words=3), self.shy)


class DeadlinesAndBounds(unittest.TestCase):
    def failure(self, fault=None, **options):
        with FakeServer("plain", faults=[fault], **options) as server:
            started = time.perf_counter()
            with self.assertRaises(ms.RequestFailed) as caught:
                ms.complete(endpoint(server, timeout_s=0.3, stream=options.get("usage", True)), HI)
            self.assertLess(
                time.perf_counter() - started, 10
            )  # not the server's pace, nor for ever
        return str(caught.exception)

    def test_no_fault_holds_a_request_beyond_its_deadline(self):
        for fault in ("hang", "stall", "dribble-headers"):
            with self.subTest(fault):
                message = self.failure(fault)
                self.assertIn("0.3 s", message)
                self.assertIn("--timeout", message)

    def test_bytes_that_keep_coming_do_not_extend_the_deadline(self):
        self.assertIn("--timeout", self.failure(words=1000, token_delay_s=0.02))

    def test_a_plain_answer_has_the_same_deadline(self):
        self.assertIn("--timeout", self.failure("stall", usage=False))

    def test_a_body_without_end_is_given_up(self):
        with FakeServer("plain", faults=["huge-body"]) as server:
            with (
                mock.patch.object(ms, "MAX_BODY_BYTES", 4 << 20),
                self.assertRaisesRegex(ms.RequestFailed, "4 MiB"),
            ):
                ms.complete(endpoint(server), HI)
            self.assertLess(server.huge_sent, 40 << 20)

    def test_an_unpacked_body_is_bounded_too(self):
        import gzip

        body = gzip.compress(b"x" * (8 << 20))
        raw = (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        with (
            mock.patch.object(ms, "MAX_BODY_BYTES", 1 << 20),
            self.assertRaisesRegex(ms.RequestFailed, "1 MiB"),
        ):
            answered(raw)


class WaitingForAServer(unittest.TestCase):
    """503 and 429 are waited for, announced, bounded, and never timed."""

    def setUp(self):
        self.slept, self.said = [], []
        patch = mock.patch.object(ms.time, "sleep", self.slept.append)
        patch.start()
        self.addCleanup(patch.stop)

    def take(self, server):
        prompt = ms.Prompt("p-1", "p", HI)
        return ms.take_reading(endpoint(server), prompt, ms.Shot(0, 0, 0, 0), self.said.append)

    def test_d05_the_third_try_succeeds_and_the_wait_is_announced_and_noted(self):
        with ReplayServer("routes.json", CASES / "D05") as server:
            reading = self.take(server)
            self.assertEqual(len(server.requests), 3)
        self.assertEqual(
            (reading.answer.content, reading.error, reading.waited_s), ("Hello world", None, 2.0)
        )
        self.assertEqual(self.slept, [1.0, 1.0])
        self.assertEqual(len(self.said), 1)  # told at once, and again after ten seconds
        for line in self.said:
            for words in ("Loading model", "503", server.url, "waiting 1 s"):
                self.assertIn(words, line)

    def test_d05_only_the_successful_try_is_timed(self):
        started = time.perf_counter()
        with mock.patch.object(ms.time, "sleep", lambda seconds: ms.threading.Event().wait(0.15)):
            with ReplayServer("routes.json", CASES / "D05") as server:
                reading = self.take(server)
        self.assertLessEqual(reading.answer.latency_s, time.perf_counter() - started - 0.29)

    def test_d05_after_a_minute_a_clear_message_and_a_failed_run(self):
        with ReplayServer(
            [{"method": "POST", "path": CHAT, "file": "loading.http"}], CASES / "D05"
        ) as server:
            outcome = run_main("--baseline-url", server.url, "--model", "n", prompts=["a"])
        record = outcome.endpoint()
        self.assertEqual(
            (outcome.code, *(record[k] for k in ("requests", "completed", "failed"))), (1, 1, 0, 1)
        )
        self.assertIn("Loading model", record["first_error"])
        self.assertIn("still", record["first_error"])
        self.assertLessEqual(sum(self.slept), 2 * ms.MAX_WAIT_S)
        self.assertIsNone(record["output_tokens_per_s"])

    def test_retry_after_is_respected_within_bounds(self):
        for status in ("429", "503"):
            for told, expected in (
                (7, 7.0),
                ("soon", 1.0),
                (-3, 0.5),
                ("Wed, 21 Oct 2099 07:28:00 GMT", 1.0),
                ("nan", 1.0),
                ("inf", 1.0),
            ):
                with self.subTest(status, told=told):
                    del self.slept[:]
                    with FakeServer(
                        "plain", faults=[status + "-retry-after"], retry_after_s=told
                    ) as server:
                        reading = self.take(server)
                    self.assertEqual((self.slept, reading.waited_s), ([expected], expected))
                    self.assertIsNotNone(reading.answer)

    def test_without_retry_after_there_is_a_wait_all_the_same(self):
        with FakeServer("plain", faults=["429", "503"]) as server:
            self.assertIsNotNone(self.take(server).answer)
        self.assertEqual(len(self.slept), 2)
        self.assertTrue(all(0 < seconds <= 60 for seconds in self.slept))

    def test_no_more_than_a_minute_is_waited_for_one_request(self):
        for told in (0, 25, 100_000):
            with self.subTest(told):
                del self.slept[:]
                with FakeServer(
                    "plain", faults=["503-retry-after"], repeat_fault=True, retry_after_s=told
                ) as server:
                    reading = self.take(server)
                self.assertIn("503", reading.error)
                self.assertLessEqual(sum(self.slept), 60.0)
                self.assertGreaterEqual(sum(self.slept), 35.0)

    def test_waiting_is_a_finding_and_not_in_the_time(self):
        with FakeServer("plain", faults=[None, "503-retry-after"], retry_after_s=9) as server:
            outcome = measure(server, None, prompts=["a", "b"])
        record = outcome.endpoint()
        self.assertIn("waited", [entry["finding"] for entry in record["audit"]])
        self.assertLess(record["wall_s"], 9)
        self.assertEqual((record["completed"], record["failed"]), (2, 0))
        self.assertIn("waiting 9 s", outcome.err)

    def test_other_statuses_are_not_waited_for(self):
        for status in ("400", "404", "500", "502", "504"):
            with self.subTest(status), FakeServer("plain", faults=[status]) as server:
                self.assertIn(f"HTTP {status}", self.take(server).error)
                self.assertEqual(len(server.chats), 1)
        self.assertEqual(self.slept, [])


class BaseUrls(unittest.TestCase):
    """Case D12."""

    def test_every_form_of_base_url_means_the_same_server(self):
        for url, (chat, metrics) in json.loads(
            (CASES / "D12" / "urls.json").read_text("utf-8")
        ).items():
            api, root = ms.base_urls(url, "--baseline-url")
            host = re.match("http://[^/]+", url)[0]
            with self.subTest(url):
                self.assertEqual(
                    (api + "/chat/completions", root + "/metrics"), (host + chat, host + metrics)
                )

    def test_more_forms_that_people_paste_mean_the_same_server(self):
        for form in ("/v1//", "//", "/v1/chat/completions", "/v1/chat/completions/", " "):
            with self.subTest(form):
                self.assertEqual(
                    ms.base_urls("http://h:8080" + form, "--baseline-url"),
                    ("http://h:8080/v1", "http://h:8080"),
                )
        self.assertEqual(ms.base_urls("http://h/v3", "--baseline-url"), ("http://h/v3", "http://h"))

    def test_requests_go_to_one_address_whatever_the_form(self):
        for form in ("", "/", "/v1", "/v1/"):
            with self.subTest(form), ReplayServer("routes.json", CASES / "D12") as server:
                outcome = run_main(
                    "--baseline-url", server.root + form, "--model", "n", prompts=["a"]
                )
                self.assertEqual(outcome.code, 0, outcome.err)
                self.assertEqual(
                    {r["path"] for r in server.requests if r["method"] == "POST"}, {CHAT}
                )
                self.assertEqual(outcome.endpoint()["base_url"], server.url)

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


class OneHostOnly(unittest.TestCase):
    def test_d09_proxies_in_the_environment_are_ignored(self):
        env = json.loads((CASES / "D09" / "env.json").read_text("utf-8"))
        with (
            ReplayServer("routes.json", CASES / "D09") as proxy,
            ReplayServer("routes.json", CASES / "D09") as server,
        ):
            for address in ("http://127.0.0.1:9", proxy.root):
                values = {name: value and address for name, value in env.items()}
                ms._opener.cache_clear()
                self.addCleanup(ms._opener.cache_clear)
                with mock.patch.dict(os.environ, values):
                    for host in ("127.0.0.1", "localhost"):
                        api = server.url.replace("127.0.0.1", host)
                        answer = ms.complete(ms.Endpoint("baseline", api, server.root), HI)
                        self.assertEqual(answer.content, "Hello world")
            self.assertEqual(proxy.requests, [])
            self.assertEqual(len(server.requests), 4)

    def test_redirects_are_not_followed(self):
        for method in ("complete", "get_text"):
            with (
                FakeServer("plain") as other,
                FakeServer(
                    "plain", faults=["redirect"], page_faults={"/x": ["redirect"]}
                ) as server,
            ):
                server.redirect_to = other.url + "/chat/completions"
                with self.subTest(method), self.assertRaises(ms.RequestFailed) as caught:
                    if method == "complete":
                        ms.complete(endpoint(server), HI)
                    else:
                        ms.get_text(server.root + "/x")
                self.assertEqual(other.requests, [])
                self.assertEqual(len(server.requests), 1)
                self.assertIn("redirect", str(caught.exception))
                self.assertIn(other.url, str(caught.exception))


class StreamsThatWereHeldBack(unittest.TestCase):
    """A proxy or server that gives the whole stream at once."""

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

    def test_a_stream_that_arrives_in_pieces_has_a_decode_time(self):
        record = self.record(delay_ms=30)
        self.assertEqual(record["decode_source"], "stream-approximate")
        self.assertLess(record["decode_tokens_per_s"], 19 / 0.03)


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

    def test_a_metrics_address_without_a_host_name_ends_nothing(self):
        with FakeServer("plain") as server:
            outcome = measure(
                server, None, "--baseline-metrics-url", "http://a..b/metrics", prompts=["one"]
            )
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("host name", findings(outcome.endpoint())["metrics-unavailable"]["detail"])


def timed(events, pause_s=0.05, **more):
    """complete() against these events (objects or bytes), with a pause before each but the first."""
    raw, splits = http(b"", "text/event-stream"), []
    for event in events:
        splits.append(len(raw))
        raw += event if isinstance(event, bytes) else b"data: %s\n\n" % json.dumps(event).encode()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "x.http").write_bytes(raw)
        entry = {"method": "POST", "path": CHAT, "file": "x.http", "split": splits[1:]}
        entry["delay_ms"] = 1000 * pause_s
        with ReplayServer([entry], folder) as server:
            return ms.complete(endpoint(server, **more), HI)


def part(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
DONE = b"data: [DONE]\n\n"


def counted(tokens, **more):
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, **more}
    return {"choices": [], "usage": usage}


def call(name="", arguments="", **more):
    return {"function": {"name": name, "arguments": arguments}, **more}


class ToolCalls(unittest.TestCase):
    """An answer is content, reasoning and tool calls: all move the clock, all are compared."""

    EVENTS = (
        part(content="Wait."),
        part(tool_calls=[call("weather", "", index=0, id="t1")]),
        part(tool_calls=[call(arguments='{"city": ', index=0)]),
        part(tool_calls=[call(arguments='"Oslo"}', index=0)]),
        FINISH,
        counted(4),
        DONE,
    )
    OSLO = '[{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}]'

    def test_the_arguments_of_a_tool_call_are_part_of_the_answer_and_move_its_clock(self):
        answer = timed(self.EVENTS)
        self.assertEqual((answer.content, answer.tool_calls), ("Wait.", self.OSLO))
        self.assertEqual(answer.decode_tokens, 3)
        self.assertGreater(answer.decode_s, 0.1)

    def test_a_plain_answer_gives_the_same_tool_calls_as_a_stream(self):
        message = {"content": "Wait.", "tool_calls": [call("weather", '{"city": "Oslo"}', id="t")]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        body = {**counted(4), "choices": [choice]}
        answer = answered(http(json.dumps(body).encode()))
        self.assertEqual(answer.texts, ("Wait.", "", self.OSLO))

    def test_calls_without_a_place_stand_in_the_order_in_which_their_names_came(self):
        events = [part(tool_calls=[call("a", "1"), call("b", "2")]), part(tool_calls=[call("c")])]
        answer = timed([*events, FINISH, counted(3), DONE], 0)
        names = [each["name"] for each in json.loads(answer.tool_calls)]
        self.assertEqual(names, ["a", "b", "c"])

    def test_a_refusal_is_content(self):
        events = [part(content=None, refusal="I "), part(refusal="cannot."), FINISH, counted(2)]
        self.assertEqual(timed([*events, DONE], 0).content, "I cannot.")

    def test_arguments_that_differ_are_changed_text(self):
        def stream_of(city):
            calls = [call("weather", '{"city": "%s"}' % city, index=0)]
            events = [part(content="Wait."), part(tool_calls=calls), FINISH, counted(9)]
            raw = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events)
            return http(raw + DONE, "text/event-stream")

        outcome = measure_canned(
            stream_of("Oslo"), stream_of("Bergen"), "--fail-on", "changed-text", *SAVE
        )
        found = outcome.comparison()["text_comparison"]["divergences"]
        self.assertEqual((outcome.code, {each["where"] for each in found}), (3, {"tool_calls"}))
        self.assertTrue(found[0]["baseline_tail"].startswith("Oslo"))
        self.assertEqual(found[0]["triage"]["finding"], "not-known")
        lines = [json.loads(line) for line in outcome.files["run.jsonl"].splitlines()]
        old = [
            {name: line[name] for name in line if name != "tool_calls"} if "arm" in line else line
            for line in lines
        ]
        saved = b"".join(json.dumps(line).encode() + b"\n" for line in old)
        again = run_main("compare", "old.jsonl", files={"old.jsonl": saved})
        texts = again.comparison()["text_comparison"]
        self.assertEqual((texts["compared"], texts["identical"]), (2, 2), "lines of 1.0 have none")


class TimesThatCannotBe(unittest.TestCase):
    """Timings that contradict the request's own time, or its usage, make no speed."""

    def answer(self, timings, tokens=4, pause_s=0.03):
        words = [part(content=" w%d" % i) for i in range(4)]
        return timed([*words, FINISH, {**counted(tokens), "timings": timings}, DONE], pause_s)

    def check(self, timings, doubtful, **more):
        answer = self.answer(timings, **more)
        self.assertEqual(answer.timings_doubtful, doubtful)
        self.assertEqual(answer.decode_s is None, doubtful)
        self.assertEqual(answer.decode_source, None if doubtful else "timings")

    def test_times_like_those_of_the_stream_are_believed(self):
        self.check({"predicted_n": 4, "predicted_ms": 90.0}, False)

    def test_a_time_longer_than_the_request_is_not_believed(self):
        self.check({"predicted_n": 4, "predicted_ms": 9000.0}, True)

    def test_seconds_in_place_of_milliseconds_are_not_believed(self):
        self.check({"predicted_n": 4, "predicted_ms": 0.09}, True)

    def test_tokens_far_from_usage_are_not_believed(self):
        self.check({"predicted_n": 40, "predicted_ms": 90.0}, True)

    def test_the_finding_says_so_and_there_is_no_decode_speed(self):
        answer = stream('{"choices": [], "timings": {"predicted_n": 3, "predicted_ms": 9e5}}')
        raw = http(answer, "text/event-stream")
        outcome = measure_canned(raw, raw, clocks=True)
        record = outcome.endpoint("speculative")
        self.assertIn("timings-doubtful", findings(record))
        self.assertIsNone(record["decode_tokens_per_s"])

    def test_text_that_a_proxy_held_back_has_no_decode_speed(self):
        words = [part(content=" w%d" % i) for i in range(20)]
        first = [b": held\n\n", b": held\n\n", b": held\n\n"]
        answer = timed([*first, words[0], FINISH, counted(20), DONE])
        self.assertIsNone(answer.decode_s)
        raw = [
            b"".join(b"data: %s\n\n" % json.dumps(w).encode() for w in half)
            for half in (words[:10], words[10:])
        ]
        answer = timed([*first, *first, *raw, FINISH, counted(20), DONE])
        self.assertEqual((answer.decode_s, answer.decode_tokens), (None, None))
        self.assertFalse(answer.timings_doubtful)


class TokensThatNobodySaw(unittest.TestCase):
    def test_thinking_that_is_counted_and_never_sent_leaves_the_decode_speed(self):
        words = [part(content=" w%d" % i) for i in range(5)]
        usage = counted(25, completion_tokens_details={"reasoning_tokens": 20})
        thinking = [b": thinking\n\n"] * 20
        answer = timed([*thinking, *words, FINISH, usage, DONE], 0.01)
        self.assertEqual((answer.decode_tokens, answer.completion_tokens), (4, 25))
        self.assertEqual(answer.silent_tokens, 0)

    def test_thinking_that_is_shown_stays_in_it(self):
        events = [part(reasoning_content=" t%d" % i) for i in range(5)]
        usage = counted(6, completion_tokens_details={"reasoning_tokens": 5})
        answer = timed([*events, part(content="yes"), FINISH, usage, DONE], 0.01)
        self.assertEqual(answer.decode_tokens, 5)

    def test_more_than_twice_the_rate_of_the_whole_answer_is_no_decode_speed(self):
        events = [b": thinking\n\n"] * 30 + [part(content="yes"), part(content=" no")]
        answer = timed([*events, FINISH, counted(32), DONE], 0.01)
        self.assertIsNone(answer.decode_s)

    def test_a_count_of_0_beside_text_is_no_count(self):
        answer = timed([part(content="yes"), part(content=" no"), FINISH, counted(0), DONE], 0)
        self.assertIsNone(answer.completion_tokens)

    def test_tokens_counted_without_any_text_are_silent(self):
        for tokens, thought, silent in ((40, 0, 40), (2, 0, 0), (40, 40, 0)):
            with self.subTest(tokens=tokens, thought=thought):
                details = {"completion_tokens_details": {"reasoning_tokens": thought}}
                answer = timed([FINISH, counted(tokens, **details), DONE], 0)
                self.assertEqual(answer.silent_tokens, silent)


class EndsOfStreams(unittest.TestCase):
    WORDS = (part(content="one"), part(content=" two"))

    def test_a_stream_that_stays_open_behind_its_usage_ends_after_a_second(self):
        whole = b"".join(
            b"data: %s\n\n" % json.dumps(each).encode()
            for each in (*self.WORDS, FINISH, counted(2))
        )
        started = time.perf_counter()
        answer = timed([whole, DONE], 4, timeout_s=30)
        self.assertEqual(answer.content, "one two")
        self.assertLess(
            time.perf_counter() - started, 6
        )  # the server's own end waits for its pause
        self.assertLess(answer.latency_s, 0.9)

    def test_a_stream_that_goes_on_behind_its_usage_ends_too(self):
        for more in (b": ping\n\n", counted(2)):
            events = [*self.WORDS, FINISH, counted(2), *[more] * 30]
            answer = timed(events, 0.1, timeout_s=30)
            self.assertEqual((answer.content, answer.completion_tokens), ("one two", 2))
            self.assertLess(answer.latency_s, 0.9)

    def test_text_that_follows_usage_on_every_chunk_is_read_on_and_its_time_counts(self):
        """Usage on every chunk, and a finish reason too early: nothing is cut, nothing is free."""
        pieces = [part(content=" word") for _ in range(4)]
        early = dict(pieces[0], usage={"prompt_tokens": 1, "completion_tokens": 1})
        early["choices"] = [dict(early["choices"][0], finish_reason="stop")]
        answer = timed([early, *pieces[1:], counted(4), DONE], 0.4)
        self.assertEqual(answer.content, " word" * 4)
        self.assertGreater(answer.latency_s, 1.1)

    def test_a_reset_behind_usage_and_finish_reason_ends_a_whole_answer(self):
        builder = ms.AnswerBuilder(time.perf_counter())

        def pieces():
            yield b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in (FINISH, counted(2)))
            raise ConnectionResetError

        begun = b"data: %s\n\n" % json.dumps(part(content="one two")).encode()
        builder.add_stream(begun, pieces())
        self.assertEqual(builder.answer(streamed=True).completion_tokens, 2)

    def test_silence_before_the_usage_is_waited_for(self):
        answer = timed([*self.WORDS, FINISH, counted(2), DONE], 1.2)
        self.assertEqual((answer.content, answer.completion_tokens), ("one two", 2))

    def test_a_ping_with_a_message_is_no_error(self):
        ping = b'event: ping\ndata: {"message": "still here"}\n\n'
        answer = timed([ping, self.WORDS[0], ping, FINISH, counted(1), DONE], 0)
        self.assertEqual(answer.content, "one")

    def test_interim_responses_are_no_answer(self):
        interim = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"
        self.assertEqual(
            answered(interim + http(stream(), "text/event-stream")).completion_tokens, 3
        )

    def test_a_packed_error_page_is_unpacked(self):
        page = gzip.compress(b'{"error": {"message": "no such seed"}}')
        with self.assertRaisesRegex(ms.RequestFailed, "HTTP 400: no such seed"):
            answered(http(page, status="400 Bad Request"))

    def test_an_error_nested_2000_deep_is_one_line(self):
        for depth in range(850, 1000):  # what can be read, but not written
            nested = b'data: {"error": %s1%s}\n\n' % (b"[" * depth, b"]" * depth)
            with contextlib.suppress(ms.RequestFailed):
                ms.AnswerBuilder(0.0).add_stream(nested, iter(()))
        for depth in (600, 2000):
            nested = b'{"error": %s1%s}' % (b"[" * depth, b"]" * depth)
            for raw in (
                http(b"data: %s\n\n" % nested, "text/event-stream"),
                http(nested),
                http(nested, status="400 Bad Request"),
            ):
                with self.assertRaises(ms.RequestFailed) as caught:
                    answered(raw)
                self.assertLess(len(str(caught.exception)), 400)

    def test_a_character_split_over_two_events_as_raw_bytes_is_that_character(self):
        halves = [b"a \xf0\x9f", b"\x98\x80 b"]
        events = [b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % h for h in halves]
        answer = timed([*events, FINISH, counted(2), DONE], 0)
        self.assertEqual((answer.content, answer.undecodable), ("a \U0001f600 b", False))
        answer = timed([*events[::-1], FINISH, counted(2), DONE], 0)
        self.assertTrue(answer.undecodable)
        self.assertIn("\ufffd", answer.content)


if __name__ == "__main__":
    unittest.main()
