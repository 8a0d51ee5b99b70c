"""Before the first request: what a server is, whether it can be measured, and whether the command makes sense."""

import argparse
import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, ENGINES, FakeServer, ReplayServer, Speculation
from tests.support import PROGRAM, findings, measure, run_main

# engine and version that the record tells of each engine played; None: nothing tells
DETECTED = {
    "llama.cpp": ("llama.cpp", "b11434-1a2b3c4d"),
    "ik_llama.cpp": ("llama.cpp", None),
    "mlx-vlm": ("unknown", None),
    "mlx-lm": ("mlx-lm", None),
    "vllm": ("vllm", "0.33.0"),
    "vllm-old": ("vllm", "0.6.3"),
    "sglang": ("sglang", "0.5.23"),
    "tensorrt-llm": ("tensorrt-llm", "1.3.0"),
    "lmdeploy": ("lmdeploy", None),
    "tgi": ("tgi", "3.3.4"),
    "lm-studio": ("lm-studio", None),
    "tabbyapi": ("tabbyapi", None),
    "koboldcpp": ("koboldcpp", "1.97.4"),
    "ollama": ("ollama", "0.14.1"),
    "plain": ("unknown", None),
}


class Models(unittest.TestCase):
    def test_the_only_model_listed_is_measured_without_being_named(self):
        with FakeServer("plain", model="the-one", words=3) as server:
            outcome = measure(server, None, prompts=["a"])
            self.assertEqual(0, outcome.code, outcome.err)
            self.assertEqual({"the-one"}, {chat["body"]["model"] for chat in server.chats})
        self.assertEqual("the-one", outcome.endpoint()["model"])

    def test_each_server_is_asked_for_its_own_only_model(self):
        with (
            FakeServer("plain", model="a", words=3) as base,
            FakeServer("plain", model="b", words=3) as drafting,
        ):
            outcome = measure(base, drafting, prompts=["x"])
        self.assertEqual(
            ("a", "b"), (outcome.endpoint()["model"], outcome.endpoint("speculative")["model"])
        )
        self.assertEqual(
            ("b", "a"), tuple(outcome.comparison()[k] for k in ("model", "baseline_model"))
        )
        self.assertIn("model-differs", findings(outcome.comparison()))

    def test_of_several_models_one_has_to_be_named_and_they_are_listed(self):
        with FakeServer("plain", models=["one", "two", "three"]) as server:
            outcome = measure(server, None, prompts=["x"])
            self.assertEqual((2, []), (outcome.code, server.chats))
        for words in ("one, two, three", "--model", server.url):
            self.assertIn(words, outcome.err)
        self.assertEqual(1, outcome.err.count("\n"))

    def test_one_of_several_models_is_measured_when_named(self):
        with FakeServer("vllm", models=["one", "two"], words=3) as server:
            outcome = measure(server, None, "--model", "two", prompts=["x"])
            self.assertEqual(0, outcome.code, outcome.err)
            self.assertEqual({"two"}, {chat["body"]["model"] for chat in server.chats})
        self.assertEqual("", outcome.err)

    def test_the_drafting_server_may_call_the_model_otherwise(self):
        with (
            FakeServer("vllm", model="m", words=3) as base,
            FakeServer("vllm", model="m-eagle", words=3) as drafting,
        ):
            outcome = measure(
                base, drafting, "--model", "m", "--speculative-model", "m-eagle", prompts=["x"]
            )
            self.assertEqual(0, outcome.code, outcome.err)
            self.assertEqual(
                [{"m"}, {"m-eagle"}],
                [{c["body"]["model"] for c in s.chats} for s in (base, drafting)],
            )

    def test_a_model_that_is_not_listed_is_a_warning_where_the_engine_takes_any_name(self):
        with FakeServer("llama.cpp", models=["one", "two"], words=3) as server:
            outcome = measure(server, None, "--model", "other", prompts=["x"])
        self.assertEqual(0, outcome.code)
        for words in ("other", "one, two", server.url):
            self.assertIn(words, outcome.err)

    def test_a_model_that_is_not_served_is_refused_with_the_list_even_if_quiet(self):
        for flags in ((), ("--quiet",)):
            with self.subTest(flags), FakeServer("vllm", models=["one", "two"]) as server:
                outcome = measure(server, None, "--model", "other", *flags, prompts=["x"])
                self.assertEqual((2, [], 1), (outcome.code, outcome.records, len(server.chats)))
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
                self.assertEqual(0, measure(server, None, "--model", "m", prompts=["x"]).code)
                outcome = measure(server, None, prompts=["x"])
                self.assertEqual(2, outcome.code)
                self.assertIn("--model", outcome.err)

    def test_both_servers_are_checked_before_the_first_request(self):
        with (
            FakeServer("plain", words=3) as base,
            FakeServer("plain", models=["one", "two"]) as drafting,
        ):
            outcome = measure(base, drafting, prompts=["x"])
            self.assertEqual((2, [], []), (outcome.code, base.chats, drafting.chats))
        self.assertIn("speculative", outcome.err)


class Access(unittest.TestCase):
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
                        self.assertEqual((2, []), (outcome.code, server.chats))
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
        self.assertEqual((2, []), (outcome.code, outcome.records))
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
        self.assertEqual((0, [1.0, 4.0]), (outcome.code, slept[:2]))
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
            self.assertEqual((2, 1), (outcome.code, outcome.err.count("\n")))
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
                self.assertEqual(2, outcome.code, outcome.err)
                self.assertEqual(1, outcome.err.count("\n"), outcome.err)
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
        self.assertEqual(0, outcome.code, outcome.err)
        self.assertNotIn("metrics-unavailable", findings(outcome.endpoint()))


class Engines(unittest.TestCase):
    def test_every_engine_is_in_the_table(self):
        self.assertEqual(set(ENGINES), set(DETECTED))

    def test_engine_and_version_are_detected(self):
        for name, (engine, version) in DETECTED.items():
            with (
                self.subTest(name),
                FakeServer(name, words=3) as base,
                FakeServer(name, words=3, speculation=Speculation(2, (1,))) as drafting,
            ):
                outcome = measure(base, drafting, prompts=["x"])
                self.assertEqual(0, outcome.code, outcome.err)
                for arm in ("baseline", "speculative"):
                    record = outcome.endpoint(arm)
                    self.assertEqual(
                        (engine, version or "unknown"), (record["engine"], record["engine_version"])
                    )
                self.assertEqual(engine, outcome.comparison()["engine"])

    def test_another_build_is_told_as_it_is(self):
        for name in ("llama.cpp", "vllm", "sglang", "tensorrt-llm", "tgi", "koboldcpp", "ollama"):
            with self.subTest(name), FakeServer(name, build="9.8.7-x", words=3) as server:
                self.assertEqual(
                    "9.8.7-x", measure(server, None, prompts=["x"]).endpoint()["engine_version"]
                )

    def test_a_named_engine_and_version_are_kept_as_given(self):
        with FakeServer("vllm", words=3) as server:
            record = measure(
                server, None, "--engine", "my-engine", "--engine-version", "r7", prompts=["x"]
            ).endpoint()
            self.assertEqual(("my-engine", "r7"), (record["engine"], record["engine_version"]))
            record = measure(server, None, "--engine", "my-engine", prompts=["x"]).endpoint()
            self.assertEqual(("my-engine", "0.33.0"), (record["engine"], record["engine_version"]))

    def test_detection_has_no_side_effects(self):
        with FakeServer("tensorrt-llm", words=3) as server:
            measure(server, None, prompts=["x"])
            self.assertFalse(
                [r for r in server.requests if r["path"] == "/metrics"],
                "reading that page empties it",
            )
        for name in ENGINES:
            with self.subTest(name), FakeServer(name, words=3) as server:
                measure(server, None, "--warmup", "2", prompts=["x"])
                self.assertEqual(3, len([r for r in server.requests if r["method"] != "GET"]))

    def test_engines_that_forbid_unknown_fields_get_none(self):
        for name in ("tensorrt-llm", "plain"):
            with self.subTest(name), FakeServer(name, strict=True, words=3) as server:
                self.assertEqual(0, measure(server, None, prompts=["x"]).code)

    def test_side_requests_take_no_longer_than_the_timeout(self):
        asked = []
        real = ms.exchange

        def exchange(url, key, timeout_s, read, body=None):
            if body is None:
                asked.append(timeout_s)
            return real(url, key, timeout_s, read, body)

        for timeout, most in (("3", 3.0), ("300", 10.0)):
            with (
                self.subTest(timeout),
                FakeServer("vllm", words=3) as server,
                mock.patch.object(ms, "exchange", exchange),
            ):
                measure(server, None, "--timeout", timeout, prompts=["x"])
            self.assertEqual(most, max(asked))
            del asked[:]


class Busy(unittest.TestCase):
    def test_a_busy_server_is_said_and_recorded(self):
        for name in ("vllm", "vllm-old", "sglang", "llama.cpp", "tgi", "lmdeploy", "tensorrt-llm"):
            for busy in ((2, 1), (1, 0), (0, 1)):
                with (
                    self.subTest(name, busy=busy),
                    FakeServer(name, busy=busy, words=3) as server,
                    mock.patch.object(ms, "SETTLE_LIMIT_S", 0.05),
                ):
                    outcome = measure(server, None, prompts=["x"])
                    self.assertEqual(0, outcome.code)
                    self.assertRegex(outcome.err, rf"(?i){server.url} is busy: {sum(busy)} ")
                    self.assertIn("busy", findings(outcome.endpoint()))

    def test_an_idle_server_is_not_called_busy(self):
        for name in ENGINES:
            with self.subTest(name), FakeServer(name, words=3) as server:
                outcome = measure(server, None, prompts=["x"])
                self.assertNotIn("busy", outcome.err + outcome.out)
                self.assertNotIn("busy", findings(outcome.endpoint()))


class Arms(unittest.TestCase):
    def test_the_speculative_server_alone_is_a_run_of_that_arm(self):
        with FakeServer("vllm", words=6, speculation=Speculation(2, (1,))) as server:
            outcome = measure(None, server, prompts=["x", "y"])
        self.assertEqual(
            (0, ["speculative-run/speculative"]),
            (outcome.code, [r["label"] for r in outcome.records]),
        )
        self.assertNotIn("baseline-drafting", findings(outcome.endpoint("speculative")))

    def test_the_baseline_alone_is_a_run_of_that_arm(self):
        with FakeServer("vllm", words=6) as server:
            outcome = measure(server, None, "--label", "night", prompts=["x", "y"])
        self.assertEqual(
            (0, ["night/baseline"]), (outcome.code, [r["label"] for r in outcome.records])
        )

    def test_candidates_are_named_or_counted(self):
        with FakeServer("plain", words=3) as a, FakeServer("plain", words=3) as b:
            flags = [
                word
                for url in (b.url, "k4=" + b.url, b.url, "a.b_c-1=" + b.url)
                for word in ("--speculative-url", url)
            ]
            outcome = measure(a, None, *flags, prompts=["x"])
        self.assertEqual(0, outcome.code, outcome.err)
        labels = [
            "speculative-run/" + arm
            for arm in ("baseline", "speculative", "k4", "speculative-2", "a.b_c-1")
        ]
        self.assertEqual(labels, [r["label"] for r in outcome.records if r["kind"] == "endpoint"])
        comparisons = ["speculative-run/comparison"] + [
            f"speculative-run/{arm}/comparison" for arm in ("k4", "speculative-2", "a.b_c-1")
        ]
        self.assertEqual(
            comparisons, [r["label"] for r in outcome.records if r["kind"] == "comparison"]
        )

    def test_the_same_server_on_both_arms_is_allowed_and_a_finding(self):
        with FakeServer("vllm", words=6) as server:
            for url in (server.url, server.root + "/"):
                outcome = run_main(
                    "--baseline-url", server.url, "--speculative-url", url, prompts=["x", "y"]
                )
                self.assertEqual(0, outcome.code, outcome.err)
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


class CommandLine(unittest.TestCase):
    SERVER = ["--baseline-url", "http://127.0.0.1:9/v1"]
    BAD = [  # flags, what the message names
        ([], "--baseline-url"),
        (["--model", "m"], "--baseline-url"),
        (SERVER + ["--nonsense"], "--nonsense"),
        (SERVER + ["positional"], "positional"),
        (
            ["--base", "http://127.0.0.1:9/v1"],
            "--base",
        ),  # no abbreviations: scripts would break later
        (SERVER + ["--repeats", "0"], "--repeats"),
        (SERVER + ["--repeats", "1.5"], "--repeats"),
        (SERVER + ["--warmup", "-1"], "--warmup"),
        (SERVER + ["--max-tokens", "0"], "--max-tokens"),
        (SERVER + ["--timeout", "0"], "--timeout"),
        (SERVER + ["--timeout", "nan"], "--timeout"),
        (SERVER + ["--timeout", "inf"], "--timeout"),
        (SERVER + ["--seed", "x"], "--seed"),
        (SERVER + ["--min-gain", "nan"], "--min-gain"),
        (SERVER + ["--min-gain", "5%"], "--min-gain"),
        (SERVER + ["--concurrency", "0"], "--concurrency"),
        (SERVER + ["--concurrency", "1,,4"], "--concurrency"),
        (SERVER + ["--concurrency", "1,x"], "--concurrency"),
        (SERVER + ["--order", "random"], "--order"),
        (SERVER + ["--fail-on", "slow"], "--fail-on"),
        (SERVER + ["--extra-body", "{"], "--extra-body"),
        (SERVER + ["--extra-body", "[1]"], "--extra-body"),
        (SERVER + ["--extra-body", '{"a": NaN}'], "--extra-body"),
        (SERVER + ["--baseline-extra-body", "x"], "--baseline-extra-body"),
        (SERVER + ["--prompt-set", "file"], "--prompts"),
        (SERVER + ["--prompt-set", "builtin", "--prompts", "p.txt"], "--prompt-set builtin"),
        (SERVER + ["--prompt-set", "other"], "--prompt-set"),
        (SERVER + ["--prompts", "no-such-file.txt"], "no-such-file.txt"),
        (SERVER + ["--labbook", "no-such-folder/labbook.md"], "no-such-folder/labbook.md"),
        (SERVER + ["--labbook", "."], "lab notebook"),
        (SERVER + ["--speculative-url", "a b=http://h"], "a b"),
        (SERVER + ["--speculative-url", "k4/2=http://h"], "k4/2"),
        (SERVER + ["--speculative-url", "=http://h"], "name"),
        (
            SERVER + ["--speculative-url", "k=http://h", "--speculative-url", "k=http://i"],
            "same name",
        ),
        (SERVER + ["--speculative-url", "baseline=http://h"], "name"),
        (
            SERVER + ["--speculative-url", "speculative=http://h", "--speculative-url", "http://i"],
            "name",
        ),
        (
            SERVER
            + [
                "--speculative-url",
                "a=http://h",
                "--speculative-url",
                "b=http://i",
                "--speculative-metrics-url",
                "http://h/m",
            ],
            "--speculative-metrics-url",
        ),
        (SERVER + ["--baseline-metrics-url", "ftp://h/m"], "--baseline-metrics-url"),
        (["mesure"] + SERVER, "mesure"),
    ]

    def test_wrong_commands_are_said_before_any_request_and_leave_nothing(self):
        for flags, named in self.BAD:
            with (
                self.subTest(flags),
                mock.patch.object(
                    socket, "create_connection", side_effect=AssertionError("no request")
                ),
            ):
                outcome = run_main(*flags)
                self.assertEqual(2, outcome.code, outcome.err)
                self.assertIn(named, outcome.err)
                self.assertEqual(("", {}), (outcome.out, outcome.files))
                self.assertNotIn("Traceback", outcome.err)

    def test_a_run_file_that_exists_or_cannot_be_made_stops_before_the_first_measured_request(self):
        with FakeServer("plain") as server:
            for path, files in (
                ("old.jsonl", {"old.jsonl": "an hour of work\n"}),
                ("no-such-folder/x.jsonl", {}),
                (".", {}),
            ):
                with self.subTest(path):
                    outcome = measure(server, None, "--save-run", path, files=files, prompts=["x"])
                    self.assertEqual((2, []), (outcome.code, server.chats))
                    self.assertIn(path, outcome.err)
                    self.assertIn("--save-run", outcome.err)
                    self.assertEqual(files.get(path, "").encode(), outcome.files.get(path, b""))

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
            self.assertEqual("# notes\n", book.read_text("utf-8"))

    def test_the_word_measure_is_optional(self):
        with FakeServer("plain", words=3) as server:
            for word in ((), ("measure",)):
                self.assertEqual(
                    0, run_main(*word, "--baseline-url", server.url, prompts=["x"]).code
                )

    def test_command_lines_that_people_have_in_scripts_run_unchanged(self):
        with (
            FakeServer("llama.cpp", model="local-chat", words=3) as base,
            FakeServer(
                "llama.cpp", model="local-chat", words=3, speculation=Speculation(2, (1,))
            ) as drafting,
        ):
            for line, labels in (
                (
                    f"--baseline-url {base.url} --model local-chat --label llama-server-no-draft --labbook labbook.md",
                    ["llama-server-no-draft/baseline"],
                ),
                (
                    f"--baseline-url {base.url} --speculative-url {drafting.url} --model local-chat --max-tokens 192 --repeats 2 "
                    "--label qwen3-8b-draft-0.6b --labbook labbook.md",
                    [
                        "qwen3-8b-draft-0.6b/" + name
                        for name in ("baseline", "speculative", "comparison")
                    ],
                ),
                (
                    f"--baseline-url {base.url} --model local-chat --prompts my-prompts.txt --prompt-set file",
                    ["speculative-run/baseline"],
                ),
            ):
                with self.subTest(line):
                    outcome = run_main(*line.split(), files={"my-prompts.txt": "one\ntwo\n"})
                    self.assertEqual(0, outcome.code, outcome.err)
                    self.assertEqual(labels, [record["label"] for record in outcome.records])

    def test_quiet_prints_nothing_where_nothing_is_wrong(self):
        with (
            FakeServer("vllm", words=3) as base,
            FakeServer("vllm", words=3, speculation=Speculation(2, (1,))) as drafting,
        ):
            outcome = measure(base, drafting, "--quiet", prompts=["x", "y"])
        self.assertEqual(
            (0, "", "", 3), (outcome.code, outcome.out, outcome.err, len(outcome.records))
        )


class Help(unittest.TestCase):
    def test_help_lists_every_flag_with_examples_and_exit_codes(self):
        outcome = run_main("--help")
        self.assertEqual((0, "", {}), (outcome.code, outcome.err, outcome.files))
        for flag in (
            """--baseline-url --speculative-url --model --max-tokens --seed --repeats --timeout --prompt-set --prompts --label --engine
                     --engine-version --api-key-env --labbook --speculative-model --extra-body --baseline-extra-body --speculative-extra-body
                     --no-stream --warmup --order --concurrency --min-gain --save-run --baseline-metrics-url --speculative-metrics-url
                     --fail-on --quiet compare report break-even calibrate examples exit 130"""
        ).split():
            self.assertIn(flag, outcome.out)
        for code in (
            "0 measured",
            "1 could not measure",
            "2 wrong",
            "3 a --fail-on",
            "130 interrupted",
        ):
            self.assertIn(code, outcome.out)
        self.assertTrue(outcome.out.isascii())

    def test_the_defaults_are_those_that_scripts_rely_on(self):
        args = ms.measure_parser().parse_args([])
        expected = {
            "max_tokens": 192,
            "seed": 0,
            "repeats": 1,
            "timeout": 300,
            "label": "speculative-run",
            "engine": "unknown",
            "warmup": 1,
            "engine_version": "unknown",
            "api_key_env": "SPEC_API_KEY",
            "labbook": "labbook.md",
            "order": "paired",
            "min_gain": 0.0,
        }
        self.assertEqual(expected, {name: getattr(args, name) for name in expected})

    def test_the_examples_in_the_help_are_accepted(self):
        text = ms.__doc__.split("what to measure")[0].split("examples:")[1].replace("\\\n", " ")
        lines = [line.split()[1:] for line in text.splitlines() if "measure_speculative.py" in line]
        self.assertGreaterEqual(len(lines), 3)
        for words in lines:
            ms.arms_of(ms.measure_parser().parse_args(words))

    def test_every_command_has_a_help_and_a_version(self):
        for command in ("measure", "compare", "report", "break-even", "calibrate"):
            for flag in ("--help", "--version"):
                outcome = run_main(command, flag)
                self.assertEqual((0, ""), (outcome.code, outcome.err))
                self.assertTrue(outcome.out.strip())


class Alone(unittest.TestCase):
    """The file by itself: copied, imported, asked for its help."""

    def test_the_copied_file_alone_in_an_empty_folder_measures_two_servers(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            FakeServer("vllm", words=6) as base,
            FakeServer("vllm", words=6, speculation=Speculation(2, (2, 1, 0))) as drafting,
        ):
            shutil.copy(PROGRAM, folder)
            env = {
                name: value
                for name, value in os.environ.items()
                if name in ("PATH", "SYSTEMROOT", "TEMP", "TMP")
            }
            done = subprocess.run(
                [
                    sys.executable,
                    "-s",
                    "-S",
                    PROGRAM.name,
                    "--baseline-url",
                    base.url,
                    "--speculative-url",
                    drafting.url,
                ],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                timeout=60,
            )
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            records = [
                json.loads(line)
                for line in (pathlib.Path(folder) / "labbook.md").read_text("ascii").splitlines()
            ]
            self.assertEqual(
                {PROGRAM.name, "labbook.md"}, set(os.listdir(folder)) - {"__pycache__"}
            )
        self.assertEqual(
            ["endpoint", "endpoint", "comparison"], [record["kind"] for record in records]
        )
        self.assertEqual([12, 12], [record["completed"] for record in records[:2]])
        self.assertEqual(
            (12, 0),
            tuple(records[2]["text_comparison"][name] for name in ("identical", "divergent")),
        )
        self.assertIn("acceptance", done.stdout.lower())

    def test_nothing_runs_at_import(self):
        code = """
import sys, threading
seen = []
def audit(event, args):
    if event.split(".")[0] in ("socket", "subprocess", "urllib", "shutil", "tempfile", "ctypes", "signal") or event in (
            "os.system", "os.mkdir", "os.remove", "os.rename", "os.putenv", "os.chdir", "os.fork") or (
            event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")):
        seen.append((event, args))
import argparse, json, urllib.request, subprocess, ctypes
before = set(threading.enumerate())
sys.argv = ["x", "--baseline-url", "http://127.0.0.1:9"]
sys.addaudithook(audit)
import measure_speculative
assert not seen, seen
assert set(threading.enumerate()) == before
"""
        done = subprocess.run(
            [sys.executable, "-B", "-c", code],
            cwd=PROGRAM.parent,
            capture_output=True,
            text=True,
            timeout=30,
        )
        self.assertEqual((0, "", ""), (done.returncode, done.stdout, done.stderr))

    def test_only_the_standard_library_is_imported(self):
        import ast

        names = set()
        for node in ast.walk(ast.parse(PROGRAM.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
        known = set(getattr(sys, "stdlib_module_names", names)) | {"__future__"}
        self.assertFalse(names - known)

    @unittest.skipUnless(hasattr(os, "wait4"), "this system tells no CPU time of a single child")
    def test_help_costs_little_cpu_time(self):
        """At most 1.5 times these three imports; on a quiet machine it was 1.32 (CPython 3.9) to 1.47 (3.13).

        CPython compiles a script at every start, so most of it is the size of the file.  The best of 15 runs of each
        is compared; where a busy machine spoils them, the best of as many as it takes to know it, 200 at most.
        """
        imports = ["-c", "import argparse, json, urllib.request"]
        shown = [str(PROGRAM), "--help"]

        def cpu_s(words):
            child = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = status
            self.assertEqual(0, status)
            return usage.ru_utime + usage.ru_stime

        needed = allowed = math.inf
        for number in range(200):
            allowed, needed = min(allowed, 1.5 * cpu_s(imports)), min(needed, cpu_s(shown))
            if number >= 14 and needed <= allowed:
                break
        self.assertLessEqual(needed, allowed)

    def test_the_help_page_tells_every_flag_and_its_default(self):
        page = subprocess.run(
            [sys.executable, str(PROGRAM), "--help"], capture_output=True, text=True, timeout=30
        ).stdout
        for action in ms.measure_parser()._actions:
            rows = [line for line in page.splitlines() if line.startswith("  --")]
            told = next((line for line in rows if action.option_strings[-1] in line), None)
            self.assertIsNotNone(told, action.option_strings)
            if (
                isinstance(action.default, (str, float)) and action.default != argparse.SUPPRESS
            ) or action.default in (1, 10, 192):
                self.assertIn(
                    "%g" % action.default
                    if isinstance(action.default, (int, float))
                    else action.default.replace("unknown", "detected"),
                    told,
                )


class Recorded(unittest.TestCase):
    def test_a_server_without_any_side_page_is_measured(self):
        with ReplayServer("routes.json", CASES / "D12") as server:
            outcome = run_main("--baseline-url", server.url, "--model", "n", prompts=["x"])
        self.assertEqual((0, "unknown"), (outcome.code, outcome.endpoint()["engine"]))
        self.assertIn("metrics-unavailable", findings(outcome.endpoint()))


if __name__ == "__main__":
    unittest.main()
