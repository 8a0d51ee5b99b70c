"""All that is known of an engine stands in its row: a made-up one is known to the whole program by one row more."""

import contextlib
import unittest
from unittest import mock

import measure_speculative as ms
from tests import fakes
from tests.fakes import FakeServer, Speculation, counter, gauge, sum_counts
from tests.support import SAVE, findings, measure, strict

PROMPTS = ["first prompt of three", "second prompt of three", "third prompt of three"]
PATTERN = Speculation(3, (3, 1, 0))

# Names that nothing but a row tells: no word of them is one that speculation counters have elsewhere.
ROW = ms.Engine(
    name="made-up",
    owners=("acme",),
    version=ms.VersionPage("/acme/about", "release", mark="product", marked="Acme"),
    series="acme_",
    asks={"acme_details": True},
    metrics_page="/acme/counters",
    metrics_hint="acme with --tell",
    generated=("acme_words_total",),
    running="at_work",
    waiting="in_line",
    counters=(
        ms.DraftCounters(
            stem="acme_",
            steps="rounds",
            drafted="guesses",
            accepted="hits",
            positions="hits_by_place",
        ),
    ),
    answers=(
        ms.AnswerFields(
            path=("acme", "guessing"),
            steps="rounds",
            drafted="guesses",
            accepted="hits",
            histogram="hits_a_round",
        ),
    ),
)


def page(server, c):
    families = (
        gauge("acme_at_work", {}, server.running)
        + gauge("acme_in_line", {}, server.waiting)
        + counter("acme_words", {}, c.tokens)
    )
    if server.speculation:
        places = [("", {"position": str(i)}, n) for i, n in enumerate(c.per_position)]
        families += (
            counter("acme_rounds", {}, c.steps)
            + counter("acme_guesses", {}, c.drafted)
            + counter("acme_hits", {}, c.accepted)
            + [("acme_hits_by_place_total", "counter", places)]
        )
    return families


def told_in_answers(a, c):
    if not a.speculation or not a.body.get("acme_details"):
        return {}
    block = {
        "rounds": c.steps,
        "guesses": c.drafted,
        "hits": c.accepted,
        "hits_a_round": c.histogram,
    }
    return {"acme": {"guessing": block}}


FAKE = fakes.Engine("7.1", "", "acme", page=page, page_path="/acme/counters", top=told_in_answers)
ABOUT = {"/acme/about": {"product": "Acme", "release": "7.1"}}


@contextlib.contextmanager
def acme(row=ROW, **options):
    """A plain and a drafting server of the made-up engine, which the program knows by this row."""
    options = dict({"pages": ABOUT}, **options)
    with (
        mock.patch.dict(fakes.ENGINES, {"made-up": FAKE}),
        mock.patch.object(ms, "ENGINES", (*ms.ENGINES, row)),
        FakeServer("made-up", **options) as plain,
        FakeServer("made-up", speculation=PATTERN, **options) as drafting,
    ):
        yield plain, drafting


class OneRow(unittest.TestCase):
    """A made-up engine is recognised, read and reported by one row."""

    def check(self, outcome, drafting, source):
        record = outcome.endpoint("speculative")
        self.assertEqual(0, outcome.code, outcome.err)
        truth, told = sum_counts(drafting.given[1:]), record["acceptance"]
        self.assertEqual(source, told["source"])
        self.assertEqual(
            (truth.steps, truth.drafted, truth.accepted),
            (told["steps"], told["drafted"], told["accepted"]),
        )
        self.assertEqual(
            [round(count / truth.steps, 9) for count in truth.per_position],
            [round(rate, 9) for rate in told["per_position"]],
        )
        return record

    def test_engine_and_version_are_recorded_and_its_answers_are_read(self):
        with acme(metrics=False) as (plain, drafting):
            outcome = measure(plain, drafting, prompts=PROMPTS)
            record = self.check(outcome, drafting, "response")
        self.assertEqual(("made-up", "7.1"), (record["engine"], record["engine_version"]))
        self.assertEqual("made-up", outcome.comparison()["engine"])
        self.assertIn("acme with --tell", findings(record)["metrics-unavailable"]["detail"])

    def test_its_counters_are_read_where_its_answers_tell_nothing(self):
        with acme(details=False) as (plain, drafting):
            record = self.check(measure(plain, drafting, prompts=PROMPTS), drafting, "metrics")
            self.assertIn("/acme/counters", {r["path"] for r in drafting.requests})
        self.assertNotIn("metrics-unavailable", findings(record))

    def test_its_generated_tokens_show_traffic_of_others_and_its_gauges_show_them_waiting(self):
        with acme(foreign=30, busy=(1, 2)) as (plain, _):
            with mock.patch.object(ms, "SETTLE_LIMIT_S", 0.1):
                found = findings(measure(plain, None, prompts=PROMPTS).endpoint())
        self.assertEqual(3, found["busy"]["requests"])
        self.assertEqual(90, found["foreign-traffic"]["foreign_tokens"])

    def test_it_is_asked_for_more_and_that_is_no_condition_of_the_comparison(self):
        with acme() as (plain, drafting):
            files = measure(plain, drafting, *SAVE, prompts=PROMPTS).files
            self.assertEqual({True}, {chat["body"]["acme_details"] for chat in plain.chats})
        headers = [line for line in strict(files["run.jsonl"]) if line["kind"] == "run"]
        self.assertEqual(["made-up"] * 2, [header["engine"] for header in headers])
        self.assertFalse([header for header in headers if "acme_details" in header["request"]])

    def test_its_version_page_is_enough_to_know_it(self):
        anonymous = ms.replace(ROW, owners=(), series="")
        with acme(row=anonymous) as (plain, _):
            record = measure(plain, None, prompts=PROMPTS).endpoint()
        self.assertEqual(("made-up", "7.1"), (record["engine"], record["engine_version"]))

    def test_a_page_of_the_same_address_without_its_mark_is_not_its_own(self):
        for about in ({"release": "7.1"}, {"product": "Other", "release": "7.1"}):
            anonymous = ms.replace(ROW, owners=(), series="")
            with acme(row=anonymous, pages={"/acme/about": about}) as (plain, _):
                record = measure(plain, None, prompts=PROMPTS).endpoint()
            self.assertEqual(
                ("unknown", "unknown"), (record["engine"], record["engine_version"]), about
            )

    def test_its_series_are_enough_to_know_it_but_too_late_to_ask_for_more(self):
        anonymous = ms.replace(ROW, owners=(), version=None)
        with acme(row=anonymous) as (_, drafting):
            url = drafting.root + "/acme/counters"
            outcome = measure(None, drafting, "--speculative-metrics-url", url, prompts=PROMPTS)
            self.check(outcome, drafting, "metrics")
            self.assertFalse([chat for chat in drafting.chats if "acme_details" in chat["body"]])
        self.assertEqual("made-up", outcome.endpoint("speculative")["engine"])

    def test_its_page_on_the_last_answer_is_read_after_each(self):
        fields = ms.AnswerFields(path=("perf",), accepted="hits", rejections="misses")
        row = ms.replace(ROW, answer_page="/acme/last", answers=(fields,), counters=())
        pages = dict(ABOUT, **{"/acme/last": {"hits": 5, "misses": 2}})
        with acme(row=row, pages=pages, details=False) as (plain, drafting):
            told = measure(plain, drafting, prompts=PROMPTS).endpoint("speculative")["acceptance"]
            read = [r for r in drafting.requests if r["path"] == "/acme/last"]
        self.assertEqual((15, None, 4), (told["accepted"], told["drafted"], len(read)))

    def test_without_the_row_it_is_unknown_and_tells_nothing(self):
        with acme(row=ms.Engine("another")) as (plain, drafting):
            outcome = measure(plain, drafting, prompts=PROMPTS)
        record = outcome.endpoint("speculative")
        self.assertEqual(
            (0, "unknown", None), (outcome.code, record["engine"], record["acceptance"])
        )


class Table(unittest.TestCase):
    NAMES = """llama.cpp vllm sglang tensorrt-llm lmdeploy tgi lm-studio tabbyapi mlx-lm ollama
        koboldcpp""".split()  # as records may name an engine

    def test_every_name_that_a_record_may_have_has_one_row(self):
        self.assertEqual(sorted([*self.NAMES, "reference"]), sorted(r.name for r in ms.ENGINES))
        self.assertEqual("unknown", ms.UNKNOWN.name)
        self.assertNotIn(ms.UNKNOWN, ms.ENGINES)

    def test_no_two_rows_are_recognised_by_the_same(self):
        for name in ("owners", "banner", "series"):
            told = [getattr(row, name) for row in ms.ENGINES if getattr(row, name)]
            self.assertEqual(len(told), len(set(told)), name)

    def test_every_row_can_be_recognised(self):
        for row in ms.ENGINES:
            self.assertTrue(row.owners or row.banner or row.version or row.series, row.name)

    def test_owners_and_headers_name_the_engine(self):
        for banner, owner, is_listed, name in (
            ("", "vllm", True, "vllm"),
            ("uvicorn", "sglang", True, "sglang"),
            ("llama.cpp", "vllm", True, "llama.cpp"),  # a server that says so itself
            ("llama.cpp", None, False, "llama.cpp"),
            ("BaseHTTP/0.6 Python/3.12", None, True, "mlx-lm"),
            ("BaseHTTP/0.6 Python/3.12", None, False, "unknown"),
            ("BaseHTTP/0.6 Python/3.12", "reference", True, "reference"),
            ("", "somebody", True, "unknown"),
            ("", None, True, "unknown"),
        ):
            with self.subTest(banner=banner, owner=owner):
                self.assertEqual(name, ms.recognised(banner, owner, is_listed).name)

    def test_series_name_the_engine_and_those_that_a_gateway_renamed_do_not(self):
        for series, name in (
            ("vllm:generation_tokens_total", "vllm"),
            ("trtllm_spec_decode_num_draft_tokens_total", "tensorrt-llm"),
            ("lemonade_llamacpp_tokens_predicted_total", "unknown"),
            ("process_start_time_seconds", "unknown"),
        ):
            self.assertEqual(name, ms.recognised_by_series([series]).name)

    def test_what_an_answer_keeps_is_what_some_row_reads(self):
        kept = set(ms.known_to(ms.ENGINES).statistics)
        for row in ms.ENGINES:
            for fields in row.answers:
                self.assertIn(fields.path[0], kept | set(ms.KEPT_APART))
        self.assertEqual(
            {"timings", "metrics", "sglext", "meta_info", "stats", "system_fingerprint"}, kept
        )


if __name__ == "__main__":
    unittest.main()
