"""Reports over time: the history of a notebook, the alarms for cron, exit codes."""

import copy
import csv
import io
import json
import math
import random
import re
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation
from tests.support import (
    compare,
    measure,
    run_main,
    same_speed,
    slow_pair,
    strict,
)

PROMPTS = ["prompt %d" % i for i in range(4)]
NEVER_PAYS = (
    "--min-gain",
    99,
)  # asks for a hundredfold speed: a verdict that no hiccup of the machine can change
T_11 = 2.200985  # published: Student's t, 11 degrees of freedom, 95% two-sided


def drafting(**options):
    return FakeServer("vllm", speculation=Speculation(4, (4, 2, 0)), **options)


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def interval(ratio, share=0.03, prompts=12, name="ratio"):
    return {
        name: ratio,
        "low": ratio * (1 - share),
        "high": ratio * (1 + share),
        "level": 0.95,
        "prompts": prompts,
    }


class PlantedNotebook(unittest.TestCase):
    """Records of a real run, from which notebooks of planted runs are made."""

    @classmethod
    def setUpClass(cls):
        with FakeServer("vllm") as a, drafting() as b:
            cls.outcome = measure(a, b, "--label", "night", prompts=PROMPTS)
        cls.model = [r for r in cls.outcome.records if not r["label"].endswith("/speculative")]
        cls.triple = cls.outcome.records

    def run_records(self, number=0, ratio=1.8, speed=40.0, label="night", share=0.03, **changes):
        """The three records of one run with these planted figures."""
        records = copy.deepcopy(self.triple)
        for record in records:
            record.update(
                label=record["label"].replace("night", label),
                run_id="%012x" % (number + 1),
                recorded_at="2026-%02d-%02dT03:00:00+02:00"
                % (1 + number // 28 % 12, 1 + number % 28),
                **changes,
            )
            if record["kind"] == "comparison":
                record.update(
                    speedup=ratio and interval(ratio, share),
                    baseline_tokens_per_s=speed,
                    speculative_tokens_per_s=speed * (ratio or 1),
                )
            elif record["label"].endswith("/baseline"):
                record.update(
                    speed=interval(speed, share, name="tokens_per_s"), output_tokens_per_s=speed
                )
        return records

    def report(self, records, *flags, damaged=""):
        return run_main(
            "report", "book.md", *flags, files={"book.md": "# Notes\n\n" + lines(records) + damaged}
        )


class History(PlantedNotebook):
    def test_400_records_of_several_labels_and_damaged_lines_report_in_under_a_second(self):
        text, damaged = "# Notes\n", []
        dice, number = random.Random(3), 0
        for run in range(134):
            for record in self.run_records(
                run, dice.uniform(1.5, 2.0), label="label-%d" % (run % 5)
            ):
                text += json.dumps(record) + "\n"
                number += 1
            if run % 10 == 9:
                text += json.dumps(record)[:700] + "\n"
                damaged.append(text.count("\n"))
        self.assertGreaterEqual(number, 400)
        started = time.process_time()
        outcome = run_main("report", "book.md", files={"book.md": text})
        self.assertLess(time.process_time() - started, 1.0)
        self.assertEqual(outcome.code, 0)
        for line in damaged:
            self.assertIn("book.md:%d:" % line, outcome.err)
        self.assertEqual(len(outcome.err.splitlines()), len(damaged))
        for label in range(5):
            self.assertIn("## label-%d" % label, outcome.out)
        self.assertEqual(sum(row.startswith("| 2026-") for row in outcome.out.splitlines()), 134)

    def test_history_shows_each_figure_and_marks_the_change(self):
        runs = [(1.8, "="), (1.79, "="), (1.5, "v"), (1.9, "^"), (None, "?"), (1.9, "?")]
        records = [r for i, (ratio, _) in enumerate(runs) for r in self.run_records(i, ratio)]
        rows = [
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in self.report(records).out.splitlines()
            if row.startswith("| 2026-")
        ]
        self.assertEqual([row[1] for row in rows], [""] + [mark for _, mark in runs[1:]])
        self.assertEqual([row[2] for row in rows], ["1.80", "1.79", "1.50", "1.90", "-", "1.90"])
        self.assertEqual(rows[2][3], "%.2f to %.2f" % (1.5 * 0.97, 1.5 * 1.03))
        self.assertIn("40.00", rows[0])
        self.assertIn("4 of 4", rows[0])
        self.assertIn("0.33.0", rows[0])

    def test_one_mark_a_run_shows_the_trend(self):
        self.assertEqual(ms.trend_marks([1.0, 2.0, 1.5, None])[::3], "_?")
        marks = ms.trend_marks([1.0 + i / 5 for i in range(6)])
        self.assertEqual((marks[0], marks[-1], len(set(marks))), ("_", "#", 6))
        self.assertEqual(
            len(set(ms.trend_marks([1.8, 1.8001, 1.7999]))),
            1,
            "noise below a half percent is no trend",
        )
        self.assertEqual(ms.trend_marks([]), "")

    def test_what_changed_between_two_runs_is_said(self):
        for changes, words in (
            ({"engine_version": "0.34.0"}, "version 0.33.0 -> 0.34.0"),
            ({"prompts_sha256": "other"}, "prompts"),
            ({"max_tokens": 64}, "max_tokens 192 -> 64"),
            ({"model": "bigger"}, "model fake-model -> bigger"),
        ):
            with self.subTest(words):
                self.assertIn(
                    words, self.report(self.run_records(0) + self.run_records(1, **changes)).out
                )

    def test_a_changed_context_length_is_said(self):
        with FakeServer("vllm", context=4096) as a, drafting(context=4096) as b:
            first = measure(a, b, prompts=PROMPTS).records
        with FakeServer("vllm", context=8192) as a, drafting(context=8192) as b:
            second = measure(a, b, prompts=PROMPTS).records
        self.assertRegex(self.report(first + second).out, "context length 4096 -> 8192")

    def test_an_upgrade_of_the_baseline_alone_is_said(self):
        with FakeServer("vllm", build="0.33.0") as a, drafting(build="0.33.0") as b:
            first = measure(a, b, prompts=PROMPTS).records
        with FakeServer("vllm", build="0.34.0") as a, drafting(build="0.33.0") as b:
            second = measure(a, b, prompts=PROMPTS).records
        self.assertRegex(self.report(first + second).out, "0.33.0 -> 0.34.0")

    def test_levels_are_not_mixed_into_one_history(self):
        records = [
            r
            for night in range(3)
            for level, ratio in ((1, 1.8), (4, 0.9))
            for r in self.run_records(2 * night + (level == 4), ratio, concurrency=level)
        ]
        rows = [
            [cell.strip() for cell in row.strip("|").split("|")]
            for row in self.report(records).out.splitlines()
            if row.startswith("| 2026-")
        ]
        self.assertEqual(
            [(row[1], row[2]) for row in rows],
            [
                ("", "1.80"),
                ("=", "1.80"),
                ("=", "1.80"),
                ("", "0.90"),
                ("=", "0.90"),
                ("=", "0.90"),
            ],
        )

    def test_one_label_can_be_asked_for(self):
        out = self.report(
            self.run_records(0) + self.run_records(1, label="other"), "--label", "night"
        ).out
        self.assertIn("night/comparison", out)
        self.assertNotIn("other/comparison", out)

    def test_csv_and_json_hold_the_same_figures(self):
        records = [r for i in range(3) for r in self.run_records(i, 1.5 + i / 10)]
        rows = list(csv.DictReader(io.StringIO(self.report(records, "--format", "csv").out)))
        self.assertEqual(
            [(row["label"], float(row["ratio"]), row["verdict"]) for row in rows],
            [("night/comparison", 1.5 + i / 10, records[2]["verdict"]) for i in range(3)],
        )
        told = [
            json.loads(line) for line in self.report(records, "--format", "json").out.splitlines()
        ]
        self.assertEqual(told, records)

    def test_a_notebook_without_records_is_said_to_be_empty(self):
        outcome = run_main("report", "book.md", files={"book.md": "# Notes\n"})
        self.assertEqual(outcome.code, 0)
        self.assertIn("No comparison", outcome.out)

    def test_a_notebook_that_is_not_there_is_named(self):
        outcome = run_main("report", "none.md")
        self.assertEqual((outcome.code, outcome.out), (2, ""))
        self.assertIn("none.md", outcome.err)

    def test_other_programs_records_are_left_alone(self):
        foreign = [
            {"lab": "elsewhere", "schema": 2, "kind": "comparison", "label": "x/comparison"},
            {"n": 1},
            {"lab": ms.LAB, "schema": 99, "kind": "comparison"},
        ]
        out = self.report(foreign + self.run_records(0)).out
        self.assertEqual(sum(row.startswith("## ") for row in out.splitlines()), 1)

    def test_a_record_that_lost_its_keys_is_skipped_and_no_traceback(self):
        broken = {
            "lab": ms.LAB,
            "schema": ms.SCHEMA,
            "kind": "comparison",
            "label": "night/comparison",
        }
        for flags in ((), ("--format", "csv")):
            with self.subTest(flags):
                outcome = self.report([broken] + self.run_records(0), *flags)
                self.assertEqual(outcome.code, 0)
                self.assertIn("1.80" if not flags else "1.8", outcome.out)


class Regressions(PlantedNotebook):
    def alarms(self, before, after):
        return ms.regressions(before, after)

    def test_a_planted_fall_of_10_percent_fires_with_intervals_of_3(self):
        for what, after in (
            ("speed-up", {"ratio": 1.8 * 0.9}),
            ("baseline tokens/s", {"speed": 40.0 * 0.9}),
        ):
            with self.subTest(what):
                (alarm,) = self.alarms(self.run_records(0), self.run_records(1, **after))
                self.assertIn(what, alarm)

    def test_overlapping_intervals_a_rise_and_a_first_run_are_silent(self):
        for before, after in (
            (
                self.run_records(0),
                self.run_records(1, ratio=1.8 * 0.95, speed=40 * 0.95),
            ),  # 1.7..1.76 reaches into 1.746..
            (self.run_records(0), self.run_records(1, ratio=2.5, speed=80)),
            ([], self.run_records(1)),
            (self.run_records(0, ratio=None), self.run_records(1, ratio=0.5)),
        ):
            self.assertEqual(self.alarms(before, after), [])

    def test_only_the_same_label_model_prompts_tokens_and_level_are_compared(self):
        for changes in (
            {"label": "other"},
            {"model": "bigger"},
            {"prompts_sha256": "x"},
            {"max_tokens": 64},
            {"concurrency": 4},
        ):
            with self.subTest(changes):
                self.assertEqual(
                    self.alarms(
                        self.run_records(0, **changes), self.run_records(1, ratio=0.5, speed=1)
                    ),
                    [],
                )

    def test_the_last_comparable_record_counts(self):
        history = (
            self.run_records(0, 3.0)
            + self.run_records(1, 1.8)
            + self.run_records(2, 9.0, label="other")
        )
        self.assertEqual(self.alarms(history, self.run_records(3, 1.79)), [])
        self.assertEqual(len(self.alarms(history, self.run_records(3, 1.6))), 1)

    def test_the_line_says_what_fell_from_what_to_what_since_when_and_what_changed(self):
        (alarm,) = self.alarms(
            self.run_records(0), self.run_records(1, 1.62, engine_version="0.34.0")
        )
        for part in (
            "night/comparison",
            "speed-up",
            "1.80",
            "1.75 to 1.85",
            "1.62",
            "1.57 to 1.67",
            "2026-01-01T03:00:00+02:00",
            "version 0.33.0 -> 0.34.0",
        ):
            self.assertIn(part, alarm)
        self.assertNotIn("\n", alarm)

    def test_50_repeats_of_an_unchanged_pair_stay_silent(self):
        """Each run: 12 prompts whose log figures scatter so that the interval is about 3%, for ratio and baseline speed.

        It fires when the two intervals are apart, so when a difference of two means passes the sum of both half widths,
        2.8 standard deviations of that difference. With 11 degrees of freedom that happens in 0.27% of the runs for each
        figure (200,000 simulated runs): 0.27 alarms are expected in 50 runs with two figures each. At most 5 are allowed.
        """

        def drawn(dice, true, name="ratio"):
            logs = [math.log(true) + dice.gauss(0, 0.03 * math.sqrt(12) / T_11) for _ in range(12)]
            mean = sum(logs) / 12
            half = T_11 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 11 / 12)
            return dict(
                interval(math.exp(mean), name=name),
                low=math.exp(mean - half),
                high=math.exp(mean + half),
            )

        def night(dice, number):
            records = self.run_records(number)
            records[0]["speed"], records[2]["speedup"] = (
                drawn(dice, 40.0, "tokens_per_s"),
                drawn(dice, 1.8),
            )
            return [records[0], records[2]]

        dice, history, alarms = random.Random(50), night(random.Random(51), 0), []
        for number in range(1, 51):
            now = night(dice, number)
            alarms += self.alarms(history, now)
            history += now
        self.assertLessEqual(len(alarms), 5)
        before, many = night(dice, 0), 0
        for number in range(1, 1000):  # the rate itself, over many more
            now = night(dice, number)
            many += len(self.alarms(before, now))
            before = now
        self.assertLess(many / 1000, 2 * 0.0027 * 3)

    def test_a_fall_of_10_percent_is_found_in_the_same_simulation(self):
        """A fall of 10.5% in logs against a threshold of 6% on average: found in nearly every run."""
        dice, found = random.Random(7), 0
        for _ in range(200):
            figures = []
            for true in (1.8, 1.62):
                logs = [
                    math.log(true) + dice.gauss(0, 0.03 * math.sqrt(12) / T_11) for _ in range(12)
                ]
                mean = sum(logs) / 12
                half = T_11 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 11 / 12)
                figures.append(
                    dict(
                        interval(math.exp(mean)),
                        low=math.exp(mean - half),
                        high=math.exp(mean + half),
                    )
                )
            before, after = self.run_records(0), self.run_records(1)
            before[2]["speedup"], after[2]["speedup"] = figures
            found += bool(self.alarms(before, after))
        self.assertGreater(found, 180)


class Alarms(PlantedNotebook):
    def measured(self, *flags, earlier=(), a=None, b=None, prompts=PROMPTS):
        with a or FakeServer("vllm") as first, b or drafting() as second:
            files = {"labbook.md": "# Notes\n" + lines(earlier)} if earlier else None
            return measure(first, second, "--label", "night", *flags, prompts=prompts, files=files)

    def assert_one_line(self, outcome, pattern, code=3):
        self.assertEqual(outcome.code, code, outcome.err)
        self.assertEqual(len(outcome.err.splitlines()), 1, outcome.err)
        self.assertRegex(outcome.err, pattern)

    def test_a_regression_ends_with_3_and_one_line_for_the_mail(self):
        outcome = self.measured(
            "--fail-on", "regression", "--quiet", earlier=self.run_records(0, 1000.0, 1e-6)
        )
        self.assertEqual(outcome.out, "")
        self.assert_one_line(
            outcome,
            r"^REGRESSION night/comparison: speed-up fell from 1000\.00 \(970\.00 to 1030\.00\) to .* since 2026-01-01T03:00:00\+02:00; ",
        )
        self.assertEqual(len(outcome.records), 6)  # what was measured is recorded all the same

    def test_a_fallen_baseline_speed_is_a_regression_too(self):
        outcome = self.measured(
            "--fail-on", "regression", "--quiet", earlier=self.run_records(0, 0.001, 1e9)
        )
        self.assert_one_line(outcome, "^REGRESSION night/baseline: baseline tokens/s fell from")

    def test_a_first_run_and_an_unasked_alarm_are_silent(self):
        self.assertEqual(self.measured("--fail-on", "regression", "--quiet")[:3], (0, "", ""))
        outcome = self.measured("--quiet", earlier=self.run_records(0, 1000.0, 1e9))
        self.assertEqual(outcome[:3], (0, "", ""))

    def test_levels_of_one_run_are_not_each_others_past(self):
        outcome = self.measured("--fail-on", "regression", "--quiet", "--concurrency", "1,2")
        self.assertEqual((outcome.code, outcome.err), (0, ""))

    def test_slower_fires_on_a_verdict_that_does_not_pay(self):
        outcome = self.measured(
            "--fail-on",
            "slower",
            "--quiet",
            a=FakeServer("vllm", first_delay_s=0.03),
            b=drafting(first_delay_s=0.15),
        )
        self.assertEqual(outcome.comparison()["verdict"], "does-not-pay")
        self.assert_one_line(outcome, "^SLOWER night/comparison: DOES NOT PAY")
        outcome = self.measured(
            "--fail-on",
            "slower",
            a=FakeServer("vllm", first_delay_s=0.15),
            b=drafting(first_delay_s=0.03),
        )
        self.assertEqual(outcome.code, 0)

    def test_slower_is_silent_where_nothing_was_drafted(self):
        outcome = self.measured(
            "--fail-on",
            "slower",
            "--quiet",
            *NEVER_PAYS,
            b=FakeServer("vllm", speculation=Speculation(4, (None,))),
            prompts=PROMPTS,
        )
        self.assertEqual((outcome.comparison()["verdict"], outcome.code), (None, 0))

    def test_changed_text_fires(self):
        outcome = self.measured(
            "--fail-on", "changed-text", "--quiet", b=drafting(answers={"prompt 2": "other words"})
        )
        self.assert_one_line(outcome, r"^CHANGED TEXT night/comparison: 1 of 4 .*byte 0")
        self.assertEqual(self.measured("--fail-on", "changed-text").code, 0)

    def test_changed_text_names_a_difference_that_counts_and_not_an_unstable_one(self):
        a = FakeServer("vllm", answers={"prompt 0": ["a b", "a c"], "prompt 3": "x y"})
        b = drafting(answers={"prompt 0": "a d", "prompt 3": "x z"})
        outcome = self.measured("--fail-on", "changed-text", "--quiet", "--repeats", 2, a=a, b=b)
        told = next(
            d
            for d in outcome.comparison()["text_comparison"]["divergences"]
            if d["prompt_index"] == 3
        )["prompt_id"]
        self.assert_one_line(outcome, "CHANGED TEXT .* 2 of 8 .*" + told)

    def test_changed_text_names_it_also_behind_20_unstable_ones(self):
        prompts = ["prompt %02d" % i for i in range(26)]

        def unstable(prompt, n):
            return "same words" if prompt == prompts[-1] else "asked %d" % n

        outcome = self.measured(
            "--fail-on",
            "changed-text",
            "--quiet",
            "--repeats",
            2,
            a=FakeServer("vllm", answers=unstable),
            b=drafting(answers=lambda p, n: "quite other words"),
            prompts=prompts,
        )
        self.assert_one_line(outcome, "CHANGED TEXT .* 2 of 52 ")
        self.assertNotIn("prompts-1 ", outcome.err)

    def test_several_conditions_may_be_given(self):
        for flags in (
            ("--fail-on", "slower,changed-text"),
            ("--fail-on", " regression, changed-text ,slower"),
            ("--fail-on", "slower", "--fail-on", "changed-text"),
        ):
            with self.subTest(flags):
                outcome = self.measured(
                    *flags, "--quiet", *NEVER_PAYS, b=drafting(answers={"prompt 2": "other words"})
                )
                self.assertEqual(outcome.code, 3)
                self.assertEqual(
                    [line.split(" ")[0] for line in outcome.err.splitlines()], ["SLOWER", "CHANGED"]
                )

    def test_an_unknown_condition_is_refused(self):
        outcome = run_main("--baseline-url", "http://127.0.0.1:1/v1", "--fail-on", "slower,faster")
        self.assertEqual(outcome.code, 2)
        self.assertIn("faster", outcome.err)

    def test_the_alarm_is_raised_without_quiet_too(self):
        outcome = self.measured("--fail-on", "slower", *NEVER_PAYS)
        self.assert_one_line(outcome, "SLOWER")
        self.assertIn("DOES NOT PAY", outcome.out)

    def test_compare_raises_the_same_alarms(self):
        with FakeServer("vllm") as a, drafting(answers={"prompt 2": "other words"}) as b:
            saved = measure(a, b, "--save-run", "run.jsonl", prompts=PROMPTS).files["run.jsonl"]
        outcome = run_main(
            "compare",
            "run.jsonl",
            "--fail-on",
            "changed-text",
            "--quiet",
            files={"run.jsonl": saved},
        )
        self.assert_one_line(outcome, "^CHANGED TEXT")


class ExitCodes(PlantedNotebook):
    def test_a_server_that_completed_nothing_comes_before_an_alarm(self):
        with (
            FakeServer("vllm") as a,
            drafting(answers={"prompt 2": "other"}) as b,
            FakeServer("vllm", faults=[None, "html"], repeat_fault=True) as c,
        ):
            outcome = measure(
                a,
                b,
                "--speculative-url",
                "dead=" + c.url,
                "--fail-on",
                "changed-text",
                "--quiet",
                prompts=PROMPTS,
            )
        self.assertEqual(outcome.code, 1)
        self.assertIn("CHANGED TEXT", outcome.err)
        self.assertEqual(len(outcome.records), 4)  # three servers, one comparison

    def test_a_notebook_that_could_not_be_written_comes_before_an_alarm(self):
        with (
            FakeServer("vllm") as a,
            drafting(answers={"prompt 2": "other"}) as b,
            mock.patch.object(
                ms, "append_records", side_effect=OSError(28, "No space left on device")
            ),
        ):
            outcome = measure(a, b, "--fail-on", "changed-text", "--quiet", prompts=PROMPTS)
        self.assertEqual(outcome.code, 1)
        self.assertIn("CHANGED TEXT", outcome.err)

    def test_an_interruption_comes_before_all(self):
        real, calls = ms.take_reading, []

        def stopped(*args, **options):
            calls.append(1)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return real(*args, **options)

        with (
            FakeServer("vllm") as a,
            drafting(answers={"prompt 0": "other"}) as b,
            mock.patch.object(ms, "take_reading", stopped),
        ):
            outcome = measure(a, b, "--fail-on", "changed-text", "--quiet", prompts=PROMPTS)
        self.assertEqual(outcome.code, 130)
        self.assertIn("CHANGED TEXT", outcome.err)
        self.assertEqual(len(outcome.records), 3)

    def test_a_finding_without_fail_on_is_no_failure(self):
        with FakeServer("vllm") as a, drafting(answers={"prompt 0": "other"}) as b:
            self.assertEqual(measure(a, b, *NEVER_PAYS, prompts=PROMPTS).code, 0)


class DamagedHistory(unittest.TestCase):
    """`--fail-on regression` reads what older versions, editors and full disks have left in the notebook."""

    @classmethod
    def setUpClass(cls):
        fast = {
            "plain.jsonl": slow_pair()["plain.jsonl"],
            "slow.jsonl": same_speed("slow", seconds=0.5, drafted=100, accepted=75),
        }
        cls.fast = strict(compare(*fast.items()).files["labbook.md"])

    def now(self, earlier):
        """Compare the slow pair with these records in the notebook; the Outcome, and the records it appended."""
        book = b"".join(json.dumps(record).encode() + b"\n" for record in earlier)
        outcome = (
            compare(*slow_pair().items(), flags=("--fail-on", "regression"))
            if not earlier
            else run_main(
                "compare",
                *slow_pair(),
                "--fail-on",
                "regression",
                files=dict(slow_pair(), **{"labbook.md": book}),
            )
        )
        return outcome, strict(outcome.files["labbook.md"][len(book) :])

    def damaged(self, **fields):
        return [dict(record, **fields) for record in copy.deepcopy(self.fast)]

    def test_a_damaged_older_record_is_named_and_costs_no_measurement(self):
        whole = {"ratio": 9.0, "tokens_per_s": 900.0, "low": 8.0, "high": 10.0}
        for value in (
            5,
            "x",
            True,
            [],
            [1, 2],
            {},
            {"ratio": 1},
            {"tokens_per_s": 1},
            dict(whole, ratio="fast", tokens_per_s=[]),
            dict(whole, low="x"),
            dict(whole, high="x"),
            dict(whole, high=None),
            dict(whole, low={}),
            dict(whole, low=True),
        ):
            with self.subTest(value):
                outcome, records = self.now(self.damaged(speedup=value, speed=value))
                self.assertEqual(outcome.code, 0, outcome.err)
                self.assertEqual(len(records), 3)
                self.assertIn("Drafts", outcome.out)
                named = outcome.err.splitlines()
                self.assertEqual(len(named), len(self.fast))
                for number, (line, old) in enumerate(zip(named, self.fast), 1):
                    field = "speedup" if old["kind"] == "comparison" else "speed"
                    self.assertRegex(
                        line,
                        r"^labbook\.md:%d: the record %s of %s is damaged and left out: %s(\.\w+)?$"
                        % (number, old["label"], re.escape(old["recorded_at"]), field),
                    )

    def test_other_odd_fields_cost_no_measurement_either(self):
        for name in (
            "label",
            "model",
            "prompts_sha256",
            "max_tokens",
            "concurrency",
            "engine_version",
            "recorded_at",
            "kind",
            "repeats",
        ):
            for value in (None, [], {}, 5, "\ud800"):
                with self.subTest(name, value=value):
                    self.assertEqual(len(self.now(self.damaged(**{name: value}))[1]), 3)

    def test_a_damaged_record_hides_no_regression_against_the_good_one_before_it(self):
        outcome, _ = self.now(self.fast)
        self.assertEqual(outcome.code, 3, "the planted regression")
        outcome, _ = self.now(self.fast + self.damaged(speedup=5))
        self.assertEqual(outcome.code, 3, outcome.err)
        self.assertIn("REGRESSION", outcome.err)


class References(unittest.TestCase):
    """What a new run is held against: whole runs with an interval, and a slow decline over many."""

    @classmethod
    def setUpClass(cls):
        book = compare(*slow_pair().items()).files["labbook.md"]
        cls.sound = next(r for r in strict(book) if r["kind"] == "comparison")

    def record(self, ratio, half=0.02, **fields):
        speedup = dict(self.sound["speedup"], ratio=ratio, low=ratio - half, high=ratio + half)
        return dict(self.sound, **dict({"speedup": speedup}, **fields))

    def alarms(self, past, now):
        return ms.regressions(past, [now])

    def test_an_interrupted_run_is_no_reference_and_hides_no_later_fall(self):
        past = [self.record(1.8), self.record(1.0, interrupted=True)]
        self.assertEqual(len(self.alarms(past, self.record(1.5))), 1)

    def test_a_night_without_a_verdict_is_no_reference_and_hides_no_fall(self):
        idle = self.record(0.97, verdict=None, verdict_withheld="did-not-run")
        wrong = self.record(10.0, verdict=None, verdict_withheld="counts-wrong")
        self.assertEqual(len(self.alarms([self.record(1.8), idle], self.record(1.3))), 1)
        self.assertEqual(self.alarms([wrong], self.record(1.8)), [])

    def test_a_sampled_run_is_not_compared_with_a_greedy_one(self):
        warm = self.record(1.4, sampling={"temperature": 0.8})
        self.assertEqual(self.alarms([self.record(1.8)], warm), [])

    def test_a_run_without_an_interval_is_no_reference(self):
        bare = dict(self.sound["speedup"], ratio=1.0, low=None, high=None)
        past = [self.record(1.8), self.record(1.0, speedup=bare)]
        self.assertEqual(len(self.alarms(past, self.record(1.5))), 1)

    def test_a_decline_of_a_few_percent_a_night_is_seen(self):
        nights = [self.record(1.80 - 0.02 * i, half=0.05) for i in range(8)]
        self.assertEqual(self.alarms(nights[:-1], nights[-1]), [])
        (alarm,) = self.alarms(nights, self.record(1.60, half=0.05))
        self.assertIn("fell slowly", alarm)

    def test_four_records_are_too_few_for_a_decline(self):
        nights = [self.record(1.80 - 0.04 * i, half=0.05) for i in range(4)]
        self.assertEqual(self.alarms(nights, self.record(1.62, half=0.05)), [])

    def test_runs_of_another_order_or_candidate_model_are_not_compared(self):
        for fields in ({"order": "sequential"}, {"model": "other"}, {"baseline_model": "other"}):
            past = [self.record(1.8, **fields)]
            self.assertEqual(self.alarms(past, self.record(1.2)), [], fields)


if __name__ == "__main__":
    unittest.main()
