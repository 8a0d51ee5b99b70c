"""The program, run as a user runs it, against real llama.cpp servers on this machine (see tests/real_engine.py).

Counts, texts and records are checked against what the test reads from the servers itself; speeds never are:
these machines are small, and other work disturbs them. Every run is of a copy of the one file in an empty folder.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

from tests import real_engine

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "measure_speculative.py"
DRAFTS = "llamacpp:spec_decode_num_drafts_total"
DRAFTED = "llamacpp:spec_decode_num_draft_tokens_total"
ACCEPTED = "llamacpp:spec_decode_num_accepted_tokens_total"
PREDICTED = "llamacpp:tokens_predicted_total"
POSITION = 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="%d"}'

CLOSED = [
    ("closed", "What is the capital of France?"),
    ("closed", "Name the seven days of the week, in order."),
]
OPEN = [
    ("open", "Write a short story about a lighthouse keeper."),
    ("open", "Describe a market at dawn in one paragraph."),
]


def setUpModule():
    reason = real_engine.missing()
    if reason:
        raise unittest.SkipTest(reason)


class Running:
    """The program at work in a folder of its own, or what came of it."""

    def __init__(self, prompts, *flags, servers=(), env=None):
        self._folder = tempfile.TemporaryDirectory(prefix="measured-")
        self.folder = pathlib.Path(self._folder.name)
        shutil.copy(PROGRAM, self.folder)
        lines = [json.dumps({"workload": workload, "prompt": text}) for workload, text in prompts]
        (self.folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        urls = [
            word
            for option, server in zip(("--baseline-url", "--speculative-url"), servers)
            if server
            for word in (option, server.url)
        ]
        self.process = self._start(
            *urls,
            "--prompts",
            "prompts.jsonl",
            "--save-run",
            "run.jsonl",
            *map(str, flags),
            env=env,
        )

    def _start(self, *argv, env=None):
        return subprocess.Popen(
            [sys.executable, PROGRAM.name, *argv],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )

    def again(self, *argv):
        """Run another command of the program in the same folder; returns its exit code, stdout and stderr."""
        process = self._start(*argv)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def finish(self):
        self.out, self.err = self.process.communicate(timeout=400)
        self.code = self.process.returncode
        return self

    def lines(self, name="run.jsonl"):
        """The finished JSON lines of a file, which may still be growing."""
        path = self.folder / name
        text = path.read_text("utf-8") if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def records(self, kind, name="labbook.md"):
        return [record for record in self.lines(name) if record["kind"] == kind]

    def record(self, arm):
        """The one record whose label ends in /ARM (baseline, speculative or comparison)."""
        (record,) = [r for r in self.lines("labbook.md") if r["label"].endswith("/" + arm)]
        return record

    def readings(self, arm):
        return [line for line in self.lines() if line["kind"] == "reading" and line["arm"] == arm]

    def wait_for_readings(self, arm, count):
        """Until so many of its requests are done."""
        give_up = time.monotonic() + 100
        while len(self.readings(arm)) < count:
            if self.process.poll() is not None or time.monotonic() > give_up:
                raise AssertionError(
                    f"{count} readings did not come: {self.process.communicate(timeout=10)}"
                )
            time.sleep(0.05)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._folder.cleanup()


def measure(*args, **options):
    return Running(*args, **options).finish()


def counters(server):
    """{series: value} of the server's page, read line by line without the program's parser."""
    lines = [line for line in server.metrics().splitlines() if line and not line.startswith("#")]
    return {series: float(value) for series, value in (line.rsplit(" ", 1) for line in lines)}


def grown(before, after):
    return {series: value - before.get(series, 0.0) for series, value in after.items()}


def findings(record):
    return {entry["finding"] for entry in record["audit"]}


def ask(server, prompt, **fields):
    """One completion of another client."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "seed": 0,
        **fields,
    }
    request = urllib.request.Request(
        server.url + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.loads(answer.read())


class RealTest(unittest.TestCase):
    @classmethod
    def use(cls, context):
        """Enter a context for the length of the class."""
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        return stack.enter_context(context)

    @classmethod
    def kept(cls, run):
        """A run whose folder lives as long as the class."""
        cls.addClassCleanup(run.close)
        return run

    def start(self, *args, **options):
        """A run that the test goes along with."""
        run = Running(*args, **options)
        self.addCleanup(run.close)
        return run

    def measure(self, *args, **options):
        return self.start(*args, **options).finish()

    def server(self, **options):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        return stack.enter_context(real_engine.server(**options))


class HonestDraft(RealTest):
    """A draft that is the target itself: nearly all is accepted, nothing may change, and it cannot pay."""

    @classmethod
    def setUpClass(cls):
        cls.plain = cls.use(real_engine.server(n_ctx=1024))
        cls.drafting = cls.use(real_engine.server(draft="self", n_max=4, n_ctx=1024))
        before = [counters(server) for server in (cls.plain, cls.drafting)]
        cls.run_ = cls.kept(
            measure(
                CLOSED + OPEN,
                "--model",
                "local-chat",
                "--max-tokens",
                32,
                "--repeats",
                2,
                "--warmup",
                0,
                "--label",
                "honest",
                servers=(cls.plain, cls.drafting),
            )
        )
        after = [counters(server) for server in (cls.plain, cls.drafting)]
        cls.growth = dict(zip(("baseline", "speculative"), map(grown, before, after)))

    def test_measuring_succeeds_and_prints_the_verdict_last(self):
        self.assertEqual(self.run_.code, 0, self.run_.err)
        self.assertRegex(
            self.run_.out.rstrip().splitlines()[-1],
            r"^(PAYS|DOES NOT PAY|UNDECIDED) on .*\d\.\d\dx",
        )
        self.assertIn("speculative server", self.run_.err)
        self.assertIn("does not list the model local-chat", self.run_.err)

    def test_every_completion_is_identical(self):
        texts = self.run_.record("comparison")["text_comparison"]
        told = {
            name: texts[name]
            for name in ("compared", "identical", "divergent", "empty", "failed", "divergences")
        }
        self.assertEqual(
            told,
            {
                "compared": 8,
                "identical": 8,
                "divergent": 0,
                "empty": 0,
                "failed": 0,
                "divergences": [],
            },
        )
        for own in (texts["baseline_self"], texts["speculative_self"]):
            self.assertEqual((own["compared"], own["identical"]), (4, 4))
        baseline, speculative = (
            {(r["prompt_index"], r["repeat"]): r["content"] for r in self.run_.readings(arm)}
            for arm in ("baseline", "speculative")
        )
        self.assertEqual(baseline, speculative)
        self.assertTrue(all(baseline.values()))

    def test_spec_metrics_delta_is_what_the_counters_grew_by(self):
        for arm, growth in self.growth.items():
            with self.subTest(arm):
                wanted = {
                    series: value for series, value in growth.items() if "spec_decode" in series
                }
                delta = self.run_.record(arm)["spec_metrics_delta"]
                self.assertEqual(delta, wanted)
                self.assertEqual(list(delta), sorted(delta))
        self.assertGreater(self.growth["speculative"][DRAFTS], 20)
        self.assertEqual(self.growth["baseline"][DRAFTS], 0)

    def test_output_tokens_are_those_that_the_server_predicted(self):
        for arm, growth in self.growth.items():
            with self.subTest(arm):
                self.assertEqual(self.run_.record(arm)["output_tokens"], growth[PREDICTED])

    def test_notebook_parses_line_by_line(self):
        def refuse(constant):
            raise AssertionError(f"{constant} is no JSON")

        text = (self.run_.folder / "labbook.md").read_text("ascii")
        self.assertTrue(text.endswith("\n"))
        records = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
        self.assertEqual(
            [r["label"] for r in records],
            ["honest/baseline", "honest/speculative", "honest/comparison"],
        )
        for record in records[:2]:
            self.assertEqual(
                (record["engine"], record["requests"], record["completed"], record["failed"]),
                ("llama.cpp", 8, 8, 0),
            )
            self.assertTrue(record["tokens_counted_by_server"])
            self.assertEqual(record["server"]["context"], 1024)

    def test_counters_timings_and_our_figures_agree_exactly(self):
        told, growth = self.run_.record("speculative")["acceptance"], self.growth["speculative"]
        timings = [reading["timings"] for reading in self.run_.readings("speculative")]
        drafted = sum(t.get("draft_n", 0) for t in timings)
        accepted = sum(t.get("draft_n_accepted", 0) for t in timings)
        steps = growth[DRAFTS]
        self.assertEqual((growth[DRAFTED], growth[ACCEPTED]), (drafted, accepted))
        self.assertEqual(
            (told["steps"], told["drafted"], told["accepted"]), (steps, drafted, accepted)
        )
        self.assertEqual(told["source"], "timings+metrics")
        positions = [growth[POSITION % i] for i in range(4)]
        self.assertEqual(sum(positions), accepted)
        self.assertEqual(told["per_position"], [count / steps for count in positions])
        tokens, answers = sum(t["predicted_n"] for t in timings), len(timings)
        self.assertEqual(told["rate"], accepted / drafted)
        self.assertEqual(told["mean_length"], 1 + accepted / steps)
        self.assertEqual(
            told["tokens_per_target_step"], (tokens - answers) / (tokens - answers - accepted)
        )
        self.assertEqual(told["alpha"], accepted / (accepted + steps - positions[3]))
        without_draft = tokens - answers - accepted - steps
        if all(
            reading["finish_reason"] == "length" for reading in self.run_.readings("speculative")
        ):
            self.assertTrue(0 <= without_draft <= answers, without_draft)

    def test_acceptance_of_the_workloads_adds_up(self):
        for name in ("steps", "drafted", "accepted"):
            record = self.run_.record("speculative")
            self.assertEqual(
                sum(part["acceptance"][name] for part in record["workloads"]),
                record["acceptance"][name],
                name,
            )

    def test_length_over_step_cost_is_the_measured_decode_ratio(self):
        """By construction: a check of the bookkeeping, not of a prediction."""
        rates = {}
        for arm in ("baseline", "speculative"):
            timings = [reading["timings"] for reading in self.run_.readings(arm)]
            rates[arm] = sum(t["predicted_n"] - 1 for t in timings) / sum(
                t["predicted_ms"] / 1000 for t in timings
            )
            self.assertAlmostEqual(
                self.run_.record(arm)["decode_tokens_per_s"] / rates[arm], 1, delta=1e-9
            )
        why = self.run_.record("comparison")["break_even"]
        self.assertAlmostEqual(
            why["tokens_per_step"] / why["step_cost"] / (rates["speculative"] / rates["baseline"]),
            1,
            delta=1e-9,
        )
        self.assertEqual(why["chain"], 4)
        self.assertAlmostEqual(
            why["draft_cost"] * self._drafts_per_target_step(), why["step_cost"] - 1, delta=1e-9
        )

    def _drafts_per_target_step(self):
        growth = self.growth["speculative"]
        return growth[DRAFTED] / (growth[PREDICTED] - 8 - growth[ACCEPTED])

    def test_audit_is_silent_on_an_honest_pair(self):
        for arm in ("baseline", "speculative"):
            self.assertEqual(self.run_.record(arm)["audit"], [])
        audit = {entry["finding"]: entry for entry in self.run_.record("comparison")["audit"]}
        # both servers have the repeats in their prompt caches; on a busy machine there may be a stall
        self.assertLessEqual(set(audit), {"few-prompts", "repeats-differ", "stalls"})
        self.assertEqual(audit["repeats-differ"]["memory"], "prompt-cache")
        self.assertNotIn("repeats", self.run_.out.rstrip().splitlines()[-1])

    def test_comparing_the_saved_run_gives_the_same_record(self):
        code, _, err = self.run_.again(
            "compare", "run.jsonl", "--label", "honest", "--labbook", "compared.md"
        )
        self.assertEqual(code, 0, err)
        (again,) = self.run_.records("comparison", "compared.md")
        first = self.run_.record("comparison")
        for record in (again, first):
            del record["run_id"], record["recorded_at"]
        self.assertEqual(json.dumps(again), json.dumps(first))

    def test_report_reads_the_notebook(self):
        code, out, err = self.run_.again("report", "labbook.md")
        self.assertEqual(code, 0, err)
        self.assertIn("| Workload | Baseline tokens/s | With draft tokens/s | Ratio |", out)

    def test_warm_up_is_outside_everything(self):
        before = counters(self.drafting)
        run = self.measure(
            CLOSED, "--max-tokens", 8, "--warmup", 2, servers=(self.plain, self.drafting)
        )
        growth, record = grown(before, counters(self.drafting)), run.record("speculative")
        # two answers of eight tokens each were made and are not in the record
        self.assertEqual((record["requests"], record["warmup"]), (2, 2))
        self.assertEqual(growth[PREDICTED] - record["output_tokens"], 16)
        self.assertGreater(growth[DRAFTS], record["acceptance"]["steps"])
        self.assertEqual(record["audit"], [])

    def test_one_server_as_both_arms_is_a_check_of_noise(self):
        run = self.measure(CLOSED, "--max-tokens", 8, servers=(self.plain, self.plain))
        self.assertEqual(run.code, 0, run.err)
        record = run.record("comparison")
        self.assertIn("same-server", findings(record))
        self.assertFalse({"cache-differs", "not-drafting"} & findings(record))
        for arm in ("baseline", "speculative"):
            self.assertNotIn("foreign-traffic", findings(run.record(arm)))
        self.assertEqual(record["text_comparison"]["identical"], 2)

    def test_candidate_on_the_baselines_server_is_not_taken_for_foreign_traffic(self):
        run = self.measure(
            CLOSED,
            "--max-tokens",
            8,
            "--speculative-url",
            f"k4={self.drafting.url}",
            "--speculative-url",
            f"same={self.plain.url}",
            servers=(self.plain,),
        )
        self.assertEqual(run.code, 0, run.err)
        for record in run.records("endpoint"):
            self.assertNotIn("foreign-traffic", findings(record), record["label"])
        told = {
            record["label"].split("/")[1]: findings(record) for record in run.records("comparison")
        }
        self.assertIn("same-server", told["same"])
        self.assertNotIn("same-server", told["k4"])

    def test_a_plain_server_in_place_of_the_drafting_one_gets_no_verdict(self):
        other = self.server(n_ctx=1024)
        run = self.measure(CLOSED, "--max-tokens", 8, servers=(self.plain, other))
        record = run.record("comparison")
        self.assertIn("not-drafting", findings(record))
        self.assertIsNone(record["verdict"])
        self.assertIn("DID NOT RUN", run.out.splitlines()[-1])

    def test_drafting_baseline_is_found(self):
        run = self.measure(CLOSED, "--max-tokens", 8, servers=(self.drafting, self.plain))
        self.assertIn("baseline-drafting", findings(run.record("comparison")))

    def test_plain_answers_give_the_same_counts_as_streamed_ones(self):
        before = counters(self.drafting)
        run = self.measure(
            CLOSED,
            "--max-tokens",
            16,
            "--warmup",
            0,
            "--no-stream",
            servers=(self.plain, self.drafting),
        )
        growth, record = grown(before, counters(self.drafting)), run.record("speculative")
        self.assertEqual(record["output_tokens"], growth[PREDICTED])
        self.assertEqual(record["acceptance"]["steps"], growth[DRAFTS])
        self.assertIsNone(record["ttft_s"])
        self.assertEqual(run.record("comparison")["text_comparison"]["identical"], 2)


class Key(RealTest):
    def test_server_with_a_key_is_measured_and_the_key_shown_nowhere(self):
        key = "sk-test-3b9f0c7d51"
        server = self.server(n_ctx=512, api_key=key)
        run = self.measure(
            CLOSED[:1],
            "--max-tokens",
            8,
            "--warmup",
            0,
            servers=(server,),
            env={"SPEC_API_KEY": key},
        )
        self.assertEqual(run.code, 0, run.err)
        self.assertEqual(
            run.record("baseline")["spec_metrics_delta"][DRAFTS], 0
        )  # so the guarded page was read
        for text in (
            run.out,
            run.err,
            *((run.folder / name).read_text() for name in ("labbook.md", "run.jsonl")),
        ):
            self.assertNotIn(key, text)
        refused = self.measure(CLOSED[:1], servers=(server,), env={"SPEC_API_KEY": ""})
        self.assertEqual(refused.code, 2)
        self.assertIn("SPEC_API_KEY", refused.err)


class KnownAcceptance(RealTest):
    """synth_rates: the server accepts at known rates, whatever the draft says, so the models may be cut short.

    Each answer draws the same random numbers for the same seed: a sample of 1,000 independent steps is one answer.
    """

    RATES = (0.6, 0.3, 0.12)
    TOKENS = 2100

    @classmethod
    def setUpClass(cls):
        target, draft = (
            real_engine.cut_draft(real_engine.model_file(), layers) for layers in (2, 1)
        )
        plain = cls.use(real_engine.server(model=target))
        drafting = cls.use(
            real_engine.server(model=target, draft=draft, n_max=3, synth_rates=cls.RATES)
        )
        cls.run_ = cls.kept(
            measure(
                OPEN[:1],
                "--max-tokens",
                cls.TOKENS,
                "--extra-body",
                '{"ignore_eos": true}',
                "--triage",
                0,
                "--warmup",
                0,
                servers=(plain, drafting),
            )
        )

    def setUp(self):
        self.assertEqual(self.run_.code, 0, self.run_.err)
        self.told = self.run_.record("speculative")["acceptance"]
        self.steps = self.told["steps"]
        self.assertGreaterEqual(self.steps, 1000)

    def assert_near(self, measured, true, spread, words):
        """Within three standard errors, `spread` being the deviation of a single step."""
        self.assertLess(
            abs(measured - true),
            3 * spread / math.sqrt(self.steps),
            f"{words}: {measured}, true {true}",
        )

    def moments(self, value_of):
        """Mean and deviation of value_of(accepted) over one step."""
        some = (1.0, *self.RATES, 0.0)
        chances = [(some[j] - some[j + 1], value_of(j)) for j in range(len(self.RATES) + 1)]
        mean = sum(p * v for p, v in chances)
        return mean, math.sqrt(sum(p * (v - mean) ** 2 for p, v in chances))

    def test_rates_are_recovered_at_each_position(self):
        self.assertEqual(len(self.told["per_position"]), 3)
        for position, (measured, true) in enumerate(zip(self.told["per_position"], self.RATES), 1):
            self.assert_near(measured, true, math.sqrt(true * (1 - true)), f"position {position}")

    def test_length_is_recovered(self):
        mean, spread = self.moments(lambda accepted: 1 + accepted)
        self.assert_near(self.told["mean_length"], mean, spread, "mean length")
        self.assert_near(
            self.told["tokens_per_target_step"], mean, spread, "tokens per target step"
        )
        # every step drafted, but perhaps the last, which had no room for one
        self.assertTrue(0 <= self.TOKENS - 1 - self.told["accepted"] - self.steps <= 1)

    def test_alpha_is_recovered_and_is_not_accepted_over_drafted(self):
        rejected = 1 - self.RATES[-1]
        accepted = sum(self.RATES)
        alpha = accepted / (accepted + rejected)
        # the deviation of a ratio of two means: of (a - alpha * tested) / mean tested
        _, spread = self.moments(lambda j: j - alpha * (j + (j < len(self.RATES))))
        self.assert_near(self.told["alpha"], alpha, spread / (accepted + rejected), "alpha")
        self.assertLess(self.told["rate"], self.told["alpha"] - 0.1)

    def test_predicted_speedup_is_that_of_the_true_rates_at_the_measured_cost(self):
        why = self.run_.record("comparison")["break_even"]
        self.assertEqual(why["chain"], 3)
        predicted = {entry["chain"]: entry for entry in why["predicted"]}
        for chain in (1, 2, 3):
            mean, spread = self.moments(lambda accepted, most=chain: 1 + min(accepted, most))
            cost = 1 + chain * why["draft_cost"]
            self.assert_near(
                predicted[chain]["predicted_speedup"], mean / cost, spread / cost, f"chain {chain}"
            )
            self.assertFalse(predicted[chain]["extrapolated"])
        self.assertAlmostEqual(
            predicted[3]["predicted_speedup"] / (why["tokens_per_step"] / why["step_cost"]),
            1,
            delta=0.01,
        )

    def test_made_up_acceptance_does_not_hide_the_changed_text(self):
        self.assertIn("BUT the text changed in 1 of 1", self.run_.out.splitlines()[-1])


class ChangedText(RealTest):
    """A server that accepts wrong drafts: the text changes, and the baseline can say that it had a clear preference."""

    @classmethod
    def setUpClass(cls):
        draft = real_engine.cut_draft(real_engine.model_file(), 1)
        cls.plain = cls.use(real_engine.server(n_ctx=1024))
        drafting = cls.use(
            real_engine.server(draft=draft, n_max=2, synth_rates=[0.6, 0.3], n_ctx=1024)
        )
        cls.run_ = cls.kept(
            measure(
                CLOSED + OPEN,
                "--max-tokens",
                24,
                "--repeats",
                2,
                "--fail-on",
                "changed-text",
                "--divergence-report",
                "bug.md",
                servers=(cls.plain, drafting),
            )
        )
        cls.texts = cls.run_.record("comparison")["text_comparison"]

    def test_changed_text_is_found_on_a_stable_baseline(self):
        self.assertEqual(
            (self.texts["compared"], self.texts["identical"], self.texts["unstable"]), (8, 0, 0)
        )
        self.assertEqual(self.texts["baseline_self"]["identical"], 4)
        contents = [
            {(r["prompt_index"], r["repeat"]): r["content"] for r in self.run_.readings(arm)}
            for arm in ("baseline", "speculative")
        ]
        for found in self.texts["divergences"]:
            own, other = (texts[found["prompt_index"], found["repeat"]] for texts in contents)
            at = found["first_difference_at_char"]
            self.assertEqual(own[:at], other[:at])
            self.assertNotEqual(own[at : at + 1], other[at : at + 1])
            self.assertTrue(
                own[at:].startswith(found["baseline_tail"][:10])
                or found["baseline_tail"].startswith(own[at:][:10])
            )

    def test_changed_text_is_an_alarm_and_stands_beside_the_speed(self):
        self.assertEqual(self.run_.code, 3)
        self.assertIn("CHANGED TEXT speculative-run/comparison: 8 of 8", self.run_.err)
        self.assertIn("BUT the text changed in 8 of 8", self.run_.out.rstrip().splitlines()[-1])

    def test_baseline_had_a_clear_preference(self):
        triaged = [found["triage"] for found in self.texts["divergences"]]
        self.assertTrue(all(triaged))
        self.assertEqual({triage["finding"] for triage in triaged}, {"clear-preference"})
        self.assertIn("clear-preference", self.run_.out)

    def test_gap_is_the_one_in_the_servers_log_probabilities(self):
        """Asked again by the test, and read off by another way than the program's."""
        checked = 0
        contents = {
            (arm, r["prompt_index"], r["repeat"]): r["content"]
            for arm in ("baseline", "speculative")
            for r in self.run_.readings(arm)
        }
        for found in self.texts["divergences"]:
            if found["repeat"]:
                continue
            prompt = (CLOSED + OPEN)[found["prompt_index"]][1]
            own, other = (
                contents[arm, found["prompt_index"], 0] for arm in ("baseline", "speculative")
            )
            answer = ask(
                self.plain, prompt, max_tokens=24, top_p=1.0, logprobs=True, top_logprobs=20
            )["choices"][0]
            if answer["message"]["content"] != own:
                continue  # one in twenty answers comes out differently when asked again
            before = ""
            for token in answer["logprobs"]["content"]:
                if not other.startswith(before + token["token"]):
                    break
                before += token["token"]
            rivals = [
                t
                for t in token["top_logprobs"]
                if t["token"] and other.startswith(before + t["token"])
            ]
            self.assertEqual(found["triage"]["baseline_token"], token["token"])
            if rivals:
                rival = max(rivals, key=lambda t: t["logprob"])
                self.assertEqual(found["triage"]["speculative_token"], rival["token"])
                least = token["logprob"] - rival["logprob"]
            else:
                self.assertTrue(found["triage"]["at_least"])
                least = token["logprob"] - min(t["logprob"] for t in token["top_logprobs"])
            # rounding moved gaps of this model by 0.75 nats at most
            self.assertAlmostEqual(found["triage"]["gap_nats"], least, delta=0.75)
            checked += 1
        self.assertGreaterEqual(checked, 2)

    def test_bug_report_can_be_pasted(self):
        text = (self.run_.folder / "bug.md").read_text("utf-8")
        self.assertIn("clear-preference", text)
        self.assertIn("llama.cpp", text)
        self.assertNotIn(OPEN[0][1], text)  # prompts only with --include-prompts


class Audit(RealTest):
    """What happens to a server while it is measured."""

    @classmethod
    def setUpClass(cls):
        cls.plain = cls.use(real_engine.server(n_ctx=1024))

    def test_one_request_of_another_client_is_found(self):
        drafting = self.server(draft="self", n_max=2, n_ctx=1024)
        run = self.start(CLOSED + OPEN, "--max-tokens", 24, servers=(self.plain, drafting))
        run.wait_for_readings("speculative", 1)
        foreign = ask(drafting, "Count to five.", max_tokens=12)["usage"]["completion_tokens"]
        run.finish()
        self.assertEqual(run.code, 0, run.err)
        (found,) = [
            entry
            for entry in run.record("speculative")["audit"]
            if entry["finding"] == "foreign-traffic"
        ]
        self.assertEqual(found["foreign_tokens"], foreign)
        self.assertIn(f"{foreign} tokens more", run.out)
        self.assertNotIn("foreign-traffic", findings(run.record("baseline")))
        # the answers' own figures are immune to the other client
        timings = [reading["timings"] for reading in run.readings("speculative")]
        self.assertEqual(
            run.record("speculative")["acceptance"]["drafted"],
            sum(t.get("draft_n", 0) for t in timings),
        )

    def restart(self, run, running, port, **options):
        """Hold the program, put a new server in the place of the old one, let the program go on."""
        run.process.send_signal(signal.SIGSTOP)
        try:
            running.close()
            return self.server(port=port, **options)
        finally:
            run.process.send_signal(signal.SIGCONT)

    def test_restart_between_the_scrapes_is_found(self):
        options = dict(draft="self", n_max=2, n_ctx=1024)
        first = contextlib.ExitStack()
        self.addCleanup(first.close)
        drafting = first.enter_context(real_engine.server(**options))
        prompts = [("closed", text) for _, text in CLOSED + OPEN]
        run = self.start(prompts, "--max-tokens", 24, servers=(self.plain, drafting))
        run.wait_for_readings("speculative", 2)
        self.restart(run, first, drafting.port, **options)
        run.finish()
        self.assertEqual(run.code, 0, run.err)
        record = run.record("speculative")
        self.assertIn("counter-reset", findings(record))
        self.assertIn("[counter-reset]", run.out)
        self.assertIsNone(record["spec_metrics_delta"])
        self.assertNotIn("counter-reset", findings(run.record("baseline")))
        # at most the request that was under way is lost, and it is counted as failed
        self.assertEqual(record["requests"], 4)
        self.assertEqual(record["completed"] + record["failed"], 4)
        self.assertLessEqual(record["failed"], 1)

    def test_restart_while_the_other_arm_is_measured_is_found(self):
        first = contextlib.ExitStack()
        self.addCleanup(first.close)
        baseline = first.enter_context(real_engine.server(n_ctx=1024))
        run = self.start(
            CLOSED + OPEN, "--max-tokens", 24, "--concurrency", 2, servers=(baseline, self.plain)
        )
        run.wait_for_readings(
            "speculative", 1
        )  # the baseline's first block is over then, its second comes last
        self.restart(run, first, baseline.port, n_ctx=1024)
        run.finish()
        self.assertEqual(run.code, 0, run.err)
        self.assertIn("counter-reset", findings(run.record("baseline")))


class UnderLoad(RealTest):
    """Two servers with two slots each, at 1, 2 and 4 requests at a time."""

    @classmethod
    def setUpClass(cls):
        plain = cls.use(real_engine.server(n_parallel=2, n_ctx=1024))
        drafting = cls.use(real_engine.server(draft="self", n_max=2, n_parallel=2, n_ctx=1024))
        cls.before = counters(drafting)
        cls.run_ = cls.kept(
            measure(
                CLOSED + OPEN,
                "--max-tokens",
                24,
                "--concurrency",
                "1,2,4",
                "--repeats",
                1,
                "--warmup",
                0,
                "--triage",
                0,
                servers=(plain, drafting),
            )
        )
        cls.growth = grown(cls.before, counters(drafting))

    def test_every_level_is_recorded_and_its_texts_compared(self):
        self.assertEqual(self.run_.code, 0, self.run_.err)
        comparisons = self.run_.records("comparison")
        self.assertEqual([record["concurrency"] for record in comparisons], [1, 2, 4])
        for record in comparisons:
            texts = record["text_comparison"]
            level = record["concurrency"]
            # a block holds at least twice as many requests as are sent at a time
            self.assertEqual(texts["compared"], {1: 4, 2: 8, 4: 16}[level])
            self.assertEqual(texts["identical"] + texts["divergent"], texts["compared"])
            self.assertEqual(texts["failed"], 0)
        self.assertEqual(comparisons[0]["text_comparison"]["identical"], 4)
        self.assertIn("Crossover", self.run_.out)

    def test_queueing_is_found_where_the_slots_do_not_suffice(self):
        queueing = {
            (r["label"].rsplit("/", 1)[1], r["concurrency"])
            for r in self.run_.records("endpoint")
            if "queueing" in findings(r)
        }
        self.assertEqual(queueing, {("baseline", 4), ("speculative", 4)})
        self.assertIn("[queueing]", self.run_.out)

    def test_tokens_and_drafts_of_all_levels_add_up_to_the_counters(self):
        records = [r for r in self.run_.records("endpoint") if r["label"].endswith("/speculative")]
        self.assertEqual(sum(r["output_tokens"] for r in records), self.growth[PREDICTED])
        for name, series in (("steps", DRAFTS), ("drafted", DRAFTED), ("accepted", ACCEPTED)):
            self.assertEqual(sum(r["acceptance"][name] for r in records), self.growth[series], name)
        for record in records:
            self.assertFalse(
                findings(record) & {"foreign-traffic", "sources-disagree", "counter-reset"}
            )


class NGramDrafts(RealTest):
    """Drafts only where the text repeats itself, of any length."""

    @classmethod
    def setUpClass(cls):
        plain = cls.use(real_engine.server(n_ctx=1024))
        drafting = cls.use(real_engine.server(kind="ngram-simple", size_n=3, size_m=8, n_ctx=1024))
        cls.before = counters(drafting)
        text = "The brown fox runs over the hill, the grey wolf sleeps under the tree, and the owl looks at the moon."
        prompts = [
            ("copy", f"Repeat this text three times, word for word: {text}"),
            ("copy", f"Copy this text exactly twice: {text}"),
        ]
        cls.run_ = cls.kept(
            measure(prompts, "--max-tokens", 80, "--warmup", 0, servers=(plain, drafting))
        )
        cls.growth = grown(cls.before, counters(drafting))

    def test_lengths_per_target_step_and_per_drafted_step_are_told_apart(self):
        told, growth = self.run_.record("speculative")["acceptance"], self.growth
        self.assertGreater(growth[ACCEPTED], 0)
        targets = growth[PREDICTED] - 2 - growth[ACCEPTED]
        self.assertGreater(targets, growth[DRAFTS] + 2)  # many steps without a draft
        self.assertEqual(told["mean_length"], 1 + growth[ACCEPTED] / growth[DRAFTS])
        self.assertEqual(told["tokens_per_target_step"], (growth[PREDICTED] - 2) / targets)
        self.assertGreater(told["mean_length"], told["tokens_per_target_step"])

    def test_no_formula_for_a_fixed_chain_is_applied(self):
        why = self.run_.record("comparison")["break_even"]
        if why["step_cost"] > 1:  # else any acceptance pays
            self.assertEqual(why["applies"], "varying-chain")
            self.assertIn("Drafts vary in length", self.run_.out)
        self.assertIsNone(why["predicted"])
        self.assertIsNone(why["best_chain"])
        self.assertIsNotNone(why["tokens_per_step"])

    def test_text_is_identical(self):
        self.assertEqual(self.run_.record("comparison")["text_comparison"]["identical"], 2)


class EqualServers(RealTest):
    """One server measured twice, and two equal ones: what differs is noise, and is never sold as a gain.

    How often the interval holds 1 is the matter of bench_verdict; here each is measured once.
    """

    ORDERS = {
        "paired": ("--max-tokens", 8, "--repeats", 2),
        "sequential": ("--max-tokens", 8, "--repeats", 2, "--order", "sequential"),
        "4 at a time": ("--max-tokens", 4, "--repeats", 4, "--concurrency", 4),
    }

    def new_server(self):
        """One whose cache nobody has filled; of few layers, since only its times and counts matter."""
        model, draft = (real_engine.cut_draft(real_engine.model_file(), n) for n in (2, 1))
        return self.server(model=model, draft=draft, n_max=2, n_parallel=4, n_ctx=2048)

    def run_of(self, order, servers):
        prompts = [("open", text) for _, text in CLOSED + OPEN]
        flags = ("--triage", 0, "--fail-on", "slower")
        run = self.measure(prompts, *flags, *self.ORDERS[order], servers=servers)
        return run, run.record("comparison"), run.out.rstrip().splitlines()[-1]

    def test_one_server_twice_is_a_check_of_noise_and_has_no_verdict(self):
        one = self.new_server()
        for order in self.ORDERS:
            with self.subTest(order):
                run, record, last = self.run_of(order, (one, one))
                self.assertEqual(run.code, 0, run.err)
                self.assertRegex(
                    last, r"^NOISE CHECK: \d+\.\d\dx \(.*\), one server against itself"
                )
                self.assertEqual(record["verdict_withheld"], "same-server")
                verdicts = [record["verdict"], *(part["verdict"] for part in record["workloads"])]
                self.assertEqual(set(verdicts), {None})
                self.assertFalse(findings(record) & {"foreign-traffic", "busy", "not-drafting"})

    def test_two_equal_servers_have_an_interval_and_nothing_but_noise_between_them(self):
        # a busy machine may slow one of them for real
        allowed = {"baseline-drafting", "few-prompts", "stalls", "implausible", "runs-apart"}
        servers = self.new_server(), self.new_server()
        for order in self.ORDERS:
            with self.subTest(order):
                run, record, last = self.run_of(order, servers)
                self.assertIn(run.code, (0, 3), run.err)
                speed = record["speedup"]
                self.assertLess(speed["low"], speed["ratio"])
                self.assertLess(speed["ratio"], speed["high"])
                self.assertIsNone(record["verdict_withheld"])
                self.assertIn("BUT", last)
                self.assertIn("the baseline drafts too", last)
                self.assertLessEqual({"baseline-drafting", "few-prompts"}, findings(record))
                self.assertLessEqual(findings(record), allowed)


class AnotherModel(RealTest):
    """Another file of the model, or another quantization of it, behind the same name."""

    def differing(self, *flags, model):
        """A run of a plain server and a drafting one of another file, both with one name for it."""
        options = dict(alias="local-chat", n_ctx=1024)
        draft = real_engine.cut_draft(real_engine.model_file(), 1)
        drafting = self.server(model=model, draft=draft, n_max=2, **options)
        self.servers = {"baseline": self.server(**options), "speculative": drafting}
        words = ("--max-tokens", 32, "--triage", 1, *flags)
        return self.start(CLOSED, *words, servers=self.servers.values())

    def assert_told_before_the_first_request(self, run, *names):
        """The names stand on stderr while the run file holds no reading yet."""
        said = ""
        for line in run.process.stderr:
            said += line
            if all(name in said for name in names):
                break
        self.assertTrue(all(name in said for name in names), said)
        self.assertEqual([line for line in run.lines() if line["kind"] == "reading"], [])

    def copy_of_the_model(self):
        """The model's file under another name."""
        folder = tempfile.TemporaryDirectory(prefix="another-file-")
        self.addCleanup(folder.cleanup)
        return shutil.copy(real_engine.model_file(), os.path.join(folder.name, "another-file.gguf"))

    def test_another_file_is_told_before_the_first_request_and_behind_but(self):
        other = self.copy_of_the_model()
        run = self.differing(model=other)
        names = [real_engine.MODEL_NAME, os.path.basename(other)]
        self.assert_told_before_the_first_request(run, *names)
        run.finish()
        self.assertEqual(run.code, 0, run.err)
        record = run.record("comparison")
        (found,) = [entry for entry in record["audit"] if entry["finding"] == "model-differs"]
        self.assertEqual(
            (found["grade"], found["baseline"], found["speculative"]), ("file", *names)
        )
        self.assertIsNotNone(record["verdict"])
        self.assertRegex(run.out.rstrip().splitlines()[-1], "BUT .*" + ", ".join(names))

    def test_another_quantization_leaves_no_verdict_and_the_bug_report_names_both(self):
        other = real_engine.f32_copy(real_engine.model_file())
        run = self.differing("--divergence-report", "bug.md", model=other)
        kinds = ["Q4_1", "all F32"]
        self.assert_told_before_the_first_request(run, *kinds)
        run.finish()
        self.assertEqual(run.code, 0, run.err)
        record = run.record("comparison")
        self.assertEqual((record["verdict"], record["verdict_withheld"]), (None, "model-differs"))
        last = run.out.rstrip().splitlines()[-1]
        self.assertRegex(last, "^NOT SPECULATION ALONE: .*models differ")
        text = (run.folder / "bug.md").read_text("utf-8")
        for name in (*kinds, real_engine.MODEL_NAME, os.path.basename(other)):
            self.assertIn(name, text)
        paths = dict(zip(self.servers, (real_engine.model_file(), other)))
        for arm, server in self.servers.items():
            about = run.record(arm)["server"]
            self.assertEqual(about["model_file"], os.path.basename(paths[arm]))
            meta = json.loads(server.get("/v1/models"))["data"][0]["meta"]
            self.assertEqual(
                (about["model_bytes"], about["parameters"]), (meta["size"], meta["n_params"])
            )


if __name__ == "__main__":
    unittest.main()
