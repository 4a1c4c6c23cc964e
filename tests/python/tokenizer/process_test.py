#!/usr/bin/env python3
"""Tests launcher/tokens/tokenizer_process.h, through tokenizer_process_tool, the second argument, with real tokenizers: one
process gives the ids of the library for many texts."""

import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()

TOOL = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else None


class Process(support.Test):
    def setUp(self):
        super().setUp()
        self.started = self.write("started", "")
        # In place of ./annulus, which would install and build.
        self.script = self.write("annulus", f'#!/bin/bash\necho start >>{self.started}\n'
                                            f'exec {sys.executable} -I -B {support.PROGRAM} "${{@:2}}"\n')
        os.chmod(self.script, 0o755)

    def encode(self, where, requests):
        """Encodes pairs of what to add and a text with one process. Returns (exit code, lists of ids, errors)."""
        words = []
        for i, (what, text) in enumerate(requests):
            words += [what, self.write(f"text-{i}", text)]
        got = subprocess.run([TOOL, where, *words], env={**os.environ, "ANNULUS_SCRIPT": self.script}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=support.LIMIT)
        with open(self.started) as f:
            self.assertEqual(f.read(), "start\n")
        os.truncate(self.started, 0)
        return got.returncode, [[int(i) for i in line.split()] for line in got.stdout.splitlines()], got.stderr

    def test_many_texts_have_the_ids_of_the_library(self):
        texts = support.texts(100)
        requests = [(what, text) for text in texts for what in ("beginning", "bare")]
        for kind in support.KINDS:
            with self.subTest(kind):
                code, ids, err = self.encode(support.tokenizer(kind), requests)
                self.assertEqual((code, err), (0, ""))
                self.assertEqual(ids[0::2], support.library_ids(kind, texts))
                self.assertEqual(ids[1::2], support.library_ids(kind, texts, special_tokens=False))

    def test_texts_of_megabytes(self):
        text = "\n\n".join(support.corpus())
        text *= 1 + 2_000_000 // len(text)
        for kind in ("llama3", "sentencepiece"):
            with self.subTest(kind):
                code, ids, err = self.encode(support.tokenizer(kind), [("beginning", text), ("bare", "a"), ("bare", text)])
                self.assertEqual((code, err), (0, ""))
                self.assertTrue(ids[0::2] == [support.library_ids(kind, [text], special_tokens=special)[0]
                                              for special in (True, False)])
                self.assertEqual(ids[1], support.library_ids(kind, ["a"], special_tokens=False)[0])

    def test_what_cannot_be_encoded_is_reported_once(self):
        for kind in ("llama3", "sentencepiece"):
            code, ids, err = self.encode(support.tokenizer(kind), [("bare", "a"), ("bare", b"\xff"), ("bare", "a")])
            self.assertEqual((code, ids), (3, support.library_ids(kind, ["a"], special_tokens=False)))
            self.assertEqual(err, "annulus: [tokenize] the text to encode is not UTF-8: byte 0 cannot be read\n")
        code, ids, err = self.encode(self.path("nothing"), [("bare", "a" * 3_000_000)])
        self.assertEqual((code, ids), (3, []))
        self.assertRegex(err, r"^annulus: \[tokenize\] there is no tokenizer .*nothing: .*\n$")


if __name__ == "__main__":
    support.main()
