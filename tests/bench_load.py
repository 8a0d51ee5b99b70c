"""Whether the ratio under load can be believed: `python3 -m tests.bench_load [--quick]`.

A reference pair whose steps take longer once a batch holds more tokens than its capacity, measured at 1, 2, 4 and 8
requests at a time. The ratio at each level must lie within 3% of a simulation of the same closed loop, made here from
the two models alone, and the level from which the draft costs more than it brings must be the simulated one.
"""

import heapq
import math
import statistics
import sys

from measure_speculative import Reference, crossover_lines, reference_server
from tests.support import Bounds, run_main

LEVELS, TOKENS, CAPACITY = (1, 2, 4, 8), 64, 8.0
PROMPTS = ["Question %d about load" % n for n in range(8)]


def steps_of(config, prompt):
    """Tokens in each step of an answer: drafts and one."""
    sizes, n = [], 1
    while n < TOKENS:
        drafted = min(config.chain, TOKENS - n - 1)
        agree = [
            config.draft_token(prompt, n + i) == config.target_token(prompt, n + i)
            for i in range(drafted)
        ]
        sizes.append(drafted + 1)
        n += (agree + [False]).index(False) + 1
    return sizes


def block_s(config, level):
    """How long a closed loop of `level` requests in flight takes for two rounds of each, by simulation."""
    rounds = math.ceil(max(len(PROMPTS), 2 * level) / len(PROMPTS))
    waiting = [steps_of(config, prompt) for _ in range(rounds) for prompt in PROMPTS][::-1]
    active = [
        (config.prefill_s, number, waiting.pop()) for number in range(min(level, len(waiting)))
    ]
    number = len(active)
    now = 0.0
    while active:
        now, which, left = heapq.heappop(active)
        if left:
            size = left[0]
            load = max(1.0, (len(active) + 1) * size / config.capacity)
            heapq.heappush(
                active,
                (now + config.step_s * (load + (size - 1) * config.draft_cost), which, left[1:]),
            )
        elif waiting:
            heapq.heappush(active, (now + config.prefill_s, number, waiting.pop()))
            number += 1
    return now


def main(argv):
    quick, bounds = "--quick" in argv, Bounds()
    plain = Reference(alpha=0.7, step_s=0.01, prefill_s=0.02, capacity=CAPACITY)
    drafting = Reference(alpha=0.7, chain=3, step_s=0.01, prefill_s=0.02, capacity=CAPACITY)
    true = {level: block_s(plain, level) / block_s(drafting, level) for level in LEVELS}
    seen = {level: [] for level in LEVELS}
    with reference_server(plain) as one, reference_server(drafting) as other:
        for _ in range(1 if quick else 3):
            outcome = run_main(
                "--baseline-url",
                one,
                "--speculative-url",
                other,
                "--max-tokens",
                TOKENS,
                "--repeats",
                2,
                "--concurrency",
                ",".join(map(str, LEVELS)),
                prompts=PROMPTS,
            )
            records = [record for record in outcome.records if record["kind"] == "comparison"]
            for record in records:
                seen[record["concurrency"]].append(
                    record["speculative_tokens_per_s"] / record["baseline_tokens_per_s"]
                )
    for level in LEVELS:
        ratio = statistics.median(seen[level])
        print(
            "%2d at a time: the model says %.3f, measured %.3f (%+.2f%%)"
            % (level, true[level], ratio, 100 * (ratio / true[level] - 1))
        )
        bounds.most(
            "ratio with %d at a time, %% off the model" % level,
            100 * abs(ratio / true[level] - 1),
            3,
        )
    print("\n".join(crossover_lines(records)))
    below = [level for level in LEVELS if true[level] < 1]
    found = [level for level in LEVELS if statistics.median(seen[level]) < 1]
    bounds.hold(
        "first level at which the draft costs",
        found[0] if found else 0,
        str(below[0]),
        found == below,
    )
    return bounds.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
