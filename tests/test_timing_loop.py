"""The plan and the loop that carries it out: order, warm-up, what is read around the blocks."""

import contextlib
import functools
import itertools
import json
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation, sum_counts
from tests.support import (
    PROMPTS,
    at_most,
    measure,
)


def shots(*args, **options):
    return [shot for block in ms.make_plan(*args, **options) for shot in block.shots]


def pairs(*args, **options):
    """[((prompt, repeat), [arms in order])] of a paired plan."""
    return [
        (key, [shot.arm for shot in group])
        for key, group in itertools.groupby(
            shots(*args, **options), lambda shot: (shot.prompt, shot.repeat)
        )
    ]


def text_of(chat):
    return chat["body"]["messages"][-1]["content"]


class Plan(unittest.TestCase):
    def test_the_paired_order_flips_at_every_pair(self):
        for workloads in (["a"] * 5, ["a", "b", "a", "c", "b", "a"], ["a"]):
            for repeats in (1, 2, 3):
                with self.subTest(workloads=workloads, repeats=repeats):
                    plan = pairs(workloads, repeats, 2)
                    for round_ in range(repeats):
                        firsts = [arms[0] for (_, repeat), arms in plan if repeat == round_]
                        self.assertEqual(firsts, [(i + round_) % 2 for i in range(len(workloads))])
                    self.assertTrue(all(sorted(arms) == [0, 1] for _, arms in plan))

    def test_no_prompt_keeps_its_order(self):
        orders = {}
        for (prompt, _), arms in pairs(["a", "b", "a", "b", "b"], 2, 2):
            orders.setdefault(prompt, []).append(arms)
        self.assertTrue(all(first != second for first, second in orders.values()))

    def test_rounds_are_outermost_and_prompts_grouped_by_workload(self):
        self.assertEqual(
            [key for key, _ in pairs(["a", "b", "a"], 2, 2)],
            [(0, 0), (2, 0), (1, 0), (0, 1), (2, 1), (1, 1)],
        )
        self.assertEqual(
            [block.workload for block in ms.make_plan(["a", "b", "a"], 2, 2)], ["a", "b", "a", "b"]
        )

    def test_three_arms_take_each_place_equally_often(self):
        plan = pairs(["a"] * 6, 3, 3)
        self.assertTrue(all(sorted(arms) == [0, 1, 2] for _, arms in plan))
        for round_ in range(3):
            firsts = [arms[0] for (_, repeat), arms in plan if repeat == round_]
            self.assertTrue(all(a != b for a, b in zip(firsts, firsts[1:])))
        places = sorted((shot.arm, shot.place) for shot in shots(["a"] * 6, 3, 3))
        self.assertEqual([len(list(group)) for _, group in itertools.groupby(places)], [6] * 9)
        by_prompt = {}
        for (prompt, _), arms in plan:
            by_prompt.setdefault(prompt, set()).add(arms[0])
        self.assertEqual(list(by_prompt.values()), [{0, 1, 2}] * 6)

    def test_places_are_those_in_which_requests_are_sent(self):
        for arms in (1, 2, 3, 4):
            for _, group in itertools.groupby(
                shots(["a", "b"] * 3, 2, arms), lambda shot: (shot.prompt, shot.repeat)
            ):
                self.assertEqual([shot.place for shot in group], list(range(arms)))

    def test_sequential_finishes_one_arm_first_in_the_same_inner_order(self):
        plan = shots(["a", "b", "a"], 2, 2, "sequential")
        self.assertEqual([shot.arm for shot in plan], [0] * 6 + [1] * 6)
        inner = [[(shot.prompt, shot.repeat) for shot in plan if shot.arm == arm] for arm in (0, 1)]
        self.assertEqual(inner[0], inner[1])
        self.assertEqual(inner[0], [(0, 0), (2, 0), (1, 0), (0, 1), (2, 1), (1, 1)])

    def test_every_arm_gets_every_prompt_once_a_round(self):
        for arms, order in itertools.product((1, 2, 3), ("paired", "sequential")):
            wanted = sorted(itertools.product(range(arms), range(5), range(2)))
            self.assertEqual(
                sorted((s.arm, s.prompt, s.repeat) for s in shots(list("abcab"), 2, arms, order)),
                wanted,
            )


class PlanAsTheStatisticsNeedIt(unittest.TestCase):
    """What the statistics rely on."""

    def test_order_flips_at_every_pair_and_every_round_starts_with_the_other(self):
        firsts = [
            [shot.arm for shot in block.shots if shot.place == 0]
            for block in ms.make_plan(["x"] * 4, 3, 2)
        ]
        self.assertEqual(firsts, [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])

    def test_candidates_rotate_so_that_each_has_every_place_equally_often(self):
        for arms in (2, 3, 4):
            shots = [shot for block in ms.make_plan(["x"] * 12, arms, arms) for shot in block.shots]
            for arm in range(arms):
                for place in range(arms):
                    self.assertEqual(sum((s.arm, s.place) == (arm, place) for s in shots), 12)
            for prompt in range(12):  # no prompt always keeps its order
                self.assertEqual(
                    {s.arm for s in shots if s.prompt == prompt and s.place == 0}, set(range(arms))
                )

    def test_all_arms_of_a_pair_stand_back_to_back(self):
        for block in ms.make_plan(["a", "b", "a", "b"], 2, 3):
            pairs = [(shot.prompt, shot.repeat) for shot in block.shots]
            self.assertEqual(pairs[::3], pairs[1::3])
            self.assertEqual(pairs[::3], pairs[2::3])
            self.assertEqual(len(set(pairs)), len(pairs) // 3)


class PlanUnderLoad(unittest.TestCase):
    def arms(self, *args, **options):
        plan = ms.make_plan(*args, **options)
        self.assertTrue(all(len({shot.arm for shot in block.shots}) == 1 for block in plan))
        return [block.shots[0].arm for block in plan]

    def test_blocks_alternate_abba(self):
        self.assertEqual(self.arms(["a", "a"], 4, 2, concurrency=2), [0, 1, 1, 0, 0, 1, 1, 0])
        self.assertEqual(self.arms(["a", "b", "c"], 1, 2, concurrency=2), [0, 1, 1, 0, 0, 1])

    def test_each_round_starts_with_the_other_order(self):
        for kinds in (1, 2, 3, 4):
            plan = self.arms([str(i) for i in range(kinds)], 2, 2, concurrency=4)
            self.assertEqual((plan[0], plan[2 * kinds]), (0, 1), kinds)

    def test_both_servers_get_the_same_requests_in_every_block(self):
        plan = ms.make_plan(["a", "a", "b"], 2, 2, concurrency=3)
        for first, second in zip(plan[::2], plan[1::2]):
            self.assertEqual(
                [(s.prompt, s.repeat) for s in first.shots],
                [(s.prompt, s.repeat) for s in second.shots],
            )

    def test_a_request_is_never_planned_twice_under_one_name(self):
        """Comparison is by prompt and repeat: two requests with one name would be taken for each other."""
        for level in (2, 10, 64):
            names = [
                (s.arm, s.prompt, s.repeat)
                for block in ms.make_plan(["a", "a", "b"], 3, 2, concurrency=level)
                for s in block.shots
            ]
            self.assertEqual(len(names), len(set(names)))

    def test_a_block_is_long_enough_to_keep_the_level_filled(self):
        for level in (2, 10, 64):
            for block in ms.make_plan(["a"] * 5 + ["b"], 1, 2, concurrency=level):
                self.assertGreaterEqual(len(block.shots), 2 * level)

    def test_a_block_takes_all_prompts_before_copies_and_copies_are_repeats(self):
        for prompts, level, copies in ((5, 2, 1), (5, 3, 2), (12, 4, 1), (1, 4, 8)):
            plan = ms.make_plan(["a"] * prompts, 2, 2, concurrency=level)
            for number, block in enumerate(plan):
                first = number // 2 * copies
                self.assertEqual(
                    [(shot.repeat, shot.prompt) for shot in block.shots],
                    list(itertools.product(range(first, first + copies), range(prompts))),
                )

    def test_four_pairs_of_blocks_are_measured_under_load_unless_told_otherwise(self):
        for flags, repeats in (
            (("--concurrency", "1,2"), [1, 4]),
            (("--concurrency", "1,2", "--repeats", "2"), [2, 2]),
        ):
            with FakeServer() as a:
                outcome = measure(a, None, *flags, prompts=PROMPTS)
            self.assertEqual([r["repeats"] for r in outcome.records], repeats)
            self.assertEqual([r["requests"] for r in outcome.records], [4 * n for n in repeats])


class ServersThatOnlyFail(unittest.TestCase):
    """They cost one whole wait or two time-outs, then little; in modelled time."""

    def setUp(self):
        self.now = 0.0
        patience = functools.partial(ms.Patience, sleep=self.sleep, clock=lambda: self.now)
        patch = mock.patch.object(ms, "Patience", patience)
        patch.start()
        self.addCleanup(patch.stop)

    def sleep(self, seconds):
        self.now += seconds

    def dead(self, fault, *flags, arms=1, **options):
        """Measure the 12 built-in prompts on servers that always answer so."""
        options = {"faults": [fault], "repeat_fault": True, **options}
        with FakeServer("plain", **options) as a, FakeServer("plain", **options) as b:
            return measure(a, b if arms > 1 else None, *flags)

    def test_503_and_429_for_ever_end_within_150_s_and_what_was_tried_is_kept(self):
        for fault in ("503", "429", "503-retry-after"):
            for arms in (1, 2):
                with self.subTest(fault, arms=arms):
                    self.now = 0.0
                    outcome = self.dead(fault, arms=arms, retry_after_s=20)
                    self.assertLessEqual(self.now, 150)
                    self.assertGreaterEqual(self.now, 40)
                    self.assertEqual(outcome.code, 1, outcome.err)
                    record = outcome.endpoint()
                    self.assertEqual((record["completed"], record["interrupted"]), (0, True))
                    self.assertEqual(record["failed"], 9)  # and the warm-up
                    self.assertIn("10 requests in a row failed", outcome.err)

    def hanging(self, answers=()):
        real, limits = ms.complete, []

        def complete(endpoint, messages):
            limits.append(endpoint.timeout_s)
            if len(limits) in answers:
                return real(endpoint, messages)
            self.now += endpoint.timeout_s
            raise ms.RequestFailed(f"no answer within {endpoint.timeout_s:g} s")

        with mock.patch.object(ms, "complete", complete):
            return self.dead(None, "--timeout", "10"), limits

    def test_a_server_that_hangs_ends_within_the_warm_up_one_request_and_10_s(self):
        outcome, limits = self.hanging()
        self.assertEqual((outcome.code, limits), (1, [10.0] * 2 + [1.0] * 8))
        self.assertLessEqual(self.now, (1 + 1) * 10 + 10)

    def test_a_server_that_answers_again_has_its_whole_limit_again(self):
        outcome, limits = self.hanging(answers=(4, 7, 8, 9, 10, 11, 12, 13))
        self.assertEqual(limits, [10.0, 10.0, 1.0, 1.0, 10.0, 10.0, 1.0] + [10.0] * 6)
        self.assertEqual((outcome.code, outcome.endpoint()["completed"]), (0, 8))

    def test_a_server_that_gets_ready_within_a_minute_is_waited_for_each_time(self):
        with FakeServer("plain", faults=["503", "503", None] * 4, words=3) as server:
            outcome = measure(server, None, prompts=["a", "b", "c"])
        self.assertEqual((outcome.code, outcome.endpoint()["completed"]), (0, 3))

    def test_ten_failures_of_any_kind_end_it_under_load_too_and_no_level_follows(self):
        for fault in ("500", "no-finish", "error-in-stream"):
            with self.subTest(fault):
                outcome = self.dead(fault, "--concurrency", "2,4")
                self.assertEqual(outcome.code, 1)
                self.assertEqual([r["concurrency"] for r in outcome.records], [2])
                self.assertLessEqual(outcome.endpoint()["failed"], 12)

    def test_the_other_arm_keeps_what_it_completed(self):
        dying = [None] * 3 + ["500"]
        with (
            FakeServer("plain", words=3) as a,
            FakeServer("plain", words=3, faults=dying, repeat_fault=True) as b,
        ):
            outcome = measure(a, b, "--save-run", "run.jsonl", "--repeats", "2")
        self.assertEqual(outcome.code, 1, outcome.err)
        self.assertEqual(outcome.endpoint("speculative")["completed"], 2)
        self.assertGreaterEqual(outcome.endpoint()["completed"], 11)
        self.assertEqual(outcome.endpoint("speculative")["failed"], 10)
        self.assertIn("interrupted", [entry["finding"] for entry in outcome.comparison()["audit"]])

    def test_nine_failures_in_a_row_end_nothing(self):
        with FakeServer("plain", words=3, faults=[None] + ["500"] * 9) as server:
            outcome = measure(server, None)
        self.assertEqual((outcome.code, outcome.endpoint()["completed"]), (0, 3))


class PlanCarriedOut(unittest.TestCase):
    def test_requests_go_out_one_at_a_time_in_the_order_of_the_plan(self):
        with FakeServer() as a, FakeServer() as b:
            measure(a, b, "--repeats", 2, "--warmup", 0, prompts=PROMPTS)
            sent = sorted(
                [
                    (chat["at"], "AB"[i], text_of(chat))
                    for i, server in enumerate((a, b))
                    for chat in server.chats
                ]
            )
        arms = ["AB", "BA", "AB", "BA", "BA", "AB", "BA", "AB"]
        self.assertEqual(
            [(arm, text) for _, arm, text in sent],
            [(arm, prompt) for pair, prompt in zip(arms, PROMPTS * 2) for arm in pair],
        )

    def test_warm_up_is_outside_every_count_time_and_sample(self):
        for warmup in (0, 1, 3):
            with (
                self.subTest(warmup),
                FakeServer("vllm") as a,
                FakeServer("vllm", speculation=Speculation(4, (4, 2, 0))) as b,
            ):
                outcome = measure(a, b, "--warmup", warmup, prompts=PROMPTS)
                self.assertEqual([len(a.chats), len(b.chats)], [warmup + 4] * 2)
                truth = sum_counts(b.given[warmup:])
                record = outcome.endpoint("speculative")
                self.assertEqual(
                    (record["requests"], record["output_tokens"], record["warmup"]),
                    (4, truth.tokens, warmup),
                )
                acceptance = record["acceptance"]
                self.assertEqual(
                    (acceptance["steps"], acceptance["drafted"], acceptance["accepted"]),
                    (truth.steps, truth.drafted, truth.accepted),
                )
                delta = {
                    name.split("{")[0]: value
                    for name, value in record["spec_metrics_delta"].items()
                }
                self.assertEqual(delta["vllm:spec_decode_num_draft_tokens_total"], truth.drafted)

    def test_a_slow_first_request_is_no_part_of_a_time(self):
        def slow_first(server):
            def answers(prompt, n):
                server.first_delay_s = 0.0 if server.chats[1:] else 1.0

            return answers

        with FakeServer() as a, FakeServer() as b:
            a.answers, b.answers = slow_first(a), slow_first(b)
            outcome = measure(a, b, prompts=PROMPTS[:2])
        for arm in ("baseline", "speculative"):
            self.assertLess(outcome.endpoint(arm)["wall_s"], 1.0)

    def test_all_arms_get_the_same_requests_in_the_same_order(self):
        for order, warmup, count in (("paired", 2, 3), ("sequential", 1, 2), ("paired", 0, 2)):
            with self.subTest(order=order, arms=count), contextlib.ExitStack() as stack:
                servers = [stack.enter_context(FakeServer()) for _ in range(count)]
                more = [
                    word
                    for i, s in enumerate(servers[2:])
                    for word in ("--speculative-url", "k%d=%s" % (i, s.url))
                ]
                outcome = measure(
                    *servers[:2],
                    *more,
                    "--order",
                    order,
                    "--warmup",
                    warmup,
                    "--repeats",
                    2,
                    "--triage",
                    0,
                    prompts=PROMPTS,
                )
                self.assertEqual(outcome.code, 0, outcome.err)
                bodies = [[chat["body"] for chat in server.chats] for server in servers]
                self.assertEqual(len(bodies[0]), warmup + 8)
                for other in bodies[1:]:
                    self.assertEqual(other, bodies[0])

    def test_the_metrics_are_read_around_each_group_of_work(self):
        """Another client's traffic during one group is not booked on the other."""
        prompts = json.dumps(
            [{"prompt": "p%d" % i, "workload": "odd" if i % 2 else "even"} for i in range(4)]
        )
        with FakeServer("vllm") as a, FakeServer("vllm", speculation=Speculation(4, (4,))) as b:
            b.answers = lambda prompt, n: " ".join(["w"] * (41 if prompt in ("p1", "p3") else 21))
            outcome = measure(
                a,
                b,
                "--prompts",
                "w.json",
                files={"w.json": prompts},
            )
            given = dict(zip(["warm-up", "even", "even", "odd", "odd"], b.given)), b.given
        parts = {part["workload"]: part for part in outcome.endpoint("speculative")["workloads"]}
        self.assertEqual(list(parts), ["even", "odd"])
        for name, truth in (
            ("even", sum_counts(given[1][1:3])),
            ("odd", sum_counts(given[1][3:5])),
        ):
            self.assertEqual(
                (parts[name]["output_tokens"], parts[name]["acceptance"]["drafted"]),
                (truth.tokens, truth.drafted),
            )


class WorkersHandOver(unittest.TestCase):
    def test_an_exception_in_a_thread_ends_the_run_and_never_hangs_it(self):
        """Whatever a thread could not handle is raised where the user sees it."""
        calls = itertools.count()

        def breaks(*args, **options):
            if next(calls) == 5:
                raise ZeroDivisionError("a bug of ours")
            return take(*args, **options)

        take = ms.take_reading
        with (
            FakeServer() as server,
            at_most(20),
            mock.patch.object(ms, "take_reading", breaks),
            self.assertRaisesRegex(ZeroDivisionError, "a bug of ours"),
        ):
            measure(server, None, "--concurrency", 4, "--warmup", 0, prompts=PROMPTS)


if __name__ == "__main__":
    unittest.main()
