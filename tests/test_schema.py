"""Records and run files: their schema, what is damaged in them, and whose fault a bug is."""

import contextlib
import copy
import io
import json
import pathlib
import random
import re
import sys
import tempfile
import unittest

import measure_speculative as ms
from tests.fakes import FakeServer, Speculation
from tests.support import measure, run_main

ROOT = pathlib.Path(ms.__file__).resolve().parent
ODD = (
    None,
    True,
    False,
    0,
    -1,
    7,
    0.5,
    -0.25,
    10**400,
    -(10**30),
    1e300,
    "",
    "x",
    "\x1b[31m\n```|<b>=1",
    "\ud800",
    [],
    [None],
    ["x", 1],
    {},
    {"x": 1},
    {"finding": "x"},
)


def places(value, path=()):
    """The path of every part of a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            found += places(item, (*path, i))
    return found


def mutated(record, chance):
    """A copy with one part replaced, removed or doubled; and the path of that part."""
    result = copy.deepcopy(record)
    path = chance.choice(places(result))
    outer = result
    for step in path[:-1]:
        outer = outer[step]
    deed = chance.random()
    if deed < 0.2:
        del outer[path[-1]]
    elif deed < 0.3 and isinstance(outer, list):
        outer.append(copy.deepcopy(outer[path[-1]]))
    else:
        outer[path[-1]] = copy.deepcopy(chance.choice(ODD))
    return result, path


def line_of(value):
    return json.dumps(value).encode() + b"\n"


def measured_files(*flags):
    """The notebook and the run file of a run that has nearly everything: drafts, several kinds, changed texts."""
    prompts = [
        {"id": "p%d" % i, "prompt": "say %d" % i, "workload": "k%d" % (i % 2)} for i in range(4)
    ]
    with (
        FakeServer("llama.cpp") as a,
        FakeServer(
            "vllm", answers=lambda p, n: "another answer to " + p, speculation=Speculation()
        ) as b,
    ):
        return measure(
            a,
            b,
            "--speculative-url",
            "k2=" + a.url,
            "--repeats",
            "2",
            *flags,
            "--save-run",
            "run.jsonl",
            "--prompts",
            "p.json",
            files={"p.json": json.dumps(prompts)},
        ).files


class Schema(unittest.TestCase):
    def test_every_shape_names_the_field_that_is_missing(self):
        record, shape = COMPARISON, ms.ComparisonRecord
        self.assertIsNone(ms.misfit(record, shape))
        for name in shape.__required_keys__:
            less = {key: value for key, value in record.items() if key != name}
            self.assertEqual(ms.misfit(less, shape), name)

    def test_a_part_of_the_wrong_kind_is_named_by_its_path(self):
        shape = ms.ComparisonRecord
        for path, value, named in (
            (("speedup",), 5, "speedup"),
            (("speedup", "low"), "x", "speedup.low"),
            (("speedup", "ratio"), True, "speedup.ratio"),
            (("workloads", 0, "acceptance", "rate"), [], "workloads.0.acceptance.rate"),
            (("audit", 0, "detail"), None, "audit.0.detail"),
            (("label",), "\ud800", "label"),
            (("concurrency",), 1.5, "concurrency"),
            (("baseline_tokens_per_s",), 10**400, "baseline_tokens_per_s"),
        ):
            record = copy.deepcopy(COMPARISON)
            outer = record
            for step in path[:-1]:
                outer = outer[step]
            outer[path[-1]] = value
            with self.subTest(path):
                self.assertEqual(ms.misfit(record, shape), named)

    def test_keys_that_a_later_version_wrote_are_no_damage(self):
        self.assertIsNone(ms.misfit(dict(COMPARISON, of_tomorrow={"x": [1]}), ms.ComparisonRecord))

    def test_keys_named_in_readme_and_notebook_are_those_of_the_schema(self):
        keys = set()
        for shape in vars(ms).values():
            if (
                isinstance(shape, type)
                and issubclass(shape, dict)
                and shape.__module__ == ms.__name__
            ):
                keys |= set(shape.__annotations__)
        prose = (ROOT / "labbook.md").read_text(encoding="utf-8").split("\n{")[0]
        readme = (ROOT / "README.md").read_text(encoding="utf-8").split("## The notebook")[1]
        for text, least in ((prose, 2), (readme, 5)):
            named = set(re.findall(r"`\"?([a-z]+(?:_[a-z]+)*)\"?[`:]", text))
            words = named - {"endpoint", "comparison"}
            known = words & keys
            self.assertGreaterEqual(len(known), least)
            self.assertEqual(
                {word for word in words - keys if "_" in word}, {"measure_speculative"} & words
            )


class DamagedRecords(unittest.TestCase):
    def check(self, kind, seed):
        """500 mutants in 10 notebooks, each between sound records of both kinds."""
        chance = random.Random(seed)
        for number in range(10):
            lines = [
                line_of(dict(COMPARISON, label="sound/comparison")),
                # shown by itself where no comparison is of its run
                line_of(dict(SOUND["endpoint"], label="sound/endpoint", run_id="alone-1")),
            ]
            above, expected = len(lines), {}
            for i in range(50):
                record, _ = mutated(dict(SOUND[kind], label="mutant%d/%s" % (i, kind)), chance)
                lines.append(line_of(record))
                ours = record.get("lab") == ms.LAB and record.get("schema") == ms.SCHEMA
                shape = ms.RECORD_SHAPES.get(str(record.get("kind")))
                whole = dict(ms.SINCE_1_0.get(str(record.get("kind")), {}), **record)
                wrong = ours and ("kind" if shape is None else ms.misfit(whole, shape))
                if wrong:
                    expected[above + 1 + i] = wrong
            for form in ("markdown", "csv", "json") if number < 2 else ("markdown",):
                self.check_report(form, b"".join(lines), expected)

    def check_report(self, form, book, expected):
        """The report shows what is sound and names each damaged line with its field: {line: field}."""
        outcome = run_main("report", "book.md", "--format", form, files={"book.md": book})
        self.assertEqual(outcome.code, 0)
        self.assertIn("sound/comparison", outcome.out)
        if form != "csv":  # it holds comparisons only
            self.assertIn("sound/endpoint", outcome.out)
        named = {}
        for warning in outcome.err.splitlines():
            where, _, said = warning.partition(": ")
            self.assertIn(" is damaged and left out: ", said)
            named[int(where.partition(":")[2])] = said.rpartition(": ")[2]
        self.assertEqual(named, expected)

    def test_500_mutations_of_an_endpoint_record_cost_only_the_damaged_lines(self):
        self.check("endpoint", 11)

    def test_500_mutations_of_a_comparison_record_cost_only_the_damaged_lines(self):
        self.check("comparison", 12)


class DamagedRunFiles(unittest.TestCase):
    def check(self, kind, seed):
        """500 copies of the run file, each with a mutant in the place of a line of this kind."""
        whole = LOADED_LINES if kind == "counted" else RUN_LINES
        if kind in ("reading", "triage", "end"):  # two arms will do, and take less time
            whole = [line for line in whole if line["arm"] != "k2"]
        chance, lines = random.Random(seed), [line_of(line) for line in whole]
        at = [i for i, line in enumerate(whole) if line["kind"] == kind]
        self.assertTrue(at)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "run.jsonl"
            for _ in range(500):
                i = chance.choice(at)
                line, path = mutated(whole[i], chance)
                file.write_bytes(b"".join([*lines[:i], line_of(line), *lines[i + 1 :]]))
                with self.subTest(path):
                    self.check_file(file, kind, i + 1)

    def check_file(self, file, kind, number):
        """It is read but for this line, or refused for it where it is a header; what is read makes sound records."""
        warnings = []
        try:
            runs, triage = ms.read_runs(str(file), warnings.append)
        except ms.UsageError as error:
            self.assertEqual(kind, "run")
            self.assertIn("run.jsonl:%d: " % number, str(error))
            return
        for words in warnings:
            self.assertRegex(words, r"run.jsonl:\d+: damaged line skipped: [\w.]+$")
            if kind != "run":  # below a line that is no header any more, lines are nobody's
                self.assertIn("run.jsonl:%d: " % number, words)
        by_level = {}
        for run in runs:
            by_level.setdefault(run.conditions["concurrency"], []).append(run)
        for level in by_level.values():
            result = ms.result_of(ms.level_of(level, 0.0), ms.Judging("x", 0.0), triage)
            for record in result.records():
                self.assertIsNone(ms.misfit(record, ms.RECORD_SHAPES[record["kind"]]))
            "\n".join(map(ms.printable, ms.levels_lines([result])))

    def test_500_mutations_of_a_header_are_refused_by_name_or_read(self):
        self.check("run", 21)

    def test_500_mutations_of_a_reading_cost_only_that_reading(self):
        self.check("reading", 22)

    def test_500_mutations_of_the_counters_of_a_block_cost_only_that_block(self):
        self.check("counted", 23)

    def test_500_mutations_of_a_triage_line_cost_only_that_line(self):
        self.check("triage", 24)

    def test_500_mutations_of_a_closing_line_cost_only_that_line(self):
        self.check("end", 25)


class BugsOfOurs(unittest.TestCase):
    """A bug of the program is a traceback of the program, never called the user's damage."""

    def functions_called(self, argv, files):
        called = set()

        def note(frame, event, argument):
            if event == "call" and frame.f_code.co_filename == ms.__file__:
                called.add(frame.f_code)

        sys.setprofile(note)
        try:
            outcome = run_main(*argv, files=files)
        finally:
            sys.setprofile(None)
        self.assertEqual(outcome.code, 0, outcome.err)
        return called

    def test_an_error_planted_in_any_function_of_the_report_is_a_traceback(self):
        files = {"book.md": (ROOT / "labbook.md").read_bytes()}
        for form in ("markdown", "csv", "json"):
            argv = ("report", "book.md", "--format", form)
            called = self.functions_called(argv, files)
            self.assertGreater(len(called), 15)
            for code in called:
                with self.subTest(code.co_name, line=code.co_firstlineno, form=form):
                    self.plant(code, argv, files)

    def plant(self, code, argv, files):
        planted = []

        def plant(frame, event, argument):
            if event == "call" and frame.f_code is code and not planted:
                planted.append(code)
                raise KeyError("planted")

        said = io.StringIO()
        sys.setprofile(plant)
        try:
            with self.assertRaisesRegex(KeyError, "planted"), contextlib.redirect_stderr(said):
                run_main(*argv, files=files)
        finally:
            sys.setprofile(None)
        self.assertTrue(planted)
        self.assertNotIn("damaged", said.getvalue())


def shortened(run_file):
    """The headers, the first round of the first kind of work, the ends and one triage line, as JSON."""
    saved = [json.loads(line) for line in run_file.splitlines()]
    kinds = [line["kind"] for line in saved]
    begin = saved[: kinds.index("counted") + kinds.count("run")]
    return [
        *begin,
        *(line for line in saved if line["kind"] == "end"),
        saved[kinds.index("triage")],
    ]


def setUpModule():
    global SOUND, COMPARISON, RUN_LINES, LOADED_LINES
    files = measured_files()
    records = [
        json.loads(line) for line in files["labbook.md"].splitlines() if line.startswith(b"{")
    ]
    COMPARISON = next(
        r for r in records if r["kind"] == "comparison" and r["text_comparison"]["divergences"]
    )
    SOUND = {"endpoint": records[1], "comparison": COMPARISON}
    RUN_LINES = shortened(files["run.jsonl"])
    # under load the speeds are made of the counted blocks
    LOADED_LINES = shortened(measured_files("--concurrency", "2")["run.jsonl"])


if __name__ == "__main__":
    unittest.main()
