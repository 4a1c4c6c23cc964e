#!/usr/bin/env python3
"""Tests `annulus pack`: how it packs the tokens of a configuration, what it counts, and its errors."""

import array
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

CONFIG = """
run.steps = 1
model = { layers = 1, dim = 32, heads = 2, vocab = 50257 }
optimizer.lr = 1e-3
[data]
train = [{ files = ["a.bin"], name = "web" }, { files = ["b.bin"], name = "code" }]
context = [[0, 4], [5, 16]]
packing = "best-fit"
validation_fraction = 0
"""
BEGIN = 50256  # the token with which a document begins


def llmc(documents):
    header = array.array("i", [20240520, 1, sum(map(len, documents))] + [0] * 253)
    return header.tobytes() + array.array("H", [token for document in documents for token in document]).tobytes()


class PackTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        self.write("config.toml", CONFIG.encode())
        # Documents of 4, 1, 6 and 3 tokens.
        self.shard = llmc([[BEGIN, 1, 2, 3], [BEGIN], [BEGIN, 4, 5, 6, 7, 8], [BEGIN, 9, 10]])
        self.write("a.bin", self.shard)
        self.write("b.bin", llmc([[BEGIN, 1, 2]]))

    def write(self, name, content):
        with open(self.path(name), "wb") as f:
            f.write(content)

    def indexes(self):
        return sorted(name for name in os.listdir(self.folder) if name.startswith("rows-"))

    def test_makes_indexes_once_and_counts_their_rows(self):
        code, out, err = self.annulus("pack", "config.toml")
        self.assertEqual(code, 0, err)
        self.assertIn("web: 1 file, 14 tokens\n", out)
        self.assertIn("code: 1 file, 3 tokens\n", out)
        counts = ("    training    4 documents, 14 tokens: 10 targets in {} padding; "
                  "left out 3 first tokens, 1 document of one token\n")
        self.assertIn(counts.format("3 rows, 16.7 %"), out)  # 4 of the document of 6 tokens, 3 + 1, and 2
        self.assertIn(counts.format("1 row, 37.5 %"), out)
        self.assertEqual(len(re.findall(r"\(made in [\d.]+ s\)\n", out)), 4)
        made = self.indexes()
        self.assertEqual(len(made), 4)
        code, out, err = self.annulus("pack", "config.toml", "--verify")
        self.assertEqual((code, out.count("(was there)\n"), out.count("    verified\n")), (0, 4, 4), err)
        self.assertEqual(self.indexes(), made)

    def test_makes_a_damaged_index_again(self):
        self.annulus("pack", "config.toml")
        path = self.path(self.indexes()[0])
        with open(path, "rb") as f:
            good = f.read()
        self.write(path, good[:80] + b"?" + good[81:])
        code, out, err = self.annulus("pack", "config.toml")
        self.assertEqual((code, out.count("(was there)"), out.count("(made in")), (0, 3, 1), err)
        with open(path, "rb") as f:
            self.assertEqual(f.read(), good)

    def test_refuses_unreadable_files_and_leaves_nothing(self):
        self.write("a.bin", self.shard[:-2])
        self.assert_refused(3, "a.bin says that it holds 14 tokens, which is 1,052 bytes", "pack", "config.toml")
        self.write("a.bin", self.shard)
        for key, code, words in (
            ("long_documents=refuse", 3, "a.bin, token 5 (byte 1,034) has 6 tokens, but a row takes 5"),
            ("index=not/there", 8, "cannot make the folder not/there"),
        ):
            got, _, err = self.annulus("pack", "config.toml", "--set", "data." + key)
            self.assertEqual((got, err.count("\n")), (code, 1), err)
            self.assertIn(words, err)
        self.assert_refused(3, "missing.toml", "pack", "missing.toml")
        self.assertEqual(self.indexes(), [])

    def test_texts_need_no_index_file(self):
        self.write("t.txt", (b"all work and no play " * 60)[:1234])
        code, out, err = self.annulus("pack", "config.toml", "--set", "data.train=['t.txt']", "--set", "data.packing=stream")
        self.assertEqual(code, 0, err)
        self.assertIn("training    1 document, 1,234 tokens: 1,233 targets in 309 rows, 0.2 % padding; left out 1 first token, "
                      "0 documents of one token\n", out)
        self.assertEqual(self.indexes(), [])


cli.main()
