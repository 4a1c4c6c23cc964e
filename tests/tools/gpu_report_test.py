#!/usr/bin/env python3
"""Tests the report that tools/gpu_bundle/report.py writes from files of run.sh; no GPU has made them."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

REPORT = os.path.abspath(sys.argv.pop(1))

GTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="3" failures="%d" name="AllTests"><testsuite name="A" tests="3">
  <testcase name="good" status="run" result="completed" classname="A" />
  <testcase name="left" status="run" result="skipped" classname="A">
    <skipped message="x"><![CDATA[t/a.cc:3
no second GPU]]></skipped></testcase>
  %s
</testsuite></testsuites>
"""
BAD = '<testcase name="bad" status="run" result="completed" classname="A"><failure message="m"><![CDATA[t/a.cc:4\nwhy]]></failure></testcase>'


class GpuReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        for name in ("logs", "xml", "bench"):
            os.mkdir(os.path.join(self.folder.name, name))

    def tearDown(self):
        self.folder.cleanup()

    def write(self, name, text):
        with open(os.path.join(self.folder.name, name), "w") as f:
            f.write(text)

    def steps(self, *rows):
        self.write("steps.tsv", "".join("\t".join(map(str, row)) + "\n" for row in rows))

    def run_report(self):
        done = subprocess.run([sys.executable, REPORT, self.folder.name], capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        with open(os.path.join(self.folder.name, "report.json")) as f:
            found = json.load(f)
        with open(os.path.join(self.folder.name, "report.txt")) as f:
            self.assertTrue(done.stdout.startswith(f.read()))
        return done.returncode, found, done.stdout

    def results(self, found, result):
        return {r["name"]: r["reason"] for r in found["results"] if r["result"] == result}

    def test_missing_gpu_counts_as_skipped(self):
        self.steps(["start", "start", "plain", "skipped", 0, "no GPU"])
        code, found, text = self.run_report()
        self.assertEqual(code, 0)
        self.assertEqual((found["passed"], found["failed"], found["skipped"]), (0, 0, 1))
        self.assertTrue(text.splitlines()[-2].startswith("0 passed, 0 failed, 1 skipped"), text)

    def test_counts_cases_and_does_not_fail_for_missed_goals(self):
        self.steps(["t", "tests", "gtest", 0, 3, ""], ["bench-dense", "bench", "bench", 0, 9, ""],
                   ["bench-longest", "bench", "bench", "left out", 0, "no time left of 10 minutes"])
        self.write("xml/t.xml", GTEST % (0, ""))
        figure = {"name": "dense forward 8192", "unit": "TFLOP/s", "value": 612.5, "median": 610}
        line = {"bench": "gpu", "part": "dense", "device": "NVIDIA H200", "versions": "CUDA 13.0", "figures": [figure]}
        self.write("logs/bench-dense.out", "a table\n%s\n{broken\n" % json.dumps(line))
        ratio = {"name": "gpu/dense forward 8192", "settings": "s", "ratio": 1.02, "low": 1.0, "high": 1.1, "goal": 1.031}
        missed = dict(ratio, name="gpu/dense backward 8192", ratio=1.2)
        self.write("bench/dense.json", json.dumps({"ratios": [ratio, missed, {"name": "x", "ratio": 3.0}]}))
        self.write("facts.tsv", "gpus\t1\ncannot run\t\n")
        code, found, text = self.run_report()
        self.assertEqual(code, 0)
        self.assertEqual((found["passed"], found["failed"], found["skipped"], found["left_out"]), (2, 0, 1, 1))
        self.assertEqual((found["goals_met"], found["goals_missed"]), (1, 1))
        self.assertEqual(self.results(found, "skipped"), {"t A.left": "no second GPU"})
        self.assertEqual(found["figures"][0]["value"], 612.5)
        self.assertEqual(found["facts"]["measured on"], "NVIDIA H200")
        self.assertIn("2 passed, 0 failed, 1 skipped, 1 left out; goals: 1 met, 1 missed", text)
        self.assertRegex(text, r"dense backward 8192 +1\.200 .* 1\.031 MISSED")

    def test_failures_have_their_output(self):
        self.steps(["t", "tests", "gtest", 1, 3, ""], ["crash", "tests", "gtest", 139, 1, ""],
                   ["slow", "tests", "gtest", 124, 240, "did not end within 240 s"], ["quiet", "tests", "gtest", 0, 1, ""],
                   ["bench-ring", "bench", "bench", 1, 1, ""])
        self.write("xml/t.xml", GTEST % (1, BAD))
        self.write("logs/crash.out", "[ RUN      ] B.one\n[       OK ] B.one\n[ RUN      ] B.two\n")
        self.write("logs/bench-ring.err", "annulus: [bench] the ring's results are 3 from the whole call's\n")
        code, found, text = self.run_report()
        self.assertEqual(code, 1)
        failed = self.results(found, "failed")
        self.assertEqual(set(failed), {"t A.bad", "crash", "slow", "quiet", "bench-ring"})
        self.assertIn("why", failed["t A.bad"])
        self.assertIn("segmentation fault in B.two", failed["crash"])
        self.assertIn("did not end within 240 s", failed["slow"])
        self.assertIn("the ring's results are 3", failed["bench-ring"])
        self.assertIn("1 passed, 5 failed, 1 skipped", text)

    def test_crash_after_the_last_case_names_none(self):
        self.steps(["crash", "tests", "gtest", 139, 1, ""])
        self.write("logs/crash.out", "[ RUN      ] B.one\n[       OK ] B.one\n")
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
                 {"bench": "gpu", "ratios": [{"name": "r", "ratio": None}, {"name": "kept", "ratio": 1.5, "goal": 1.4, "low": "a"}]}]
        self.write("logs/bench-dense.out", "".join(json.dumps(l) + "\n" for l in lines))
        self.write("logs/flex-attention.out", '{"figures": null}\n{"figures": [{"name": "flex", "value": 1.0}]}\n')
        self.write("bench/dense.json", '{"ratios": [{"name": "kept", "ratio": 9}, {"name": "later", "ratio": 1}, {"ratio": "x"}, 7]}')
        self.write("bench/ring.json", "[1]")
        self.write("bench/quickstart.jsonl", '{"tokens_per_second": "x"}\n{"tokens_per_second": 5, "loss": null}\n')
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

    def test_scaling_is_relative_to_one_gpu(self):
        self.steps()
        for n, speed in ((1, 1000), (2, 1900)):
            lines = [{"step": 5, "loss": 5.5, "tokens_per_second": 1}, {"step": 10, "loss": 5.0, "tokens_per_second": speed},
                     {"validation_loss": 5}]
            self.write("bench/scaling-%d.jsonl" % n, "".join(json.dumps(o) + "\n" for o in lines))
        _, found, text = self.run_report()
        self.assertEqual([(s["gpus"], s["over_one"]) for s in found["scaling"]], [(1, 1.0), (2, 1.9)])
        self.assertIn("95.0% of ideal", text)


if __name__ == "__main__":
    unittest.main()
