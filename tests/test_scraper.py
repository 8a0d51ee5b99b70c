"""The Prometheus scraper: pages in, samples and growth out; and what it never takes for zero."""

import email.message
import json
import math
import pathlib
import tempfile
import time
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, PAGES, Counts, FakeServer, ReplayServer, Speculation, sum_counts
from tests.support import (
    Clock,
    findings,
    measure,
    of_answers,
)

PROMPTS = ["first prompt of two", "second prompt of two"]


def snapshot(text, model="m", headers=None):
    message = email.message.Message()
    for name, value in (headers or {}).items():
        message[name] = value
    return ms.snapshot_of(text, message, model)


def case_text(case, name):
    return (CASES / case / name).read_text("utf-8")


def growth_of(case, before="before.txt", after="after.txt", model="m"):
    return ms.counter_growth(
        snapshot(case_text(case, before), model), snapshot(case_text(case, after), model)
    )


def figures_of(growth, tokens=None, answers=0):
    found = ms.acceptance_of_counters(growth, answers)
    return found and ms.acceptance_record(of_answers(found, tokens, answers))


def sample_values(text):
    return {s.series: s.value for s in ms.parse_metrics(text)}


def endpoint_for(server, **more):
    return ms.Endpoint(
        "speculative", server.url, server.root, "m", metrics_url=server.root + "/metrics", **more
    )


def text_of(chat):
    return json.dumps(chat["body"])


class SwitchingServer(ReplayServer):
    """Recorded pages: `after` once a chat request was answered, else `before`; the other routes as in ReplayServer."""

    def __init__(self, routes, folder, path, before, after):
        super().__init__(routes, folder)
        self.path, self.pages = path, (before, after)

    def next_entry(self, method, path):
        if (method, path) == ("GET", self.path):
            return {"file": self.pages[bool(self.chats)]}
        return super().next_entry(method, path)


class PagesParsed(unittest.TestCase):
    def test_legal_lines_are_read_whatever_their_corners(self):
        for line, name, labels, value in (
            ("a 1", "a", {}, 1.0),
            ("a{} 1", "a", {}, 1.0),
            ("a\t 1\t", "a", {}, 1.0),
            ("  a 1", "a", {}, 1.0),
            ("a:b_c 1.5e+02", "a:b_c", {}, 150.0),
            ("a 1.23457e+06", "a", {}, 1234570.0),
            ("a -3", "a", {}, -3.0),
            ("a 5 1757000000000", "a", {}, 5.0),
            ("a 5 -12", "a", {}, 5.0),
            ('a{x="1",} 2', "a", {"x": "1"}, 2.0),
            ('a{ x = "1" , y="2" } 2', "a", {"x": "1", "y": "2"}, 2.0),
            ('a {x="1"} 2', "a", {"x": "1"}, 2.0),
            (r'a{x="say \"hi\""} 2', "a", {"x": 'say "hi"'}, 2.0),
            (r'a{x="C:\\models\\new"} 2', "a", {"x": "C:\\models\\new"}, 2.0),
            (r'a{x="one\ntwo"} 2', "a", {"x": "one\ntwo"}, 2.0),
            (r'a{x="\\n"} 2', "a", {"x": "\\n"}, 2.0),
            ('a{x="}"} 2', "a", {"x": "}"}, 2.0),
            ('a{x="{,}= #",y="b c"} 2', "a", {"x": "{,}= #", "y": "b c"}, 2.0),
            ('a{x=""} 2', "a", {"x": ""}, 2.0),
            ('a{x="\u4f60\u2028\x85"} 2', "a", {"x": "\u4f60\u2028\x85"}, 2.0),
            (
                'a_bucket{le="+Inf"} 7 # {trace_id="a}b"} 0.5 1757000000.5',
                "a_bucket",
                {"le": "+Inf"},
                7.0,
            ),
            ('a 7 1.5 # {t="x"} 0.5', "a", {}, 7.0),
        ):
            with self.subTest(line):
                (found,) = ms.parse_metrics(line)
                self.assertEqual(
                    (found.name, dict(found.labels), found.value), (name, labels, value)
                )

    def test_special_values_are_read(self):
        values = [s.value for s in ms.parse_metrics("a +Inf\nb -Inf\nc Inf\nd NaN\n")]
        self.assertEqual([math.inf, -math.inf, math.inf], values[:3])
        self.assertTrue(math.isnan(values[3]))

    def test_line_that_is_no_sample_costs_only_itself(self):
        for broken in (
            "bad line here",
            "a",
            "a{x=1} 2",
            'a{x="1} 2',
            "{} 3",
            "a one",
            "1a 2",
            "ab12",
            "a{b} 1 2 3 4",
            "\x00",
        ):
            with self.subTest(broken):
                self.assertEqual(
                    sample_values("before 1\n%s\nafter 2" % broken), {"before": 1.0, "after": 2.0}
                )

    def test_line_ends_of_windows_and_a_missing_last_one_are_no_trouble(self):
        self.assertEqual(sample_values("a 1\r\nb 2"), {"a": 1.0, "b": 2.0})

    def test_type_is_known_for_a_family_and_its_parts(self):
        page = (
            '# HELP x_total words # TYPE y gauge\n# TYPE x_total counter\nx_total 1\n# TYPE h histogram\nh_bucket{le="1"} 1\n'
            "h_sum 1\n# TYPE y counter\ny_total 1\n# TYPE g gauge\ng 1\nnone 1\n"
        )
        kinds = {s.name: s.kind for s in ms.parse_metrics(page)}
        self.assertEqual(
            kinds,
            {
                "x_total": "counter",
                "h_bucket": "histogram",
                "h_sum": "histogram",
                "y_total": "counter",
                "g": "gauge",
                "none": "unknown",
            },
        )

    def test_case_c20_corners_of_the_format_are_read(self):
        page = (CASES / "C20" / "page.txt").read_bytes().decode("utf-8")
        values = {s.name: s.value for s in ms.parse_metrics(page) if math.isfinite(s.value)}
        self.assertEqual(
            values,
            {
                "llamacpp:tokens_predicted_total": 10,
                "llamacpp:tokens_predicted_seconds_total": 0.5,
                "vllm:spec_decode_num_drafts_total": 4,
                "vllm:spec_decode_num_draft_tokens_total": 12,
                "vllm:spec_decode_num_accepted_tokens_total": 6,
            },
        )
        self.assertIn(
            'a "quoted" , name}', [v for s in ms.parse_metrics(page) for _, v in s.labels]
        )

    def test_broken_pages_take_no_quadratic_time(self):
        def seconds(text):
            best = math.inf
            for _ in range(3):
                started = time.perf_counter()
                self.assertEqual([s for s in ms.parse_metrics(text) if s.value != 1.0], [])
                best = min(best, time.perf_counter() - started)
            return best

        for name, make in (
            ("names", lambda n: "a" * n + "{"),
            ("labels", lambda n: "a{" + 'x="1",' * n),
            ("braces", lambda n: "{" * n),
            ("backslashes", lambda n: 'a{x="' + "\\" * (2 * n + 1)),
            ("quotes", lambda n: 'a{x="' + '"' * n),
            ("numbers", lambda n: "a " + "1 " * n),
            ("spaces", lambda n: 'a{x="1"} 1' + " " * n + "x"),
        ):
            with self.subTest(name):
                self.assertLess(seconds(make(4000)), 40 * seconds(make(500)) + 0.01)


class CounterGrowth(unittest.TestCase):
    def test_case_c07_series_of_all_engines_are_summed_and_created_never(self):
        growth = growth_of("C07")
        self.assertEqual(self.counts(growth), (100, 300, 160, (80, 49, 31)))
        self.assertEqual(ms.generated_tokens(growth), 275)
        self.assertFalse([name for name in ms.spec_delta(growth) if "_created" in name])
        told = figures_of(growth)
        self.assertAlmostEqual(told["rate"], 0.53333, 5)
        self.assertAlmostEqual(told["mean_length"], 2.6)
        self.assertEqual(told["per_position"], [0.8, 0.49, 0.31])

    def counts(self, growth):
        found = ms.acceptance_of_counters(growth, 0)
        return found.steps, found.drafted, found.accepted, found.per_position

    def test_case_c03_only_the_measured_model_counts(self):
        growth = growth_of("C03", "fan_before.txt", "fan_after.txt", "a")
        self.assertEqual(self.counts(growth), (30, 60, 48, (22, 15, 11)))
        self.assertEqual(ms.generated_tokens(growth), 100)
        told = figures_of(growth)
        self.assertAlmostEqual(told["mean_length"], 2.6)
        self.assertAlmostEqual(told["rate"], 0.8)
        self.assertFalse(
            [name for name in ms.spec_delta(growth) if "router" in name or '"b"' in name]
        )

    def test_page_of_several_models_without_ours_is_unavailable(self):
        for model in ("c", ""):
            page = snapshot(case_text("C03", "fan_after.txt"), model)
            self.assertIsNone(page.samples)
            self.assertIn("a, b", page.unavailable)

    def test_page_of_one_model_under_another_name_is_taken(self):
        self.assertEqual(
            self.counts(
                ms.counter_growth(
                    *(
                        snapshot(
                            "\n".join(
                                line
                                for line in case_text("C03", name).split("\n")
                                if '"b"' not in line
                            ),
                            "alias",
                        )
                        for name in ("fan_before.txt", "fan_after.txt")
                    )
                )
            ),
            (30, 60, 48, (22, 15, 11)),
        )

    def test_case_c05_family_that_appears_counts_from_zero(self):
        growth = growth_of("C05", "new_before.txt", "new_after.txt")
        self.assertEqual(self.counts(growth), (87, 259, 167, (70, 55, 42)))
        told = figures_of(growth, 256, 1)
        self.assertAlmostEqual(told["rate"], 0.64479, 5)
        self.assertAlmostEqual(told["mean_length"], 2.9195, 4)
        self.assertAlmostEqual(told["tokens_per_target_step"], 2.8977, 4)
        self.assertEqual([round(p, 3) for p in told["per_position"]], [0.805, 0.632, 0.483])

    def test_case_c05_page_of_an_older_build_tells_nothing_rather_than_zero(self):
        growth = growth_of("C05", "old_before.txt", "old_after.txt")
        self.assertIsNone(ms.acceptance_of_counters(growth, 1))
        self.assertEqual(ms.spec_delta(growth), {})
        self.assertEqual(ms.generated_tokens(growth), 256)

    def test_case_c08_gauge_is_never_differenced(self):
        before, after = (
            snapshot(case_text("C08", name).partition("\n\n")[2])
            for name in ("prom_before.http", "prom_after.http")
        )
        growth = ms.counter_growth(before, after)
        self.assertEqual(sorted(ms.spec_delta(growth).values(), reverse=True), [900, 450])
        told = figures_of(growth, 1000, 10)
        self.assertEqual((told["rate"], told["steps"], told["mean_length"]), (0.5, None, None))
        self.assertAlmostEqual(told["tokens_per_target_step"], (1000 - 10) / (1000 - 10 - 450))

    def test_case_c11_reset_gives_no_number_at_all(self):
        for after in ("after.txt", "after_mixed.txt"):
            with self.subTest(after):
                growth = growth_of("C11", after=after)
                self.assertTrue(growth.reset)
                self.assertIsNone(growth.samples)
                self.assertIn("reset", growth.void)
                self.assertIsNone(ms.spec_delta(growth))
                self.assertIsNone(ms.acceptance_of_counters(growth, 1))

    def test_case_c12_nothing_accepted_is_zero_and_not_missing(self):
        told = figures_of(growth_of("C12"), 200, 0)
        self.assertEqual(
            tuple(
                told[name]
                for name in (
                    "drafted",
                    "accepted",
                    "rate",
                    "mean_length",
                    "tokens_per_target_step",
                    "alpha",
                )
            ),
            (600, 0, 0.0, 1.0, 1.0, 0.0),
        )
        mixed = figures_of(growth_of("C12", after="after_mixed.txt"), 800, 0)
        self.assertAlmostEqual(mixed["rate"], 0.3333, 4)
        self.assertAlmostEqual(mixed["mean_length"], 2.0)

    def test_case_c13_positions_are_in_numeric_order(self):
        growth = growth_of("C13")
        told = figures_of(growth)
        self.assertEqual((told["steps"], told["drafted"], told["accepted"]), (65, 975, 89))
        self.assertEqual(
            [round(p, 3) for p in told["per_position"]],
            [0.6, 0.385, 0.215, 0.108, 0.062] + [0.0] * 10,
        )
        self.assertAlmostEqual(told["rate"], 0.0913, 4)
        self.assertAlmostEqual(told["mean_length"], 2.3692, 4)
        self.assertAlmostEqual(told["mean_length"] - 1, sum(told["per_position"]))
        self.assertAlmostEqual(told["alpha"], 0.578, 3)
        names = [name for name in ms.spec_delta(growth) if "per_pos" in name]
        self.assertEqual(
            [int(name.partition('position="')[2].partition('"')[0]) for name in names],
            list(range(15)),
        )

    def test_case_c13_conditional_rates_and_the_cliff_are_shown(self):
        lines = "\n".join(
            ms.position_lines([("copy", figures_of(growth_of("C13"))["per_position"])])
        )
        for text in (
            "0.60 0.60",
            "0.38 0.64",
            "0.22 0.56",
            "0.11 0.50",
            "0.06 0.57",
            "position 6 onward adds 0.00 tokens per step",
        ):
            self.assertIn(text, lines)

    def test_case_c17_bookkeepings_need_not_add_up(self):
        growth = growth_of("C17")
        found = ms.acceptance_of_counters(growth, 200)
        told = ms.acceptance_record(of_answers(found, 16990, 200))
        self.assertEqual(found.drafted / found.steps, 7.0)
        self.assertAlmostEqual(told["rate"], 0.3621, 4)
        self.assertAlmostEqual(told["mean_length"], 3.5349, 4)
        self.assertAlmostEqual(told["tokens_per_target_step"], (16990 - 200) / found.steps)

    def test_case_c19_old_names_are_known(self):
        found = ms.acceptance_of_counters(growth_of("C19"), 20)
        told = ms.acceptance_record(of_answers(found, 200, 20))
        self.assertEqual((found.steps, found.drafted, found.accepted), (60, 200, 120))
        self.assertAlmostEqual(told["rate"], 0.6)
        self.assertAlmostEqual(told["mean_length"], 3.0)

    def test_unknown_speculation_counters_are_kept_but_no_rate_is_made_of_them(self):
        pages = [
            '# TYPE new:draft_magic_total counter\nnew:draft_magic_total{x="1"} %d\n' % n
            for n in (3, 10)
        ]
        growth = ms.counter_growth(*map(snapshot, pages))
        self.assertEqual(ms.spec_delta(growth), {'new:draft_magic_total{x="1"}': 7})
        self.assertIsNone(ms.acceptance_of_counters(growth, 2))

    def test_gauges_ratios_and_histograms_of_other_things_have_no_delta(self):
        page = (
            "# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length %d\n"
            "# TYPE vllm:spec_decode_num_drafts_created gauge\nvllm:spec_decode_num_drafts_created 1.7e+09\n"
            '# TYPE vllm:draft_time_seconds histogram\nvllm:draft_time_seconds_bucket{le="1"} %d\n'
            "http_requests_accepted_total %d\nvllm:num_requests_accepted_waiting %d\n"
        )
        growth = ms.counter_growth(snapshot(page % (1, 1, 1, 1)), snapshot(page % (5, 5, 5, 5)))
        self.assertEqual({k: v for k, v in ms.spec_delta(growth).items() if "seconds" not in k}, {})

    def test_created_of_an_openmetrics_counter_is_no_counter(self):
        page = (
            '# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total %d # {trace_id="x"} 1 1.5\n'
            "vllm:spec_decode_num_drafts_created 1.757e+09\n# EOF\n"
        )
        growth = ms.counter_growth(snapshot(page % 5), snapshot(page % 9))
        self.assertEqual(ms.spec_delta(growth), {"vllm:spec_decode_num_drafts_total": 4})

    def test_values_that_are_no_number_never_reach_a_delta(self):
        page = "# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total %s\n"
        for bad in ("NaN", "+Inf", "-Inf"):
            with self.subTest(bad):
                growth = ms.counter_growth(snapshot(page % "1"), snapshot(page % bad))
                self.assertEqual(
                    [s for s in growth.samples or () if not math.isfinite(s.value)], []
                )

    def test_restart_is_found_by_each_of_its_signs(self):
        start = "process_start_time_seconds 100\n"
        born = "# TYPE vllm:spec_decode_num_drafts_created gauge\nvllm:spec_decode_num_drafts_created 1.7e+09\n"
        count = "# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total %d\n"
        quiet = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n"
        header = {"Process-Start-Time-Unix": "974200512"}
        for name, before, after, is_reset in (
            (
                "nothing",
                snapshot(start + born + count % 5),
                snapshot(start + born + count % 9),
                False,
            ),
            ("first series", snapshot(quiet), snapshot(quiet + born + count % 9), False),
            (
                "start time",
                snapshot(start + count % 5),
                snapshot("process_start_time_seconds 200\n" + count % 9),
                True,
            ),
            (
                "created",
                snapshot(born + count % 5),
                snapshot(born.replace("1.7", "1.8") + count % 9),
                True,
            ),
            ("decrease", snapshot(count % 5), snapshot(count % 4), True),
            ("vanished", snapshot(quiet + count % 5), snapshot(quiet), True),
            (
                "header",
                snapshot(count % 5, headers=header),
                snapshot(count % 9, headers={"Process-Start-Time-Unix": "7"}),
                True,
            ),
            (
                "same header",
                snapshot(count % 5, headers=header),
                snapshot(count % 9, headers=header),
                False,
            ),
        ):
            with self.subTest(name):
                growth = ms.counter_growth(before, after, 50)
                self.assertEqual((growth.reset, growth.samples is None), (is_reset, is_reset))

    def test_growth_of_blocks_adds_up_and_one_void_block_voids_it(self):
        page = '# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total{engine="0"} %d\n'
        parts = [
            ms.counter_growth(snapshot(page % a), snapshot(page % b))
            for a, b in ((1, 5), (7, 10), (10, 2))
        ]
        self.assertEqual([s.value for s in ms.added_growth(parts[:2]).samples], [7.0])
        self.assertTrue(ms.added_growth(parts).reset)


class RecordedPages(unittest.TestCase):
    def pages(self):
        return [
            snapshot((PAGES / ("vllm-0.32.0-ngram-k4.%s.txt" % when)).read_text("utf-8"), "smol")
            for when in ("before", "after")
        ]

    def test_recorded_vllm_pages_give_what_happened(self):
        growth = ms.counter_growth(*self.pages())
        found = ms.acceptance_of_counters(growth, 1)
        self.assertEqual(
            (found.steps, found.drafted, found.accepted, found.per_position),
            (14, 56, 56, (14, 14, 14, 14)),
        )
        self.assertEqual(ms.generated_tokens(growth), 80)
        self.assertEqual(ms.target_steps(of_answers(found, 80, 1)), 23)
        self.assertEqual(ms.target_steps(of_answers(found, 80, 1)) - found.steps, 9)
        self.assertEqual(ms.acceptance_record(of_answers(found, 80, 1))["alpha"], 1.0)

    def test_recorded_vllm_server_is_measured_by_the_whole_program(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
        stem = "vllm-0.32.0-ngram-k4"
        with tempfile.TemporaryDirectory() as folder:
            for name, kind in (
                (stem + ".before.txt", b"text/plain"),
                (stem + ".after.txt", b"text/plain"),
                (stem + ".stream.txt", b"text/event-stream"),
                ("vllm-0.32.0.models.json", b"application/json"),
            ):
                (pathlib.Path(folder) / name).write_bytes(head % kind + (PAGES / name).read_bytes())
            routes = [
                {"method": "GET", "path": "/v1/models", "file": "vllm-0.32.0.models.json"},
                {"method": "POST", "path": "/v1/chat/completions", "file": stem + ".stream.txt"},
            ]
            with SwitchingServer(
                routes, folder, "/metrics", stem + ".before.txt", stem + ".after.txt"
            ) as server:
                outcome = measure(
                    None, server, "--warmup", "0", prompts=["the prompt that was recorded"]
                )
        record = outcome.endpoint("speculative")
        told = record["acceptance"]
        self.assertEqual(
            (told["steps"], told["drafted"], told["accepted"], told["rate"]), (14, 56, 56, 1.0)
        )
        self.assertEqual(told["per_position"], [1.0] * 4)
        self.assertAlmostEqual(told["tokens_per_target_step"], 79 / 23)
        self.assertEqual(
            (record["output_tokens"], record["engine"], [f["finding"] for f in record["audit"]]),
            (80, "vllm", []),
        )
        self.assertEqual(record["server"]["resident_bytes"], 766296064)


class PagesUnavailable(unittest.TestCase):
    def test_what_is_no_metrics_page_is_unavailable_with_a_hint_and_never_zero(self):
        for page, words in (
            ((401, "application/json", b'{"error":{"message":"no key"}}'), ["HTTP 401", "key"]),
            ((403, "text/plain", b"forbidden"), ["HTTP 403", "key"]),
            ((404, "application/json", b"{}"), ["HTTP 404", "--metrics", "--enable-metrics"]),
            (
                (501, "application/json", b'{"error":{"message":"disabled"}}'),
                ["HTTP 501", "--metrics", "--enable-metrics"],
            ),
            ((503, "text/plain", b"not now"), ["HTTP 503"]),
            ((200, "text/html", b"<!DOCTYPE html><html></html>"), ["HTML"]),
            ((200, "application/json", b"[]"), ["JSON"]),
            ((200, "application/json", b'{"status":"ok"}'), ["JSON"]),
            ((200, "text/plain", b""), ["no Prometheus samples"]),
            ((200, "text/plain", b"hello there, all is well"), ["no Prometheus samples"]),
        ):
            with (
                self.subTest(page),
                FakeServer(
                    "llama.cpp", speculation=Speculation(), details=False, pages={"/metrics": page}
                ) as server,
            ):
                outcome = measure(None, server, prompts=PROMPTS)
                record = outcome.endpoint("speculative")
                self.assertEqual(outcome.code, 0)
                self.assertIsNone(record["spec_metrics_delta"])
                self.assertIsNone(record["acceptance"])
                detail = findings(record)["metrics-unavailable"]["detail"]
                for word in words:
                    self.assertIn(word, detail)
                self.assertIn("[metrics-unavailable]", outcome.out)

    def test_page_that_goes_away_in_the_middle_makes_no_delta(self):
        with FakeServer("lmdeploy", speculation=Speculation()) as server:
            server.answers = lambda prompt, nth: (
                setattr(server, "metrics", 404) if prompt == PROMPTS[1] else None
            )
            record = measure(None, server, prompts=PROMPTS).endpoint("speculative")
        self.assertIsNone(record["spec_metrics_delta"])
        self.assertIsNone(record["acceptance"])
        self.assertIn("metrics-unavailable", findings(record))

    def test_page_that_hangs_costs_the_side_timeout_and_no_more(self):
        with FakeServer("vllm", page_faults={"/metrics": ["hang"]}, repeat_fault=True) as server:
            record = measure(server, None, "--timeout", "0.3", prompts=PROMPTS).endpoint()
        self.assertEqual((record["completed"], record["spec_metrics_delta"]), (2, None))
        self.assertIn("metrics-unavailable", findings(record))

    def test_page_without_speculation_counters_is_an_empty_delta_and_not_a_missing_one(self):
        with FakeServer("vllm") as server:
            self.assertEqual(
                measure(server, None, prompts=PROMPTS).endpoint()["spec_metrics_delta"], {}
            )

    def test_case_c01_metrics_off_costs_the_counters_only(self):
        with ReplayServer("routes.json", CASES / "C01") as server:
            outcome = measure(None, server, "--model", "m", "--warmup", "0", prompts=["one"])
        record = outcome.endpoint("speculative")
        self.assertEqual(outcome.code, 0)
        detail = findings(record)["metrics-unavailable"]["detail"]
        self.assertIn("501", detail)
        self.assertIn("--metrics", detail)
        self.assertIsNone(record["spec_metrics_delta"])
        told = record["acceptance"]
        self.assertAlmostEqual(told["rate"], 0.6667, 4)
        self.assertAlmostEqual(told["tokens_per_target_step"], 39 / 19)
        self.assertAlmostEqual(record["decode_tokens_per_s"], 50.0)

    def test_case_c03_router_that_wants_the_model_is_asked_again_with_it(self):
        with ReplayServer("routes.json", CASES / "C03") as server:
            endpoint, page = ms.find_metrics(
                ms.Endpoint("speculative", server.url, server.root, "a")
            )
            self.assertTrue(endpoint.metrics_url.endswith("/metrics?model=a"))
            self.assertEqual([s.value for s in page.samples], [5.0])

    def test_model_name_in_the_address_of_the_page_is_encoded(self):
        with ReplayServer("routes.json", CASES / "C03") as server:
            ms.find_metrics(ms.Endpoint("speculative", server.url, server.root, "org/a b&c"))
            self.assertEqual(server.requests[-1]["path"], "/metrics?model=org%2Fa%20b%26c")

    def test_case_c08_json_page_leads_to_the_prometheus_page_beside_it(self):
        with ReplayServer("routes.json", CASES / "C08") as server:
            endpoint, before = ms.find_metrics(
                ms.Endpoint("speculative", server.url, server.root, "m")
            )
            growth = ms.counter_growth(before, ms.metrics_snapshot(endpoint))
        self.assertTrue(endpoint.metrics_url.endswith("/prometheus/metrics"))
        self.assertEqual(
            (lambda a: (a.drafted, a.accepted))(ms.acceptance_of_counters(growth, 0)), (900, 450)
        )

    def test_tensorrt_iteration_records_are_never_drained(self):
        with FakeServer("tensorrt-llm", speculation=Speculation()) as server:
            measure(None, server, prompts=PROMPTS)
            asked = {r["path"] for r in server.requests}
        self.assertIn("/prometheus/metrics", asked)
        self.assertFalse({"/metrics", "/perf_metrics"} & asked)

    def test_key_goes_to_the_page_of_its_own_server_only(self):
        with (
            FakeServer("llama.cpp", api_key="sesame-123") as server,
            FakeServer("llama.cpp") as elsewhere,
            mock.patch.object(ms, "SETTLE_LIMIT_S", 0.1),
        ):
            for url in (server.root, elsewhere.root):
                measure(
                    server,
                    None,
                    "--baseline-metrics-url",
                    url + "/metrics",
                    prompts=PROMPTS[:1],
                    env={"SPEC_API_KEY": "sesame-123"},
                )
            for fake, sent in ((server, True), (elsewhere, False)):
                keys = [
                    "authorization" in r["headers"]
                    for r in fake.requests
                    if r["path"] == "/metrics"
                ]
                self.assertEqual(set(keys), {sent})

    def test_a_page_that_is_no_metrics_page_is_named_by_its_address(self):
        for page in ([], "<html>", "no samples here"):
            with self.subTest(page), FakeServer("plain", pages={"/metrics": page}) as server:
                found = findings(measure(server, None, prompts=["one"]).endpoint())[
                    "metrics-unavailable"
                ]
                self.assertIn("%s/" % server.root, found["detail"])


class CountersThatSettle(unittest.TestCase):
    def test_late_counters_are_waited_for(self):
        """An engine may send an answer before it counts it."""
        for engine in ("llama.cpp", "vllm", "sglang", "lmdeploy", "tgi"):
            for reads in (1, 3, 6):
                with (
                    self.subTest(engine=engine, reads=reads),
                    FakeServer(
                        engine, speculation=Speculation(4, (4, 2, 0)), lag_reads=reads
                    ) as server,
                ):
                    record = measure(None, server, "--warmup", "0", prompts=PROMPTS).endpoint(
                        "speculative"
                    )
                    self.assertEqual(
                        (record["acceptance"]["steps"], record["acceptance"]["accepted"]),
                        (server.truth.steps, server.truth.accepted),
                    )
                    self.assertNotIn("sources-disagree", findings(record))

    def test_counters_that_never_catch_up_are_given_up_after_a_bounded_time(self):
        clock = iter(range(1000))
        with (
            FakeServer("lmdeploy", speculation=Speculation(), lag_reads=10**6) as server,
            mock.patch.object(ms, "SETTLE_PAUSE_S", 0.0),
            mock.patch.object(ms.time, "monotonic", lambda: float(next(clock))),
        ):
            before = ms.metrics_snapshot(endpoint_for(server))
            after = ms.settled_snapshot(endpoint_for(server), before, 1000)
        self.assertIsNotNone(after.samples)
        self.assertLess(len(server.requests), 8)

    def test_other_series_that_move_at_every_read_are_not_waited_for(self):
        reads = iter(range(10**6))
        page = (
            "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 0\n"
            "# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total 0\n"
            "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total %d\n"
        )
        with FakeServer("vllm", pages={"/metrics": lambda: page % next(reads)}) as server:
            before = ms.metrics_snapshot(endpoint_for(server))
            with mock.patch.object(ms, "SETTLE_PAUSE_S", 0.0):
                ms.settled_snapshot(endpoint_for(server), before, 0)
            self.assertEqual(len(server.requests), 3)

    def test_counters_that_still_grow_are_read_until_they_rest(self):
        values = iter([0, 10, 20, 30, 30, 30])
        page = "# TYPE trtllm_spec_decode_num_draft_tokens_total counter\ntrtllm_spec_decode_num_draft_tokens_total %d\n"
        with FakeServer("plain", pages={"/metrics": lambda: page % next(values)}) as server:
            before = ms.metrics_snapshot(endpoint_for(server))
            with mock.patch.object(ms, "SETTLE_PAUSE_S", 0.0):
                after = ms.settled_snapshot(endpoint_for(server), before, 100)
        self.assertEqual([s.value for s in ms.counter_growth(before, after).samples], [30.0])

    def test_warm_up_is_not_in_the_delta(self):
        with FakeServer("vllm", speculation=Speculation(4, (4, 2, 0))) as server:
            record = measure(None, server, "--warmup", "3", prompts=PROMPTS).endpoint("speculative")
            truth = server.truth - server.given[0] - server.given[1] - server.given[2]
        counts = {
            name: value
            for name, value in record["spec_metrics_delta"].items()
            if "num_drafts" in name
        }
        self.assertEqual(list(counts.values()), [truth.steps])


COUNTING = {  # engines with counters of drafts, and of these what each tells
    "llama.cpp": ("steps", "drafted", "accepted"),
    "vllm": ("steps", "drafted", "accepted"),
    "vllm-old": ("steps", "drafted", "accepted"),
    "sglang": ("steps", "accepted"),
    "lmdeploy": ("steps", "drafted", "accepted"),
    "tgi": ("steps", "accepted"),
    "tensorrt-llm": ("drafted", "accepted"),
}


class CountersThatLag(unittest.TestCase):
    """Answers that are counted some time after they were sent, by a clock that only sleeping moves."""

    def measured(self, engine, lag_s, *flags, **options):
        """(the endpoint record of a drafting server whose counters lag, the server)"""
        clock = Clock()
        with (
            FakeServer(
                engine,
                speculation=Speculation(4, (4, 2, 0)),
                details=False,
                lag_s=lag_s,
                clock=clock,
                **options,
            ) as server,
            clock.runs(),
        ):
            outcome = measure(None, server, *flags, prompts=PROMPTS)
        self.assertEqual(outcome.code, 0, outcome.err)
        return outcome.records, server

    def test_acceptance_is_the_truth_and_nothing_is_found_whatever_the_lag(self):
        for engine, tells in COUNTING.items():
            for lag_s in (0.02, 0.1, 1.0, 2.0):
                for warmup in (0, 1, 3):
                    with self.subTest(engine=engine, lag_s=lag_s, warmup=warmup):
                        (record,), server = self.measured(engine, lag_s, "--warmup", warmup)
                        truth = sum_counts(server.given[warmup:])
                        self.assertEqual(
                            [record["acceptance"][name] for name in tells],
                            [getattr(truth, name) for name in tells],
                        )
                        self.assertEqual(record["audit"], [])

    def test_the_same_holds_at_every_level_of_load(self):
        for engine, tells in COUNTING.items():
            for lag_s in (0.02, 1.0, 2.0):
                with self.subTest(engine=engine, lag_s=lag_s):
                    records, server = self.measured(
                        engine, lag_s, "--concurrency", "1,2", "--repeats", 1
                    )
                    given = server.given[1:3], server.given[3:]
                    for record, counts in zip(records, given):
                        truth = sum_counts(counts)
                        self.assertEqual(
                            [record["acceptance"][name] for name in tells],
                            [getattr(truth, name) for name in tells],
                        )
                        self.assertEqual(record["audit"], [])

    def test_triage_is_asked_once_all_levels_are_measured(self):
        with FakeServer("vllm") as a, FakeServer("vllm", answers=lambda p, n: "other text") as b:
            outcome = measure(a, b, "--concurrency", "1,2", "--repeats", 1, prompts=PROMPTS)
        asked = ["logprobs" in chat["body"] for chat in a.chats]
        self.assertIn(True, asked)
        self.assertEqual(asked, sorted(asked))
        measured = asked.index(True)
        self.assertEqual(*(sorted(map(text_of, chats)) for chats in (a.chats[:measured], b.chats)))
        self.assertNotIn("foreign-traffic", findings(*outcome.records))

    def test_a_failed_request_and_another_client_leave_the_truth_or_nothing(self):
        prompts = ["p%d" % i for i in range(4)]
        lines = "".join(
            json.dumps({"prompt": p, "workload": "ab"[i % 2]}) + "\n" for i, p in enumerate(prompts)
        )
        for engine, tells in COUNTING.items():
            for details in (False, True):
                for failing, foreign in ((True, 0), (False, 25), (True, 25)):
                    with (
                        self.subTest(
                            engine=engine, details=details, failing=failing, foreign=foreign
                        ),
                        FakeServer(
                            engine,
                            speculation=Speculation(4, (4, 2, 0)),
                            details=details,
                            foreign=foreign,
                            faults=[None, None, "no-finish"] if failing else [],
                        ) as server,
                    ):
                        outcome = measure(
                            None,
                            server,
                            "--prompts",
                            "p.jsonl",
                            "--max-tokens",
                            40,
                            files={"p.jsonl": lines},
                        )
                        record = outcome.endpoint("speculative")
                        self.check(record, server.given, failing, foreign, tells)

    def check(self, record, given, failing, foreign, tells):
        # given: warm-up, then p0, p2 of one kind and p1, p3 of the other; p2 fails
        answered = [counts for i, counts in enumerate(given[1:]) if not (failing and i == 1)]
        truths = [sum_counts(answered), sum_counts(given[3:])]
        told = record["acceptance"] or {}
        for name in tells:
            right = [getattr(truth, name) for truth in truths]
            self.assertIn(told.get(name), [None, *right], name)
        if told.get("tokens_per_target_step") is not None:
            truth = next(t for t in truths if t.accepted == told["accepted"])
            self.assertAlmostEqual(
                told["tokens_per_target_step"],
                (truth.tokens - truth.requests) / (truth.steps + truth.plain_steps),
            )
        if foreign:
            self.assertIn("foreign-traffic", findings(record))

    def test_gauges_tell_other_requests_and_never_our_own(self):
        for engine in COUNTING:
            for level in (1, 3):
                for busy in ((0, 0), (1, 0), (0, 2)):
                    with (
                        self.subTest(engine=engine, level=level, busy=busy),
                        FakeServer(engine, busy=busy) as server,
                    ):
                        record = measure(
                            server, None, "--concurrency", level, "--repeats", 1, prompts=PROMPTS
                        ).endpoint()
                        found = [entry["finding"] for entry in record["audit"]]
                        self.assertEqual("busy" in found, any(busy))

    def test_gauges_that_still_show_our_last_request_call_no_server_busy(self):
        """SGLang writes them in decode iterations, and idle every 30 s."""
        with FakeServer("sglang") as server:
            page = (
                "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs %d\n"
                "# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total %d\n"
            )
            server.pages["/metrics"] = lambda: page % (bool(server.given), server.truth.tokens)
            record = measure(server, None, "--repeats", 3, prompts=PROMPTS).endpoint()
        self.assertNotIn("busy", findings(record))


class CountersThatAppear(unittest.TestCase):
    """A family that was NaN or missing at the first read, and is there at the second."""

    GENERATED = "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total %d\n"
    DRAFTS = "".join(
        '# TYPE vllm:spec_decode_num_%s_total counter\nvllm:spec_decode_num_%s_total{e="0"} %%s\n'
        % (name, name)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )

    def growth(self, before, after, received=180):
        return ms.block_growth(snapshot(before), snapshot(after), received)

    def test_a_whole_life_is_never_counted_into_a_run(self):
        after = self.GENERATED % 40180 + self.DRAFTS % (30080, 120000, 60000)
        for before in ("", self.DRAFTS % ("NaN", "NaN", "NaN")):
            for generated in ("", self.GENERATED % 40000, self.GENERATED.replace("%d", "NaN")):
                with self.subTest(before=before, generated=generated):
                    growth = self.growth(before + generated + "up 1\n", after)
                    self.assertIsNone(growth.samples)
                    self.assertFalse(growth.reset)
                    self.assertIsNone(ms.acceptance_of_counters(growth, 3))
                    self.assertIsNone(ms.spec_delta(growth))

    def test_one_counter_of_the_family_that_was_nan_is_unknown(self):
        before = self.GENERATED % 40000 + self.DRAFTS % (30000, "NaN", 59900)
        after = self.GENERATED % 40180 + self.DRAFTS % (30080, 120000, 60000)
        self.assertIsNone(self.growth(before, after).samples)

    def test_a_family_that_began_meanwhile_counts_from_zero(self):
        after = self.GENERATED % 40180 + self.DRAFTS % (80, 320, 97)
        for before in (self.GENERATED % 40000, self.GENERATED % 40000 + "# TYPE x counter\n"):
            found = ms.acceptance_of_counters(self.growth(before, after), 3)
            self.assertEqual((found.steps, found.drafted, found.accepted), (80, 320, 97))

    def test_more_accepted_than_made_is_void(self):
        before = self.GENERATED % 40000 + self.DRAFTS % (10, 40, 30)
        after = self.GENERATED % 40180 + self.DRAFTS % (90, 360, 230)
        growth = self.growth(before, after)
        self.assertIsNone(growth.samples)
        self.assertIn("200 draft tokens accepted where 180 were made", growth.void)


class LinesOfAnyLength(unittest.TestCase):
    def test_a_line_of_40_kB_costs_less_than_a_tenth_of_a_second(self):
        n = 40_000
        for line in (
            'a{"%s"} 1' % ("a" * n),
            "a%s#" % (" " * n),
            "a{%s} 1" % ("a" * n),
            "a{%s} 1" % ("," * n),
            'a{x="1"%sy} 1' % (" " * n),
            'a{x="%s"} 1' % ("\\n" * (n // 2)),
            "a{%s" % ('x="1",' * (n // 6)),
            "vllm:spec_%s 1" % ("_" * n),
            "a 1 %sx" % ("-" * n),
        ):
            with self.subTest(line[:12]):
                started = time.process_time()
                snapshot("b 1\n" + line)
                self.assertLess(time.process_time() - started, 0.1)


class CountersInRecords(unittest.TestCase):
    def test_delta_is_written_with_positions_in_numeric_order(self):
        with FakeServer("vllm", speculation=Speculation(12, (12, 11, 3)), words=80) as server:
            outcome = measure(None, server, prompts=PROMPTS)
        line = next(
            x for x in outcome.files["labbook.md"].decode().splitlines() if x.startswith("{")
        )
        pairs = json.loads(line, object_pairs_hook=list)
        delta = next(value for name, value in pairs if name == "spec_metrics_delta")
        names = [name for name, _ in delta if "per_pos" in name]
        self.assertEqual(
            [name.partition('position="')[2].partition('"')[0] for name in names],
            [str(i) for i in range(12)],
        )
        self.assertFalse([name for name, _ in delta if "_created" in name])

    def test_gauges_are_recorded_apart_and_as_read(self):
        with FakeServer("sglang", speculation=Speculation(4, (4, 2, 0))) as server:
            record = measure(None, server, prompts=PROMPTS).endpoint("speculative")
            mean = server.truth.mean_length
        self.assertEqual(
            [name.partition("{")[0] for name in record["spec_metrics_delta"]],
            ["sglang:spec_verify_calls_total"],
        )
        gauges = {
            name.partition("{")[0]: value for name, value in record["spec_metrics_gauges"].items()
        }
        self.assertEqual(set(gauges), {"sglang:spec_accept_length", "sglang:spec_accept_rate"})
        self.assertAlmostEqual(gauges["sglang:spec_accept_length"], mean)

    def test_no_value_that_is_not_json_reaches_a_file(self):
        bad = "\n".join(
            "# TYPE vllm:spec_decode_%s counter\nvllm:spec_decode_%s %s" % (n, n, v)
            for n, v in (
                ("num_drafts_total", "NaN"),
                ("num_draft_tokens_total", "+Inf"),
                ("num_accepted_tokens_total", "-Inf"),
            )
        ) + (
            "\n# TYPE vllm:spec_decode_efficiency gauge\nvllm:spec_decode_efficiency NaN\n"
            "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total NaN\n"
            "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running NaN\nprocess_resident_memory_bytes NaN\n"
        )

        def refuse(name):
            self.fail("%s in a record" % name)

        with (
            FakeServer("vllm", pages={"/metrics": bad}) as a,
            FakeServer("vllm", pages={"/metrics": bad}, details=False) as b,
        ):
            outcome = measure(a, b, "--save-run", "run.jsonl", prompts=PROMPTS)
        self.assertEqual(outcome.code, 0)
        for name in ("labbook.md", "run.jsonl"):
            for line in outcome.files[name].decode().splitlines():
                if line.startswith("{"):
                    json.loads(line, parse_constant=refuse)


class LongLivedLlama(unittest.TestCase):
    """llama.cpp writes its scalars with six digits, so behind a million their growth is rounded; positions are exact."""

    def measured(self, tokens):
        past = Counts(
            tokens=tokens, histogram=[0, 0, 0, 0, tokens // 7], drafts=[0, 0, 0, 0, tokens // 7 * 2]
        )
        plain, drafting = [
            FakeServer(
                "llama.cpp", speculation=s, counted_before=past if s else Counts(tokens=tokens)
            )
            for s in (None, Speculation(4, (4, 2, 0)))
        ]
        with plain, drafting, mock.patch.object(ms, "SETTLE_LIMIT_S", 0.2):
            return measure(plain, drafting, "--warmup", "0", prompts=PROMPTS), drafting.truth

    def test_rounded_counters_are_no_foreign_traffic_and_no_disagreement(self):
        for tokens in (3_456_789, 12_345_678, 234_567_891):
            with self.subTest(tokens):
                outcome, _ = self.measured(tokens)
                found = {
                    name
                    for arm in ("baseline", "speculative")
                    for name in findings(outcome.endpoint(arm))
                }
                self.assertFalse(
                    found
                    & {"foreign-traffic", "sources-disagree", "rate-above-one", "counter-reset"}
                )

    def test_figures_are_exact_or_null(self):
        for tokens in (3_456_789, 12_345_678, 234_567_891):
            with self.subTest(tokens):
                outcome, truth = self.measured(tokens)
                told = outcome.endpoint("speculative")["acceptance"]
                self.assertEqual(
                    (told["drafted"], told["accepted"]), (truth.drafted, truth.accepted)
                )
                self.assertIn(told["steps"], (None, truth.steps))
                self.assertIn(told["mean_length"], (None, truth.mean_length))


class AbsurdPages(unittest.TestCase):
    def test_counters_and_gauges_beyond_all_measure_end_nothing(self):
        for lines in (
            "vllm:num_requests_running 1e308\nvllm:num_requests_waiting 1e308\n",
            "vllm:num_requests_running -5\n",
            'vllm:spec_decode_num_draft_tokens_total{a="1"} 1e308\nvllm:spec_decode_num_draft_tokens_total{a="2"} 1e308\n',
            'vllm:generation_tokens_total{a="1"} 1e308\nvllm:generation_tokens_total{a="2"} 1e308\n',
            'vllm:cache_config_info{num_gpu_blocks="\u00b2",block_size="16"} 1\n',
            'vllm:cache_config_info{num_gpu_blocks="%s",block_size="16"} 1\n' % ("9" * 5000),
        ):
            page = (200, "text/plain", lines.encode())
            with self.subTest(lines[:60]), FakeServer("vllm", pages={"/metrics": page}) as server:
                outcome = measure(server, None, prompts=["one"])
                self.assertEqual((outcome.code, len(outcome.records)), (0, 1), outcome.err)
                self.assertNotIn("busy", findings(outcome.endpoint()))


if __name__ == "__main__":
    unittest.main()
