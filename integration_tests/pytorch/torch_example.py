#!/usr/bin/env python3
"""Runs examples/pytorch/swap.py unchanged, in the Python of the torch that the library was built against."""

import os
import runpy
import sys

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
runpy.run_path("examples/pytorch/swap.py", run_name="__main__")
