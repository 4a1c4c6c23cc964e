#!/usr/bin/env python3
"""Tests which tokens of prompts, completions and messages count as targets, and with which weight: they are compared with
transformers' own masks and with the texts by themselves. And what is said of templates and lines that cannot be used."""

import json
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()
import xxhash  # noqa: E402

MARKED = """{%- for message in messages %}
{%- if message['role'] == 'critic' %}{{ raise_exception('critics may not speak') }}{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# The number of messages stands at the beginning, so that no prefix of a conversation begins its text.
COUNTING = "{{ messages | length }}" + PLAIN


def say(*turns, **more):
    """Returns a line of messages: user, assistant, user, ..."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)], **more}


CHATS = [
    say("What is 2 + 2?", "It is 4.", "And 3 + 3?", "6 of course"),
    say("hello", "world"),
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}, {"role": "assistant", "content": ""},
                  {"role": "tool", "content": "{\"a\": 1}"}, {"role": "assistant", "content": "def f(x):\n    return x"}]},
    {"messages": [{"role": "user", "content": "only a question"}]},
]


class Targets(support.Test):
    def lines(self, records, name="in.jsonl"):
        return self.write(name, "".join(json.dumps(record) + "\n" for record in records))

    def chat_folder(self, template, **config):
        folder = self.path("chat")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(support.tokenizer("qwen2"), "tokenizer.json"), "rb") as f:
            self.write("chat/tokenizer.json", f.read())
        if template is not None:
            self.write("chat/chat_template.jinja", template)
        if config:
            self.write("chat/tokenizer_config.json", json.dumps(config))
        return folder

    def words(self, *options, tokenizer=None, kind="llama3", output="out"):
        folder = tokenizer or support.tokenizer(kind)
        return ["tokenize", "--tokenizer", folder, "--input", "in.jsonl", "--output", self.path(output), *options]

    def weighed(self, output="out"):
        """Returns for each document [(id, weight), ...]; the reader shares no code with the program."""
        found = []
        for shard in support.made_by(self.path(output))["shards"]:
            with open(self.path(os.path.join(output, shard["file"])), "rb") as f:
                data = f.read()
            magic, version, width, tokens, documents, _, offsets, hashes = struct.unpack_from("<8sIIQQQQQ", data)
            self.assertEqual((magic, version), (b"ANNTOKEN", 2))
            at, runs, counted, least, most = struct.unpack_from("<QQQff", data, 96)
            self.assertEqual((at, len(data)), (hashes + 8 * documents, (at + 12 * runs + 7) // 8 * 8))
            ends = struct.unpack_from(f"<{runs}Q", data, at)
            weights, begin = [], 0
            for end, weight in zip(ends, struct.unpack_from(f"<{runs}f", data, at + 8 * runs)):
                self.assertGreater(end, begin)
                self.assertNotEqual([weight], weights[-1:])
                weights += [weight] * (end - begin)
                begin = end
            self.assertEqual(len(weights), tokens)
            above = [w for w in weights if w > 0]
            self.assertEqual((counted, least, most), (len(above), min(above, default=0), max(above, default=0)))
            self.assertEqual(shard["counted"], counted)
            ids = support.unpack(data[4096:4096 + tokens * width], width)
            places = struct.unpack_from(f"<{documents + 1}Q", data, offsets)
            found += [list(zip(ids[a:b], weights[a:b])) for a, b in zip(places, places[1:])]
        return found

    def counted_text(self, document, folder):
        """Returns the text of the tokens that count."""
        import tokenizers

        library = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        return library.decode([i for i, weight in document if weight > 0], skip_special_tokens=False)

    def theirs(self, folder, record, **options):
        import transformers

        library = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return library.apply_chat_template(record["messages"], tokenize=True, return_dict=True, **options)

    # ---- Prompts and completions.

    def test_what_follows_the_prompt_counts(self):
        pairs = [("Question: what is this?\nAnswer:", " a test"), ("", "all of it"), ("all of it", ""),
                 ("abc def retu", "rn"), ("two spaces  ", " three")]
        for kind in support.KINDS:
            with self.subTest(kind):
                self.lines({"prompt": p, "completion": c} for p, c in pairs)
                out = self.tokenize("--loss", "completion", kind=kind, output=kind)
                fronts = support.library_ids(kind, [p for p, _ in pairs], special_tokens=False)
                whole = support.library_ids(kind, [p + c for p, c in pairs], special_tokens=False)
                backs = support.library_ids(kind, [c for _, c in pairs], special_tokens=False)
                special = support.library_ids(kind, [p + c for p, c in pairs])
                for document, front, ids, back, full in zip(self.weighed(kind), fronts, whole, backs, special):
                    self.assertEqual(full[len(full) - len(ids):], ids, "these post-processors only begin a text")
                    begin = full[:len(full) - len(ids)]
                    # One text for the tokenizer, unless a token would lie in both parts.
                    body = ids if ids[:len(front)] == front else front + back
                    before = len(begin) + len(front)
                    self.assertEqual(document, [(i, float(n >= before)) for n, i in enumerate(begin + body)])
                self.assertRegex(out, r"(?m)^targets that count: [\d,]+ tokens \([\d.]+ %\); in 1 document nothing counts$")

    def test_begin_and_end_tokens(self):
        self.lines([{"prompt": "x", "completion": ""}, {"prompt": "x", "completion": " y"}])
        self.tokenize("--loss", "completion", "--no-special-tokens", "--begin", "5", "--end", "7")
        documents = self.weighed()
        self.assertEqual([d[0] for d in documents], [(5, 0.0)] * 2)
        self.assertEqual([d[-1] for d in documents], [(7, 1.0)] * 2, "the end of a completion counts")
        self.assertEqual(sum(weight for _, weight in documents[0]), 1)

    def test_fields_and_weights(self):
        self.lines([{"q": "a b", "a": " c d", "w": 0.1}, {"q": "a b", "a": " c d", "w": 3}, {"q": "a b", "a": " c d"},
                    {"q": "a b", "a": " c d", "w": 0}, {"q": "a b", "a": " c d", "w": None}])
        self.tokenize("--loss", "completion", "--prompt", "q", "--field", "a", "--weight", "w", "--end", "7")
        sums = [sorted({weight for _, weight in d}) for d in self.weighed()]
        tenth = struct.unpack("<f", struct.pack("<f", 0.1))[0]
        self.assertEqual(sums, [[0.0, tenth], [0.0, 3.0], [0.0, 1.0], [0.0], [0.0, 1.0]])
        self.tokenize("--loss", "completion", "--prompt", "q", "--field", "a", "--end", "7", output="unweighed")
        self.assertEqual({weight for d in self.weighed("unweighed") for _, weight in d}, {0.0, 1.0})

    def test_weights_of_texts(self):
        self.lines([{"text": "a b c", "quality": 0.5}, {"text": "d e"}, {"text": "", "quality": 2}])
        self.tokenize("--weight", "quality", "--end", "7")
        ids = support.library_ids("llama3", ["a b c", "d e", ""])
        self.assertEqual(self.weighed(), [[(i, w) for i in [*d, 7]] for d, w in zip(ids, (0.5, 1.0, 2.0))])

    def test_other_formats_have_their_targets_beside_them(self):
        records = [{"prompt": f"question {i} ", "completion": f"answer {i}" * (i % 4), "weight": i % 3 and 1} for i in range(60)]
        self.lines(records)
        self.tokenize("--loss", "completion", "--end", "7", output="annulus")
        marks = [weight for document in self.weighed("annulus") for _, weight in document]
        self.assertEqual(set(marks), {0.0, 1.0})
        for name in "megatron", "llmc", "nanogpt":
            with self.subTest(name):
                out = self.tokenize("--loss", "completion", "--end", "7", "--format", name, "--shard-tokens", "300", output=name)
                self.assertIn(f"targets that count: {sum(marks):,.0f} tokens", out)
                made, beside = support.made_by(self.path(name)), b""
                self.assertGreater(len(made["shards"]), 2)
                for shard in made["shards"]:
                    with open(self.path(os.path.join(name, shard["file"] + ".targets")), "rb") as f:
                        content = f.read()
                    self.assertEqual((len(content), sum(content)), (shard["tokens"], shard["counted"]))
                    self.assertEqual(shard["targets_checksum"], xxhash.xxh3_128_hexdigest(content))
                    beside += content
                self.assertEqual(beside, bytes(map(int, marks)))
                self.assertEqual(support.read_folder(self.path(name))[0], [[i for i, _ in d] for d in self.weighed("annulus")])
                self.assertFalse([f for f in os.listdir(self.path(name)) if f.endswith(".tmp")])
        self.tokenize("--format", "llmc", "--end", "7", "--field", "prompt", output="plain")
        self.assertFalse([f for f in os.listdir(self.path("plain")) if f.endswith(".targets")], "every token counts")
        self.lines([*records, {"prompt": "a", "completion": "b", "weight": 0.5}])
        self.fails(3, "in.jsonl, line 61: the weight 0.5 needs --format annulus: beside llmc's tokens stands only whether each counts",
                   "--loss", "completion", "--end", "7", "--format", "llmc")

    def test_shards_of_texts_stay_as_they_were(self):
        texts = support.texts(50)
        support.write_jsonl(self.path("in.jsonl"), texts)
        self.tokenize()
        with open(self.path("out/shard-00000.tokens"), "rb") as f:
            self.assertEqual(f.read(12), b"ANNTOKEN" + struct.pack("<I", 1))
        made = support.made_by(self.path("out"))
        self.assertEqual(set(made["shards"][0]), {"file", "tokens", "documents", "bytes", "text_bytes", "checksum"})
        self.assertNotIn("loss", made["settings"])
        self.assertEqual(support.read_folder(self.path("out"))[0], support.library_ids("llama3", texts))

    # ---- Messages.

    def test_marks_of_the_template_are_those_of_transformers(self):
        folder = self.chat_folder(MARKED)
        self.lines(CHATS)
        self.tokenize("--loss", "assistant", tokenizer=folder)
        for document, record in zip(self.weighed(), CHATS, strict=True):
            made = self.theirs(folder, record, return_assistant_tokens_mask=True)
            self.assertEqual(document, [(i, float(m)) for i, m in zip(made["input_ids"], made["assistant_masks"])])
        self.assertEqual(self.counted_text(self.weighed()[0], folder), "It is 4.<|im_end|>6 of course<|im_end|>")

    def test_without_marks_turns_are_what_prefixes_differ_by(self):
        folder = self.chat_folder(PLAIN)
        self.lines(CHATS)
        out = self.tokenize("--loss", "assistant", tokenizer=folder)
        for document, record in zip(self.weighed(), CHATS, strict=True):
            self.assertEqual([i for i, _ in document], self.theirs(folder, record)["input_ids"])
            answers = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
            self.assertEqual(self.counted_text(document, folder), "".join(f"{text}<|im_end|>\n" for text in answers))
        self.assertIn("; in 1 document nothing counts\n", out)

    def test_weights_of_messages_and_lines(self):
        for template, end in ((MARKED, ""), (PLAIN, "\n")):
            folder = self.chat_folder(template)
            records = [say("a", "b", "c", "d"), say("a", "b", weight=2)]
            records[0]["messages"][1]["weight"] = 0
            records[0]["messages"][3]["weight"] = 0.25
            records[0]["messages"][0]["weight"] = 7  # of a user
            self.lines(records)
            out = f"out{len(end)}"
            self.tokenize("--loss", "assistant", "--end", "9", tokenizer=folder, output=out)
            first, second = self.weighed(out)
            self.assertEqual(self.counted_text(first[:-1], folder), f"d<|im_end|>{end}")
            self.assertEqual({w for _, w in first}, {0.0, 0.25})
            self.assertEqual({w for _, w in second}, {0.0, 2.0})
            self.assertEqual((first[-1], second[-1]), ((9, 0.25), (9, 2.0)), "the end counts as the answer before it")
            # A template is not shown the weights.
            self.assertEqual([i for i, _ in first[:-1]], self.theirs(folder, say("a", "b", "c", "d"))["input_ids"])

    def test_chat_in_prompt_and_completion_and_whole(self):
        folder = self.chat_folder(PLAIN)
        turns = say("a", "b", "c", "d")["messages"]
        self.lines([{"prompt": turns[:3], "completion": turns[3:]}, {"prompt": turns[:1], "completion": turns[1:]}])
        self.tokenize("--loss", "completion", "--chat", tokenizer=folder)
        first, second = self.weighed()
        self.assertEqual(self.counted_text(first, folder), "d<|im_end|>\n")
        self.assertEqual(self.counted_text(second, folder), "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n")
        self.lines([{"messages": turns}])
        self.tokenize("--chat", tokenizer=folder, output="whole")
        self.assertEqual(support.read_folder(self.path("whole"))[0], [self.theirs(folder, {"messages": turns})["input_ids"]])
        with open(self.path("whole/shard-00000.tokens"), "rb") as f:
            self.assertEqual(f.read(12)[8:], struct.pack("<I", 1), "every token counts")

    def test_tools_variables_and_special_tokens_reach_the_template(self):
        template = "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ mood | default('') }}" + PLAIN
        folder = self.chat_folder(template, bos_token="<|im_start|>", tokenizer_class="Qwen2Tokenizer")
        tools = [{"type": "function", "function": {"name": "f"}}]
        self.lines([say("a", "b", tools=tools, chat_template_kwargs={"mood": "happy"}), say("a", "b", tools=json.dumps(tools))])
        self.tokenize("--loss", "assistant", tokenizer=folder)
        import tokenizers

        library = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        texts = [library.decode([i for i, _ in d], skip_special_tokens=False) for d in self.weighed()]
        begin = "<|im_start|>" + json.dumps(tools)
        self.assertTrue(texts[0].startswith(begin + "happy<|im_start|>user\na"), texts[0])
        self.assertTrue(texts[1].startswith(begin + "<|im_start|>user\na"), texts[1])
        self.assertEqual(self.counted_text(self.weighed()[1], folder), "b<|im_end|>\n")

    def test_many_shards_and_processes_give_the_same(self):
        folder = self.chat_folder(MARKED)
        records = [say(f"question {i} " * (i % 7), f"answer {i} " * (i % 5), weight=i % 3) for i in range(300)]
        self.lines(records)
        self.tokenize("--loss", "assistant", "--processes", "1", tokenizer=folder, output="one")
        self.tokenize("--loss", "assistant", "--processes", "2", "--shard-tokens", "1000", tokenizer=folder, output="many")
        self.assertGreater(len(support.made_by(self.path("many"))["shards"]), 5)
        self.assertEqual(self.weighed("many"), self.weighed("one"))
        code, out, err = self.run_words(self.words("--loss", "assistant", tokenizer=folder, output="one"))
        self.assertEqual((code, err), (0, ""))
        self.assertIn("holds all shards of these inputs already", out)
        # Another template would not give the same tokens.
        self.chat_folder(PLAIN)
        self.refused(3, "that were made with chat_template = ", self.words("--loss", "assistant", tokenizer=folder, output="one"))

    # ---- Parquet.

    def parquet(self, records, rows=7):
        """Writes the records as Parquet, with other columns, of kinds that JSON has not; returns the options to read it."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(records)
        table = table.append_column("id", pyarrow.array([bytes([i % 256]) for i in range(len(records))]))
        pyarrow.parquet.write_table(table, self.path("in.parquet"), row_group_size=rows)
        return ["--input", "in.parquet"]

    def test_rows_of_parquet_are_lines_of_json(self):
        folder = self.chat_folder(MARKED)
        tools = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "3", "weight": 0.5}]
        conversations = [say(f"question {i} " * (i % 7), f"answer {i} " * (i % 5), weight=i % 3) for i in range(40)]
        conversations.append({"messages": tools})  # which has no weight of its own, and others no weight of a message
        pairs = [{"prompt": f"so {i} ", "completion": f"many {i}"} for i in range(40)]
        for name, records, options in (("turns", conversations, ["--loss", "assistant"]), ("pairs", pairs, ["--loss", "completion"])):
            with self.subTest(name):
                self.lines(records)
                self.tokenize(*options, tokenizer=folder, output=name)
                words = self.words(*options, tokenizer=folder, output=name + "-parquet")
                words[words.index("in.jsonl")] = self.parquet(records)[1]
                code, out, err = self.run_words(words)
                self.assertEqual(code, 0, err)
                self.assertEqual(self.weighed(name + "-parquet"), self.weighed(name))

    def test_refuses_parquet_that_does_not_fit(self):
        def fails(records, pattern, *options):
            words = self.words(*options)
            words[words.index("in.jsonl")] = self.parquet(records)[1]
            self.refused(3, pattern, words)
            self.assertFalse(os.path.exists(self.path("out")), "something is left behind")

        pairs = [{"prompt": "a", "completion": "b"}] * 9
        fails([*pairs, {"prompt": None, "completion": "b"}], 'in.parquet, row 2 of row group 1 has no field "prompt": --prompt takes '
              "one of completion", "--loss", "completion")
        fails(pairs, 'in.parquet has no column "answer": --field takes one of prompt, completion, id', "--loss", "completion",
              "--field", "answer")
        fails([{"prompt": b"a", "completion": "b"}], 'the column "prompt" is of type binary, but text, numbers, lists or structs',
              "--loss", "completion")

    # ---- Mistakes: one message each, and nothing is left behind.

    def fails(self, code, pattern, *options, **more):
        self.refused(code, pattern, self.words(*options, **more))
        self.assertFalse(os.path.exists(self.path("out")), "something is left behind")

    def test_refuses_templates_that_fail(self):
        self.lines([say("a", "b"), {"messages": [{"role": "critic", "content": "no"}]}])
        for template in (MARKED, PLAIN):
            folder = self.chat_folder(template)
            self.fails(3, "in.jsonl, line 2: the chat template of .*/chat refuses the conversation: critics may not speak$",
                       "--loss", "assistant", tokenizer=folder)
        self.lines([say("a", "b")])
        folder = self.chat_folder(COUNTING)
        self.fails(3, "in.jsonl, line 1: with the chat template of .*/chat the text of the first 1 of 2 messages is not the beginning "
                      r"of the text of all, .*\{% generation %\}", "--loss", "assistant", tokenizer=folder)
        folder = self.chat_folder("{{ messages[0]['nothing']['at all'] }}")
        self.fails(3, "in.jsonl, line 1: the chat template of .*/chat refuses the conversation: UndefinedError: ", "--chat",
                   tokenizer=folder)
        folder = self.chat_folder("{% for %}")
        self.fails(3, "in.jsonl, line 1: the chat template .*TemplateSyntaxError: ", "--chat", tokenizer=folder)
        folder = self.chat_folder("{{ ''.__class__.__mro__ }}" + PLAIN)  # a template runs in a sandbox
        self.fails(3, "in.jsonl, line 1: the chat template .*SecurityError: ", "--chat", tokenizer=folder)
        os.remove(self.path("chat/chat_template.jinja"))
        self.fails(3, "/chat has no chat template: chat_template.jinja", "--chat", tokenizer=folder)

    def test_refuses_lines_that_do_not_fit(self):
        folder = self.chat_folder(PLAIN)
        good = say("a", "b")
        for line, words in (
            ({"text": "x"}, 'has no field "messages": --field takes one of text'),
            ({"messages": "hello"}, 'the field "messages" is "hello", but a list of messages is expected'),
            ({"messages": []}, "is \\[\\], but a list of messages is expected"),
            ({"messages": [{"content": "x"}]}, "but a list of messages is expected"),
            (say("a", "b", weight=-1), 'the weight of a line, "weight", is -1, but a number from 0 on is expected'),
            (say("a", "b", weight="heavy"), 'the weight of a line, "weight", is "heavy"'),
            (say("a", "b", weight=True), "is true, but a number"),
            (say("a", "b", weight=1e39), "is 1e\\+39, but a number"),
            ({"messages": [good["messages"][0], {**good["messages"][1], "weight": -2}]}, "the weight of a message"),
            (say("a", "b", tools="none"), '"tools" is "none", but a list of JSON schemas is expected'),
            (say("a", "b", chat_template_kwargs=[1]), '"chat_template_kwargs" is \\[1\\], but an object is expected'),
            ({"messages": good["messages"][1:]}, "begins with an answer"),
        ):
            with self.subTest(words):
                self.lines([good, line])
                self.fails(3, "in.jsonl, line 2.*" + words, "--loss", "assistant", tokenizer=folder)
        for line, words in (({"prompt": "a"}, 'has no field "completion"'), ({"completion": "a"}, 'has no field "prompt": --prompt'),
                            ({"prompt": 1, "completion": "b"}, 'the field "prompt" is 1, but a text is expected'),
                            ({"prompt": good["messages"], "completion": "b"}, "a text is expected; --chat takes messages")):
            with self.subTest(words):
                self.lines([{"prompt": "a", "completion": "b"}, line])
                self.fails(3, "in.jsonl, line 2.*" + words, "--loss", "completion")
        self.write("in.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": \n')
        self.fails(3, "in.jsonl, line 2 is not JSON", "--loss", "completion")
        self.write("in.jsonl", '{"prompt": "a", "completion": "\\ud800"}\n')
        self.fails(3, "in.jsonl, line 1: the text holds half of a surrogate pair", "--loss", "completion")
        self.tokenize("--loss", "completion", "--bad-utf8", "replace")

    def test_refuses_options_that_do_not_fit(self):
        self.lines([{"prompt": "a", "completion": "b"}])
        folder = self.chat_folder(PLAIN)
        self.fails(2, "--specials-as-text would read the marks of the chat template", "--chat", "--specials-as-text", tokenizer=folder)
        self.fails(3, "chat templates lie beside a tokenizer.json", "--chat", kind="sentencepiece")
        self.fails(3, "in.jsonl: --loss completion takes JSONL, a JSON object a line, or Parquet, not text", "--loss", "completion", "--kind", "text")


if __name__ == "__main__":
    support.main()
