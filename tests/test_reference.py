"""The reference engine, whose truth is known, and `calibrate`, which measures it to prove the instrument."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from unittest import mock

import measure_speculative
import measure_speculative as ms
from measure_speculative import (
    Reference,
    Served,
    other_spelling,
    reference_server,
    reference_truth,
)
from tests.support import PROGRAM, run_main

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
FAST = dict(step_s=0.0005, prefill_s=0.001)
PLAIN = Reference(**FAST)
DRAFTING = Reference(chain=3, **FAST)
PROMPTS = ["Name a river", "Who keeps the lighthouse?", "Count to ten"]


def get(api, path):
    with OPENER.open(api[: -len("/v1")] + path, timeout=5) as response:
        return response.read().decode()


def ask(api, prompt, **more):
    """The answer as JSON, or all events of it where it is streamed."""
    body = dict(
        {"model": "reference", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12},
        **more,
    )
    with OPENER.open(
        urllib.request.Request(api + "/chat/completions", json.dumps(body).encode()), timeout=5
    ) as response:
        text = response.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    events = [part[len("data: ") :] for part in text.split("\n\n") if part]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def loop_by_hand(config, prompt, length):
    """[(drafted, accepted, tokens)] of greedy speculative decoding, the slow way: from the two models alone."""
    target = [config.target_token(prompt, n) for n in range(length)]
    draft = [config.draft_token(prompt, n) for n in range(length)]
    steps, n = [], 1
    while n < length:
        drafted = min(config.chain, length - n - 1)
        accepted = [a == b for a, b in zip(target[n : n + drafted], draft[n : n + drafted])]
        accepted = (accepted + [False]).index(False)
        steps.append((drafted, accepted, target[n : n + accepted + 1]))
        n += accepted + 1
    return steps


def measure_pair(baseline, candidate, *flags, prompts=PROMPTS, tokens=12):
    """The outcome of measuring two Reference configurations."""
    with reference_server(baseline) as one, reference_server(candidate) as other:
        return run_main(
            "--baseline-url",
            one,
            "--speculative-url",
            other,
            "--max-tokens",
            tokens,
            *flags,
            prompts=prompts,
        )


class ReferenceModel(unittest.TestCase):
    def test_loop_is_greedy_and_loses_nothing(self):
        for alpha in (0.0, 0.3, 0.8, 1.0):
            for chain in (0, 1, 2, 4, 9):
                for length in (1, 2, 3, 7, 64):
                    config = Reference(alpha=alpha, chain=chain, seed=7)
                    with self.subTest(alpha=alpha, chain=chain, length=length):
                        steps = [
                            (drafted, accepted, tokens)
                            for tokens, drafted, accepted in config.steps("p", length)
                        ]
                        self.assertEqual(steps, loop_by_hand(config, "p", length))
                        text = [token for _, _, tokens in steps for token in tokens]
                        self.assertEqual(
                            text, [config.target_token("p", n) for n in range(1, length)]
                        )

    def test_text_depends_on_prompt_and_seed_alone(self):
        def text(prompt="p", **changes):
            return [Reference(**changes).target_token(prompt, n) for n in range(40)]

        self.assertEqual(text(), text(alpha=0.1, chain=5, draft_cost=1.0, step_s=1.0))
        self.assertNotEqual(text(), text("q"))
        self.assertNotEqual(text(), text(seed=1))

    def test_drafts_agree_as_often_as_alpha_says_at_every_position(self):
        for alpha in (0.5, 0.8, 0.95):
            config = Reference(alpha=alpha, chain=4)
            tested, passed = collections.Counter(), collections.Counter()
            for prompt in range(40):
                for _, drafted, accepted in config.steps(prompt, 300):
                    if drafted == 4:  # the drafts at the end of an answer are cut
                        tested.update(range(min(accepted + 1, 4)))
                        passed.update(range(accepted))
            for position in range(4):
                with self.subTest(alpha=alpha, position=position):
                    error = math.sqrt(alpha * (1 - alpha) / tested[position])
                    self.assertAlmostEqual(
                        passed[position] / tested[position], alpha, delta=4 * error
                    )

    def test_a_wrong_draft_has_the_same_length_and_another_last_byte(self):
        self.assertEqual(len(set(measure_speculative._WORDS)), 64)
        for word in (*measure_speculative._WORDS, "x", " lax", "y"):
            other = other_spelling(word)
            self.assertEqual((word[:-1], len(word)), (other[:-1], len(other)))
            self.assertNotEqual(word, other)
        self.assertFalse(
            set(map(other_spelling, measure_speculative._WORDS)) & set(measure_speculative._WORDS)
        )


class ReferenceServers(unittest.TestCase):
    def test_truth_and_counters_are_exactly_what_the_two_models_give(self):
        config = Reference(alpha=0.7, chain=3, draft_cost=0.25, **FAST)
        lengths = dict(zip(PROMPTS, (24, 9, 1)))
        with reference_server(config) as api:
            for prompt, length in lengths.items():
                ask(api, prompt, max_tokens=length, stream=True)
            log, page = json.loads(get(api, "/truth")), get(api, "/metrics")
        for entry, (prompt, length) in zip(log, lengths.items()):
            steps = loop_by_hand(config, prompt, length)
            self.assertEqual((entry["prompt"], entry["tokens"]), (prompt, length))
            self.assertEqual(entry["steps"], sum(d > 0 for d, _, _ in steps))
            self.assertEqual(entry["plain_steps"], sum(d == 0 for d, _, _ in steps))
            self.assertEqual(
                (entry["drafted"], entry["accepted"]),
                (sum(d for d, _, _ in steps), sum(a for _, a, _ in steps)),
            )
            self.assertEqual(
                entry["positions"], [sum(a > i for _, a, _ in steps) for i in range(3)]
            )
            self.assertEqual(entry["rejected"], sum(a < d for d, a, _ in steps))
            self.assertAlmostEqual(
                entry["decode_s"], sum(0.0005 * (1 + 0.25 * d) for d, _, _ in steps), 9
            )
            self.assertEqual(entry["prefill_s"], 0.001)
        shown = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        every = [
            step
            for prompt, length in lengths.items()
            for step in loop_by_hand(config, prompt, length)
        ]
        name = "vllm:spec_decode_num_"
        self.assertEqual(int(shown["vllm:generation_tokens_total"]), 34)
        self.assertEqual(int(shown[name + "drafts_total"]), sum(d > 0 for d, _, _ in every))
        self.assertEqual(int(shown[name + "draft_tokens_total"]), sum(d for d, _, _ in every))
        self.assertEqual(int(shown[name + "accepted_tokens_total"]), sum(a for _, a, _ in every))
        for i in range(3):
            series = name + 'accepted_tokens_per_pos_total{position="%d"}' % i
            self.assertEqual(int(shown[series]), sum(a > i for _, a, _ in every))

    def test_truth_adds_up_by_definition(self):
        entry = {
            "prompt": "p",
            "tokens": 11,
            "steps": 3,
            "plain_steps": 1,
            "drafted": 9,
            "accepted": 6,
            "rejected": 2,
            "positions": [3, 2, 1],
            "prefill_s": 0.5,
            "decode_s": 2.0,
        }
        other = dict(entry, prompt="q", prefill_s=1.5, decode_s=3.0)
        truth = reference_truth([Served(**entry), Served(**other)])
        # 22 tokens, 2 of them from the prompt pass, in 2 s of prompt and 5 s of decode, and 8 target steps
        for name, value in (
            ("tokens_per_s", 22 / 7),
            ("decode_tokens_per_s", 4.0),
            ("tokens_per_step", 2.5),
            ("step_s", 0.625),
            ("ttft_s", 1.0),
            ("steps", 6),
            ("rejected", 4),
            ("positions", (6, 4, 2)),
            ("request_s", {"p": 2.5, "q": 4.5}),
        ):
            self.assertEqual(getattr(truth, name), value, name)

    def test_streamed_and_plain_answers_carry_the_same_text_and_counts(self):
        for config in (PLAIN, DRAFTING):
            with self.subTest(chain=config.chain), reference_server(config) as api:
                plain, events = ask(api, "p"), ask(api, "p", stream=True)
            text = "".join(config.target_token("p", n) for n in range(12))
            choices = [choice for event in events for choice in event["choices"]]
            self.assertEqual(plain["choices"][0]["message"]["content"], text)
            self.assertEqual("".join(choice["delta"]["content"] for choice in choices), text)
            sizes = [1] + [len(tokens) for _, _, tokens in loop_by_hand(config, "p", 12)]
            self.assertEqual([len(choice["token_ids"]) for choice in choices], sizes)
            self.assertEqual(
                [part["usage"]["completion_tokens"] for part in (plain, events[-1])], [12, 12]
            )
            ends = [choice["finish_reason"] for choice in choices]
            self.assertEqual(ends, [None] * (len(ends) - 1) + ["length"])

    def test_tokens_never_come_before_their_modelled_time(self):
        with reference_server(
            Reference(chain=2, draft_cost=0.5, step_s=0.002, prefill_s=0.01)
        ) as api:
            started = time.perf_counter()
            ask(api, "p", max_tokens=100)
            took = time.perf_counter() - started
            (entry,) = json.loads(get(api, "/truth"))
        self.assertGreaterEqual(took, entry["prefill_s"] + entry["decode_s"])

    def test_beyond_its_capacity_a_step_takes_longer_in_proportion_to_the_tokens_in_it(self):
        def step_s(config, at_once):
            with reference_server(config) as api:
                threads = [
                    threading.Thread(target=ask, args=(api, "p"), kwargs={"max_tokens": 30})
                    for _ in range(at_once)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                return max(
                    entry["decode_s"] / (entry["steps"] + entry["plain_steps"])
                    for entry in json.loads(get(api, "/truth"))
                )

        full = Reference(
            alpha=1.0, chain=1, draft_cost=0.0, capacity=4.0, step_s=0.004, prefill_s=0.1
        )
        self.assertAlmostEqual(step_s(full, 2), 0.004, 9)  # 2 x 2 tokens fill it
        self.assertAlmostEqual(
            step_s(full, 6), 0.004 * 6 * 2 / 4, delta=0.002
        )  # 12 tokens, and one of 1 at the end

    def test_the_model_is_listed_and_anything_else_is_not_found(self):
        with reference_server(PLAIN) as api:
            self.assertEqual(
                [model["id"] for model in json.loads(get(api, "/v1/models"))["data"]], ["reference"]
            )
            with self.assertRaises(urllib.error.HTTPError) as caught:
                get(api, "/elsewhere")
            caught.exception.close()
            self.assertEqual(caught.exception.code, 404)

    def test_the_command_that_is_not_for_users_says_so(self):
        for words in ((), ("x",), ("{}",), ("[]",)):
            outcome = run_main("reference-server", *words)
            self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1), outcome.err)


class ReferenceTexts(unittest.TestCase):
    def test_an_honest_pair_is_identical(self):
        texts = measure_pair(PLAIN, DRAFTING, "--repeats", 2).comparison()["text_comparison"]
        self.assertEqual(
            tuple(texts[key] for key in ("compared", "identical", "divergent", "unstable")),
            (6, 6, 0, 0),
        )

    def test_planted_byte_is_found_at_its_offset_and_its_gap_decides_what_it_is(self):
        for gap, finding in ((0.1, "near-tie"), (3.0, "clear-preference")):
            with self.subTest(gap=gap):
                plain = dataclasses.replace(PLAIN, planted_gap_nats=gap)
                drafting = dataclasses.replace(DRAFTING, planted=("lighthouse", 5))
                texts = measure_pair(plain, drafting).comparison()["text_comparison"]
                before = "".join(PLAIN.target_token(PROMPTS[1], n) for n in range(6))
                self.assertEqual(
                    (texts["compared"], texts["identical"], texts["divergent"]), (3, 2, 1)
                )
                (found,) = texts["divergences"]
                self.assertEqual(
                    (found["prompt_index"], found["class"], found["where"]),
                    (1, "different", "content"),
                )
                self.assertEqual(found["first_difference_at_byte"], len(before.encode()) - 1)
                self.assertTrue(
                    found["baseline_tail"].startswith(before[-1]), found["baseline_tail"]
                )
                self.assertTrue(
                    found["speculative_tail"].startswith("x"), found["speculative_tail"]
                )
                self.assertEqual(found["triage"]["finding"], finding)
                self.assertAlmostEqual(found["triage"]["gap_nats"], gap, 6)
                spelled = PLAIN.target_token(PROMPTS[1], 5)
                self.assertEqual(
                    [found["triage"][key] for key in ("baseline_token", "speculative_token")],
                    [spelled, other_spelling(spelled)],
                )

    def test_servers_that_flip_at_random_are_unstable_and_speculation_is_not_blamed(self):
        flip = 0.5
        outcome = measure_pair(
            dataclasses.replace(PLAIN, flip=flip),
            dataclasses.replace(DRAFTING, flip=flip),
            "--repeats",
            2,
            "--fail-on",
            "changed-text",
            tokens=40,
        )
        texts = outcome.comparison()["text_comparison"]
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertEqual((texts["compared"], texts["divergent"], texts["unstable"]), (6, 6, 6))
        self.assertEqual({found["class"] for found in texts["divergences"]}, {"unstable-baseline"})
        self.assertEqual([found["triage"] for found in texts["divergences"]], [None] * 6)
        for who in ("baseline_self", "speculative_self"):
            self.assertEqual((texts[who]["compared"], texts[who]["identical"]), (3, 0))

    def test_a_stable_baseline_lays_the_difference_at_the_door_of_the_server_that_flips(self):
        outcome = measure_pair(
            PLAIN,
            dataclasses.replace(DRAFTING, flip=0.5),
            "--repeats",
            2,
            "--fail-on",
            "changed-text",
            tokens=40,
        )
        texts = outcome.comparison()["text_comparison"]
        self.assertEqual(outcome.code, 3)
        self.assertEqual((texts["divergent"], texts["unstable"]), (6, 0))
        self.assertEqual(
            (texts["baseline_self"]["compared"], texts["baseline_self"]["identical"]), (3, 3)
        )
        self.assertEqual(
            (texts["speculative_self"]["compared"], texts["speculative_self"]["identical"]), (3, 0)
        )


class CalibrationInProcess(unittest.TestCase):
    """In process, with answers of 16 tokens and fast servers: only what is said of the numbers counts here, not how good they are."""

    def calibrate(self, *flags, share=1.0, rows=list):
        """The outcome; `rows(rows)` may change the rows before they are judged."""
        judge = measure_speculative.calibration_rows

        def fast(alpha, chain, draft_cost, step_s):
            self.assertEqual(step_s, 0.1)
            return Reference(alpha, chain, draft_cost, **FAST)

        with mock.patch.multiple(
            measure_speculative,
            calibration_rows=lambda *args: rows(judge(*args)),
            Reference=fast,
            cpu_share=lambda *args: share,
        ):
            return run_main("calibrate", "--step-ms", "100", *flags)

    @staticmethod
    def all_well(rows):
        return [
            dataclasses.replace(row, within=True, error=None if row.error is None else 0.25)
            for row in rows
        ]

    def test_in_tolerance_it_says_how_good_ratios_are_and_writes_nothing(self):
        outcome = self.calibrate(rows=self.all_well)
        self.assertEqual((outcome.code, outcome.err, outcome.files), (0, "", {}))
        lines = outcome.out.splitlines()
        self.assertEqual(lines[0].split(), ["Quantity", "True", "Measured", "Error"])
        self.assertRegex(lines[-1], r"^On this machine, now, ratios are good to 0\.[23]%\.$")
        for quantity in (
            "baseline tokens/s",
            "speculative tokens/s",
            "ratio",
            "acceptance rate",
            "alpha",
            "accepted per position",
            "tokens per step",
            "step cost",
            "draft cost",
            "time to first token",
            "client time per request",
            "client time per token",
            "planted difference",
        ):
            self.assertIn(quantity, outcome.out)
        self.assertLessEqual(max(map(len, lines)), 100)

    def test_out_of_tolerance_names_the_quantity_and_the_likely_cause(self):
        outcome = self.calibrate(
            rows=lambda rows: [
                dataclasses.replace(row, within=row.quantity != "ratio") for row in rows
            ]
        )
        self.assertEqual(outcome.code, 1)
        self.assertRegex(outcome.err, r"^OUT OF TOLERANCE: ratio; .*busy")
        self.assertNotIn("good to", outcome.out)
        (line,) = [line for line in outcome.out.splitlines() if line.startswith("ratio ")]
        self.assertTrue(line.endswith("!"), line)

    def test_a_busy_machine_is_not_fit_however_good_the_numbers_look(self):
        outcome = self.calibrate("--json", rows=self.all_well, share=0.6)
        self.assertEqual(outcome.code, 1)
        self.assertRegex(outcome.err, r"^NOT FIT: .*60%.*idle")
        self.assertEqual(json.loads(outcome.out)["fit"], False)
        self.assertEqual(json.loads(outcome.out)["cpu_share"], 0.6)

    def test_json_holds_every_quantity_with_its_true_value_and_error(self):
        outcome = self.calibrate("--json", "--chain", "2", "--draft-cost", "0.3", "--alpha", "0.6")
        told = json.loads(outcome.out)
        rows = {row["quantity"]: row for row in told["quantities"]}
        config = Reference(alpha=0.6, chain=2)
        steps = [
            step
            for prompt in measure_speculative.built_in_prompts()
            for step in loop_by_hand(config, prompt.messages[-1]["content"], 16)
        ]
        self.assertEqual(
            set(rows["ratio"]), {"quantity", "true", "measured", "error", "unit", "within"}
        )
        for quantity, true in (
            ("verification steps", sum(d > 0 for d, _, _ in steps)),
            ("tokens drafted", sum(d for d, _, _ in steps)),
            ("tokens accepted", sum(a for _, a, _ in steps)),
        ):
            self.assertEqual(
                tuple(rows[quantity][key] for key in ("true", "measured", "within")),
                (true, true, True),
                quantity,
            )
        self.assertEqual(rows["draft cost, target steps"]["true"], 0.3)
        self.assertEqual(told["fit"], all(row["within"] for row in rows.values()))
        self.assertEqual(outcome.code, 0 if told["fit"] else 1)

    def test_notebook_is_written_only_where_asked_and_the_records_say_simulated(self):
        outcome = self.calibrate("--labbook", "labbook.md", rows=self.all_well)
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertEqual(
            [record["kind"] for record in outcome.records], ["endpoint", "endpoint", "comparison"]
        )
        self.assertEqual([record["simulated"] for record in outcome.records], [True] * 3)
        self.assertEqual(
            [r["simulated"] for r in measure_pair(PLAIN, DRAFTING).records], [False] * 3
        )

    def test_notebook_that_cannot_be_written_is_refused_before_measuring(self):
        with mock.patch.object(
            measure_speculative, "reference_server", side_effect=AssertionError("measured")
        ):
            self.assertEqual(
                run_main(
                    "calibrate", "--labbook", os.path.join("no-such-folder", "labbook.md")
                ).code,
                2,
            )

    def test_impossible_truths_are_usage_errors(self):
        for flags in (
            ("--alpha", "1.1"),
            ("--chain", "0"),
            ("--draft-cost", "-1"),
            ("--step-ms", "0"),
            ("--step-ms", "nan"),
        ):
            with self.subTest(flags):
                self.assertEqual(run_main("calibrate", *flags).code, 2)

    def test_every_kind_of_truth_can_be_calibrated(self):
        for alpha, chain, cost in (("1", "14", "0"), ("0", "4", "1.5")):
            with self.subTest(alpha=alpha, chain=chain, cost=cost):
                outcome = self.calibrate(
                    "--json", "--alpha", alpha, "--chain", chain, "--draft-cost", cost
                )
                rows = {row["quantity"]: row for row in json.loads(outcome.out)["quantities"]}
                timed = ("/s", "ms", "ratio", "cost")
                self.assertEqual(
                    [
                        row
                        for name, row in rows.items()
                        if not row["within"] and not any(map(name.count, timed))
                    ],
                    [],
                )
                self.assertAlmostEqual(rows["alpha"]["measured"], float(alpha), delta=0.02)

    def test_long_chains_leave_the_names_of_the_rows(self):
        rows = [
            ms.Calibrated(
                quantity=name,
                true=[0.5] * 64,
                measured=[0.5] * 64,
                error=None,
                unit="exact",
                within=True,
            )
            for name in ("baseline tokens/s", "accepted per position")
        ]
        (table,) = ms.calibration_lines(rows)
        self.assertIn("accepted per position", table)
        self.assertLessEqual(max(map(len, table.splitlines())), 100 + 60)


class CalibrationRows(unittest.TestCase):
    """One measurement whose times are then set to the truth exactly, so that every error in the rows is a planted one."""

    @classmethod
    def setUpClass(cls):
        prompts = cls.prompts = measure_speculative.built_in_prompts()
        cls.length, plain = 72, dataclasses.replace(PLAIN, prefill_s=0.004)
        cls.drafting = dataclasses.replace(plain, chain=3, planted=("lighthouse", 12))
        with (
            reference_server(plain) as one,
            reference_server(cls.drafting) as other,
            mock.patch.object(measure_speculative, "SETTLE_PAUSE_S", 0.0),
        ):
            settings = measure_speculative.Settings(
                arms=(
                    measure_speculative.ArmSettings("baseline", one),
                    measure_speculative.ArmSettings("speculative", other),
                ),
                prompts=tuple(prompts),
                max_tokens=cls.length,
            )
            servers = [measure_speculative.preflight(arm, settings, print) for arm in settings.arms]
            recorder = measure_speculative.Recorder(print)
            (cls.measured,) = measure_speculative.measure_levels(
                settings, servers, recorder, ms.Judging("speculative-run", 0.0)
            )
            logs = [json.loads(get(api, "/truth"))[1 : 1 + len(prompts)] for api in (one, other)]
        cls.truth = [reference_truth([Served(**entry) for entry in log]) for log in logs]
        cls.by_prompt = [{entry["prompt"]: entry for entry in log} for log in logs]

    def rows(self, truth=None, slower=1.0, late_s=0.0, counts=None):
        """The rows, by quantity: readings of exactly the modelled times, the speculative ones `slower` and `late_s`."""
        runs = []
        for number, (run, log) in enumerate(zip(self.measured.runs, self.by_prompt)):
            readings = []
            for reading in run.readings:
                entry = log[self.prompts[reading.prompt_index].messages[0]["content"]]
                factor, late = (slower, late_s) if number else (1.0, 0.0)
                answer = dataclasses.replace(
                    reading.answer,
                    ttft_s=entry["prefill_s"] + late,
                    decode_s=entry["decode_s"] * factor,
                    latency_s=(entry["prefill_s"] + entry["decode_s"]) * factor + late,
                )
                readings.append(dataclasses.replace(reading, answer=answer))
            runs.append(dataclasses.replace(run, readings=tuple(readings)))
        triage = {
            "speculative": {
                str(d["prompt_index"]): d["triage"]
                for d in self.measured.result.comparisons[0]["text_comparison"]["divergences"]
            }
        }
        result = measure_speculative.result_of(
            measure_speculative.level_of(runs, 0.0),
            measure_speculative.Judging("calibrate", 0.0),
            triage,
        )
        measured = dataclasses.replace(self.measured, runs=runs, result=result)
        return {
            row.quantity: dataclasses.asdict(row)
            for row in measure_speculative.calibration_rows(
                measured, truth or self.truth, self.drafting
            )
        }

    @staticmethod
    def wrong(rows):
        return {quantity for quantity, row in rows.items() if not row["within"]}

    def changed(self, arm, **changes):
        truth = list(self.truth)
        truth[arm] = dataclasses.replace(truth[arm], **changes)
        return truth

    def test_true_times_give_no_error_at_all(self):
        rows = self.rows()
        self.assertEqual(self.wrong(rows), set())
        for quantity, row in rows.items():
            if (
                row["error"] is not None and quantity != "alpha"
            ):  # counters book a draft cut at an answer's end as rejected
                self.assertAlmostEqual(row["error"], 0.0, 6, quantity)

    def test_a_speculative_arm_that_is_two_percent_slow_shows_in_every_figure_it_touches(self):
        rows = self.rows(slower=1.02)
        error = 100 * (1 / 1.02 - 1)
        for quantity in ("speculative tokens/s", "ratio", "speculative decode tokens/s"):
            self.assertAlmostEqual(rows[quantity]["error"], error, 6, quantity)
            self.assertFalse(rows[quantity]["within"], quantity)
        self.assertAlmostEqual(rows["step cost, target steps"]["error"], 2.0, 6)
        self.assertEqual(round(rows["baseline tokens/s"]["error"], 6), 0.0)

    def test_a_late_first_token_and_a_slow_client_are_seen(self):
        rows = self.rows(late_s=0.008)
        self.assertAlmostEqual(rows["speculative time to first token, ms"]["error"], 8.0, 6)
        self.assertAlmostEqual(
            rows["client time per request, ms"]["measured"], 4.0, 6
        )  # the mean of both arms
        self.assertLessEqual(
            {"speculative time to first token, ms", "client time per request, ms"}, self.wrong(rows)
        )
        self.assertNotIn("speculative decode tokens/s", self.wrong(rows))

    def test_every_planted_wrong_count_is_found_and_nothing_else(self):
        drafted = self.truth[1]
        positions = (*drafted.positions[:-1], drafted.positions[-1] + 1)
        for change, quantity in (
            (dict(steps=drafted.steps + 1), "verification steps"),
            (dict(drafted=drafted.drafted - 1), "tokens drafted"),
            (dict(accepted=drafted.accepted + 1), "tokens accepted"),
            (dict(positions=positions), "accepted per position"),
            (dict(rejected=2 * drafted.rejected), "alpha"),
            (dict(tokens_per_step=drafted.tokens_per_step + 1e-6), "tokens per step"),
        ):
            with self.subTest(quantity):
                wrong = self.wrong(self.rows(self.changed(1, **change)))
                self.assertIn(quantity, wrong)
                self.assertEqual(
                    {
                        name
                        for name in wrong
                        if "tokens/s" in name or "ms" in name or name == "ratio"
                    },
                    set(),
                )

    def test_tolerance_of_a_rate_is_half_a_percent_on_either_side(self):
        for factor, within in ((1.0049, True), (1.0051, False), (0.9951, True), (0.9949, False)):
            with self.subTest(factor=factor):
                truth = self.changed(
                    0, decode_tokens_per_s=self.truth[0].decode_tokens_per_s / factor
                )
                row = self.rows(truth)["baseline decode tokens/s"]
                self.assertEqual(row["within"], within)
                self.assertAlmostEqual(row["error"], 100 * (factor - 1), 6)

    def test_a_difference_at_another_place_or_none_at_all_is_out_of_tolerance(self):
        place = self.rows()["planted difference, byte"]
        text = "".join(
            self.drafting.target_token(self.prompts[8].messages[0]["content"], n) for n in range(13)
        )
        self.assertEqual((place["true"], place["measured"]), (len(text) - 1,) * 2)
        planted = self.drafting
        try:
            type(self).drafting = dataclasses.replace(planted, planted=("lighthouse", 11))
            self.assertFalse(self.rows()["planted difference, byte"]["within"])
        finally:
            type(self).drafting = planted
        with mock.patch.object(measure_speculative, "divergence", lambda *args: None):
            self.assertLessEqual(
                {"planted difference, byte", "planted near tie"}, self.wrong(self.rows())
            )

    def test_alpha_is_what_the_server_counted_as_tested(self):
        accepted = rejected = 0
        for prompt in self.prompts:
            for drafted, kept, _ in loop_by_hand(
                self.drafting, prompt.messages[0]["content"], self.length
            ):
                accepted, rejected = accepted + kept, rejected + (kept < drafted)
        self.assertAlmostEqual(self.rows()["alpha"]["true"], accepted / (accepted + rejected), 9)


# Runs the program without its pauses and with short answers (a second in all), and says which processes it starts.
SHOW_CHILDREN = """
import subprocess, sys
sys.path.insert(0, sys.argv.pop(1))
import measure_speculative
start = subprocess.Popen
def shown(*args, **more):
    process = start(*args, **more)
    print(process.pid, flush=True)
    return process
measure_speculative.subprocess.Popen = shown
measure_speculative.SETTLE_PAUSE_S, measure_speculative.cpu_share = 0.0, lambda *args: 1.0
reference = measure_speculative.Reference
measure_speculative.Reference = lambda alpha, chain, draft_cost, step_s: reference(alpha, chain, draft_cost, 0.002)
sys.exit(measure_speculative.main(["calibrate", "--step-ms", "100"]))
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(
        OSError
    ):  # a dead process that nobody has waited for is dead all the same
        return (
            pathlib.Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0]
            not in "ZX"
        )
    return True


@unittest.skipUnless(hasattr(os, "killpg"), "sends signals to process groups")
class ProcessesEnd(unittest.TestCase):
    @contextlib.contextmanager
    def calibrating(self, children=2):
        """(the running program, the ids of its reference servers); whatever is left is ended."""
        pids = []
        with tempfile.TemporaryDirectory() as folder:
            program = subprocess.Popen(
                [sys.executable, "-c", SHOW_CHILDREN, str(PROGRAM.parent)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
                start_new_session=True,
            )
            try:
                pids += [int(program.stdout.readline()) for _ in range(children)]
                yield program, pids
            finally:
                program.kill()
                program.communicate()
                for pid in filter(alive, pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def assert_gone(self, pids):
        deadline = time.monotonic() + 5
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual([pid for pid in pids if alive(pid)], [])

    def test_ctrl_c_at_any_moment_leaves_no_server_behind(self):
        for moment, children, pause_s in (
            ("starting", 1, 0.0),
            ("started", 2, 0.05),
            ("measuring", 2, 0.4),
        ):
            with (
                self.subTest(moment, pause_s=pause_s),
                self.calibrating(children) as (program, pids),
            ):
                time.sleep(pause_s)
                os.killpg(
                    program.pid, signal.SIGINT
                )  # as a terminal does: to the program and its servers
                more, err = program.communicate(timeout=10)
                self.assertEqual(program.returncode, 130, err)
                self.assert_gone(pids + [int(word) for word in more.split()])
                self.assertNotIn("Traceback", err)
                self.assertIn("interrupted", err)

    def test_a_killed_program_leaves_no_server_behind(self):
        with self.calibrating() as (program, pids):
            program.kill()
            program.wait()
            self.assert_gone(pids)

    def test_a_killed_server_ends_the_calibration_with_a_sentence_and_no_process(self):
        for which in (0, 1):
            with self.subTest(which=which), self.calibrating() as (program, pids):
                time.sleep(0.4)  # in the middle of the measurement
                os.kill(pids[which], signal.SIGKILL)
                _, err = program.communicate(timeout=20)
                self.assertEqual(program.returncode, 1, err)
                self.assert_gone(pids)
                self.assertNotIn("Traceback", err)
                self.assertIn("reference server", err)

    def test_a_server_that_does_not_start_is_said_and_the_other_one_ends(self):
        started, broken = subprocess.Popen, []

        def second_fails(command, **more):
            if broken:
                command = [sys.executable, "-c", "pass"]
            broken.append(started(command, **more))
            return broken[-1]

        with mock.patch.object(subprocess, "Popen", second_fails):
            outcome = run_main("calibrate")
        self.assertEqual(outcome.code, 1)
        self.assertIn("reference server did not start", outcome.err)
        self.assertEqual([process.poll() for process in broken], [0, 0])


if __name__ == "__main__":
    unittest.main()
