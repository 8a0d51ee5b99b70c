"""The statistics of the verdict: published quantiles, seeded worlds of known truth, stalls, verdicts, forecasts."""

import math
import random
import unittest

import measure_speculative as ms

# Student's t, two-sided, from published tables (six digits and more).
T_95 = {
    1: 12.706204736,
    2: 4.302652730,
    3: 3.182446305,
    4: 2.776445105,
    5: 2.570581836,
    6: 2.446911851,
    7: 2.364624252,
    8: 2.306004135,
    9: 2.262157163,
    10: 2.228138852,
    11: 2.200985160,
    12: 2.178812830,
    20: 2.085963447,
    23: 2.068657610,
    30: 2.042272456,
    47: 2.011740514,
    60: 2.000297822,
    120: 1.979930405,
}


T_99 = {
    1: 63.656741163,
    2: 9.924843201,
    5: 4.032142984,
    11: 3.105806516,
    30: 2.749995654,
    120: 2.617421145,
}
T_90 = {
    1: 6.313751515,
    2: 2.919985580,
    5: 2.015048373,
    11: 1.795884819,
    30: 1.697260887,
    120: 1.657650899,
}

PROMPTS, REPEATS, WORLDS = 12, 3, 2000
MEAN, SPREAD, NOISE, DRIFT = 0.30, 0.20, 0.03, 0.08


def places(order):
    """{(prompt, repeat): (when the baseline is asked, when the candidate is)} in a plan, 0 to 1."""
    shots = [
        shot for block in ms.make_plan(["x"] * PROMPTS, REPEATS, 2, order) for shot in block.shots
    ]
    at = {
        (shot.prompt, shot.repeat, shot.arm): number / (len(shots) - 1)
        for number, shot in enumerate(shots)
    }
    return {(i, j): (at[i, j, 0], at[i, j, 1]) for i in range(PROMPTS) for j in range(REPEATS)}


def world(chance, when, spread, stalls):
    """Log ratios of one simulated run: prompts differ, both arms drift and are noisy, some requests stall."""

    def log_speed(at):
        stall = chance.expovariate(1 / 0.40) if stalls and chance.random() < 0.05 else 0.0
        return chance.gauss(0, NOISE) - DRIFT * at - stall

    effects = [chance.gauss(MEAN, spread) for _ in range(PROMPTS)]
    return [
        [effects[i] + log_speed(when[i, j][1]) - log_speed(when[i, j][0]) for j in range(REPEATS)]
        for i in range(PROMPTS)
    ]


class Quantiles(unittest.TestCase):
    def test_t_quantiles_agree_with_published_tables(self):
        for level, table in ((0.95, T_95), (0.99, T_99), (0.90, T_90)):
            for df, published in table.items():
                self.assertAlmostEqual(
                    ms.t_quantile(df, level), published, delta=1e-6, msg=(df, level)
                )

    def test_t_quantile_comes_down_to_the_normal_one(self):
        self.assertAlmostEqual(ms.t_quantile(20_000), 1.959963985, delta=2e-4)


class Simulated(unittest.TestCase):
    """2,000 runs of 12 prompts x 3 repeats; the sampling error of a share near 95% is 0.5 points."""

    def test_interval_covers_the_true_ratio_in_about_95_percent_of_drifting_stalling_worlds(self):
        chance, when, covered, pooled = random.Random(20), places("paired"), 0, 0
        for _ in range(WORLDS):
            logs = world(chance, when, SPREAD, stalls=True)
            found = ms.over_prompts(logs)
            covered += found.low <= math.exp(MEAN) <= found.high
            found = ms.over_prompts([[value] for repeats in logs for value in repeats])
            pooled += found.low <= math.exp(MEAN) <= found.high
        self.assertTrue(0.93 * WORLDS <= covered <= 0.97 * WORLDS, covered)
        self.assertLess(
            pooled, 0.90 * WORLDS, "repeats taken as independent should have covered too rarely"
        )

    def test_paired_order_cancels_a_drift_that_ruins_a_sequential_one(self):
        bias = {}
        for order in ("paired", "sequential"):
            chance, when = random.Random(21), places(order)
            logs = [
                math.log(ms.over_prompts(world(chance, when, 0.0, stalls=False)).ratio)
                for _ in range(500)
            ]
            bias[order] = sum(logs) / len(logs) - MEAN
        self.assertLess(abs(bias["paired"]), 0.001)
        self.assertLess(bias["sequential"], -0.03)

    def test_stalls_are_seldom_seen_where_there_are_none(self):
        chance, when = random.Random(22), places("paired")
        alarms = sum(
            ms.stall_count(world(chance, when, SPREAD, stalls=False)) > 0 for _ in range(500)
        )
        self.assertLess(alarms, 15)


class Estimates(unittest.TestCase):
    def test_ratio_and_interval_are_those_of_the_textbook(self):
        found = ms.over_prompts([[0.1], [0.2], [0.3]])
        half = 4.302652730 * 0.1 / math.sqrt(3)
        self.assertAlmostEqual(found.ratio, math.exp(0.2), delta=1e-12)
        self.assertAlmostEqual(found.low, math.exp(0.2 - half), delta=1e-8)
        self.assertAlmostEqual(found.high, math.exp(0.2 + half), delta=1e-8)
        self.assertEqual(found.prompts, 3)
        record = ms.interval_record(found)
        self.assertEqual(set(record), {"ratio", "low", "high", "level", "prompts"})
        self.assertEqual(record["level"], 0.95)

    def test_repeats_of_a_prompt_collapse_to_their_median(self):
        self.assertEqual(
            ms.over_prompts([[0.1, 0.1, 9.0], [0.3, -5.0, 0.3]]), ms.over_prompts([[0.1], [0.3]])
        )
        self.assertEqual(
            ms.over_prompts([[0.1, 0.2], [0.4]]), ms.over_prompts([[0.15000000000000002], [0.4]])
        )

    def test_one_prompt_has_a_ratio_and_no_interval(self):
        found = ms.over_prompts([[0.5, 0.5, 0.5]])
        self.assertEqual((found.low, found.high, found.prompts), (None, None, 1))
        self.assertAlmostEqual(found.ratio, math.exp(0.5), delta=1e-12)

    def test_nothing_measured_has_no_estimate(self):
        self.assertIsNone(ms.over_prompts([]))
        self.assertIsNone(ms.over_repeats([]))

    def test_these_prompts_take_the_mean_of_all_pairs_and_the_spread_within_prompts(self):
        found = ms.over_repeats([[0.0, 0.2], [1.0, 1.4]])  # within: 2 x 0.01 + 2 x 0.04, over 2 df
        half = 4.302652730 * math.sqrt(0.10 / 2) / math.sqrt(4)
        self.assertAlmostEqual(found.ratio, math.exp(0.65), delta=1e-12)
        self.assertAlmostEqual(found.low, math.exp(0.65 - half), delta=1e-8)
        self.assertAlmostEqual(found.high, math.exp(0.65 + half), delta=1e-8)
        self.assertEqual(found.prompts, 2)

    def test_without_repeats_nothing_is_known_of_the_spread_within_prompts(self):
        found = ms.over_repeats([[0.1], [0.3]])
        self.assertEqual((found.low, found.high), (None, None))

    def test_the_interval_for_these_prompts_shows_a_stall_that_medians_hide(self):
        logs = [[0.3, 0.31, 0.29] for _ in range(11)] + [[0.3, 0.31, -1.2]]
        self.assertAlmostEqual(ms.over_prompts(logs).ratio, math.exp(0.3), delta=1e-9)
        self.assertLess(ms.over_repeats(logs).ratio, math.exp(0.27))

    def test_an_interval_without_end_is_still_a_number(self):
        told = ms.over_prompts([[-60.0], [60.0]])
        self.assertTrue(0 < told.low < told.ratio < told.high < float("inf"))


class Stalls(unittest.TestCase):
    def test_a_repeat_far_from_its_prompts_median_is_counted_and_kept(self):
        chance = random.Random(23)
        logs = [[chance.gauss(0.3, 0.02) for _ in range(3)] for _ in range(12)]
        self.assertEqual(ms.stall_count(logs), 0)
        logs[4][1] -= 0.9
        logs[7][2] += 0.9
        before = [list(repeats) for repeats in logs]
        self.assertEqual(ms.stall_count(logs), 2)
        self.assertEqual(logs, before)

    def test_single_repeats_and_equal_ones_are_no_stalls(self):
        self.assertEqual(ms.stall_count([[0.1], [0.9], [3.0]]), 0)
        self.assertEqual(ms.stall_count([[0.1, 0.1, 0.1], [2.0, 2.0, 2.0]]), 0)
        self.assertEqual(ms.stall_count([]), 0)


class Verdicts(unittest.TestCase):
    def test_only_a_whole_interval_on_one_side_of_the_threshold_decides(self):
        for low, high, gain, right in (
            (1.01, 1.50, 0.0, "pays"),
            (1.04, 1.50, 0.05, "undecided"),
            (1.06, 1.50, 0.05, "pays"),
            (0.70, 0.99, 0.0, "does-not-pay"),
            (0.90, 1.04, 0.05, "does-not-pay"),
            (0.90, 1.10, 0.0, "undecided"),
            (1.00, 1.20, 0.0, "undecided"),
            (0.80, 1.00, 0.0, "undecided"),
            (0.96, 1.5, -0.05, "pays"),
            (None, None, 0.0, "undecided"),
        ):
            self.assertEqual(
                ms.verdict_of(ms.Estimate(1.2, low, high, 12), gain), right, (low, high, gain)
            )
        self.assertEqual(ms.verdict_of(None, 0.0), "undecided")


class MorePrompts(unittest.TestCase):
    def test_forecast_follows_the_power_formula_to_one_significant_figure(self):
        logs = [[0.0], [0.2]] * 6
        spread = math.sqrt(12 * 0.01 / 11)
        for gain in (0.02, 0.05, 0.15, 0.20):
            needed = (2.8 * spread / abs(0.1 - math.log1p(gain))) ** 2 - 12
            told = ms.more_prompts(logs, gain)
            if needed > 100:
                self.assertEqual(told, "more than 100")
            else:
                self.assertEqual(len(told.strip("0")), 1)
                self.assertLess(
                    abs(int(told) - max(needed, 1)),
                    0.5 * 10 ** math.floor(math.log10(max(needed, 1))) + 1e-9,
                )

    def test_an_effect_at_the_threshold_is_never_forecast(self):
        self.assertEqual(ms.more_prompts([[0.01], [-0.01]] * 6, 0.0), "more than 100")

    def test_a_single_prompt_gives_no_forecast(self):
        self.assertIsNone(ms.more_prompts([[0.3, 0.4]], 0.0))


if __name__ == "__main__":
    unittest.main()
