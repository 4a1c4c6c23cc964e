#!/usr/bin/env python3
"""Tests the private Slurm with salloc and srun."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "python", "annulus", "testing"))
import namespaces
import slurm as private

private.require()
namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")


class SlurmHarnessTest(unittest.TestCase):
    def test_ranks_start_on_its_nodes(self):
        with private.Slurm(2) as slurm:
            for command in (["salloc", "-Q", "-N", "2", "-n", "4", "mpirun", "hostname"],
                            ["srun", "-Q", "--mpi=pmix", "-N", "2", "-n", "4", "hostname"]):
                done = slurm.run(command, capture_output=True, text=True, timeout=60)
                self.assertEqual((done.returncode, sorted(done.stdout.split())), (0, ["n1", "n1", "n2", "n2"]), done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
