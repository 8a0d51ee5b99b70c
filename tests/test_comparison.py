"""Comparison: saved runs as measured ones, several candidates, fitted costs, verdicts, runs that do not match."""

import copy
import json
import math
import random
import unittest

from tests.fakes import FakeServer, Speculation
from tests.support import (
    DRAFTS,
    SAVE,
    answer,
    compare,
    faster_pair,
    findings,
    measure,
    run_main,
    saved_run,
    speeds,
)

TEXT = " ".join("w%d" % i for i in range(24))
CHANGED = TEXT.replace("w9", "w9x")


def comparable(record):
    """A record as bytes, without times and ids."""
    return json.dumps(
        {key: value for key, value in record.items() if key not in ("recorded_at", "run_id")}
    ).encode()


def lines_of(saved, *arms):
    """The lines of a run file that belong to these arms."""
    return b"".join(line + b"\n" for line in saved.splitlines() if json.loads(line)["arm"] in arms)


BASELINE, FASTER = faster_pair()


class SavedAndCompared(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        texts = [TEXT, "two " + TEXT, "three " + TEXT]
        changed = [TEXT, "two " + CHANGED, "three " + TEXT]
        prompts = ["one", "two", "three"]
        with (
            FakeServer("llama.cpp", answers=dict(zip(prompts, texts))) as plain,
            FakeServer(
                "llama.cpp", answers=dict(zip(prompts, changed)), speculation=Speculation()
            ) as drafting,
        ):
            cls.both = measure(
                plain, drafting, "--repeats", "2", "--label", "night", *SAVE, prompts=prompts
            )
            cls.plain = measure(plain, None, "--repeats", "2", *SAVE, prompts=prompts)
            cls.drafting = measure(None, drafting, "--repeats", "2", *SAVE, prompts=prompts)
        assert cls.both.code == 0, cls.both.err
        cls.saved = cls.both.files["run.jsonl"]

    def test_compare_gives_the_comparison_record_of_measuring_byte_for_byte(self):
        again = compare(("run.jsonl", self.saved), flags=("--label", "night"))
        self.assertEqual(again.code, 0, again.err)
        self.assertEqual(comparable(again.comparison()), comparable(self.both.comparison()))
        self.assertEqual(again.comparison()["text_comparison"]["divergent"], 2)

    def test_compare_gives_the_endpoint_records_of_measuring_too(self):
        again = compare(("run.jsonl", self.saved), flags=("--label", "night"))
        for arm in ("baseline", "speculative"):
            self.assertEqual(comparable(again.endpoint(arm)), comparable(self.both.endpoint(arm)))

    def test_a_file_for_each_server_gives_the_same_record(self):
        halves = [
            (arm + ".jsonl", lines_of(self.saved, arm)) for arm in ("baseline", "speculative")
        ]
        again, right = (
            compare(*halves, flags=("--label", "night")).comparison(),
            copy.deepcopy(self.both.comparison()),
        )
        for record in (again, right):  # triage was the baseline's answer to a question about both
            for found in record["text_comparison"]["divergences"]:
                found["triage"] = None
        self.assertEqual(comparable(again), comparable(right))

    def test_compare_prints_the_same_report(self):
        again = compare(("run.jsonl", self.saved), flags=("--label", "night"))
        self.assertEqual(again.out, self.both.out)

    def test_servers_measured_one_after_the_other_are_compared(self):
        outcome = compare(
            ("plain.jsonl", self.plain.files["run.jsonl"]),
            ("draft.jsonl", self.drafting.files["run.jsonl"]),
        )
        self.assertEqual(outcome.code, 0, outcome.err)
        record, right = outcome.comparison(), self.both.comparison()
        self.assertEqual(set(record), set(right))
        self.assertEqual(record["acceptance"], right["acceptance"])
        self.assertEqual(
            record["text_comparison"]["divergent"], right["text_comparison"]["divergent"]
        )
        apart_from_timing = [
            [name for name in findings(each) if name not in ("stalls", "runs-apart")]
            for each in (record, right)
        ]
        self.assertEqual(*apart_from_timing)
        self.assertIn("runs-apart", findings(record))

    def test_run_files_are_read_and_never_changed(self):
        outcome = compare(BASELINE, FASTER)
        self.assertEqual(
            (outcome.files["plain.jsonl"], outcome.files["draft.jsonl"]), (BASELINE[1], FASTER[1])
        )

    def test_run_file_has_the_documented_lines(self):
        lines = [json.loads(line) for line in self.saved.splitlines()]
        self.assertEqual([line["kind"] for line in lines][:3], ["run", "run", "reading"])
        wanted = {
            "kind",
            "arm",
            "prompt_index",
            "prompt_id",
            "workload",
            "repeat",
            "place",
            "latency_s",
            "ttft_s",
            "decode_s",
            "completion_tokens",
            "prompt_tokens",
            "cached_tokens",
            "finish_reason",
            "content",
            "reasoning",
            "timings",
            "error",
        }
        readings = [line for line in lines if line["kind"] == "reading"]
        for line in readings:
            self.assertLessEqual(wanted, set(line))
        order = [(line["prompt_index"], line["repeat"], line["arm"]) for line in readings]
        self.assertEqual(
            order[:4],
            [(0, 0, "baseline"), (0, 0, "speculative"), (1, 0, "speculative"), (1, 0, "baseline")],
        )


class RunsThatDiffer(unittest.TestCase):
    """Runs whose conditions differ."""

    FIELDS = (
        ("max_tokens", {"request": {"max_tokens": 64}}),
        ("seed", {"request": {"seed": 7}}),
        ("temperature", {"request": {"temperature": 0.5}}),
        ("request extras", {"request": {"ignore_eos": True}}),
        ("concurrency", {"concurrency": 4}),
    )

    def test_each_condition_that_differs_is_refused_by_name(self):
        for name, conditions in self.FIELDS:
            outcome = compare(
                BASELINE, ("other.jsonl", saved_run("speculative", speeds(1.5), **conditions))
            )
            self.assertEqual((outcome.code, outcome.records, outcome.out), (2, [], ""), name)
            self.assertIn(name, outcome.err)
            self.assertIn("--force", outcome.err)
            for other in {field for field, _ in self.FIELDS} - {name}:
                self.assertNotIn(other, outcome.err, name)

    def test_other_prompts_are_refused(self):
        outcome = compare(
            BASELINE, ("other.jsonl", saved_run("speculative", speeds(1.5, prompts=11)))
        )
        self.assertEqual(outcome.code, 2)
        self.assertIn("prompts", outcome.err)

    def test_all_differing_conditions_are_named_at_once(self):
        other = saved_run(
            "speculative",
            speeds(1.5, prompts=11),
            request={"max_tokens": 64, "seed": 7, "ignore_eos": True},
        )
        outcome = compare(BASELINE, ("other.jsonl", other))
        for name in ("prompts", "max_tokens", "seed", "request extras"):
            self.assertIn(name, outcome.err)

    def test_concurrency_and_other_conditions_are_named_together(self):
        other = saved_run("speculative", speeds(1.5), request={"max_tokens": 64}, concurrency=4)
        outcome = compare(BASELINE, ("other.jsonl", other))
        self.assertEqual(outcome.code, 2)
        for name in ("concurrency", "max_tokens"):
            self.assertIn(name, outcome.err)

    def test_force_compares_and_marks_the_record(self):
        other = saved_run(
            "speculative", speeds(1.5, **DRAFTS), request={"max_tokens": 64, "seed": 7}
        )
        outcome = compare(BASELINE, ("other.jsonl", other), flags=("--force",))
        self.assertEqual(outcome.code, 0, outcome.err)
        (found,) = [f for f in outcome.comparison()["audit"] if f["finding"] == "conditions-differ"]
        for name in ("max_tokens", "seed"):
            self.assertIn(name, found["detail"])
        self.assertAlmostEqual(outcome.comparison()["speedup"]["ratio"], 1.5, delta=0.03)
        self.assertIn("conditions-differ", outcome.out)

    def test_force_compares_runs_of_other_prompts_as_far_as_they_go(self):
        other = saved_run("speculative", speeds(1.5, prompts=11, **DRAFTS))
        outcome = compare(BASELINE, ("other.jsonl", other), flags=("--force",))
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertEqual(outcome.comparison()["speedup"]["prompts"], 11)
        self.assertIn("conditions-differ", findings(outcome.comparison()))

    def test_force_compares_runs_of_other_concurrency(self):
        other = saved_run("speculative", speeds(1.5, **DRAFTS), concurrency=4)
        outcome = compare(BASELINE, ("other.jsonl", other), flags=("--force",))
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("conditions-differ", findings(outcome.comparison()))

    def test_force_leaves_like_runs_unmarked(self):
        self.assertNotIn(
            "conditions-differ",
            findings(compare(BASELINE, FASTER, flags=("--force",)).comparison()),
        )


class Candidates(unittest.TestCase):
    def test_candidates_are_named_by_their_arm(self):
        outcome = compare(
            BASELINE,
            ("a.jsonl", saved_run("k2", speeds(1.3))),
            ("b.jsonl", saved_run("k4", speeds(1.5))),
            flags=("--label", "night"),
        )
        self.assertEqual(
            [record["label"] for record in outcome.records],
            [
                "night/baseline",
                "night/k2",
                "night/k4",
                "night/k2/comparison",
                "night/k4/comparison",
            ],
        )

    def test_candidates_measured_under_the_default_name_are_told_apart_by_their_files(self):
        """Three servers measured one at a time, each as "speculative": only the files' names tell them apart."""
        files = [
            (name, saved_run("speculative", speeds(1.3)))
            for name in ("k2.jsonl", "k4.jsonl", "eagle.jsonl")
        ]
        labels = [
            record["label"]
            for record in compare(BASELINE, *files, flags=("--label", "night")).comparisons()
        ]
        self.assertEqual(
            labels, ["night/k2/comparison", "night/k4/comparison", "night/eagle/comparison"]
        )

    def test_a_run_measured_as_a_baseline_is_a_candidate_in_second_place(self):
        again = ("again.jsonl", saved_run("baseline", speeds(1.0, seed=1)))
        record = compare(BASELINE, again, flags=("--label", "night")).comparison()
        self.assertIn(record["label"], ("night/again/comparison", "night/comparison"))
        self.assertAlmostEqual(record["speedup"]["ratio"], 1.0, delta=0.02)

    def test_equal_arms_in_several_files_keep_records_of_their_own(self):
        outcome = compare(
            BASELINE,
            *((name, saved_run("k", speeds(1.3))) for name in ("a.jsonl", "b.jsonl", "c.jsonl")),
        )
        self.assertEqual(len({record["label"] for record in outcome.comparisons()}), 3)

    def test_one_file_may_hold_the_baseline_and_all_candidates(self):
        whole = (
            BASELINE[1]
            + saved_run("k2", speeds(1.3, **DRAFTS))
            + saved_run("k4", speeds(1.5, **DRAFTS))
        )
        records = compare(("all.jsonl", whole)).comparisons()
        self.assertEqual([round(record["speedup"]["ratio"], 1) for record in records], [1.3, 1.5])

    def test_ranking_is_by_speed_and_says_which_differences_are_real(self):
        outcome = compare(
            BASELINE,
            ("a.jsonl", saved_run("slow", speeds(1.1, seed=1, **DRAFTS))),
            ("b.jsonl", saved_run("first", speeds(1.5, seed=2, **DRAFTS))),
            ("c.jsonl", saved_run("close", speeds(1.497, seed=3, **DRAFTS))),
        )
        table = outcome.out[outcome.out.index("Candidate ") :].splitlines()[2:5]
        self.assertEqual({line.split()[0] for line in table[:2]}, {"first", "close"})
        self.assertEqual(table[2].split()[0], "slow")
        self.assertRegex(table[1], "no difference")
        self.assertRegex(table[2], r"\breal$")
        self.assertRegex(table[2], r"1\.10? ")

    def test_candidates_are_compared_with_each_other_pair_by_pair(self):
        """Prompts that differ by a factor of ten do not hide a steady ten percent between two candidates."""
        chance = random.Random(5)
        paces = [chance.uniform(5, 50) for _ in range(12)]

        def run(ratio):
            return [
                [answer(200, 200 / (pace * ratio * (1 + 0.001 * (i % 3))), **DRAFTS)]
                for i, pace in enumerate(paces)
            ]

        records = compare(
            BASELINE,
            ("a.jsonl", saved_run("a", run(1.0))),
            ("b.jsonl", saved_run("b", run(1.1))),
        ).comparisons()
        behind = records[0]["against_best"]
        self.assertEqual(behind["best"], "b")
        self.assertAlmostEqual(behind["ratio"], 1 / 1.1, delta=1e-9)
        self.assertLess(behind["high"], 0.95)
        self.assertIsNone(records[1]["against_best"])

    def test_requests_to_several_servers_rotate(self):
        with FakeServer("plain") as a, FakeServer("plain") as b, FakeServer("plain") as c:
            outcome = run_main(
                "--baseline-url",
                a.url,
                "--speculative-url",
                "k2=" + b.url,
                "--speculative-url",
                "k4=" + c.url,
                "--repeats",
                "2",
                "--warmup",
                "0",
                "--triage",
                "0",
                prompts=["one", "two", "three"],
            )
            asked = sorted(
                (chat["at"], name)
                for name, server in (("a", a), ("b", b), ("c", c))
                for chat in server.chats
            )
        self.assertEqual("".join(name for _, name in asked), "abcbcacab" + "bcacababc")
        self.assertEqual(
            [r["label"].split("/")[1] for r in outcome.records if r["kind"] == "endpoint"],
            ["baseline", "k2", "k4"],
        )


class FittedCosts(unittest.TestCase):
    """Several chain lengths of the same pair: the cost of verifying and that of drafting come apart."""

    T_S, VERIFICATION, DRAFT = 0.05, 1.25, 0.07

    def run_of(self, chain, accepted, steps=200):
        tokens = 1 + steps + accepted
        return answer(
            tokens,
            steps * self.T_S * (self.VERIFICATION + self.DRAFT * chain),
            drafted=chain * steps,
            accepted=accepted,
        )

    def outcome(self, *chains):
        plain = ("plain.jsonl", saved_run("baseline", [[answer(401, 400 * self.T_S)]]))
        accepted = {2: 250, 4: 380, 8: 480}
        return compare(
            plain,
            *(
                ("k%d.jsonl" % k, saved_run("k%d" % k, [[self.run_of(k, accepted[k])]]))
                for k in chains
            ),
        )

    def test_planted_costs_are_recovered_and_stand_in_every_record(self):
        for record in self.outcome(2, 4, 8).comparisons():
            fit = record["break_even"]["fit"]
            self.assertEqual(
                set(fit), {"draft_cost", "verification_cost", "runs", "draft_cost_error"}
            )
            self.assertAlmostEqual(fit["verification_cost"], self.VERIFICATION, delta=1e-9)
            self.assertAlmostEqual(fit["draft_cost"], self.DRAFT, delta=1e-9)
            self.assertEqual(fit["runs"], 3)

    def test_the_fit_of_three_tells_its_own_error_and_that_of_two_has_none(self):
        for chains, right in (((2, 4, 8), 0.0), ((2, 8), None)):
            error = self.outcome(*chains).comparisons()[0]["break_even"]["fit"]["draft_cost_error"]
            self.assertEqual(error is None, right is None)
            self.assertAlmostEqual(error or 0.0, 0.0)

    def test_the_fit_stands_under_its_own_candidates_only(self):
        """Drafts of varying length, as of a lookup, are not of the draft that was fitted."""
        lookup = answer(401, 250 * self.T_S, drafted=310, accepted=150)
        outcome = compare(
            ("plain.jsonl", saved_run("baseline", [[answer(401, 400 * self.T_S)]])),
            ("k2.jsonl", saved_run("k2", [[self.run_of(2, 250)]])),
            ("k8.jsonl", saved_run("k8", [[self.run_of(8, 480)]])),
            ("lookup.jsonl", saved_run("lookup", [[lookup]])),
        )
        fits = [record["break_even"]["fit"] for record in outcome.comparisons()]
        self.assertEqual([fit and fit["runs"] for fit in fits], [2, 2, None])

    def test_two_drafts_have_no_fit_together(self):
        for told in (
            [{"arm_extras": {"draft_model": name}} for name in ("small", "tiny")],
            [{"model": name} for name in ("small", "tiny")],
            [{"engine": name} for name in ("vllm", "sglang")],
        ):
            outcome = compare(
                ("plain.jsonl", saved_run("baseline", [[answer(401, 400 * self.T_S)]])),
                ("k2.jsonl", saved_run("k2", [[self.run_of(2, 250)]], **told[0])),
                ("k8.jsonl", saved_run("k8", [[self.run_of(8, 480)]], **told[1])),
            )
            fits = [record["break_even"]["fit"] for record in outcome.comparisons()]
            self.assertEqual(fits, [None, None], told)

    def test_settings_of_one_draft_are_fitted_whatever_their_names(self):
        """A router has a name for each setting of one model file."""
        plain = saved_run("baseline", [[answer(401, 400 * self.T_S)]])
        runs = [
            saved_run(
                "k%d" % k,
                [[self.run_of(k, accepted)]],
                model="m-k%d" % k,
                arm_extras={"num_draft_tokens": k},
                server={"model_file": "m.gguf"},
            )
            for k, accepted in ((2, 250), (8, 480))
        ]
        outcome = compare(("plain.jsonl", plain), *zip(("k2.jsonl", "k8.jsonl"), runs))
        self.assertTrue(all(r["break_even"]["fit"] for r in outcome.comparisons()))

    def test_a_draft_that_costs_less_than_can_be_measured_has_no_cost(self):
        fast = answer(601, 200 * 0.9 * self.T_S, drafted=800, accepted=400)
        why = compare(
            ("plain.jsonl", saved_run("baseline", [[answer(401, 400 * self.T_S)]])),
            ("fast.jsonl", saved_run("fast", [[fast]])),
        ).comparison()["break_even"]
        self.assertAlmostEqual(why["step_cost"], 0.9)
        self.assertIsNone(why["draft_cost"])

    def test_two_candidates_of_one_chain_length_give_no_fit(self):
        """The ends of answers cut their drafts differently: 800 and 798 in 200 steps are chains of 4 both."""
        cut_s = 200 * self.T_S * (self.VERIFICATION + self.DRAFT * 3.99)
        cut = answer(501, cut_s, drafted=798, accepted=300)
        outcome = compare(
            ("plain.jsonl", saved_run("baseline", [[answer(401, 400 * self.T_S)]])),
            ("one.jsonl", saved_run("one", [[self.run_of(4, 380)]])),
            ("two.jsonl", saved_run("two", [[cut]])),
        )
        self.assertEqual(
            [(r["break_even"]["chain"], r["break_even"]["fit"]) for r in outcome.comparisons()],
            [(4, None), (4, None)],
        )

    def test_advice_rests_on_the_fit_and_says_so(self):
        outcome = self.outcome(2, 8)
        why = outcome.comparisons()[1]["break_even"]
        self.assertRegex(outcome.out, "rests on this fit")
        alpha = why["alpha"]
        self.assertAlmostEqual(sum(alpha**i for i in range(1, 9)), 480 / 200, delta=1e-9)
        right = {
            k: sum(alpha**i for i in range(k + 1)) / (self.VERIFICATION + k * self.DRAFT)
            for k in range(1, 9)
        }
        best = max(right, key=right.get)
        self.assertEqual(why["best_chain"]["chain"], best)
        self.assertAlmostEqual(why["best_chain"]["predicted_speedup"], right[best], delta=1e-9)

    def test_one_chain_length_cannot_tell_the_two_apart_and_the_report_says_so(self):
        outcome = self.outcome(4)
        why = outcome.comparison()["break_even"]
        self.assertIsNone(why["fit"])
        self.assertAlmostEqual(
            why["draft_cost"], (self.VERIFICATION + 4 * self.DRAFT - 1) / 4, delta=1e-9
        )
        self.assertRegex(
            outcome.out,
            "one chain length cannot tell how much of that is the growth of the verification",
        )

    def test_tokens_per_step_over_step_cost_is_the_measured_decode_ratio(self):
        """By construction: a check of the book-keeping, not a prediction."""
        for record in self.outcome(2, 4).comparisons():
            why = record["break_even"]
            self.assertAlmostEqual(
                why["tokens_per_step"] / why["step_cost"],
                record["decode_speedup"]["ratio"],
                delta=1e-9,
            )

    def test_a_bar_above_the_chain_cannot_pay(self):
        slow = answer(301, 200 * self.T_S * 4.0, drafted=400, accepted=100)
        outcome = compare(
            ("b.jsonl", saved_run("baseline", [[answer(401, 400 * self.T_S)]])),
            ("s.jsonl", saved_run("speculative", [[slow]])),
        )
        why = outcome.comparison()["break_even"]
        self.assertEqual(
            (why["applies"], why["alpha_needed"], why["chain"]), ("cannot-pay", None, 2)
        )
        self.assertRegex(outcome.out, "cannot pay at any acceptance")

    def test_acceptance_that_is_known_is_not_called_missing_where_the_step_cost_is(self):
        """Cases C12 and C13: plain answers and a metrics page tell the acceptance, and nothing tells a decode time."""
        for accepted, alpha in (((2, 0, 1), None), ((0,), 0.0)):
            with (
                self.subTest(accepted),
                FakeServer("vllm", details=False) as a,
                FakeServer("vllm", details=False, speculation=Speculation(3, accepted)) as b,
            ):
                why = measure(a, b, "--no-stream", prompts=["one", "two"]).comparison()[
                    "break_even"
                ]
                self.assertNotEqual(why["applies"], "no-acceptance")
                self.assertIsNone(why["step_cost"])
                self.assertIsNotNone(why["alpha"])
                if alpha is not None:
                    self.assertEqual(why["alpha"], alpha)


class VerdictsInWords(unittest.TestCase):
    def mixed(self, *flags):
        kinds = ["copy"] * 4 + ["open"] * 4 + ["talk"] * 4
        answers = speeds(1.8, prompts=4, **DRAFTS) + speeds(0.8, prompts=4, seed=1, **DRAFTS)
        answers += speeds(1.0, 0.2, prompts=4, seed=2, **DRAFTS)
        return compare(
            ("b.jsonl", saved_run("baseline", speeds(1.0, 0.0), kinds)),
            ("s.jsonl", saved_run("speculative", answers, kinds)),
            flags=flags,
        )

    def test_a20_when_verdicts_differ_the_sentence_names_each_kind_of_work(self):
        quoted = self.mixed().out.splitlines()[-1]
        for words in (
            r"(?<!NOT )PAYS on copy: 1\.[78]\dx \(",
            r"DOES NOT PAY on open: 0\.[78]\dx \(",
            r"UNDECIDED on talk: [01]\.\d\dx \(",
        ):
            self.assertRegex(quoted, words)

    def test_one_verdict_for_all_gives_one_quotable_sentence(self):
        quoted = compare(BASELINE, FASTER).out.splitlines()[-1]
        self.assertRegex(quoted, r"^PAYS on .*: 1\.5\dx \(1\.\d\d to 1\.\d\d\)")

    def test_min_gain_moves_the_threshold(self):
        for gain, verdict in (
            ("0", "pays"),
            ("0.4", "pays"),
            ("0.52", "undecided"),
            ("0.8", "does-not-pay"),
        ):
            record = compare(
                BASELINE,
                ("s.jsonl", saved_run("speculative", speeds(1.5, 0.03, seed=3, **DRAFTS))),
                flags=("--min-gain", gain),
            ).comparison()
            self.assertEqual(record["verdict"], verdict, record["speedup"])

    def test_undecided_says_how_many_more_prompts_might_settle_it(self):
        outcome = compare(
            BASELINE, ("s.jsonl", saved_run("speculative", speeds(1.1, 0.3, seed=4, **DRAFTS)))
        )
        self.assertEqual(outcome.comparison()["verdict"], "undecided")
        self.assertRegex(outcome.out, r"(About \d+|more than 100) more prompts might settle it")

    def test_decided_runs_ask_for_no_more_prompts(self):
        self.assertNotIn("more prompts", compare(BASELINE, FASTER).out)

    def test_a_single_prompt_is_undecided_and_says_that_it_has_no_interval(self):
        outcome = compare(
            ("b.jsonl", saved_run("baseline", speeds(1.0, prompts=1))),
            ("s.jsonl", saved_run("speculative", speeds(3.0, prompts=1, **DRAFTS))),
        )
        self.assertEqual(outcome.comparison()["verdict"], "undecided")
        self.assertIn("few-prompts", findings(outcome.comparison()))
        self.assertIn("no interval", outcome.out)

    def test_stalls_are_counted_in_the_audit_and_stay_in_the_figures(self):
        def repeats(ratio, seed):
            chance = random.Random(seed)
            return [
                [
                    answer(200, 200 / (20 * ratio * math.exp(chance.gauss(0, 0.01))), **DRAFTS)
                    for _ in range(3)
                ]
                for _ in range(12)
            ]

        answers = repeats(1.5, 1)
        answers[3][1] = answer(200, 100.0, **DRAFTS)
        record = compare(
            ("b.jsonl", saved_run("baseline", repeats(1.0, 2))),
            ("s.jsonl", saved_run("speculative", answers)),
        ).comparison()
        (found,) = [found for found in record["audit"] if found["finding"] == "stalls"]
        self.assertEqual(found["count"], 1)
        self.assertLess(record["speedup_these_prompts"]["ratio"], 0.97 * record["speedup"]["ratio"])
        self.assertLess(record["speculative_tokens_per_s"], 25)

    def test_fail_on_slower_is_an_exit_code(self):
        slower = ("s.jsonl", saved_run("speculative", speeds(0.8, **DRAFTS)))
        self.assertEqual(compare(BASELINE, slower).code, 0)
        outcome = compare(BASELINE, slower, flags=("--fail-on", "slower", "--quiet"))
        self.assertEqual((outcome.code, outcome.out), (3, ""))
        self.assertIn("SLOWER", outcome.err)
        self.assertEqual(len(outcome.records), 3)

    def test_changed_text_stands_in_the_line_with_the_speedup(self):
        answers = speeds(1.5, **DRAFTS)
        answers[2][0]["content"] = "another text"
        outcome = compare(BASELINE, ("s.jsonl", saved_run("speculative", answers)))
        (line,) = [line for line in outcome.out.splitlines() if line.startswith("PAYS")]
        self.assertRegex(line, r"1\.5\dx.*text changed in 1 of 12")


if __name__ == "__main__":
    unittest.main()
