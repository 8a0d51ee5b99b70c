"""The fake servers do what the other tests take for granted."""

import http.client
import json
import re
import socket
import time
import unittest
import urllib.error
import urllib.request

from tests.fakes import CASES, DATA, ENGINES, FakeServer, ReplayServer, Speculation, split_steps

ABC = "a b c d e f"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url, headers=None):
    with OPENER.open(urllib.request.Request(url, headers=headers or {}), timeout=5) as response:
        return response.read().decode("utf-8")


def chat(server, prompt, stream=False, headers=None, timeout=5, **more):
    body = dict({"model": "fake-model", "messages": [{"role": "user", "content": prompt}]}, **more)
    if stream:
        body.update(stream=True, stream_options={"include_usage": True})
    request = urllib.request.Request(
        server.url + "/chat/completions",
        json.dumps(body).encode(),
        dict({"Content-Type": "application/json"}, **(headers or {})),
    )
    with OPENER.open(request, timeout=timeout) as response:
        data = response.read()
    if not stream:
        return json.loads(data)
    return [
        json.loads(event[6:])
        for event in data.decode().split("\n\n")
        if event and event != "data: [DONE]"
    ]


def streamed_text(chunks):
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


def value(page, name):
    """The sum of a series over its label sets."""
    found = re.findall(r"^%s(?:\{.*?\})? (\S+)$" % re.escape(name), page, re.M)
    return sum(map(float, found)) if found else None


class Fakes(unittest.TestCase):
    def test_every_engine_answers_streamed_and_plain(self):
        for name in ENGINES:
            for speculation in (None, Speculation(3, (2, 0))):
                with (
                    self.subTest(name),
                    FakeServer(name, speculation=speculation, answers=lambda p, n: ABC) as server,
                ):
                    plain = chat(server, "hi", max_tokens=5)
                    chunks = chat(server, "hi", stream=True, max_tokens=5)
                    self.assertEqual(plain["choices"][0]["message"]["content"], "a b c d e")
                    self.assertEqual(streamed_text(chunks), "a b c d e")
                    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
                    self.assertEqual(set(ends), {"length", None})
                    self.assertEqual(
                        [end["usage"]["completion_tokens"] for end in (plain, chunks[-1])], [5, 5]
                    )
                    self.assertEqual(
                        [m["id"] for m in json.loads(get(server.url + "/models"))["data"]],
                        ["fake-model"],
                    )

    def test_the_fake_counts_what_it_generates(self):
        drafting = Speculation(3, (3, 1, None, 0))
        with FakeServer("vllm", speculation=drafting, words=10) as server:
            chat(
                server, "hi"
            )  # 1 | 2 to 5 | 6, 7 | 8 | 9, its draft of one refused | 10, no room for a draft
            truth = server.truth
            self.assertEqual((truth.tokens, truth.steps, truth.plain_steps), (10, 3, 2))
            self.assertEqual(
                (truth.drafted, truth.accepted, truth.per_position), (3 + 3 + 1, 4, [2, 1, 1])
            )
            page = get(server.root + "/metrics")
            names = [
                "spec_decode_num_%s_total" % n
                for n in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
            ] + ["generation_tokens_total"]
            self.assertEqual([value(page, "vllm:" + name) for name in names], [3, 7, 4, 4, 10])

    def test_tokens_are_one_and_accepted_plus_one_for_each_step(self):
        for length in range(1, 40):
            for pattern in ((4, 2, 0), (0,), (4,), (1, None)):
                steps = split_steps([("content", "x")] * length, Speculation(4, pattern))
                self.assertEqual(1 + sum(step.accepted + 1 for step in steps[1:]), length)
                self.assertTrue(all(step.accepted <= step.drafted <= 4 for step in steps))

    def test_response_fields_and_pages_tell_the_same(self):
        spec = Speculation(4, (4, 2, 0))

        def both(name, **more):
            with FakeServer(name, speculation=spec) as server:
                body, chunks = chat(server, "hi", **more), chat(server, "hi", stream=True, **more)
                page = get(server.root + ENGINES[name].page_path) if ENGINES[name].page else ""
                return body, chunks, page, server.given[1], server.truth

        body, chunks, page, one, all_ = both("llama.cpp")
        for place in (body, chunks[-1]):
            told = place["timings"]
            self.assertEqual(
                (told["draft_n"], told["draft_n_accepted"]), (one.drafted, one.accepted)
            )
        self.assertEqual(value(page, "llamacpp:spec_decode_num_drafts_total"), all_.steps)
        body, chunks, page, one, all_ = both("sglang", return_spec_tokens_details=True)
        self.assertEqual(body["sglext"]["spec_tokens_details"]["spec_verify_ct"], one.steps)
        self.assertEqual(chunks[-2]["choices"], [])
        self.assertEqual(body["sglext"], chunks[-2]["sglext"])
        self.assertEqual(value(page, "sglang:generation_tokens_total"), all_.tokens)
        body, chunks, page, one, all_ = both("tensorrt-llm")
        self.assertEqual(
            chunks[-2]["choices"][0]["speculative_decoding"]["acceptance_histogram"], one.histogram
        )
        first = next(
            line for line in page.split("\n") if "drafted" in line and 'token_position="0"' in line
        )
        self.assertEqual(float(first.split(" ")[1]), all_.steps)
        body, chunks, page, one, all_ = both("tgi")
        self.assertEqual(
            value(page, "tgi_request_skipped_tokens_count") - all_.requests, all_.steps
        )
        self.assertEqual(value(page, "tgi_request_skipped_tokens_sum"), all_.accepted)
        body, chunks, page, one, all_ = both("tabbyapi")
        details = chunks[-1]["usage"]["completion_tokens_details"]
        self.assertEqual(sum(details.values()), one.drafted)
        self.assertEqual(chunks[-1]["choices"][0]["finish_reason"], "stop")
        body, chunks, page, one, all_ = both("lm-studio")
        self.assertEqual(body["stats"]["accepted_draft_tokens_count"], one.accepted)

    def test_restart_lag_and_foreign_traffic_show_on_the_page(self):
        def tokens():
            return value(get(server.root + "/metrics"), "vllm:generation_tokens_total")

        with FakeServer("vllm", words=6, lag_reads=1) as server:
            chat(server, "hi")
            self.assertEqual([tokens(), tokens()], [0, 6])
            server.generate(100)
            self.assertEqual((tokens(), server.truth.tokens), (106, 6))
            start = value(get(server.root + "/metrics"), "vllm:generation_tokens_created")
            server.restart()
            self.assertEqual(tokens(), 0)
            self.assertNotEqual(
                value(get(server.root + "/metrics"), "vllm:generation_tokens_created"), start
            )

    def test_faults_come_in_order_and_then_all_is_well(self):
        names = [
            "refuse",
            "html",
            "half-json",
            "429-retry-after",
            "503",
            "redirect",
            "echo-key-error",
            "close-mid-body",
            "error-in-stream",
            "no-finish",
            "no-done",
            "empty",
            "bad-utf8",
        ]
        with FakeServer("llama.cpp", faults=names) as server:
            for name in names:
                with self.subTest(name):
                    try:
                        chunks = chat(
                            server, "hi", stream=True, headers={"Authorization": "Bearer sesame"}
                        )
                        self.assertIn(name, ("error-in-stream", "no-finish", "no-done", "empty"))
                        self.assertEqual(
                            any("error" in chunk for chunk in chunks), name == "error-in-stream"
                        )
                    except urllib.error.HTTPError as error:
                        self.assertIn(
                            name, ("429-retry-after", "503", "redirect", "echo-key-error")
                        )
                        self.assertEqual(b"Bearer sesame" in error.read(), name == "echo-key-error")
                        error.close()
                    except (OSError, ValueError, http.client.HTTPException):
                        self.assertIn(
                            name, ("refuse", "html", "half-json", "close-mid-body", "bad-utf8")
                        )
            self.assertEqual(chat(server, "hi")["usage"]["completion_tokens"], 32)
            self.assertEqual([counts.tokens for counts in server.given], [32, 32, 1, 32, 32])

    def test_endless_faults_end_with_the_client_or_the_test(self):
        begin = time.perf_counter()
        with FakeServer("vllm", faults=["hang", "stall", "dribble-headers", "huge-body"]) as server:
            body = b'{"model": "fake-model", "messages": [], "stream": true}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)

            def read_for(seconds):
                """What comes in that time, and whether the connection is still open."""
                with socket.create_connection(
                    ("127.0.0.1", server.port), timeout=seconds
                ) as connection:
                    connection.sendall(head + body)
                    data, end = b"", time.perf_counter() + seconds
                    while time.perf_counter() < end:
                        try:
                            data += connection.recv(1000)
                        except socket.timeout:
                            break
                    return data

            self.assertEqual(read_for(0.1), b"")
            stalled, dribbled, huge = read_for(0.1), read_for(0.2), read_for(0.1)
        self.assertIn(b"data: ", stalled)
        self.assertNotIn(b"[DONE]", stalled)
        self.assertRegex(dribbled, rb"X-Slow: aa+\Z")
        self.assertIn(b"xxxx", huge)
        self.assertLess(server.huge_sent, 100_000_000)
        self.assertLess(time.perf_counter() - begin, 3)

    def test_keys_models_and_fields_are_refused_as_engines_do(self):
        def status(server, path=None, **more):
            try:
                return (
                    200
                    if (get(server.root + path) if path else chat(server, "hi", **more))
                    else None
                )
            except urllib.error.HTTPError as error:
                error.close()
                return error.code

        with FakeServer("vllm", api_key="sesame") as server:
            self.assertEqual(
                [status(server, path) for path in (None, "/v1/models", "/metrics", "/version")],
                [401, 401, 200, 200],
            )
            self.assertEqual(status(server, headers={"Authorization": "Bearer sesame"}), 200)
            self.assertEqual(
                status(server, headers={"Authorization": "Bearer sesame"}, model="other"), 404
            )
        with FakeServer("llama.cpp", api_key="sesame") as server:
            self.assertEqual([status(server, "/metrics"), status(server, "/health")], [401, 200])
        with FakeServer("llama.cpp", metrics=False, reject={"seed": "no seed"}) as server:
            self.assertEqual(
                [status(server, "/metrics"), status(server, model="x"), status(server, seed=1)],
                [501, 200, 400],
            )
        with FakeServer("tensorrt-llm") as server:
            self.assertEqual(
                [status(server, cache_prompt=True), status(server, seed=1)], [400, 200]
            )

    def test_logprobs_show_the_gap_that_was_asked_for(self):
        with FakeServer("vllm", answers={"hi": "a b c"}, gaps={1: (" other", 0.125)}) as server:
            content = chat(server, "hi", logprobs=True, top_logprobs=3)["choices"][0]["logprobs"][
                "content"
            ]
        self.assertEqual([entry["token"] for entry in content], ["a", " b", " c"])
        first, second = content[1]["top_logprobs"][:2]
        self.assertEqual((first["token"], second["token"]), (" b", " other"))
        self.assertEqual(first["logprob"] - second["logprob"], 0.125)
        self.assertEqual(len(content[0]["top_logprobs"]), 3)

    def test_thinking_comes_first_and_in_the_engines_own_field(self):
        for name, fields in (("vllm", {"reasoning"}), ("llama.cpp", {"reasoning_content"})):
            with FakeServer(
                name, answers={"hi": {"reasoning": "let me see", "content": "42"}}
            ) as server:
                message = chat(server, "hi")["choices"][0]["message"]
                self.assertEqual(message["content"], "42")
                self.assertEqual({message[field] for field in fields}, {"let me see"})
                self.assertIsNone(
                    chat(server, "hi", max_tokens=2)["choices"][0]["message"]["content"]
                )

    def test_replay_serves_the_recorded_bytes(self):
        with ReplayServer("routes.json", CASES / "D05") as server:
            for expected in (503, 503, 200, 200):
                try:
                    chat(server, "hi")
                    self.assertEqual(expected, 200)
                except urllib.error.HTTPError as error:
                    error.close()
                    self.assertEqual(expected, 503)
            self.assertEqual(len(server.chats), 4)
            with self.assertRaises(urllib.error.HTTPError) as caught:
                get(server.url + "/models")
            caught.exception.close()

    def test_the_expected_values_of_the_engine_pages_agree_with_themselves(self):
        expected = json.loads((DATA / "engines" / "expected.json").read_text("utf-8"))
        self.assertEqual(set(expected), set(ENGINES))
        for name, parts in expected.items():
            self.assertEqual(
                (DATA / "engines" / (name + ".after.txt")).exists(), parts["page"] is not None, name
            )
            for values in filter(None, (parts["page"], parts["response"])):
                steps, drafted, accepted = values["steps"], values["drafted"], values["accepted"]
                if drafted is not None:
                    self.assertAlmostEqual(values["rate"], accepted / drafted, 6, name)
                if steps is not None:
                    self.assertAlmostEqual(values["mean_length"], 1 + accepted / steps, 6, name)
                if values["per_position"] is not None:
                    self.assertEqual(sum(values["per_position"]), accepted, name)


if __name__ == "__main__":
    unittest.main()
