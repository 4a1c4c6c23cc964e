#!/usr/bin/env python3
"""Tests the report that tools/gpu_bundle/report.py writes from files of run.sh; no GPU has made them."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest

REPORT, DOCUMENT = [os.path.abspath(sys.argv.pop(1)) for _ in range(2)]

GOOD = """[==========] Running 2 tests from 1 test suite.
[ RUN      ] A.good
operators: cudnn 12, flash2 3
[       OK ] A.good (3 ms)
[ RUN      ] A.left
t/a.cc:3: Skipped
no second GPU

[  SKIPPED ] A.left (0 ms)
[==========] 2 tests from 1 test suite ran. (3 ms total)
"""
BAD = """[==========] Running 2 tests from 1 test suite.
[ RUN      ] A.good
[       OK ] A.good (3 ms)
[ RUN      ] A.bad
t/a.cc:4: Failure
why
[  FAILED  ] A.bad (1 ms)
[==========] 2 tests from 1 test suite ran. (4 ms total)
[  FAILED  ] 1 test, listed below:
[  FAILED  ] A.bad
"""


class GpuReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.files, self.journal = {}, ["bundle\tx", "call\t2026-11-25T01:02:03Z"]

    def tearDown(self):
        self.folder.cleanup()

    def write(self, name, text):
        """Writes a file of details.tar.gz: logs/STEP.out, for example."""
        self.files[re.sub(r"^logs/(.*)\.(out|err)$", r"logs/\1.1.\2", name)] = text

    def facts(self, **facts):
        self.journal += ["fact\t%s\t%s" % item for item in facts.items()]

    def steps(self, *rows):
        for name, part, kind, result, seconds, reason in rows:
            if result not in ("skipped", "left out"):
                self.journal.append("\t".join(["step", name, "1", part, kind, "began", "0", ""]))
            self.journal.append("\t".join(["step", name, "1", part, kind, str(result), str(seconds), reason]))

    def run_report(self):
        with open(os.path.join(self.folder.name, "journal.tsv"), "w") as f:
            f.write("".join(line + "\n" for line in self.journal))
        with tarfile.open(os.path.join(self.folder.name, "details.tar.gz"), "w:gz") as tar:
            for name, text in self.files.items():
                info = tarfile.TarInfo("./" + name)
                info.size = len(text.encode())
                tar.addfile(info, io.BytesIO(text.encode()))
        done = subprocess.run([sys.executable, REPORT, self.folder.name], capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        with open(os.path.join(self.folder.name, "report.json")) as f:
            found = json.load(f)
        with open(os.path.join(self.folder.name, "report.txt")) as f:
            return done.returncode, found, f.read()

    def results(self, found, result):
        return {r["name"]: r["reason"] for r in found["results"] if r["result"] == result}

    def test_missing_gpu_counts_as_skipped(self):
        self.steps(["start", "start", "plain", "skipped", 0, "no GPU"])
        code, found, text = self.run_report()
        self.assertEqual(code, 0)
        self.assertEqual((found["passed"], found["failed"], found["skipped"]), (0, 0, 1))
        self.assertEqual(text.splitlines()[-1], "0 passed, 0 failed, 1 skipped")

    def test_counts_cases_and_does_not_fail_for_missed_goals(self):
        self.steps(["t", "tests", "gtest", 0, 3, ""], ["bench-dense", "bench", "bench", 0, 9, ""],
                   ["bench-longest", "bench", "bench", "left out", 0, "no time left of 10 minutes"])
        self.write("logs/t.out", GOOD)
        figure = {"name": "dense forward 8192", "unit": "TFLOP/s", "value": 612.5, "median": 610, "operators": "cudnn"}
        ratio = {"name": "gpu/dense forward 8192", "settings": "s", "ratio": 1.02, "low": 1.0, "high": 1.1, "goal": 1.031}
        missed = dict(ratio, name="gpu/dense backward 8192", ratio=1.2)
        line = {"bench": "gpu", "part": "dense", "device": "NVIDIA H200", "versions": "CUDA 13.0", "figures": [figure],
                "ratios": [ratio, missed, {"name": "x", "ratio": 3.0}]}
        self.write("logs/bench-dense.out", "a table\n%s\n{broken\n" % json.dumps(line))
        self.facts(gpus=1, cannot="")
        code, found, text = self.run_report()
        self.assertEqual(code, 0)
        self.assertEqual((found["passed"], found["failed"], found["skipped"], found["left_out"]), (2, 0, 1, 1))
        self.assertEqual((found["goals_met"], found["goals_missed"]), (1, 1))
        self.assertEqual(self.results(found, "skipped"), {"t A.left": "no second GPU"})
        self.assertEqual(found["figures"][0]["value"], 612.5)
        self.assertEqual(found["facts"]["measured on"], "NVIDIA H200")
        self.assertEqual(found["operators"], {"cudnn": 12, "flash2": 3})
        self.assertIn("2 passed, 0 failed, 1 skipped, 1 left out; goals: 1 met, 1 missed", text)
        self.assertRegex(text, r"dense backward 8192 +1\.200 .* 1\.031 MISSED")

    def test_failures_have_their_output(self):
        self.steps(["t", "tests", "gtest", 1, 3, ""], ["crash", "tests", "gtest", 139, 1, ""],
                   ["slow", "tests", "gtest", 124, 240, "did not end within 240 s"], ["quiet", "tests", "gtest", 0, 1, ""],
                   ["bench-ring", "bench", "bench", 1, 1, ""])
        self.write("logs/t.out", BAD)
        self.write("logs/crash.out", "[ RUN      ] B.one\n[       OK ] B.one (1 ms)\n[ RUN      ] B.two\n")
        self.write("logs/bench-ring.err", "annulus: [bench] the ring's results are 3 from the whole call's\n")
        code, found, text = self.run_report()
        self.assertEqual(code, 1)
        failed = self.results(found, "failed")
        self.assertEqual(set(failed), {"t A.bad", "crash", "slow", "quiet", "bench-ring"})
        self.assertIn("why", failed["t A.bad"])
        self.assertIn("segmentation fault in B.two", failed["crash"])
        self.assertIn("did not end within 240 s", failed["slow"])
        self.assertIn("the ring's results are 3", failed["bench-ring"])
        self.assertIn("2 passed, 5 failed, 0 skipped", text)

    def test_a_message_keeps_its_cause_before_a_stack_and_what_follows(self):
        frames = "".join("frame #%d: c10::Error::Error() + 0x8 (0x7f in /torch/lib/libc10.so)\n" % n for n in range(25))
        refused = "".join("refused so far: cudnn, shape %d\n" % n for n in range(20))
        threw = "a.cc:9: Failure\nC++ exception with description \"CUDA error: the cause\nException raised from f at b.cpp:3\n%s\" thrown\n"
        self.steps(["t", "tests", "gtest", 1, 3, ""], ["attend-check", "operators", "plain", 1, 1, ""],
                   ["job", "others", "script", 1, 1, ""], ["ranks", "others", "mpi", 1, 1, ""])
        self.write("logs/t.out", "[==========] Running 1 test from 1 test suite.\n[ RUN      ] A.bad\n" + threw % frames +
                   "".join("more %d\n" % n for n in range(30)) + refused + "operators: cudnn 2\n[  FAILED  ] A.bad (1 ms)\n"
                   "[==========] 1 test from 1 test suite ran. (4 ms total)\n")
        self.write("logs/attend-check.err", "annulus: [kernel] the cause\n" + frames)
        self.write("logs/attend-check.out", "a line of output\n")
        self.write("logs/job.err", "test_a ... ok\n" * 20 + "\n=====\nFAIL: test_b (ranks=1)\nTraceback\nthe cause\n" + "more\n" * 30 + "FAILED\n")
        self.write("logs/ranks.err", "[1,0]<stderr>:the cause\n" + frames.replace("frame", "[1,0]<stderr>:frame") + "mpirun says\n" * 12)
        _, found, _ = self.run_report()
        failed = self.results(found, "failed")
        for name, message in failed.items():
            self.assertIn("the cause", message, name)
            self.assertNotIn("frame #", message, name)
            self.assertLess(len(message.splitlines()), 18, message)
        self.assertNotIn("refused", failed["t A.bad"])
        self.assertTrue(failed["t A.bad"].endswith("more 3\n...\nmore 27\nmore 28\nmore 29\noperators: cudnn 2"), failed["t A.bad"])
        self.assertIn("a line of output", failed["attend-check"])
        self.assertIn("FAIL: test_b (ranks=1)\nTraceback", failed["job"])

    def test_crash_after_the_last_case_names_none(self):
        self.steps(["crash", "tests", "gtest", 139, 1, ""])
        self.write("logs/crash.out", "[ RUN      ] B.one\n[       OK ] B.one (1 ms)\n")
        _, found, _ = self.run_report()
        self.assertTrue(self.results(found, "failed")["crash"].startswith("segmentation fault\n"), found)

    def test_step_can_skip_itself(self):
        self.steps(["flex-attention", "bench", "flex", 0, 1, ""], ["ranks", "tests", "mpi", 0, 1, ""])
        self.write("logs/flex-attention.out", "SKIPPED: torch finds no GPU\n")
        _, found, _ = self.run_report()
        self.assertEqual(self.results(found, "skipped"), {"flex-attention": "torch finds no GPU"})
        self.assertIn("ranks", self.results(found, "passed"))

    def test_malformed_entries_do_not_affect_others(self):
        self.steps(["bench-dense", "bench", "bench", 0, 9, ""], ["torn", "tests", "plain", "x", 1, ""],
                   ["flex-attention", "bench", "flex", 0, 1, ""], ["fine", "tests", "plain", 0, 1, ""])
        good = {"name": "good", "unit": "s", "value": 2}
        lines = [{"bench": "gpu"}, {"bench": "gpu", "part": "dense", "figures": 3}, {"bench": "gpu", "figures": [1, {"name": "x"}, good]},
                 {"bench": "gpu", "ratios": [{"name": "r", "ratio": None}, {"name": "kept", "ratio": 1.5, "goal": 1.4, "low": "a"}]},
                 {"bench": "gpu", "ratios": [{"name": "later", "ratio": 1}, {"ratio": "x"}, 7]}]
        self.write("logs/bench-dense.out", "[1]\n" + "".join(json.dumps(l) + "\n" for l in lines))
        flex = [{"figures": None}, {"figures": [{"name": "flex", "value": 1.0}]}]
        self.write("logs/flex-attention.out", "".join(json.dumps(dict(l, bench="flex_attention")) + "\n" for l in flex))
        self.write("metrics/quickstart.jsonl", '{"tokens_per_second": "x"}\n{"tokens_per_second": 5, "loss": null}\n')
        code, found, text = self.run_report()
        self.assertEqual(code, 1)
        self.assertEqual(set(self.results(found, "failed")), {"torn"})
        self.assertIn("cannot be read", self.results(found, "failed")["torn"])
        self.assertEqual([f["name"] for f in found["figures"]], ["good", "flex"])
        self.assertEqual([(r["name"], r["ratio"], r["met"]) for r in found["ratios"]], [("kept", 1.5, False), ("later", 1, None)])
        self.assertEqual(found["training"][0]["tokens_per_second"], 5)
        self.assertIn("1.500   1.500 to 1.500   1.400 MISSED", text)

    def test_keeps_figures_of_a_part_that_failed_later(self):
        self.steps(["bench-dense", "bench", "bench", 1, 9, ""])
        first = {"bench": "gpu", "part": "dense", "device": "d", "versions": "v",
                 "figures": [{"name": "dense forward 8192", "unit": "TFLOP/s", "value": 600, "median": 590}],
                 "ratios": [{"name": "gpu/dense forward 8192", "ratio": 1.01, "goal": 1.031}]}
        self.write("logs/bench-dense.out", json.dumps(first) + "\n")
        self.write("logs/bench-dense.err", "annulus: out of memory\n")
        code, found, _ = self.run_report()
        self.assertEqual((code, len(found["figures"]), found["goals_met"]), (1, 1, 1))

    def test_clocks_are_those_under_load(self):
        self.steps()
        self.write("gpus.csv", "index, name, driver_version\n0, NVIDIA H200, 580.1\n")
        self.write("clocks.csv", "0, 345, 3201, 30, 75\n0, 1980, 3201, 60, 690\n0, 1755, 3201, 65, 700\nbroken\n")
        _, found, text = self.run_report()
        self.assertEqual(found["gpus"][0]["name"], "NVIDIA H200")
        self.assertEqual((found["clocks"]["0"]["sm_mhz_least"], found["clocks"]["0"]["readings"]), (1755, 2))
        self.assertIn("1755 to 1980 MHz", text)
        self.files["clocks.csv"] = "call a\n%scall b\n0, 1600, 3201, 60, 690\n" % self.files["clocks.csv"]
        _, found, _ = self.run_report()
        self.assertEqual({gpu: c["sm_mhz_least"] for gpu, c in found["clocks"].items()}, {"0": 1755, "0, call 2": 1600})

    def test_scaling_is_relative_to_one_gpu(self):
        self.steps()
        for n, speed in ((1, 1000), (2, 1900)):
            lines = [{"step": 5, "loss": 5.5, "tokens_per_second": 1}, {"step": 10, "loss": 5.0, "tokens_per_second": speed},
                     {"validation_loss": 5}]
            self.write("metrics/scaling-%d.jsonl" % n, "".join(json.dumps(o) + "\n" for o in lines))
        _, found, text = self.run_report()
        self.assertEqual([(s["gpus"], s["over_one"]) for s in found["scaling"]], [(1, 1.0), (2, 1.9)])
        self.assertIn("95.0% of ideal", text)

    # ---- The tables for docs/performance.md.

    def tables(self):
        self.run_report()
        done = subprocess.run([sys.executable, REPORT, self.folder.name, "--table"], capture_output=True, text=True, check=True)
        return done.stdout

    @staticmethod
    def cells(text):
        rows = [[c.strip() for c in line.strip("| \n").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
        return rows

    def bench(self, name, part, device="NVIDIA H200", **line):
        self.steps([name, part, "bench", 0, 1, ""])
        self.write("logs/%s.out" % name, json.dumps(dict({"bench": "gpu", "part": part, "device": device, "versions": "CUDA 13.0"}, **line)))

    def test_the_table_is_that_of_the_document(self):
        with open(DOCUMENT) as f:
            section = f.read().split("\n## On a GPU\n")[1].split("\n## ")[0]
        strip = lambda text: [line.rsplit(" | ", 1)[0] for line in text.splitlines() if line.startswith("|")]
        self.assertEqual(strip(section), strip(self.tables()))

    def test_figures_stand_in_the_table_with_their_operators(self):
        figure = lambda name, unit, value, **more: dict({"name": name, "unit": unit, "value": value, "median": value}, **more)
        self.bench("bench-dense", "dense", figures=[figure("dense forward 8192", "TFLOP/s", 612.5, operators="cudnn")],
                   ratios=[{"name": "gpu/dense forward 8192", "ratio": 1.02, "low": 1.0, "high": 1.1, "goal": 1.031},
                           {"name": "gpu/dense backward 8192", "ratio": 0.9, "goal": 1.031,
                            "invalid": "the executor computed with flash2, the baseline with cudnn"}])
        self.bench("bench-patterns", "patterns", figures=[
            figure("window 4096 forward", "s", 0.005, operators="flash2"), figure("window 4096 forward, over share", "ratio", 1.5),
            figure("window 4096, off the oracle", "relative", 0.004)])
        self.steps(["flex-attention", "flex", "flex", 0, 1, ""])
        self.write("logs/flex-attention.out", json.dumps({"bench": "flex_attention", "device": "NVIDIA H200", "figures": [
            figure("FlexAttention, window 4096 forward", "s", 0.006)]}))
        kinds = ["planned " + k for k in ("weights", "gradients", "optimizer", "activations", "working memory")]
        self.bench("bench-train", "train", figures=[
            figure("training, MFU", "share", 0.52), figure("training step", "s", 2.5, operators="cudnn"),
            *(figure("training, " + k, "GiB", i + 1.0) for i, k in enumerate(kinds)), figure("training, planned memory", "GiB", 15.0)])
        self.bench("bench-longest", "longest", figures=[figure("longest 65536", "s", 3), figure("longest 131072", "s", 9)])
        text = self.tables()
        self.assertIn("| 1.020 (1.000 to 1.100), met; 612 TFLOP/s by cudnn |", text)
        self.assertIn("| INVALID, 0.900: the executor computed with flash2, the baseline with cudnn |", text)
        self.assertIn("| correct (4.0e-03); forward 5.00 ms by flash2, 1.50 of its share, FlexAttention 6.00 ms |", text)
        self.assertIn("| 0.520, met; 2.500 s a step; by cudnn |", text)
        self.assertIn("| 131,072 tokens; 9.0 s a step |", text)  # cut off before a longer one failed
        self.assertIn("| training step | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 15.00 |", text)
        _, found, _ = self.run_report()
        self.assertEqual((found["goals_met"], found["goals_missed"], found["invalid"]), (1, 0, 1))

    def test_figures_of_two_devices_are_kept_apart(self):
        figure = {"name": "dense forward 8192", "unit": "TFLOP/s", "value": 500, "median": 500}
        self.bench("bench-dense", "dense", device="NVIDIA H100 80GB HBM3", figures=[figure])
        self.files["logs/bench-dense.2.out"] = self.files["logs/bench-dense.1.out"].replace("H100 80GB HBM3", "H200").replace("500", "600")
        self.journal.append("step\tbench-dense\t2\tdense\tbench\tbegan\t0\t")
        self.journal.append("step\tbench-dense\t2\tdense\tbench\t0\t5\t")
        text = self.tables()
        self.assertEqual([line.split(",")[1].strip() for line in text.splitlines() if line.startswith("`run.sh`")],
                         ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
        self.assertEqual(text.count("500 TFLOP/s") + text.count("600 TFLOP/s"), 2)


if __name__ == "__main__":
    unittest.main()
