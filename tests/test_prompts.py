"""Prompts: the built-in set, the loader with every format, and the sets in prompts/."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from collections import Counter

import measure_speculative as ms
from tests.fakes import CASES, FakeServer
from tests.support import (
    PROGRAM,
    measure,
    no_windows,
    run_main,
)

PROMPTS = PROGRAM.parent / "prompts"
GERMAN = "Wie gro\u00df ist ein Bakterium?"


class PromptFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, data):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
        return str(path)

    def load(self, name, data):
        return ms.load_prompts([self.write(name, data)])[0]

    def texts(self, name, data):
        return [text_of(prompt) for prompt in self.load(name, data)]


def text_of(prompt):
    (message,) = prompt.messages
    assert set(message) == {"role", "content"} and message["role"] == "user"
    return message["content"]


class BuiltInPrompts(unittest.TestCase):
    def test_the_built_in_set_has_four_prompts_of_each_kind(self):
        prompts = ms.built_in_prompts()
        self.assertEqual(
            Counter(prompt.workload for prompt in prompts), {"copy": 4, "closed": 4, "open": 4}
        )
        self.assertEqual(len({text_of(prompt) for prompt in prompts}), 12)
        self.assertEqual(len({prompt.id for prompt in prompts}), 12)

    def test_copy_prompts_hold_the_material_that_the_answer_repeats(self):
        texts = [text_of(prompt) for prompt in ms.built_in_prompts() if prompt.workload == "copy"]
        self.assertTrue(all(len(text) > 150 for text in texts), [len(text) for text in texts])

    def test_without_prompts_the_built_in_set_is_measured(self):
        with FakeServer("plain", words=3) as server:
            outcome = measure(server, None, "--warmup", "0")
            asked = [chat["body"]["messages"][0]["content"] for chat in server.chats]
        self.assertEqual(outcome.code, 0, outcome.err)
        self.assertEqual([text_of(prompt) for prompt in ms.built_in_prompts()], asked)


class PlainTextPrompts(PromptFolder):
    def test_one_prompt_for_each_line_that_is_not_blank(self):
        self.assertEqual(
            self.texts("p.txt", "\n  one\t\n \t \ntwo  words\n\n"), ["one", "two  words"]
        )

    def test_any_line_ending_separates_and_none_stays_in_the_prompt(self):
        for end in ("\n", "\r\n", "\r"):
            with self.subTest(repr(end)):
                self.assertEqual(
                    self.texts("p.txt", end.join(["one", "two", "three"])), ["one", "two", "three"]
                )

    def test_other_separators_that_some_languages_split_at_stay_inside_a_prompt(self):
        text = "a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg"
        self.assertEqual(self.texts("p.txt", text + "\n"), [text])
        line = json.dumps({"prompt": text}, ensure_ascii=False)
        self.assertEqual(
            self.texts("p.jsonl", re.sub("[\x00-\x1f]", lambda m: "\\u%04x" % ord(m[0]), line)),
            [text],
        )

    def test_markdown_and_files_without_an_ending_are_plain_text(self):
        for name in ("p", "p.md", "p.TXT", "p.MD"):
            with self.subTest(name):
                self.assertEqual(self.texts(name, '{"prompt": "x"}\n'), ['{"prompt": "x"}'])

    def test_any_other_ending_is_refused_with_the_list_of_those_that_are_read(self):
        for name in ("p.text", "p.JSONX", "p.py", "p.tsv", "p.parquet", "p.yaml"):
            with self.subTest(name), self.assertRaises(ms.UsageError) as caught:
                self.load(name, "def f():\n    pass\n")
            for words in (name, *".txt .md .csv .jsonl .ndjson .json".split()):
                self.assertIn(words, str(caught.exception))

    def note(self, *lines, name="p.txt"):
        return ms.load_prompts([self.write(name, "\n".join(lines))])[1]

    def test_a_short_file_whose_lines_end_like_no_sentence_is_shown_as_it_will_be_sent(self):
        (note,) = self.note("Rename the variable t", "def total(lines):", "    t = 0", "Return it.")
        for words in ("p.txt", "4 lines", '"Rename the variable t"'):
            self.assertIn(words, note)

    def test_sentences_in_any_script_one_line_and_long_lists_give_no_note(self):
        for lines in (
            ("What is it?", 'Say "no."', "**Now!**", "and one without"),
            ("\u4f60\u597d\u3002", "\u771f\u7684\u5417\uff1f"),
            ("A single line",),
            ["a story about a clock"] * 40,
        ):
            with self.subTest(lines[0]):
                self.assertEqual(self.note(*lines), [])
        self.assertEqual(len(self.note(*["a story about a clock"] * 39)), 1)

    def test_the_note_is_said_before_the_first_request_and_the_run_goes_on(self):
        with FakeServer("plain", words=3) as server:
            outcome = measure(
                server, None, "--prompts", "p.txt", files={"p.txt": "one thing\nanother\n"}
            )
        self.assertEqual((outcome.code, outcome.err.count("\n")), (0, 1), outcome.err)
        self.assertIn('"one thing"', outcome.err)

    def test_a_prompt_is_named_after_its_file_and_place_and_its_kind_after_the_file(self):
        prompts = self.load("my-prompts.txt", "one\n\ntwo\n")
        self.assertEqual([prompt.workload for prompt in prompts], ["my-prompts", "my-prompts"])
        self.assertEqual([prompt.id for prompt in prompts], ["my-prompts-1", "my-prompts-2"])

    def test_byte_order_mark_is_no_part_of_the_prompt_in_any_format(self):
        mark = "\ufeff"
        self.assertEqual(self.texts("p.txt", mark + "one\n"), ["one"])
        self.assertEqual(self.texts("p.jsonl", mark + '{"prompt": "one"}\n'), ["one"])
        self.assertEqual(self.texts("p.json", mark + '[{"prompt": "one"}]'), ["one"])

    @no_windows
    def test_a_pipe_serves_as_prompts(self):
        with FakeServer("plain") as server, tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "prompts")
            os.mkfifo(pipe)
            writer = threading.Thread(
                target=lambda: pathlib.Path(pipe).write_text("one\ntwo\n", encoding="utf-8")
            )
            writer.start()
            outcome = measure(server, None, "--prompts", pipe)
            writer.join()
        self.assertEqual((outcome.code, outcome.endpoint()["completed"]), (0, 2))


class EncodingsOfPromptFiles(PromptFolder):
    """Prompt files under an ASCII locale, with byte-order mark and CRLF."""

    def test_byte_order_mark_and_crlf_give_the_same_prompt(self):
        for name in ("prompts_utf8.txt", "prompts_bom_crlf.txt"):
            with self.subTest(name):
                prompts, _ = ms.load_prompts([str(CASES / "E07" / name)])
                self.assertEqual([text_of(prompt) for prompt in prompts], [GERMAN])

    def test_the_locale_does_not_matter(self):
        code = "import sys, measure_speculative as m; print([ascii(p.messages) for p in m.load_prompts(sys.argv[1:])[0]])"
        env = dict(os.environ, LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
        done = subprocess.run(
            [sys.executable, "-c", code, str(CASES / "E07" / "prompts_utf8.txt")],
            cwd=PROGRAM.parent,
            env=env,
            capture_output=True,
            text=True,
            timeout=30,
        )
        self.assertEqual(done.stderr, "")
        self.assertIn("Wie gro\\\\xdf ist", done.stdout)

    def test_latin_1_is_refused_with_file_line_and_byte_offset(self):
        with FakeServer("plain") as server:
            outcome = run_main(
                "--baseline-url", server.url, "--prompts", CASES / "E07" / "prompts_latin1.txt"
            )
            self.assertEqual(server.requests, [])
        self.assertEqual(outcome.code, 2)
        self.assertIn("prompts_latin1.txt:1: ", outcome.err)
        self.assertRegex(outcome.err, r"offset 7\b")
        self.assertEqual(outcome.files, {})

    def test_an_empty_file_has_no_prompts_and_nothing_is_recorded(self):
        with FakeServer("plain") as server:
            outcome = run_main(
                "--baseline-url", server.url, "--prompts", CASES / "E07" / "prompts_empty.txt"
            )
            self.assertEqual(server.requests, [])
        self.assertEqual(outcome.code, 2)
        self.assertIn("no prompts", outcome.err)
        self.assertEqual(outcome.files, {})

    def test_blank_lines_are_no_prompts(self):
        prompts, _ = ms.load_prompts([str(CASES / "E07" / "prompts_blank_lines.txt")])
        self.assertEqual([text_of(prompt) for prompt in prompts], ["one", "two"])


class JsonPrompts(PromptFolder):
    ENTRIES = [
        ({"prompt": "a"}, "a"),
        ({"prompt": " a\n b "}, " a\n b "),  # as it is
        ({"turns": ["first", "second"]}, "first"),
        ({"turns": ["only"], "category": "writing", "question_id": 81}, "only"),
        ({"messages": [{"role": "user", "content": "m"}]}, "m"),
        (
            {"prompt": "\ud83c\udf89 caf\u00e9"},
            "\U0001f389 caf\u00e9",
        ),  # a whole pair is a character
    ]

    def test_lines_and_array_hold_prompt_messages_or_turns(self):
        lines = "\r\n".join(json.dumps(entry) for entry, _ in self.ENTRIES)
        array = json.dumps([entry for entry, _ in self.ENTRIES], indent=1)
        for name, data in (
            ("p.jsonl", lines),
            ("p.json", array),
            ("q.jsonl", "\n\n" + lines.replace("\r\n", "\n\n") + "\n"),
        ):
            with self.subTest(name):
                self.assertEqual(self.texts(name, data), [text for _, text in self.ENTRIES])

    def test_null_is_absent(self):
        rows = [
            {"prompt": "a", "messages": None, "turns": None, "category": None},
            {"prompt": None, "messages": [{"role": "user", "content": "b"}], "turns": None},
            {"prompt": None, "messages": None, "turns": ["c"], "id": None, "question_id": 7},
        ]
        for name, data in (
            ("p.ndjson", "\n".join(map(json.dumps, rows))),
            ("p.JSON", json.dumps(rows)),
        ):
            prompts = self.load(name, data)
            self.assertEqual([text_of(prompt) for prompt in prompts], ["a", "b", "c"])
            self.assertEqual([prompt.id for prompt in prompts], ["p-1", "p-2", "7"])

    def test_json_lines_are_read_under_either_name_in_any_case(self):
        for name in ("p.jsonl", "p.ndjson", "p.JSONL", "p.NdJson"):
            self.assertEqual(
                self.texts(name, '{"prompt": "a"}\n{"prompt": "b"}\n'), ["a", "b"], name
            )

    def test_json_lines_that_are_named_json_are_refused_with_the_hint(self):
        for lines in ('{"prompt": "a"}\n{"prompt": "b"}\n', '{"prompt": "a"}\n'):
            with self.assertRaisesRegex(ms.UsageError, "name it .jsonl"):
                self.load("p.json", lines)

    def test_messages_are_sent_as_they_are(self):
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "name": "u", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "x": 1},
        ]
        self.write("p.jsonl", json.dumps({"messages": messages}))
        with FakeServer("plain") as server:
            measure(server, None, "--prompts", str(self.folder / "p.jsonl"), "--warmup", "0")
            self.assertEqual([chat["body"]["messages"] for chat in server.chats], [messages])

    def test_id_and_workload_may_be_given_under_either_name(self):
        rows = [
            ({"id": "x1", "workload": "w"}, "x1", "w"),
            ({"question_id": 81, "category": "c"}, "81", "c"),
            ({"id": 0}, "0", "mine"),
            ({"workload": None, "id": None}, "mine-4", "mine"),
        ]
        prompts = self.load(
            "mine.jsonl", "\n".join(json.dumps(dict(entry, prompt="p")) for entry, _, _ in rows)
        )
        self.assertEqual(
            [row[1:] for row in rows], [(prompt.id, prompt.workload) for prompt in prompts]
        )

    def test_the_run_says_that_only_first_turns_are_used(self):
        lines = [{"turns": ["a", "b"]}, {"turns": ["c"]}, {"turns": ["d", "e", "f"]}]
        with FakeServer("plain", words=3) as server:
            outcome = run_main(
                "--baseline-url",
                server.url,
                "--prompts",
                "p.jsonl",
                "--warmup",
                "0",
                files={"p.jsonl": "\n".join(map(json.dumps, lines))},
            )
            self.assertEqual(
                [chat["body"]["messages"][0]["content"] for chat in server.chats], ["a", "c", "d"]
            )
        self.assertEqual(outcome.code, 0)
        self.assertRegex(outcome.err, r"(?i)\b2 prompts .*turn")

    def test_nothing_is_said_of_turns_where_there_is_one(self):
        _, notes = ms.load_prompts([self.write("p.jsonl", '{"turns": ["a"]}\n{"prompt": "b"}\n')])
        self.assertEqual(notes, [])

    def test_equal_prompts_have_equal_digests_and_others_do_not(self):
        same = self.load(
            "a.jsonl",
            '{"prompt": "x", "id": 1}\n{"messages": [{"content": "x", "role": "user"}]}\n',
        )
        self.assertEqual(len({prompt.digest() for prompt in same}), 1)
        self.assertNotEqual(self.load("b.txt", "y")[0].digest(), same[0].digest())


class TablesOfPrompts(PromptFolder):
    """CSV: a heading names the columns, and each record is a prompt, whole."""

    def test_each_record_is_a_prompt_with_its_commas_and_line_ends(self):
        text = 'id,Prompt,category\nx,"Name rivers, long ones.",geo\ny,"Write\na ""haiku"".",\n'
        for name in ("p.csv", "p.CSV"):
            prompts = self.load(name, text)
            self.assertEqual(
                [(p.id, p.workload, text_of(p)) for p in prompts],
                [("x", "geo", "Name rivers, long ones."), ("y", "p", 'Write\na "haiku".')],
            )

    def test_a_long_context_in_a_cell_is_a_prompt(self):
        (prompt,) = self.load("p.csv", "prompt\n" + "long " * 30000 + "\n")
        self.assertGreater(len(text_of(prompt)), 131072)

    def test_the_column_may_be_called_prompt_question_or_text(self):
        for heading in ("prompt,text", "n,question", "n,TEXT", "\ufeffprompt,n"):
            with self.subTest(heading):
                row = "say it,1" if heading.lstrip("\ufeff").startswith("prompt") else "1,say it"
                self.assertEqual(self.texts("p.csv", f"{heading}\r\n\r\n{row}\r\n"), ["say it"])

    def test_what_is_no_such_table_is_refused_with_its_place(self):
        for text, place, reason in (
            ("a,b\n1,2\n", "p.csv:1", "prompt, question or text"),
            ("Name three rivers.\n", "p.csv:1", "prompt, question or text"),
            ("prompt\nName rivers, long ones.\n", "p.csv:2", "comma"),
            ('prompt\n"a\nb"\nx,y\n', "p.csv:4", "comma"),
            ('prompt\n"never closed\n', "p.csv:2", "not CSV"),
            ("prompt,id\n,7\n", "p.csv:2", "no text"),
        ):
            with self.subTest(text), self.assertRaises(ms.UsageError) as caught:
                self.load("p.csv", text)
            self.assertIn(place, str(caught.exception))
            self.assertIn(reason, str(caught.exception))


class ConversationsWithoutAnswers(PromptFolder):
    """User messages in a row are turns, of which a client asks one after the other."""

    def sent(self, *roles):
        messages = [{"role": role, "content": f"{n}"} for n, role in enumerate(roles)]
        prompts, notes = ms.load_prompts(
            [self.write("p.jsonl", json.dumps({"messages": messages}))]
        )
        return [message["role"] for message in prompts[0].messages], notes

    def test_the_first_turn_is_sent_with_the_system_message_before_it_and_a_note(self):
        note = ["1 prompt has several turns; only the first turn is used"]
        for roles, sent in (
            (["user", "user", "user"], ["user"]),
            (["system", "user", "user"], ["system", "user"]),
            (["user", "assistant", "user", "user"], ["user", "assistant", "user"]),
        ):
            with self.subTest(roles):
                self.assertEqual(self.sent(*roles), (sent, note))

    def test_a_conversation_with_its_answers_is_sent_whole(self):
        for roles in (["system", "system", "user"], ["user", "assistant", "user"]):
            self.assertEqual(self.sent(*roles), (roles, []))


class FoldersOfPrompts(PromptFolder):
    def test_a_folder_gives_its_prompt_files_in_name_order_and_nothing_else(self):
        for name, data in (
            ("b.jsonl", '{"prompt": "b"}'),
            ("a.txt", "a1\na2"),
            ("c.json", '[{"prompt": "c"}]'),
            ("d.NDJSON", '{"prompt": "d"}'),
            ("e.csv", "prompt\ne\n"),
            (".hidden.txt", "hidden"),
            ("notes.md", "notes"),
            ("deeper/d.txt", "deeper"),
            ("e.txt/inside.txt", "a folder that is called like a file"),
        ):
            self.write(name, data)
        prompts, _ = ms.load_prompts([str(self.folder)])
        self.assertEqual([text_of(prompt) for prompt in prompts], ["a1", "a2", "b", "c", "d", "e"])
        self.assertEqual([prompt.workload for prompt in prompts], ["a", "a", "b", "c", "d", "e"])

    def test_several_paths_follow_each_other_as_given(self):
        paths = [self.write("z.txt", "z"), self.write("d/a.txt", "a"), self.write("b.txt", "b")]
        prompts, _ = ms.load_prompts([paths[0], str(self.folder / "d"), paths[2]])
        self.assertEqual([text_of(prompt) for prompt in prompts], ["z", "a", "b"])


class UnreadablePrompts(PromptFolder):
    """What cannot be read is named as file:line with the reason, exit 2, before any request."""

    GOOD = '{"prompt": "x"}\n'
    FILES = [
        # name, content, what the message says of the place, of the reason
        ("p.jsonl", GOOD + "\n{oops}\n", "p.jsonl:3: ", "not JSON"),
        ("p.jsonl", (GOOD * 2).replace("\n", "\r\n") + '{"prompt": "x"', "p.jsonl:3: ", "not JSON"),
        ("p.jsonl", GOOD.replace("\n", "\r") + '{"prompt": NaN}', "p.jsonl:2: ", "NaN"),
        ("p.jsonl", GOOD + "[" * 200_000, "p.jsonl:2: ", "deep"),
        ("p.jsonl", GOOD + '{"text": "x"}', "p.jsonl:2: ", "prompt"),
        ("p.jsonl", GOOD + '{"prompt": " \\n"}', "p.jsonl:2: ", "no text"),
        ("p.jsonl", GOOD + '{"prompt": 7}', "p.jsonl:2: ", "no text"),
        ("p.jsonl", GOOD + '{"turns": []}', "p.jsonl:2: ", "no text"),
        ("p.jsonl", GOOD + '{"turns": [{"a": 1}]}', "p.jsonl:2: ", "no text"),
        ("p.jsonl", GOOD + '{"messages": "x"}', "p.jsonl:2: ", "messages"),
        ("p.jsonl", GOOD + '{"messages": []}', "p.jsonl:2: ", "messages"),
        ("p.jsonl", GOOD + '{"messages": [{"content": "x"}]}', "p.jsonl:2: ", "role"),
        ("p.jsonl", GOOD + "17", "p.jsonl:2: ", "no text"),
        ("p.jsonl", GOOD + '{"prompt": "half \\ud83c"}', "p.jsonl:2: ", "surrogate"),
        (
            "p.jsonl",
            GOOD + '{"messages": [{"role": "user", "content": [{"text": "\\udf89"}]}]}',
            "p.jsonl:2: ",
            "surrogate",
        ),
        ("p.json", '[\n{"prompt": "x"},\n{"prompt" "y"}\n]', "p.json:3: ", "not JSON"),
        ("p.json", '[{"prompt": "x"}, {"prompt": "y"}, {}]', "p.json: item 3", "no text"),
        ("p.json", '{"prompt": "x"}', "p.json:1: ", "array"),
        ("p.json", "", "p.json:1: ", "not JSON"),
        ("p.json", "[]", "p.json", "no prompts"),
        ("p.txt", b"fine\r\nfine\rfine\nnot \xff here", "p.txt:4: ", "UTF-8"),
        ("p.jsonl", b'{"prompt": "x"}\n{"prompt": "\xe9"}', "p.jsonl:2: ", "UTF-8"),
        ("p.json", b'[\n{"prompt": "\xe9"}]', "p.json:2: ", "UTF-8"),
        ("p.txt", "x".encode("utf-16"), "p.txt:1: ", "UTF-8"),
        ("p.txt", " \n\t\r\n", "p.txt", "no prompts"),
    ]

    def test_the_place_and_the_reason_are_named_before_any_request(self):
        with FakeServer("plain") as server:
            for name, data, place, reason in self.FILES:
                with self.subTest(content=data[:60]):
                    outcome = run_main(
                        "--baseline-url", server.url, "--prompts", name, files={name: data}
                    )
                    self.assertEqual(outcome.code, 2)
                    self.assertIn(place, outcome.err)
                    self.assertIn(reason, outcome.err)
                    self.assertEqual(outcome.err.count("\n"), 1, outcome.err)
                    self.assertNotIn("labbook.md", outcome.files)
                    self.assertEqual(outcome.out, "")
            self.assertEqual(server.requests, [])

    def test_missing_files_and_folders_without_prompt_files_are_named(self):
        self.write("empty/notes.md", "x")
        for path in (self.folder / "nothing.txt", self.folder / "empty"):
            with self.subTest(path), self.assertRaises(ms.UsageError) as caught:
                ms.load_prompts([str(path)])
            self.assertIn(str(path), str(caught.exception))

    def test_a_bad_file_behind_a_good_one_still_stops_the_run(self):
        with FakeServer("plain") as server:
            outcome = run_main(
                "--baseline-url",
                server.url,
                "--prompts",
                "a.txt",
                "--prompts",
                "b.jsonl",
                files={"a.txt": "x", "b.jsonl": "?"},
            )
            self.assertEqual((outcome.code, server.requests), (2, []))
        self.assertIn("b.jsonl:1: ", outcome.err)

    def test_prompts_nested_too_deep_are_named(self):
        for levels in (60, 985, 5000):
            deep = "[" * levels + "]" * levels
            outcome = run_main(
                "--baseline-url",
                "http://127.0.0.1:9",
                "--prompts",
                "p.jsonl",
                files={"p.jsonl": '{"messages": [{"role": "user", "content": %s}]}' % deep},
            )
            self.assertEqual((outcome.code, outcome.err.count("\n")), (2, 1), outcome.err)
            self.assertRegex(outcome.err, "p.jsonl:1: .*too deep")


class PromptSets(unittest.TestCase):
    """The files in prompts/: one for each kind of work, as people really send them."""

    KINDS = ["closed", "code-edit", "copy", "extract", "open", "summarize"]

    @classmethod
    def setUpClass(cls):
        cls.prompts, cls.notes = ms.load_prompts([str(PROMPTS)])
        cls.by_kind = {kind: [p for p in cls.prompts if p.workload == kind] for kind in cls.KINDS}

    def test_there_is_one_file_for_each_kind_of_work_and_nothing_else(self):
        self.assertEqual(sorted(path.stem for path in PROMPTS.iterdir()), self.KINDS)
        for path in PROMPTS.iterdir():
            self.assertEqual({p.workload for p in ms.load_prompts([str(path)])[0]}, {path.stem})
        self.assertEqual(self.notes, [])

    def test_each_kind_has_at_least_16_prompts_and_none_stands_twice(self):
        for kind, prompts in self.by_kind.items():
            self.assertGreaterEqual(len(prompts), 16, kind)
        for values in (
            [text_of(p) for p in self.prompts],
            [p.id for p in self.prompts],
            [p.digest() for p in self.prompts],
        ):
            self.assertEqual(len(set(values)), len(self.prompts))
        built_in = {text_of(prompt) for prompt in ms.built_in_prompts()}
        self.assertFalse(built_in & {text_of(p) for p in self.prompts})

    def test_code_to_edit_has_30_to_120_lines(self):
        for prompt in self.by_kind["code-edit"]:
            blocks = re.findall(r"```[^\n]*\n(.*?)```", text_of(prompt), re.S)
            with self.subTest(prompt.id):
                self.assertEqual(len(blocks), 1)
                lines = [line for line in blocks[0].splitlines() if line.strip()]
                self.assertTrue(
                    30 <= len(lines) and len(blocks[0].rstrip().splitlines()) <= 120, len(lines)
                )

    def test_sources_to_summarize_have_400_to_1200_words(self):
        for prompt in self.by_kind["summarize"]:
            paragraphs = [len(part.split()) for part in re.split(r"\n\s*\n", text_of(prompt))]
            with self.subTest(prompt.id):  # the order stands in the first or in the last paragraph
                self.assertGreaterEqual(sum(paragraphs) - max(paragraphs[0], paragraphs[-1]), 400)
                self.assertLessEqual(sum(paragraphs) - min(paragraphs[0], paragraphs[-1]), 1200)

    def test_records_to_extract_ask_for_json_and_hold_their_source(self):
        for prompt in self.by_kind["extract"]:
            with self.subTest(prompt.id):
                self.assertRegex(text_of(prompt), r"(?i)json")
                self.assertGreater(len(text_of(prompt).split()), 60)

    def test_the_files_are_utf_8_with_lf_and_end_with_a_newline(self):
        for path in PROMPTS.iterdir():
            data = path.read_bytes()
            data.decode("utf-8")
            self.assertTrue(
                data.endswith(b"\n") and b"\r" not in data and not data.startswith(b"\xef\xbb\xbf"),
                path.name,
            )


if __name__ == "__main__":
    unittest.main()
