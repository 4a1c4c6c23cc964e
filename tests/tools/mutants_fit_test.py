#!/usr/bin/env python3
"""Tests with tools/mutants.py --check that every patch of tests/mutants fits the tree and names tests that exist.

It follows the links among its inputs to the working tree itself, because a patch may touch any file.
"""

import os
import subprocess
import sys

MUTANTS = os.path.realpath(sys.argv[1])

sys.exit(subprocess.run([sys.executable, MUTANTS, "--check"], check=False).returncode)
