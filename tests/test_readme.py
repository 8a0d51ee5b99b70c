"""The README promises only what the program does."""

import io
import re
import shlex
import unittest
from contextlib import redirect_stdout
from pathlib import Path

import measure_speculative as m

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown_commands():
    """(arguments, output shown under it) of every command line in the README."""
    text = README.replace("\\\n", " ")
    for match in re.finditer(
        r"^    (\$ )?(?:.*&& )?(?:flock \S+ \S+ )?python3 measure_speculative\.py(.*)((?:\n    (?!python3|\$).*|\n(?=\n    ))*)",
        text,
        re.M,
    ):
        arguments = re.split(r"\s[>#]", match.group(2))[0]
        yield (
            shlex.split(arguments),
            [line[4:] for line in match.group(3).split("\n")[1:]] if match.group(1) else None,
        )


class Readme(unittest.TestCase):
    def test_every_flag_that_it_names_exists(self):
        source = (ROOT / "measure_speculative.py").read_text(encoding="utf-8")
        defined = set(re.findall(r'"(--[a-z][a-z-]+)"', source)) | {
            "--help",
            "--version",
            "--metrics",
        }
        self.assertEqual(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - defined, set())

    def test_every_measure_command_of_it_is_understood(self):
        commands = [
            words for words, _ in shown_commands() if words and words[0].startswith("--base")
        ]
        self.assertGreaterEqual(len(commands), 3)
        for words in commands:
            with self.subTest(command=" ".join(words)):
                m.arms_of(m.measure_parser().parse_args(words))

    def test_the_break_even_output_that_it_shows_is_the_real_one(self):
        shown = [
            (words, lines)
            for words, lines in shown_commands()
            if words and words[0] == "break-even"
        ]
        self.assertEqual(len(shown), 2)
        for words, lines in shown:
            out = io.StringIO()
            with self.subTest(command=" ".join(words)), redirect_stdout(out):
                self.assertEqual(m.main(words), m.MEASURED)
            self.assertEqual("\n".join(lines).strip(), out.getvalue().strip())

    def test_the_run_that_it_shows_is_the_one_in_the_notebook_as_the_program_prints_it(self):
        ((words, lines),) = [
            (words, lines) for words, lines in shown_commands() if "--max-tokens" in words and lines
        ]
        label = words[words.index("--label") + 1] + "/"
        records = [
            r
            for r in m.read_records(str(ROOT / "labbook.md"), self.fail)
            if r["label"].startswith(label)
        ]
        result = m.Result(
            *([r for r in records if r["kind"] == kind] for kind in ("endpoint", "comparison"))
        )
        printed = "\n".join(
            ["Recorded in labbook.md.", "", *map(m.printable, m.result_lines(result))]
        )
        self.assertEqual("\n".join(lines).strip(), printed)

    def test_the_notebook_that_comes_with_it_can_be_read_line_by_line(self):
        complaints = []
        records = m.read_records(str(ROOT / "labbook.md"), complaints.append)
        self.assertEqual(complaints, [])
        self.assertGreaterEqual({record["kind"] for record in records}, {"endpoint", "comparison"})
        self.assertFalse([record for record in records if record["simulated"]])


if __name__ == "__main__":
    unittest.main()
