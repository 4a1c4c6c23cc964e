#!/usr/bin/env python3
"""Runs a program with torchrun, in the Python of the torch that the library was built against, and checks that its output
contains some words.

    torchrun.py PROCESSES WORDS PROGRAM [ARGUMENT...] TORCH
"""

import os
import subprocess
import sys

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()

processes, words, program, *arguments = sys.argv[1:]
if "llama" in program:
    torch_python.need("transformers")
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
done = subprocess.run([*torchrun, program, *arguments], stdout=subprocess.PIPE, text=True)
print(done.stdout)
if done.returncode != 0 or (done.stdout.count(words) != 1 and "SKIPPED" not in done.stdout):
    sys.exit(f"torchrun ended with {done.returncode}; expected once: {words}")
