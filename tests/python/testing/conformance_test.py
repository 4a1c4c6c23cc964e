#!/usr/bin/env python3
"""Tests of the conformance suite: a correct ring attention passes, and each planted fault of toy_ring.py is found and named."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.getcwd(), "integration_tests"))
import torch_python  # noqa: E402

torch_python.enter()

from annulus.testing import conformance  # noqa: E402
from annulus.testing.conformance import __main__ as program  # noqa: E402
from annulus.testing.conformance._reproducer import write  # noqa: E402

TOY = os.path.join(HERE, "toy_ring.py")
RANKS = 2


class ConformanceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = conformance.Ranks()
        cls.addClassCleanup(cls.ranks.close)

    def outcome(self, name, cases=None, dtypes=("fp32",), deadline=60.0, ranks=RANKS):
        return conformance.Suite(f"{TOY}:{name}", self.ranks, deadline=deadline).run([ranks], dtypes, cases)

    def expect_wrong(self, name, case, tensors, words, dtype="fp32"):
        outcome = self.outcome(name, [case, "full"], dtypes=("fp32",) if dtype == "fp32" else ("fp32", dtype))
        (cell,) = [c for c in outcome.cells if c.case == case and c.dtype == dtype]
        self.assertEqual(cell.verdict, "wrong", cell)
        found = [f.tensor for f in cell.wrong]
        self.assertEqual(found[: len(tensors)], tensors, cell.reason)
        self.assertIn(words, cell.reason)
        return outcome, cell

    def test_a_correct_ring_passes_everything(self):
        outcome = self.outcome("correct", dtypes=("fp32", "bf16"), ranks=3)
        self.assertEqual([(c.case, c.dtype, c.reason) for c in outcome.cells if c.verdict != "ok"], [])
        self.assertEqual(len(outcome.cells), 27)
        compared = {f.tensor for c in outcome.cells for f in c.findings}
        self.assertEqual(compared, {"out", "lse", "dq", "dk", "dv", "weight_in", "weight_out"})

    def test_a_shifted_diagonal_is_named(self):
        outcome, _ = self.expect_wrong(
            "shifted_diagonal", "causal", ["out", "lse", "dq", "dk", "dv"],
            "the causal diagonal is shifted by one: a query sees the key after its own",
        )
        self.assertEqual([c.verdict for c in outcome.cells if c.case == "full"], ["ok"])

    def test_a_lost_window_is_named(self):
        self.expect_wrong("lost_window", "window", ["out", "lse"], "the window is lost")

    def test_a_late_document_boundary_is_named(self):
        _, cell = self.expect_wrong("late_boundary", "packed documents", ["out", "lse"], "document boundaries are one token too late")
        self.assertRegex(cell.reason, r"out is off by \d[\d.e-]* \(allowed \d[\d.e-]*\) on rank \d, positions \d+")

    def test_a_gradient_averaged_twice_is_named(self):
        _, cell = self.expect_wrong("averaged_twice", "causal", ["dk", "dv", "weight_in"], "averaged over the ranks once too often")
        self.assertIn("it is 0.5 times the gradient", cell.reason)

    def test_a_stale_block_is_named(self):
        self.expect_wrong("stale_block", "causal", ["out"], "the block of ring step 1 is stale: that of the step before is used again")

    def test_sums_in_bf16_are_named(self):
        self.expect_wrong(
            "narrow_sums", "huge scores", ["out", "lse"], "right in fp32: partial sums or statistics are kept in bf16", dtype="bf16"
        )

    def test_verdicts_that_are_not_wrong(self):
        for name, verdict, words in [
            ("refuses", "refused", "NotImplementedError: this attention knows no windows"),
            ("crashes", "crash", "RuntimeError"),
            ("fails_alone", "crash", "on rank 1 alone, while others waited: ValueError: rank 1 does not like this"),
            ("hangs", "hang", "had not returned after 4 s: File"),
            ("changes_inputs", "changes inputs", "k"),
            ("is_random", "non-deterministic", "out"),
        ]:
            with self.subTest(name):
                (cell,) = self.outcome(name, ["window"], deadline=4.0).cells
                self.assertEqual(cell.verdict, verdict, cell)
                self.assertIn(words, cell.reason)

    def test_what_each_call_keeps_is_a_leak(self):
        (cell,) = self.outcome("leaks", ["repeated calls"]).cells
        self.assertEqual(cell.verdict, "leaks", cell)
        self.assertRegex(cell.reason, r"rank 0: 0\.\d MiB of memory more with each call; rank 0: 1\.0 files more with each call")

    def run_reproducer(self, outcome, cell, name):
        """Runs the reproducer of a cell, then with the correct ring in the place of `name`, which passes; returns what it calls wrong."""
        with tempfile.TemporaryDirectory() as folder:
            path = write(outcome, cell, folder)
            with open(path) as file:
                program = file.read()
            self.assertNotIn("import annulus", program)
            env, said = dict(os.environ, PYTHONPATH=os.environ.get("PYTHONPATH", "")), []
            for code in (1, 0):
                done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=env, timeout=240)
                self.assertEqual(done.returncode, code, done.stdout + done.stderr)
                said.append({line.split()[2] for line in done.stdout.splitlines() if "WRONG" in line})
                with open(path, "w") as file:
                    file.write(program.replace(f"{name}(*", "correct(*"))
            self.assertEqual(said[1], set())
            return said[0]

    def test_a_reproducer_repeats_the_failure_without_annulus(self):
        outcome, cell = self.expect_wrong("averaged_twice", "causal", ["dk"], "times the gradient")
        self.assertEqual(self.run_reproducer(outcome, cell, "averaged_twice"), {"dk", "dv", "weight_in"})

    def test_what_only_a_layer_shows_is_found_and_repeated(self):
        outcome, cell = self.expect_wrong(
            "ignored_strides", "grouped heads", ["weight_in", "weight_out"], "through a layer, where q, k and v are views of one projection: "
        )
        self.assertEqual(self.run_reproducer(outcome, cell, "ignored_strides"), {"weight_in", "weight_out"})

    def test_the_program_writes_table_and_reproducers(self):
        with tempfile.TemporaryDirectory() as folder:
            out, words = os.path.join(folder, "report.json"), io.StringIO()
            with contextlib.redirect_stdout(words):
                code = program.main([f"{TOY}:lost_window", "--ranks", "2", "--cases", "window,causal", "--dtypes", "fp32", "--out", out])
            self.assertEqual(code, 1)
            self.assertRegex(words.getvalue(), r"causal +ok\n")
            self.assertRegex(words.getvalue(), r"window +WRONG out lse dq dk dv weight_in weight_out\n")
            with open(out) as file:
                report = json.load(file)
            (wrong,) = [c for c in report["cells"] if c["verdict"] == "wrong"]
            self.assertTrue(os.path.exists(wrong["reproducer"]))
            self.assertEqual((wrong["case"], wrong["ranks"]), ("window", 2))

    def test_an_adapter_that_cannot_be_loaded(self):
        for adapter, words in [(f"{TOY}:missing", "has no attribute 'missing'"), ("nowhere.py:f", "there is no file nowhere.py")]:
            with self.assertRaisesRegex(RuntimeError, words):
                conformance.Suite(adapter, self.ranks).run([RANKS])


if __name__ == "__main__":
    torch_python.main()
