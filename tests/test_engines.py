"""Engines: each is recognised with its version, and is sent only what it knows."""

import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import ENGINES, FakeServer, Speculation
from tests.support import measure

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


class EnginesRecognised(unittest.TestCase):
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
                self.assertEqual(outcome.code, 0, outcome.err)
                for arm in ("baseline", "speculative"):
                    record = outcome.endpoint(arm)
                    self.assertEqual(
                        (record["engine"], record["engine_version"]), (engine, version or "unknown")
                    )
                self.assertEqual(outcome.comparison()["engine"], engine)

    def test_another_build_is_told_as_it_is(self):
        for name in ("llama.cpp", "vllm", "sglang", "tensorrt-llm", "tgi", "koboldcpp", "ollama"):
            with self.subTest(name), FakeServer(name, build="9.8.7-x", words=3) as server:
                self.assertEqual(
                    measure(server, None, prompts=["x"]).endpoint()["engine_version"], "9.8.7-x"
                )

    def test_a_named_engine_and_version_are_kept_as_given(self):
        with FakeServer("vllm", words=3) as server:
            record = measure(
                server, None, "--engine", "my-engine", "--engine-version", "r7", prompts=["x"]
            ).endpoint()
            self.assertEqual((record["engine"], record["engine_version"]), ("my-engine", "r7"))
            record = measure(server, None, "--engine", "my-engine", prompts=["x"]).endpoint()
            self.assertEqual((record["engine"], record["engine_version"]), ("my-engine", "0.33.0"))

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
                self.assertEqual(len([r for r in server.requests if r["method"] != "GET"]), 3)

    def test_engines_that_forbid_unknown_fields_get_none(self):
        for name in ("tensorrt-llm", "plain"):
            with self.subTest(name), FakeServer(name, strict=True, words=3) as server:
                self.assertEqual(measure(server, None, prompts=["x"]).code, 0)

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
            self.assertEqual(max(asked), most)
            del asked[:]


if __name__ == "__main__":
    unittest.main()
