#!/usr/bin/env python3
"""Tests that the reader gives the tokens of files written with Python's array and struct, as each format's tools do.

independent_writers_test.py PATH/dump_tokens
"""

import array
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest

DUMP = os.path.realpath(sys.argv.pop(1))


def ids(documents, code):
    out = array.array(code)
    for document in documents:
        out.extend(document)
    return out.tobytes()


def drawn(vocab, begin=None, end=None):
    """Documents of many lengths; `begin` and `end` occur only at the begin and end of each document."""
    numbers = random.Random(str(vocab))
    first, last = ([] if token is None else [token] for token in (begin, end))
    documents = []
    for length in [0, 1, 5000, 0, 3] + [numbers.randrange(40) for _ in range(50)]:
        inner = [numbers.randrange(vocab) for _ in range(length)]
        documents.append(first + [token for token in inner if token not in (begin, end)] + last)
    return documents


class Formats(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.reader = subprocess.Popen([DUMP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def tearDownClass(cls):
        cls.reader.communicate()

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def put(self, name, content):
        path = os.path.join(self.folder.name, name)
        with open(path, "wb") as f:
            f.write(content)
        return path

    def dump(self, *paths, format="auto", width=0, begin=-1, end=-1):
        self.reader.stdin.write("\t".join([format, str(width), str(begin), str(end), *paths]) + "\n")
        self.reader.stdin.flush()
        documents = []
        for line in self.reader.stdout:
            if line == "end\n":
                return documents
            self.assertFalse(line.startswith("error"), line)
            documents.append([int(token) for token in line.split()])
        self.fail("the reader has ended")

    def test_reads_llmc_shards(self):
        for magic, version, code, vocab, eot in ((20240520, 1, "H", 50257, 50256), (20240801, 7, "I", 128256, 128000)):
            documents = drawn(vocab, begin=eot)
            header = array.array("i", [0] * 256)
            header[0], header[1], header[2] = magic, version, sum(map(len, documents))
            path = self.put("fineweb_train_000001.bin", header.tobytes() + ids(documents, code))
            self.assertEqual(self.dump(path), documents)

    def test_reads_nanogpt_files(self):
        documents = drawn(50257, end=50256)
        path = self.put("train.bin", ids(documents, "H"))
        self.assertEqual(self.dump(path, format="nanogpt", end=50256), documents)
        documents = drawn(100000, begin=1, end=2)
        path = self.put("wide.bin", ids(documents, "I"))
        self.assertEqual(self.dump(path, format="nanogpt", width=32, begin=1, end=2), documents)

    def test_reads_megatron_pairs(self):
        for code, type_code, vocab in (("H", 8, 65500), ("i", 4, 250000)):
            documents = drawn(vocab)
            numbers = random.Random(vocab)
            lengths, ends = [], [0]
            for document in documents:  # each is cut into sequences of less than 100 tokens
                at = 0
                while at < len(document) or at == 0:
                    n = min(len(document) - at, numbers.randrange(1, 100))
                    lengths.append(n)
                    at += max(n, 1)
                ends.append(len(lengths))
            width = array.array(code).itemsize
            pointers = [sum(lengths[:i]) * width for i in range(len(lengths))]
            self.put("corpus.bin", ids(documents, code))
            self.put("corpus.idx", b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, type_code, len(lengths), len(ends))
                     + array.array("i", lengths).tobytes() + array.array("q", pointers).tobytes()
                     + array.array("q", ends).tobytes())
            for name in ("corpus", "corpus.idx", "corpus.bin"):
                self.assertEqual(self.dump(os.path.join(self.folder.name, name)), documents)

    def test_reads_annulus_shards(self):
        for code, vocab in (("H", 65536), ("I", 250000)):
            documents = drawn(vocab)
            body = ids(documents, code)
            tokens = len(body) // array.array(code).itemsize
            body += bytes(-len(body) % 8)
            offsets = 4096 + len(body)
            ends = [sum(map(len, documents[:i])) for i in range(len(documents) + 1)]
            header = struct.pack("<8sIIQQQQQ", b"ANNTOKEN", 1, array.array(code).itemsize, tokens, len(documents), vocab,
                                 offsets, offsets + 8 * len(ends))
            path = self.put("shard-00000.tokens",
                            header + bytes(4096 - len(header)) + body + array.array("Q", ends + [0] * len(documents)).tobytes())
            self.assertEqual(self.dump(path), documents)

    def test_reads_texts_as_bytes(self):
        texts = [bytes(range(256)) * 300, b"", "naïve 🦆".encode()]
        paths = [self.put("%d.txt" % i, text) for i, text in enumerate(texts)]
        self.assertEqual(self.dump(*paths), [list(text) for text in texts])


if __name__ == "__main__":
    unittest.main()
