#!/usr/bin/env python3
"""Runs the five commands of docs/tutorials/tokens.md, from raw text to a trained run, unchanged except for their sizes."""

import glob
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import cli  # noqa: E402

ROOT = os.path.dirname(HERE)
PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
SMALLER = ["--set", "data.context=256", "--set", "run.steps=12", "--set", "validation.every=6", "--set", "checkpoint.every=6",
           "--set", "model.vocab=1000"]


def commands():
    with open(os.path.join(ROOT, "docs", "tutorials", "tokens.md")) as f:
        return re.findall(r"^    ((?:\./annulus|examples/)\S* .*)$", f.read(), re.M)


class TokensPageTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        self.script = self.path("annulus.sh")
        cli.write_stand_in(self.script, PYTHON, os.path.join(ROOT, "python", "tokenizer"))
        shutil.copytree(os.path.join(ROOT, "configs"), self.path("configs"))

    def run_annulus(self, command, *more):
        words = shlex.split(command)
        self.assertEqual(words[0], "./annulus")
        code, out, err = self.annulus(*words[1:], *more, ANNULUS_SCRIPT=self.script)
        self.assertEqual((code, err), (0, ""), command + "\n" + out)
        return out

    def test_commands_of_the_page_run(self):
        make, tokenize, pack, train, sample = commands()
        words = shlex.split(make)
        self.assertEqual(words[0], "examples/tokens/make.sh")
        made = subprocess.run([PYTHON, "-I", "-B", os.path.join(ROOT, "examples/tokens/make.py"), *words[1:], "--megabytes", "0.6",
                               "--vocab", "1000"], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stderr)

        out = self.run_annulus(tokenize)
        tokens = re.search(r"^([\d,]+) tokens of ([\d,]+) documents, .* in 1 shard of \S*tokens/shards; \d+:\d\d$", out, re.M)
        self.assertTrue(tokens, out)

        out = self.run_annulus(pack, "--set", "data.context=256")
        self.assertIn(f"train: 1 file, {tokens.group(1)} tokens", out)
        kept = re.search(r"training +([\d,]+) documents, ([\d,]+) tokens: ([\d,]+) targets in ([\d,]+) rows", out)
        held = re.search(r"validation +([\d,]+) documents, ([\d,]+) tokens: ([\d,]+) targets in ([\d,]+) rows", out)
        self.assertTrue(kept and held, out)
        self.assertNotRegex(kept.group(0) + held.group(0), r"\d{4}", "the page has 1,803 documents, not 1803")

        def number(text):
            return int(text.replace(",", ""))

        # Every document and token is in one of the two parts; every token but the first of a document is a target.
        self.assertEqual(number(kept.group(1)) + number(held.group(1)), number(tokens.group(2)))
        self.assertEqual(number(kept.group(2)) + number(held.group(2)), number(tokens.group(1)))
        self.assertEqual(number(kept.group(3)), number(kept.group(2)) - number(kept.group(1)))
        indexes = glob.glob(self.path("tokens/shards/rows-*.index"))
        self.assertEqual(len(indexes), 1)

        out = self.run_annulus(train, *SMALLER)
        self.assertRegex(out, r"(?m)^done: 12 steps in \d+:\d\d, validation loss \d+\.\d+, in runs/tokens-001$")
        self.assertNotIn("bits per byte", out)
        self.assertEqual(glob.glob(self.path("tokens/shards/rows-*.index")), indexes, "train takes the index that pack made")

        # The command that the run suggests continues words of its own text.
        suggested = re.search(r"(?m)^sample: +(.*)$", out).group(1)
        prompt = shlex.split(suggested)[-1]
        texts = []
        for path in glob.glob(self.path("tokens/*.jsonl*")):
            with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as f:
                texts += [json.loads(line)["text"] for line in f]
        self.assertTrue(any(prompt in text for text in texts), prompt)

        shutil.rmtree(self.path("tokens/shards"))
        out = self.run_annulus(re.sub(r"^\S+", "./annulus", suggested), "--tokens", "5")
        self.assertTrue(out.startswith(prompt), out)
        out = self.run_annulus(sample, "--tokens", "20")
        self.assertTrue(out.startswith("def "), out)


if __name__ == "__main__":
    cli.main()
