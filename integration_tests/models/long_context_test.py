#!/usr/bin/env python3
"""Runs the short form of examples/long_context/run.sh: every step runs and leaves its files. What the model learns is not
tested."""

import json
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import cli  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
EXAMPLE = "examples/long_context"
cli.LIMIT = 240


class LongContextTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        shutil.copytree(os.path.join(ROOT, EXAMPLE), self.path(EXAMPLE))
        cli.write_stand_in(self.path("annulus"), sys.executable, "none")

    def run_example(self, *words):
        return subprocess.run([self.path(EXAMPLE + "/run.sh"), *words], cwd=self.folder,
                              env=cli.environment(ANNULUS_SCRIPT=self.path("annulus")), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=cli.LIMIT)

    def read(self, name):
        with open(self.path("out/" + name), encoding="utf-8") as f:
            return f.read()

    def test_every_step_runs_and_leaves_its_files(self):
        done = self.run_example("--short", "out")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for model, context in ("before", 256), ("after", 2048):
            results = json.loads(self.read(f"results/{model}.json"))
            self.assertEqual((results["ranks"], results["context"]), (2, context))
            ends = [bucket["end"] for bucket in results["sources"][0]["document_doubling"] if bucket["targets"]]
            self.assertEqual(ends[-1], 2048, "perplexity is measured up to the new length")
            self.assertEqual({cell["length"] for cell in results["tasks"]}, {256, 2048})
            pictures = sorted(os.listdir(self.path("out/results/" + model)))
            self.assertIn("perplexity.svg", pictures)
            self.assertIn("kv.svg", pictures)
        with open(self.path("out/runs/long-001/config.toml"), encoding="utf-8") as f:
            config = f.read()
        self.assertIn('schedule = "ring"', config)
        self.assertIn("documents = true", config)

        measured = [json.loads(line) for line in self.read("measured.jsonl").splitlines()]
        self.assertEqual([line["name"] for line in measured],
                         ["train short", "evaluate before", "export short", "train long", "evaluate after"])
        for line in measured:
            self.assertGreater(line["cpu_seconds"], 0, line)
            self.assertGreater(line["peak_bytes"], 1e6, line)
        summary = self.read("summary.md")
        self.assertTrue(done.stdout.endswith(summary), done.stdout)
        self.assertRegex(summary, r"\| 1,025 to 2,048 +\| [\d,.]+ +\| [\d,.]+ +\|")
        self.assertRegex(summary, r"\| 2,048 +\| after +\|( [01]\.\d\d +\|){6}")
        for text in "text/short", "text/long", "text/held-out":
            self.assertTrue(os.listdir(self.path("out/" + text)))

    def test_an_error_ends_it(self):
        os.mkdir(self.path("out"))
        for words, message in (["--short", "out"], "out exists already"), (["--shrot"], "there is no option --shrot"):
            done = self.run_example(*words)
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn(message, done.stderr)
            self.assertEqual(done.stdout, "")
        os.chmod(self.path("annulus"), 0o644)
        done = self.run_example("--short", "other")
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertFalse(os.path.exists(self.path("other/summary.md")))


if __name__ == "__main__":
    cli.main()
