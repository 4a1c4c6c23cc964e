#!/usr/bin/env python3
"""Runs the short form of examples/long_context/run.sh: every step runs and leaves its files. What the model learns is not
tested."""

import importlib.util
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


class SummaryTest(cli.CliTest):
    """The tables of --all, from results with known numbers."""

    def setUp(self):
        super().setUp()
        spec = importlib.util.spec_from_file_location("report", os.path.join(ROOT, EXAMPLE, "report.py"))
        self.report = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.report)

    def write(self, name, *values):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(value) + "\n" for value in values)

    def result(self, name, end, perplexity, exact, loss=1.0):
        self.write(f"results/{name}.json", {
            "sources": [{"document_doubling": [{"end": e, "targets": 1, "loss": loss, "perplexity": perplexity} for e in (1024, end)]}],
            "tasks": [{"length": length, "depth": 0.5, "exact": exact, "trials": 20} for length in (512, 1024)],
            "cpu_seconds": 2, "forward_tokens": 1000000})

    def row(self, lines, first):
        line, = [line for line in lines if line.startswith(f"| {first} ")]
        return [cell.strip() for cell in line.strip("|").split("|")]

    def test_patterns_are_compared_at_one_length(self):
        self.result("before", 4096, 90, 0)
        self.result("after", 4096, 70, 3)
        for ranks, loss in (1, 1.0), (2, 1.25), (4, 1.125):
            self.result(f"ranks-{ranks}", 2048, 2.5, 19, loss)
        self.result("full", 2048, 3, 10)
        self.result("window", 2048, 5, 4)
        self.write("measured.jsonl", *({"name": name, "seconds": 1, "cpu_seconds": 8, "peak_bytes": 5e6}
                                       for name in ("train long", "train full", "train window", "evaluate full", "evaluate window")))
        kinds = ("weights", "gradients", "optimizer", "activations")
        for name in "long", "full", "window":
            self.write(f"runs/{name}-001/metrics.jsonl", {"memory_plan": dict.fromkeys((*kinds, "working", "total"), 1e6)},
                       {"loss": 1, "step": 10, "tokens": 4000000, "ranks": {kind + "_bytes": {"most": 5e5} for kind in kinds}})
        lines = self.report.summary(self.folder)
        self.assertEqual(self.row(lines, "full"), ["full", "8", "2.0", "3.00", "0.50", "0.50"])
        self.assertEqual(self.row(lines, "window"), ["window", "8", "2.0", "5.00", "0.20", "0.20"])
        self.assertEqual(self.row(lines, "train long"), ["train long", "1", "8", "4,000,000", "2", "4.0", "2.0", "5"])
        self.assertIn("On 1, 2 and 4 ranks the losses by position differ by 2.5e-01 at most.", lines)

    def test_other_patterns_take_as_many_operations(self):
        self.write("run/metrics.jsonl", {"loss": 1, "step": 100})
        script = self.path("stand-in")
        with open(script, "w", encoding="utf-8") as f:
            f.write("""#!/bin/sh
case "$*" in
inspect*) echo '{"length": 8, "heads": 1, "flops_per_token": 100, "attention_flops_per_token": 60}' ;;
*causal*) echo '{"pairs": 36}' ;;
*) echo '{"pairs": 9}' ;;
esac
""")
        os.chmod(script, 0o755)
        out = subprocess.run([sys.executable, os.path.join(ROOT, EXAMPLE, "report.py"), "steps", script, self.path("run"), "half", "0.5"],
                             check=True, capture_output=True, text=True).stdout
        self.assertEqual(out, "91\n", "half of 100 steps of 100 operations are 91 of 40 + 60 / 4")


if __name__ == "__main__":
    cli.main()
