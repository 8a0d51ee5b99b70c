"""How the time of `compare` grows with the number of readings: python3 -m tests.bench_compare [--quick]

Four times the readings take less than six times the time: nothing is looked for again for each reading.
"""

import statistics
import subprocess
import sys
import tempfile
import time

from tests.support import PROGRAM, Bounds, answer, saved_run


def run_file(folder, arm, prompts):
    """A planted run of so many readings, each a little different."""
    answers = [[answer(100, 1 + i % 97 / 1000)] for i in range(prompts)]
    path = "%s/%s-%d.jsonl" % (folder, arm, prompts)
    with open(path, "wb") as file:
        file.write(saved_run(arm, answers, workloads=["k%d" % (i % 3) for i in range(prompts)]))
    return path


def compare_s(folder, prompts):
    """Seconds for a comparison of two such runs."""
    paths = [run_file(folder, arm, prompts) for arm in ("baseline", "speculative")]
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, str(PROGRAM), "compare", *paths, "--labbook", "/dev/null"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main():
    bounds, rounds = Bounds(), 1 if "--quick" in sys.argv else 5
    with tempfile.TemporaryDirectory() as folder:
        ratios = []
        for _ in range(rounds):
            small, large = compare_s(folder, 3000), compare_s(folder, 12000)
            ratios.append(large / small)
            print("6,000 readings %.2f s, 24,000 readings %.2f s" % (small, large), flush=True)
    bounds.most("time for four times the readings, median", statistics.median(ratios), 6)
    return bounds.exit_code()


if __name__ == "__main__":
    sys.exit(main())
