"""Whether the verdict and the prediction can be believed: `python3 -m tests.bench_verdict [--quick]`.

1. Twenty measurements of a server against itself say "pays" at most twice (the stated error is 2.5%), and the overall
   interval holds 1 in at least 17 of them.
2. The speed-up that a run with chain length 4 predicts for length 2 lies within the interval of a run with length 2, in
   all but one of the repetitions, each with other prompts and another model.
Both on reference servers with short steps, so the times are real and the drafts are known.
"""

import random
import statistics
import sys

from measure_speculative import Reference, reference_server
from tests.support import Bounds, run_main


def prompts(seed, count):
    numbers = random.Random(seed)
    return ["Question %d: %d" % (n, numbers.randrange(10**9)) for n in range(count)]


def identical_pairs(bounds, runs):
    pays, holds, ratios, widths = 0, 0, [], []
    for seed in range(runs):
        with reference_server(Reference(seed=seed, step_s=0.001, prefill_s=0.004)) as url:
            record = run_main(
                "--baseline-url",
                url,
                "--speculative-url",
                url,
                "--max-tokens",
                24,
                "--repeats",
                2,
                "--quiet",
                prompts=prompts(seed, 12),
            ).comparison()
        speed = record["speedup"]
        pays += record["verdict"] == "pays"
        holds += speed["low"] <= 1 <= speed["high"]
        ratios.append(speed["ratio"])
        widths.append(100 * (speed["high"] / speed["low"] - 1))
    print(
        "%d identical pairs: %d pay, the interval holds 1 in %d; its width %.2f%% in the median, %.2f%% at most; mean ratio %.4f"
        % (
            runs,
            pays,
            holds,
            statistics.median(widths),
            max(widths),
            statistics.geometric_mean(ratios),
        )
    )
    bounds.most("identical pairs of %d that pay" % runs, pays, 2)
    bounds.least("identical pairs of %d whose interval holds 1" % runs, holds, runs - 3)


def predictions(bounds, runs):
    agree = 0
    for seed in range(runs):
        plain = Reference(alpha=0.75, seed=seed, step_s=0.002, prefill_s=0.004)
        records = {}
        with reference_server(plain) as baseline:
            for chain in (4, 2):
                drafting = Reference(
                    alpha=0.75, chain=chain, seed=seed, step_s=0.002, prefill_s=0.004
                )
                with reference_server(drafting) as url:
                    records[chain] = run_main(
                        "--baseline-url",
                        baseline,
                        "--speculative-url",
                        url,
                        "--max-tokens",
                        128,
                        "--quiet",
                        prompts=prompts(seed, 12),
                    ).comparison()
        (predicted,) = [
            entry["predicted_speedup"]
            for entry in records[4]["break_even"]["predicted"]
            if entry["chain"] == 2
        ]
        seen = records[2]["decode_speedup"]
        within = seen["low"] <= predicted <= seen["high"]
        agree += within
        print(
            "%2d  predicted for 2 from a run with 4: %.3f; measured with 2: %.3f (%.3f to %.3f)  %s"
            % (
                seed + 1,
                predicted,
                seen["ratio"],
                seen["low"],
                seen["high"],
                "agree" if within else "DIFFER",
            ),
            flush=True,
        )
    bounds.least("predictions of %d within the interval" % runs, agree, runs - 1)


def main(argv):
    quick, bounds = "--quick" in argv, Bounds()
    identical_pairs(bounds, 8 if quick else 20)
    predictions(bounds, 2 if quick else 6)
    return bounds.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
