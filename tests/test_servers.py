"""Servers: before the first request, what a server is and whether it can be measured."""

import socket
import threading
import time
import unittest
import urllib.parse
import urllib.request
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, ENGINES, FakeServer, Handler, Loopback, ReplayServer, Speculation
from tests.support import (
    DEADLINE,
    PATIENCE,
    TIMEOUT,
    FaultyServers,
    findings,
    measure,
    run_main,
)

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


class ModelNames(unittest.TestCase):
    def test_the_only_model_listed_is_measured_without_being_named(self):
        with FakeServer("plain", model="the-one", words=3) as server:
            outcome = measure(server, None, prompts=["a"])
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertEqual({chat["body"]["model"] for chat in server.chats}, {"the-one"})
        self.assertEqual(outcome.endpoint()["model"], "the-one")

    def test_each_server_is_asked_for_its_own_only_model(self):
        with (
            FakeServer("plain", model="a", words=3) as base,
            FakeServer("plain", model="b", words=3) as drafting,
        ):
            outcome = measure(base, drafting, prompts=["x"])
        self.assertEqual(
            (outcome.endpoint()["model"], outcome.endpoint("speculative")["model"]), ("a", "b")
        )
        self.assertEqual(
            tuple(outcome.comparison()[k] for k in ("model", "baseline_model")), ("b", "a")
        )
        self.assertIn("model-differs", findings(outcome.comparison()))

    def test_of_several_models_one_has_to_be_named_and_they_are_listed(self):
        with FakeServer("plain", models=["one", "two", "three"]) as server:
            outcome = measure(server, None, prompts=["x"])
            self.assertEqual((outcome.code, server.chats), (2, []))
        for words in ("one, two, three", "--model", server.url):
            self.assertIn(words, outcome.err)
        self.assertEqual(outcome.err.count("\n"), 1)

    def test_one_of_several_models_is_measured_when_named(self):
        with FakeServer("vllm", models=["one", "two"], words=3) as server:
            outcome = measure(server, None, "--model", "two", prompts=["x"])
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertEqual({chat["body"]["model"] for chat in server.chats}, {"two"})
        self.assertEqual(outcome.err, "")

    def test_the_drafting_server_may_call_the_model_otherwise(self):
        with (
            FakeServer("vllm", model="m", words=3) as base,
            FakeServer("vllm", model="m-eagle", words=3) as drafting,
        ):
            outcome = measure(
                base, drafting, "--model", "m", "--speculative-model", "m-eagle", prompts=["x"]
            )
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertEqual(
                [{c["body"]["model"] for c in s.chats} for s in (base, drafting)],
                [{"m"}, {"m-eagle"}],
            )

    def test_a_model_that_is_not_listed_is_a_warning_where_the_engine_takes_any_name(self):
        with FakeServer("llama.cpp", models=["one", "two"], words=3) as server:
            outcome = measure(server, None, "--model", "other", prompts=["x"])
        self.assertEqual(outcome.code, 0)
        for words in ("other", "one, two", server.url):
            self.assertIn(words, outcome.err)

    def test_a_model_that_is_not_served_is_refused_with_the_list_even_if_quiet(self):
        for flags in ((), ("--quiet",)):
            with self.subTest(flags), FakeServer("vllm", models=["one", "two"]) as server:
                outcome = measure(server, None, "--model", "other", *flags, prompts=["x"])
                self.assertEqual((outcome.code, outcome.records, len(server.chats)), (2, [], 1))
                for words in ("`other` does not exist", "one, two", server.url):
                    self.assertIn(words, outcome.err)

    def test_a_server_without_a_model_list_is_measured_if_the_model_is_named(self):
        for page in (
            (404, "application/json", b'{"detail": "Not Found"}'),
            (200, "text/html", b"<html>"),
            (200, "text/plain", b""),
            (405, "text/plain", b"no"),
            {"data": None},
            {"data": [None, {"id": None}, 3]},
            [],
            {"data": {"id": "x"}},
            "3",
        ):
            with (
                self.subTest(page),
                FakeServer("plain", pages={"/v1/models": page}, words=3) as server,
            ):
                self.assertEqual(measure(server, None, "--model", "m", prompts=["x"]).code, 0)
                outcome = measure(server, None, prompts=["x"])
                self.assertEqual(outcome.code, 2)
                self.assertIn("--model", outcome.err)

    def test_both_servers_are_checked_before_the_first_request(self):
        with (
            FakeServer("plain", words=3) as base,
            FakeServer("plain", models=["one", "two"]) as drafting,
        ):
            outcome = measure(base, drafting, prompts=["x"])
            self.assertEqual((outcome.code, base.chats, drafting.chats), (2, [], []))
        self.assertIn("speculative", outcome.err)

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


class WaysToAServer(unittest.TestCase):
    def test_401_and_403_name_the_variable_that_was_read(self):
        for status in ("401", "403"):
            for flags, variable in (((), "SPEC_API_KEY"), (("--api-key-env", "MY_KEY"), "MY_KEY")):
                for env, said in (
                    ({variable: "a-key-1234"}, "was sent"),
                    ({variable: ""}, "is not set"),
                ):
                    with (
                        self.subTest(status, env=env),
                        FakeServer("plain", page_faults={"/v1/models": [status]}) as server,
                    ):
                        outcome = measure(
                            server, None, *flags, "--model", "m", env=env, prompts=["x"]
                        )
                        self.assertEqual((outcome.code, server.chats), (2, []))
                        for words in (
                            "HTTP " + status,
                            variable,
                            said,
                            "--api-key-env",
                            server.url,
                        ):
                            self.assertIn(words, outcome.err)

    def test_a_key_that_only_the_requests_need_is_asked_for_by_its_variable(self):
        with FakeServer("plain", faults=["401"], repeat_fault=True) as server:
            outcome = measure(server, None, env={"SPEC_API_KEY": ""}, prompts=["x"])
        self.assertEqual((outcome.code, outcome.records), (2, []))
        self.assertIn("SPEC_API_KEY", outcome.err)

    def test_a_server_that_loads_is_waited_for_and_that_is_said(self):
        slept = []
        with (
            mock.patch.object(ms.time, "sleep", slept.append),
            FakeServer(
                "plain",
                page_faults={"/v1/models": ["503", "503-retry-after"]},
                retry_after_s=4,
                words=3,
            ) as server,
        ):
            outcome = measure(server, None, prompts=["x"])
        self.assertEqual((outcome.code, slept[:2]), (0, [1.0, 4.0]))
        for words in ("Loading model", "waiting 1 s", server.url):
            self.assertIn(words, outcome.err)

    def test_https_is_refused_with_the_reason_and_the_way_out(self):
        for flags in (
            ["--baseline-url", "https://h/v1"],
            ["--speculative-url", "HTTPS://h/v1"],
            ["--speculative-url", "k4=https://h"],
            [
                "--baseline-url",
                "http://127.0.0.1:9/v1",
                "--baseline-metrics-url",
                "https://h/metrics",
            ],
        ):
            with (
                self.subTest(flags),
                mock.patch.object(socket, "create_connection", side_effect=AssertionError),
            ):
                outcome = run_main(*flags)
            self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1))
            for words in ("https", "timed", "plain http", "tunnel"):
                self.assertIn(words, outcome.err)

    def test_other_urls_are_refused_by_option(self):
        for url in (
            "ftp://h/v1",
            "h:8080",
            "127.0.0.1:8080/v1",
            "localhost:8080/v1",
            "/v1",
            "http://",
            "http:///v1",
            "",
            " ",
            "http://h:99999/v1",
            "http://h:x/v1",
            "http://[::1/v1",
            "http://h/v1?model=m",
            "http://h/v1#x",
            "http://h/a b",
            "http://h/a\nb",
            "file:///etc/hosts",
        ):
            with (
                self.subTest(url),
                mock.patch.object(socket, "create_connection", side_effect=AssertionError),
            ):
                outcome = run_main("--baseline-url", url)
                self.assertEqual(outcome.code, 2, outcome.err)
                self.assertEqual(outcome.err.count("\n"), 1, outcome.err)
                self.assertIn("--baseline-url", outcome.err)

    def test_a_metrics_url_may_have_a_query(self):
        with FakeServer("llama.cpp", words=3) as server:
            outcome = measure(
                server,
                None,
                "--baseline-metrics-url",
                server.root + "/metrics?model=fake-model",
                prompts=["x"],
            )
            self.assertIn("/metrics?model=fake-model", [r["path"] for r in server.requests])
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertNotIn("metrics-unavailable", findings(outcome.endpoint()))

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


class BusyServers(unittest.TestCase):
    def test_a_busy_server_is_said_and_recorded(self):
        for name in ("vllm", "vllm-old", "sglang", "llama.cpp", "tgi", "lmdeploy", "tensorrt-llm"):
            for busy in ((2, 1), (1, 0), (0, 1)):
                with (
                    self.subTest(name, busy=busy),
                    FakeServer(name, busy=busy, words=3) as server,
                    mock.patch.object(ms, "SETTLE_LIMIT_S", 0.05),
                ):
                    outcome = measure(server, None, prompts=["x"])
                    self.assertEqual(outcome.code, 0)
                    self.assertRegex(outcome.err, rf"(?i){server.url} is busy: {sum(busy)} ")
                    self.assertIn("busy", findings(outcome.endpoint()))

    def test_an_idle_server_is_not_called_busy(self):
        for name in ENGINES:
            with self.subTest(name), FakeServer(name, words=3) as server:
                outcome = measure(server, None, prompts=["x"])
                self.assertNotIn("busy", outcome.err + outcome.out)
                self.assertNotIn("busy", findings(outcome.endpoint()))


class ArmsAndTheirServers(unittest.TestCase):
    def test_the_speculative_server_alone_is_a_run_of_that_arm(self):
        with FakeServer("vllm", words=6, speculation=Speculation(2, (1,))) as server:
            outcome = measure(None, server, prompts=["x", "y"])
        self.assertEqual(
            (outcome.code, [r["label"] for r in outcome.records]),
            (0, ["speculative-run/speculative"]),
        )
        self.assertNotIn("baseline-drafting", findings(outcome.endpoint("speculative")))

    def test_the_baseline_alone_is_a_run_of_that_arm(self):
        with FakeServer("vllm", words=6) as server:
            outcome = measure(server, None, "--label", "night", prompts=["x", "y"])
        self.assertEqual(
            (outcome.code, [r["label"] for r in outcome.records]), (0, ["night/baseline"])
        )

    def test_candidates_are_named_or_counted(self):
        with FakeServer("plain", words=3) as a, FakeServer("plain", words=3) as b:
            flags = [
                word
                for url in (b.url, "k4=" + b.url, b.url, "a.b_c-1=" + b.url)
                for word in ("--speculative-url", url)
            ]
            outcome = measure(a, None, *flags, prompts=["x"])
        self.assertEqual(outcome.code, 0, outcome.err)
        labels = [
            "speculative-run/" + arm
            for arm in ("baseline", "speculative", "k4", "speculative-2", "a.b_c-1")
        ]
        self.assertEqual([r["label"] for r in outcome.records if r["kind"] == "endpoint"], labels)
        comparisons = ["speculative-run/comparison"] + [
            f"speculative-run/{arm}/comparison" for arm in ("k4", "speculative-2", "a.b_c-1")
        ]
        self.assertEqual(
            [r["label"] for r in outcome.records if r["kind"] == "comparison"], comparisons
        )

    def test_the_same_server_on_both_arms_is_allowed_and_a_finding(self):
        with FakeServer("vllm", words=6) as server:
            for url in (server.url, server.root + "/"):
                outcome = run_main(
                    "--baseline-url", server.url, "--speculative-url", url, prompts=["x", "y"]
                )
                self.assertEqual(outcome.code, 0, outcome.err)
                found = set().union(*(findings(record) for record in outcome.records))
                self.assertIn("same-server", found)
                self.assertFalse({"foreign-traffic", "cache-differs"} & found)

    def test_the_same_process_under_two_names_is_the_same_server(self):
        with FakeServer("vllm", words=6) as server:
            outcome = run_main(
                "--baseline-url",
                server.url,
                "--speculative-url",
                server.url.replace("127.0.0.1", "localhost"),
                prompts=["x", "y"],
            )
        self.assertIn("same-server", set().union(*(findings(record) for record in outcome.records)))

    def test_two_servers_are_not_taken_for_one(self):
        with FakeServer("vllm", words=6) as base, FakeServer("vllm", words=6) as other:
            outcome = measure(base, other, prompts=["x", "y"])
        self.assertNotIn(
            "same-server", set().union(*(findings(record) for record in outcome.records))
        )

    def test_one_server_under_two_names_is_nobodys_foreign_traffic(self):
        for engine in ("vllm", "llama.cpp", "sglang"):
            with (
                self.subTest(engine),
                FakeServer(engine, words=6, speculation=Speculation(2, (2, 1))) as server,
            ):
                outcome = run_main(
                    "--baseline-url",
                    server.url,
                    "--speculative-url",
                    server.url.replace("127.0.0.1", "localhost"),
                    prompts=["x", "y"],
                )
                found = set().union(*(findings(record) for record in outcome.records))
                self.assertIn("same-server", found)
                self.assertNotIn("foreign-traffic", found)

    def test_one_metrics_page_that_counts_both_arms_is_one_server(self):
        with FakeServer("vllm", words=6) as server, FakeServer("vllm", words=6) as other:
            page = server.root + "/metrics"
            total = server.read_counters

            def of_both():
                return total() + other.counters

            server.read_counters = of_both
            outcome = measure(
                server,
                other,
                "--baseline-metrics-url",
                page,
                "--speculative-metrics-url",
                page,
                prompts=["x", "y"],
            )
        found = set().union(*(findings(record) for record in outcome.records))
        self.assertIn("same-server", found)
        self.assertNotIn("foreign-traffic", found)


class Router(Loopback):
    """One address for two llama.cpp servers, which the model's name tells apart."""

    class Handler(Handler):
        def answer_request(self, respond):
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            router = self.server.fake
            self.fake = next(iter(router.behind.values()))  # whose headers it sends
            router.pass_on(self, raw)

    def __init__(self, *behind):
        super().__init__(self.Handler)
        self.behind = {server.models[0]: server for server in behind}

    def pass_on(self, client, raw):
        parts = urllib.parse.urlsplit(client.path)
        wanted = urllib.parse.parse_qs(parts.query).get("model", [None])[0]
        if raw:
            wanted = ms.loads(raw.decode())["model"]
        if parts.path == "/v1/models":
            return client.send_page(
                {"data": [self.entry(name) for name in self.behind], "object": "list"}
            )
        if parts.path == "/props":
            return client.send_page({"role": "router", "model_path": "none", "build_info": "b1-0"})
        if wanted not in self.behind:
            error = {"code": 400, "message": "model name is missing from the request"}
            return client.send_page((400, "application/json", ms.json_line({"error": error})))
        request = urllib.request.Request(self.behind[wanted].root + parts.path, raw or None)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=20) as answer:
            client.send(200, answer.headers["Content-Type"], answer.read())

    def entry(self, name):
        arguments = ["llama-server", "-m", f"/models/{name}-Q4.gguf", "--port", "0"]
        return {
            "id": name,
            "owned_by": "llamacpp",
            "status": {"value": "loaded", "args": arguments},
        }


class TwoModelsBehindOneAddress(unittest.TestCase):
    """They are two servers, each with the counters of its own page."""

    def routed(self, speculation, *models):
        with (
            FakeServer("llama.cpp", words=24, model="plain") as plain,
            FakeServer("llama.cpp", words=24, model="mtp", speculation=speculation) as drafting,
            Router(plain, drafting) as router,
        ):
            one, other = models or ("plain", "mtp")
            flags = ("--model", one, "--speculative-model", other)
            outcome = measure(router, router, *flags, prompts=["x", "y"])
            return outcome, drafting

    def test_acceptance_is_that_of_the_drafting_model_and_nothing_was_restarted(self):
        outcome, drafting = self.routed(Speculation(3, (3, 2, 1)))
        self.assertEqual(outcome.code, 0, outcome.err)
        found = set().union(*(findings(record) for record in outcome.records))
        self.assertFalse(
            {"same-server", "counter-reset", "foreign-traffic", "not-drafting"} & found
        )
        measured = drafting.given[1:]
        acceptance = outcome.endpoint("speculative")["acceptance"]
        for name in ("steps", "drafted", "accepted"):
            self.assertEqual(acceptance[name], sum(getattr(c, name) for c in measured), name)

    def test_a_model_that_does_not_draft_did_not_run(self):
        outcome, _ = self.routed(None)
        comparison = outcome.comparison()
        self.assertEqual(
            (comparison["verdict"], comparison["verdict_withheld"]), (None, "did-not-run")
        )

    def test_one_model_of_a_router_twice_is_one_server(self):
        outcome, _ = self.routed(None, "plain", "plain")
        self.assertIn("same-server", findings(outcome.comparison()))

    def test_the_file_of_a_routers_model_is_told_by_its_own_arguments(self):
        outcome, _ = self.routed(Speculation(3, (3, 2, 1)))
        self.assertIn("plain-Q4.gguf", outcome.err)
        self.assertIn("mtp-Q4.gguf", outcome.err)


class KnownBeforeTheFirstMeasuredRequest(unittest.TestCase):
    """What speaks against the comparison is said while nothing is lost yet."""

    def said_early(self, baseline, candidate):
        """What was on stderr when the measured requests began."""
        early = []
        real = ms.execute

        def execute(*args, **options):
            early.append(ms.sys.stderr.getvalue())
            return real(*args, **options)

        with mock.patch.object(ms, "execute", execute):
            outcome = measure(baseline, candidate, "--warmup", "1", prompts=["x", "y"])
        self.assertEqual(len(early), 1, outcome.err)
        return early[0], outcome

    def two(self, engine, one, other):
        with FakeServer(engine, **one) as a, FakeServer(engine, **other) as b:
            return self.said_early(a, b)

    def test_another_file_of_the_model_is_named_with_both_names(self):
        for key, page in (
            ("/props", {"build_info": "b1", "model_path": "/m/%s.gguf"}),
            ("/v1/models", {"data": [{"id": "m", "root": "org/%s"}]}),
            ("/v1/models", {"data": [{"id": "m", "root": "C:\\m\\%s/"}]}),
        ):
            pages = [
                {key: ms.loads(ms.json.dumps(page).replace("%s", name))} for name in ("F32", "Q4")
            ]
            with self.subTest(page):
                early, outcome = self.two("llama.cpp", *({"pages": p} for p in pages))
                for words in ("F32", "Q4"):
                    self.assertIn(words, early)
                self.assertNotIn("/m/", early)
                self.assertIn("model-differs", findings(outcome.comparison()))

    def test_other_parameters_sizes_and_quantizations_are_named(self):
        for one, other in (
            ({"n_params": 8_000_000_000}, {"n_params": 4_000_000_000}),
            ({"size": 5_000_000_001}, {"size": 9_000_000_001}),
            ({"ftype": "Q4_1"}, {"ftype": "F32"}),
        ):
            pages = [{"/v1/models": {"data": [{"id": "m", "meta": m}]}} for m in (one, other)]
            with self.subTest(one):
                early, _ = self.two("llama.cpp", *({"pages": page} for page in pages))
                for value in (*one.values(), *other.values()):
                    self.assertIn(str(value), early)

    def test_one_server_twice_is_said(self):
        with FakeServer("vllm", words=4) as server:
            early, _ = self.said_early(server, server)
        self.assertIn("one server", early)

    def test_swapped_addresses_are_asked_about(self):
        for engine in ("vllm", "llama.cpp"):
            with self.subTest(engine):
                drafts = {"speculation": Speculation(2, (2, 1))}
                self.assertIn("swapped?", self.two(engine, drafts, {})[0])
                for other in ({}, drafts):
                    self.assertNotIn("swapped", self.two(engine, other, drafts)[0])

    def test_two_servers_of_one_model_give_nothing_to_say(self):
        for engine in ("vllm", "llama.cpp", "sglang", "plain"):
            with self.subTest(engine):
                self.assertEqual(self.two(engine, {}, {})[0], "")


class BareServers(unittest.TestCase):
    def test_a_server_without_any_side_page_is_measured(self):
        with ReplayServer("routes.json", CASES / "D12") as server:
            outcome = run_main("--baseline-url", server.url, "--model", "n", prompts=["x"])
        self.assertEqual((outcome.code, outcome.endpoint()["engine"]), (0, "unknown"))
        self.assertIn("metrics-unavailable", findings(outcome.endpoint()))


class FaultyPages(FaultyServers):
    """Faults of the model list and of side pages, and servers that are none."""

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
                self.assertEqual(outcome.code, code, outcome.err)
                self.check_clean(outcome)
                if code:
                    self.check_line(outcome.err, server, words)
                    self.assertEqual((server.chats, outcome.records, outcome.out), ([], [], ""))
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
                self.assertEqual((outcome.code, server.chats), (2, []))
                words = ("no OpenAI-compatible server", "port", "--model")
                self.check_line(outcome.err, server, words)

    def test_a_server_that_lists_no_model_is_told_from_one_without_a_list(self):
        with FakeServer("plain", pages={"/v1/models": {"data": []}}) as server:
            outcome = measure(server, None, prompts=["a"])
        self.assertEqual(outcome.code, 2)
        self.assertNotIn("OpenAI", outcome.err)
        self.check_line(outcome.err, server, ("lists no models", "--model"))

    def test_a_closed_port_is_said(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = "http://127.0.0.1:%d/v1" % free.getsockname()[1]
        outcome = run_main("--baseline-url", url, "--model", "m")
        self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1))
        for words in ("connection refused", "is the server running", url):
            self.assertIn(words, outcome.err)

    def test_an_unknown_host_is_said(self):
        with mock.patch.object(
            socket, "getaddrinfo", side_effect=socket.gaierror(-2, "Name or service not known")
        ):
            outcome = run_main("--baseline-url", "http://no-such-host:8080/v1", "--model", "m")
        self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1))
        for words in ("http://no-such-host:8080/v1", "host name"):
            self.assertIn(words, outcome.err)

    def test_something_that_is_no_http_server_is_said(self):

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
        self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1), outcome.err)
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
                self.assertEqual(outcome.code, 0, outcome.err)
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
        self.assertEqual(outcome.code, 0, outcome.err)

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
                self.assertEqual(outcome.code, 0, outcome.err)
                record = outcome.endpoint()
                self.assertIsNone(record["spec_metrics_delta"])
                self.assertEqual((record["completed"], record["output_tokens"]), (1, 3))


if __name__ == "__main__":
    unittest.main()
