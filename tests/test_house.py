"""How the module is built: its map is true, and nothing is worked out twice."""

import collections
import json
import pathlib
import re
import sys
import unittest

import measure_speculative as ms
from tests.fakes import FakeServer
from tests.support import run_main

SOURCE = pathlib.Path(ms.__file__).read_text(encoding="utf-8")


class TheMap(unittest.TestCase):
    def test_the_map_names_the_sections_in_their_order(self):
        head, banner, rest = SOURCE.partition("# ---- ")
        drawn = re.findall(r"^#   (\S.*?)   +\S", head, re.MULTILINE)
        built = re.findall(r"^# ---- (.*?) -+$", banner + rest, re.MULTILINE)
        self.assertEqual(drawn, built)

    def test_the_map_stands_before_the_imports(self):
        self.assertLess(SOURCE.index("The rooms, in reading order"), SOURCE.index("\nimport "))


class NothingTwice(unittest.TestCase):
    def test_comparing_a_small_saved_run_takes_at_most_6000_calls(self):
        prompts = [
            {"id": str(i), "prompt": "say %d" % i, "workload": "k%d" % (i % 3)} for i in range(6)
        ]
        with FakeServer("plain") as a, FakeServer("llama.cpp") as b:
            saved = run_main(
                *("--baseline-url", a.url, "--speculative-url", b.url, "--repeats", "2"),
                *("--prompts", "p.json", "--save-run", "run.jsonl"),
                files={"p.json": json.dumps(prompts)},
            ).files["run.jsonl"]
        called = collections.Counter()

        def note(frame, event, argument):
            # comprehensions are frames of their own in some versions of Python, and no functions
            if (
                event == "call"
                and frame.f_code.co_filename == ms.__file__
                and frame.f_code.co_name[0] != "<"
            ):
                called[frame.f_code.co_name] += 1

        sys.setprofile(note)
        try:
            outcome = run_main("compare", "run.jsonl", files={"run.jsonl": saved})
        finally:
            sys.setprofile(None)
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertLessEqual(sum(called.values()), 6000, called.most_common(12))


if __name__ == "__main__":
    unittest.main()
