"""Findings of a comparison: each is raised when it should be, and none on a clean run."""

import dataclasses
import functools
import json
import random
import types
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import Counts, FakeServer, Speculation, sum_counts
from tests.support import (
    answer,
    compare,
    findings,
    measure,
    saved_run,
)

TWO = ["first prompt of two", "second prompt of two"]
MANY = ["prompt number %d of many" % i for i in range(12)]
PATTERN = Speculation(4, (4, 2, 0))
COUNTING = (
    "llama.cpp",
    "vllm",
    "vllm-old",
    "sglang",
    "lmdeploy",
    "tgi",
)  # engines that count tokens on a page


def all_findings(outcome):
    return findings(*outcome.records)


def run_pair(engine="llama.cpp", prompts=TWO, flags=(), baseline=None, candidate=None, **both):
    """(outcome, baseline fake, drafting fake); the dicts hold options of one of the two servers."""
    base = FakeServer(engine, **dict(both, **(baseline or {})))
    drafting = FakeServer(
        engine, **dict({"speculation": PATTERN}, **dict(both, **(candidate or {})))
    )
    with base, drafting:
        return measure(base, drafting, *flags, prompts=prompts), base, drafting


def at_prompt(prompt, action):
    """Answers that do something first when a certain prompt is asked."""

    def answers(asked, nth):
        if asked == prompt:
            action()

    return answers


class CleanRuns(unittest.TestCase):
    def test_clean_run_has_no_finding(self):
        for engine in (
            "llama.cpp",
            "vllm",
            "vllm-old",
            "sglang",
            "tensorrt-llm",
            "lmdeploy",
            "ik_llama.cpp",
        ):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, MANY)
                self.assertEqual(all_findings(outcome), {})
                self.assertNotIn("Note:", outcome.out)

    def test_clean_run_of_an_engine_without_metrics_has_no_other_finding(self):
        for engine in ("mlx-vlm", "lm-studio", "tabbyapi", "koboldcpp"):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, MANY)
                self.assertEqual(set(all_findings(outcome)), {"metrics-unavailable"})

    def test_clean_run_of_several_rounds_and_kinds_of_work_has_no_finding(self):
        lines = "".join(
            json.dumps({"prompt": p, "workload": "ab"[i % 2]}) + "\n" for i, p in enumerate(MANY)
        )
        for engine in COUNTING:
            with (
                self.subTest(engine),
                FakeServer(engine) as a,
                FakeServer(engine, speculation=PATTERN) as b,
            ):
                outcome = measure(
                    a, b, "--prompts", "p.jsonl", "--repeats", "2", files={"p.jsonl": lines}
                )
                self.assertEqual(set(all_findings(outcome)) - {"stalls"}, set())

    def test_findings_are_entries_with_a_name_and_words(self):
        outcome, _, _ = run_pair(candidate={"foreign": 9, "context": 99, "cached": 7})
        for record in outcome.records:
            for entry in record["audit"]:
                self.assertTrue(entry["finding"] and entry["detail"])
                self.assertIn(entry["detail"], outcome.out)
                self.assertIn("[%s]" % entry["finding"], outcome.out)


class FindingsOnCounters(unittest.TestCase):
    def setUp(self):  # counters that never catch up are part of these tests
        patch = mock.patch.object(ms, "SETTLE_LIMIT_S", 0.1)
        patch.start()
        self.addCleanup(patch.stop)

    def test_restart_is_found_and_voids_the_counters_only(self):
        for engine in ("llama.cpp", "vllm", "lmdeploy", "sglang", "vllm-old"):
            with (
                self.subTest(engine),
                FakeServer(engine) as a,
                FakeServer(engine, speculation=PATTERN) as b,
            ):
                b.answers = at_prompt(TWO[1], b.restart)
                outcome = measure(a, b, prompts=TWO)
                record = outcome.endpoint("speculative")
                self.assertIn("restarted", findings(record)["counter-reset"]["detail"])
                self.assertIsNone(record["spec_metrics_delta"])
                self.assertNotIn("foreign-traffic", findings(record))
                self.assertNotIn("counter-reset", findings(outcome.endpoint("baseline")))
                self.assertIsNotNone(record["output_tokens_per_s"])
                self.assertEqual(outcome.comparison()["text_comparison"]["identical"], 2)
                if engine in ("lmdeploy", "vllm-old"):
                    self.assertIsNone(record["acceptance"])

    def test_restart_leaves_what_the_answers_tell(self):
        with FakeServer("vllm", speculation=PATTERN) as b:
            b.answers = at_prompt(TWO[1], b.restart)
            told = measure(None, b, prompts=TWO).endpoint("speculative")["acceptance"]
            truth = sum_counts(b.given[1:])
        self.assertEqual((told["drafted"], told["accepted"]), (truth.drafted, truth.accepted))

    def test_foreign_traffic_is_counted_to_the_token(self):
        for engine in COUNTING:
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, candidate={"foreign": 9})
                self.assertEqual(
                    findings(outcome.endpoint("speculative"))["foreign-traffic"]["foreign_tokens"],
                    9 * 2,
                )
                self.assertNotIn("foreign-traffic", findings(outcome.endpoint("baseline")))
                self.assertIn("18 tokens", outcome.out)

    def test_foreign_traffic_on_the_baseline_is_found_too(self):
        outcome, _, _ = run_pair("vllm", baseline={"foreign": 5})
        self.assertEqual(
            findings(outcome.endpoint("baseline"))["foreign-traffic"]["foreign_tokens"], 10
        )

    def test_one_answer_of_a_second_client_is_found(self):
        with FakeServer("llama.cpp") as a, FakeServer("llama.cpp", speculation=PATTERN) as b:
            a.answers = at_prompt(
                TWO[1], lambda: b.generate(40)
            )  # while the other arm is being asked
            self.assertEqual(
                findings(measure(a, b, prompts=TWO).endpoint("speculative"))["foreign-traffic"][
                    "foreign_tokens"
                ],
                40,
            )

    def test_traffic_between_the_blocks_is_found(self):
        """The counters of one arm are read around its blocks; what happens in between belongs to the measurement too."""
        with FakeServer("lmdeploy", speculation=PATTERN) as b:
            lines = '{"prompt": "a one", "workload": "a"}\n{"prompt": "b one", "workload": "b"}\n'
            taken = []
            real = ms.execute

            def between(plan, *args, **kwargs):
                taken.extend(plan)
                middle = iter(plan)

                def with_traffic():
                    yield next(middle)
                    b.generate(30)
                    yield from middle

                return real(with_traffic(), *args, **kwargs)

            with mock.patch.object(ms, "execute", between):
                outcome = measure(None, b, "--prompts", "p.jsonl", files={"p.jsonl": lines})
            self.assertEqual(len(taken), 2)
            self.assertEqual(
                findings(outcome.endpoint("speculative"))["foreign-traffic"]["foreign_tokens"], 30
            )

    def test_traffic_before_the_measurement_is_nobody_s_business(self):
        with FakeServer("vllm", speculation=PATTERN) as b:
            b.generate(500)
            self.assertNotIn(
                "foreign-traffic", findings(measure(None, b, prompts=TWO).endpoint("speculative"))
            )

    def test_excess_of_one_percent_is_no_traffic(self):
        """Engines count accepted tokens behind the end of an answer: 34 of 16990 were seen."""
        for extra, is_found in ((1, False), (2, False), (3, True)):
            with self.subTest(extra), FakeServer("vllm", words=100, speculation=PATTERN) as server:
                server.answers = at_prompt(TWO[1], functools.partial(server.generate, extra))
                self.assertEqual(
                    "foreign-traffic" in all_findings(measure(None, server, prompts=TWO)), is_found
                )

    def test_sources_that_disagree_are_named_and_the_answers_believed(self):
        outcome, _, drafting = run_pair("vllm", candidate={"foreign": 60})
        record, truth = outcome.endpoint("speculative"), sum_counts(drafting.given[1:])
        detail = findings(record)["sources-disagree"]["detail"]
        self.assertIn(str(truth.drafted), detail)
        self.assertIn("answers", detail)
        self.assertEqual(
            tuple(record["acceptance"][name] for name in ("steps", "drafted", "accepted")),
            (truth.steps, truth.drafted, truth.accepted),
        )
        self.assertEqual(record["acceptance"]["source"], "response")

    def test_engine_without_both_sources_cannot_disagree(self):
        for engine in ("lmdeploy", "lm-studio"):
            outcome, _, _ = run_pair(engine, candidate={"foreign": 60})
            self.assertNotIn("sources-disagree", all_findings(outcome))

    def test_rate_above_one_is_flagged_and_not_clamped(self):
        page = "".join(
            '# TYPE lmdeploy:%s_total counter\nlmdeploy:%s_total{engine="0"} %%d\n' % (name, name)
            for name in (
                "generation_tokens",
                "spec_decode_num_drafts",
                "spec_decode_num_draft_tokens",
                "spec_decode_num_accepted_tokens",
            )
        )
        with FakeServer("lmdeploy", speculation=PATTERN) as server:
            server.pages["/metrics"] = lambda: (
                page
                % (
                    server.truth.tokens,
                    server.truth.steps,
                    server.truth.accepted // 2,
                    server.truth.accepted // 2 * 2,
                )
            )
            outcome = measure(None, server, prompts=TWO)
        record = outcome.endpoint("speculative")
        self.assertEqual(record["acceptance"]["rate"], 2.0)
        self.assertEqual(findings(record)["rate-above-one"]["rate"], 2.0)
        self.assertIn("[rate-above-one]", outcome.out)

    def test_unknown_speculation_counters_are_said_to_be_unknown(self):
        page = "# TYPE odd:draft_magic_total counter\nodd:draft_magic_total %d\n"
        with FakeServer("plain") as server:
            server.pages["/metrics"] = lambda: page % (7 * len(server.given))
            record = measure(None, server, prompts=TWO).endpoint("speculative")
        self.assertEqual(record["spec_metrics_delta"], {"odd:draft_magic_total": 14})
        self.assertIsNone(record["acceptance"])
        self.assertIn("unknown kind", findings(record)["metrics-unavailable"]["detail"])

    def test_missing_metrics_are_a_finding_of_their_arm(self):
        outcome, _, _ = run_pair("llama.cpp", candidate={"metrics": False})
        self.assertIn(
            "501", findings(outcome.endpoint("speculative"))["metrics-unavailable"]["detail"]
        )
        self.assertNotIn("metrics-unavailable", findings(outcome.endpoint("baseline")))


class FindingsOnDrafting(unittest.TestCase):
    def test_baseline_that_drafts_is_found(self):
        for engine in (
            "llama.cpp",
            "ik_llama.cpp",
            "mlx-vlm",
            "vllm",
            "vllm-old",
            "sglang",
            "tensorrt-llm",
            "lmdeploy",
            "tgi",
            "lm-studio",
            "tabbyapi",
            "koboldcpp",
        ):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, baseline={"speculation": Speculation(2, (2, 1))})
                self.assertIn("baseline-drafting", findings(outcome.comparison()))

    def test_drafting_server_measured_alone_is_no_finding(self):
        with FakeServer("llama.cpp", speculation=PATTERN) as server:
            for arms in ((server, None), (None, server)):
                self.assertEqual(all_findings(measure(*arms, prompts=TWO)), {})

    def test_candidate_that_never_drafts_gets_no_verdict(self):
        for engine in ("llama.cpp", "ik_llama.cpp", "mlx-vlm", "vllm", "lmdeploy", "tgi"):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, MANY, candidate={"speculation": None})
                record = outcome.comparison()
                self.assertIn("not-drafting", findings(record))
                self.assertIsNone(record["verdict"])
                self.assertEqual([part["verdict"] for part in record["workloads"]], [None])
                self.assertIsNotNone(record["speedup"])
                self.assertIn("DID NOT RUN", outcome.out)
                self.assertNotIn("PAYS", outcome.out)

    def test_configured_speculation_that_never_drafts_gets_no_verdict(self):
        """An n-gram drafter that finds nothing: the counters are there and stay at zero."""
        for engine in ("vllm", "vllm-old", "sglang", "lmdeploy", "tensorrt-llm", "llama.cpp"):
            with self.subTest(engine):
                outcome, _, _ = run_pair(
                    engine, MANY, candidate={"speculation": Speculation(3, (None,))}
                )
                self.assertIn("not-drafting", findings(outcome.comparison()))
                self.assertIsNone(outcome.comparison()["verdict"])

    def test_nothing_known_about_drafts_is_not_called_idle(self):
        outcome, _, _ = run_pair("plain", MANY)
        self.assertNotIn("not-drafting", findings(outcome.comparison()))
        self.assertIsNotNone(outcome.comparison()["verdict"])

    def test_workload_in_which_nothing_was_drafted_has_no_verdict_of_its_own(self):
        answers = {"long %d" % i: None for i in range(3)}
        answers.update({"short %d" % i: "two words" for i in range(3)})  # no room for a draft
        lines = "".join(json.dumps({"prompt": p, "workload": p.split()[0]}) + "\n" for p in answers)
        for engine in ("llama.cpp", "lmdeploy"):
            with (
                self.subTest(engine),
                FakeServer(engine, answers=answers) as a,
                FakeServer(engine, answers=answers, speculation=PATTERN) as b,
            ):
                b.kind = dataclasses.replace(b.kind, whole_chains=False)
                record = measure(
                    a, b, "--prompts", "p.jsonl", files={"p.jsonl": lines}
                ).comparison()
                verdicts = {part["workload"]: part["verdict"] for part in record["workloads"]}
                self.assertIsNone(verdicts["short"])
                self.assertIsNotNone(verdicts["long"])
                self.assertIsNotNone(record["verdict"])
                self.assertNotIn("not-drafting", findings(record))

    def test_lifetime_mean_is_named_and_never_taken_for_this_run(self):
        past = Counts(tokens=500, histogram=[10, 10, 10, 10, 10], drafts=[0, 0, 0, 0, 50])
        outcome, _, _ = run_pair(
            "sglang", metrics=False, details=False, candidate={"counted_before": past}
        )
        record = outcome.endpoint("speculative")
        self.assertEqual(findings(record)["lifetime-only"]["mean_length"], 3.0)
        self.assertIsNone(record["acceptance"])
        self.assertIn("[lifetime-only]", outcome.out)
        outcome, _, _ = run_pair("sglang", candidate={"counted_before": past})
        self.assertNotIn("lifetime-only", all_findings(outcome))


class FindingsOnServers(unittest.TestCase):
    def test_differences_between_the_servers_are_found_and_named(self):
        """(finding, engine, options of the candidate, words in the detail)"""
        props = {
            "default_generation_settings": {"n_ctx": 4096},
            "total_slots": 1,
            "build_info": "b11434-1a2b3c4d",
        }
        for name, engine, options, words in (
            ("context-differs", "llama.cpp", {"context": 8192}, ["4096", "8192"]),
            ("context-differs", "vllm", {"context": 2048}, ["4096", "2048"]),
            ("context-differs", "sglang", {"context": 2048}, ["4096", "2048"]),
            ("build-differs", "llama.cpp", {"build": "b99-ffff"}, ["b11434-1a2b3c4d", "b99-ffff"]),
            ("build-differs", "vllm", {"build": "0.9"}, ["0.33.0", "0.9"]),
            ("build-differs", "sglang", {"build": "0.1"}, ["0.5.23", "0.1"]),
            ("model-differs", "llama.cpp", {"model": "another"}, ["fake-model", "another"]),
            (
                "quantization-differs",
                "llama.cpp",
                {"pages": {"/props": dict(props, model_ftype="Q4_K")}},
                ["Q8_0", "Q4_K"],
            ),
        ):
            with self.subTest(name=name, engine=engine):
                base = (
                    {"pages": {"/props": dict(props, model_ftype="Q8_0")}}
                    if "quant" in name
                    else {}
                )
                outcome, _, _ = run_pair(engine, MANY, baseline=base, candidate=options)
                self.assertEqual(set(all_findings(outcome)), {name})
                for word in words:
                    self.assertIn(word, findings(outcome.comparison())[name]["detail"])

    def test_quantization_is_read_where_engines_tell_it(self):
        models = {
            "data": [
                {"id": "fake-model", "owned_by": "llamacpp", "meta": {"n_ctx": 4096, "ftype": "%s"}}
            ]
        }
        info = {
            "version": "0.5.23",
            "context_length": 4096,
            "server_args": {"quantization": "%s"},
            "internal_states": [{}],
        }
        for engine, path, page in (
            ("llama.cpp", "/v1/models", models),
            ("sglang", "/server_info", info),
        ):
            with self.subTest(engine):
                pages = [{path: json.loads(json.dumps(page) % value)} for value in ("fp8", "awq")]
                outcome, _, _ = run_pair(
                    engine, MANY, baseline={"pages": pages[0]}, candidate={"pages": pages[1]}
                )
                self.assertIn("quantization-differs", findings(outcome.comparison()))

    def test_engine_that_tells_nothing_differs_in_nothing(self):
        outcome, _, _ = run_pair("plain", MANY)
        self.assertFalse([name for name in all_findings(outcome) if name.endswith("-differs")])

    def test_cached_tokens_that_differ_are_found(self):
        for engine in ("llama.cpp", "vllm"):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, MANY, candidate={"cached": 3})
                entry = findings(outcome.comparison())["cache-differs"]
                self.assertEqual((entry["baseline"], entry["speculative"]), (0, 36))
                outcome, _, _ = run_pair(engine, MANY, cached=3)
                self.assertEqual(all_findings(outcome), {})

    def test_busy_server_is_found_and_said_before_the_run(self):
        for engine in ("llama.cpp", "vllm", "sglang", "lmdeploy", "tgi", "tensorrt-llm"):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine, candidate={"busy": (1, 2)})
                self.assertEqual(findings(outcome.endpoint("speculative"))["busy"]["requests"], 3)
                self.assertNotIn("busy", findings(outcome.endpoint("baseline")))
                self.assertIn("busy", outcome.err)

    def test_same_url_on_both_arms_is_a_check_of_the_noise(self):
        with FakeServer(
            "llama.cpp", speculation=PATTERN, cached=lambda prompt, nth: 2 * nth
        ) as server:
            outcome = measure(server, server, prompts=MANY)
        self.assertEqual(set(all_findings(outcome)), {"same-server"})
        self.assertIsNone(outcome.comparison()["verdict"])
        self.assertEqual(outcome.comparison()["verdict_withheld"], "same-server")

    def test_same_process_behind_two_addresses_is_the_same_server(self):
        for engine in ("llama.cpp", "vllm", "lmdeploy"):
            with self.subTest(engine), FakeServer(engine) as a:
                other = types.SimpleNamespace(url=a.url.replace("127.0.0.1", "localhost"))
                self.assertIn("same-server", findings(measure(a, other, prompts=MANY).comparison()))

    def test_two_servers_that_were_started_together_are_two_servers(self):
        with (
            FakeServer("vllm") as a,
            FakeServer("vllm", speculation=Speculation(4, (4, 2, 0))) as b,
        ):
            b.started = a.started
            outcome = measure(a, b, prompts=MANY)
        self.assertFalse(
            {"same-server", "counter-reset", "foreign-traffic"} & set(all_findings(outcome))
        )

    def test_two_servers_are_not_the_same_server(self):
        for engine in ("llama.cpp", "vllm", "sglang", "plain"):
            with self.subTest(engine):
                outcome, _, _ = run_pair(engine)
                self.assertNotIn("same-server", all_findings(outcome))

    def test_memory_of_both_servers_is_reported_where_they_tell(self):
        cache = (
            '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%d"} 1.0\n'
            "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes %d\n"
        )
        with (
            FakeServer("vllm", pages={"/metrics": cache % (1000, 800 << 20)}) as a,
            FakeServer("vllm", pages={"/metrics": cache % (600, 900 << 20)}) as b,
        ):
            outcome = measure(a, b, prompts=TWO)
        told = [outcome.endpoint(arm)["server"] for arm in ("baseline", "speculative")]
        self.assertEqual([server["cache_tokens"] for server in told], [16000, 9600])
        self.assertEqual([server["resident_bytes"] for server in told], [800 << 20, 900 << 20])
        (line,) = [x for x in outcome.out.splitlines() if x.startswith("Memory:")]
        for word in ("16000", "9600", "800 MiB", "900 MiB"):
            self.assertIn(word, line)

    def test_memory_of_several_engines_behind_one_server_is_added(self):
        page = "".join(
            'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1.0\n' % i
            for i in range(2)
        )
        with FakeServer("vllm", pages={"/metrics": page}) as server:
            self.assertEqual(
                measure(server, None, prompts=TWO).endpoint()["server"]["cache_tokens"], 3200
            )

    def test_memory_of_llama_is_its_context_for_each_slot(self):
        props = {
            "default_generation_settings": {"n_ctx": 2048},
            "total_slots": 4,
            "build_info": "b1-a",
        }
        for slots in (
            [{"n_ctx": 2048}] * 4,
            (501, "application/json", b'{"error": {"message": "slots are off"}}'),
        ):
            with FakeServer("llama.cpp", pages={"/props": props, "/slots": slots}) as server:
                self.assertEqual(
                    measure(server, None, prompts=TWO).endpoint()["server"]["cache_tokens"], 8192
                )

    def test_server_that_tells_no_memory_gets_no_line(self):
        outcome, _, _ = run_pair("plain")
        self.assertNotIn("Memory:", outcome.out)

    def test_servers_split_over_different_numbers_of_devices_are_told_apart(self):
        """Case A08: the same model on one and on four devices is no comparison of speculation."""

        def info(size):
            return {
                "/server_info": {"version": "0.5", "tp_size": size},
                "/get_server_info": {"version": "0.5", "tp_size": size},
            }

        for sizes in ((1, 4), (4, 4)):
            with (
                self.subTest(sizes),
                FakeServer("sglang", pages=info(sizes[0])) as a,
                FakeServer("sglang", pages=info(sizes[1]), speculation=Speculation()) as b,
            ):
                details = [
                    entry["detail"]
                    for entry in measure(a, b, prompts=["one", "two"]).comparison()["audit"]
                ]
                self.assertEqual(
                    any("tensor parallel size" in detail for detail in details),
                    sizes[0] != sizes[1],
                )


class FindingsOnAnswers(unittest.TestCase):
    def test_bytes_that_are_no_text_are_found(self):
        for flags in ((), ("--no-stream",)):
            with self.subTest(flags):
                outcome, _, _ = run_pair(flags=flags, candidate={"faults": [None, "bad-utf8"]})
                self.assertEqual(
                    findings(outcome.endpoint("speculative"))["undecodable-text"]["count"], 1
                )
                self.assertNotIn("undecodable-text", findings(outcome.endpoint("baseline")))
                self.assertEqual(outcome.code, 0)

    def test_missing_token_counts_are_found_and_rates_left_out(self):
        outcome, _, _ = run_pair(candidate={"usage": False})
        record = outcome.endpoint("speculative")
        self.assertIn("usage-missing", findings(record))
        self.assertIsNone(record["output_tokens_per_s"])
        self.assertNotIn("not-drafting", all_findings(outcome))

    def test_few_prompts_are_said_with_their_number(self):
        for prompts, is_found in (
            (MANY[:1], True),
            (MANY[:2], True),
            (MANY[:11], True),
            (MANY, False),
        ):
            with self.subTest(len(prompts)):
                outcome, _, _ = run_pair(prompts=prompts)
                found = findings(outcome.comparison())
                self.assertEqual("few-prompts" in found, is_found)
                if is_found:
                    self.assertEqual(found["few-prompts"]["prompts"], len(prompts))

    def test_one_stalled_answer_is_found_and_kept(self):
        dice = random.Random(9)  # times of a model: on a busy machine others stall too

        def times(seconds):
            return [[seconds * dice.uniform(0.98, 1.02) for _ in range(3)] for _ in range(6)]

        plain, drafting = times(0.2), times(0.1)
        drafting[3][1] += 0.5
        outcome = compare(
            *(
                (name, saved_run(arm, [[answer(40, each) for each in row] for row in rows]))
                for name, arm, rows in (
                    ("plain.jsonl", "baseline", plain),
                    ("draft.jsonl", "speculative", drafting),
                )
            )
        )
        self.assertEqual(findings(outcome.comparison())["stalls"]["count"], 1)
        self.assertEqual(
            (
                outcome.endpoint("speculative")["requests"],
                outcome.endpoint("speculative")["completed"],
            ),
            (18, 18),
        )
        self.assertGreater(outcome.endpoint("speculative")["latency_s"]["max"], 0.5)

    def test_waiting_for_a_server_is_found_and_not_timed(self):
        outcome, _, _ = run_pair(candidate={"faults": [None, "503-retry-after", "429-retry-after"]})
        record = outcome.endpoint("speculative")
        self.assertEqual(findings(record)["waited"]["count"], 1)
        self.assertEqual((record["completed"], record["failed"]), (2, 0))
        self.assertNotIn("waited", findings(outcome.endpoint("baseline")))

    def test_warm_up_trouble_is_no_finding(self):
        outcome, _, _ = run_pair(prompts=MANY, candidate={"faults": ["503-retry-after"]})
        self.assertEqual(all_findings(outcome), {})


class OneServerAsBothArms(unittest.TestCase):
    NOISE = "measures the noise"

    def measured(self, *flags):
        with FakeServer("vllm", speculation=Speculation(only_with="speculate")) as server:
            return measure(server, server, *flags, prompts=["prompt %d" % i for i in range(3)])

    def test_requests_that_switch_the_draft_make_it_no_noise_check(self):
        outcome = self.measured("--speculative-extra-body", '{"speculate": true}')
        found = findings(outcome.comparison())["same-server"]
        self.assertNotIn(self.NOISE, found["detail"])
        self.assertNotIn(self.NOISE, outcome.out)
        self.assertNotIn("nothing to explain", outcome.out)
        self.assertIsNotNone(outcome.comparison()["verdict"])
        self.assertGreater(outcome.comparison()["acceptance"]["drafted"], 0)

    def test_a_switch_that_switched_nothing_is_said(self):
        outcome = self.measured("--speculative-extra-body", '{"other": true}')
        self.assertIn("not-drafting", findings(outcome.comparison()))
        self.assertIsNone(outcome.comparison()["verdict"])

    def test_the_same_requests_make_it_a_noise_check(self):
        for flags in ((), ("--extra-body", '{"speculate": true}')):
            outcome = self.measured(*flags)
            self.assertIn(self.NOISE, findings(outcome.comparison())["same-server"]["detail"])


if __name__ == "__main__":
    unittest.main()
