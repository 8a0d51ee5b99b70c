"""Measurement: levels of load, servers that fail or refuse at a level, queueing, the crossover."""

import json
import re
import threading
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation, sum_counts
from tests.support import (
    ALARMS,
    REFUSED,
    SAVE,
    canned,
    findings,
    measure,
    run_main,
)

PROMPTS = ["prompt %d" % i for i in range(4)]

DRAFTS = Speculation(4, (4, 2, 0))


def workloads(*names):
    """A prompt file with one prompt of each of these kinds of work."""
    return {
        "prompts.json": json.dumps(
            [{"prompt": "p%d" % i, "workload": name} for i, name in enumerate(names)]
        )
    }


def measure_kinds(a, b, names, *flags):
    return measure(a, b, "--prompts", "prompts.json", *flags, files=workloads(*names))


def sequence(*servers, skip=1):
    """Which server got each chat request, in the order of their arrival, as runs: [(0, 8), (1, 16), ...]."""
    sent = sorted(
        (chat["at"], number)
        for number, server in enumerate(servers)
        for chat in server.chats[skip:]
    )
    runs = []
    for _, number in sent:
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return [tuple(run) for run in runs]


class Together:
    """An `answers` that notes how many requests are being answered at once."""

    def __init__(self):
        self.most, self.server = 0, None

    def __call__(self, prompt, n):
        self.most = max(self.most, self.server.running + 1)


class LevelsOfLoad(unittest.TestCase):
    def test_each_level_has_its_own_records_under_the_same_labels(self):
        with FakeServer() as a, FakeServer(speculation=Speculation(4, (2,))) as b:
            outcome = measure(
                a, b, "--repeats", 1, "--concurrency", "1,2,4", "--label", "load", prompts=PROMPTS
            )
            self.assertEqual(outcome.code, 0, outcome.err)
            truth = sum_counts(b.given[1:])
        self.assertEqual(
            [(r["label"], r["concurrency"]) for r in outcome.records],
            [
                ("load/" + name, level)
                for level in (1, 2, 4)
                for name in ("baseline", "speculative", "comparison")
            ],
        )
        drafting = [r for r in outcome.records if r["label"] == "load/speculative"]
        self.assertEqual(sum(r["output_tokens"] for r in drafting), truth.tokens)
        self.assertEqual(sum(r["acceptance"]["drafted"] for r in drafting), truth.drafted)
        self.assertEqual([r["requests"] for r in drafting], [4, 4, 8])

    def test_a_server_gets_its_whole_block_before_the_other(self):
        with FakeServer() as a, FakeServer() as b:
            measure_kinds(a, b, ["x", "y"], "--concurrency", 4, "--repeats", 2)
            self.assertEqual(sequence(a, b), [(0, 8), (1, 16), (0, 8), (1, 8), (0, 16), (1, 8)])

    def test_as_many_requests_are_in_flight_as_were_asked_for_and_no_more(self):
        for level in (1, 3, 8):
            counters = [Together(), Together()]
            with (
                self.subTest(level),
                FakeServer(answers=counters[0], first_delay_s=0.1) as a,
                FakeServer(answers=counters[1], first_delay_s=0.1) as b,
            ):
                counters[0].server, counters[1].server = a, b
                measure(a, b, "--repeats", 1, "--concurrency", level, prompts=PROMPTS)
            self.assertEqual([counter.most for counter in counters], [level] * 2)

    def test_a_level_of_64_holds_64_requests_in_flight(self):
        counter = Together()
        with FakeServer(answers=counter, first_delay_s=0.6, words=3) as a:
            counter.server = a
            outcome = measure(a, None, "--repeats", 1, "--concurrency", 64, prompts=PROMPTS)
        record = outcome.endpoint()
        self.assertEqual(
            (outcome.code, record["requests"], record["completed"], counter.most), (0, 128, 128, 64)
        )

    def test_throughput_is_tokens_over_elapsed_time_of_the_blocks(self):
        """Four at a time: each request takes as long as one alone, the block a quarter of their sum."""
        with (
            FakeServer(first_delay_s=0.1, words=8) as a,
            FakeServer(first_delay_s=0.1, words=8) as b,
        ):
            outcome = measure_kinds(a, b, ["x", "y"], "--repeats", 1, "--concurrency", 4)
        for arm in ("baseline", "speculative"):
            record = outcome.endpoint(arm)
            self.assertEqual(record["output_tokens"], 16 * 8)
            self.assertAlmostEqual(
                record["output_tokens_per_s"], record["output_tokens"] / record["wall_s"], 6
            )
            self.assertLess(record["wall_s"], 0.7 * 16 * record["latency_s"]["mean"])
        self.assertEqual(outcome.comparison()["speedup"]["prompts"], 2)  # pairs of blocks

    def test_the_ratio_follows_the_servers(self):
        """The candidate sleeps a quarter as long; bounds wide enough for a busy machine (calibrate has the narrow ones)."""
        with (
            FakeServer(first_delay_s=0.2, words=4) as a,
            FakeServer(first_delay_s=0.05, words=4, speculation=Speculation()) as b,
        ):
            ratio = measure_kinds(a, b, ["x", "y"], "--concurrency", 4).comparison()["speedup"][
                "ratio"
            ]
        self.assertTrue(1.5 < ratio < 5, ratio)

    def test_acceptance_latency_and_texts_are_told_for_each_level(self):
        with (
            FakeServer("vllm") as a,
            FakeServer("vllm", speculation=Speculation(4, (4, 2, 0))) as b,
        ):
            outcome = measure(a, b, "--concurrency", "1,3", prompts=PROMPTS)
        for record in (r for r in outcome.records if r["kind"] == "comparison"):
            self.assertTrue(0 < record["acceptance"]["rate"] < 1)
            self.assertTrue(
                all(record["latency_p50_s"][arm] > 0 for arm in ("baseline", "speculative"))
            )
            self.assertEqual(
                record["text_comparison"]["identical"], record["text_comparison"]["compared"]
            )
            self.assertGreater(record["text_comparison"]["compared"], 0)
        for word in ("Acceptance", "latency", "Identical", "Crossover"):
            self.assertIn(word, outcome.out)

    def test_no_tail_percentile_is_ever_told(self):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(a, b, "--concurrency", "1,4", prompts=PROMPTS)
        self.assertNotRegex(
            outcome.out + outcome.files["labbook.md"].decode(), r"(?i)\bp9\d|9\dth|percentile"
        )

    def test_changed_texts_under_load_are_said_to_have_another_possible_cause(self):
        with (
            FakeServer(answers=lambda p, n: "a b c") as a,
            FakeServer(answers=lambda p, n: "a b d") as b,
        ):
            out = measure(a, b, "--concurrency", "1,2", prompts=PROMPTS).out
        self.assertRegex(out, "batch is composed differently")

    def test_one_server_alone_is_measured_at_each_level(self):
        with FakeServer() as a:
            outcome = measure(a, None, "--concurrency", "1,4", prompts=PROMPTS)
        self.assertEqual(
            [(r["label"].split("/")[1], r["concurrency"]) for r in outcome.records],
            [("baseline", 1), ("baseline", 4)],
        )

    def test_warm_up_happens_once_and_outside_every_level(self):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(
                a, b, "--repeats", 1, "--concurrency", "1,2", "--warmup", 2, prompts=PROMPTS
            )
            self.assertEqual([len(a.chats), len(b.chats)], [2 + 4 + 4] * 2)
        self.assertEqual(
            [r["requests"] for r in outcome.records if r["kind"] == "endpoint"], [4] * 4
        )


class Queueing(unittest.TestCase):
    def test_a_server_with_too_few_slots_is_found_by_its_gauges(self):
        for engine in ("vllm", "llama.cpp", "sglang"):
            with (
                self.subTest(engine),
                FakeServer(engine, words=3) as a,
                FakeServer(
                    engine, words=3, slots=1, first_delay_s=0.1, speculation=Speculation()
                ) as b,
            ):
                outcome = measure(a, b, "--repeats", 1, "--concurrency", 4, prompts=PROMPTS)
                self.assertIn("queueing", findings(outcome.endpoint("speculative")))
                self.assertNotIn("queueing", findings(outcome.endpoint("baseline")))
                found = next(
                    f
                    for f in outcome.endpoint("speculative")["audit"]
                    if f["finding"] == "queueing"
                )
                self.assertTrue(1 <= found["waiting"] <= 3)
                self.assertIn("queue", outcome.out)

    def test_a_server_with_room_does_not_queue(self):
        with FakeServer(words=3, slots=4, first_delay_s=0.25) as a:
            outcome = measure(a, None, "--repeats", 1, "--concurrency", 4, prompts=PROMPTS)
        self.assertNotIn("queueing", findings(outcome.endpoint()))


class FailuresUnderLoad(unittest.TestCase):
    def test_a_block_with_a_failure_is_in_no_figure(self):
        """The candidate's second block (8 requests) has one that fails at once; the first pair of blocks remains."""
        with (
            FakeServer(first_delay_s=0.05) as a,
            FakeServer(speculation=DRAFTS, first_delay_s=0.05, faults=[None] * 12 + ["html"]) as b,
        ):
            outcome = measure_kinds(a, b, ["x", "y"], "--repeats", 1, "--concurrency", 4)
        record, endpoint = outcome.comparison(), outcome.endpoint("speculative")
        self.assertEqual(
            (outcome.code, endpoint["failed"], endpoint["completed"], endpoint["requests"]),
            (0, 1, 15, 16),
        )
        self.assertEqual(
            (record["speedup"]["prompts"], record["speedup"]["low"], record["verdict"]),
            (1, None, "undecided"),
        )
        self.assertEqual(
            (record["text_comparison"]["failed"], record["text_comparison"]["identical"]), (1, 15)
        )
        for side in (
            "baseline",
            "speculative",
        ):  # over the one pair of blocks: 8 answers of 32 words
            arm = outcome.endpoint(side)
            self.assertAlmostEqual(arm["output_tokens_per_s"] * arm["wall_s"], 8 * 32, 6)

    def test_failures_that_come_at_once_never_look_fast(self):
        with (
            FakeServer(first_delay_s=0.03) as a,
            FakeServer(
                speculation=DRAFTS,
                first_delay_s=0.03,
                faults=[None, None, None, "html"],
                repeat_fault=True,
            ) as b,
        ):
            outcome = measure_kinds(a, b, ["x", "y"], "--repeats", 1, "--concurrency", 4)
        record = outcome.comparison()
        self.assertEqual(
            (record["speedup"], record["verdict"], record["speculative_tokens_per_s"]),
            (None, "undecided", None),
        )
        self.assertEqual(outcome.code, 0)
        self.assertRegex(outcome.out, "14 of 16 requests failed")

    def test_a_server_that_completes_nothing_is_recorded_and_ends_with_1(self):
        with FakeServer() as a, FakeServer(faults=[None, "html"], repeat_fault=True) as b:
            outcome = measure(a, b, "--concurrency", 4, prompts=PROMPTS)
        self.assertEqual(
            (outcome.code, [r["kind"] for r in outcome.records]), (1, ["endpoint"] * 2)
        )
        self.assertEqual(outcome.endpoint("speculative")["completed"], 0)

    def test_no_thread_is_left_behind(self):
        before = {thread.ident for thread in threading.enumerate()}
        with FakeServer() as a, FakeServer(faults=[None, "html", "close-mid-body"]) as b:
            measure(a, b, "--concurrency", 8, prompts=PROMPTS)
            left = [
                t
                for t in threading.enumerate()
                if t.ident not in before
                and "work" in getattr(getattr(t, "_target", None), "__name__", "")
            ]
        for thread in left:
            thread.join(5)
        self.assertFalse([t for t in left if t.is_alive()])

    def test_a_system_without_further_threads_keeps_the_levels_before(self):
        real = threading.Thread.start

        def start(thread):
            if thread._target.__name__ == "work":
                raise RuntimeError("can't start new thread")
            real(thread)

        for levels, records in (("2", 0), ("1,2", 3)):
            with (
                self.subTest(levels),
                FakeServer("plain") as a,
                FakeServer("plain") as b,
                mock.patch.object(threading.Thread, "start", start),
            ):
                outcome = measure(a, b, "--concurrency", levels, prompts=["one", "two"])
                self.assertEqual((outcome.code, len(outcome.records)), (1, records), outcome.err)
                self.assertRegex(outcome.err, "lower --concurrency")

    def test_a_server_that_dies_halfway_is_said_even_to_cron(self):
        with (
            FakeServer("plain") as a,
            FakeServer(
                "vllm", speculation=Speculation(), faults=[None] * 4 + ["refuse"], repeat_fault=True
            ) as b,
        ):
            outcome = measure(
                a,
                b,
                "--quiet",
                "--warmup",
                "0",
                *ALARMS,
                prompts=["prompt %d" % i for i in range(12)],
            )
        self.assertEqual(outcome.endpoint("speculative")["failed"], 8)
        self.assertRegex(outcome.err, "8 of 12 requests failed")
        self.assertIn("closed the connection", outcome.err)
        self.assertEqual(outcome.out, "")


class Crossover(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with FakeServer() as a, FakeServer(speculation=Speculation()) as b:
            cls.record = measure(a, b, prompts=PROMPTS).comparison()

    def lines(self, *levels):
        records = [
            dict(
                self.record,
                concurrency=level,
                speedup=ratio
                and {
                    "ratio": ratio,
                    "low": ratio * 0.97,
                    "high": ratio * 1.03,
                    "level": 0.95,
                    "prompts": 4,
                },
            )
            for level, ratio in levels
        ]
        return "\n".join(ms.crossover_lines(records))

    def test_the_levels_between_which_the_gain_is_lost_are_named(self):
        self.assertRegex(self.lines((1, 1.8), (4, 1.2), (10, 0.9)), r"below 1 between 4 and 10\b")
        self.assertRegex(self.lines((1, 1.8), (4, 0.99), (10, 0.9)), r"below 1 between 1 and 4\b")

    def test_levels_are_taken_by_size_and_not_in_the_order_given(self):
        self.assertRegex(self.lines((10, 0.9), (1, 1.8), (4, 1.2)), r"below 1 between 4 and 10\b")

    def test_a_gain_that_is_never_lost_is_said(self):
        self.assertRegex(self.lines((1, 1.8), (4, 1.2)), r"does not fall below 1")

    def test_a_loss_from_the_start_is_said(self):
        self.assertRegex(self.lines((1, 0.9), (4, 0.8)), r"below 1 already at 1\b")

    def test_a_level_without_a_ratio_is_neither_gain_nor_loss(self):
        said = self.lines((1, 1.8), (4, None), (10, 0.9))
        self.assertRegex(said, r"below 1 between 1 and 10\b")

    def test_a_crossover_that_the_intervals_do_not_show_is_said_to_be_unsure(self):
        for levels, is_sure in (
            (((1, 1.8), (4, 0.9)), True),
            (((1, 1.8), (4, 0.99)), False),
            (((1, 1.02), (4, 0.9)), False),
            (((1, 0.98), (4, 1.01)), False),
            (((1, 1.8), (4, 1.01)), False),
            (((1, 1.8), (4, 1.2)), True),
            (((1, 1.8), (4, 0.9), (8, 0.99)), True),
            (((1, 1.8), (4, None)), False),
        ):
            with self.subTest(levels):
                self.assertEqual("not sure" not in self.lines(*levels), is_sure)

    def test_levels_without_any_ratio_show_no_crossover(self):
        self.assertIn("Crossover: not known (not sure", self.lines((1, None), (4, None)))

    def test_the_level_to_decide_by_is_named(self):
        self.assertRegex(self.lines((1, 1.8), (4, 0.9)), r"(?i)decide by the level")

    def test_every_level_is_a_row_within_100_columns(self):
        rows = self.lines((1, 1.8), (4, 1.2), (64, 0.9)).splitlines()
        self.assertTrue(all(len(row) <= 100 for row in rows[:-1]))
        self.assertEqual(
            [row.split()[0] for row in rows if re.match(r"\s*\d", row)], ["1", "4", "64"]
        )

    def test_a_run_over_levels_ends_with_the_crossover_and_report_repeats_it(self):
        with FakeServer() as a, FakeServer(speculation=Speculation()) as b:
            outcome = measure(a, b, "--concurrency", "1,2", prompts=PROMPTS)
        self.assertIn("Crossover:", outcome.out)
        told = run_main("report", "labbook.md", files={"labbook.md": outcome.files["labbook.md"]})
        self.assertIn("Crossover:", told.out)


class RefusedRequests(unittest.TestCase):
    """A server that refuses the request itself, before and after something was measured."""

    def test_a_refusal_after_something_was_measured_is_a_failed_request(self):
        with FakeServer("plain") as a, canned(REFUSED) as b:
            for flags in (("--order", "sequential"), ("--concurrency", "2,1")):
                outcome = measure(
                    a, b, "--model", "m", "--warmup", "0", *flags, prompts=["one", "two"]
                )
                self.assertEqual(outcome.code, 1)
                self.assertEqual(
                    (outcome.records[0]["failed"], outcome.records[1]["completed"]), (0, 0)
                )
                self.assertIn("a null removes a field", outcome.records[1]["first_error"])

    def test_a_first_request_that_is_refused_ends_it_while_no_server_has_answered_twice(self):
        for bad_first in (True, False):
            with canned(REFUSED) as bad, FakeServer("plain") as good:
                outcome = measure(
                    *((bad, good) if bad_first else (good, bad)),
                    "--model",
                    "m",
                    "--warmup",
                    "0",
                    *SAVE,
                    prompts=["one", "two"],
                )
            self.assertEqual((outcome.code, outcome.records), (2, []))
            self.assertIn("a null removes a field", outcome.err)
            self.assertEqual("run.jsonl" in outcome.files, not bad_first)


if __name__ == "__main__":
    unittest.main()
