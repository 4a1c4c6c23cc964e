#!/usr/bin/env python3
"""Runs the commands of docs/tutorials/extend.md, from a model in a folder to one with a longer context in transformers, unchanged
except for their sizes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import cli  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
SMALLER = {
    "examples/extend/make.sh": ["--megabytes", "0.6", "--vocab", "1000", "--", "--set", "run.steps=30"],
    "train": ["--set", "run.steps=12", "--set", "validation.every=6", "--set", "checkpoint.every=6"],
}
cli.LIMIT = 240


def commands():
    with open(os.path.join(ROOT, "docs", "tutorials", "extend.md")) as f:
        return re.findall(r"^    ((?:\./annulus|examples/|\.venv/bin/python) ?\S* .*)$", f.read(), re.M)


class ExtendPageTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        os.makedirs(self.path("examples/tokens"))
        shutil.copytree(os.path.join(ROOT, "examples/extend"), self.path("examples/extend"))
        shutil.copytree(os.path.join(ROOT, "configs"), self.path("configs"))
        # Replaces the script that installs what make.py needs.
        make = f'exec {PYTHON} -I -B {ROOT}/examples/tokens/make.py "$@"'
        with open(self.path("examples/tokens/make.sh"), "w") as f:
            f.write(f"#!/bin/bash\n{make}\n")
        os.chmod(self.path("examples/tokens/make.sh"), 0o755)
        cli.write_stand_in(self.path("annulus"), PYTHON, os.path.join(ROOT, "python", "tokenizer"))

    def run_words(self, words):
        done = subprocess.run(words, cwd=self.folder, env=cli.environment(ANNULUS_SCRIPT=self.path("annulus")),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=cli.LIMIT)
        self.assertEqual(done.returncode, 0, f"{words}\n{done.stdout}{done.stderr}")
        return done.stdout

    def test_commands_of_the_page_run(self):
        outputs = []
        for command in commands():
            words = shlex.split(command)
            if words[0] == ".venv/bin/python":
                words[0] = sys.executable
            for name, more in SMALLER.items():
                if name in words:
                    words += more
            outputs.append(self.run_words(words))
        make, inspect, train, export, sample, python = outputs
        self.assertIn("context      512 positions", inspect)
        self.assertRegex(train, r"done: 12 steps")
        self.assertIn("LlamaForCausalLM, ", python)
        self.assertIn("2,048 positions", python)
        self.assertIn("'rope_type': 'yarn'", python)
        with open(self.path("runs/extend-small-001/metrics.jsonl")) as f:
            losses = [line["loss"] for line in map(json.loads, f) if "loss" in line]
        self.assertLess(losses[-1], losses[0] - 0.05, "nothing was learned")
        # Both generate the most likely text; later on nearly equal logits may lead to different tokens.
        theirs = python.split("\n", 2)[2]
        self.assertEqual(sample[:12], theirs[:12])


if __name__ == "__main__":
    cli.main()
