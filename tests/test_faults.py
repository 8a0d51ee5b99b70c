"""Servers that misbehave: one clear line that names the server and what to do; never a traceback, a hang or a number."""

import re
import socket
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import HUGE_BYTES, FakeServer
from tests.support import measure, run_main

TIMEOUT = 0.2  # where it is to be exceeded; elsewhere a busy machine gets
PATIENCE = 30.0
BOUND = ms.MAX_BODY_BYTES  # as it is; the tests lower it, for speed
DEADLINE = ("no answer within 0.2 s", "--timeout")
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

# fault of /v1/models, exit code where the model was named, and what is said then
MODELS = [
    ("refuse", 2, ("closed the connection",)),
    ("hang", 2, DEADLINE),
    ("dribble-headers", 2, DEADLINE),
    ("huge-body", 2, ("more than 4 MiB",)),
    ("html", 0, ()),
    ("half-json", 0, ()),
    ("404", 0, ()),
    ("500", 0, ()),
    ("401", 2, ("HTTP 401", "SPEC_API_KEY")),
    ("403", 2, ("HTTP 403", "SPEC_API_KEY")),
    ("redirect", 2, ("redirects to", "give the final URL")),
    ("429", 2, ("HTTP 429", "after waiting", "try again")),
    ("503-retry-after", 2, ("HTTP 503", "Loading model", "try again when the model is loaded")),
]


class Faults(unittest.TestCase):
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


class ChatFaults(Faults):
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
        self.assertEqual(1, outcome.code, outcome.err)
        self.check_clean(outcome)
        self.check_line(outcome.err, server, words)
        self.assertLess(elapsed, 3 * TIMEOUT + 20)  # a warm-up and two prompts
        record = outcome.endpoint()
        self.assertEqual(
            (2, 0, 2), tuple(record[name] for name in ("requests", "completed", "failed"))
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
                    self.assertEqual(1, outcome.code)
                    self.assertEqual(
                        ["endpoint", "endpoint"], [record["kind"] for record in outcome.records]
                    )
                    self.check_clean(outcome)
                    self.assertNotRegex(outcome.out, "PAYS|UNDECIDED|[0-9]x\\b")
                    arms = ("baseline", "speculative")
                    self.check_no_number(outcome.endpoint(arms[broken]))
                    good = outcome.endpoint(arms[1 - broken])
                    self.assertEqual((2, 12), (good["completed"], good["output_tokens"]))

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
                self.assertEqual(0, outcome.code, outcome.err)
                self.check_clean(outcome)
                texts = outcome.comparison()["text_comparison"]
                self.assertEqual(
                    (3, 3, 0, 1),
                    tuple(texts[k] for k in ("compared", "identical", "divergent", "failed")),
                )
                self.assertEqual(3, outcome.comparison()["speedup"]["prompts"])
                self.assertEqual(
                    (4, 4, 0, 24),
                    tuple(
                        outcome.endpoint()[k]
                        for k in ("requests", "completed", "failed", "output_tokens")
                    ),
                )
                lost = outcome.endpoint("speculative")
                self.assertEqual(
                    (4, 3, 1, 18),
                    tuple(lost[k] for k in ("requests", "completed", "failed", "output_tokens")),
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
        self.assertEqual(2, outcome.code)
        (line,) = [line for line in outcome.err.splitlines() if "first" in line]
        self.assertIn("second", line)
        self.assertLess(len(line), 700)
        self.assertTrue(outcome.err.isascii() and "\x1b" not in outcome.err)


class PreflightFaults(Faults):
    def test_each_fault_of_the_model_list_is_one_clear_line_or_no_obstacle(self):
        for fault, code, words in MODELS:
            with (
                self.subTest(fault),
                FakeServer(
                    "plain", words=3, page_faults={"/v1/models": [fault]}, repeat_fault=True
                ) as server,
            ):
                del self.slept[:]
                started = time.perf_counter()
                outcome = measure(
                    server,
                    None,
                    "--timeout",
                    TIMEOUT if words == DEADLINE else PATIENCE,
                    "--model",
                    "fake-model",
                    prompts=["a"],
                )
                self.assertLess(time.perf_counter() - started, 20)
                self.assertEqual(code, outcome.code, outcome.err)
                self.check_clean(outcome)
                if code:
                    self.check_line(outcome.err, server, words)
                    self.assertEqual(([], [], ""), (server.chats, outcome.records, outcome.out))
                self.assertLessEqual(sum(self.slept), 60)

    def test_without_a_model_name_an_unreadable_list_asks_for_one(self):
        for fault in ("html", "half-json", "404", "500"):
            with (
                self.subTest(fault),
                FakeServer(
                    "plain", page_faults={"/v1/models": [fault]}, repeat_fault=True
                ) as server,
            ):
                outcome = measure(server, None, prompts=["a"])
                self.assertEqual((2, []), (outcome.code, server.chats))
                self.check_line(outcome.err, server, ("--model",))

    def test_a_closed_port_is_said(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d/v1" % free.getsockname()[1]
        outcome = run_main("--baseline-url", url, "--model", "m")
        self.assertEqual((2, 1), (outcome.code, outcome.err.count("\n")))
        for words in ("connection refused", "is the server running", url):
            self.assertIn(words, outcome.err)

    def test_an_unknown_host_is_said(self):
        with mock.patch.object(
            socket, "getaddrinfo", side_effect=socket.gaierror(-2, "Name or service not known")
        ):
            outcome = run_main("--baseline-url", "http://no-such-host:8080/v1", "--model", "m")
        self.assertEqual((2, 1), (outcome.code, outcome.err.count("\n")))
        for words in ("http://no-such-host:8080/v1", "host name"):
            self.assertIn(words, outcome.err)

    def test_something_that_is_no_http_server_is_said(self):
        import threading

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()

            def greet():
                client, _ = listener.accept()
                with client:
                    client.recv(65536)
                    client.sendall(b"220 mail.example ESMTP ready\r\n")

            thread = threading.Thread(target=greet)
            thread.start()
            url = "http://127.0.0.1:%d/v1" % listener.getsockname()[1]
            outcome = run_main("--baseline-url", url, "--model", "m")
            thread.join()
        self.assertEqual((2, 1), (outcome.code, outcome.err.count("\n")), outcome.err)
        self.assertIn(url, outcome.err)
        self.assertIn("is this an HTTP server", outcome.err)

    def test_faults_of_side_pages_stop_nothing(self):
        pages = (
            "/metrics",
            "/props",
            "/version",
            "/server_info",
            "/info",
            "/api/version",
            "/api/extra/version",
            "/slots",
        )
        for fault in ("refuse", "html", "half-json", "500", "redirect", "401", "huge-body"):
            with (
                self.subTest(fault),
                FakeServer(
                    "llama.cpp",
                    words=3,
                    page_faults={page: [fault] for page in pages},
                    repeat_fault=True,
                ) as server,
            ):
                outcome = measure(server, None, prompts=["a"])
                self.assertEqual(0, outcome.code, outcome.err)
                self.check_clean(outcome)
                record = outcome.endpoint()
                self.assertIsNone(record["spec_metrics_delta"])
                self.assertIn(
                    "metrics-unavailable", [entry["finding"] for entry in record["audit"]]
                )

    def test_side_pages_that_hang_cost_no_more_than_the_timeout_each(self):
        pages = ("/metrics", "/props", "/slots")
        with FakeServer(
            "llama.cpp", words=3, page_faults={page: ["hang"] for page in pages}, repeat_fault=True
        ) as server:
            started = time.perf_counter()
            outcome = measure(server, None, "--timeout", "0.5", prompts=["a"])
            self.assertLess(time.perf_counter() - started, 20)
        self.assertEqual(0, outcome.code, outcome.err)

    def test_a_metrics_page_that_dies_in_the_run_is_unavailable_and_not_zero(self):
        for fault in ("hang", "503", "html", "half-json"):
            with (
                self.subTest(fault),
                FakeServer(
                    "vllm",
                    words=3,
                    page_faults={"/metrics": [None, None, fault]},
                    repeat_fault=True,
                ) as server,
            ):
                outcome = measure(
                    server, None, "--timeout", "0.5" if fault == "hang" else PATIENCE, prompts=["a"]
                )
                self.assertEqual(0, outcome.code, outcome.err)
                record = outcome.endpoint()
                self.assertIsNone(record["spec_metrics_delta"])
                self.assertEqual((1, 3), (record["completed"], record["output_tokens"]))


class RunFiles(Faults):
    def test_failed_requests_stand_in_the_run_file_with_their_errors_and_without_text(self):
        import json

        with FakeServer("plain", faults=[None, "close-mid-body", None], words=6) as server:
            outcome = measure(server, None, "--save-run", "run.jsonl", prompts=["a", "b"])
        lines = [json.loads(line) for line in outcome.files["run.jsonl"].splitlines()]
        lost, good = [line for line in lines if line["kind"] == "reading"]
        self.assertIn(server.url, lost["error"])
        self.assertFalse(lost.get("content"))
        self.assertEqual((None, 6), (good["error"], good["completion_tokens"]))

    def test_the_report_says_how_many_requests_failed(self):
        with FakeServer("plain", faults=[None, "500", None], words=6) as server:
            outcome = measure(server, None, prompts=["a", "b", "c"])
        self.assertTrue(re.search(r"2 of 3|1 of 3|1 failed", outcome.out), outcome.out)


if __name__ == "__main__":
    unittest.main()
