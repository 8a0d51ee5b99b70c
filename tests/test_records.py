"""The records and the run files: what they hold, and that what is damaged in them is named, and never a traceback."""

import builtins
import contextlib
import copy
import io
import json
import os
import pathlib
import random
import tempfile
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import (
    FakeServer,
    Speculation,
)
from tests.support import (
    ALARMS,
    CHANGED,
    DRAFTS,
    PROMPTS,
    REFUSED,
    SAVE,
    TEXT,
    answer,
    at_most,
    canned,
    compare,
    faster_pair,
    findings,
    measure,
    run_main,
    saved_run,
    speeds,
    strict,
)

HUGE = 10**400
ODD = (
    None,
    True,
    0,
    -1,
    0.5,
    HUGE,
    -HUGE,
    1e308,
    -1e308,
    10**17,
    "",
    "x",
    "\ud800",
    "\u00e9\n```",
    [],
    [[]],
    [None],
    {},
    {"a": None},
    {"x": [1]},
    "DELETE",
)


def mutated(dice, value):
    """A copy of a JSON value with one of its parts, at any depth, replaced by something odd, and what was done."""
    value = copy.deepcopy(value)
    where, path = value, []
    while True:
        key = dice.choice(sorted(where) if isinstance(where, dict) else range(len(where)))
        path.append(key)
        if not isinstance(where[key], (dict, list)) or not where[key] or dice.random() < 0.3:
            break
        where = where[key]
    odd = dice.choice(ODD)
    if odd == "DELETE":
        del where[key]
    else:
        where[key] = odd
    return value, (path, odd if odd not in (HUGE, -HUGE) else "10**400")


BASELINE, FASTER = faster_pair()


class RunFilesWritten(unittest.TestCase):
    """--save-run"""

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

    def test_a_run_file_holds_a_header_for_each_arm_and_the_readings_as_measured(self):
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

    def test_an_older_run_file_is_never_overwritten(self):
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

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full here")
    def test_what_went_wrong_with_the_run_file_is_said_beside_what_else_went_wrong(self):
        recorder = ms.Recorder(
            lambda words: None, mock.Mock(write=mock.Mock(side_effect=OSError(28, "No space left")))
        )
        recorder.write({"kind": "run"})
        server = mock.Mock(
            endpoint=ms.Endpoint("baseline", "http://x/v1", "http://x"),
            snapshot=ms.Snapshot(None, "none"),
        )
        with (
            mock.patch.object(ms, "warm_up", return_value=[[]]),
            mock.patch.object(ms, "conditions_of", return_value={}),
            mock.patch.object(
                ms,
                "carry_out",
                side_effect=[False, ms.MeasureError("no threads")],
            ),
            mock.patch.object(ms, "judged_levels"),
        ):
            settings = ms.Settings(arms=(), prompts=(), warmup=0, levels=(1, 300))
            ms.measure_levels(settings, [server], recorder, ms.Judging("x", 0.0))
        self.assertRegex(recorder.trouble, "run file could not be written.*no threads")

    def test_an_empty_run_file_does_not_stand_in_the_way_of_the_next_try(self):
        with canned(REFUSED) as a:
            outcome = measure(a, None, "--model", "m", *SAVE, prompts=["one"])
        self.assertEqual((outcome.code, "run.jsonl" in outcome.files), (2, False))

    def test_failed_requests_stand_in_the_run_file_with_their_errors_and_without_text(self):
        import json

        with FakeServer("plain", faults=[None, "close-mid-body", None], words=6) as server:
            outcome = measure(server, None, "--save-run", "run.jsonl", prompts=["a", "b"])
        lines = [json.loads(line) for line in outcome.files["run.jsonl"].splitlines()]
        lost, good = [line for line in lines if line["kind"] == "reading"]
        self.assertIn(server.url, lost["error"])
        self.assertFalse(lost.get("content"))
        self.assertEqual((good["error"], good["completion_tokens"]), (None, 6))

    def test_a_run_file_that_exists_or_cannot_be_made_stops_before_the_first_measured_request(self):
        with FakeServer("plain") as server:
            for path, files in (
                ("old.jsonl", {"old.jsonl": "an hour of work\n"}),
                ("no-such-folder/x.jsonl", {}),
                (".", {}),
            ):
                with self.subTest(path):
                    outcome = measure(server, None, "--save-run", path, files=files, prompts=["x"])
                    self.assertEqual((outcome.code, server.chats), (2, []))
                    self.assertIn(path, outcome.err)
                    self.assertIn("--save-run", outcome.err)
                    self.assertEqual(outcome.files.get(path, b""), files.get(path, "").encode())


class RunFilesRefused(unittest.TestCase):
    """What is no run file, or was damaged or cut off."""

    def refused(self, name, data):
        outcome = compare(BASELINE, (name, data))
        self.assertEqual((outcome.code, outcome.records), (2, []), outcome.err)
        self.assertIn(name, outcome.err)
        self.assertRegex(outcome.err, "run file|--save-run|measure it again")

    def test_what_is_no_run_file_is_refused_by_name(self):
        for data in (
            b"",
            b"# a notebook\n\nprose\n",
            b'{"lab": "x", "label": "y"}\n',
            b"\x00\xff\x80" * 50,
            b"[1, 2]\n",
            FASTER[1].splitlines()[1] + b"\n",
        ):
            self.refused("other.jsonl", data)

    def test_a_missing_file_is_refused_by_name(self):
        outcome = run_main("compare", "plain.jsonl", "gone.jsonl", files=dict([BASELINE]))
        self.assertEqual((outcome.code, outcome.records), (2, []))
        self.assertIn("gone.jsonl", outcome.err)

    def test_a_header_without_its_conditions_is_refused(self):
        lines = FASTER[1].splitlines(keepends=True)
        header = json.loads(lines[0])
        for name in ("request", "prompts", "concurrency", "arm"):
            damaged = (
                json.dumps({key: value for key, value in header.items() if key != name}).encode()
                + b"\n"
            )
            with self.subTest(missing=name):
                self.refused("other.jsonl", damaged + b"".join(lines[1:]))

    def test_a_figure_of_the_wrong_kind_costs_its_reading_and_is_named(self):
        lines = FASTER[1].splitlines(keepends=True)
        for name, value in (
            ("latency_s", "fast"),
            ("completion_tokens", [1]),
            ("prompt_index", None),
            ("content", 7),
        ):
            damaged = json.dumps(dict(json.loads(lines[3]), **{name: value})).encode() + b"\n"
            with self.subTest(name=name):
                outcome = compare(
                    BASELINE, ("other.jsonl", b"".join([*lines[:3], damaged, *lines[4:]]))
                )
                self.assertEqual(outcome.code, 0, outcome.err)
                self.assertEqual(
                    outcome.err.splitlines()[0], "other.jsonl:4: damaged line skipped: " + name
                )
                self.assertEqual(outcome.comparison()["speedup"]["prompts"], 11)

    def test_a_damaged_reading_is_named_and_its_pair_left_out_of_every_rate(self):
        lines = FASTER[1].splitlines(keepends=True)
        lines[3] = lines[3][:70] + b"\n"
        outcome = compare(BASELINE, ("other.jsonl", b"".join(lines)))
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("other.jsonl:4", outcome.err)
        self.assertEqual(outcome.comparison()["speedup"]["prompts"], 11)
        plain = [json.loads(line) for line in BASELINE[1].splitlines()[1:-1]]
        right = 11 * 200 / sum(line["latency_s"] for line in plain if line["prompt_index"] != 2)
        self.assertAlmostEqual(outcome.comparison()["baseline_tokens_per_s"], right, delta=1e-9)

    def test_a_file_that_was_cut_off_is_compared_as_far_as_it_goes(self):
        lines = FASTER[1].splitlines(keepends=True)
        outcome = compare(BASELINE, ("other.jsonl", b"".join(lines[:9]) + lines[9][:40]))
        self.assertEqual(outcome.code, 0, outcome.err)
        record = outcome.comparison()
        self.assertEqual((record["speedup"]["prompts"], record["interrupted"]), (8, True))
        self.assertIn("interrupted", findings(record))
        self.assertTrue(outcome.endpoint("speculative")["interrupted"])
        self.assertFalse(outcome.endpoint("baseline")["interrupted"])
        self.assertIn("interrupted", outcome.err + outcome.out)

    def test_a_run_without_one_reading_cannot_be_compared(self):
        outcome = compare(BASELINE, ("other.jsonl", FASTER[1].splitlines(keepends=True)[0]))
        self.assertEqual(outcome.code, 1, outcome.err)
        self.assertEqual(outcome.comparisons(), [])

    def test_a_level_that_was_cut_off_before_its_first_reading_is_said_and_costs_no_other(self):
        with FakeServer("plain") as one, FakeServer("plain") as other:
            saved = measure(
                one,
                other,
                "--concurrency",
                "1,2",
                "--save-run",
                "run.jsonl",
                prompts=["one", "two"],
            ).files["run.jsonl"]
        lines = saved.splitlines(keepends=True)
        begins = [i for i, line in enumerate(lines) if b'"kind": "run"' in line]
        outcome = compare(
            ("cut.jsonl", b"".join(lines[: begins[2] + 2])), flags=("--divergence-report", "d.md")
        )
        self.assertEqual(
            (outcome.code, [r["concurrency"] for r in outcome.comparisons()]), (1, [1]), outcome.err
        )
        self.assertIn("no request completed", outcome.err)

    def test_a_failed_request_never_becomes_a_speed(self):
        answers = speeds(1.5, **DRAFTS)
        answers[5] = ["the server closed the connection"]
        outcome = compare(BASELINE, ("other.jsonl", saved_run("speculative", answers)))
        record = outcome.comparison()
        self.assertEqual(
            (record["speedup"]["prompts"], record["text_comparison"]["failed"]), (11, 1)
        )
        plain = [json.loads(line) for line in BASELINE[1].splitlines()[1:-1]]
        right = 11 * 200 / sum(line["latency_s"] for line in plain if line["prompt_index"] != 5)
        self.assertAlmostEqual(record["baseline_tokens_per_s"], right, delta=1e-9)
        self.assertEqual(
            outcome.endpoint("speculative")["first_error"], "the server closed the connection"
        )

    def test_a_single_run_is_refused_with_the_way_out(self):
        outcome = compare(BASELINE)
        self.assertEqual((outcome.code, outcome.records), (2, []))
        self.assertRegex(outcome.err, "plain.jsonl.*other")

    def test_a_time_too_short_to_be_one_costs_its_reading_and_is_named(self):
        sound = saved_run("baseline", [[answer(100, 1.0)], [answer(100, 1.1)]])
        other = saved_run("speculative", [[answer(100, 0.9)], [answer(100, 1.0)]])
        tiny = other.replace(b'"decode_s": 0.9', b'"decode_s": 1e-320')
        self.assertNotEqual(tiny, other)
        outcome = compare(("b.jsonl", sound), ("s.jsonl", tiny))
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertIn("s.jsonl:2: damaged line skipped: decode_s\n", outcome.err)
        self.assertEqual(outcome.comparison()["speedup"]["prompts"], 1)

    def test_a_triage_line_without_its_tokens_is_read_as_far_as_it_goes(self):
        sound = saved_run("baseline", [[answer(100, 1.0)], [answer(100, 1.1)]])
        other = saved_run(
            "speculative", [[answer(100, 0.9, content="another")], [answer(100, 1.0)]]
        )
        triage = {
            "kind": "triage",
            "arm": "speculative",
            "prompt_index": 0,
            "triage": {"finding": "near-tie", "gap_nats": 0.1},
        }
        outcome = compare(
            ("b.jsonl", sound),
            ("s.jsonl", other + json.dumps(triage).encode() + b"\n"),
            flags=("--divergence-report", "d.md"),
        )
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertNotIn("damaged", outcome.err)
        self.assertIn(b"other token not known", outcome.files["d.md"])


class Quiet:
    """main() in one folder, again and again."""

    def __init__(self, stack):
        self.path = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(self.path)

    def __call__(self, *words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = ms.main(list(words))
        return code, out.getvalue(), err.getvalue()


class WrongTypesInFiles(unittest.TestCase):
    """Run files and notebooks with a value of the wrong type anywhere."""

    @classmethod
    def setUpClass(cls):
        prompts = ["one", "two", "three"]
        texts, changed = dict.fromkeys(prompts, TEXT), {"one": TEXT, "two": CHANGED, "three": TEXT}
        with (
            FakeServer("vllm", answers=texts, gaps={4: (" FIVE", 0.125)}) as a,
            FakeServer("vllm", answers=changed, speculation=Speculation(4, (4, 2, 0))) as b,
        ):
            outcome = measure(a, b, "--repeats", "2", *SAVE, prompts=prompts)
        assert outcome.code == 0, outcome.err
        cls.lines, cls.earlier = strict(outcome.files["run.jsonl"]), outcome.files["labbook.md"]
        assert {line["kind"] for line in cls.lines} == {
            "run",
            "reading",
            "counted",
            "end",
            "triage",
        }
        with FakeServer("plain") as a, FakeServer("vllm", speculation=Speculation()) as b:
            levels = measure(a, b, "--concurrency", "1,2", prompts=prompts)
        cls.records = outcome.records + levels.records

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.program = Quiet(stack)

    def compared(self, lines):
        (self.program.path / "run.jsonl").write_bytes(
            b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        )
        (self.program.path / "book.md").write_bytes(self.earlier)
        done = self.program(
            "compare", "run.jsonl", "--labbook", "book.md", "--divergence-report", "d.md", *ALARMS
        )
        strict((self.program.path / "book.md").read_bytes())
        return done

    def assert_header_refused_or_line_skipped(self, kind, at, code, out, err):
        """A damaged header refuses the file; of any other line at most that line is lost, by its number and field.

        Returns whether anything was found.
        """
        self.assertNotIn("Traceback", err)
        if kind == "run" and code == 2:
            self.assertEqual(out, "")
            self.assertRegex(err, r"run\.jsonl|run file|cannot be compared")
            return True
        skipped = [line for line in err.splitlines() if "damaged" in line]
        if kind == "run":  # where the line is no header any more, the readings below are nobody's
            self.assertIn(code, (0, 1, 3), err)
            return bool(skipped)
        self.assertIn(code, (0, 3), err)
        for line in skipped:
            self.assertRegex(line, r"^run\.jsonl:%d: damaged line skipped: [\w.]+$" % (at + 1))
        self.assertLessEqual(len(skipped), 1)
        return bool(skipped)

    def altered(self, kind, **fields):
        """The lines with other fields in the first one of this kind, and its index."""
        lines = copy.deepcopy(self.lines)
        at = next(i for i, line in enumerate(lines) if line["kind"] == kind)
        lines[at].update(fields)
        return lines, at

    def test_an_untouched_file_is_compared(self):
        self.assertEqual(self.compared(self.lines)[0], 3, "its text changed")

    def test_readings_whose_figures_are_none_are_skipped_and_named_by_line_and_field(self):
        for name, values in (
            ("latency_s", (HUGE, 1e308, 1e9, -1, "x", [], None, True)),
            ("ttft_s", (HUGE, -1, {})),
            ("decode_s", (HUGE, 1e308, {})),
            ("cached_tokens", ([], "1", 0.5, -1)),
            ("prompt_tokens", ([], "1", HUGE)),
            ("completion_tokens", ([1], -1, HUGE)),
            ("decode_tokens", ({}, "x", -1, 0.5)),
            ("prompt_index", (None, -1, "0", [])),
            ("repeat", (None, 0.5)),
            ("place", (None, -1, "0")),
            ("waited_s", (HUGE, -1, "x")),
            ("content", (7, None)),
        ):
            for value in values:
                with self.subTest(name, value=str(value)[:20]):
                    lines, at = self.altered("reading", **{name: value})
                    code, _, err = self.compared(lines)
                    self.assertEqual(code, 3, "the other prompt's text changed")
                    self.assertEqual(
                        err.splitlines()[0],
                        "run.jsonl:%d: damaged line skipped: %s" % (at + 1, name),
                    )

    def test_a_damaged_header_is_refused_and_any_other_damaged_line_skipped(self):
        prompts = self.lines[0]["prompts"]
        for kind, fields in (
            ("triage", {"triage": {"gap_nats": []}}),
            (
                "triage",
                {
                    "triage": {
                        "finding": [],
                        "gap_nats": [],
                        "baseline_token": [],
                        "speculative_token": [],
                    }
                },
            ),
            ("run", {"prompts": [dict(prompt, workload=None) for prompt in prompts]}),
            ("run", {"prompts": [None]}),
            ("run", {"base_url": []}),
            ("run", {"model": "\ud800"}),
            ("run", {"engine": {"a": 1}}),
            ("run", {"server": []}),
            ("run", {"request": None}),
            ("run", {"concurrency": []}),
            ("run", {"findings": [1]}),
            ("run", {"arm": []}),
            ("run", {"host": None}),
            ("run", {"repeats": "x"}),
            ("reading", {"workload": None}),
            ("reading", {"arm": "nobody"}),
            ("reading", {"statistics": []}),
            ("reading", {"prompt_id": []}),
            ("reading", {"waited_s": "x"}),
            ("counted", {"before": None}),
            ("counted", {"tokens": "x"}),
            ("counted", {"elapsed_s": []}),
            ("end", {"interrupted": []}),
        ):
            with self.subTest(kind, fields=fields):
                lines, at = self.altered(kind, **fields)
                done = self.compared(lines)
                self.assertTrue(self.assert_header_refused_or_line_skipped(kind, at, *done))
                self.assertEqual(done[0] == 2, kind == "run", done[2])

    def test_a_triage_line_that_tells_nothing_is_read_as_not_known(self):
        for value in ([], "x", None):
            with self.subTest(value):
                code, _, err = self.compared(self.altered("triage", triage=value)[0])
                self.assertEqual(code, 3, err)
                self.assertNotIn("damaged", err)

    def test_300_run_files_with_one_odd_value_anywhere_give_no_traceback(self):
        dice, found = random.Random(15), 0
        for number in range(300):
            lines = list(self.lines)
            at = dice.randrange(len(lines))
            lines[at], what = mutated(dice, lines[at])
            kind = self.lines[at]["kind"]
            with self.subTest(number=number, kind=kind, what=what), at_most(10):
                done = self.compared(lines)
                found += self.assert_header_refused_or_line_skipped(kind, at, *done)
        self.assertGreater(found, 150)

    def reported(self, records, *flags):
        (self.program.path / "book.md").write_bytes(
            b"".join(json.dumps(record).encode() + b"\n" for record in records)
        )
        for form in ("markdown", "csv", "json"):
            code, out, err = self.program("report", "book.md", "--format", form, *flags)
            self.assertIn(code, (0, 2), err)
            self.assertNotIn("Traceback", err)
            yield form, code, out, err

    def test_report_names_a_record_that_it_cannot_show_and_shows_the_others(self):
        sound = [
            dict(record, label="sound/" + record["label"].rsplit("/", 1)[-1])
            for record in self.records[:3]
        ]
        for fields in (
            {"label": 5},
            {"label": None},
            {"label": []},
            {"latency_p50_s": []},
            {"latency_p50_s": {"baseline": "x", "speculative": 1}},
            {"speedup": 5},
            {"text_comparison": None},
            {"workloads": "x"},
            {"concurrency": "x"},
            {"break_even": []},
        ):
            with self.subTest(fields):
                odd = [
                    dict(record, **fields)
                    for record in self.records
                    if record["kind"] == "comparison"
                ]
                for form, code, out, err in self.reported(odd + sound):
                    self.assertEqual(code, 0, err)
                    self.assertIn("damaged", err, form)
                    self.assertIn("sound", out, form)

    def test_a_record_without_any_one_field_stops_no_report(self):
        for name in sorted(set().union(*self.records)):
            with self.subTest(name):
                odd = [
                    {key: value for key, value in record.items() if key != name}
                    for record in self.records
                ]
                for label in ((), ("--label", "measured")):
                    list(self.reported(odd, *label))

    def test_100_notebooks_with_one_odd_value_in_each_record_stop_no_report(self):
        dice = random.Random(16)
        for number in range(100):
            pairs = [mutated(dice, record) for record in self.records]
            with self.subTest(number=number, what=[what for _, what in pairs]), at_most(10):
                list(
                    self.reported(
                        [record for record, _ in pairs], *dice.choice(((), ("--label", "measured")))
                    )
                )


if __name__ == "__main__":
    unittest.main()
