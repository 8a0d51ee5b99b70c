"""The last line cannot lie: what it must say beside a figure, and when there is no verdict.

LIES is a table of pairs of servers, one for each finding that stands in the last line or withholds the verdict.
"""

import json
import math
import random
import re
import unittest

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation
from tests.support import answer, compare, findings, measure, saved_run

PROMPTS = 12
DRAFTING = Speculation()


def arm(
    name,
    seconds=1.0,
    prompts=PROMPTS,
    repeats=1,
    drafted=None,
    accepted=None,
    tokens=100,
    **options,
):
    """A planted run: each answer takes `seconds`, a little more for each prompt."""
    fields = options.pop("fields", {})
    rows = [
        [
            answer(tokens, seconds * (1 + i / 1000), drafted, accepted, **fields)
            for _ in range(repeats)
        ]
        for i in range(prompts)
    ]
    return name + ".jsonl", saved_run(name, rows, **options)


def plain(**options):
    return arm("baseline", **options)


def drafting(seconds=0.5, **options):
    return arm("speculative", seconds, **dict({"drafted": 80, "accepted": 60}, **options))


def changed(run, change):
    """The run file with each line as `change(line)` leaves it."""
    name, data = run
    lines = [json.loads(line) for line in data.splitlines()]
    for line in lines:
        change(line)
    return name, b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def readings(change):
    """A change of readings alone."""

    def apply(line):
        if line["kind"] == "reading":
            change(line)

    return apply


def server(**about):
    return {"server": about}


def compared(*runs, flags=()):
    return compare(*runs, flags=("--fail-on", "slower,changed-text,did-not-run", *flags))


# ---- one pair of servers for each finding ----


def not_drafting():
    return compared(plain(), drafting(1.0, drafted=0, accepted=0))


def same_server():
    with FakeServer("llama.cpp") as one:
        return measure(one, one, prompts=["prompt %d" % i for i in range(PROMPTS)])


def another_size():
    return compared(
        plain(**server(parameters=135_000_000)), drafting(**server(parameters=360_000_000))
    )


def another_quantization():
    return compared(plain(**server(quantization="F32")), drafting(**server(quantization="Q4_1")))


def another_file():
    return compared(
        plain(**server(model_file="m.gguf")), drafting(**server(model_file="m-mtp.gguf"))
    )


def miscounted():
    def twice(line):
        line["completion_tokens"] *= 2

    return compared(plain(), changed(drafting(), readings(twice)))


def failing():
    def fail(line):
        if line["prompt_index"] % 4 == 0:
            line.update(error="no answer within 300 s", answer=None)

    return compared(plain(), changed(drafting(), readings(fail)))


def slowed():
    return compared(
        plain(fields={"ttft_s": 0.624, "cached_tokens": 0}),
        drafting(fields={"ttft_s": 0.311, "cached_tokens": 0}),
    )


def remembered():
    def forget(line):
        if line["repeat"] == 0:
            line["statistics"]["timings"].update(draft_n=8, draft_n_accepted=0)
            line["latency_s"] = line["decode_s"] = 1.01

    run = drafting(0.2, repeats=3, drafted=40, accepted=40)
    return compared(plain(repeats=3), changed(run, readings(forget)))


def other_caches():
    fields = {"prompt_tokens": 100}
    return compared(
        plain(fields=dict(fields, cached_tokens=0)), drafting(fields=dict(fields, cached_tokens=90))
    )


def forced():
    return compared(plain(), drafting(request={"seed": 7}), flags=("--force",))


def waiting():
    def wait(line):
        line["latency_s"] += 0.4 * (line["prompt_index"] % 2)

    return compared(*(changed(run, readings(wait)) for run in (plain(), drafting())))


def apart():
    return compared(
        plain(recorded_at="2026-11-30T10:00:00+01:00"),
        drafting(recorded_at="2026-11-30T12:30:00+01:00", run_id="later"),
    )


def busy():
    with FakeServer("vllm", busy=(1, 0)) as a, FakeServer("vllm", speculation=DRAFTING) as b:
        return measure(a, b, prompts=["prompt %d" % i for i in range(PROMPTS)])


def foreign():
    with FakeServer("vllm", foreign=500) as a, FakeServer("vllm", speculation=DRAFTING) as b:
        return measure(a, b, prompts=["prompt %d" % i for i in range(PROMPTS)])


def restarted():
    name, data = plain()
    page = {
        "samples": [["vllm:generation_tokens_total", [], 500.0, "counter", "x"]],
        "unavailable": None,
    }
    counted = {
        "kind": "counted",
        "arm": "baseline",
        "workload": "work",
        "repeat": 0,
        "tokens": 1200,
        "answers": 12,
        "failed": 0,
        "elapsed_s": 1.0,
        "waiting": None,
        "before": dict(page, process="1"),
        "after": dict(page, process="2"),
    }
    lines = data.splitlines(keepends=True)
    lines.insert(-1, json.dumps(counted).encode() + b"\n")
    return compared((name, b"".join(lines)), drafting())


def both_drafting():
    return compared(plain(drafted=80, accepted=60), drafting())


def cut_off():
    return compared(plain(), drafting(end=False))


def few():
    return compared(plain(prompts=5), drafting(prompts=5))


# finding: (servers, the last line, verdict, verdict_withheld, exit code)
LIES = {
    "not-drafting": (not_drafting, "^DID NOT RUN: ", None, "did-not-run", 3),
    "same-server": (
        same_server,
        "^NOISE CHECK: .*, one server against itself",
        None,
        "same-server",
        0,
    ),
    "model-differs": (
        another_size,
        r"^NOT SPECULATION ALONE: 2\.0\dx .*; the models differ \(135000000, 360000000\)",
        None,
        "model-differs",
        0,
    ),
    "quantization-differs": (
        another_quantization,
        r"^NOT SPECULATION ALONE: .*; the models differ \(F32, Q4_1\)",
        None,
        "model-differs",
        0,
    ),
    "counts-wrong": (miscounted, "^NO VERDICT: .*BUT .*token counts", None, "counts-wrong", 0),
    "failed-requests": (failing, r"^PAYS .*BUT .*3 of 12 requests failed \(25%\)", "pays", None, 0),
    "implausible": (slowed, "^PAYS .*BUT .*slowed the baseline: .*624 ms", "pays", None, 0),
    "repeats-differ": (
        remembered,
        "^(DOES NOT PAY|UNDECIDED) .*BUT .*repeats of a prompt are faster than new ones",
        "does-not-pay",
        None,
        3,
    ),
    "cache-differs": (other_caches, "^PAYS .*BUT .*caches differed", "pays", None, 0),
    "conditions-differ": (forced, "^PAYS .*BUT .*conditions differ", "pays", None, 0),
    "waiting": (waiting, "BUT .*waited outside the server", "pays", None, 0),
    "runs-apart": (apart, r"^PAYS .*BUT .*measured 2\.5 h apart", "pays", None, 0),
    "busy": (busy, "BUT .*requests of others", None, None, 0),
    "foreign-traffic": (foreign, "BUT .*another client used a server", None, None, 0),
    "counter-reset": (restarted, "^PAYS .*BUT .*restarted", "pays", None, 0),
    "baseline-drafting": (both_drafting, "^PAYS .*BUT .*baseline drafts too", "pays", None, 0),
    "interrupted": (cut_off, "^PAYS .*BUT .*interrupted", "pays", None, 0),
    "few-prompts": (few, "^PAYS .*BUT .*few prompts", "pays", None, 0),
}


class TheLastLine(unittest.TestCase):
    def test_every_finding_of_the_last_line_has_a_pair_of_servers_here(self):
        spoken = {
            name for name, meaning in ms.FINDINGS.items() if meaning.caveat or meaning.withholds
        }
        self.assertEqual(set(LIES) | {"repeats-differ"}, spoken | {"repeats-differ"})

    def test_each_lie_is_told_in_the_last_line_and_in_the_record(self):
        for name, (servers, words, verdict, withheld, code) in LIES.items():
            with self.subTest(name):
                outcome = servers()
                record = outcome.comparison()
                last = outcome.out.rstrip().splitlines()[-1]
                self.assertRegex(last, words)
                self.assertIn(name, findings(record))
                self.assertEqual(record["verdict_withheld"], withheld)
                if withheld or verdict:
                    self.assertEqual(record["verdict"], verdict, last)
                self.assertEqual(outcome.code, code, outcome.err)

    def test_kinds_of_work_have_no_verdict_where_the_whole_has_none(self):
        for name, (servers, _, _, withheld, _) in LIES.items():
            if withheld:
                with self.subTest(name):
                    parts = servers().comparison()["workloads"]
                    self.assertEqual({part["verdict"] for part in parts}, {None})

    def test_an_honest_pair_says_nothing_behind_the_figure(self):
        outcome = compared(plain(), drafting())
        self.assertRegex(
            outcome.out.rstrip().splitlines()[-1],
            r"^PAYS on work: 2\.00x \(.*\), 12 prompts x 1\.$",
        )


class Grades(unittest.TestCase):
    """The same model, another file of it, another name for it, another model."""

    def test_another_file_stands_behind_but_with_both_names(self):
        outcome = another_file()
        self.assertRegex(outcome.out, r"PAYS .*BUT .*the model files differ \(m.gguf, m-mtp.gguf\)")
        self.assertEqual(findings(outcome.comparison())["model-differs"]["grade"], "file")

    def test_the_bug_report_names_what_the_servers_differ_in(self):
        told = [
            dict(server(model_file=name, quantization=kind))
            for name, kind in (("m-f32.gguf", "F32"), ("m-q4.gguf", "Q4_1"))
        ]
        runs = plain(**told[0]), drafting(**told[1], fields={"content": "another text"})
        report = compared(*runs, flags=("--divergence-report", "bug.md")).files["bug.md"].decode()
        self.assertIn("quantization: baseline F32, speculative Q4_1", report)
        self.assertIn("model file: baseline m-f32.gguf, speculative m-q4.gguf", report)

    def test_the_bug_report_of_servers_that_are_alike_names_no_difference(self):
        runs = plain(), drafting(fields={"content": "another text"})
        report = compared(*runs, flags=("--divergence-report", "bug.md")).files["bug.md"].decode()
        self.assertNotIn("servers differ", report)

    def test_a_tenth_more_parameters_is_another_file_more_is_another_model(self):
        for parameters, withheld in ((109_000_000, None), (111_000_000, "model-differs")):
            outcome = compared(
                plain(**server(parameters=100_000_000)), drafting(**server(parameters=parameters))
            )
            self.assertEqual(outcome.comparison()["verdict_withheld"], withheld, parameters)

    def test_another_name_alone_is_a_note(self):
        outcome = compared(plain(model="plain"), drafting(model="with-draft"))
        self.assertNotIn("BUT", outcome.out)
        self.assertEqual(findings(outcome.comparison())["model-differs"]["grade"], "name")


class FirstAndLaterRepeats(unittest.TestCase):
    def test_the_claim_rests_on_first_repeats_where_the_drafter_remembers(self):
        record = remembered().comparison()
        self.assertEqual(record["speedup"]["rests_on"], "first-repeats")
        self.assertAlmostEqual(record["speedup"]["ratio"], 0.99, delta=0.01)
        self.assertEqual(findings(record)["repeats-differ"]["memory"], "drafter")

    def test_a_prompt_cache_is_a_note(self):
        def warm(line):
            line["cached_tokens"] = 90 * (line["repeat"] > 0)
            line["prompt_tokens"] = 100

        runs = (changed(run, readings(warm)) for run in (plain(repeats=2), drafting(repeats=2)))
        outcome = compared(*runs)
        record = outcome.comparison()
        self.assertEqual(findings(record)["repeats-differ"]["memory"], "prompt-cache")
        self.assertEqual(record["speedup"]["rests_on"], "first-repeats")
        self.assertNotIn("BUT", outcome.out)

    def test_time_to_first_token_tells_the_cache_where_nothing_else_does(self):
        for first_s, later_s, rests_on in (
            (0.100, 0.070, "first-repeats"),
            (0.100, 0.085, "all"),
            (0.010, 0.006, "all"),
        ):

            def warm(line, first_s=first_s, later_s=later_s):
                line["ttft_s"] = later_s if line["repeat"] else first_s
                line["cached_tokens"] = None

            runs = (changed(run, readings(warm)) for run in (plain(repeats=2), drafting(repeats=2)))
            record = compared(*runs).comparison()
            self.assertEqual(record["speedup"]["rests_on"], rests_on, (first_s, later_s))

    def test_repeats_that_nobody_remembers_all_count(self):
        record = compared(plain(repeats=3), drafting(repeats=3)).comparison()
        self.assertEqual(record["speedup"]["rests_on"], "all")
        self.assertNotIn("repeats-differ", findings(record))


class Counts(unittest.TestCase):
    def test_tokens_above_the_limit_leave_no_verdict(self):
        outcome = compared(plain(request={"max_tokens": 50}), drafting(request={"max_tokens": 50}))
        self.assertEqual(outcome.comparison()["verdict_withheld"], "counts-wrong")

    def test_an_end_token_more_or_less_is_no_miscount(self):
        def one_more(line):
            line["completion_tokens"] += 1

        record = compared(plain(), changed(drafting(), readings(one_more))).comparison()
        self.assertNotIn("counts-wrong", findings(record))
        self.assertEqual(record["verdict"], "pays")


class SeveralCandidates(unittest.TestCase):
    def test_the_best_one_is_named_first_and_whether_its_lead_is_real(self):
        runs = (
            plain(),
            arm("k2", 0.8, drafted=20, accepted=15),
            arm("k4", 0.5, drafted=40, accepted=30),
        )
        last = compared(*runs).out.rstrip().splitlines()[-3:]
        self.assertRegex(
            last[0], r"^BEST: k4 at 2\.00x \(.*\), faster than k2, and the difference is real\.$"
        )
        self.assertRegex(last[1], "^k4: PAYS ")
        self.assertRegex(last[2], "^k2: PAYS ")

    def test_a_lead_that_is_not_shown_is_no_lead(self):
        def uneven(line):
            line["latency_s"] *= 1 + 0.2 * (line["prompt_index"] % 2)

        a = arm("k2", 0.55, drafted=20, accepted=15)
        b = changed(arm("k4", 0.5, drafted=40, accepted=30), readings(uneven))
        last = compared(plain(), a, b).out.rstrip().splitlines()[-3]
        self.assertRegex(last, r"^BEST: k\d at .*, but no lead over k\d is shown\.$")

    def test_a_candidate_that_cannot_be_judged_hides_no_winner(self):
        def twice(line):
            line["completion_tokens"] *= 2

        wrong = changed(arm("w", 0.3, drafted=20, accepted=15), readings(twice))
        others = [arm(name, s, drafted=20, accepted=15) for name, s in (("k2", 0.5), ("k3", 0.8))]
        last = compared(plain(), wrong, *others).out
        self.assertRegex(last, r"BEST: k2 at 2\.00x .*faster than k3, and the difference is real")

    def test_the_notebook_ranks_them_too(self):
        runs = (
            plain(),
            arm("k2", 0.8, drafted=20, accepted=15),
            arm("k4", 0.5, drafted=40, accepted=30),
        )
        book = compared(*runs).files["labbook.md"]
        records = [json.loads(line) for line in book.splitlines() if line.startswith(b"{")]
        text = ms.markdown_report(records)
        self.assertRegex(text, r"## Ranking\n\nBEST: k4 at 2\.00x")
        self.assertLess(text.index("| k4 |"), text.index("| k2 |"))


class Overclaims(unittest.TestCase):
    def test_no_practical_difference_needs_an_interval_that_says_so(self):
        def uneven(line):
            line["latency_s"] *= 1 + 0.5 * (line["prompt_index"] % 2) - 0.25

        wide = compared(plain(), changed(drafting(1.0), readings(uneven)))
        self.assertEqual(wide.comparison()["verdict"], "undecided")
        self.assertNotIn("no practical difference", wide.out)

    def test_whether_decoding_gains_is_not_sure_where_its_interval_holds_1(self):
        def uneven(line):
            line["decode_s"] *= 1 + 0.5 * (line["prompt_index"] % 2) - 0.25

        outcome = compared(plain(), changed(drafting(1.0), readings(uneven)))
        self.assertIn("whether decoding gains is not sure", outcome.out)

    def test_a_baseline_that_was_never_repeated_is_not_said_to_agree_with_itself(self):
        outcome = compared(plain(), drafting(fields={"content": "another text"}))
        self.assertEqual(outcome.code, 3)
        alarm = next(line for line in outcome.err.splitlines() if "CHANGED TEXT" in line)
        self.assertIn("not compared with itself", alarm)


class Sampled(unittest.TestCase):
    """Texts that were drawn at random differ for no fault of anybody."""

    WARM = '{"temperature": 0.8}'

    def test_sampled_texts_that_differ_are_no_change_and_no_alarm(self):
        with (
            FakeServer(answers=lambda p, n: "heads " * 9) as a,
            FakeServer(answers=lambda p, n: "tails " * 9, speculation=DRAFTING) as b,
        ):
            outcome = measure(
                *(a, b, "--extra-body", self.WARM, "--fail-on", "changed-text"),
                prompts=["prompt %d" % i for i in range(PROMPTS)],
            )
        texts = outcome.comparison()["text_comparison"]
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertEqual(
            (texts["sampled"], texts["divergent"], texts["divergences"]), (True, None, [])
        )
        self.assertIn("the same seed gave the same sampled text in 0 of 12", outcome.out)
        self.assertNotIn("text changed", outcome.out)
        self.assertIn("at temperature 0.8", outcome.out.rstrip().splitlines()[-1])

    def test_an_arm_that_samples_alone_is_named_with_the_other(self):
        with FakeServer() as a, FakeServer(speculation=DRAFTING) as b:
            outcome = measure(a, b, "--speculative-extra-body", self.WARM, prompts=["a", "b", "c"])
        self.assertIn("at temperature 0.8 (baseline 0)", outcome.out.rstrip().splitlines()[-1])
        self.assertEqual(outcome.endpoint("baseline")["sampling"], None)
        self.assertEqual(outcome.endpoint("baseline")["temperature"], 0.0)
        self.assertEqual(outcome.endpoint("speculative")["temperature"], 0.8)

    def test_a_temperature_that_is_left_to_the_server_is_sampled(self):
        with FakeServer() as a, FakeServer(speculation=DRAFTING) as b:
            outcome = measure(
                a, b, "--extra-body", '{"temperature": null}', prompts=["a", "b", "c"]
            )
        self.assertIn("at the server's own temperature", outcome.out.rstrip().splitlines()[-1])

    def test_a_temperature_of_0_by_any_way_is_greedy(self):
        with FakeServer() as a, FakeServer(speculation=DRAFTING) as b:
            outcome = measure(a, b, "--extra-body", '{"temperature": 0}', prompts=["a", "b", "c"])
        self.assertFalse(outcome.comparison()["text_comparison"]["sampled"])


class NoisyMachines(unittest.TestCase):
    """What chance alone makes of two equal servers is said of neither."""

    def test_first_tokens_that_scatter_are_no_sign_of_a_slowed_baseline(self):
        """Medians alone would accuse about 7 of 40 equal pairs."""
        accused = 0
        for seed in range(40):
            chance = random.Random(seed)

            def scatter(line, chance=chance):
                line["ttft_s"] = 0.05 * math.exp(chance.gauss(0, 0.5))
                line["cached_tokens"] = 0

            runs = (changed(run, readings(scatter)) for run in (plain(), drafting()))
            accused += "implausible" in findings(compared(*runs).comparison())
        self.assertLessEqual(accused, 3)

    def test_one_server_after_the_other_is_said_to_be_so(self):
        with FakeServer("vllm") as a, FakeServer("vllm", speculation=DRAFTING) as b:
            outcome = measure(a, b, "--order", "sequential", prompts=["a", "b", "c"])
        last = outcome.out.rstrip().splitlines()[-1]
        self.assertIn("BUT one server was measured after the other", last)

    def test_under_load_few_pairs_of_blocks_are_named_as_such(self):
        with FakeServer("vllm") as a, FakeServer("vllm", speculation=DRAFTING) as b:
            outcome = measure(a, b, "--concurrency", "2", prompts=["a", "b", "c"])
        self.assertIn("few pairs of blocks", outcome.out.rstrip().splitlines()[-1])


class Waiting(unittest.TestCase):
    def test_no_number_of_prompts_is_advised_where_requests_wait_for_a_model(self):
        def wait(line):
            if (line["prompt_index"] + (line["arm"] == "baseline")) % 2:  # whoever comes second
                line["latency_s"] += 0.4

        runs = (changed(run, readings(wait)) for run in (plain(), drafting(1.01)))
        record = compared(*runs).comparison()
        self.assertEqual((record["verdict"], record["more_prompts"]), ("undecided", None))
        self.assertIn("waiting", findings(record))


class OneServer(unittest.TestCase):
    def test_one_server_alone_has_a_last_line_too(self):
        with FakeServer("vllm") as one:
            last = measure(one, None, prompts=["a", "b"]).out.rstrip().splitlines()[-1]
        self.assertTrue(
            re.match(r"ONE SERVER MEASURED: [\d.]+ tokens/s, so the speed-up is unknown", last),
            last,
        )


if __name__ == "__main__":
    unittest.main()
