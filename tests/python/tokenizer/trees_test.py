#!/usr/bin/env python3
"""Tests the prefix trees that `annulus tokenize` makes of rollouts with --trees and --group: they are compared with the same
rollouts tokenized one by one as documents. And what is said of groups that cannot be used."""

import collections
import json
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()

PLAIN = """{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
NONE = (1 << 64) - 1
GROUPS = [
    ("Question: what is this?\nAnswer:", [" a test", " a test of trees", " a test", " a dream", "", " nothing"], [1, 0.5, 2, 0, 1, 0.25]),
    ("one", [" and only"], [3]),
    ("def f(x):\n    ", ["return x", "return x + 1", "return y", "pass"], [1, 1, 1, 1]),
]


class Trees(support.Test):
    def lines(self, records, name="in.jsonl"):
        return self.write(name, "".join(json.dumps(record) + "\n" for record in records))

    def words(self, *options, tokenizer=None, output="out", name="in.jsonl"):
        return ["tokenize", "--tokenizer", tokenizer or support.tokenizer("llama3"), "--input", name, "--output", self.path(output),
                *options]

    def chat_folder(self):
        os.makedirs(self.path("chat"), exist_ok=True)
        with open(os.path.join(support.tokenizer("qwen2"), "tokenizer.json"), "rb") as f:
            self.write("chat/tokenizer.json", f.read())
        self.write("chat/chat_template.jinja", PLAIN)
        return self.path("chat")

    def documents(self, output="out"):
        """Returns the documents of a folder, each as {tokens up to and with a target: its weight}; those of trees are read along
        their branches. The reader shares no code with the program."""
        found = []
        for shard in support.made_by(self.path(output))["shards"]:
            with open(self.path(os.path.join(output, shard["file"])), "rb") as f:
                data = f.read()
            magic, version, width, tokens, documents, _, offsets, _ = struct.unpack_from("<8sIIQQQQQ", data)
            at, runs = struct.unpack_from("<QQ", data, 96)
            ends = struct.unpack_from(f"<{runs}Q", data, at)
            weights = []
            for end, weight in zip(ends, struct.unpack_from(f"<{runs}f", data, at + 8 * runs)):
                weights += [weight] * (end - len(weights))
            ids = support.unpack(data[4096:4096 + tokens * width], width)
            places = struct.unpack_from(f"<{documents + 1}Q", data, offsets)
            if version == 3:
                begins_at, count = struct.unpack_from("<QQ", data, 128)
                self.assertEqual((begins_at, len(data)), ((at + 12 * runs + 7) // 8 * 8, begins_at + 16 * count))
                begins = struct.unpack_from(f"<{count}Q", data, begins_at)
                afters = struct.unpack_from(f"<{count}Q", data, begins_at + 8 * count)
            else:
                begins, afters = [p for p, q in zip(places, places[1:]) if p < q], [NONE] * documents
            paths, targets = {}, {}  # up to each input; by document
            for begin, end, after in zip(begins, [*begins[1:], tokens], afters):
                document = next(d for d in range(documents) if places[d] <= begin < places[d + 1])
                path = () if after == NONE else paths[after]
                for i in range(begin, end - 1):
                    path = paths[i] = (*path, ids[i])
                    target = (*path, ids[i + 1])
                    self.assertNotIn(target, targets.setdefault(document, {}))
                    targets[document][target] = weights[i + 1]
            found += [targets.get(d, {}) for d in range(documents)]
        return found

    def merged(self, documents):
        """Returns the sums of the weights over some documents."""
        sums = collections.Counter()
        for document in documents:
            for target, weight in document.items():
                sums[target] += weight
        return dict(sums)

    def apart(self, *options, **more):
        """Tokenizes GROUPS line by line and returns the documents of each group."""
        self.lines([{"prompt": prompt, "completion": c, "weight": w} for prompt, completions, weights in GROUPS
                    for c, w in zip(completions, weights)], "apart.jsonl")
        self.tokenize("--loss", "completion", *options, output="apart", name="apart.jsonl", **more)
        rest = iter(self.documents("apart"))
        return [[next(rest) for _ in completions] for _, completions, _ in GROUPS]

    def test_lines_that_are_groups(self):
        self.lines([{"prompt": p, "completions": c, "weight": w} for p, c, w in GROUPS])
        out = self.tokenize("--loss", "completion", "--trees", "--end", "7")
        apart = self.apart("--end", "7")
        self.assertEqual(self.documents(), [self.merged(group) for group in apart])
        lengths = [len(d) for group in apart for d in group]  # inputs
        trees = [len(self.merged(group)) for group in apart]
        pairs = sum(len(target) - 1 for group in apart for target in self.merged(group))
        saved = (f"11 rollouts in 3 trees: {sum(trees):,} positions instead of {sum(lengths):,} "
                 f"({100 * (sum(trees) / sum(lengths) - 1):+.1f} %), and {pairs:,} pairs of query and key instead of "
                 f"{sum(n * (n + 1) // 2 for n in lengths):,} ")
        self.assertIn(saved, out)
        made = support.made_by(self.path("out"))
        self.assertEqual((made["rollouts"], made["positions"], made["pairs"]), (11, sum(trees), pairs))
        self.assertEqual(made["documents"], 3)

    def test_lines_of_a_group(self):
        # Those of a file that have the same value, wherever they stand; as TRL and verl write them.
        records = [{"input": p, "output": c, "weight": w} for p, completions, weights in GROUPS
                   for c, w in zip(completions, weights)]
        apart = dict(zip([p for p, _, _ in GROUPS], self.apart()))
        for seed, (name, writer) in enumerate((("in.jsonl", self.lines), ("in.jsonl.gz", self.packed), ("in.parquet", self.parquet))):
            mixed = records[seed:] + records[:seed]
            mixed = mixed[::2] + mixed[1::2]
            writer(mixed, name)
            for processes in "1", "2":
                out = f"out-{name}-{processes}"
                self.tokenize("--loss", "completion", "--prompt", "input", "--field", "output", "--group", "input", "--processes",
                              processes, output=out, name=name)
                order = {}
                for record in mixed:
                    order.setdefault(record["input"])
                self.assertEqual(self.documents(out), [self.merged(apart[prompt]) for prompt in order])

    def packed(self, records, name):
        import gzip

        self.write(name, gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode()))

    def parquet(self, records, name):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), self.path(name), row_group_size=4)

    def test_conversations_that_share_a_beginning(self):
        folder = self.chat_folder()

        def turns(*texts):
            return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

        group = [turns("hello", "hi", "who?", "me"), turns("hello", "hi", "who?", "you"), turns("hello", "bye")]
        self.lines([{"messages": m, "id": 4} for m in group], "apart.jsonl")
        self.tokenize("--loss", "assistant", output="apart", name="apart.jsonl", tokenizer=folder)
        merged = self.merged(self.documents("apart"))
        self.assertEqual(max(merged.values()), 2, "an answer in two conversations counts twice")
        self.tokenize("--loss", "assistant", "--group", "id", output="grouped", name="apart.jsonl", tokenizer=folder)
        self.assertEqual(self.documents("grouped"), [merged])
        self.lines([{"conversations": group}])
        self.tokenize("--loss", "assistant", "--trees", tokenizer=folder)
        self.assertEqual(self.documents(), [merged])
        self.lines([{"prompt": turns("hello"), "completions": [turns("hello", t)[1:] for t in ("hi", "bye")]}])
        self.tokenize("--loss", "completion", "--chat", "--trees", tokenizer=folder, output="chat-trees")
        self.assertEqual(set(self.documents("chat-trees")[0].values()), {0.0, 1.0})

    def test_many_shards_and_a_repeated_call(self):
        self.lines([{"texts": [f"number {i} and {j % 3}, then {j}" for j in range(i % 5 + 1)]} for i in range(200)])
        self.tokenize("--trees", "--processes", "1", output="one")
        self.tokenize("--trees", "--processes", "2", "--shard-tokens", "500", output="many")
        self.assertGreater(len(support.made_by(self.path("many"))["shards"]), 3)
        self.assertEqual(self.documents("many"), self.documents("one"))
        one, many = support.made_by(self.path("one")), support.made_by(self.path("many"))
        self.assertEqual(one["pairs_apart"], many["pairs_apart"])
        code, out, err = self.run_words(self.words("--trees", output="one"))
        self.assertEqual((code, err), (0, ""))
        self.assertIn("holds all shards of these inputs already", out)
        self.refused(3, "holds the shards.* that were made with trees = true", self.words("--group", "texts", "--field", "texts", output="one"))

    def fails(self, code, pattern, *options, **more):
        self.refused(code, pattern, self.words(*options, **more))
        self.assertFalse(os.path.exists(self.path("out")), "something is left behind")

    def test_refuses_groups_that_cannot_be_used(self):
        good = {"prompt": "a", "completions": ["b", "c"]}
        for line, words in (
            ({"prompt": "a", "completions": []}, 'the field "completions" is \\[\\], but with --trees a list of at least one completion'),
            ({"prompt": "a", "completions": "b"}, 'is "b", but with --trees a list of at least one completion is expected'),
            ({"prompt": "a", "completion": "b"}, 'has no field "completions": --field takes one of prompt, completion'),
            ({"completions": ["b"]}, 'line 2, rollout 1 has no field "prompt"'),
            ({"prompt": "a", "completions": ["b", 7]}, 'line 2, rollout 2: the field "completions" is 7, but a text is expected'),
            ({**good, "weight": [1]}, 'has 1 weights in "weight" for 2 rollouts in "completions": one for each'),
            ({**good, "weight": [1, -1]}, "line 2, rollout 2: the weight of a line.* is -1"),
        ):
            with self.subTest(words):
                self.lines([good, line])
                self.fails(3, "in.jsonl, line 2.*" + words if "line 2" not in words else "in.jsonl, " + words, "--loss", "completion",
                           "--trees")
        self.lines([{"prompt": "a", "completion": "b", "id": 1}, {"prompt": "a", "completion": "b", "id": None}])
        self.fails(3, 'in.jsonl, line 2 has no field "id", by which lines are grouped', "--loss", "completion", "--group", "id")
        self.fails(2, "--trees needs --format annulus: other formats have no place for prefix trees", "--trees", "--format", "megatron")
        self.fails(2, "give one of them", "--trees", "--group", "id")
        self.fails(3, "--group takes JSONL, a JSON object a line", "--group", "id", "--kind", "text")


if __name__ == "__main__":
    support.main()
