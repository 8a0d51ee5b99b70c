"""No byte of a key or of credentials gets out: not into output, records, run files or errors, nor to another host."""

import html
import json
import os
import pathlib
import re
import socket
import tempfile
import threading
import unittest
import urllib.parse
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer, ReplayServer, Speculation
from tests.support import (
    SAVE,
    http,
    measure,
    measure_canned,
    run_main,
)

# holds what JSON, URLs and HTML write in another way, and nothing of a usual text
KEY = 'sk-Zq9"Xw7\\Jv5/Kp3+Rt&Yb%41=='


SECRET = {"SPEC_API_KEY": KEY}
FLAGS = ("--save-run", "run.jsonl", "--divergence-report", "report.md", "--include-prompts")
CHAT = "/v1/chat/completions"


def forms_of(key):
    """The key, and how JSON, URLs and HTML may write it."""
    return {
        key,
        json.dumps(key)[1:-1],
        key.replace("/", "\\/"),
        json.dumps(key)[1:-1].replace("/", "\\/"),
        ascii(key)[1:-1],
        urllib.parse.quote(key),
        urllib.parse.quote(key, safe=""),
        re.sub("%..", lambda match: match[0].lower(), urllib.parse.quote(key)),
        re.sub("%..", lambda match: match[0].lower(), urllib.parse.quote(key, safe="")),
        html.escape(key),
        html.escape(key, quote=False),
    }


class Secrets(unittest.TestCase):
    def check_hidden(self, outcome, secret=KEY):
        places = dict(
            outcome.files,
            **{"standard output": outcome.out.encode(), "standard error": outcome.err.encode()},
        )
        for place, data in places.items():
            for form in forms_of(secret):
                self.assertNotIn(form.encode(), data, place)
            self.assertNotIn(b"Traceback", data)

    def run_with_key(self, base, drafting=None, *flags, prompts=("a", "b"), **options):
        outcome = measure(
            base, drafting, *FLAGS, *flags, env=SECRET, prompts=list(prompts), **options
        )
        self.check_hidden(outcome)
        return outcome


class KeyStaysInside(Secrets):
    def test_the_key_is_sent_to_its_server_and_shown_nowhere(self):
        for engine in ("vllm", "llama.cpp", "plain"):
            with (
                self.subTest(engine),
                FakeServer(engine, api_key=KEY, words=4) as base,
                FakeServer(engine, api_key=KEY, words=4) as drafting,
            ):
                outcome = self.run_with_key(base, drafting)
                self.assertEqual(outcome.code, 0, outcome.err)
                for request in base.chats + drafting.chats:
                    self.assertEqual(request["headers"]["authorization"], "Bearer " + KEY)
                self.assertIn("labbook.md", outcome.files)
                self.assertIn("run.jsonl", outcome.files)

    def test_without_a_key_no_authorization_is_sent(self):
        with FakeServer("vllm", words=3) as server:
            for env in ({"SPEC_API_KEY": ""}, {"SPEC_API_KEY": "  "}):
                measure(server, None, env=env, prompts=["a"])
            self.assertFalse([r for r in server.requests if "authorization" in r["headers"]])

    def test_another_variable_can_hold_the_key(self):
        with FakeServer("vllm", api_key=KEY, words=3) as server:
            outcome = measure(
                server,
                None,
                "--api-key-env",
                "OTHER",
                env={"OTHER": KEY, "SPEC_API_KEY": "wrong"},
                prompts=["a"],
            )
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertEqual(
                {r["headers"].get("authorization") for r in server.chats}, {"Bearer " + KEY}
            )
        self.check_hidden(outcome)

    def test_blanks_around_the_key_are_no_part_of_it(self):
        with FakeServer("vllm", api_key=KEY, words=3) as server:
            self.assertEqual(
                measure(server, None, env={"SPEC_API_KEY": f" {KEY}\n"}, prompts=["a"]).code, 0
            )

    def test_a_key_that_no_header_can_carry_is_refused_unseen(self):
        for bad in (
            "sk-Zq9\nX-Evil: 1",
            "sk-Zq9 Xw7",
            "sk-Zq9\u00e9Xw7",
            "sk-Zq9\tXw7",
            "sk-Zq9\x7fXw7",
        ):
            with self.subTest(repr(bad)), FakeServer("plain", words=3) as server:
                outcome = measure(server, None, env={"SPEC_API_KEY": bad}, prompts=["a"])
                self.assertEqual((outcome.code, server.requests), (2, []))
                self.assertIn("SPEC_API_KEY", outcome.err)
                self.assertNotIn("Zq9", outcome.err)
                self.assertNotIn("Xw7", outcome.err)

    def test_a_refused_key_is_named_by_its_variable(self):
        for key, said in ((KEY + "x", "was sent"), ("", "is not set")):
            with self.subTest(said), FakeServer("vllm", api_key=KEY) as server:
                outcome = measure(server, None, env={"SPEC_API_KEY": key}, prompts=["a"])
                self.assertEqual((outcome.code, server.chats), (2, []))
                self.check_hidden(outcome)
                self.assertIn("SPEC_API_KEY", outcome.err)
                self.assertIn(said, outcome.err)

    def test_the_key_is_not_in_the_text_form_of_an_endpoint(self):
        self.assertNotIn("Zq9", repr(ms.Endpoint("baseline", "http://h/v1", "http://h", key=KEY)))

    def test_a_placeholder_key_changes_nothing_that_is_measured(self):
        def figures(outcome):
            record = outcome.endpoint("speculative")
            texts = [
                json.loads(line)["content"]
                for line in outcome.files["run.jsonl"].splitlines()
                if b'"reading"' in line
            ]
            return (
                outcome.code,
                record["output_tokens"],
                record["acceptance"],
                record["spec_metrics_delta"],
                record["model"],
                record["engine_version"],
                texts,
            )

        found = {}
        for key in (
            "",
            "EMPTY",
            "token",
            "1",
            "e",
            "local",
            "content",
            "_total",
            "choices",
            "null",
            "none",
        ):
            with (
                FakeServer("vllm", words=6) as base,
                FakeServer("vllm", words=6, speculation=Speculation(2, (2, 1, 0))) as drafting,
            ):
                found[key] = figures(
                    measure(
                        base,
                        drafting,
                        "--save-run",
                        "run.jsonl",
                        env={"SPEC_API_KEY": key},
                        prompts=["a", "b"],
                    )
                )
        for key, figures_ in found.items():
            with self.subTest(key):
                self.assertEqual(found[""], figures_)

    def test_a_placeholder_that_is_part_of_the_models_name_is_sent_and_shown(self):
        key, model = "lm-studio", "lm-studio-community/m"
        for flags in ((), ("--model", model), ("--model=" + model,)):
            with (
                self.subTest(flags),
                FakeServer("vllm", model=model, api_key=key, words=3) as server,
            ):
                outcome = measure(server, None, *flags, env={"SPEC_API_KEY": key}, prompts=["one"])
                self.assertEqual(outcome.code, 0, outcome.err)
                self.assertEqual({chat["body"]["model"] for chat in server.chats}, {model})
                self.assertEqual(outcome.endpoint()["model"], model)
                self.assertNotIn("[key]", outcome.out + outcome.err)

    def test_a_model_that_is_called_like_the_key_is_asked_for_and_not_shown(self):
        page = {"data": [{"id": KEY, "owned_by": "vllm"}]}
        with FakeServer("plain", pages={"/v1/models": page}, words=3) as server:
            outcome = self.run_with_key(server)
            self.assertEqual({chat["body"]["model"] for chat in server.chats}, {KEY})
        self.assertEqual(outcome.endpoint()["model"], "[key]")

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


class EchoedKeys(Secrets):
    """A server may say the key in any of its words."""

    def test_a_key_in_an_error_of_the_first_request_is_hidden(self):
        with FakeServer("plain", faults=["echo-key-error"]) as server:
            outcome = self.run_with_key(server)
            self.assertEqual(outcome.code, 2)
            self.assertIn("cannot read header Authorization", outcome.err)

    def test_a_key_in_an_error_of_a_measured_request_is_hidden(self):
        with FakeServer("plain", faults=[None, "echo-key-error"], words=4) as server:
            outcome = self.run_with_key(server)
            self.assertEqual(outcome.endpoint()["failed"], 1)
            self.assertIn("cannot read header Authorization", outcome.endpoint()["first_error"])

    def test_a_key_in_errors_of_side_pages_is_hidden(self):
        for page in ("/v1/models", "/metrics", "/props", "/version"):
            with (
                self.subTest(page),
                FakeServer(
                    "llama.cpp", page_faults={page: ["echo-key-error"]}, repeat_fault=True, words=3
                ) as server,
            ):
                self.assertEqual(self.run_with_key(server, None, "--model", "m").code, 0)

    def test_a_key_in_errors_of_any_spelling_and_shape_is_hidden(self):
        spelled = json.dumps(KEY)
        bodies = {
            "plain": ("bad key " + KEY).encode(),
            "html": ("<p>bad key " + html.escape(KEY)).encode(),
            "escaped": ('{"error": "bad key %s"}' % spelled[1:-1].replace("/", "\\/")).encode(),
            "unicode": (
                '{"error": {"message": "bad key %s"}}' % "".join("\\u%04x" % ord(c) for c in KEY)
            ).encode(),
            "detail": json.dumps({"detail": [{"loc": ["header"], "input": KEY}]}).encode(),
            "url": ("see /login?key=%s" % urllib.parse.quote(KEY)).encode(),
            "url, all of it": ("see /login?key=%s" % urllib.parse.quote(KEY, safe="")).encode(),
            "url in lower case": re.sub(
                b"%..", lambda m: m[0].lower(), urllib.parse.quote(KEY, safe="").encode()
            ),
            "long": b"x" * 250 + KEY.encode() * 9,
        }
        for status in (400, 401, 503):
            for name, body in bodies.items():
                pages = {
                    "/v1/models": (status, "text/plain", body),
                    "/metrics": (status, "text/plain", body),
                }
                for path in pages:
                    with (
                        self.subTest(name, status=status, path=path),
                        FakeServer("vllm", pages={path: pages[path]}, words=3) as server,
                    ):
                        with mock.patch.object(ms.time, "sleep"):
                            self.run_with_key(server, None, "--model", "fake-model", prompts=["a"])

    def test_a_key_in_the_address_of_a_redirect_is_hidden(self):
        for quoted in (KEY, urllib.parse.quote(KEY), urllib.parse.quote(KEY, safe="")):
            with (
                self.subTest(quoted),
                FakeServer("plain", faults=["redirect"], repeat_fault=True) as server,
            ):
                server.redirect_to = server.root + "/login?key=" + quoted
                self.assertIn("redirect", self.run_with_key(server).err)

    def test_a_key_in_an_error_object_of_a_stream_is_hidden(self):
        events = [
            {"choices": [{"index": 0, "delta": {"content": "x"}}]},
            {"error": {"message": "no such key: " + KEY}},
        ]
        outcome = self.replay(events)
        self.assertEqual(outcome.code, 1)
        self.assertIn("no such key", outcome.err)

    def replay(self, events, *flags):
        """Measure a server that answers every request with this stream, or with this single JSON object."""
        plain = isinstance(events, dict)
        data = (
            json.dumps(events).encode()
            if plain
            else b"".join(
                b"data: "
                + (event if isinstance(event, bytes) else json.dumps(event).encode())
                + b"\n\n"
                for event in events
            )
        )
        kind = b"application/json" if plain else b"text/event-stream"
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "x.http").write_bytes(
                b"HTTP/1.1 200 OK\r\nContent-Type: "
                + kind
                + b"\r\nConnection: close\r\n\r\n"
                + data
            )
            with ReplayServer(
                [{"method": "POST", "path": CHAT, "file": "x.http"}], folder
            ) as server:
                return self.run_with_key(server, None, "--model", "m", *flags)

    def test_a_key_in_the_text_of_an_answer_is_hidden_even_over_two_deltas(self):
        for cut in (0, 1, 9, len(KEY) - 1):
            with self.subTest(cut):
                parts = ["your key is " + KEY[:cut], KEY[cut:] + " bye"]
                events = [
                    {"choices": [{"index": 0, "delta": {name: part}}]}
                    for name in ("reasoning", "content")
                    for part in parts
                ]
                events += [
                    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                    {"choices": [], "usage": {"completion_tokens": 5}},
                    b"[DONE]",
                ]
                outcome = self.replay(events)
                self.assertEqual((outcome.code, outcome.endpoint()["output_tokens"]), (0, 10))
                self.assertIn(b"your key is [key] bye", outcome.files["run.jsonl"])

    def test_a_key_in_every_other_field_of_an_answer_is_hidden(self):
        choice = {"index": 0, "message": {"content": "x"}, "finish_reason": KEY}
        self.replay(
            {
                "choices": [choice],
                "usage": {"completion_tokens": 1, "completion_tokens_details": {"a": KEY}},
                "timings": {KEY: 1, "predicted_ms": KEY},
                "stats": [KEY],
                "system_fingerprint": KEY,
                "model": KEY,
            }
        )
        spelled = ("".join("\\u%04x" % ord(c) for c in KEY)).encode()
        self.replay(
            [
                b'{"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "'
                + spelled
                + b'"}], "stats": {"a": "'
                + spelled
                + b'"}, "system_fingerprint": "'
                + spelled
                + b'", "usage": {"completion_tokens": 1}}',
                b"[DONE]",
            ]
        )

    def test_a_key_in_texts_that_differ_and_in_their_triage_is_hidden(self):
        for base_text, other in (
            ("one two " + KEY + " end", "one three " + KEY + " end"),
            (KEY + " a", "b a"),
            ("a", KEY),
        ):
            with (
                self.subTest(base_text),
                FakeServer("vllm", answers=lambda p, n, text=base_text: text) as base,
                FakeServer(
                    "vllm",
                    answers=lambda p, n, text=other: text,
                    gaps={0: (KEY, 0.1), 1: (" " + KEY, 0.1)},
                ) as drafting,
            ):
                base.gaps = drafting.gaps
                outcome = self.run_with_key(base, drafting)
                self.assertEqual(outcome.comparison()["text_comparison"]["divergent"], 2)
                self.assertEqual(
                    sorted({"logprobs"} & {k for c in base.chats for k in c["body"]}),
                    ["logprobs"],
                    "triage asked",
                )

    def test_a_key_in_names_versions_and_metrics_is_hidden(self):
        spelled = "".join("\\u%04x" % ord(c) for c in KEY)
        models = (
            '{"data": [{"id": "%s", "owned_by": "vllm"}, {"id": "two"}]}' % spelled,
            json.dumps({"data": [{"id": KEY, "owned_by": KEY}]}),
        )
        for page in models:
            for flags in ((), ("--model", "one")):
                with FakeServer("plain", pages={"/v1/models": page}, words=3) as server:
                    self.run_with_key(server, None, *flags)
        label = KEY.replace("\\", "\\\\").replace('"', '\\"')
        metrics = (
            '# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total{model_name="%s"} 3\n'
            % label
        )
        for version in (json.dumps({"version": KEY}), '{"version": "%s"}' % spelled):
            with FakeServer(
                "vllm", pages={"/version": version, "/metrics": metrics}, words=3
            ) as server:
                self.assertEqual(self.run_with_key(server).code, 0)

    def test_a_key_in_a_header_of_the_metrics_page_is_hidden(self):
        with FakeServer("llama.cpp", words=3) as server:
            real = server._http.RequestHandlerClass.send_head

            def send_head(handler, status, kind, headers):
                if kind.startswith("text/plain"):
                    headers = {"Process-Start-Time-Unix": "1-" + KEY}
                real(handler, status, kind, headers)

            with mock.patch.object(server._http.RequestHandlerClass, "send_head", send_head):
                outcome = self.run_with_key(server)
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn(b'"1-[key]"', outcome.files["run.jsonl"])

    def test_a_key_in_an_answer_that_is_the_request_itself_is_hidden(self):
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]

        def echo():
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.sendall(client.recv(65536).split(b"Authorization: ")[-1])

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        outcome = run_main("--baseline-url", f"http://127.0.0.1:{port}", "--model", "m", env=SECRET)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        self.assertEqual(outcome.code, 2)
        self.check_hidden(outcome)

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


class OtherHosts(Secrets):
    def test_the_key_and_the_request_stay_at_home_when_a_server_redirects(self):
        for where in ("chat", "/v1/models", "/metrics", "/version"):
            with (
                self.subTest(where),
                FakeServer("vllm", api_key=KEY, words=3) as server,
                FakeServer("vllm", words=3) as other,
            ):
                server.redirect_to = other.root + "/v1/chat/completions?from=here"
                if where == "chat":
                    server.faults, server.repeat_fault = ["redirect"], True
                else:
                    server.page_faults, server.repeat_fault = {where: ["redirect"]}, True
                self.run_with_key(server)
                self.assertEqual(other.requests, [])

    def test_a_metrics_page_elsewhere_never_gets_the_key(self):
        with (
            FakeServer("vllm", api_key=KEY, words=3) as server,
            FakeServer("vllm", words=3) as other,
            mock.patch.object(ms, "SETTLE_LIMIT_S", 0.05),
        ):
            outcome = self.run_with_key(
                server, None, "--baseline-metrics-url", other.root + "/metrics"
            )
            self.assertEqual(outcome.code, 0, outcome.err)
            self.assertTrue(other.requests)
            self.assertFalse([r for r in other.requests if "authorization" in r["headers"]])

    def test_a_metrics_page_under_another_name_of_the_host_never_gets_the_key(self):
        with FakeServer("llama.cpp", words=3) as server:
            url = server.root.replace("127.0.0.1", "localhost") + "/metrics"
            self.run_with_key(server, None, "--baseline-metrics-url", url)
            read = [r for r in server.requests if r["path"] == "/metrics"]
            self.assertTrue(read)
            self.assertFalse([r for r in read if "authorization" in r["headers"]])

    def test_a_metrics_page_of_the_same_server_gets_the_key(self):
        with FakeServer("lmdeploy", api_key=KEY, words=3) as server:
            outcome = self.run_with_key(
                server, None, "--baseline-metrics-url", server.root + "/metrics?x=1"
            )
            self.assertNotIn(
                "metrics-unavailable", [entry["finding"] for entry in outcome.endpoint()["audit"]]
            )

    def test_the_key_in_the_query_of_a_metrics_url_is_not_recorded(self):
        with FakeServer("vllm", words=3) as server:
            for page in ("/metrics", "/nowhere"):
                self.run_with_key(
                    server,
                    None,
                    "--baseline-metrics-url",
                    server.root + page + "?key=" + urllib.parse.quote(KEY, safe=""),
                )


class Credentials(Secrets):
    """URLs with credentials are refused and not shown, before any request."""

    URLS = [
        "http://user:hun7er2@127.0.0.1:{}/v1",
        "http://hun7er2@127.0.0.1:{}",
        "https://user:hun7er2@127.0.0.1:{}/v1",
        "http://user:hun7er2@[::1]:{}/v1",
        "user:hun7er2@127.0.0.1:{}",
        "//user:hun7er2@127.0.0.1:{}",
        "http:user:hun7er2@127.0.0.1:{}",
        "ftp://user:hun7er2@127.0.0.1",
        "http://user:hun7er2@127.0.0.1:port/v1",
        "http://user:hun7er2@[127.0.0.1:{}/v1",
        "http://us%20er:hun7er2@x@127.0.0.1:{}/v1",
        "http://user:12/hun7er2@127.0.0.1:{}/v1",
        "http://user:hun7er2/x@127.0.0.1:{}/v1",
        "http://user:hun7er2#x@127.0.0.1:{}/v1",
        "http://user:hun7er2 @127.0.0.1:{}/v1",
        "http://user:hun7er2?x@127.0.0.1:{}/v1",
        "http://127.0.0.1:{}/v1?key=hun7er2",
        "http://127.0.0.1:{}/v1#hun7er2",
    ]

    def check_refused(self, server, *flags):
        del server.requests[:]
        outcome = run_main(*flags, *FLAGS, prompts=["a"])
        self.assertEqual(outcome.code, 2, outcome.err)
        self.assertEqual(server.requests, [])
        self.check_hidden(outcome, "hun7er2")
        self.assertEqual(outcome.err.count("\n"), 1, outcome.err)
        return outcome

    def test_base_urls_with_credentials_are_refused_unseen(self):
        with FakeServer("plain") as server:
            for url in self.URLS:
                for flags in (
                    ("--baseline-url",),
                    ("--speculative-url",),
                    ("--speculative-url", "k4="),
                ):
                    with self.subTest(url, flags=flags):
                        self.check_refused(
                            server, flags[0], "".join(flags[1:]) + url.format(server.port)
                        )

    def test_metrics_urls_with_credentials_are_refused_unseen(self):
        with FakeServer("plain") as server:
            for url in self.URLS:
                if "?key" in url:  # a metrics page may need a query
                    continue
                for arm in ("baseline", "speculative"):
                    with self.subTest(url, arm=arm):
                        self.check_refused(
                            server,
                            f"--{arm}-url",
                            server.url,
                            f"--{arm}-metrics-url",
                            url.format(server.port),
                        )

    def test_the_refusal_says_where_a_key_belongs(self):
        with FakeServer("plain") as server:
            outcome = self.check_refused(server, "--baseline-url", self.URLS[0].format(server.port))
            self.assertIn("--baseline-url", outcome.err)
            self.assertIn("--api-key-env", outcome.err)


class WhatTheEnvironmentHolds(unittest.TestCase):
    def test_only_the_named_variable_is_read_as_a_key(self):
        with FakeServer("plain", words=3) as server:
            env = {"OPENAI_API_KEY": KEY, "API_KEY": KEY, "SPEC_API_KEY": ""}
            measure(server, None, env=env, prompts=["a"])
            self.assertFalse([r for r in server.requests if "authorization" in r["headers"]])

    def test_no_netrc_file_is_read(self):
        with tempfile.TemporaryDirectory() as home, FakeServer("plain", words=3) as server:
            path = os.path.join(home, ".netrc")
            pathlib.Path(path).write_text(
                "machine 127.0.0.1 login user password hun7er2\n", "utf-8"
            )
            measure(
                server, None, env={"HOME": home, "NETRC": path, "SPEC_API_KEY": ""}, prompts=["a"]
            )
            self.assertFalse([r for r in server.requests if "authorization" in r["headers"]])


if __name__ == "__main__":
    unittest.main()
