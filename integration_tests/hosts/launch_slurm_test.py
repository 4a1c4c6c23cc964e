#!/usr/bin/env python3
"""Tests `annulus launch` in Slurm's allocations, and plain srun, on a private Slurm of two nodes: it takes nodes and tasks
from the allocation, a job that is cancelled finishes its step and keeps a checkpoint, and one near its time limit is asked to."""

import glob
import os
import re
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "python", "annulus", "testing"))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import cli
import namespaces
import slurm as private

private.require()
namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")


class OnSlurm(unittest.TestCase):
    DOMAIN = ""  # what the names of nodes end in

    @classmethod
    def setUpClass(cls):
        cls.slurm = private.Slurm(2, domain=cls.DOMAIN)
        cls.slurm.__enter__()
        cls.addClassCleanup(cls.slurm.__exit__)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write_run(1000000)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write_run(self, steps):
        cli.write_tiny_run(self.folder, steps, checkpoint={"every": 0})

    def read(self, name):
        try:
            with open(self.path(name)) as f:
                return f.read()
        except FileNotFoundError:
            return ""

    def run_command(self, *command):
        done = self.slurm.run(command, cwd=self.folder, env=cli.environment(), capture_output=True, text=True, timeout=cli.LIMIT)
        return done.returncode, done.stdout, done.stderr

    def submit(self, *options, command):
        """Submits a job of two nodes and four tasks that executes this command; returns its number."""
        with open(self.path("job.sh"), "w") as f:
            f.write(f"#!/bin/bash\nexec {command} 2>&1\n")
        code, out, err = self.run_command("sbatch", "--parsable", "-N", "2", "-n", "4", "-o", "job.out", *options, "job.sh")
        self.assertEqual(code, 0, err)
        return out.strip()

    def wait_until(self, what, true):
        deadline = time.monotonic() + 2 * cli.LIMIT
        while not true():
            self.assertLess(time.monotonic(), deadline, f"{what}: {self.read('job.out')}")

    def wait_for_a_step(self):
        self.wait_until("no step was done", lambda: re.search(r"(?m)^step +\d", self.read("job.out")))

    def wait_for_the_end(self, job):
        self.wait_until("it does not end", lambda: not self.run_command("squeue", "-h", "-j", job)[1].strip())
        return self.read("job.out")

    def assert_kept(self, said):
        self.assertEqual(len(glob.glob(self.path("runs/tiny-001/checkpoints/step-*/manifest.json"))), 1, said)
        self.assertRegex(said, r"stopped after step [\d,]+ of [\d,]+; checkpoint written")


class LaunchSlurmTest(OnSlurm):
    def test_launch_takes_nodes_and_tasks_from_salloc(self):
        code, out, err = self.run_command("salloc", "-Q", "-N", "2", "-n", "3", cli.ANNULUS, "launch", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(re.findall(r"rank \d of 3 on \S+", out)),
                         ["rank 0 of 3 on n1", "rank 1 of 3 on n1", "rank 2 of 3 on n2"])
        code, out, err = self.run_command("salloc", "-Q", "-N", "2", cli.ANNULUS, "launch", "-n", "2", "selftest", "exchange")
        self.assertEqual((code, out), (0, "2 ranks exchanged over mpi: all arrived\n"), err)
        code, _, err = self.run_command("salloc", "-Q", "-N", "2", "-n", "2", cli.ANNULUS, "launch", "-n", "3", "selftest", "print")
        self.assertEqual(code, 2, err)
        self.assertIn("Slurm's allocation (SLURM_JOB_NODELIST): 3 ranks do not fit into the 2 slots", err)

    def test_srun_starts_ranks_itself(self):
        self.write_run(2)
        code, out, err = self.run_command("srun", "-Q", "--mpi=pmix", "-N", "2", "-n", "2", cli.ANNULUS, "train", "config.toml")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"host n1: rank 0 .*\n +host n2: rank 1 ")
        self.assertRegex(out, r"(?m)^step +2\b")

    def test_cancelled_job_keeps_a_checkpoint(self):
        job = self.submit(command=f"{cli.ANNULUS} launch train config.toml")
        self.wait_for_a_step()
        self.assertEqual(self.run_command("scancel", job)[0], 0)
        said = self.wait_for_the_end(job)
        self.assertIn("annulus: Terminated: the ranks finish their step and stop", said)
        self.assertIn("annulus: exit code 143", said)
        self.assert_kept(said)

    def test_job_near_its_time_limit_is_asked_to_stop(self):
        # Slurm checks every 30 s and sends the signal up to 30 s early: 15 to 45 s after the start. So long ranks that train
        # would take all cores; that they keep a checkpoint on this signal is tested in faults/requests_test.py.
        job = self.submit("--time=2", "--signal=B:USR1@75", command=f"{cli.ANNULUS} launch selftest stop")
        said = self.wait_for_the_end(job)
        self.assertIn("annulus: User defined signal 1: the ranks finish their step and stop", said)
        for rank in range(4):
            self.assertIn(f"rank {rank} stops", said)
        self.assertIn("annulus: exit code 138", said)


class FullNamesTest(OnSlurm):
    """An allocation whose nodes have names with dots, which Open MPI would cut and then not find in the allocation."""

    DOMAIN = ".cluster.example"

    def test_launch_takes_full_names_from_salloc(self):
        code, out, err = self.run_command("salloc", "-Q", "-N", "2", "-n", "2", cli.ANNULUS, "launch", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(re.findall(r"rank \d of 2 on \S+", out)),
                         ["rank 0 of 2 on n1.cluster.example", "rank 1 of 2 on n2.cluster.example"])


if __name__ == "__main__":
    cli.main()
