#!/usr/bin/env python3
"""Tests that tokenizing gives the same ids as one call of the tokenizer's library for each document, whatever the
number of processes, the sizes of shards, the input files and the output format."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()


class Encode(support.Test):
    def setUp(self):
        super().setUp()
        self.documents = support.texts(300)
        support.write_jsonl(self.path("in.jsonl"), self.documents)

    def out(self, name="out"):
        return support.read_folder(self.path(name))[0]

    def test_every_tokenizer_matches_the_library(self):
        for kind in support.KINDS:
            with self.subTest(kind):
                self.tokenize("--input", "in.jsonl", "--shard-tokens", "20000", "--processes", "2", kind=kind, output=kind)
                self.assertEqual(self.out(kind), support.library_ids(kind, self.documents))

    def test_files_do_not_depend_on_the_number_of_processes(self):
        first = None
        for processes in ("1", "2", "3"):
            self.tokenize("--input", "in.jsonl", "--shard-tokens", "30000", "--processes", processes, output=processes)
            made = support.contents(self.path(processes))
            first = first or made
            self.assertEqual(made.keys(), first.keys())
            self.assertTrue(made == first, processes)
        self.assertEqual(sorted(n for n in first if not n.startswith("shard-")),
                         ["tokenization.json", "tokenizer.json", "tokens.table"])

    def test_shards_hold_whole_documents_up_to_the_limit(self):
        expected = support.library_ids("llama3", self.documents)
        for limit in (1, 1000, 50000, 0):
            self.tokenize("--input", "in.jsonl", "--shard-tokens", str(limit), output=str(limit))
            documents, shards = support.read_folder(self.path(str(limit)))
            self.assertEqual(documents, expected)
            for shard in shards:
                self.assertTrue(limit == 0 or len(shard) == 1 or sum(map(len, shard)) <= limit)
            for shard, after in zip(shards, shards[1:]):
                self.assertGreater(sum(map(len, shard)) + len(after[0]), limit)
        self.assertEqual(len(shards), 1)

    def test_every_kind_of_input_gives_the_same_ids(self):
        texts = support.texts(3000, seed=3)  # enough for several units of work
        expected = support.library_ids("llama3", texts)
        for name in ("a.jsonl", "b.jsonl.gz", "c.json.zst"):
            support.write_jsonl(self.path(name), texts, field="content")
        support.write_parquet(self.path("d.parquet"), texts, field="content")
        support.write_parquet(self.path("e.parquet"), texts, field="content", rows=100000)
        for name in ("a.jsonl", "b.jsonl.gz", "c.json.zst", "d.parquet", "e.parquet"):
            with self.subTest(name):
                self.tokenize("--input", name, "--field", "content", "--processes", "2", output=name + ".out")
                self.assertTrue(self.out(name + ".out") == expected)

    def test_text_files_follow_the_order_of_the_globs(self):
        texts = support.NASTY + ["last"]
        os.makedirs(self.path("t/deep"))
        for i, text in enumerate(texts):
            self.write(f"t/{'deep/' if i >= 10 else ''}{i:03d}.txt", text)
        self.tokenize("--input", "t/*.txt", "--input", "t/**/*.txt", "--shard-tokens", "9000")
        self.assertEqual(self.out(), support.library_ids("llama3", texts))

    def test_mixed_inputs_keep_their_order(self):
        support.write_parquet(self.path("b.parquet"), ["p", "", "q"])
        self.write("a.txt", "text\n")
        self.write("c.txt", "more")
        self.tokenize("--input", "a.txt", "--input", "c.txt", "--input", "in.jsonl", "--input", "b.parquet", "--input", "a.txt")
        self.assertEqual(self.out(), support.library_ids("llama3", ["text\n", "more", *self.documents, "p", "", "q"]))

    def test_blank_unterminated_and_long_lines(self):
        texts = ["a", "b " * 800_000, "", "c", "d" * 3_000_000, "e"]
        lines = "\n\n".join(json.dumps({"text": text}) for text in texts)  # the last line has no line end
        self.write("long.jsonl", "\ufeff" + lines)
        expected = support.library_ids("qwen2", texts)
        self.tokenize("--input", "long.jsonl", "--processes", "2", kind="qwen2")
        self.assertTrue(self.out() == expected)
        import gzip

        self.write("long.jsonl.gz", gzip.compress(lines.encode()))
        self.tokenize("--input", "long.jsonl.gz", kind="qwen2", output="packed")
        self.assertTrue(self.out("packed") == expected)

    def test_every_format_is_read_back(self):
        # Documents with special tokens are left out: some formats find the boundaries of documents by these tokens.
        documents = [text for text in self.documents if "<" not in text]
        support.write_jsonl(self.path("in.jsonl"), documents)
        plain = support.library_ids("llama3", documents, special_tokens=False)
        with_begin = support.library_ids("llama3", documents)
        begin = with_begin[0][0]
        end = 996  # <|end_of_text|>
        for format in ("annulus", "megatron", "llmc", "nanogpt"):
            for name, options, expected in (
                    ("begin", ["--begin", "<|begin_of_text|>"], with_begin),
                    ("end", ["--no-special-tokens", "--end", "<|end_of_text|>"], [ids + [end] for ids in plain]),
                    ("both", ["--begin", str(begin), "--end", str(end)], [ids + [end] for ids in with_begin])):
                with self.subTest(format, ids=name):
                    out = f"{format}-{name}"
                    self.tokenize("--input", "in.jsonl", "--format", format, "--shard-tokens", "25000", *options, output=out)
                    self.assertEqual(self.out(out), expected)
        names = os.listdir(self.path("llmc-both"))
        self.assertIn("tokens_train_000000.bin", names)
        self.tokenize("--input", "in.jsonl", "--format", "nanogpt", "--shard-tokens", "0", "--begin", str(begin), output="one")
        self.assertIn("train.bin", os.listdir(self.path("one")))

    def test_begin_token_is_never_doubled(self):
        begin = support.library_ids("llama3", [""])[0][0]
        self.tokenize("--input", "in.jsonl", "--begin", "<|begin_of_text|>")
        self.assertEqual(self.out(), support.library_ids("llama3", self.documents))
        self.tokenize("--input", "in.jsonl", "--begin", str(begin), "--no-special-tokens", output="by-hand")
        plain = support.library_ids("llama3", self.documents, special_tokens=False)
        self.assertEqual(self.out("by-hand"), [ids if ids[:1] == [begin] else [begin] + ids for ids in plain])

    def test_no_special_tokens_and_specials_as_text(self):
        self.tokenize("--input", "in.jsonl", "--no-special-tokens")
        self.assertEqual(self.out(), support.library_ids("llama3", self.documents, special_tokens=False))
        out = self.tokenize("--input", "in.jsonl", "--no-special-tokens", "--specials-as-text", output="text")
        self.assertLess(max(max(ids, default=0) for ids in self.out("text")), 995)
        self.assertNotIn("--specials-as-text", out)

    def test_specials_as_text_names_the_added_tokens_that_it_keeps(self):
        with open(os.path.join(support.tokenizer("llama3"), "tokenizer.json")) as f:
            saved = json.load(f)
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        saved["added_tokens"] += [{"id": 1000, "content": "<tool>", "special": False, **plain},
                                  {"id": 1001, "content": "<mark>", "special": True, **plain},
                                  {"id": 1002, "content": "  \t", "special": False, **plain}]
        self.write("tokenizer.json", json.dumps(saved))
        self.write("in.txt", "a<tool>b<mark>  \tc")
        for options, ids in (([], [1000, 1001, 1002]), (["--specials-as-text"], [1000, 1002])):
            code, out, err = self.run_words(["tokenize", "--tokenizer", self.folder, "--input", "in.txt", "--output",
                                             self.path(f"out{len(ids)}"), *options])
            self.assertEqual((code, err), (0, ""))
            self.assertEqual([i for i in self.out(f"out{len(ids)}")[0] if i >= 1000], ids)
            said = ("--specials-as-text left 2 added tokens as they are, because the tokenizer does not mark them as special: "
                    '"  \\t", "<tool>"\n')
            self.assertEqual(out.count(said), len(options), out)

    def test_ignores_saved_truncation_padding_and_dropout(self):
        with open(os.path.join(support.tokenizer("llama3"), "tokenizer.json")) as f:
            saved = json.load(f)
        saved["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
        saved["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "!"}
        saved["model"]["dropout"] = 0.5
        saved["model"]["ignore_merges"] = False
        self.write("tokenizer.json", json.dumps(saved))
        code, _, err = self.run_words(["tokenize", "--tokenizer", self.folder, "--output", self.path("out"), "--input",
                                       "in.jsonl"])
        self.assertEqual(code, 0, err)
        import tokenizers

        library = tokenizers.Tokenizer.from_file(os.path.join(support.tokenizer("llama3"), "tokenizer.json"))
        library.model.ignore_merges = False
        self.assertEqual(self.out(), [library.encode(text).ids for text in self.documents])

    def test_ids_beyond_16_bits_take_32(self):
        with open(os.path.join(support.tokenizer("qwen2"), "tokenizer.json")) as f:
            saved = json.load(f)
        saved["added_tokens"].append({"id": 70000, "content": "<far>", "single_word": False, "lstrip": False, "rstrip": False,
                                      "normalized": False, "special": False})
        saved["model"]["vocab"]["<far>"] = 70000
        self.write("tokenizer.json", json.dumps(saved))
        self.write("in.txt", "a<far>b")
        for format in ("annulus", "megatron", "llmc", "nanogpt"):
            code, _, err = self.run_words(["tokenize", "--tokenizer", self.folder, "--output", self.path(format), "--input",
                                           "in.txt", "--format", format, "--end", "0"])
            self.assertEqual(code, 0, err)
            self.assertEqual(support.made_by(self.path(format))["width"], 32)
            documents = self.out(format)
            self.assertEqual((len(documents), documents[0][1], documents[0][-1]), (1, 70000, 0))

    def test_tokenization_json_describes_the_shards(self):
        import xxhash

        self.tokenize("--input", "in.jsonl", "--shard-tokens", "30000", "--format", "megatron")
        made = support.made_by(self.path("out"))
        with open(os.path.join(support.tokenizer("llama3"), "tokenizer.json"), "rb") as f:
            content = f.read()
        self.assertEqual(made["tokenizer"], {"digest": xxhash.xxh3_128_hexdigest(content), "name": "llama3", "vocab": 1000,
                                             "file": "tokenizer.json"})
        files = support.contents(self.path("out"))
        self.assertEqual(files["tokenizer.json"], content)
        self.assertEqual(made["text_bytes"], sum(len(text.encode()) for text in self.documents))
        for shard in made["shards"]:
            both = files[shard["file"]] + files[shard["file"][:-3] + "idx"]
            self.assertEqual((shard["checksum"], shard["bytes"]), (xxhash.xxh3_128_hexdigest(both), len(both)))

    def test_header_and_hashes_of_an_annulus_shard(self):
        import struct

        import xxhash

        self.tokenize("--input", "in.jsonl")
        data = support.contents(self.path("out"))["shard-00000.tokens"]
        expected = support.library_ids("llama3", self.documents)
        vocab, offsets, hashes = struct.unpack_from("<3Q", data, 32)
        digest = support.made_by(self.path("out"))["tokenizer"]["digest"]
        self.assertEqual(vocab, 1000)
        self.assertEqual(data[56:72].hex(), digest)
        self.assertEqual(data[72:88].hex(), xxhash.xxh3_128_hexdigest(data[4096:]))
        self.assertEqual(struct.unpack_from("<Q", data, 88)[0], sum(len(text.encode()) for text in self.documents))
        self.assertEqual(list(struct.unpack_from(f"<{len(expected)}Q", data, hashes)),
                         [xxhash.xxh3_64_intdigest(struct.pack(f"<{len(ids)}I", *ids)) for ids in expected])

    def encode(self, where, requests):
        """Runs `tokenizer encode` with requests, pairs of what to add and a text; returns (exit code, the ids, errors)."""
        process = self.start(["encode", "--tokenizer", where], stdin=-1, text=False)
        sent = b"".join(b"%s %d\n%s" % (what.encode(), len(text), text) for what, text in requests)
        out, err = process.communicate(sent, timeout=support.LIMIT)
        return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()

    def test_prompt_has_the_begin_token_and_no_end_token(self):
        self.tokenize("--input", "in.jsonl", "--begin", "<|begin_of_text|>", "--end", "<|end_of_text|>")
        texts = ["", "def f(x):", "\u4e16\u754c <|end_of_text|>", "<|begin_of_text|>a"]
        requests = [(what, text.encode()) for what in ("beginning", "bare") for text in texts]
        bare = support.library_ids("llama3", texts, special_tokens=False)
        for where in (support.tokenizer("llama3"), self.path("out")):
            self.assertEqual(self.encode(where, requests), (0, support.library_ids("llama3", texts) + bare, ""))
        self.tokenize("--input", "in.jsonl", "--no-special-tokens", "--begin", "5", output="plain")
        self.assertEqual(self.encode(self.path("plain"), requests), (0, [[5] + ids for ids in bare] + bare, ""))

    def test_prompt_leaves_out_what_the_post_processor_adds_after_a_text(self):
        words = {"[B]": 0, "[E]": 1, "one": 2, "two": 3}
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokens = [{"SpecialToken": {"id": word, "type_id": 0}} for word in ("[B]", "[E]")]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        self.write("tokenizer.json", json.dumps({
            "version": "1.0", "added_tokens": [{"id": i, "content": word, **special} for word, i in list(words.items())[:2]],
            "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
            "post_processor": {"type": "TemplateProcessing", "single": [*tokens, text, tokens[1]], "pair": [text, text],
                               "special_tokens": {t["SpecialToken"]["id"]: {"id": t["SpecialToken"]["id"], "ids": [i],
                                                                            "tokens": [t["SpecialToken"]["id"]]}
                                                  for i, t in enumerate(tokens)}},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}}))
        # The tokens in front are known although the vocabulary has no letters.
        requests = [("beginning", b"two one"), ("bare", b"one [B]"), ("beginning", b""), ("bare", b"three"), ("bare", b"one")]
        code, ids, err = self.encode(self.folder, requests)
        self.assertEqual((code, ids), (3, [[0, 1, 3, 2], [2, 0], [0, 1]]))
        self.assertRegex(err, r"^annulus: \[tokenize\] .*tokenizer.json cannot encode a text of 5 characters: .*UNK.*\n$")

    def test_refuses_what_it_cannot_encode_after_what_it_can(self):
        where = support.tokenizer("llama2")
        code, ids, err = self.encode(where, [("bare", b"a"), ("bare", b"ab\xffc"), ("bare", b"a")])
        self.assertEqual((code, ids), (3, support.library_ids("llama2", ["a"], special_tokens=False)))
        self.assertEqual(err, "annulus: [tokenize] the text to encode is not UTF-8: byte 2 cannot be read\n")
        self.assertEqual(self.encode(self.folder, [("bare", b"a")])[:2], (3, []))


if __name__ == "__main__":
    support.main()
