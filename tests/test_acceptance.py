"""What became of the drafts, from every engine: recorded bodies and pages through the pure functions, and each engine
through the whole program, where the fake server knows the truth."""

import contextlib
import dataclasses
import email.message
import json
import math
import pathlib
import tempfile
import time
import unittest

import measure_speculative as ms
from tests.fakes import CASES, DATA, ENGINES, FakeServer, ReplayServer, Speculation, sum_counts
from tests.support import (
    findings,
    measure,
    of_answers,
)

RECORDED = DATA / "engines"
EXPECTED = json.loads((RECORDED / "expected.json").read_text("utf-8"))
PROMPTS = ["first prompt of three", "second prompt of three", "third prompt of three"]
PATTERN = Speculation(4, (4, 2, 0))


def snapshot(engine, when):
    return ms.snapshot_of(
        (RECORDED / ("%s.%s.txt" % (engine, when))).read_text("utf-8"), email.message.Message(), "m"
    )


def plain_body(name):
    return json.loads((RECORDED / (name + ".response.json")).read_text("utf-8"))


def answer_of(body):
    builder = ms.AnswerBuilder(0.0)
    builder.add(body, 1.0)
    return builder.answer(streamed=False)


def solved_alpha(accepted_per_step, k):
    """The alpha of alpha + ... + alpha^k = accepted_per_step, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if sum(middle**i for i in range(1, k + 1)) < accepted_per_step
            else (low, middle)
        )
    return low


def raw_answer(body):
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
        + json.dumps(body).encode()
    )


@contextlib.contextmanager
def answering(data):
    """A server that gives one recorded answer (raw HTTP bytes, or JSON) to every chat request."""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "chat.http").write_bytes(
            data if isinstance(data, bytes) else raw_answer(data)
        )
        with ReplayServer(
            [{"method": "POST", "path": "/v1/chat/completions", "file": "chat.http"}], folder
        ) as server:
            yield server


def replayed(data, baseline=None):
    """The Outcome of measuring recorded answers, with a baseline or without."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(answering(d)) if d else None for d in (baseline, data)]
        return measure(*servers, "--model", "m", "--warmup", "0", prompts=["one"])


def case_json(case, name):
    return json.loads((CASES / case / name).read_text("utf-8"))


class RecordedSources(unittest.TestCase):
    """tests/data/engines: values worked out by hand."""

    def check(self, want, found):
        tokens, answers = want["tokens"], want["answers"]
        told = ms.acceptance_record(of_answers(found, tokens, answers)) or {}
        for name in ("steps", "drafted", "accepted"):
            self.assertEqual(told.get(name), want[name], name)
        for name in ("rate", "mean_length", "tokens_per_target_step"):
            if want[name] is None:
                self.assertIsNone(told.get(name), name)
            else:
                self.assertAlmostEqual(told[name], want[name], 9, name)
        self.assertEqual(
            list(found.per_position) if found and found.per_position else None, want["per_position"]
        )
        if want["alpha"] is not None:
            self.assertAlmostEqual(told["alpha"], want["alpha"], 9)
        return told

    def test_pages_give_what_was_worked_out_by_hand(self):
        for engine, want in EXPECTED.items():
            if want["page"] is None:
                continue
            with self.subTest(engine):
                page = want["page"]
                growth = ms.counter_growth(snapshot(engine, "before"), snapshot(engine, "after"))
                self.check(page, ms.acceptance_of_counters(growth, page["answers"]))
                self.assertIn(ms.generated_tokens(growth), (None, page["tokens"]))

    def test_answers_give_what_was_worked_out_by_hand(self):
        for engine, want in EXPECTED.items():
            with self.subTest(engine):
                answer = answer_of(plain_body(engine))
                self.assertEqual(answer.completion_tokens, want["response"]["tokens"])
                self.check(want["response"], ms.acceptance_of_answer(answer.statistics))

    def test_koboldcpp_page_of_the_last_answer_gives_what_can_be_known(self):
        perf = json.loads((RECORDED / "koboldcpp.perf.json").read_text("utf-8"))
        found = ms.acceptance_of_answer({"perf": perf})
        told = self.check(EXPECTED["koboldcpp"]["perf"], found)
        self.assertAlmostEqual(
            told["alpha"], 18 / (18 + 6), msg="6 rounds ended in a rejection: the tested ones"
        )

    def test_alpha_without_positions_solves_the_chain_formula_where_the_chain_is_fixed(self):
        for engine, part, accepted_per_step, chain in (
            ("vllm-old", "page", 100 / 50, 4),
            ("llama.cpp", "response", 27 / 13, 3),
            ("mlx-vlm", "response", 30 / 12, 4),
            ("lm-studio", "response", 21 / 12, 3),
            ("tabbyapi", "response", 18 / 6, 6),
        ):
            with self.subTest(engine):
                want = EXPECTED[engine][part]
                if part == "page":
                    growth = ms.counter_growth(
                        snapshot(engine, "before"), snapshot(engine, "after")
                    )
                    found = ms.acceptance_of_counters(growth, want["answers"])
                else:
                    found = ms.acceptance_of_answer(answer_of(plain_body(engine)).statistics)
                alpha = ms.survival(of_answers(found, want["tokens"], want["answers"]))
                self.assertAlmostEqual(alpha, solved_alpha(accepted_per_step, chain), 6)
                self.assertNotAlmostEqual(found.accepted / found.drafted, alpha, 2)

    def test_alpha_is_null_where_drafts_vary_in_length_and_positions_are_unknown(self):
        self.assertIsNone(
            ms.survival(
                of_answers(
                    ms.acceptance_of_answer(answer_of(plain_body("ik_llama.cpp")).statistics), 33, 1
                )
            )
        )
        self.assertIsNone(
            ms.survival(of_answers(ms.Acceptance("timings", None, 1717, 1093), 1793, 1))
        )


class OneSourceAtATime(unittest.TestCase):
    """One source at a time: what it takes, and what it leaves alone."""

    def test_sources_are_told_apart_by_shape_and_do_not_take_each_other_s(self):
        bodies = {engine: answer_of(plain_body(engine)).statistics for engine in EXPECTED}
        bodies["koboldcpp"] = {
            "perf": json.loads((RECORDED / "koboldcpp.perf.json").read_text("utf-8"))
        }
        for engine, statistics in bodies.items():
            with self.subTest(engine):
                told = [
                    fields
                    for engine_row in ms.ENGINES
                    for fields in engine_row.answers
                    if ms.acceptance_in(fields, statistics)
                ]
                self.assertLessEqual(len(told), 1)

    def test_damaged_fields_are_unknown_and_never_an_exception(self):
        for bad in (None, "12", -1, 1.5, True, [], {}, math.nan, math.inf, 1e300):
            for statistics in (
                {"timings": {"draft_n": bad, "draft_n_accepted": 3}},
                {"timings": bad},
                {"metrics": {"speculative_decoding": bad}},
                {"sglext": bad},
                {"sglext": {"spec_tokens_details": bad}},
                {"meta_info": bad},
                {"choice": bad},
                {"stats": bad},
                {"stats": {"accepted_draft_tokens_count": bad, "rejected_draft_tokens_count": 1}},
                {
                    "usage_details": {
                        "accepted_prediction_tokens": bad,
                        "rejected_prediction_tokens": 1,
                    }
                },
                {"perf": {"last_draft_success": bad, "last_draft_failed": 2}},
            ):
                with self.subTest(statistics):
                    self.assertIsNone(ms.acceptance_of_answer(statistics))

    def test_damaged_histogram_does_not_hide_the_sums(self):
        block = {
            "num_spec_steps": 4,
            "num_draft_tokens": 8,
            "num_accepted_draft_tokens": 4,
            "acceptance_histogram": None,
        }
        found = ms.acceptance_of_answer({"metrics": {"speculative_decoding": block}})
        self.assertEqual(
            (found.steps, found.drafted, found.accepted, found.per_position), (4, 8, 4, None)
        )

    def test_sglang_tells_the_same_in_both_of_its_places(self):
        block = answer_of(plain_body("sglang")).statistics["sglext"]["spec_tokens_details"]
        self.assertEqual(
            ms.acceptance_of_answer({"sglext": {"spec_tokens_details": block}}),
            ms.acceptance_of_answer({"meta_info": block}),
        )

    def test_sglang_histogram_of_a_published_run_gives_its_positions(self):
        """11, 14, 11, 4, 0, 3 steps with 0 to 5 accepted: 43 steps, 63 accepted."""
        found = ms.acceptance_of_answer(
            {
                "sglext": {
                    "spec_tokens_details": {
                        "spec_verify_ct": 43,
                        "spec_num_correct_drafts": 63,
                        "spec_num_proposed_drafts": 215,
                        "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
                    }
                }
            }
        )
        self.assertEqual(
            (found.steps, found.accepted, found.per_position), (43, 63, (32, 18, 7, 3, 3))
        )
        self.assertEqual(sum(found.per_position), 63)
        self.assertAlmostEqual(
            ms.acceptance_record(of_answers(found, None, 1))["mean_length"], 1 + 63 / 43
        )

    def test_usage_fields_that_are_zero_tell_nothing(self):
        self.assertIsNone(
            ms.acceptance_of_answer(
                {
                    "usage_details": {
                        "accepted_prediction_tokens": 0,
                        "rejected_prediction_tokens": 0,
                    }
                }
            )
        )

    def test_koboldcpp_rounds_are_never_counted_as_drafted_tokens(self):
        told = ms.acceptance_record(
            of_answers(
                ms.acceptance_of_answer(
                    {"perf": {"last_draft_success": 18, "last_draft_failed": 6}}
                ),
                30,
                1,
            )
        )
        self.assertEqual((told["drafted"], told["rate"]), (None, None))

    def test_lm_studio_ignored_drafts_were_never_verified(self):
        self.assertEqual(
            ms.acceptance_of_answer(answer_of(plain_body("lm-studio")).statistics).drafted, 36
        )

    def test_older_metric_names_are_read(self):
        for drafted, accepted, more, steps in (
            (
                "draft_tokens_total",
                "draft_tokens_accepted_total",
                "llamacpp:draft_verify_steps_total",
                10,
            ),
            ("spec_tokens_drafted_total", "spec_tokens_accepted_total", None, None),
            (
                "spec_decode_num_draft_tokens",
                "spec_decode_num_accepted_tokens",
                "llamacpp:spec_decode_num_drafts",
                10,
            ),
        ):
            with self.subTest(drafted):

                def page(times, drafted=drafted, accepted=accepted, more=more):
                    values = {"llamacpp:" + drafted: 30 * times, "llamacpp:" + accepted: 12 * times}
                    values.update({more: 10 * times} if more else {})
                    return ms.snapshot_of(
                        "".join(
                            "# TYPE %s counter\n%s %d\n" % (n, n, v) for n, v in values.items()
                        ),
                        email.message.Message(),
                        "m",
                    )

                found = ms.acceptance_of_counters(ms.counter_growth(page(1), page(2)), 1)
                self.assertEqual((found.drafted, found.accepted, found.steps), (30, 12, steps))

    def test_renamed_llama_counters_of_a_gateway_are_read(self):
        def page(times):
            return ms.snapshot_of(
                "".join(
                    "# TYPE lemonade_llamacpp_spec_decode_num_%s_total counter\n"
                    'lemonade_llamacpp_spec_decode_num_%s_total{model="m"} %d\n' % (n, n, v * times)
                    for n, v in (("drafts", 10), ("draft_tokens", 30), ("accepted_tokens", 12))
                ),
                email.message.Message(),
                "m",
            )

        found = ms.acceptance_of_counters(ms.counter_growth(page(1), page(3)), 1)
        self.assertEqual((found.steps, found.drafted, found.accepted), (20, 60, 24))

    def test_two_families_of_tensorrt_are_never_added(self):
        growth = ms.counter_growth(
            snapshot("tensorrt-llm", "before"), snapshot("tensorrt-llm", "after")
        )
        self.assertEqual(ms.acceptance_of_counters(growth, 3).accepted, 60)
        only_positions = ms.Growth(
            tuple(s for s in growth.samples if ms.position_of(s) is not None)
        )
        found = ms.acceptance_of_counters(only_positions, 3)
        self.assertEqual((found.drafted, found.accepted), (120, 60))

    def test_tgi_summary_without_buckets_gives_sums_without_positions(self):
        growth = ms.counter_growth(snapshot("tgi", "before"), snapshot("tgi", "after"))
        found = ms.acceptance_of_counters(
            ms.Growth(tuple(s for s in growth.samples if s.label("le") is None)), 2
        )
        self.assertEqual((found.accepted, found.per_position), (20, None))

    def test_llama_positions_are_believed_over_its_rounded_sum(self):
        page = (
            "# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter\nllamacpp:spec_decode_num_accepted_tokens_total %s\n"
            "# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter\n"
            'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} %d\n'
            'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} %d\n'
        )
        growth = ms.counter_growth(
            *(
                ms.snapshot_of(page % values, email.message.Message(), "m")
                for values in (("1.23457e+06", 800000, 434567), ("1.23460e+06", 800015, 434575))
            )
        )
        self.assertEqual(
            (lambda a: (a.accepted, a.per_position))(ms.acceptance_of_counters(growth, 1)),
            (23, (15, 8)),
        )

    def test_answers_come_first_and_counters_fill_in_what_they_lack(self):
        answers = ms.Acceptance("timings", None, 36, 27)
        counters = ms.Acceptance("metrics", 13, 36, 27, (13, 9, 5))
        best, disagreement = ms.joined_acceptance(answers, counters)
        self.assertEqual(
            (best.source, best.steps, best.drafted, best.accepted, best.per_position, disagreement),
            ("timings+metrics", 13, 36, 27, (13, 9, 5), None),
        )

    def test_answers_are_believed_where_the_counters_disagree(self):
        answers = ms.Acceptance("timings", None, 360, 270)
        best, disagreement = ms.joined_acceptance(
            answers, ms.Acceptance("metrics", 200, 700, 400, (200, 150, 50))
        )
        self.assertEqual(best, answers)
        self.assertIn("360", disagreement)
        self.assertIn("700", disagreement)

    def test_sum_over_answers_knows_only_what_every_answer_told(self):
        parts = [
            ms.Acceptance("response", 4, 8, 4, (3, 1)),
            ms.Acceptance("response", None, 6, 3, (2, 1, 0)),
        ]
        total = ms.added_acceptance(parts)
        self.assertEqual(
            (total.steps, total.drafted, total.accepted, total.per_position),
            (None, 14, 7, (5, 2, 0)),
        )
        self.assertIsNone(ms.added_acceptance([]))

    def test_rate_above_one_is_not_clamped(self):
        told = ms.acceptance_record(
            of_answers(ms.Acceptance("metrics", 10, 20, 25, (14, 11)), 40, 1)
        )
        self.assertAlmostEqual(told["rate"], 1.25)

    def test_figures_are_finite_or_null_for_any_counts(self):
        values = (None, 0, 1, 7, 10**17)
        for steps in values:
            for drafted in values:
                for accepted in values:
                    for positions in (None, (0,), (7, 3), (10**17, 0)):
                        for tokens, answers in ((None, 1), (0, 0), (1, 1), (8, 1), (5, 9)):
                            record = ms.acceptance_record(
                                of_answers(
                                    ms.Acceptance("x", steps, drafted, accepted, positions),
                                    tokens,
                                    answers,
                                )
                            )
                            json.dumps(record, allow_nan=False)
                            if (
                                record["alpha"] is not None
                                and accepted is not None
                                and positions is None
                            ):
                                self.assertTrue(
                                    0 <= record["alpha"] <= 1,
                                    (steps, drafted, accepted, tokens, answers),
                                )


# What each engine tells through the whole program. "steps"... are compared with the truth of the fake server where they
# are named, and must be null where they are not.
ALL = {"steps", "drafted", "accepted", "per_position"}


TELLS = {
    "llama.cpp": ALL,
    "ik_llama.cpp": {"drafted", "accepted"},
    "mlx-vlm": {"steps", "drafted", "accepted"},
    "mlx-lm": None,
    "vllm": ALL,
    "vllm-old": {"steps", "drafted", "accepted"},
    "sglang": ALL,
    "tensorrt-llm": ALL,
    "lmdeploy": ALL,
    "tgi": {"steps", "accepted", "per_position"},
    "lm-studio": {"drafted", "accepted"},
    "tabbyapi": {"drafted", "accepted"},
    "koboldcpp": {"accepted"},
    "ollama": None,
    "plain": None,
}
COUNTERS_ALONE = {  # what is left without the fields in the answers
    "llama.cpp": ALL,
    "vllm": ALL,
    "vllm-old": {"steps", "drafted", "accepted"},
    "sglang": {"steps", "accepted"},
    "tensorrt-llm": {"drafted", "accepted"},
    "lmdeploy": ALL,
    "tgi": {"steps", "accepted", "per_position"},
    "ik_llama.cpp": None,
    "mlx-vlm": None,
    "lm-studio": None,
    "tabbyapi": None,
}


class EnginesThroughTheProgram(unittest.TestCase):
    """Every engine through the whole program, drafting against a plain one of the same kind."""

    def check(self, told, tells, truth):
        if tells is None:
            return self.assertIsNone(told)
        want = {"steps": truth.steps, "drafted": truth.drafted, "accepted": truth.accepted}
        for name, value in want.items():
            self.assertEqual(told[name], value if name in tells else None, name)
        if "per_position" in tells:
            self.assertEqual(
                [round(p, 12) for p in told["per_position"]],
                [round(p / truth.steps, 12) for p in truth.per_position],
            )
        else:
            self.assertIsNone(told["per_position"])
        rate = truth.rate if "drafted" in tells else None
        length = truth.mean_length if "steps" in tells else None
        per_target = (truth.tokens - truth.requests) / (
            truth.tokens - truth.requests - truth.accepted
        )
        for value, name in (
            (rate, "rate"),
            (length, "mean_length"),
            (per_target, "tokens_per_target_step"),
        ):
            self.assertEqual(told[name] is None, value is None, name)
            if value is not None:
                self.assertAlmostEqual(told[name], value, 12, name)

    def measured(self, engine, *flags, **options):
        with (
            FakeServer(engine, **dict(options, speculation=None)) as plain,
            FakeServer(
                engine, speculation=options.pop("speculation", PATTERN), **options
            ) as drafting,
        ):
            outcome = measure(plain, drafting, *flags, prompts=PROMPTS)
            self.assertEqual(outcome.code, 0, outcome.err)
            for line in outcome.files["labbook.md"].decode().splitlines():
                if line.startswith("{"):
                    json.loads(line, parse_constant=lambda name: self.fail(name + " in a record"))
            return outcome, sum_counts(drafting.given[1:])

    def test_every_engine_is_listed_here(self):
        self.assertEqual(set(ENGINES), set(TELLS))

    def test_streamed_answers_and_counters_give_the_truth(self):
        for engine, tells in TELLS.items():
            with self.subTest(engine):
                outcome, truth = self.measured(engine)
                self.check(outcome.endpoint("speculative")["acceptance"], tells, truth)
                self.check(outcome.comparison()["acceptance"], tells, truth)

    def test_plain_answers_give_the_same(self):
        for engine, tells in TELLS.items():
            with self.subTest(engine):
                outcome, truth = self.measured(engine, "--no-stream")
                self.check(outcome.endpoint("speculative")["acceptance"], tells, truth)

    def test_counters_alone_give_what_they_can(self):
        for engine, tells in COUNTERS_ALONE.items():
            with self.subTest(engine):
                outcome, truth = self.measured(engine, details=False)
                told = outcome.endpoint("speculative")["acceptance"]
                if (
                    engine == "tensorrt-llm" and told
                ):  # positions come without the number of steps to divide them by
                    self.assertIsNone(told["per_position"])
                self.check(told, tells, truth)

    def test_nothing_told_is_null_and_not_zero(self):
        for engine in TELLS:
            with self.subTest(engine):
                outcome, _ = self.measured(
                    engine,
                    details=False,
                    metrics=False,
                    **(
                        {"pages": {"/api/extra/perf": (404, "text/plain", b"")}}
                        if engine == "koboldcpp"
                        else {}
                    ),
                )
                record = outcome.endpoint("speculative")
                self.assertIsNone(record["acceptance"])
                self.assertIsNone(record["spec_metrics_delta"])
                self.assertEqual(outcome.comparison()["break_even"]["applies"], "no-acceptance")
                self.assertNotIn("not-drafting", findings(outcome.comparison()))

    def test_alpha_is_what_was_tested_and_never_accepted_over_drafted(self):
        """Pattern 4, 2, 0 of 4: tested are the accepted ones and one more in each step that ended in a rejection."""
        for engine, tells in TELLS.items():
            if not tells:
                continue
            with self.subTest(engine):
                outcome, truth = self.measured(engine, "--max-tokens", "30", words=29)
                told = outcome.endpoint("speculative")["acceptance"]
                exact = truth.accepted / (truth.accepted + truth.mismatched)
                if "per_position" in tells or engine == "koboldcpp":
                    self.assertAlmostEqual(
                        told["alpha"],
                        truth.accepted / (truth.accepted + truth.steps - truth.per_position[-1])
                        if "per_position" in tells
                        else exact,
                        12,
                    )
                elif told["alpha"] is not None:
                    self.assertAlmostEqual(told["alpha"], exact, 1)
                if told["rate"] is not None and told["alpha"] is not None:
                    self.assertGreater(told["alpha"], told["rate"] + 0.05)

    def test_servers_without_drafting_are_no_baseline_that_drafts(self):
        for engine in TELLS:
            with self.subTest(engine):
                outcome, _ = self.measured(engine)
                self.assertNotIn("baseline-drafting", findings(outcome.comparison()))

    def test_steps_without_a_draft_count_in_tokens_per_target_step_only(self):
        for engine in ("llama.cpp", "vllm", "vllm-old", "sglang", "lmdeploy", "tensorrt-llm"):
            with self.subTest(engine):
                outcome, truth = self.measured(
                    engine, speculation=Speculation(3, (3, None, 1, None, 0))
                )
                told = outcome.endpoint("speculative")["acceptance"]
                self.assertGreater(truth.plain_steps, 5)
                self.assertAlmostEqual(told["mean_length"], truth.mean_length)
                self.assertAlmostEqual(
                    told["tokens_per_target_step"],
                    (truth.tokens - 3) / (truth.steps + truth.plain_steps),
                )
                self.assertLess(told["tokens_per_target_step"], told["mean_length"])

    def test_acceptance_is_told_for_each_kind_of_work(self):
        for engine in ("llama.cpp", "vllm", "lmdeploy", "tgi", "vllm-old", "tabbyapi"):
            with self.subTest(engine):
                lengths = {"long a": 40, "long b": 41, "short a": 12, "short b": 14}
                answers = {
                    prompt: " ".join("w%d" % i for i in range(n)) for prompt, n in lengths.items()
                }
                lines = "".join(
                    json.dumps({"prompt": p, "workload": p.split()[0]}) + "\n" for p in lengths
                )
                with (
                    FakeServer(engine, answers=answers) as plain,
                    FakeServer(engine, answers=answers, speculation=PATTERN) as drafting,
                ):
                    outcome = measure(
                        plain,
                        drafting,
                        "--prompts",
                        "p.jsonl",
                        "--warmup",
                        "0",
                        files={"p.jsonl": lines},
                    )
                    truth = {
                        "long": sum_counts(drafting.given[:2]),
                        "short": sum_counts(drafting.given[2:]),
                    }
                for records in (
                    outcome.endpoint("speculative")["workloads"],
                    outcome.comparison()["workloads"],
                ):
                    self.assertEqual([part["workload"] for part in records], ["long", "short"])
                    for part in records:
                        self.check(part["acceptance"], TELLS[engine], truth[part["workload"]])

    def test_several_repeats_and_blocks_add_up(self):
        for engine in ("llama.cpp", "lmdeploy", "tgi", "sglang"):
            with self.subTest(engine):
                outcome, truth = self.measured(engine, "--repeats", "3")
                self.assertEqual(truth.requests, 9)
                self.check(outcome.endpoint("speculative")["acceptance"], TELLS[engine], truth)

    def test_source_names_where_the_figures_came_from(self):
        for engine, details, source in (
            ("llama.cpp", True, "timings+metrics"),
            ("llama.cpp", False, "metrics"),
            ("vllm", True, "response"),
            ("vllm", False, "metrics"),
            ("ik_llama.cpp", True, "timings"),
            ("tgi", True, "metrics"),
        ):
            with self.subTest(engine=engine, details=details):
                outcome, _ = self.measured(engine, details=details)
                self.assertEqual(outcome.endpoint("speculative")["acceptance"]["source"], source)

    def test_extra_request_fields_go_to_the_engine_that_knows_them_only(self):
        for engine in ENGINES:
            with self.subTest(engine), FakeServer(engine, speculation=PATTERN) as server:
                measure(None, server, prompts=PROMPTS[:1])
                self.assertEqual(
                    "return_spec_tokens_details" in server.chats[-1]["body"], engine == "sglang"
                )
                self.assertEqual(
                    "return_token_ids" in server.chats[-1]["body"], engine in ("vllm", "vllm-old")
                )

    def test_failed_request_leaves_the_answers_figures_right(self):
        for engine in ("llama.cpp", "vllm", "lm-studio"):
            with (
                self.subTest(engine),
                FakeServer(engine, speculation=PATTERN, faults=[None, "no-finish"]) as server,
            ):
                record = measure(None, server, prompts=PROMPTS).endpoint("speculative")
                truth = sum_counts(server.given[2:])
                self.assertEqual((record["failed"], record["completed"]), (1, 2))
                self.assertEqual(
                    (record["acceptance"]["drafted"], record["acceptance"]["accepted"]),
                    (truth.drafted, truth.accepted),
                )

    def test_answers_of_one_token_and_without_counts_leave_nulls(self):
        """That no record holds NaN or infinity is checked in every run of this class."""
        for engine in ENGINES:
            with self.subTest(engine):
                outcome, _ = self.measured(engine, words=1)
                self.assertIsNone((outcome.endpoint("speculative")["acceptance"] or {}).get("rate"))
                outcome, _ = self.measured(engine, usage=False)
                record = outcome.endpoint("speculative")
                self.assertEqual(
                    (
                        record["output_tokens"],
                        record["output_tokens_per_s"],
                        record["tokens_counted_by_server"],
                    ),
                    (None, None, False),
                )
                self.assertIsNone((record["acceptance"] or {}).get("tokens_per_target_step"))


class RealRuns(unittest.TestCase):
    """Figures of real runs, through the whole program."""

    def test_case_a05_alpha_is_089_where_accepted_over_drafted_is_072(self):
        outcome = replayed(case_json("A05", "spec.json"), case_json("A05", "baseline.json"))
        told, why = (
            outcome.endpoint("speculative")["acceptance"],
            outcome.comparison()["break_even"],
        )
        self.assertAlmostEqual(told["tokens_per_target_step"], 4.6027, 4)
        self.assertAlmostEqual(told["alpha"], 0.8927, 4)
        self.assertAlmostEqual(told["rate"], 0.72055, 5)
        self.assertEqual(why["chain"], 5)
        self.assertAlmostEqual(outcome.endpoint("baseline")["decode_tokens_per_s"], 32.49, 2)
        self.assertAlmostEqual(outcome.endpoint("speculative")["decode_tokens_per_s"], 55.473, 2)
        self.assertAlmostEqual(outcome.comparison()["decode_speedup"]["ratio"], 55.473 / 32.49, 3)
        self.assertAlmostEqual(why["step_cost"], 4.6027 / (55.473 / 32.49), 3)
        self.assertRegex(outcome.out, r"(?m)^prompts +0\.72 +0\.89 ")
        self.assertIn("another figure", outcome.out)

    def test_case_a11_steps_without_a_draft_are_steps_too(self):
        outcome = replayed(case_json("A11", "spec.json"))
        told = outcome.endpoint("speculative")["acceptance"]
        self.assertAlmostEqual(told["tokens_per_target_step"], 2.5637, 4)
        self.assertAlmostEqual(told["rate"], 0.6366, 4)
        self.assertEqual(
            tuple(told[name] for name in ("drafted", "accepted", "steps", "mean_length", "alpha")),
            (1717, 1093, None, None, None),
        )
        self.assertEqual([r for r in outcome.records if r["kind"] == "comparison"], [])

    def test_case_a17_chunks_are_not_tokens(self):
        with ReplayServer("routes.json", CASES / "A17") as server:
            record = measure(
                None, server, "--model", "m", "--warmup", "0", prompts=["one"]
            ).endpoint("speculative")
        self.assertEqual(record["output_tokens"], 12)
        self.assertAlmostEqual(record["decode_tokens_per_s"], 48.0)
        self.assertAlmostEqual(record["acceptance"]["rate"], 0.6)
        self.assertAlmostEqual(record["acceptance"]["tokens_per_target_step"], 5.5)

    def test_case_c05_older_build_tells_by_its_timings(self):
        told = replayed(case_json("C05", "chat.json")).endpoint("speculative")["acceptance"]
        self.assertAlmostEqual(told["rate"], 0.64479, 5)
        self.assertAlmostEqual(told["tokens_per_target_step"], 2.8977, 4)
        self.assertEqual((told["steps"], told["mean_length"]), (None, None))

    def test_case_c16_each_shape_of_timings_is_read(self):
        for name, rate, steps, mean_length, tokens, accepted, speed in (
            ("llama.json", 65 / 347, None, None, 200, 65, 18.05),
            ("mlx_vlm.json", 0.9, 30, 3.7, 111, 81, 111 / 1.5),
            ("tabby.http", 40 / 48, None, None, 50, 40, 50 / 1.2),
        ):
            with self.subTest(name):
                data = (CASES / "C16" / name).read_bytes()
                record = replayed(data if name.endswith(".http") else json.loads(data)).endpoint(
                    "speculative"
                )
                told = record["acceptance"]
                self.assertAlmostEqual(told["rate"], rate)
                self.assertEqual(told["steps"], steps)
                self.assertEqual(told["mean_length"] and round(told["mean_length"], 9), mean_length)
                self.assertAlmostEqual(
                    told["tokens_per_target_step"],
                    (tokens - 1) / max(tokens - 1 - accepted, steps or 0),
                )
                self.assertAlmostEqual(record["decode_tokens_per_s"], speed, 2)

    def test_case_c16_one_token_has_no_speed_and_no_acceptance(self):
        record = replayed(case_json("C16", "mlx_lm_one_token.json")).endpoint("speculative")
        self.assertEqual(
            (record["decode_tokens_per_s"], record["acceptance"], record["output_tokens"]),
            (None, None, 1),
        )

    def test_case_c12_drafting_in_vain_is_not_the_same_as_not_drafting(self):
        for engine in (
            "llama.cpp",
            "vllm",
            "lmdeploy",
            "vllm-old",
            "tensorrt-llm",
            "tgi",
            "sglang",
        ):
            with (
                self.subTest(engine),
                FakeServer(engine) as plain,
                FakeServer(engine, speculation=Speculation(3, (0,))) as drafting,
            ):
                outcome = measure(plain, drafting, prompts=PROMPTS)
                told = outcome.endpoint("speculative")["acceptance"]
                self.assertEqual((told["accepted"], told["tokens_per_target_step"]), (0, 1.0))
                self.assertIn(told["rate"], (0.0,) if engine != "tgi" else (None,))
                self.assertEqual(told["alpha"], 0.0)
                self.assertNotIn("not-drafting", findings(outcome.comparison()))
                self.assertIsNotNone(outcome.comparison()["verdict"])

    def test_drafts_accepted_beyond_the_end_leave_the_counted_steps(self):
        """They are counted and not emitted: N - R - A may come out at zero or below."""
        told = ms.acceptance_record(
            of_answers(ms.Acceptance("metrics", 3, 12, 12, (3, 3, 3, 3)), 10, 1)
        )
        self.assertEqual(told["tokens_per_target_step"], 3.0)
        self.assertEqual((told["mean_length"], told["alpha"]), (5.0, 1.0))

    def test_more_tokens_a_step_than_a_whole_draft_and_one_are_never_told(self):
        for steps, accepted, positions, tokens in (
            (None, 42, (8, 8, 8, 8, 8, 2), 49),  # 6 steps of 8 tokens from drafts of 6
            (None, 42, None, 43),  # no step left
            (9, 0, (0,), 8),  # fewer tokens than steps
        ):
            with self.subTest(tokens=tokens):
                found = ms.Acceptance("metrics", steps, 56, accepted, positions)
                record = ms.acceptance_record(of_answers(found, tokens, 1))
                self.assertIsNone(record["tokens_per_target_step"])

    def test_a_chain_is_not_fixed_where_one_answer_contradicts_it(self):
        """Drafts in one answer of twelve: 20 steps with a draft of one each, 220 without any."""
        for drafted in ([20] + [0] * 11, [40, 0], [60, 20, 20]):
            each = tuple(
                ms.Acceptance("timings", None, n, n // 2, tokens=21 + n // 2, answers=1)
                for n in drafted
            )
            whole = ms.added_acceptance(each)
            whole = of_answers(whole, sum(a.tokens for a in each), len(each))
            told = dataclasses.replace(whole, each=each)
            self.assertIsNone(ms.fixed_chain(told), drafted)
            self.assertIsNone(ms.acceptance_record(told)["alpha"], drafted)
        even = tuple([each[1]] * 3)
        told = of_answers(ms.added_acceptance(even), 3 * even[0].tokens, 3)
        self.assertEqual(ms.fixed_chain(dataclasses.replace(told, each=even)), 1)

    def test_an_answer_without_drafts_beside_answers_with_many_leaves_no_chain(self):
        def answers(prompt, n):
            server.speculation = Speculation(1, (1, 0)) if prompt == PROMPTS[0] else None
            return None

        with FakeServer("ik_llama.cpp", answers=answers, speculation=PATTERN) as server:
            record = measure(None, server, "--warmup", "0", prompts=PROMPTS)
        self.assertIsNone(record.endpoint("speculative")["acceptance"]["alpha"])

    def test_case_f05_target_steps_are_never_fewer_than_the_counted_ones(self):
        for steps, drafted, accepted, tokens, right in (
            (96, 672, 504, 588, 576 / 96),
            (108, 540, 444, 528, 516 / 108),
        ):
            found = ms.Acceptance("response", steps, drafted, accepted)
            record = ms.acceptance_record(of_answers(found, tokens, 12))
            self.assertAlmostEqual(record["tokens_per_target_step"], right)
            self.assertEqual((record["drafted"], record["accepted"]), (drafted, accepted))


class AcceptanceInReports(unittest.TestCase):
    def measured(self, *workloads, **options):
        lines = "".join(
            json.dumps({"prompt": "%s %d" % (name, i), "workload": name}) + "\n"
            for name in workloads
            for i in range(2)
        )
        with (
            FakeServer("llama.cpp", **options) as plain,
            FakeServer("llama.cpp", speculation=PATTERN, **options) as drafting,
        ):
            return measure(plain, drafting, "--prompts", "p.jsonl", files={"p.jsonl": lines})

    def test_positions_are_bars_with_conditional_rates(self):
        text = "\n".join(ms.position_lines([("copy", [0.8, 0.6, 0.3, 0.012, 0.008, 0.004])]))
        for row in ("1 +0.80 +0.80 #{8}", "2 +0.60 +0.75 #{6}", "3 +0.30 +0.50 #{3}"):
            self.assertRegex(text, r"(?m)^%s *$" % row)
        self.assertIn("copy: position 4 onward adds 0.02 tokens per step.", text)
        text.encode("ascii")

    def test_positions_that_all_matter_are_not_complained_about(self):
        self.assertNotIn("onward", "\n".join(ms.position_lines([("copy", [0.8, 0.6, 0.3])])))

    def test_each_kind_of_work_has_its_rate_alpha_and_both_lengths(self):
        answers = {
            "%s %d" % (name, i): " ".join("w%d" % n for n in range(words))
            for name, words in (("copy", 40), ("open", 13))
            for i in range(2)
        }
        outcome = self.measured("copy", "open", answers=answers)
        parts = outcome.comparison()["workloads"]
        self.assertNotEqual(*(part["acceptance"]["rate"] for part in parts))
        for part in parts + [{"workload": "all", "acceptance": outcome.comparison()["acceptance"]}]:
            told = part["acceptance"]
            self.assertRegex(
                outcome.out,
                r"(?m)^%s +%.2f +%.2f +%.2f +%.2f +%d *$"
                % (
                    part["workload"],
                    told["rate"],
                    told["alpha"],
                    told["mean_length"],
                    told["tokens_per_target_step"],
                    told["steps"],
                ),
            )
            self.assertRegex(
                outcome.out, r"\b%.2f %.2f #" % (told["per_position"][0], told["per_position"][0])
            )

    def test_engine_that_tells_nothing_has_no_table_of_drafts(self):
        with FakeServer("plain") as a, FakeServer("plain", speculation=PATTERN) as b:
            out = measure(a, b, prompts=PROMPTS).out
        self.assertNotIn("draft position", out)
        self.assertNotIn("alpha", out)

    def test_table_of_many_kinds_of_work_stays_within_100_columns(self):
        out = self.measured(*("kind-of-work-number-%d" % i for i in range(6))).out
        self.assertLessEqual(
            max(map(len, out[out.index("Drafts") : out.index("Why, as to decoding")].splitlines())),
            100,
        )


class OddCounters(unittest.TestCase):
    def test_a_histogram_of_50000_entries_costs_no_time_and_no_sums(self):
        long = [1] * 50_000
        for statistics in (
            {
                "metrics": {
                    "speculative_decoding": {
                        "num_spec_steps": 30,
                        "num_draft_tokens": 60,
                        "num_accepted_draft_tokens": 48,
                        "acceptance_histogram": long,
                    }
                }
            },
            {
                "sglext": {
                    "spec_tokens_details": {
                        "spec_verify_ct": 30,
                        "spec_num_proposed_drafts": 60,
                        "spec_num_correct_drafts": 48,
                        "spec_correct_drafts_histogram": long,
                    }
                }
            },
            {
                "choice": {
                    "num_spec_steps": 30,
                    "total_draft_tokens": 60,
                    "total_accepted_draft_tokens": 48,
                    "acceptance_histogram": long,
                }
            },
        ):
            with self.subTest(list(statistics)):
                started = time.process_time()
                found = ms.acceptance_of_answer(statistics)
                self.assertLess(time.process_time() - started, 0.5)
                self.assertEqual((found.steps, found.drafted, found.accepted), (30, 60, 48))

    def test_a_draft_position_that_is_no_small_number_is_no_position(self):
        """Series with odd labels beside good ones: the run goes on, and the good ones count."""
        stem = "vllm:spec_decode_num_"
        odd = ("\u00b2", "\u0663", "9" * 5000, "-1", "", "1.5", "0x1", " 1", "None", "1e3")

        def page(server):
            n = len(server.chats)
            lines = [
                "# TYPE %s%s counter" % (stem, name)
                for name in (
                    "drafts_total",
                    "draft_tokens_total",
                    "accepted_tokens_total",
                    "accepted_tokens_per_pos_total",
                )
            ]
            lines += [
                "# TYPE vllm:generation_tokens_total counter",
                "vllm:generation_tokens_total %d" % (100 * n),
            ]
            lines += [
                "%s%s_total %d" % (stem, name, n * count)
                for name, count in (("drafts", 30), ("draft_tokens", 60), ("accepted_tokens", 33))
            ]
            lines += [
                '%saccepted_tokens_per_pos_total{position="%s"} %d' % (stem, position, n * count)
                for position, count in (("0", 22), ("1", 11), *((each, 7) for each in odd))
            ]
            return "\n".join(lines) + "\n"

        with FakeServer("plain", words=100) as server:
            server.pages["/metrics"] = lambda: page(server)
            outcome = measure(None, server, "--warmup", "0", "--max-tokens", "200", prompts=["one"])
        self.assertEqual(outcome.code, 0, outcome.err)
        told = outcome.endpoint("speculative")["acceptance"]
        self.assertEqual((told["steps"], told["drafted"], told["accepted"]), (30, 60, 33))
        self.assertEqual([round(30 * rate) for rate in told["per_position"]], [22, 11])

    def test_alpha_is_null_where_drafts_vary_in_length_whatever_the_positions_say(self):
        """C03's fan-out page: 48 of 60 in 30 drafts of up to 3. At most 12 steps ended in a rejection, so 48/63 is impossible."""
        pages = [
            ms.snapshot_of((CASES / "C03" / name).read_text("utf-8"), {}, "a")
            for name in ("fan_before.txt", "fan_after.txt")
        ]
        found = ms.acceptance_of_counters(ms.counter_growth(*pages), 1)
        self.assertEqual(
            (found.accepted, found.drafted, found.steps, found.per_position),
            (48, 60, 30, (22, 15, 11)),
        )
        record = ms.acceptance_record(of_answers(found, 100, 1))
        self.assertIsNone(record["alpha"])
        self.assertAlmostEqual(record["rate"], 0.8)

    def test_alpha_stays_known_where_every_draft_had_the_same_length(self):
        """30 drafts of 2, accepted 2, 1 or 0: 15 steps accepted both, so 33 accepted and 15 rejected tests: 33/48."""
        record = ms.acceptance_record(
            of_answers(ms.Acceptance("metrics", 30, 60, 33, (18, 15)), 100, 1)
        )
        self.assertAlmostEqual(record["alpha"], 33 / 48)


if __name__ == "__main__":
    unittest.main()
