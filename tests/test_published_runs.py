"""Figures that people posted of real runs (cases A), and what the program has to say of them."""

import contextlib
import json
import pathlib
import tempfile
import unittest

from tests.fakes import CASES, FakeServer, ReplayServer, Speculation
from tests.support import answer, compare, http, run_main, saved_run

PAGES = """# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total %d
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total %d
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total %d
"""


def body_of(case, name):
    return (CASES / case / name).read_bytes()


def measured(baseline, candidate, *flags, pages=()):
    """Measure servers that give these JSON bodies as answers (either may be None); `pages`: metrics of the candidate."""
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = []
        for name, body in (("baseline", baseline), ("speculative", candidate)):
            if body is not None:
                (folder / (name + ".http")).write_bytes(http(body))
                routes = [
                    {"method": "POST", "path": "/v1/chat/completions", "file": name + ".http"}
                ]
                for number, page in enumerate(pages if name == "speculative" else ()):
                    (folder / ("page%d" % number)).write_bytes(http(page.encode(), "text/plain"))
                    routes.append({"method": "GET", "path": "/metrics", "file": "page%d" % number})
                server = stack.enter_context(ReplayServer(routes, folder))
                words += ["--%s-url" % name, server.url]
        return run_main(*words, "--model", "m", "--warmup", "0", *flags, prompts=["one"])


def posted(case, candidate="spec.json", baseline="baseline.json", *flags):
    """The Outcome for the answers of a case."""
    return measured(baseline and body_of(case, baseline), body_of(case, candidate), *flags)


def rates(baseline_tps, candidate_tps, tokens=400, **drafts):
    """Two planted answers of so many tokens per second; the candidate's has drafts."""
    return answer(tokens, tokens / baseline_tps), answer(tokens, tokens / candidate_tps, **drafts)


class DraftsOfVaryingLength(unittest.TestCase):
    def test_a01_steps_are_counted_from_tokens_never_from_the_draft_limit(self):
        outcome = posted("A01")
        record = outcome.comparison()
        why, accepted = record["break_even"], record["acceptance"]
        self.assertAlmostEqual(accepted["rate"], 0.35606, delta=5e-6)
        self.assertAlmostEqual(accepted["tokens_per_target_step"], 1.5802, delta=5e-5)
        self.assertAlmostEqual(record["decode_speedup"]["ratio"], 1.1795, delta=5e-5)
        self.assertAlmostEqual(why["tokens_per_step"], 1.5802, delta=5e-5)
        self.assertAlmostEqual(why["step_cost"], 128 / 81 / (0.519 / 0.44), delta=1e-6)
        self.assertAlmostEqual(why["chain"], 132 / 81, delta=1e-6)

    def test_a01_the_formula_for_a_fixed_chain_is_called_not_applicable(self):
        outcome = posted("A01")
        why = outcome.comparison()["break_even"]
        self.assertEqual(
            (why["applies"], why["alpha_needed"], why["best_chain"]), ("varying-chain", None, None)
        )
        self.assertIsNone(outcome.comparison()["acceptance"]["alpha"])
        self.assertIn("not applicable", outcome.out)
        self.assertNotRegex(
            outcome.out.split("Why, as to decoding:")[1].split("Text:")[0],
            r"1\.07|Predicted|Best chain",
        )

    def test_a03_drafted_tokens_are_no_output(self):
        outcome = posted("A03")
        record = outcome.comparison()
        self.assertAlmostEqual(record["acceptance"]["rate"], 0.9014, delta=5e-5)
        self.assertAlmostEqual(record["acceptance"]["tokens_per_target_step"], 4.2542, delta=5e-5)
        self.assertAlmostEqual(record["decode_speedup"]["ratio"], 1.1253, delta=5e-5)
        self.assertAlmostEqual(record["break_even"]["step_cost"], 4.2542 / 1.1253, delta=5e-4)
        self.assertEqual(outcome.endpoint("speculative")["output_tokens"], 503)
        self.assertAlmostEqual(
            outcome.endpoint("speculative")["decode_tokens_per_s"], 16.52, delta=0.005
        )

    def test_a11_steps_without_a_draft_are_steps_too(self):
        outcome = posted("A11", baseline=None)
        accepted = outcome.endpoint("speculative")["acceptance"]
        self.assertAlmostEqual(accepted["tokens_per_target_step"], 2.5637, delta=5e-5)
        self.assertAlmostEqual(accepted["rate"], 0.6366, delta=5e-5)
        self.assertIsNone(accepted["alpha"])
        self.assertEqual([r for r in outcome.records if r["kind"] == "comparison"], [])
        self.assertIn("speed-up is unknown", outcome.out)

    def test_a11_the_mean_over_drafting_steps_is_kept_apart(self):
        """With the drafter's own count (470 of 699 steps had a draft) 3.3255 is the mean length, and not the speed."""
        pages = [PAGES % (0, 0, 0)] * 4 + [PAGES % (470, 1717, 1093)]
        outcome = measured(None, body_of("A11", "spec.json"), pages=pages)
        accepted = outcome.endpoint("speculative")["acceptance"]
        self.assertEqual((accepted["steps"], accepted["source"]), (470, "timings+metrics"))
        self.assertAlmostEqual(accepted["mean_length"], 3.3255, delta=5e-5)
        self.assertAlmostEqual(accepted["tokens_per_target_step"], 2.5637, delta=5e-5)

    def test_a11_a_draft_costs_per_target_step_and_its_length_is_that_of_a_draft(self):
        pages = [PAGES % (0, 0, 0)] * 4 + [PAGES % (470, 1717, 1093)]
        baseline = json.loads(body_of("A11", "spec.json"))
        baseline["timings"] = {
            "predicted_n": 1793,
            "predicted_ms": 160000.0,
            "predicted_per_second": 1793 / 160,
        }
        why = measured(
            json.dumps(baseline).encode(), body_of("A11", "spec.json"), pages=pages
        ).comparison()["break_even"]
        cost = 1792 / 699 / (160000.0 / 156488.86)
        self.assertEqual(why["applies"], "varying-chain")
        self.assertAlmostEqual(why["step_cost"], cost, delta=1e-4)
        self.assertAlmostEqual(why["draft_cost"], (cost - 1) / (1717 / 699), delta=1e-4)

    def test_a12_a_deep_draft_that_is_rejected_has_its_low_rate_and_its_steps(self):
        accepted = posted("A12", "spec_default.json", None).endpoint("speculative")["acceptance"]
        self.assertAlmostEqual(accepted["rate"], 0.06967, delta=5e-6)
        self.assertAlmostEqual(accepted["tokens_per_target_step"], 117 / 21, delta=1e-9)


class RateIsNotAlpha(unittest.TestCase):
    def test_a05_accepted_over_drafted_is_never_used_as_alpha(self):
        outcome = posted("A05")
        record = outcome.comparison()
        why = record["break_even"]
        self.assertAlmostEqual(record["acceptance"]["rate"], 0.72055, delta=5e-6)
        for alpha in (record["acceptance"]["alpha"], why["alpha"]):
            self.assertAlmostEqual(alpha, 0.8927, delta=5e-5)
        self.assertAlmostEqual(why["tokens_per_step"], 4.6027, delta=5e-5)
        self.assertAlmostEqual(record["decode_speedup"]["ratio"], 1.7074, delta=5e-5)
        self.assertEqual((why["applies"], why["chain"]), ("alpha", 5))

    def test_a05_the_alpha_needed_pays_for_the_measured_step(self):
        why = posted("A05").comparison()["break_even"]
        cost = 4.6027 / 1.7074
        self.assertAlmostEqual(why["step_cost"], cost, delta=5e-4)
        self.assertAlmostEqual(
            sum(why["alpha_needed"] ** i for i in range(6)), why["step_cost"], delta=1e-9
        )
        self.assertAlmostEqual(why["draft_cost"], (cost - 1) / 5, delta=5e-4)

    def test_a05_the_report_shows_both_and_says_which_is_which(self):
        out = posted("A05").out
        self.assertRegex(out, r"alpha 0\.89; 0\.\d\d is needed at chain length 5")
        self.assertRegex(out, r"accepted/drafted is another figure")


class SweepsOverChainLengths(unittest.TestCase):
    def test_a06_ungated_chains_have_their_length_cost_and_break_even(self):
        for k, tps, rate, length, ratio, cost, bar in (
            (3, 23.5, 0.34, 2.020, 0.8801, 2.2951, 0.432),
            (2, 29.6, 0.54, 2.080, 1.1086, 1.8762, 0.438),
        ):
            steps = 100
            drafted, accepted = k * steps, round(k * steps * rate)
            plain, drafting = rates(
                26.7, tps, 1 + steps + accepted, drafted=drafted, accepted=accepted
            )
            record = compare(
                ("b.jsonl", saved_run("baseline", [[plain]])),
                ("s.jsonl", saved_run("speculative", [[drafting]])),
            ).comparison()
            why = record["break_even"]
            self.assertAlmostEqual(record["speedup"]["ratio"], ratio, delta=1e-4)
            self.assertAlmostEqual(why["tokens_per_step"], length, delta=1e-3)
            self.assertAlmostEqual(why["step_cost"], cost, delta=1e-3)
            self.assertAlmostEqual((why["step_cost"] - 1) / k, bar, delta=1e-3)
            self.assertEqual((why["applies"], why["chain"]), ("alpha", k))

    def test_a06_tokens_per_step_are_unknown_where_the_steps_are(self):
        """A rate of 0.94 at a limit of 2 drafts does not tell how many steps there were: 1 + 2 x 0.94 is no answer."""
        plain, gated = rates(26.7, 30.5, drafted=100, accepted=94)
        plain["completion_tokens"] = gated["completion_tokens"] = None
        record = compare(
            ("b.jsonl", saved_run("baseline", [[plain]])),
            ("s.jsonl", saved_run("speculative", [[gated]])),
        ).comparison()
        self.assertAlmostEqual(record["acceptance"]["rate"], 0.94)
        self.assertIsNone(record["break_even"]["tokens_per_step"])
        self.assertIsNone(record["break_even"]["alpha"])

    def test_a06_a_gated_draft_is_no_fixed_chain(self):
        plain, gated = rates(
            26.7, 30.5, 301, drafted=130, accepted=122
        )  # 178 steps of at most 2 drafts
        record = compare(
            ("b.jsonl", saved_run("baseline", [[plain]])),
            ("s.jsonl", saved_run("speculative", [[gated]])),
        ).comparison()
        self.assertEqual(record["break_even"]["applies"], "varying-chain")
        self.assertAlmostEqual(record["break_even"]["tokens_per_step"], 300 / 178, delta=1e-9)

    def test_a06_three_percent_without_repeats_make_no_winner(self):
        files = [("b.jsonl", saved_run("baseline", [[answer(400, 400 / 26.7)]]))]
        files += [
            (
                name + ".jsonl",
                saved_run(name, [[answer(400, 400 / tps, drafted=260, accepted=200)]]),
            )
            for name, tps in (("k2", 29.6), ("gate6", 30.5), ("gate85", 29.5))
        ]
        outcome = compare(*files)
        ranking = outcome.out[outcome.out.index("Candidate") :].splitlines()[2:5]
        self.assertEqual([line.split()[0] for line in ranking], ["gate6", "k2", "gate85"])
        for line in ranking[1:]:
            self.assertRegex(line, "too few prompts to tell")

    def test_a12_high_acceptance_is_no_proof_of_speed(self):
        """0.90 accepted, and slower than plain decoding by ten percent in each of twelve prompts."""
        plain, slow = zip(
            *(
                rates(184.0 + i % 3, 165.4 - i % 2, 401, drafted=330, accepted=297)
                for i in range(12)
            )
        )
        outcome = compare(
            ("b.jsonl", saved_run("baseline", [[a] for a in plain])),
            ("s.jsonl", saved_run("speculative", [[a] for a in slow])),
        )
        self.assertAlmostEqual(outcome.comparison()["acceptance"]["rate"], 0.9)
        self.assertEqual(outcome.comparison()["verdict"], "does-not-pay")
        self.assertIn("DOES NOT PAY", outcome.out.splitlines()[-1])
        self.assertNotRegex(outcome.out, r"(?<!NOT )PAYS|good acceptance")

    def test_a12_without_a_baseline_the_speedup_is_unknown(self):
        out = posted("A12", "spec_default.json", None).out
        self.assertIn("the speed-up is unknown", out)
        self.assertNotRegex(out, "PAY")


class OneDraftCheaperThanAToken(unittest.TestCase):
    FACTS = json.loads((CASES / "A14" / "facts.json").read_text())

    def outcome(self):
        step_s = (self.FACTS["D_ms"] + self.FACTS["V_ms"]) / 1000
        drafting = answer(161, 100 * step_s, drafted=100, accepted=60)
        plain = answer(161, 160 * self.FACTS["T_ms"] / 1000)
        return compare(
            ("b.jsonl", saved_run("baseline", [[plain]])),
            ("s.jsonl", saved_run("speculative", [[drafting]])),
        )

    def test_a14_break_even_is_any_and_never_negative(self):
        outcome = self.outcome()
        why = outcome.comparison()["break_even"]
        self.assertAlmostEqual(why["step_cost"], 0.9275, delta=5e-5)
        self.assertEqual((why["applies"], why["alpha_needed"]), ("any", 0))
        self.assertIn("any acceptance pays", outcome.out)

    def test_a14_a_step_cheaper_than_a_token_raises_a_remark(self):
        self.assertIn("check the timing", self.outcome().out)

    def test_a14_ceiling_and_floor_of_the_speedup_follow_from_its_times(self):
        cost = (self.FACTS["D_ms"] + self.FACTS["V_ms"]) / self.FACTS["T_ms"]
        for tokens, right in ((2, 2.1563), (1, 1.0782)):
            told = json.loads(
                run_main(
                    "break-even",
                    "--measured-step-cost",
                    cost,
                    "--tokens-per-step",
                    tokens,
                    "--json",
                ).out
            )
            self.assertAlmostEqual(told["measured"]["speedup"], right, delta=5e-5)


class SpeculationThatDidNotRun(unittest.TestCase):
    def check(self, body):
        outcome = measured(body_of("A16", "baseline.json"), body)
        record = outcome.comparison()
        self.assertIsNone(record["verdict"])
        self.assertIsNone((record["acceptance"] or {}).get("rate"))
        self.assertIn("not-drafting", [found["finding"] for found in record["audit"]])
        self.assertTrue(outcome.out.splitlines()[-1].startswith("DID NOT RUN"), outcome.out)
        self.assertNotRegex(outcome.out, "PAY")
        self.assertAlmostEqual(record["decode_speedup"]["ratio"], 0.9975, delta=5e-5)

    def test_a16_no_draft_fields_mean_that_speculation_did_not_run(self):
        self.check(body_of("A16", "spec_200.json"))

    def test_a16_no_drafted_tokens_mean_that_speculation_did_not_run(self):
        body = json.loads(body_of("A16", "spec_200.json"))
        body["timings"].update(draft_n=0, draft_n_accepted=0)
        self.check(json.dumps(body).encode())

    def test_a16_long_answers_of_the_same_server_were_drafted(self):
        record = posted("A16", "spec_512.json", None).endpoint("speculative")
        self.assertAlmostEqual(record["acceptance"]["rate"], 0.5833, delta=5e-5)
        self.assertAlmostEqual(
            record["acceptance"]["tokens_per_target_step"], 511 / 161, delta=1e-9
        )
        self.assertAlmostEqual(record["decode_tokens_per_s"], 85.33, delta=0.005)

    def test_a16_runs_of_200_and_512_tokens_are_not_paired(self):
        short = measured(
            body_of("A16", "baseline.json"), None, "--max-tokens", "200", "--save-run", "run.jsonl"
        )
        long = measured(
            None, body_of("A16", "spec_512.json"), "--max-tokens", "512", "--save-run", "run.jsonl"
        )
        outcome = compare(
            ("short.jsonl", short.files["run.jsonl"]), ("long.jsonl", long.files["run.jsonl"])
        )
        self.assertEqual((outcome.code, outcome.records), (2, []))
        self.assertIn("max_tokens", outcome.err)


class ChunksAreNoTokens(unittest.TestCase):
    def test_a17_tokens_are_counted_by_usage_and_timed_by_the_server(self):
        with ReplayServer("routes.json", CASES / "A17") as server:
            outcome = run_main(
                "--speculative-url", server.url, "--model", "m", "--warmup", "0", prompts=["one"]
            )
        record = outcome.endpoint("speculative")
        self.assertEqual((record["output_tokens"], record["tokens_counted_by_server"]), (12, True))
        self.assertAlmostEqual(record["decode_tokens_per_s"], 48.0, delta=1e-9)
        self.assertAlmostEqual(record["acceptance"]["rate"], 0.6)
        self.assertAlmostEqual(record["acceptance"]["tokens_per_target_step"], 5.5)

    def test_a17_without_a_token_count_there_is_no_rate(self):
        with FakeServer("vllm", usage=False, details=False, speculation=Speculation()) as server:
            outcome = run_main("--speculative-url", server.url, prompts=["one"])
        record = outcome.endpoint("speculative")
        self.assertEqual(
            (record["output_tokens"], record["output_tokens_per_s"], record["decode_tokens_per_s"]),
            (None,) * 3,
        )
        self.assertFalse(record["tokens_counted_by_server"])
        self.assertIn("usage-missing", [found["finding"] for found in record["audit"]])
        self.assertRegex(outcome.out, "without a token count|no token count")


class MixturesOfWork(unittest.TestCase):
    KINDS = ("python", "bash", "prose")
    POSTED = {
        (row["prompt"], row["n_max"]): row["tok_s"]
        for row in map(json.loads, (CASES / "A20" / "labbook.jsonl").read_text().splitlines())
    }

    def outcome(self, *flags):
        """Three kinds of work, four prompts each, that scatter by about a percent."""
        files = []
        for name, n_max in (("baseline", 2), ("speculative", 4)):
            drafts = {"drafted": 4 * 130, "accepted": 270} if name == "speculative" else {}
            answers = [
                [
                    answer(
                        401,
                        401 / self.POSTED[kind, n_max] * (1 + 0.002 * (i * n_max % 5 - 2)),
                        **drafts,
                    )
                ]
                for kind in self.KINDS
                for i in range(4)
            ]
            files.append(
                (
                    name + ".jsonl",
                    saved_run(name, answers, [kind for kind in self.KINDS for _ in range(4)]),
                )
            )
        return compare(*files, flags=flags)

    def test_a20_each_kind_of_work_has_its_own_ratio_and_verdict(self):
        parts = self.outcome().comparison()["workloads"]
        self.assertEqual([part["workload"] for part in parts], list(self.KINDS))
        for part, right, verdict in zip(
            parts, (1.6667, 1.0947, 0.9174), ("pays", "pays", "does-not-pay")
        ):
            self.assertAlmostEqual(part["speedup"]["ratio"], right, delta=0.01)
            self.assertEqual(part["verdict"], verdict)

    def test_a20_the_overall_speed_is_tokens_over_time_and_the_ratio_a_geometric_mean(self):
        record = self.outcome().comparison()
        self.assertAlmostEqual(record["baseline_tokens_per_s"], 41.26, delta=0.1)
        self.assertAlmostEqual(record["speculative_tokens_per_s"], 46.60, delta=0.1)
        self.assertAlmostEqual(
            record["speedup"]["ratio"], (1.6667 * 1.0947 * 0.9174) ** (1 / 3), delta=0.005
        )

    def test_a20_the_report_names_the_mean_it_uses(self):
        """41.26 and 46.60 tokens/s stand beside a ratio that is not their quotient: the reader must be told why."""
        self.assertIn("geometric mean", self.outcome().out)

    def test_a20_a_mean_never_hides_a_kind_that_loses(self):
        quoted = self.outcome().out.splitlines()[-1]
        for words in (
            r"PAYS on python: 1\.6\d",
            r"PAYS on bash: 1\.(09|1\d)",
            r"DOES NOT PAY on prose: 0\.9\d",
        ):
            self.assertRegex(quoted, words)


class SettingsAreKeptApart(unittest.TestCase):
    ROWS = {
        (row["kind"], row["server"]["tp"]): row["tok_s"]
        for row in map(json.loads, (CASES / "A08" / "labbook.jsonl").read_text().splitlines())
    }

    def test_a08_each_split_is_an_experiment_of_its_own(self):
        notebook = b""
        for tp, right in ((1, 1.4286), (4, 0.9672)):
            outcome = compare(
                (
                    "b.jsonl",
                    saved_run("baseline", [[answer(400, 400 / self.ROWS["baseline", tp])]]),
                ),
                ("s.jsonl", saved_run("speculative", [[answer(400, 400 / self.ROWS["spec", tp])]])),
                flags=("--label", "tp%d" % tp),
            )
            self.assertAlmostEqual(outcome.comparison()["speedup"]["ratio"], right, delta=5e-5)
            notebook += outcome.files["labbook.md"]
        report = run_main("report", "labbook.md", files={"labbook.md": notebook}).out
        one, four = report.index("## tp1"), report.index("## tp4")
        self.assertIn("1.43", report[one:four])
        self.assertIn("0.97", report[four:])
        self.assertNotIn("2.81", report)

    def test_a08_arms_measured_alone_are_never_joined_to_a_ratio(self):
        notebook = b""
        for kind in ("baseline", "spec"):
            with FakeServer("plain", words=8) as server:
                flag = "--baseline-url" if kind == "baseline" else "--speculative-url"
                notebook += run_main(flag, server.url, "--label", "split", prompts=["one"]).files[
                    "labbook.md"
                ]
        outcome = run_main("report", "labbook.md", files={"labbook.md": notebook})
        self.assertEqual(outcome.code, 0)
        self.assertIn("split/baseline", outcome.out)
        self.assertIn("split/speculative", outcome.out)
        self.assertNotRegex(outcome.out, r"\d\.\d\dx")


if __name__ == "__main__":
    unittest.main()
