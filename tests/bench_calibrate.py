"""Whether `calibrate` can be believed: `python3 -m tests.bench_calibrate [--quick]`.

Ten runs (three with --quick): the ratio and both decode rates lie within 0.5% of the truth and all counts are exact in
all but one of them. Then one run while other processes burn every processor: it ends, with exit code 1, and says that
the machine is not fit. Meant for an idle machine; on a busy one the first part fails, and should.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

from tests.support import PROGRAM, Bounds

RATES = ("ratio", "baseline decode tokens/s", "speculative decode tokens/s")


def calibrate():
    """(exit code, rows by quantity, share of a processor that it got, stderr, seconds)."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "calibrate", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = json.loads(done.stdout)
    rows = {row["quantity"]: row for row in told["quantities"]}
    return (
        done.returncode,
        rows,
        told["cpu_share"],
        done.stderr.strip(),
        time.perf_counter() - started,
    )


@contextlib.contextmanager
def burners(count):
    """So many processes that do nothing but use a processor; they end by themselves after five minutes."""
    code = "import time\nend = time.time() + 300\nwhile time.time() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(argv):
    runs, bounds, good, errors = (
        3 if "--quick" in argv else 10,
        Bounds(),
        0,
        {name: [] for name in RATES},
    )
    for run in range(runs):
        code, rows, share, said, took_s = calibrate()
        for name in RATES:
            errors[name].append(rows[name]["error"])
        counts_exact = all(row["within"] for row in rows.values() if row["unit"] == "exact")
        well = counts_exact and all(abs(rows[name]["error"]) <= 0.5 for name in RATES)
        good += well
        print(
            "%2d  %s  exit %d  %4.1f s  processor %3.0f%%  %s  %s"
            % (
                run + 1,
                "good" if well else "bad ",
                code,
                took_s,
                100 * share,
                ", ".join("%s %+.3f%%" % (name, rows[name]["error"]) for name in RATES),
                said,
            ),
            flush=True,
        )
    for name in RATES:
        print(
            "%s: median error %+.3f%%, worst %+.3f%%"
            % (name, statistics.median(errors[name]), max(errors[name], key=abs))
        )
    bounds.least(
        "runs of %d with ratio and decode rates within 0.5%% and exact counts" % runs,
        good,
        runs - 1,
    )
    with burners(os.cpu_count() or 1):
        code, rows, share, said, took_s = calibrate()
    print(
        "with every processor burned: exit %d after %.1f s, processor %.0f%%, ratio %+.3f%%: %s"
        % (code, took_s, 100 * share, rows["ratio"]["error"] or 0.0, said)
    )
    bounds.hold(
        "a busy machine is said not to be fit",
        code,
        "exit 1 and NOT FIT",
        code == 1 and "NOT FIT" in said,
    )
    return bounds.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
