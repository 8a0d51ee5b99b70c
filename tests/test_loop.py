"""The plan and the loop that carries it out: order, warm-up, interruption, progress, run files."""

import builtins
import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation, sum_counts
from tests.support import PROGRAM, measure, run_main

PROMPTS = ["first prompt", "second prompt", "third prompt", "fourth prompt"]


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


class Loop(unittest.TestCase):
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
            outcome = run_main(
                "--baseline-url",
                a.url,
                "--speculative-url",
                b.url,
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


class Progress(unittest.TestCase):
    def test_progress_is_one_rewritten_line_on_a_terminal_only(self):
        with FakeServer() as a, FakeServer() as b:
            on, off = (
                measure(a, b, prompts=PROMPTS, terminal=terminal) for terminal in (True, False)
            )
        self.assertIn("\r", on.err)
        self.assertIn("8/8", on.err)
        self.assertNotIn("\n", on.err)
        self.assertTrue(on.err.endswith("\r"), "the line is wiped at the end")
        self.assertEqual(off.err, "")

    def test_quiet_prints_nothing_at_all(self):
        with (
            FakeServer(busy=(1, 1), usage=False, metrics=False) as a,
            FakeServer("llama.cpp", faults=["503-retry-after"]) as b,
        ):
            outcome = measure(a, b, "--quiet", prompts=PROMPTS[:2], terminal=True)
        self.assertEqual((outcome.code, outcome.out, outcome.err), (0, "", ""))
        self.assertEqual(len(outcome.records), 3)


class SaveRun(unittest.TestCase):
    def test_every_reading_is_in_the_file_before_the_next_request(self):
        seen = []

        def answers(prompt, n):
            lines = [
                json.loads(line) for line in pathlib.Path("run.jsonl").read_bytes().splitlines()
            ]
            seen.append(sum(line["kind"] == "reading" for line in lines))

        with FakeServer(answers=answers) as a, FakeServer(answers=answers) as b:
            measure(a, b, "--warmup", 0, "--save-run", "run.jsonl", prompts=PROMPTS)
        self.assertEqual(seen, list(range(8)))

    def test_it_holds_a_header_for_each_arm_and_the_readings_as_measured(self):
        with (
            FakeServer(answers=lambda p, n: "said on %s" % p) as a,
            FakeServer(answers=lambda p, n: "said on %s" % p) as b,
        ):
            outcome = measure(a, b, "--save-run", "run.jsonl", "--repeats", 2, prompts=PROMPTS[:2])
        lines = [json.loads(line) for line in outcome.files["run.jsonl"].splitlines()]
        headers = [line for line in lines if line["kind"] == "run"]
        self.assertEqual([h["arm"] for h in headers], ["baseline", "speculative"])
        for header in headers:
            self.assertEqual(
                (header["schema"], header["repeats"], header["concurrency"], header["order"]),
                (2, 2, 1, "paired"),
            )
            self.assertEqual(
                (
                    header["request"]["max_tokens"],
                    header["request"]["seed"],
                    len(header["prompts"]),
                ),
                (192, 0, 2),
            )
        readings = [line for line in lines if line["kind"] == "reading"]
        self.assertEqual(
            [(r["arm"], r["prompt_index"], r["repeat"], r["place"]) for r in readings],
            [
                (arm, prompt, repeat, place)
                for repeat, prompt, order in (
                    (0, 0, "bs"),
                    (0, 1, "sb"),
                    (1, 0, "sb"),
                    (1, 1, "bs"),
                )
                for place, arm in enumerate({"b": "baseline", "s": "speculative"}[x] for x in order)
            ],
        )
        for r in readings:
            self.assertEqual(
                (r["content"], r["finish_reason"], r["error"]),
                ("said on " + PROMPTS[r["prompt_index"]], "stop", None),
            )
            self.assertGreaterEqual(r["latency_s"], r["ttft_s"])
        self.assertNotIn(b"said on", outcome.files["labbook.md"])

    def test_an_older_run_is_never_overwritten(self):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(
                a,
                b,
                "--save-run",
                "run.jsonl",
                prompts=PROMPTS,
                files={"run.jsonl": "hours of work"},
            )
            self.assertEqual((a.chats, b.chats), ([], []))
        self.assertEqual((outcome.code, outcome.files["run.jsonl"]), (2, b"hours of work"))
        self.assertIn("run.jsonl", outcome.err)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_a_disk_that_fills_stops_neither_the_measurement_nor_the_notebook(self):
        real = builtins.open

        def full(path, mode="r", *args, **options):
            return real(
                "/dev/full" if str(path) == "run.jsonl" else path,
                mode.replace("x", "w"),
                *args,
                **options,
            )

        with FakeServer() as a, FakeServer() as b, mock.patch.object(builtins, "open", full):
            outcome = measure(a, b, "--save-run", "run.jsonl", prompts=PROMPTS)
        self.assertEqual((outcome.code, len(outcome.records)), (1, 3))
        self.assertIn("run file", outcome.err)


@unittest.skipIf(os.name == "nt", "SIGINT cannot be sent to one process here")
class Interrupted(unittest.TestCase):
    def interrupt(self, baseline_chats, speculative_chats, *flags, slow=0.05):
        """Send SIGINT once the servers have had so many chat requests; (code, out, err, records or None, run file)."""
        with (
            tempfile.TemporaryDirectory() as folder,
            FakeServer(words=4) as a,
            FakeServer(words=4, speculation=Speculation()) as b,
        ):
            for server in (a, b):
                server.token_delay_s = slow
            book = pathlib.Path(folder) / "labbook.md"
            (pathlib.Path(folder) / "prompts.txt").write_text("\n".join(PROMPTS))
            # a suite that runs in the background of a shell has SIGINT ignored, and children inherit that
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(PROGRAM),
                    "--baseline-url",
                    a.url,
                    "--speculative-url",
                    b.url,
                    "--prompts",
                    "prompts.txt",
                    "--save-run",
                    "run.jsonl",
                    *flags,
                ],
                cwd=folder,
                encoding="ascii",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            try:
                limit = time.monotonic() + 20
                while len(a.chats) < baseline_chats or len(b.chats) < speculative_chats:
                    self.assertLess(time.monotonic(), limit)
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
                process.communicate()
            records = (
                [json.loads(line) for line in book.read_text().splitlines()]
                if book.exists()
                else []
            )
            run = pathlib.Path(folder) / "run.jsonl"
            return (
                process.returncode,
                out,
                err,
                records,
                [json.loads(x) for x in run.read_text().splitlines()] if run.exists() else [],
            )

    def test_what_was_finished_is_kept_reported_and_recorded(self):
        """The third pair is the baseline's first: its fourth request (with the warm-up) is in flight."""
        code, out, err, records, run = self.interrupt(4, 3)
        self.assertEqual(code, 130, err)
        self.assertNotIn("Traceback", err)
        self.assertEqual([r["kind"] for r in records], ["endpoint", "endpoint", "comparison"])
        self.assertEqual([r["interrupted"] for r in records], [True] * 3)
        self.assertEqual([r["completed"] for r in records[:2]], [2, 2])
        self.assertEqual(records[2]["speedup"]["prompts"], 2)
        self.assertIn("interrupted", [f["finding"] for f in records[2]["audit"]])
        self.assertIn("interrupted", out)
        self.assertEqual(sum(line["kind"] == "reading" for line in run), 4)

    def test_an_interrupted_pair_is_counted_and_stays_out_of_the_figures(self):
        """The second pair begins with the speculative server: the baseline's half of it is in flight."""
        code, _, err, records, _ = self.interrupt(3, 3)
        self.assertEqual(code, 130, err)
        self.assertEqual([r["completed"] for r in records[:2]], [1, 2])
        self.assertEqual(records[2]["speedup"]["prompts"], 1)
        self.assertEqual(
            [r["latency_s"]["mean"] == r["latency_s"]["max"] for r in records[:2]], [True, True]
        )

    def test_before_the_first_finished_pair_nothing_is_recorded(self):
        for chats in ((1, 0), (2, 1), (2, 2)):
            with self.subTest(chats):
                code, out, err, records, _ = self.interrupt(*chats)
                self.assertEqual((code, records, out), (130, [], ""))
                self.assertIn("interrupted", err)
                self.assertNotIn("Traceback", err)

    def test_under_load_it_ends_at_once_and_records_what_was_finished(self):
        code, _, err, records, _ = self.interrupt(
            7, 9, "--concurrency", "2", "--repeats", "2", slow=0.05
        )
        self.assertEqual(code, 130, err)  # blocks of 4: A, B, B are done, the second of A is not
        self.assertNotIn("Traceback", err)
        self.assertEqual(
            [(r["interrupted"], r["kind"]) for r in records],
            [(True, "endpoint")] * 2 + [(True, "comparison")],
        )
        self.assertEqual((records[1]["completed"], records[2]["speedup"]["prompts"]), (8, 1))


if __name__ == "__main__":
    unittest.main()
