#!/usr/bin/env python3
"""Holds annulus against the definition by its own conformance suite, with the adapter of examples/conformance: no case fails, is refused
or is not claimed, in each layout on each number of ranks.

    conformance_test.py [--all] TORCH_ROOT      --all: 8 ranks as well, and both dtypes in each layout
"""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
os.environ["ANNULUS_TORCH_LIBRARY"] = os.path.join(os.getcwd(), "python", "ops", "libannulus_torch_wheel.so")

from annulus.testing import conformance  # noqa: E402

ADAPTER = os.path.join("examples", "conformance", "adapters", "annulus_package.py")
LAYOUTS = ("contiguous", "zigzag", "striped")
DTYPES = ("fp32", "bf16")
ALL = "--all" in sys.argv


class ConformanceTest(unittest.TestCase):
    def on(self, size):
        # One rank has all rows in any layout. Otherwise each two of layout, ranks and dtype meet.
        with conformance.Ranks() as ranks:
            for i, layout in enumerate(LAYOUTS if size > 1 else LAYOUTS[:1]):
                dtypes = DTYPES if ALL or size == 1 else DTYPES[(i + size) % 2 :][:1]
                with self.subTest(layout=layout, dtypes=dtypes):
                    outcome = conformance.Suite(f"{ADAPTER}:{layout}", ranks, deadline=60.0).run([size], dtypes)
                    self.assertEqual([(c.case, c.dtype, c.verdict, c.reason) for c in outcome.cells if c.verdict != "ok"], [])
                    cases = 11 + 2 * (size > 1)
                    self.assertEqual(len(outcome.cells), cases * len(dtypes) + 1)
                    compared = {f.tensor for c in outcome.cells for f in c.findings}
                    self.assertEqual(compared, {"out", "lse", "dq", "dk", "dv", "weight_in", "weight_out"})

    def test_1_rank(self):
        self.on(1)

    def test_2_ranks(self):
        self.on(2)

    def test_3_ranks(self):
        self.on(3)

    def test_4_ranks(self):
        self.on(4)

    @unittest.skipUnless(ALL, "8 ranks are for --all")
    def test_8_ranks(self):
        self.on(8)


if __name__ == "__main__":
    torch_python.main()
