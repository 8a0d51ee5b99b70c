"""Whether the verdict and the prediction can be believed: `python3 -m tests.bench_verdict [--quick]`.

1. Two equal servers, measured paired, one arm after the other, and with 4 requests at a time, twenty times each: at most
   one in twenty says "pays", and the interval holds 1 in at least 18. Both draft, for where nothing is drafted there is
   no verdict at all; the verdict is the record's own, and the last line says that the baseline drafts too. The stated
   error is 2.5% on each side, so an honest instrument breaks each of these bounds in about one benchmark of twelve.
2. One server as both arms, in the same three ways: never a verdict, whatever its figures say.
3. No finding speaks against an equal pair: what stands after BUT, that one thing and few prompts aside, is counted.
4. The speed-up that a run with chain length 4 predicts for length 2 lies within the interval of a run with length 2, in
   all but one of the repetitions, each with other prompts and another model.
All on reference servers with short steps, so the times are real and the drafts are known. Nothing cancels what other
programs do to one arm of a sequential run: there a busy machine, which each part names, breaks the bounds of 1.
"""

import collections
import contextlib
import random
import statistics
import sys

from measure_speculative import FINDINGS, Reference, cpu_share, reference_server
from tests.support import Bounds, run_main

ORDERS = {
    "paired": ("--repeats", 2),
    "sequential": ("--repeats", 2, "--order", "sequential"),
    "4 at a time": ("--repeats", 4, "--concurrency", 4),
}
TRUE_OF_EQUALS = {"baseline-drafting", "same-server", "few-prompts", "runs-apart"}


def prompts(seed, count):
    numbers = random.Random(seed)
    return ["Question %d: %d" % (n, numbers.randrange(10**9)) for n in range(count)]


def equal_arms(seed, flags, servers):
    """(record, last line) of so many servers of one kind, one of them being both arms."""
    config = Reference(seed=seed, chain=2, step_s=0.001, prefill_s=0.02)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(reference_server(config)) for _ in range(servers)]
        words = ("--baseline-url", urls[0], "--speculative-url", urls[-1], *flags)
        outcome = run_main(*words, "--max-tokens", 24, prompts=prompts(seed, 12))
    return outcome.comparison(), outcome.out.rstrip().splitlines()[-1]


def equal_pairs(bounds, order, runs):
    share = cpu_share()
    records = [equal_arms(seed, ORDERS[order], servers=2)[0] for seed in range(runs)]
    share = min(share, cpu_share())
    speeds = [record["speedup"] for record in records]
    widths = [100 * (speed["high"] / speed["low"] - 1) for speed in speeds]
    print(
        "\n%s, %d equal pairs: interval %.2f%% wide in the median, %.2f%% at most; mean ratio %.4f, from %.4f to %.4f"
        % (
            order,
            runs,
            statistics.median(widths),
            max(widths),
            statistics.geometric_mean([speed["ratio"] for speed in speeds]),
            min(speed["ratio"] for speed in speeds),
            max(speed["ratio"] for speed in speeds),
        )
    )
    if share < 0.9:
        print("other programs hold the processors: %.0f%% of one was left" % (100 * share))
    verdicts = collections.Counter(record["verdict"] for record in records)
    print("verdicts: %s" % dict(verdicts))
    holds = sum(speed["low"] <= 1 <= speed["high"] for speed in speeds)
    what = "%s, equal pairs of %d" % (order, runs)
    bounds.most(what + " that pay", verdicts["pays"], 1)
    bounds.least(what + " whose interval holds 1", holds, runs - (2 if runs >= 20 else 1))
    bounds.most(what + " without a verdict", verdicts[None], 0)
    bounds.most(what + " of which something else is said", accused(records), 1)


def accused(records):
    """How many of the records say more after BUT, or in place of the verdict, than is true of equal servers."""
    told = collections.Counter()
    for record in records:
        for entry in record["audit"]:
            meaning = FINDINGS[entry["finding"]]
            spoken = entry.get("caveat") or meaning.caveat or meaning.withholds
            if spoken and entry["finding"] not in TRUE_OF_EQUALS:
                told[entry["finding"]] += 1
                print("  said of an equal pair: %s" % entry["detail"])
    return max(told.values(), default=0)


def one_server_twice(bounds, order, runs):
    told = [equal_arms(seed, ORDERS[order], servers=1) for seed in range(runs)]
    wrong = [
        last
        for record, last in told
        if not last.startswith("NOISE CHECK: ")
        or record["verdict_withheld"] != "same-server"
        or record["verdict"]
        or any(part["verdict"] for part in record["workloads"])
    ]
    print("".join("  said of one server: %s\n" % last for last in wrong), end="")
    bounds.most("%s, one server twice, of %d judged" % (order, runs), len(wrong), 0)


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
    for order in ORDERS:
        equal_pairs(bounds, order, 8 if quick else 20)
        one_server_twice(bounds, order, 2 if quick else 5)
    predictions(bounds, 2 if quick else 6)
    return bounds.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
