"""The arithmetic of speculation: published values, substitution, brute force; and the `break-even` command."""

import json
import math
import random
import unittest

import measure_speculative as ms
from tests.support import (
    run_main,
)

# Issue values, to four digits: the acceptance that a chain needs at a draft cost.
BREAK_EVEN = {
    (2, 0.10): 0.1708,
    (2, 0.20): 0.3062,
    (2, 0.35): 0.4747,
    (4, 0.10): 0.2871,
    (4, 0.20): 0.4553,
    (4, 0.35): 0.6222,
    (8, 0.10): 0.4448,
    (8, 0.20): 0.6206,
    (8, 0.35): 0.7588,
}


# Leviathan et al. 2023, table 1: improvement in operations-free time, c = 0.
LEVIATHAN = {
    (0.6, 2): 1.96,
    (0.7, 3): 2.53,
    (0.8, 2): 2.44,
    (0.8, 5): 3.69,
    (0.9, 2): 2.71,
    (0.9, 10): 6.86,
}


def enumerated_tokens(alpha, k):
    """Expected tokens by adding up what every outcome of a chain brings: no formula of the program is used."""
    return sum((j + 1) * alpha**j * (1 - alpha) for j in range(k)) + (k + 1) * alpha**k


def break_even(*flags):
    outcome = run_main("break-even", *flags)
    assert outcome.code == 0, outcome.err
    return outcome.out


def table_of(text, heading):
    """{(chain, cost): cell} of the first table below a heading; a cell may hold a blank, as in "cannot pay"."""
    lines = text[text.index(heading) :].splitlines()[1:]
    costs = [float(word[2:]) for word in lines[0].split()[1:]]
    cells = {}
    for line in lines[2:]:
        if not line.startswith("k="):
            break
        name, *rest = line.replace("cannot pay", "cannot-pay").split()
        cells.update({(int(name[2:]), cost): cell for cost, cell in zip(costs, rest)})
    return cells


class Formulas(unittest.TestCase):
    def test_expected_tokens_agree_with_leviathan_table_1(self):
        for (alpha, k), published in LEVIATHAN.items():
            self.assertAlmostEqual(
                ms.speedup(alpha, k, 0.0), published, delta=0.005, msg=(alpha, k)
            )

    def test_expected_tokens_agree_with_adding_up_every_outcome(self):
        chance = random.Random(1)
        for _ in range(2000):
            alpha, k = chance.random(), chance.randrange(0, 30)
            self.assertAlmostEqual(
                ms.expected_tokens(alpha, k), enumerated_tokens(alpha, k), delta=1e-12 * (k + 1)
            )

    def test_edge_inputs_give_the_values_that_follow_from_their_meaning(self):
        for (alpha, k, c), right in {
            (0.0, 0, 0.0): 1.0,
            (0.0, 5, 0.0): 1.0,
            (1.0, 5, 0.0): 6.0,
            (1.0, 0, 0.0): 1.0,
            (0.7, 0, 3.0): 1.0,
            (1.0, 4, 1.0): 1.0,
            (1.0, 4, 2.0): 5 / 9,
            (0.0, 4, 0.1): 1 / 1.4,
            (0.5, 1, 0.5): 1.0,
            (1 - 1e-12, 4, 0.0): 5.0,
        }.items():
            self.assertAlmostEqual(ms.speedup(alpha, k, c), right, delta=1e-10, msg=(alpha, k, c))

    def test_what_is_no_probability_length_or_cost_is_refused_in_words(self):
        for alpha, k, c in (
            (-0.1, 2, 0.1),
            (1.1, 2, 0.1),
            (math.nan, 2, 0.1),
            (0.5, -1, 0.1),
            (0.5, 2, -0.1),
            (0.5, 2, math.nan),
            (0.5, 2, math.inf),
        ):
            with self.assertRaises(ms.UsageError, msg=(alpha, k, c)) as caught:
                ms.speedup(alpha, k, c)
            self.assertRegex(str(caught.exception), "alpha|chain length|draft cost")

    def test_break_even_put_back_into_the_speedup_gives_one(self):
        chance, kinds = random.Random(2), set()
        for _ in range(5000):
            k, c = (
                chance.randrange(1, 40),
                chance.choice((chance.random(), chance.random() ** 4, 1.5 * chance.random())),
            )
            applies, alpha = ms.alpha_needed(k, 1 + k * c)
            kinds.add(applies)
            if applies == "alpha":
                self.assertTrue(0 <= alpha <= 1)
                self.assertAlmostEqual(ms.speedup(alpha, k, c), 1.0, delta=1e-9, msg=(k, c))
            else:  # even a draft that is always accepted costs more than it brings
                self.assertEqual((applies, alpha), ("cannot-pay", None))
                self.assertLess(ms.speedup(1.0, k, c), 1.0, (k, c))
        self.assertEqual(kinds, {"alpha", "cannot-pay"})

    def test_alpha_from_accepted_per_step_gives_that_many_back(self):
        chance = random.Random(3)
        for _ in range(3000):
            k = chance.randrange(1, 20)
            accepted = k * chance.random()
            alpha = ms.alpha_for_accepted(accepted, k)
            self.assertAlmostEqual(enumerated_tokens(alpha, k) - 1, accepted, delta=1e-9 * k)
        self.assertEqual((ms.alpha_for_accepted(0.0, 4), ms.alpha_for_accepted(4.0, 4)), (0.0, 1.0))
        self.assertIsNone(ms.alpha_for_accepted(4.01, 4))

    def test_a_step_no_dearer_than_a_plain_one_pays_at_any_acceptance(self):
        for k, cost in ((1, 0.9275), (4, 1.0), (4, 0.5), (0, 1.0)):
            self.assertEqual(ms.alpha_needed(k, cost), ("any", 0.0))

    def test_a_bar_above_the_longest_step_cannot_pay(self):
        self.assertEqual(ms.alpha_needed(4, 5.001), ("cannot-pay", None))
        self.assertEqual(ms.alpha_needed(0, 1.001), ("cannot-pay", None))
        applies, alpha = ms.alpha_needed(4, 5.0)  # the limit itself: every draft has to be right
        self.assertEqual(applies, "alpha")
        self.assertAlmostEqual(alpha, 1.0, delta=1e-9)


class BestChain(unittest.TestCase):
    def test_best_chain_is_short_at_middling_acceptance_and_long_at_high(self):
        for c in (0.10, 0.11, 0.12):
            for alpha in (0.48, 0.5, 0.52):
                self.assertIn(ms.best_chain(alpha, c)[0], (1, 2), (alpha, c))
            self.assertIn(ms.best_chain(0.9, c)[0], range(6, 11), c)

    def test_best_chain_is_the_best_of_all_lengths_tried_one_by_one(self):
        for alpha in (0.0, 0.2, 0.5, 0.8, 0.9, 0.97, 0.99):
            for c in (0.001, 0.01, 0.1, 0.3, 1.0, 2.0):
                best = max(range(600), key=lambda k: enumerated_tokens(alpha, k) / (1 + k * c))
                chain, ratio = ms.best_chain(alpha, c)
                self.assertEqual(chain, best, (alpha, c))
                self.assertAlmostEqual(
                    ratio, enumerated_tokens(alpha, best) / (1 + best * c), delta=1e-9
                )

    def test_where_longer_is_always_better_no_length_is_the_best(self):
        for alpha, c, limit in (
            (1.0, 0.1, 10.0),
            (1.0, 0.5, 2.0),
            (0.8, 0.0, 5.0),
            (0.5, 0.0, 2.0),
        ):
            chain, ratio = ms.best_chain(alpha, c)
            self.assertIsNone(chain, (alpha, c))
            self.assertAlmostEqual(ratio, limit, delta=1e-9)
        self.assertIsNone(ms.best_chain(1.0, 0.0)[0])

    def test_no_draft_is_best_where_none_pays(self):
        for alpha, c in ((0.0, 0.1), (0.1, 0.5), (1.0, 1.0), (0.9, 3.0)):
            self.assertEqual(ms.best_chain(alpha, c), (0, 1.0), (alpha, c))

    def test_prediction_carries_on_the_last_conditional_rate_and_marks_it(self):
        told = ms.predicted_by_chain([0.8, 0.6, 0.3], lambda k: 1 + 0.1 * k, 5)
        rates = [0.8, 0.6, 0.3, 0.15, 0.075]
        for k, entry in enumerate(told, 1):
            self.assertEqual((entry["chain"], entry["extrapolated"]), (k, k > 3))
            self.assertAlmostEqual(
                entry["predicted_speedup"], (1 + sum(rates[:k])) / (1 + 0.1 * k), delta=1e-12
            )


class FittedCosts(unittest.TestCase):
    def test_fit_recovers_planted_verification_and_draft_cost(self):
        for verification, draft in ((1.0, 0.1), (1.35, 0.02), (0.9, 0.4), (2.0, 0.0)):
            found = ms.fitted_costs([(k, verification + k * draft) for k in (1, 2, 4, 8)])
            for seen, true in zip(found, (verification, draft)):
                self.assertAlmostEqual(seen, true, delta=1e-12)

    def test_fit_averages_noise_out(self):
        chance = random.Random(4)
        points = [
            (k, 1.2 + 0.07 * k + chance.gauss(0, 0.01)) for k in range(1, 17) for _ in range(20)
        ]
        verification, draft = ms.fitted_costs(points)
        self.assertAlmostEqual(verification, 1.2, delta=0.01)
        self.assertAlmostEqual(draft, 0.07, delta=0.001)

    def test_one_chain_length_cannot_be_split(self):
        self.assertIsNone(ms.fitted_costs([]))
        self.assertIsNone(ms.fitted_costs([(4, 1.4)]))
        self.assertIsNone(ms.fitted_costs([(4, 1.4), (4, 1.5)]))


class BreakEvenCommand(unittest.TestCase):
    def test_bare_command_prints_the_exact_table(self):
        cells = table_of(break_even(), "alpha needed")
        self.assertEqual(cells, {place: "%.4f" % value for place, value in BREAK_EVEN.items()})

    def test_json_holds_the_table_in_the_documented_shape(self):
        told = json.loads(break_even("--json"))
        self.assertEqual(list(told), ["table"])
        self.assertEqual(
            [set(row) for row in told["table"]],
            9 * [{"chain", "draft_cost", "alpha_needed", "applies"}],
        )
        for row in told["table"]:
            self.assertEqual(row["applies"], "alpha")
            self.assertAlmostEqual(
                row["alpha_needed"], BREAK_EVEN[row["chain"], row["draft_cost"]], delta=5e-5
            )
            self.assertAlmostEqual(
                enumerated_tokens(row["alpha_needed"], row["chain"]),
                1 + row["chain"] * row["draft_cost"],
                delta=1e-9,
            )

    def test_alpha_adds_speedups_and_the_best_chain(self):
        told = json.loads(
            break_even("--alpha", "0.8", "--chain", "2,5", "--draft-cost", "0,0.1", "--json")
        )
        self.assertEqual(list(told), ["table", "speedups", "best"])
        self.assertEqual(
            [set(row) for row in told["speedups"]], 4 * [{"chain", "draft_cost", "speedup"}]
        )
        self.assertEqual(
            [set(row) for row in told["best"]], 2 * [{"draft_cost", "chain", "speedup"}]
        )
        for row in told["speedups"]:
            right = enumerated_tokens(0.8, row["chain"]) / (1 + row["chain"] * row["draft_cost"])
            self.assertAlmostEqual(row["speedup"], right, delta=1e-12)
        best = {row["draft_cost"]: row for row in told["best"]}
        self.assertIsNone(best[0]["chain"])  # a draft that costs nothing: longer is always better
        self.assertAlmostEqual(best[0]["speedup"], 5.0, delta=1e-9)
        right = max(range(200), key=lambda k: enumerated_tokens(0.8, k) / (1 + 0.1 * k))
        self.assertEqual(best[0.1]["chain"], right)

    def test_text_shows_the_same_speedups_and_best_chains(self):
        text = break_even("--alpha", "0.9", "--draft-cost", "0.1,1.5", "--chain", "2,10")
        cells = table_of(text, "speed-up at alpha")
        for (k, c), cell in cells.items():
            self.assertAlmostEqual(
                float(cell), enumerated_tokens(0.9, k) / (1 + k * c), delta=0.00051
            )
        self.assertEqual(table_of(text, "alpha needed")[10, 1.5], "cannot-pay")
        self.assertRegex(text, r"c = 0\.1: 10 \(3\.431x\)")
        self.assertRegex(text, r"c = 1\.5: none")

    def test_lists_of_chains_and_costs_may_hold_the_edges(self):
        told = json.loads(break_even("--chain", "0,1,3", "--draft-cost", "0,1,1.5", "--json"))
        kinds = {
            (row["chain"], row["draft_cost"]): (row["applies"], row["alpha_needed"])
            for row in told["table"]
        }
        for place in ((0, 0), (0, 1), (0, 1.5), (1, 0), (3, 0)):
            self.assertEqual(kinds[place], ("any", 0.0), place)
        for place in ((1, 1.5), (3, 1.5)):
            self.assertEqual(kinds[place], ("cannot-pay", None), place)
        for place in ((1, 1), (3, 1)):
            self.assertEqual(kinds[place][0], "alpha")
            self.assertAlmostEqual(kinds[place][1], 1.0, delta=1e-9)

    def test_text_says_any_where_every_acceptance_pays(self):
        self.assertEqual(
            table_of(break_even("--draft-cost", "0"), "alpha needed"),
            {(k, 0.0): "any" for k in (2, 4, 8)},
        )

    def test_always_accepted_drafts_have_no_best_chain_but_a_bound(self):
        self.assertRegex(
            break_even("--alpha", "1", "--draft-cost", "0.1"),
            r"c = 0\.1: .*longer is always better",
        )
        for flags in (
            ("--alpha", "1"),
            ("--alpha", "1", "--draft-cost", "0"),
            ("--alpha", "0", "--draft-cost", "0"),
        ):
            json.loads(break_even(*flags, "--json"), parse_constant=self.fail)

    def test_measured_form_compares_tokens_per_step_with_the_cost_of_a_step(self):
        told = json.loads(
            break_even("--measured-step-cost", "1.6", "--tokens-per-step", "2.4", "--json")
        )
        self.assertAlmostEqual(told["measured"]["speedup"], 1.5, delta=1e-12)
        text = break_even("--measured-step-cost", "1.6", "--tokens-per-step", "2.4")
        self.assertRegex(text, r"1\.500x; it pays")
        self.assertRegex(
            break_even("--measured-step-cost", "2.5", "--tokens-per-step", "2"),
            r"0\.800x; it does not pay",
        )

    def test_wrong_input_is_a_usage_error_with_a_reason(self):
        for flags in (
            ("--alpha", "1.5"),
            ("--alpha", "nan"),
            ("--chain", "-1"),
            ("--chain", "2.5"),
            ("--chain", "2,x"),
            ("--chain", ""),
            ("--draft-cost", "-0.1"),
            ("--draft-cost", "inf"),
            ("--draft-cost", "a"),
            ("--measured-step-cost", "1.5"),
            ("--tokens-per-step", "2"),
            ("--measured-step-cost", "0", "--tokens-per-step", "2"),
        ):
            outcome = run_main("break-even", *flags)
            self.assertEqual((outcome.code, outcome.out), (2, ""), flags)
            self.assertIn(flags[0], outcome.err)
            self.assertNotIn("Traceback", outcome.err)

    def test_break_even_writes_no_notebook(self):
        self.assertEqual(run_main("break-even").files, {})

    def test_the_arithmetic_ends_and_stays_json_at_its_limits(self):
        for words in (
            ("--alpha", "0.99999999", "--draft-cost", "1e-9"),
            ("--alpha", "0.9999999", "--draft-cost", "1e-300"),
            ("--measured-step-cost", "1e-6", "--tokens-per-step", "1e6"),
        ):
            with self.subTest(words):
                outcome = run_main("break-even", "--json", *words)
                self.assertEqual(outcome.code, 0)
                json.loads(outcome.out, parse_constant=self.fail)
        self.assertEqual(
            run_main("break-even", "--measured-step-cost", "5e-324", "--tokens-per-step", "1").code,
            2,
        )


if __name__ == "__main__":
    unittest.main()
