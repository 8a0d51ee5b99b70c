"""The scraper against the official parser, prometheus_client: same samples on generated pages, and no slower.

The package is needed for these tests only: python3 -m pip install prometheus_client
"""

import collections
import random
import time
import unittest

import measure_speculative as ms
from tests.fakes import PAGES

try:
    from prometheus_client.openmetrics.parser import (
        text_string_to_metric_families as parse_openmetrics,
    )
    from prometheus_client.parser import text_string_to_metric_families as parse_text
except ImportError:
    parse_text = parse_openmetrics = None

NAMES = (
    "vllm:spec_decode_num_drafts",
    "llamacpp:n_decode",
    "a",
    "_b",
    "tgi_queue_size",
    "X:y_1",
    "trtllm_spec",
)
LABELS = ("model_name", "engine", "position", "le_", "_x", "A1", "path", "version")
PIECES = (
    '"',
    "\\",
    "\n",
    "{",
    "}",
    ",",
    "=",
    "#",
    " ",
    "  ",
    "\t",
    "\r",
    "a",
    "model",
    "/srv/m.gguf",
    "C:\\models\\new",
    "\\n",
    '\\"',
    '\\\\"',
    "# {",
    '"} 1',
    '="',
    "\u00e9",
    "\u4f60\u597d",
    "\u2028",
    "\x85",
    "\x0b",
    "\U0001f600",
    "\ufeff",
    "1",
    "+Inf",
    "'",
    ";",
    ":",
    "e\u0301",
    "\x1c",
)
VALUES = (
    "0",
    "1",
    "-1",
    "17",
    "1.0",
    "1.234567e+06",
    "1.23457e+06",
    "5E-3",
    "-0.25",
    "1e+308",
    "NaN",
    "+Inf",
    "-Inf",
    "0.1",
    "12345678901234567890",
    ".5",
    "1.",
)
PAGES_EACH = 2000  # of both formats: 4,000


def escaped(value):
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def random_text(rng, most=5):
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, most)))


def random_labels(rng, comma, **fixed):
    """The text of a label set, as one server or another might lay it out; openmetrics allows less white space."""
    labels = dict(
        {name: random_text(rng) for name in rng.sample(LABELS, rng.randint(0, 3))}, **fixed
    )
    items = list(labels.items())
    rng.shuffle(items)
    inside = rng.choice(comma).join('%s="%s"' % (name, escaped(value)) for name, value in items)
    return "{%s}" % inside if inside else rng.choice(("", "{}"))


def text_page(rng):
    """A page in text format 0.0.4."""
    lines = []
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        kind = rng.choice(("counter", "gauge", "untyped", None))
        name += "_total" if kind == "counter" and rng.random() < 0.8 else ""
        if rng.random() < 0.7:
            lines.append(
                "# HELP %s %s"
                % (name, escaped(random_text(rng)).replace('\\"', '"').replace("\r", ""))
            )
        if kind:
            lines.append("# TYPE %s %s" % (name, kind))
        for _ in range(rng.randint(0, 4)):
            labels = random_labels(rng, (",", ", ", " , "))
            if labels.endswith('"}') and rng.random() < 0.2:
                labels = labels[:-1] + rng.choice((",}", ", }"))
            gap, tail = (
                rng.choice((" ", "  ", "\t")),
                rng.choice(("", "", " 1757000000000", "\t-5", " 0")),
            )
            lines.append(name + labels + gap + rng.choice(VALUES) + tail)
        lines += rng.choice(([], [], [""], ['# a comment, with { and " in it'], ["#"]))
    return "\n".join(lines) + rng.choice(("\n", ""))


def exemplar(rng):
    text = "".join(
        rng.choice(("\\", "\n", "}", "{", ",", "a", "\u00e9", " "))
        for _ in range(rng.randint(0, 6))
    )
    text += '"' * (rng.random() < 0.05)
    return ' # {trace_id="%s"} %s%s' % (
        escaped(text),
        rng.choice(("1", "0.5", "2e-3")),
        rng.choice(("", " 1757000000.5")),
    )


def openmetrics_page(rng):
    """A page as OpenMetrics wants it: exemplars, timestamps in seconds, families whole, # EOF."""
    lines = []
    for name in rng.sample(NAMES, rng.randint(1, 4)):
        kind, stamp = (
            rng.choice(("counter", "gauge", "unknown", "histogram")),
            rng.choice(("", " 1757000000.123", " 1757000000")),
        )
        lines.append("# TYPE %s %s" % (name, kind))
        if rng.random() < 0.5:
            lines.append("# HELP %s %s" % (name, escaped(random_text(rng)).replace("\r", "")))
        for number in range(rng.randint(1, 3)):
            labels = random_labels(rng, (",",), n=str(number))
            if kind == "counter":
                lines.append(
                    "%s_total%s %s%s%s"
                    % (
                        name,
                        labels,
                        rng.choice(("0", "7", "1.5", "1.234567e+06", "+Inf")),
                        stamp,
                        rng.choice(("", exemplar(rng))),
                    )
                )
                if rng.random() < 0.5:
                    lines.append("%s_created%s 1757000000.25%s" % (name, labels, stamp))
            elif kind == "histogram":
                counts = sorted(rng.randint(0, 99) for _ in range(3))
                for le, count in zip(("0.5", "2.0", "+Inf"), counts):
                    lines.append(
                        '%s_bucket%s,le="%s"} %d%s%s'
                        % (name, labels[:-1], le, count, stamp, rng.choice(("", exemplar(rng))))
                    )
                lines += [
                    "%s_count%s %d%s" % (name, labels, counts[-1], stamp),
                    "%s_sum%s %d%s" % (name, labels, 5, stamp),
                ]
            else:
                lines.append(name + labels + " " + rng.choice(VALUES[:-2]) + stamp)
    return "\n".join(lines + ["# EOF"]) + "\n"


def ours(page):
    """Samples with their number; the official parser adds `_total` to a counter that lacks it, we keep the server's name."""

    def name(sample):
        lacks_it = sample.kind == "counter" and not sample.name.endswith(("_total", "_created"))
        return sample.name + "_total" * lacks_it

    return collections.Counter((name(s), s.labels, repr(s.value)) for s in ms.parse_metrics(page))


def theirs(parse, page):
    return collections.Counter(
        (s.name, tuple(sorted(s.labels.items())), repr(float(s.value)))
        for family in parse(page)
        for s in family.samples
    )


@unittest.skipUnless(
    parse_text,
    "the official parser is missing; get it with: python3 -m pip install prometheus_client",
)
class Reference(unittest.TestCase):
    def compare(self, make, parse):
        compared = samples = seed = 0
        while compared < PAGES_EACH:
            seed += 1
            page = make(random.Random(seed))
            try:
                expected = theirs(parse, page)
            except ValueError:  # the official parser cannot read every quote within an exemplar
                self.assertLess(seed, 1.2 * PAGES_EACH)
                continue
            if ours(page) != expected:
                self.fail(
                    "seed %d\n%s\nofficial only: %s\nours only: %s"
                    % (seed, page, expected - ours(page), ours(page) - expected)
                )
            compared, samples = compared + 1, samples + sum(expected.values())
        self.assertGreater(samples, 4 * PAGES_EACH)

    def test_text_pages_give_the_official_samples(self):
        self.compare(text_page, parse_text)

    def test_openmetrics_pages_with_exemplars_give_the_official_samples(self):
        self.compare(openmetrics_page, parse_openmetrics)

    def test_recorded_pages_give_the_official_samples(self):
        for path in sorted(PAGES.glob("*.txt")) + sorted((PAGES.parent / "engines").glob("*.txt")):
            if "stream" not in path.name:
                with self.subTest(path.name):
                    page = path.read_text("utf-8")
                    self.assertEqual(ours(page), theirs(parse_text, page))

    def test_types_are_the_official_ones(self):
        page = (PAGES / "vllm-0.32.0-ngram-k4.after.txt").read_text("utf-8")
        official = {s.name: family.type for family in parse_text(page) for s in family.samples}
        self.assertEqual(
            {s.name: s.kind for s in ms.parse_metrics(page)},
            {name: kind.replace("untyped", "unknown") for name, kind in official.items()},
        )

    def test_real_page_is_read_at_least_as_fast(self):
        page = (PAGES / "vllm-0.32.0-ngram-k4.after.txt").read_text("utf-8")

        def seconds(read):
            best = 9.0
            for _ in range(7):
                started = time.perf_counter()
                read()
                best = min(best, time.perf_counter() - started)
            return best

        self.assertLessEqual(
            seconds(lambda: ms.parse_metrics(page)),
            seconds(lambda: [s for family in parse_text(page) for s in family.samples]),
        )


if __name__ == "__main__":
    unittest.main()
