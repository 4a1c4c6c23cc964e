#!/usr/bin/env python3
"""Tests that libannulus_torch_wheel.so needs only LibTorch and what LibTorch needs: no MPI, no other library."""

import re
import subprocess
import sys
import unittest

LIBRARY = sys.argv.pop()
# LibTorch's wheel contains libgomp.
MAY_NEED = ["libtorch_cpu", "libc10", "libtorch_cuda", "libc10_cuda", "libcudart", "libgomp"]
MAY_NEED += ["libstdc++", "libm", "libgcc_s", "libc", "libpthread", "librt", "libdl", "ld-linux-x86-64"]


class WheelLibrary(unittest.TestCase):
    def read(self, *options):
        return subprocess.run(["readelf", "-W", *options, LIBRARY], capture_output=True, text=True, check=True).stdout

    def test_needs_nothing_but_libtorch(self):
        needed = re.findall(r"\(NEEDED\).*\[(.*?)\.so", self.read("--dynamic"))
        self.assertIn("libtorch_cpu", needed)
        self.assertEqual([name for name in needed if name not in MAY_NEED], [])

    def test_has_no_symbols_of_mpi(self):
        self.assertEqual(re.findall(r" (?:MPI_|hwloc_|PMIx_)\w+", self.read("--dyn-syms")), [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
