#!/usr/bin/env python3
"""Tests that the bytes in tokens.table, put together, equal the text of the library's decoder: in Python, and in C++
with runtime/data/shards/token_table.h through token_table_tool, the second argument."""

import json
import os
import random
import struct
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()

TOOL = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else None


class Table(support.Test):
    def make(self, kind):
        self.write("in.txt", "some text")
        self.tokenize("--input", "in.txt", kind=kind, output=kind)
        return self.path(f"{kind}/tokens.table")

    def sequences(self, kind):
        """Returns the ids of texts, and random ids as an untrained model would write them."""
        ids = support.library_ids(kind, [text[:3000] for text in support.texts(60)])
        draw = random.Random(7)
        pieces = [[i] for i in range(1000)] + [ids[0][:k] for k in range(8)]
        return ids + pieces + [draw.choices(range(1000), k=draw.randrange(1, 30)) for _ in range(500)]

    def library(self, kind):
        if kind == "sentencepiece":
            import sentencepiece

            loaded = sentencepiece.SentencePieceProcessor(model_file=os.path.join(support.tokenizer(kind), "tokenizer.model"))
            return loaded.decode
        import tokenizers

        return tokenizers.Tokenizer.from_file(os.path.join(support.tokenizer(kind), "tokenizer.json")).decode

    def compare(self, kind, sequences, decoded):
        decode, compared = self.library(kind), 0
        for ids, ours in zip(sequences, decoded):
            said = decode(ids)
            try:
                self.assertEqual(ours.decode("utf-8"), said, (kind, ids))
                compared += 1
            except UnicodeDecodeError:  # incomplete characters, which the library replaces
                self.assertIn("\ufffd", said, (kind, ids))
                if kind in ("llama3", "qwen2"):
                    self.assertEqual(ours.decode("utf-8", "replace"), said)
        self.assertGreater(compared, 700)

    def test_header_and_size_of_the_file(self):
        import xxhash

        for kind in support.KINDS:
            with open(self.make(kind), "rb") as f:
                data = f.read()
            magic, version, rule, ids, size = struct.unpack_from("<8sIIQQ", data)
            self.assertEqual((magic, version, ids), (b"ANNTABLE", 1, 1000), kind)
            self.assertEqual(len(data), 64 + 8 * (ids + 1) + ids + size)
            self.assertEqual(data[32:48].hex(), support.made_by(self.path(kind))["tokenizer"]["digest"])
            self.assertEqual(data[48:64].hex(), xxhash.xxh3_128_hexdigest(data[64:]))
            self.assertEqual(rule, {"llama3": 0, "qwen2": 0}.get(kind, 1))

    def test_python_decoder_matches_the_library(self):
        sys.path.insert(0, support.PROGRAM)
        import table
        from tokenizer import Tokenizer

        for kind in support.KINDS:
            behind = Tokenizer(support.tokenizer(kind)).behind
            made = (table.of_sentencepiece if kind == "sentencepiece" else table.of_hugging_face)(behind)
            sequences = self.sequences(kind)
            self.compare(kind, sequences, [table.decode(*made, ids) for ids in sequences])

    def test_cpp_decoder_matches_the_library(self):
        if TOOL is None:
            self.skipTest("no tool is given on the command line")
        for kind in support.KINDS:
            sequences = self.sequences(kind)
            lines = "".join(" ".join(map(str, ids)) + "\n" for ids in sequences)
            done = subprocess.run([TOOL, self.make(kind)], input=lines.encode(), stdout=subprocess.PIPE, timeout=support.LIMIT)
            self.assertEqual(done.returncode, 0)
            decoded = [bytes.fromhex(line.decode()) for line in done.stdout.splitlines()]
            self.assertEqual(len(decoded), len(sequences))
            self.compare(kind, sequences, decoded)

    def save(self, change, kind="llama2"):
        with open(os.path.join(support.tokenizer(kind), "tokenizer.json")) as f:
            saved = json.load(f)
        change(saved)
        self.write("tokenizer.json", json.dumps(saved))
        self.write("in.txt", "some text")
        return self.run_words(["tokenize", "--tokenizer", self.folder, "--output", self.path("out"), "--input", "in.txt"])

    def test_metaspace_scheme_decides_the_rule(self):
        for scheme, rule in (("first", 2), ("never", 0)):
            code, _, err = self.save(lambda saved: saved.update(decoder={
                "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}))
            self.assertEqual(code, 0, err)
            with open(self.path("out/tokens.table"), "rb") as f:
                self.assertEqual(struct.unpack_from("<I", f.read(), 12)[0], rule)
            subprocess.run(["rm", "-r", self.path("out")], check=True)

    def test_names_decoders_without_a_table(self):
        for decoder, why in ((None, "no decoder"), ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "kind WordPiece"),
                             ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {
                                 "type": "Replace", "pattern": {"String": "e\u2581"}, "content": "X"}]}, "the library decodes")):
            code, out, err = self.save(lambda saved: saved.update(decoder=decoder))
            self.assertEqual(code, 0, err)
            self.assertRegex(out, rf"no tokens.table, .*{why}")
            self.assertFalse(os.path.exists(self.path("out/tokens.table")))
            subprocess.run(["rm", "-r", self.path("out")], check=True)


if __name__ == "__main__":
    support.main()
