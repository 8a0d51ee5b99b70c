"""Text comparison: did the text change? Pair by pair, self-agreement, near-tie triage, the bug report."""

import json
import random
import unittest
from unittest import mock

import measure_speculative as ms
from tests.fakes import CASES, FakeServer, ReplayServer, Speculation
from tests.support import (
    CHANGED,
    TEXT,
    answer,
    canned,
    compare,
    http,
    measure,
    measure_canned,
    plain,
    real_lines,
    replayed,
    run_main,
    saved_run,
)

ABC = "one two three four five six seven eight nine ten"  # 10 tokens of the fake
OTHER = ABC.replace(" eight", " other")  # token 7; the first other byte is 34


def case_text(name):
    return (CASES / name).read_text("utf-8")


def measure_case(baseline, candidate, *flags, prompts=("p", "q")):
    """Two recorded bodies measured against each other, as every answer to every prompt."""
    with replayed(baseline) as a, replayed(candidate) as b:
        return measure(a, b, "--model", "m", "--warmup", 0, *flags, prompts=list(prompts))


def answer_of(content="", reasoning="", tokens=4, finish="stop"):
    return ms.Answer(
        content,
        reasoning,
        finish,
        1.0,
        0.1,
        0.9,
        tokens - 1,
        "stream",
        tokens,
        3,
        0,
        {},
        True,
        False,
    )


def reading(prompt, repeat, text, arm="baseline"):
    """A reading with this text; None is a failed request."""
    done = None if text is None else answer_of(text) if isinstance(text, str) else answer_of(*text)
    return ms.Reading(
        arm, prompt, "p%d" % prompt, "any", repeat, 0, done, "failed" if text is None else None
    )


def run_of(arm, *texts_by_prompt):
    """A run from a list of repeats for each prompt."""
    prompts = [
        {"id": "p%d" % i, "workload": "any", "sha256": "%016x" % i}
        for i in range(len(texts_by_prompt))
    ]
    return ms.Run(
        arm,
        dict(real_lines()["run"], arm=arm, prompts=prompts),
        tuple(
            reading(i, j, text, arm)
            for i, texts in enumerate(texts_by_prompt)
            for j, text in enumerate(texts)
        ),
        (),
    )


def compared(baseline, candidate):
    """What the record says of the texts, with every difference in the order of the readings."""
    arms = [
        ms.arm_from(run_of(*arm)) for arm in (("baseline", *baseline), ("speculative", *candidate))
    ]
    found = ms.compare(*arms, 0.0)
    return dict(ms.text_counts(found), divergences=found.texts.divergences)


def counts(found):
    return {
        name: found[name]
        for name in ("compared", "identical", "divergent", "empty", "failed", "unstable")
    }


def entry(raw, logprob=-1.0, *alternatives, token=None):
    """One token of a logprobs list; alternatives are (bytes, logprob)."""

    def one(data, value, name=None):
        return {
            "token": data.decode("utf-8", "replace") if name is None else name,
            "bytes": list(data),
            "logprob": value,
        }

    return dict(
        one(raw, logprob, token),
        top_logprobs=[one(raw, logprob)] + [one(*other) for other in alternatives],
    )


class RecordedTexts(unittest.TestCase):
    def only_divergence(self, outcome):
        self.assertEqual(outcome.code, 0, outcome.err)
        texts = outcome.comparison()["text_comparison"]
        self.assertEqual((texts["compared"], texts["identical"], texts["divergent"]), (2, 0, 2))
        return texts["divergences"][0]

    def test_b01_a_mismatch_is_a_finding_beside_the_speeds(self):
        outcome = measure_case("B01/baseline.json", "B01/spec.json")
        found, record = self.only_divergence(outcome), outcome.comparison()
        self.assertEqual(
            (found["first_difference_at_char"], found["first_difference_at_byte"]), (98, 98)
        )
        self.assertEqual(found["class"], "different")
        self.assertGreater(record["speedup"]["ratio"], 0)
        self.assertGreater(record["baseline_tokens_per_s"], 0)
        self.assertIn(record["verdict"], ("pays", "does-not-pay", "undecided"))

    def test_b01_the_wording_neither_belittles_nor_accuses(self):
        said = measure_case("B01/baseline.json", "B01/spec.json").out.lower()
        self.assertIn("numerics", said)
        for word in ("harmless", "broken"):
            self.assertNotIn(word, said)

    def test_b01_the_recorded_texts_differ_at_byte_98(self):
        found = ms.first_difference(case_text("B01/baseline.txt"), case_text("B01/spec.txt"))
        self.assertEqual((found.byte, found.character), (98, 98))

    def test_b02_a_difference_above_the_noise_floor_is_not_called_unstable(self):
        baseline, candidate = (
            json.loads(case_text("B02/%s_runs.json" % arm)) for arm in ("baseline", "spec")
        )
        with FakeServer(answers={"p": baseline}) as a, FakeServer(answers={"p": candidate}) as b:
            outcome = measure(a, b, "--repeats", 3, "--triage", 0, prompts=["p"])
        texts = outcome.comparison()["text_comparison"]
        for own in (texts["baseline_self"], texts["speculative_self"]):
            self.assertGreaterEqual(own["compared"], 2)
            self.assertEqual(own["identical"], own["compared"])
        self.assertEqual(
            counts(texts),
            {"compared": 3, "identical": 0, "divergent": 3, "empty": 0, "failed": 0, "unstable": 0},
        )
        self.assertEqual(
            {
                (d["first_difference_at_char"], d["first_difference_at_byte"], d["class"])
                for d in texts["divergences"]
            },
            {(30, 30, "different")},
        )
        self.assertNotIn("random", outcome.out)

    def test_b05_bytes_and_characters_are_counted_apart_and_no_letter_is_cut(self):
        found = ms.first_difference(case_text("B05/baseline.txt"), case_text("B05/spec.txt"))
        self.assertEqual((found.character, found.byte), (124, 138))
        self.assertNotIn("\ufffd", found.baseline_tail + found.speculative_tail)
        self.assertTrue(case_text("B05/spec.txt")[124:].startswith(found.speculative_tail))

    def test_b06_a_text_that_ends_early_under_the_same_count_is_suspicious(self):
        outcome = measure_case("B06/baseline.json", "B06/spec.json")
        found = self.only_divergence(outcome)
        self.assertEqual(
            (found["class"], found["first_difference_at_byte"]), ("speculative-is-prefix", 71)
        )
        self.assertEqual(found["speculative_tail"], "")
        self.assertEqual(
            (found["baseline_finish_reason"], found["speculative_finish_reason"]),
            ("length", "length"),
        )
        self.assertEqual((found["baseline_tokens"], found["speculative_tokens"]), (16, 16))
        self.assertRegex(outcome.out, "equal token count.*too high")

    def test_b08_a_text_that_runs_on_has_the_baseline_as_prefix(self):
        found = self.only_divergence(measure_case("B08/baseline.json", "B08/spec.json"))
        self.assertEqual(
            (found["class"], found["first_difference_at_byte"]), ("baseline-is-prefix", 4)
        )
        self.assertEqual(
            (found["baseline_finish_reason"], found["speculative_finish_reason"]),
            ("stop", "length"),
        )
        self.assertEqual((found["baseline_tokens"], found["speculative_tokens"]), (2, 9))

    def test_b11a_replacement_characters_of_a_server_are_a_difference(self):
        found = self.only_divergence(
            measure_case("B11/baseline.json", "B11/a_spec_server_fault.json")
        )
        self.assertEqual(
            (found["first_difference_at_char"], found["first_difference_at_byte"]), (5, 5)
        )
        self.assertEqual(found["baseline_tail"].encode()[:4], b"\xf0\x9f\x8e\x89")
        self.assertEqual(found["speculative_tail"].encode()[:6], b"\xef\xbf\xbd\xef\xbf\xbd")

    def test_b11bc_split_characters_and_split_surrogates_are_joined(self):
        for routes in ("routes_b.json", "routes_c.json"):
            with self.subTest(routes), ReplayServer(routes, CASES / "B11") as server:
                got = ms.complete(
                    ms.Endpoint("baseline", server.url, server.root, "m"),
                    [{"role": "user", "content": "p"}],
                )
                self.assertEqual(got.content, "Done \U0001f389 bye")
                self.assertFalse(got.undecodable)

    def test_b11d_a_lone_surrogate_reaches_report_and_notebook_as_ascii(self):
        with replayed("B11/baseline.json") as a, ReplayServer("routes_d.json", CASES / "B11") as b:
            outcome = measure(a, b, "--model", "m", "--warmup", 0, prompts=["p", "q"])
        found = self.only_divergence(outcome)
        self.assertEqual(found["first_difference_at_char"], 5)
        (outcome.out + outcome.err).encode("ascii")
        outcome.files["labbook.md"].decode("ascii")
        self.assertIn(
            "undecodable-text", [f["finding"] for f in outcome.endpoint("speculative")["audit"]]
        )

    def test_b13_the_choice_with_index_0_counts_and_its_tokens_make_no_rate(self):
        with ReplayServer("routes.json", CASES / "B13") as server:
            outcome = measure(
                server,
                None,
                "--model",
                "m",
                "--warmup",
                0,
                "--save-run",
                "run.jsonl",
                prompts=["p"],
            )
            self.assertEqual({chat["body"].get("n", 1) for chat in server.chats}, {1})
        (line,) = [
            x
            for x in map(json.loads, outcome.files["run.jsonl"].splitlines())
            if x["kind"] == "reading"
        ]
        self.assertEqual(line["content"], "Blue.")
        self.assertEqual(
            (
                outcome.endpoint()["tokens_counted_by_server"],
                outcome.endpoint()["output_tokens_per_s"],
            ),
            (False, None),
        )

    def test_b15_an_unchanged_text_does_not_hide_that_nothing_was_accepted(self):
        outcome = measure_case("B15/baseline.json", "B15/spec.json")
        record = outcome.comparison()
        self.assertEqual(
            (record["text_comparison"]["identical"], record["text_comparison"]["compared"]), (2, 2)
        )
        self.assertEqual(
            (record["acceptance"]["rate"], record["acceptance"]["drafted"]), (0.0, 120)
        )
        self.assertEqual(
            (record["break_even"]["alpha"], record["acceptance"]["tokens_per_target_step"]),
            (0.0, 1.0),
        )
        self.assertAlmostEqual(record["decode_speedup"]["ratio"], 500 / 900, 4)
        self.assertRegex(outcome.out, "(?s)only costs time.*tokenizer")


class FirstDifferences(unittest.TestCase):
    def test_a_difference_is_told_by_byte_character_line_and_column(self):
        for a, b, byte, character, line, column in (
            ("abc", "abd", 2, 2, 1, 3),
            ("", "x", 0, 0, 1, 1),
            ("a\nb\nc", "a\nb\nd", 4, 4, 3, 1),
            ("a\nb", "a\nb\n", 3, 3, 2, 2),
            ("\u00e9", "\u00e8", 1, 0, 1, 1),  # the second of two bytes
            ("x\n\u20ac\u20ac1", "x\n\u20ac\u20ac2", 8, 4, 2, 3),
            ("\U0001f389", "\U0001f38a", 3, 0, 1, 1),
            ("a\nb", "a b", 1, 1, 1, 2),
        ):
            with self.subTest(a=a, b=b):
                found = ms.first_difference(a, b)
                self.assertEqual(
                    (found.byte, found.character, found.line, found.column),
                    (byte, character, line, column),
                )
                self.assertEqual(
                    (found.baseline_tail, found.speculative_tail), (a[character:], b[character:])
                )

    def test_offsets_agree_with_a_plain_search_on_random_texts(self):
        dice = random.Random(8)
        for _ in range(500):
            a, b = (
                "".join(dice.choices("ab\n\u00e9\u00e8\u20ac\U0001f389", k=dice.randrange(6)))
                for _ in "ab"
            )
            found = ms.first_difference(a, b)
            if a == b:
                self.assertIsNone(found)
                continue
            place = next(
                (i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b))
            )
            raw = next(
                (i for i, pair in enumerate(zip(a.encode(), b.encode())) if pair[0] != pair[1]),
                min(len(a.encode()), len(b.encode())),
            )
            lines = a[:place].split("\n")
            self.assertEqual(
                (found.character, found.byte, found.line, found.column),
                (place, raw, len(lines), len(lines[-1]) + 1),
            )

    def test_tails_are_60_characters(self):
        found = ms.first_difference("x" + "\u00e9" * 100, "y" + "\u00e9" * 100)
        self.assertEqual(
            (found.baseline_tail, found.speculative_tail),
            ("x" + "\u00e9" * 59, "y" + "\u00e9" * 59),
        )

    def test_equal_texts_have_no_difference(self):
        self.assertIsNone(ms.first_difference("\u00e9", "\u00e9"))


class PairByPair(unittest.TestCase):
    def test_a_failed_request_never_shifts_another_comparison(self):
        """Answers differ by prompt and by repeat, so that any shift would be seen as changed text."""

        def answers(prompt, n):
            return "%s asked %d" % (prompt, n)

        for place in range(4):
            faults = [None] * (1 + place) + ["close-mid-body"]  # the first request is the warm-up
            with (
                self.subTest(place),
                FakeServer(answers=lambda p, n: "answer to " + p) as a,
                FakeServer(answers=lambda p, n: "answer to " + p, faults=faults) as b,
            ):
                outcome = measure(a, b, prompts=["p", "q", "r", "s"])
                texts = outcome.comparison()["text_comparison"]
                self.assertEqual(
                    counts(texts),
                    {
                        "compared": 3,
                        "identical": 3,
                        "divergent": 0,
                        "empty": 0,
                        "failed": 1,
                        "unstable": 0,
                    },
                )
                self.assertEqual(outcome.endpoint("speculative")["failed"], 1)
        texts = compared(
            [[answers("p", 0), None, answers("p", 2)]],
            [[answers("p", 0), answers("p", 1), answers("p", 2)]],
        )
        self.assertEqual((texts["identical"], texts["failed"], texts["divergent"]), (2, 1, 0))

    def test_two_empty_answers_are_no_evidence(self):
        with FakeServer(answers={"p": ""}) as a, FakeServer(answers={"p": ""}) as b:
            outcome = measure(a, b, prompts=["p", "q"])
        self.assertEqual(
            counts(outcome.comparison()["text_comparison"]),
            {"compared": 1, "identical": 1, "divergent": 0, "empty": 1, "failed": 0, "unstable": 0},
        )
        self.assertIn("no evidence", outcome.out)

    def test_two_empty_answers_are_no_self_agreement_either(self):
        own = compared([["", ""], ["x", "x"]], [["", ""], ["x", "x"]])["baseline_self"]
        self.assertEqual((own["compared"], own["identical"]), (1, 1))

    def test_an_empty_answer_against_a_text_is_a_difference(self):
        texts = compared([["", "text"]], [["text", ""]])
        self.assertEqual(texts["divergent"], 2)

    def test_compared_is_identical_plus_divergent(self):
        texts = compared(
            [["a", "b"], ["c", None], ["", "d"], ["e"]], [["a", "b"], ["x", "c"], ["", None], ["e"]]
        )
        self.assertEqual(
            counts(texts),
            {"compared": 4, "identical": 3, "divergent": 1, "empty": 1, "failed": 2, "unstable": 0},
        )

    def test_reasoning_is_compared_apart_from_content(self):
        for baseline, candidate, where in (
            (("same", "think a"), ("same", "think b"), "reasoning"),
            (("text a", "same"), ("text b", "same"), "content"),
            (("", "word"), ("word", ""), "content"),  # the same words, but in another field
        ):
            with self.subTest(where=where, baseline=baseline):
                (found,) = compared([[baseline]], [[candidate]])["divergences"]
                self.assertEqual(found["where"], where)

    def test_changed_reasoning_is_found_in_streamed_answers(self):
        with (
            FakeServer(answers={"p": {"reasoning": "I think so", "content": "Yes."}}) as a,
            FakeServer(answers={"p": {"reasoning": "I think not", "content": "Yes."}}) as b,
        ):
            outcome = measure(a, b, prompts=["p"])
        (found,) = outcome.comparison()["text_comparison"]["divergences"]
        self.assertEqual((found["where"], found["first_difference_at_char"]), ("reasoning", 8))

    def test_the_record_lists_20_differences_and_counts_all(self):
        texts = [["%d" % i] for i in range(30)]
        changed = [["x%d" % i] for i in range(30)]
        self.assertEqual(len(compared(texts, changed)["divergences"]), 30)
        prompts = ["prompt %d" % i for i in range(25)]
        with (
            FakeServer(answers=lambda p, n: "a b c") as a,
            FakeServer(answers=lambda p, n: "a b d") as b,
        ):
            outcome = measure(a, b, "--triage", 0, prompts=prompts)
        found = outcome.comparison()["text_comparison"]
        self.assertEqual((found["divergent"], len(found["divergences"])), (25, 20))

    def test_a_speedup_beside_changed_text_carries_the_warning_in_its_line(self):
        with (
            FakeServer(answers={"p": "a b c"}) as a,
            FakeServer(answers={"p": "a b d"}, speculation=Speculation()) as b,
        ):
            outcome = measure(a, b, prompts=["p", "q"])
        self.assertIn("text changed in 1 of 2", outcome.out.rstrip().splitlines()[-1])


class SelfAgreement(unittest.TestCase):
    def test_cold_and_warm_repeats_are_told_apart(self):
        for repeats, expected in (
            (["a", "a", "a"], (2, 2, 1, 1)),
            (["cold", "warm", "warm"], (2, 0, 1, 1)),
            (["a", "b", "c"], (2, 0, 1, 0)),
            (["a", "a"], (1, 1, 0, 0)),
            (["a"], (0, 0, 0, 0)),
        ):
            with self.subTest(repeats):
                own = compared([repeats], [repeats])["baseline_self"]
                self.assertEqual(
                    tuple(
                        own[k] for k in ("compared", "identical", "warm_compared", "warm_identical")
                    ),
                    expected,
                )

    def test_a_failed_cold_repeat_does_not_make_a_warm_one_cold(self):
        own = compared([[None, "a", "a"]], [["a", "a", "a"]])["baseline_self"]
        self.assertEqual((own["compared"], own["warm_compared"], own["warm_identical"]), (1, 1, 1))

    def test_the_report_has_three_lines_cold_and_warm(self):
        with (
            FakeServer(answers={"p": ["cold", "warm"]}) as a,
            FakeServer(answers={"p": "warm"}) as b,
        ):
            out = measure(a, b, "--repeats", 3, prompts=["p"]).out
        self.assertRegex(out, r"baseline against itself: 0 of 2 .*warm repeats: 1 of 1")
        self.assertRegex(out, r"speculative against itself: 2 of 2 .*warm repeats: 1 of 1")
        self.assertRegex(out, r"baseline against speculative: 2 of 3 identical")

    def test_an_unstable_baseline_is_not_blamed_on_speculation(self):
        with (
            FakeServer(answers={"p": ["a b c", "a b d"], "q": "same"}) as a,
            FakeServer(answers={"p": "a b e", "q": "same"}, speculation=Speculation()) as b,
        ):
            outcome = measure(a, b, "--repeats", 2, "--fail-on", "changed-text", prompts=["p", "q"])
            self.assertFalse([chat for chat in a.chats if chat["body"].get("logprobs")])
        texts = outcome.comparison()["text_comparison"]
        self.assertEqual(
            counts(texts),
            {"compared": 4, "identical": 2, "divergent": 2, "empty": 0, "failed": 0, "unstable": 2},
        )
        self.assertEqual(
            {(d["class"], d["triage"]) for d in texts["divergences"]}, {("unstable-baseline", None)}
        )
        self.assertIn("disagrees with itself", outcome.out)
        self.assertEqual(outcome.code, 0)

    def test_one_unstable_prompt_does_not_excuse_another(self):
        texts = compared([["a", "b"], ["c", "c"]], [["a", "a"], ["x", "x"]])
        self.assertEqual(
            [d["class"] for d in texts["divergences"]],
            ["unstable-baseline", "different", "different"],
        )

    def test_without_repeats_it_says_that_stability_was_not_looked_at(self):
        with FakeServer(answers={"p": "a"}) as a, FakeServer(answers={"p": "b"}) as b:
            self.assertIn("--repeats 2", measure(a, b, prompts=["p"]).out)


class TriageOverHttp(unittest.TestCase):
    def triage(self, candidate=OTHER, flags=(), **options):
        """(the only divergence, the logprobs requests to the baseline)"""
        options.setdefault("answers", {"p": ABC})
        with FakeServer(**options) as a, FakeServer(answers={"p": candidate}) as b:
            outcome = measure(a, b, *flags, prompts=["p"])
            asked = [chat["body"] for chat in a.chats if chat["body"].get("logprobs")]
            self.assertFalse([chat for chat in b.chats if chat["body"].get("logprobs")])
            plain = [chat["body"] for chat in a.chats if not chat["body"].get("logprobs")]
        self.assertEqual(outcome.code, 0, outcome.err)
        found = outcome.comparison()["text_comparison"]["divergences"][0]
        return found, asked, plain, outcome.out

    def test_a_small_gap_is_a_near_tie(self):
        found, _, _, out = self.triage(gaps={7: (" other", 0.125)})
        self.assertEqual(
            (
                found["triage"]["finding"],
                found["triage"]["baseline_token"],
                found["triage"]["speculative_token"],
            ),
            ("near-tie", " eight", " other"),
        )
        self.assertAlmostEqual(found["triage"]["gap_nats"], 0.125)
        self.assertRegex(out, r"near-tie \(0\.125 nats\)")

    def test_a_large_gap_is_a_clear_preference(self):
        found, *_ = self.triage(gaps={7: (" other", 3.0)})
        self.assertEqual(found["triage"]["finding"], "clear-preference")
        self.assertAlmostEqual(found["triage"]["gap_nats"], 3.0)

    def test_half_a_nat_is_where_rounding_ends(self):
        for gap, finding in ((0.5, "near-tie"), (0.51, "clear-preference")):
            with self.subTest(gap):
                self.assertEqual(
                    self.triage(gaps={7: (" other", gap)})[0]["triage"]["finding"], finding
                )

    def test_a_token_that_is_not_listed_is_at_least_as_far_as_the_last_listed(self):
        found, asked, _, out = self.triage()
        listed = asked[0][
            "top_logprobs"
        ]  # the fake lists -2.25, -7.25, -12, -13, ... and cuts at that many
        triage = found["triage"]
        self.assertEqual(
            (
                triage["finding"],
                triage["at_least"],
                triage["speculative_token"] if "speculative_token" in triage else None,
            ),
            ("clear-preference", True, None),
        )
        self.assertAlmostEqual(triage["gap_nats"], 12 + (listed - 3) - 2.25)
        self.assertIn("at least", out)

    def test_without_log_probabilities_the_gap_is_not_known(self):
        found, *_ = self.triage(reject={"logprobs": "not supported here"})
        self.assertEqual(
            (found["triage"]["finding"], found["triage"]["gap_nats"]), ("not-known", None)
        )
        self.assertIn("not supported here", found["triage"]["reason"])

    def test_an_answer_that_changed_again_is_not_known(self):
        found, *_ = self.triage(
            answers={"p": [ABC, "quite another text"]}, gaps={7: (" other", 0.1)}
        )
        self.assertEqual(found["triage"]["finding"], "not-known")
        self.assertIn("changed", found["triage"]["reason"])

    def test_the_question_is_the_measured_request_and_log_probabilities(self):
        _, asked, plain, _ = self.triage(
            flags=("--extra-body", '{"top_k": 1}', "--max-tokens", "50")
        )
        self.assertEqual(len(asked), 1)
        for name in ("messages", "model", "max_tokens", "temperature", "seed", "top_p", "top_k"):
            self.assertEqual(asked[0][name], plain[-1][name])
        self.assertTrue(asked[0]["top_logprobs"] >= 2)

    def test_at_most_n_prompts_are_asked_about(self):
        prompts = ["prompt %d" % i for i in range(12)]
        for flags, expected in (
            ((), 10),
            (("--triage", 3), 3),
            (("--triage", 0), 0),
            (("--triage", 3, "--repeats", 2), 3),
        ):
            with (
                self.subTest(flags),
                FakeServer(answers=lambda p, n: ABC) as a,
                FakeServer(answers=lambda p, n: OTHER) as b,
            ):
                outcome = measure(a, b, *flags, prompts=prompts)
                asked = [
                    chat["body"]["messages"][0]["content"]
                    for chat in a.chats
                    if chat["body"].get("logprobs")
                ]
                self.assertEqual((len(asked), len(set(asked))), (expected, expected))
                told = {
                    d["prompt_index"]
                    for d in outcome.comparison()["text_comparison"]["divergences"]
                    if d["triage"]
                }
                self.assertEqual(len(told), expected)

    def test_identical_texts_are_not_asked_about(self):
        with FakeServer(answers={"p": ABC}) as a, FakeServer(answers={"p": ABC}) as b:
            measure(a, b, prompts=["p", "q"])
            self.assertFalse([chat for chat in a.chats if chat["body"].get("logprobs")])


class TriageOfTokens(unittest.TestCase):
    def find(self, tokens, own, other):
        own, other = (
            own.encode() if isinstance(own, str) else own,
            other.encode() if isinstance(other, str) else other,
        )
        offset = next(
            (i for i, pair in enumerate(zip(own, other)) if pair[0] != pair[1]),
            min(len(own), len(other)),
        )
        return ms.gap_finding(tokens, own, other, offset)

    def test_a_difference_inside_a_character_split_over_tokens_is_found(self):
        """Byte 8 differs, inside the token that holds the second half of the character."""
        tokens = [
            entry(b"Done "),
            entry(b"\xf0\x9f"),
            entry(b"\x8e\x89", -0.5, (b"\x8e\x8a", -0.75)),
            entry(b" bye"),
        ]
        found = self.find(tokens, "Done \U0001f389 bye", "Done \U0001f38a bye")
        self.assertEqual((found["finding"], round(found["gap_nats"], 6)), ("near-tie", 0.25))

    def test_tokens_that_begin_alike_are_told_apart(self):
        tokens = [entry(b" un"), entry(b"happy", -0.1, (b"happ", -2.1), (b"sad", -0.2))]
        found = self.find(tokens, " unhappy", " unhappily")
        self.assertEqual(
            (found["finding"], found["speculative_token"]), ("clear-preference", "happ")
        )

    def test_a_difference_in_the_first_token_is_found_there_though_the_text_repeats_it(self):
        tokens = [
            entry(b"a", -0.1, (b"x", -0.3)),
            entry(b" b", -0.1, (b" q", -9)),
            entry(b" a", -0.1, (b" z", -9)),
            entry(b" c", -0.1, (b" q", -9)),
        ]
        found = self.find(tokens, "a b a c", "x b a c")
        self.assertEqual((found["finding"], found["speculative_token"]), ("near-tie", "x"))
        self.assertAlmostEqual(found["gap_nats"], 0.2)

    def test_a_beginning_that_comes_again_later_does_not_hide_the_difference(self):
        tokens = [
            entry(b"no", -0.1, (b"yes", -9)),
            entry(b" no", -0.1, (b" so", -0.2)),
            entry(b" no", -0.1, (b" zz", -9)),
            entry(b" no", -0.1, (b" zz", -9)),
        ]
        found = self.find(tokens, "no no no no", "no so no no")
        self.assertEqual((found["finding"], found["speculative_token"]), ("near-tie", " so"))

    def test_reasoning_before_the_content_is_skipped(self):
        tokens = [
            entry(b"hm"),
            entry(b" well"),
            entry(b"</think>"),
            entry(b"ok", -0.1, (b"no", -0.2)),
            entry(b" then"),
        ]
        found = self.find(tokens, "ok then", "no then")
        self.assertEqual((found["finding"], found["speculative_token"]), ("near-tie", "no"))

    def test_an_end_token_is_found_by_either_spelling(self):
        """The other server stopped where the baseline went on: its token there is the end token."""
        for end in (b"", b"<|im_end|>", b"</s>"):
            with self.subTest(end):
                tokens = [entry(b"Yes."), entry(b" And", -0.7, (end, -0.8), (b" But", -5.0))]
                found = self.find(tokens, "Yes. And", "Yes.")
                self.assertEqual(
                    (found["finding"], found["gap_nats"] and round(found["gap_nats"], 6)),
                    ("near-tie", 0.1),
                )

    def test_the_baselines_own_end_token_is_the_place_where_it_stopped(self):
        tokens = [entry(b"Yes."), entry(b"<|im_end|>", -0.2, (b" Also", -4.2), (b" But", -5.0))]
        found = self.find(tokens, "Yes.", "Yes. Also, more")
        self.assertEqual((found["finding"], round(found["gap_nats"], 6)), ("clear-preference", 4.0))

    def test_an_answer_that_ends_before_the_difference_is_not_known(self):
        found = self.find([entry(b"Yes.")], "Yes.", "Yes. Also")
        self.assertEqual((found["finding"], found["gap_nats"]), ("not-known", None))

    def test_damaged_lists_are_not_known(self):
        own, other = answer_of("a"), answer_of("b")
        found = ms.divergence(reading(0, 0, "a"), own, other, unstable=False)
        prompt = ms.Prompt("p0", "any", ({"role": "user", "content": "p"},))
        for tokens in (
            [],
            [None, 3],
            [{"token": None}],
            [{"token": "a", "logprob": None}],
            [{"token": "a", "logprob": -1, "top_logprobs": []}],
            [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "b", "logprob": None}]}],
        ):
            body = json.dumps({"choices": [{"logprobs": {"content": tokens}}]}).encode()
            with self.subTest(tokens), canned(http(body)) as server:
                baseline = ms.Endpoint("baseline", server.url, server.root, "m")
                told = ms.ask_for_gap(baseline, prompt, found, own, other)
                self.assertEqual(told["finding"], "not-known")
                self.assertEqual("sends none" in told["reason"], not tokens)

    def test_tokens_without_bytes_are_read_by_their_text(self):
        tokens = [
            {
                "token": "a",
                "logprob": -1.0,
                "bytes": None,
                "top_logprobs": [{"token": "b", "logprob": -1.25}],
            }
        ]
        self.assertEqual(self.find(tokens, "a", "b")["finding"], "near-tie")

    def test_a_bound_holds_only_where_every_alternative_was_read(self):
        """Ollama lists every part of a character as U+FFFD: any of them may be the token."""
        other = "ok \U0001f600"
        unreadable = {"token": "\ufffd", "bytes": [239, 191, 189], "logprob": -0.75}
        nameless = {"token": "", "logprob": -0.75}
        part = {"token": "", "bytes": [32, 0xF0, 0x9F], "logprob": -0.75}
        end = {"token": "", "bytes": [], "logprob": -0.75}
        for option, finding in (
            (unreadable, "not-known"),
            (nameless, "not-known"),
            (part, "near-tie"),
            (end, "clear-preference"),
        ):
            with self.subTest(option):
                place = entry(b" and", -0.7, (b" far", -9.4))
                place["top_logprobs"].append(option)
                found = self.find([entry(b"ok"), place], "ok and", other)
                self.assertEqual(found["finding"], finding)
                self.assertEqual(found["at_least"], option is end)

    def test_a_token_that_is_listed_without_its_probability_is_not_below_the_list(self):
        place = entry(b"a", -0.1, (b"c", -8))
        place["top_logprobs"].append({"token": "b", "logprob": None})
        self.assertEqual(self.find([place], "a", "b")["finding"], "not-known")

    def test_tokens_as_a_vocabulary_spells_them_are_read(self):
        def one(token, logprob=-0.5, *others):
            listed = [{"token": name, "logprob": value} for name, value in others]
            return {"token": token, "logprob": logprob, "top_logprobs": listed}

        for blank, end in (("\u0120", "\u010a"), ("\u2581", "\n")):
            tokens = [one("Done"), one(blank + "and", -0.5, (blank + "or", -0.7)), one(end + "x")]
            found = self.find(tokens, "Done and\nx", "Done or\nx")
            self.assertEqual((found["finding"], found["at_least"]), ("near-tie", False))

    def test_probabilities_are_no_logarithms(self):
        found = self.find([entry(b"a", 0.6, (b"b", 0.3))], "a", "b")
        self.assertEqual((found["finding"], found["gap_nats"]), ("not-known", None))


class ShapesOfLogProbabilities(unittest.TestCase):
    """Asked of a server that answers in its own way."""

    def asked(self, respond):
        """(triage of " one two" against " one six", the numbers of alternatives asked for)."""
        counts = []

        def told(endpoint, messages, extra, read):
            counts.append(extra["top_logprobs"])
            return json.dumps({"choices": [{"logprobs": respond(counts[-1])}]}).encode()

        with mock.patch.object(ms, "post_chat", told):
            found = ms.ask_for_gap(
                ms.Endpoint("baseline", "http://x/v1", "http://x"),
                ms.Prompt("p", "w", ()),
                {"where": "content", "first_difference_at_byte": 5},
                ms.Answer(" one two", "", "stop", 1.0),
                ms.Answer(" one six", "", "stop", 1.0),
            )
        return found, counts

    TOLD = {
        "tokens": [" one", " two"],
        "token_logprobs": [-0.1, -0.5],
        "top_logprobs": [None, {" two": -0.5, " six": -0.75}],
    }

    def test_the_shape_of_text_completions_is_read(self):
        found, counts = self.asked(lambda count: self.TOLD)
        self.assertEqual((found["finding"], found["gap_nats"], counts), ("near-tie", 0.25, [20]))

    def test_fewer_alternatives_are_asked_for_where_20_are_refused(self):
        def at_most_5(count):
            if count > 5:
                raise ms.RequestFailed("HTTP 400: top_logprobs must be at most 5", 400)
            return self.TOLD

        found, counts = self.asked(at_most_5)
        self.assertEqual((found["finding"], counts), ("near-tie", [20, 10, 5]))

    def test_a_server_that_does_not_answer_is_asked_once(self):
        def hangs(count):
            raise ms.RequestFailed("no answer within 300 s")

        found, counts = self.asked(hangs)
        self.assertEqual((found["finding"], counts), ("not-known", [20]))


class BugReport(unittest.TestCase):
    def report(self, *flags, prompts=("a secret prompt", "another")):
        with (
            FakeServer(
                "vllm", answers={"a secret prompt": ABC}, build="0.33.0", gaps={7: (" other", 3.0)}
            ) as a,
            FakeServer(
                "vllm",
                answers={"a secret prompt": OTHER},
                build="0.34.1",
                speculation=Speculation(4, (2,)),
            ) as b,
        ):
            outcome = measure(a, b, "--divergence-report", "bug.md", *flags, prompts=list(prompts))
        return outcome.files["bug.md"].decode("utf-8"), outcome

    def test_the_bug_report_holds_what_a_maintainer_asks_for(self):
        text, outcome = self.report()
        rate = outcome.comparison()["acceptance"]["rate"]
        for part in (
            "0.33.0",
            "0.34.1",
            "vllm",
            "fake-model",
            "temperature 0",
            "Prompt index 0",
            "byte 34",
            "character 34",
            " eight nine ten",
            " other nine ten",
            "clear-preference",
            "3.000 nats",
            "%.2f" % rate,
            "1 of 2 pairs differ",
        ):
            self.assertIn(part.strip(), text)
        self.assertTrue(text.startswith("# ") and text.endswith("\n"))

    def test_the_prompt_is_in_the_bug_report_only_when_asked(self):
        self.assertNotIn("secret", self.report()[0])
        text, _ = self.report("--include-prompts")
        self.assertIn("a secret prompt", text)
        self.assertNotIn("another", text)  # it did not differ

    def test_differences_of_every_level_are_in_the_bug_report(self):
        """Level 1 differs, level 2 does not: the report is about the run, not about its last level."""

        def answers(prompt, n):
            return OTHER if n == 0 else ABC

        with FakeServer(answers=lambda p, n: ABC) as a, FakeServer(answers=answers) as b:
            outcome = measure(
                a, b, "--concurrency", "1,2", "--divergence-report", "bug.md", prompts=["p", "q"]
            )
        self.assertIn("other nine ten", outcome.files["bug.md"].decode())

    def test_a_bug_report_that_cannot_be_written_keeps_the_records(self):
        with FakeServer() as a, FakeServer() as b:
            outcome = measure(a, b, "--divergence-report", "no/such/folder.md", prompts=["p"])
        self.assertIn(outcome.code, (1, 2))
        self.assertIn("no/such/folder.md", outcome.err)
        if outcome.code == 1:
            self.assertEqual(len(outcome.records), 3)

    def test_saved_runs_make_the_same_bug_report(self):
        with (
            FakeServer(answers={"p": ABC}, gaps={7: (" other", 0.125)}) as a,
            FakeServer(answers={"p": OTHER}) as b,
        ):
            saved = measure(a, b, "--save-run", "run.jsonl", prompts=["p"]).files["run.jsonl"]
        outcome = run_main(
            "compare", "run.jsonl", "--divergence-report", "bug.md", files={"run.jsonl": saved}
        )
        self.assertEqual(outcome.code, 0, outcome.err)
        for part in ("byte 34", "near-tie", "0.125 nats"):
            self.assertIn(part, outcome.files["bug.md"].decode())


class CountsThatDoNotFitTheText(unittest.TestCase):
    REMARK = "identical texts? came with different token counts"

    def compared(self, first, second, text=TEXT):
        return compare(
            ("plain.jsonl", saved_run("baseline", [[answer(first, 0.5, content=TEXT)]])),
            (
                "other.jsonl",
                saved_run("other", [[answer(second, 0.5, drafted=40, accepted=20, content=text)]]),
            ),
        )

    def test_one_text_with_two_token_counts_is_remarked(self):
        outcome = self.compared(503, 545)
        self.assertEqual(outcome.comparison()["text_comparison"]["counts_differ"], 1)
        self.assertEqual(outcome.comparison()["text_comparison"]["identical"], 1)
        self.assertRegex(outcome.out, self.REMARK)

    def test_equal_counts_unknown_counts_and_differing_texts_are_not_remarked(self):
        for first, second, text in ((503, 503, TEXT), (503, 545, CHANGED)):
            with self.subTest(text, second=second):
                outcome = self.compared(first, second, text)
                self.assertEqual(outcome.comparison()["text_comparison"]["counts_differ"], 0)
                self.assertNotRegex(outcome.out, self.REMARK)
        unknown = measure_canned(http(plain()), http(plain('"usage": {}')), "--no-stream")
        self.assertEqual(unknown.comparison()["text_comparison"]["counts_differ"], 0)


if __name__ == "__main__":
    unittest.main()
