#!/usr/bin/env python3
"""Tests examples/conformance/run.py: a peer that is not installed, or cannot be imported, is skipped with its reason, and others run."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.getcwd(), "integration_tests"))
import torch_python  # noqa: E402

torch_python.enter()

RUN = os.path.join("examples", "conformance", "run.py")
MISSING = ("para_attn_package.py:ulysses", "para-attn")
BROKEN = "annulus_package.py:contiguous"  # its library is not there


class FieldTest(unittest.TestCase):
    def test_what_cannot_run_is_skipped_with_its_reason(self):
        adapter, package = MISSING
        try:
            importlib.metadata.version(package)
            self.skipTest(f"{package} is installed")
        except importlib.metadata.PackageNotFoundError:
            pass
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), ANNULUS_TORCH_LIBRARY="/nowhere/libannulus_torch.so")
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, RUN, "--ranks", "1", "--out", folder, "--only", adapter, "--only", BROKEN]
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            with open(os.path.join(folder, "table.md")) as file:
                table = file.read()
            reports = {}
            for name in (adapter, BROKEN):
                with open(os.path.join(folder, name.replace(":", "-") + ".json")) as file:
                    reports[name] = json.load(file)
        self.assertRegex(done.stdout, rf"(?m)^{adapter}: skipped: {package} is not installed$")
        self.assertRegex(done.stdout, rf"(?m)^{BROKEN}: skipped: ImportError: the library of annulus was expected at /nowhere/")
        self.assertEqual({name: set(r) for name, r in reports.items()}, {name: {"adapter", "skipped"} for name in reports})
        self.assertIn(f"{package}, Ulysses, forward: skipped: {package} is not installed\n", table)
        self.assertIn("annulus, contiguous: skipped: ImportError: the library of annulus", table)


if __name__ == "__main__":
    torch_python.main()
