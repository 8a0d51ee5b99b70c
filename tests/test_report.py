"""The report: the terminal, `report` from a notebook, and the records that both are made of."""

import contextlib
import copy
import csv
import io
import json
import pathlib
import re
import tempfile
import unittest

from tests.fakes import FakeServer, ReplayServer, Speculation
from tests.support import (
    CHANGED,
    DRAFTS,
    PROMPTS,
    TEXT,
    answer,
    compare,
    http,
    measure,
    run_main,
    saved_run,
    slow_pair,
    strict,
)

ENDPOINT_KEYS = set(
    """lab label base_url model engine engine_version max_tokens repeats prompt_count requests completed failed
    first_error wall_s latency_s output_tokens output_tokens_per_s tokens_counted_by_server server_timings_sample
    spec_metrics_delta recorded_at schema run_id tool_version seed temperature warmup order concurrency ttft_s
    decode_tokens_per_s acceptance workloads audit interrupted host""".split()
)
COMPARISON_KEYS = set(
    """lab label engine engine_version model baseline_tokens_per_s speculative_tokens_per_s text_comparison
    recorded_at schema run_id speedup speedup_these_prompts decode_speedup verdict workloads break_even audit""".split()
)
ACCEPTANCE_KEYS = set(
    "source steps drafted accepted per_position rate mean_length tokens_per_target_step alpha".split()
)
TEXT_KEYS = set(
    "compared identical divergent empty failed unstable counts_differ baseline_self speculative_self".split()
)
DIVERGENCE_KEYS = set(
    """prompt_index prompt_id workload repeat where class first_difference_at_char first_difference_at_byte
    baseline_tail speculative_tail triage""".split()
)
BREAK_EVEN_KEYS = set(
    """applies alpha alpha_needed tokens_per_step step_cost draft_cost chain best_chain fit""".split()
)
SPEEDUP_KEYS = set("ratio low high level prompts".split())
FINDINGS = set(
    """metrics-unavailable rate-above-one counter-reset foreign-traffic sources-disagree baseline-drafting not-drafting
    cache-differs model-differs context-differs quantization-differs build-differs busy queueing undecodable-text usage-missing
    few-prompts stalls interrupted conditions-differ waited lifetime-only same-server repeats-differ implausible
    stream-differs counts-wrong timings-doubtful failed-requests runs-apart waiting""".split()
)


def speeds(ratio, prompts=12, scatter=0.01, **drafts):
    """One repeat of each prompt, `ratio` times 20 tokens/s, scattered without chance."""
    return [
        [answer(200, 200 / (20 * ratio * (1 + scatter * (i * 5 % 7 - 3) / 3)), **drafts)]
        for i in range(prompts)
    ]


def compared(ratio=1.5, workloads=None, label="night", flags=(), change=(), **conditions):
    """The Outcome of comparing planted runs; `change`: prompts whose text is another."""
    answers = speeds(ratio, len(workloads or range(12)), **DRAFTS)
    for i in change:
        answers[i][0]["content"] = "another text"
    return compare(
        ("b.jsonl", saved_run("baseline", speeds(1.0, len(answers), 0), workloads, **conditions)),
        ("s.jsonl", saved_run("speculative", answers, workloads, **conditions)),
        flags=("--label", label, *flags),
    )


def report(notebook, *flags):
    notebook = notebook if isinstance(notebook, bytes) else notebook.encode("utf-8")
    return run_main("report", "book.md", *flags, files={"book.md": notebook})


def tables(out):
    """[(heading lines, rule, rows)] of the tables of a terminal report."""
    lines, found = out.splitlines(), []
    for number, line in enumerate(lines):
        if re.fullmatch(r"-+(  +-+)+", line):
            first = last = number
            while first and lines[first - 1].strip():
                first -= 1
            while (
                last + 1 < len(lines)
                and lines[last + 1].strip()
                and not lines[last + 1].startswith("Ratio:")
            ):
                last += 1
            found.append((lines[first:number], line, lines[number + 1 : last + 1]))
    return found


class TerminalReport(unittest.TestCase):
    def check_tables(self, out, least):
        self.assertTrue(out.isascii())
        found = tables(out)
        self.assertGreaterEqual(len(found), least)
        for heads, rule, rows in found:
            self.assertTrue(heads and rows)
            for line in [*heads, rule]:
                self.assertLessEqual(len(line), 100, out)

    def test_tables_fit_100_columns_and_are_ascii_whatever_the_names(self):
        long = "translations-of-legal-texts-from-the-archive-of-the-town-of-1987"
        kinds = [long, "prosa-\u00e9\u00fc\u6f22\u5b57" + 20 * "\u00e9", "x|y\nz\x1b[31m"] * 4
        self.check_tables(compared(workloads=kinds).out, 2)

    def test_tables_fit_100_columns_whatever_the_server_is_called(self):
        build = "b11434-1a2b3c4d-with-vulkan-and-a-vendor-suffix"
        url = "http://inference-host-number-seventeen.example.internal:8080/some/prefix/v1"
        self.check_tables(compared(engine="llama.cpp", engine_version=build, base_url=url).out, 2)

    def test_tables_fit_100_columns_with_figures_of_any_size(self):
        answers = [[answer(200_000, 0.01 + i / 1e3, **DRAFTS)] for i in range(3)]
        outcome = compare(
            (
                "b.jsonl",
                saved_run("baseline", [[answer(200_000, 7200.0 / (i + 1))] for i in range(3)]),
            ),
            ("s.jsonl", saved_run("speculative", answers)),
        )
        self.check_tables(outcome.out, 2)

    def test_tables_of_several_candidates_fit_100_columns(self):
        name = "EAGLE-3-head-of-the-third-training-run-temperature-0.%d"
        files = [
            ("%d.jsonl" % i, saved_run(name % i, speeds(1.1 + i / 10, **DRAFTS))) for i in range(3)
        ]
        self.check_tables(
            compare(("b.jsonl", saved_run("baseline", speeds(1.0, scatter=0))), *files).out, 5
        )

    def test_tables_of_several_levels_of_load_fit_100_columns(self):
        with (
            FakeServer("llama.cpp", words=4) as plain,
            FakeServer("llama.cpp", words=4, speculation=Speculation()) as drafting,
        ):
            outcome = measure(plain, drafting, "--concurrency", "1,2", prompts=["one", "two"])
        self.assertIn("Crossover", outcome.out)
        self.check_tables(outcome.out, 5)

    def test_figures_are_right_aligned_and_names_left(self):
        out = compared(workloads=["copy", "prose-of-all-kinds", "sql"] * 4).out
        ((_, rule, rows),) = [table for table in tables(out) if "Ratio" in " ".join(table[0])]
        starts = [match.start() for match in re.finditer("-+", rule)]
        ends = [match.end() for match in re.finditer("-+", rule)]
        self.assertEqual(
            [row.split()[0] for row in rows], ["copy", "prose-of-all-kinds", "sql", "all"]
        )
        for row in rows:
            row = row.ljust(len(rule))
            self.assertNotEqual(row[0], " ")
            for start, end in zip(starts[1:], ends[1:]):
                self.assertNotEqual(row[end - 1], " ", row)
                self.assertEqual(row[start - 2 : start], "  ", row)

    def test_a_line_of_a_table_is_never_broken_by_a_name(self):
        out = compared(workloads=["two\nlines"] * 6 + ["\x1b[31mred"] * 6).out
        self.assertNotIn("\x1b", out)
        ((_, _, rows),) = [table for table in tables(out) if "Ratio" in " ".join(table[0])]
        self.assertEqual(len(rows), 3)

    def test_table_has_the_columns_of_the_workload_table_and_interval_and_verdict(self):
        heads, _, rows = tables(compared(workloads=["copy"] * 12).out)[1]
        for word in "Workload Baseline tokens/s draft Ratio interval Verdict Acceptance Completions identical".split():
            self.assertIn(word, " ".join(heads))
        self.assertRegex(
            rows[0], r"^copy +\d+\.\d\d +\d+\.\d\d +1\.50 +1\.4\d to 1\.5\d +pays +0\.25 +12 of 12$"
        )

    def test_the_sentence_to_quote_is_last(self):
        self.assertRegex(
            compared(workloads=["copy"] * 12).out.splitlines()[-1],
            r"^PAYS on copy: 1\.50x \(1\.4\d to 1\.5\d\), 12 prompts x 1\.$",
        )

    def test_the_sentence_to_quote_is_one_line_whatever_the_names(self):
        self.assertRegex(
            compared(workloads=["two\nlines"] * 12).out.splitlines()[-1],
            r"^PAYS on two.*lines: 1\.50x",
        )

    def test_quiet_prints_nothing(self):
        outcome = compared(flags=("--quiet",))
        self.assertEqual((outcome.out, outcome.err), ("", ""))
        self.assertEqual(len(outcome.records), 3)

    def test_few_prompts_are_called_few(self):
        self.assertRegex(compared(workloads=["copy"] * 5).out, "rests on 5 prompts")
        self.assertNotIn("few-prompts", compared(workloads=["copy"] * 12).out)

    def test_a_label_with_a_slash_does_not_become_a_candidate(self):
        out = compared(label="lab/night").out
        self.assertIn("baseline against speculative", out)
        self.assertNotRegex(out, "against night|== night")

    def test_why_it_pays_is_said_in_both_currencies(self):
        out = compared().out
        self.assertRegex(
            out,
            r"1\.99 tokens per target step, and a step costs 1\.\d\d target steps: it brings more than it "
            r"costs, so decoding gains",
        )
        self.assertRegex(out, r"alpha 0\.\d\d; 0\.\d\d is needed at chain length 4")


class WarningsOfChangedText(unittest.TestCase):
    def test_warning_stands_in_the_line_with_the_speedup(self):
        lines = [
            line for line in compared(change=[3, 7]).out.splitlines() if line.startswith("PAYS")
        ]
        self.assertEqual(len(lines), 1)
        self.assertRegex(lines[0], r"1\.50x.*text changed in 2 of 12")

    def test_warning_stands_in_the_markdown_line_with_the_speedup(self):
        out = report(compared(change=[3]).files["labbook.md"]).out
        (line,) = [line for line in out.splitlines() if line.startswith("PAYS")]
        self.assertRegex(line, r"1\.50x.*text changed in 1 of 12")

    def test_warning_stands_there_too_when_each_kind_of_work_has_its_own_verdict(self):
        kinds = ["copy"] * 6 + ["open"] * 6
        answers = speeds(1.8, 6, **DRAFTS) + speeds(0.8, 6, **DRAFTS)
        answers[1][0]["content"] = "another text"
        out = compare(
            ("b.jsonl", saved_run("baseline", speeds(1.0, scatter=0), kinds)),
            ("s.jsonl", saved_run("speculative", answers, kinds)),
        ).out
        self.assertRegex(
            out.splitlines()[-1], r"PAYS on copy: .*DOES NOT PAY on open: .*text changed in 1 of 12"
        )

    def test_what_is_cut_from_a_long_list_of_changes_is_counted(self):
        """30 pairs differ: 20 stand in the record and in the bug report, 5 on the screen."""
        runs = (
            ("b.jsonl", saved_run("baseline", speeds(1.0, 30))),
            (
                "s.jsonl",
                saved_run(
                    "speculative",
                    [
                        [dict(each, content="another") for each in repeats]
                        for repeats in speeds(1.5, 30, **DRAFTS)
                    ],
                ),
            ),
        )
        outcome = compare(*runs, flags=("--divergence-report", "d.md", "--fail-on", "changed-text"))
        self.assertIn(
            "... and 25 more pairs; the record and --divergence-report list up to 20.", outcome.out
        )
        report = outcome.files["d.md"].decode()
        self.assertIn("30 of 30 pairs differ", report)
        self.assertIn("Listed are 20 of these pairs", report)
        self.assertEqual(report.count("Prompt index"), 20)

    def test_the_alarm_counts_the_pairs_it_does_not_blame(self):
        base, other = (
            [once + copy.deepcopy(once) for once in speeds(*words, **drafts)]
            for words, drafts in (((1.0, 4), {}), ((1.5, 4), DRAFTS))
        )
        base[0][1]["content"] = "unstable"
        for i in (0, 1):
            other[i][0]["content"] = "another"
        err = compare(
            ("b.jsonl", saved_run("baseline", base)),
            ("s.jsonl", saved_run("speculative", other)),
            flags=("--fail-on", "changed-text"),
        ).err
        self.assertRegex(
            err,
            r"1 of 8 completions differ on a baseline that agrees with itself \(2 more where the baseline disagrees with itself\)",
        )

    def test_unchanged_text_raises_no_warning(self):
        self.assertNotIn("text changed", compared().out)


class SpeculationThatDidNotRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with FakeServer("llama.cpp") as plain, FakeServer("llama.cpp") as idle:
            cls.outcome = measure(plain, idle, "--label", "night")

    def test_no_verdict_and_no_acceptance_are_recorded(self):
        record = self.outcome.comparison()
        self.assertIsNone(record["verdict"])
        self.assertEqual({part["verdict"] for part in record["workloads"]}, {None})
        self.assertIn("not-drafting", [found["finding"] for found in record["audit"]])
        self.assertIsNone((record["acceptance"] or {}).get("rate"))

    def test_report_says_so_instead_of_a_speed(self):
        self.assertTrue(self.outcome.out.splitlines()[-1].startswith("DID NOT RUN"))
        self.assertNotRegex(self.outcome.out, r"PAYS|NOT PAY|UNDECIDED|more prompts")

    def test_markdown_report_says_so_too(self):
        out = report(self.outcome.files["labbook.md"]).out
        self.assertIn("DID NOT RUN", out)
        self.assertNotRegex(out, r"PAYS|NOT PAY|UNDECIDED")

    def test_a_single_kind_of_work_without_drafts_has_no_verdict(self):
        kinds = ["copy"] * 6 + ["open"] * 6
        answers = speeds(1.8, 6, **DRAFTS) + speeds(1.0, 6, drafted=0, accepted=0)
        outcome = compare(
            ("b.jsonl", saved_run("baseline", speeds(1.0, scatter=0), kinds)),
            ("s.jsonl", saved_run("speculative", answers, kinds)),
        )
        self.assertEqual(
            [part["verdict"] for part in outcome.comparison()["workloads"]], ["pays", None]
        )
        self.assertRegex(outcome.out.splitlines()[-1], "PAYS on copy: .*DID NOT RUN on open")


class RecordsAsDocumented(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with (
            FakeServer("llama.cpp") as plain,
            FakeServer(
                "llama.cpp", speculation=Speculation(), answers={"two": "x y z"}
            ) as drafting,
        ):
            cls.rich = measure(plain, drafting, prompts=["one", "two"])
        with FakeServer("plain", usage=False) as a, FakeServer("plain", usage=False) as b:
            cls.bare = measure(a, b, prompts=["one"])

    def test_all_keys_are_present_in_endpoint_records_also_of_bare_servers(self):
        for outcome in (self.rich, self.bare):
            for arm in ("baseline", "speculative"):
                self.assertEqual(ENDPOINT_KEYS - set(outcome.endpoint(arm)), set())

    def test_all_keys_are_present_in_comparison_records_also_of_bare_servers(self):
        for outcome in (self.rich, self.bare):
            record = outcome.comparison()
            self.assertEqual(COMPARISON_KEYS - set(record), set())
            self.assertEqual(BREAK_EVEN_KEYS - set(record["break_even"]), set())
            self.assertEqual(
                set(record["text_comparison"]), TEXT_KEYS | {"divergences", "near_ties", "sampled"}
            )

    def test_what_is_unknown_is_null_and_never_zero(self):
        record = self.bare.endpoint("speculative")
        for key in (
            "output_tokens",
            "output_tokens_per_s",
            "decode_tokens_per_s",
            "first_error",
            "server_timings_sample",
            "spec_metrics_delta",
            "acceptance",
        ):
            self.assertIsNone(record[key], key)
        self.assertIs(record["tokens_counted_by_server"], False)
        record = self.bare.comparison()
        for key in (
            "baseline_tokens_per_s",
            "speculative_tokens_per_s",
            "speedup",
            "speedup_these_prompts",
            "decode_speedup",
        ):
            self.assertIsNone(record[key], key)
        self.assertEqual(
            (record["verdict"], record["break_even"]["applies"]), ("undecided", "no-acceptance")
        )

    def test_shapes_are_those_documented(self):
        record = self.rich.endpoint("speculative")
        self.assertEqual(set(record["acceptance"]), ACCEPTANCE_KEYS)
        self.assertEqual(set(record["host"]), {"system", "machine", "python", "cpus"})
        self.assertEqual((record["lab"], record["schema"]), ("part-17/measure-speculative", 2))
        for name in ("latency_s", "ttft_s"):
            self.assertEqual(set(record[name]), {"p50", "mean", "max"})
        for part in record["workloads"]:
            self.assertEqual(
                set(part),
                set(
                    """workload prompts completed output_tokens output_tokens_per_s
                decode_tokens_per_s latency_s ttft_s acceptance""".split()
                ),
            )
        self.assertRegex(
            record["recorded_at"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?[+-]\d\d:\d\d$"
        )
        self.assertIs(type(record["warmup"]), int)
        self.assertIs(type(record["concurrency"]), int)
        record = self.rich.comparison()
        for part in record["workloads"]:
            self.assertEqual(
                set(part),
                set(
                    """workload prompts baseline_tokens_per_s speculative_tokens_per_s speedup verdict
                acceptance text_comparison""".split()
                ),
            )
        for name in ("speedup", "speedup_these_prompts", "decode_speedup"):
            self.assertEqual(set(record[name]) - {"rests_on"}, SPEEDUP_KEYS, name)
            self.assertEqual(record[name]["level"], 0.95)
        self.assertEqual(record["speedup"]["rests_on"], "all")
        (found,) = record["text_comparison"]["divergences"]
        self.assertEqual(DIVERGENCE_KEYS - set(found), set())

    def test_labels_name_the_arm(self):
        self.assertEqual(
            [record["label"] for record in self.rich.records],
            [
                "speculative-run/baseline",
                "speculative-run/speculative",
                "speculative-run/comparison",
            ],
        )

    def test_audit_holds_known_findings_with_a_sentence(self):
        for record in self.rich.records + self.bare.records + compared(workloads=["a"]).records:
            for found in record["audit"]:
                self.assertIn(found["finding"], FINDINGS)
                self.assertTrue(found["detail"])

    def test_one_prompt_has_null_limits(self):
        speedup = compared(workloads=["a"]).comparison()["speedup"]
        self.assertEqual((speedup["low"], speedup["high"], speedup["prompts"]), (None, None, 1))

    def test_records_hold_no_completions(self):
        for record in self.rich.records[:2]:
            self.assertNotIn("word", json.dumps(dict(record, workloads=[])).replace("keyword", ""))

    def test_records_are_strict_json_in_ascii(self):
        for line in (
            self.rich.files["labbook.md"].splitlines() + self.bare.files["labbook.md"].splitlines()
        ):
            json.loads(line.decode("ascii"), parse_constant=self.fail)


class MarkdownReport(unittest.TestCase):
    """`report` on a notebook that people write in as well."""

    @classmethod
    def setUpClass(cls):
        runs = [
            compared(
                ratio,
                ["copy"] * 6 + ["open"] * 6,
                label,
                engine_version=version,
                recorded_at="2026-03-%02dT08:00:00+01:00" % day,
            ).files["labbook.md"]
            for day, (label, ratio, version) in enumerate(
                (
                    ("night", 1.5, "b1"),
                    ("day", 0.8, "b1"),
                    ("night", 1.2, "b2"),
                    ("night", 1.6, "b2"),
                ),
                1,
            )
        ]
        prose = "# Our machine, f\u00fcr alle\n\n- {not JSON} but a list\n\nHere is what we measured:\n\n".encode()
        old = b'{"lab": "part-17/measure-speculative", "label": "old/baseline", "recorded_at": "2025-01-01T00:00:00"}\n'
        other = (
            b'{"lab": "part-3/other", "schema": 2, "kind": "comparison", "label": "x/comparison"}\n'
        )
        torn = runs[3].splitlines(keepends=True)[2][:200] + b"\n"
        cls.damaged_at = (
            len((prose + runs[0] + b"Then it rained.\n" + old + other).splitlines()) + 1
        )
        cls.book = (
            prose
            + runs[0]
            + b"Then it rained.\n"
            + old
            + other
            + torn
            + runs[1]
            + b"\xff\xfe bytes\n"
            + runs[2]
            + runs[3]
        )
        cls.all = report(cls.book)

    def test_each_label_has_its_chapter_with_the_latest_table(self):
        self.assertEqual(self.all.code, 0)
        chapters = re.findall(r"^## (.*)$", self.all.out, re.M)
        self.assertEqual([name.split("/")[0] for name in chapters], ["night", "day"])
        night = self.all.out.split("## day")[0]
        self.assertRegex(
            night,
            r"(?m)^\| Workload \| Baseline tokens/s \| With draft tokens/s \| Ratio \|.*Acceptance \| "
            r"Completions identical \|$",
        )
        self.assertRegex(
            night, r"(?m)^\| copy \| \d+\.\d\d \| \d+\.\d\d \| 1\.\d\d \|.*\| 6 of 6 \|$"
        )
        self.assertRegex(night, r"(?m)^\| all \| .*\| 1\.60 \|")
        self.assertRegex(night, r"(?m)^PAYS .*1\.60x")
        self.assertRegex(self.all.out.split("## day")[1], r"(?m)^DOES NOT PAY .*0\.80x")

    def test_damaged_lines_are_named_and_prose_is_not(self):
        warnings = [line for line in self.all.err.splitlines() if line]
        self.assertEqual(len(warnings), 1, warnings)
        self.assertIn("book.md:%d" % self.damaged_at, warnings[0])

    def test_history_has_one_line_for_each_run_of_the_label_in_order(self):
        night, day = self.all.out.split("## day")
        rows = re.findall(r"(?m)^\| (2026-03-\d\d)\S* \| *([v^=?]?) *\| (\d\.\d\d) \|", night)
        self.assertEqual(
            rows,
            [("2026-03-01", "", "1.50"), ("2026-03-03", "v", "1.20"), ("2026-03-04", "^", "1.60")],
        )
        self.assertEqual(len(re.findall(r"(?m)^\| 2026-03-", day)), 1)

    def test_history_says_what_else_changed(self):
        rows = re.findall(r"(?m)^\| 2026-03-.*$", self.all.out.split("## day")[0])
        self.assertNotIn("b1 -> b2", rows[0])
        self.assertIn("b1 -> b2", rows[1])
        self.assertNotIn("b1 -> b2", rows[2])

    def test_one_label_may_be_asked_for(self):
        out = report(self.book, "--label", "day").out
        self.assertIn("## day", out)
        self.assertNotIn("night", out)

    def test_markdown_is_ascii_and_tables_are_whole(self):
        self.assertTrue(self.all.out.isascii())
        for block in re.findall(r"(?m)(?:^\|.*\n)+", self.all.out):
            self.assertEqual(
                len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}), 1, block
            )

    def test_csv_has_a_row_for_each_comparison(self):
        outcome = report(self.book, "--format", "csv")
        rows = list(csv.DictReader(io.StringIO(outcome.out)))
        self.assertEqual(
            [row["label"].split("/")[0] for row in rows], ["night", "day", "night", "night"]
        )
        for row, right in zip(rows, (1.5, 0.8, 1.2, 1.6)):
            self.assertAlmostEqual(float(row["ratio"]), right, delta=0.01)
            self.assertLess(float(row["low"]), float(row["high"]))
            self.assertEqual((row["identical"], row["compared"]), ("12", "12"))
        self.assertEqual({row["verdict"] for row in rows}, {"pays", "does-not-pay"})

    def test_json_gives_the_records_as_they_are(self):
        outcome = report(self.book, "--format", "json")
        told = [json.loads(line) for line in outcome.out.splitlines()]
        right = [
            line
            for line in self.book.splitlines()
            if line.startswith(b'{"lab": "part-17') and b'"schema": 2' in line
        ]
        right = [json.loads(line) for line in right if line.endswith(b"}")]
        self.assertEqual(told, right)
        self.assertEqual(len(told), 12)

    def test_comparing_the_same_runs_again_does_not_double_the_chapter(self):
        book = compared().files["labbook.md"]
        out = report(book + book).out
        self.assertEqual(len(re.findall(r"(?m)^PAYS", out)), 1)
        self.assertNotIn("Crossover", out)

    def test_arms_measured_alone_are_listed(self):
        with FakeServer("plain") as server:
            book = measure(server, None, "--label", "alone", prompts=["one"]).files["labbook.md"]
        out = report(book).out
        self.assertIn("No comparison is recorded", out)
        self.assertRegex(out, r"(?m)^\| alone/baseline \| .* 1 of 1 \|")

    def test_an_empty_notebook_is_said_to_be_empty(self):
        for book in (b"", b"# only prose\n"):
            outcome = report(book)
            self.assertEqual((outcome.code, outcome.err.count("\n")), (0, 1))
            self.assertIn("holds no record of this program", outcome.err)
            self.assertIn("No comparison is recorded", outcome.out)

    def test_records_that_lost_fields_are_named_and_do_not_stop_the_report(self):
        whole = compared().files["labbook.md"].splitlines()
        for key in ("label", "workloads", "speedup", "text_comparison", "run_id", "break_even"):
            record = {name: value for name, value in json.loads(whole[2]).items() if name != key}
            broken = json.dumps(record).encode()
            for form in ((), ("--format", "csv"), ("--label", "night")):
                with self.subTest(lost=key, form=form):
                    outcome = report(b"\n".join([broken, *whole]) + b"\n", *form)
                    self.assertEqual(outcome.code, 0)
                    self.assertIn("1.5", outcome.out)

    def test_a_missing_notebook_is_a_usage_error(self):
        outcome = run_main("report", "gone.md")
        self.assertEqual((outcome.code, outcome.out), (2, ""))
        self.assertIn("gone.md", outcome.err)

    def test_reading_a_notebook_never_writes_to_it(self):
        self.assertEqual(self.all.files, {"book.md": self.book})


class DamagedRecords(unittest.TestCase):
    def test_a_ratio_beyond_all_measure_in_a_notebook_leaves_the_report_whole(self):
        with FakeServer("plain") as a, FakeServer("plain") as b:
            book = measure(a, b, prompts=["one", "two"]).files["labbook.md"]
        wild = json.loads(book.splitlines()[-1])
        wild["speedup"]["ratio"] = -1e308
        lines = book + json.dumps(wild).encode() + b"\n" + book
        outcome = run_main("report", "book.md", files={"book.md": lines})
        self.assertEqual(outcome.code, 0)
        self.assertIn("History, `", outcome.out)


class NamesInReports(unittest.TestCase):
    """Prompt ids and kinds of work come from files: they may hold line ends and the marks of Markdown."""

    def outcome(self):
        entry = {"prompt": "one", "id": "```\n# x", "workload": "kind\n```\n# y"}
        with (
            FakeServer("plain", answers={"one": TEXT}) as a,
            FakeServer("plain", answers={"one": "```\n# z " + CHANGED}) as b,
        ):
            return measure(
                a,
                b,
                "--divergence-report",
                "d.md",
                "--include-prompts",
                "--prompts",
                "p.jsonl",
                files={"p.jsonl": json.dumps(entry)},
            )

    def test_names_begin_no_line_of_the_terminal(self):
        for line in self.outcome().out.splitlines():
            self.assertNotRegex(line, "^ *# [xyz]")

    def test_names_break_out_of_no_fence_of_the_divergence_report(self):
        inside, seen = None, 0
        for line in self.outcome().files["d.md"].decode("utf-8").splitlines():
            line = line[3:].lstrip(" ") if line.startswith("   ") else line.lstrip(" ")
            mark = line[: len(line) - len(line.lstrip("`"))]
            if inside is None and len(mark) >= 3:
                inside = mark
            elif inside is not None and len(mark) >= len(inside) and not line.strip("`"):
                inside, seen = None, seen + 1
            else:
                self.assertNotRegex(line, "^# [xyz]")
        self.assertIsNone(inside, "a fence is left open")
        self.assertEqual(seen, 2)

    def test_a_label_in_a_notebook_begins_no_line_of_the_report(self):
        records = [
            dict(record, label="L\n# x" + record["label"])
            for record in strict(compare(*slow_pair().items()).files["labbook.md"])
        ]
        report = run_main(
            "report",
            "b.md",
            files={"b.md": "".join(json.dumps(record) + "\n" for record in records)},
        )
        self.assertEqual(report.code, 0, report.err)
        self.assertNotRegex(report.out, "(?m)^# x")


class WordsThatFit(unittest.TestCase):
    """No sentence of the report contradicts another one, or the figures beside it."""

    def compared(self, step_ms, accepted, drafted=100):
        """A baseline of 101 tokens at 24.69 ms each, and 100 steps that accept so many in all (case A14)."""
        return compare(
            ("b.jsonl", saved_run("baseline", [[answer(101, 2.469)]])),
            (
                "s.jsonl",
                saved_run(
                    "s",
                    [[answer(101 + accepted, step_ms / 10, drafted=drafted, accepted=accepted)]],
                ),
            ),
        )

    def test_a_step_that_costs_nothing_more_is_not_said_to_cost_time(self):
        out = self.compared(22.90, 0).out
        self.assertNotIn("only costs time", out)
        self.assertIn("any acceptance pays", out)

    def test_drafting_in_vain_is_said_where_a_step_costs_more(self):
        self.assertIn("only costs time", self.compared(30.0, 0).out)

    def test_no_advice_is_announced_that_does_not_come(self):
        """Case A06: two chain lengths give a fit; a gated candidate, whose drafts vary, gets no advice from it."""
        files = [
            ("b.jsonl", saved_run("baseline", [[answer(301, 300 / 26.4)]])),
            (
                "k1.jsonl",
                saved_run("k1", [[answer(301, 170 * 1.3 / 26.4, drafted=170, accepted=130)]]),
            ),
            (
                "k4.jsonl",
                saved_run("k4", [[answer(301, 100 * 1.9 / 26.4, drafted=400, accepted=200)]]),
            ),
            (
                "gated.jsonl",
                saved_run("gated", [[answer(301, 178 * 1.5 / 26.4, drafted=130, accepted=122)]]),
            ),
        ]
        outcome = compare(*files)
        records = {
            r["candidate"]: r["break_even"] for r in outcome.records if r["kind"] == "comparison"
        }
        self.assertIsNotNone(records["k4"]["fit"])
        self.assertIsNone(records["gated"]["predicted"])
        parts = {part.split(" ")[0]: part for part in outcome.out.split("\n== ")}
        self.assertIn("advice below rests on this fit", parts["k4"])
        self.assertNotIn("Fitted over", parts["gated"])  # its drafts are no part of the fit
        self.assertNotIn("advice below", parts["gated"])

    def test_the_markdown_report_names_the_mean_that_its_ratio_is(self):
        """Case A20: its ratio over all is a geometric mean, and not the quotient of the two speeds beside it."""
        book = compare(*slow_pair().items()).files["labbook.md"]
        self.assertIn("geometric mean", run_main("report", "book.md", files={"book.md": book}).out)

    def test_the_report_says_how_many_requests_failed(self):
        with FakeServer("plain", faults=[None, "500", None], words=6) as server:
            outcome = measure(server, None, prompts=["a", "b", "c"])
        self.assertTrue(re.search(r"2 of 3|1 of 3|1 failed", outcome.out), outcome.out)


SCRIPT = "<script>alert(1)</script>"
HOSTILE = (
    "one\n# Injected\r\n- Injected: x\u2028# Injected",
    "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "tick\n```\n# Injected\n```",
    "a|b\\|c|" + SCRIPT + "|![i](http://evil/x.png)",
    "=cmd()|'calc'",
    "m" * 3_000_000,
)


class HostileServers(unittest.TestCase):
    """Nothing that a server says begins a line, a tag, a link, a fence, a cell or a formula of its own."""

    def pages(self, text, word):
        """All places in which a server is quoted, as routes and the files behind them."""
        events = [
            {"choices": [{"index": 0, "delta": {"content": "one %s three" % word}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": text}]},
            {
                "choices": [],
                "usage": {"prompt_tokens": 5, "completion_tokens": 3},
                "timings": {"predicted_n": 3, "predicted_ms": 1.0, "note": text, text: 1},
                "system_fingerprint": text,
            },
        ]
        chat = b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events)
        model = {"id": text[:900], "owned_by": "llamacpp", "meta": {"ftype": text}}
        label = json.dumps(text[:500])[1:-1]
        series = 'llamacpp:spec_decode_num_drafts_total{x="%s"} 3\n' % label
        files = {
            "chat": http(chat + b"data: [DONE]\n\n", "text/event-stream"),
            "models": http(json.dumps({"data": [model]}).encode()),
            "props": http(json.dumps({"build_info": text, "model_ftype": text}).encode()),
            "metrics": http(series.encode(), "text/plain"),
            "error": http(json.dumps({"error": {"message": text}}).encode(), status="500 Bad"),
        }
        routes = [
            {"method": "POST", "path": "/v1/chat/completions", "file": "chat"},
            {"method": "POST", "path": "/v1/chat/completions", "file": "error"},
            {"method": "POST", "path": "/v1/chat/completions", "file": "chat"},
            {"method": "GET", "path": "/v1/models", "file": "models"},
            {"method": "GET", "path": "/props", "file": "props"},
            {"method": "GET", "path": "/metrics", "file": "metrics"},
        ]
        return routes, files

    def outcome_of(self, text):
        with contextlib.ExitStack() as stack:
            servers = []
            for word in ("two", "2"):
                routes, files = self.pages(text, word)
                folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for name, data in files.items():
                    (folder / name).write_bytes(data)
                servers.append(stack.enter_context(ReplayServer(routes, folder)))
            flags = ("--divergence-report", "d.md", "--save-run", "run.jsonl", "--warmup", 0)
            return measure(*servers, *flags, "--fail-on", "changed-text", prompts=PROMPTS)

    def test_no_output_of_any_command_holds_a_servers_text_raw(self):
        for text in HOSTILE:
            with self.subTest(text[:40]):
                outcome = self.outcome_of(text)
                self.assertEqual(outcome.code, 3, outcome.err[-500:])
                book = outcome.files["labbook.md"]
                again = compare(("run.jsonl", outcome.files["run.jsonl"]))
                plain = [outcome.out, outcome.err, again.out, again.err, book.decode()]
                bug = outcome.files["d.md"].decode("utf-8")
                page = report(book).out
                cells = report(book, "--format", "csv").out
                for told in (*plain, bug, page, cells, report(book, "--format", "json").out):
                    self.assertLess(len(told), 60_000)
                    self.assertNotRegex(told, "[\x1b\x07\x9b\u2028\r]")
                    self.assertNotRegex(told, "(?m)^(# |- )?Injected")
                for told in (bug, page):
                    outside = re.sub("(?ms)^```(text|json)$.*?^```$", "", told)
                    self.assertNotIn("<script", outside)
                    self.assertNotIn("```", outside)
                    self.assertNotIn("](http://evil", outside)
                for row in csv.reader(cells.splitlines()):
                    self.assertEqual(len(row), 15, row)
                    self.assertFalse([cell for cell in row if cell[:1] in tuple("=+-@") and cell])
                rows = [line for line in page.splitlines() if line.startswith("|")]
                for line in rows:
                    bars = re.findall(r"(?<!\\)(?:\\\\)*\|", line)
                    self.assertIn(len(bars), (9, 11), line)
                if len(text) > 10_000:
                    self.assertLess(len(outcome.files["run.jsonl"]), 100_000)


if __name__ == "__main__":
    unittest.main()
