#!/usr/bin/env python3
"""Every patch of tests/mutants fits the tree as it is, and the tests that it names are there (tools/mutants.py --check).

It reads the working tree itself, which the links among its inputs lead to: a patch may touch any file.
"""

import os
import subprocess
import sys

MUTANTS = os.path.realpath(sys.argv[1])

sys.exit(subprocess.run([sys.executable, MUTANTS, "--check"], check=False).returncode)
