#!/usr/bin/env python3
"""Ranks, mpirun and the launcher that are killed: the job ends, says why, and leaves no process and no memory behind."""

import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "annulus", "testing"))
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")
import faulty_jobs as faults
import cli

MIB = 1 << 20


class EndedTest(faults.FaultTest):
    def running(self):
        job = self.train(tiny={"checkpoint": {"every": 1}})
        job.wait_for_step(3)
        return job

    def nothing_is_left(self, job, fault):
        begin = time.monotonic()
        while job.processes():
            self.assertLess(time.monotonic() - begin, 10, "processes are left")
            job.read(0.02)
        print(f"\n{fault}: no process is left after {time.monotonic() - begin:.1f} s", flush=True)
        self.assert_nothing_left(*faults.NAMES)

    def assert_key_is_hidden(self, job):
        """No command line on any host has the key with which ranks connect."""
        pid, _ = job.rank(1)
        name = b"ANNULUS_LAUNCHER="
        key = next(v for v in faults.environment_of(pid) if v.startswith(name))[len(name):].split(b"/")[0]
        self.assertEqual(len(key), 32)
        for other in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{other}/cmdline", "rb") as f:
                    self.assertNotIn(key, f.read(), other)
            except OSError:
                pass

    def test_launcher_killed(self):
        job = self.running()
        self.assert_key_is_hidden(job)
        job.process.kill()
        self.nothing_is_left(job, "launcher killed")

    def test_mpirun_killed(self):
        job = self.running()
        for pid in job.processes():
            with open(f"/proc/{pid}/comm") as f:
                if f.read().strip() == "mpirun":
                    os.kill(pid, signal.SIGKILL)
        self.named(job, "mpirun killed", r"annulus: mpirun was ended by signal 9", 10)
        self.nothing_is_left(job, "mpirun killed")
        self.assertEqual(job.finish(), 137, job.text)

    def test_rank_aborts(self):
        job = self.launch("selftest", "kill", "--rank", "1", "--signal", str(int(signal.SIGABRT)))
        self.named(job, "rank aborts", r"annulus: rank 1 was ended by signal 6 \(Aborted\)", 10)
        self.assertEqual(job.finish(), 134, job.text)
        self.assert_nothing_left(*faults.NAMES)

    def test_rank_killed_for_memory(self):
        """A rank that is the largest process of a control group when another one asks for more than it may have."""
        job = self.running()
        pid = job.stop_at(1, "layer forward", 3)
        faults.MemoryGroup(self, MIB).end(pid)
        self.named(job, "killed for memory", "annulus: rank 1 was ended by signal 9.*lack of memory", 10)
        self.assertEqual(job.finish(), 137, job.text)
        self.assert_nothing_left(*faults.NAMES)

    def test_rank_killed_for_memory_while_it_begins(self):
        """A rank whose control group has too little memory for the model."""
        group = faults.MemoryGroup(self, 256 * MIB).path
        mpirun = self.mpirun_with(f"test $OMPI_COMM_WORLD_RANK != 1 || echo $$ > {group}/cgroup.procs")
        job = self.train(tiny={"model": {"dim": 1024, "layers": 4}, "optimizer": {"shard": 0}}, MPIRUN=mpirun,
                         ANNULUS_MEMORY_CHECK="0")
        self.named(job, "killed for memory", "annulus: rank 1 was ended by signal 9.*lack of memory", cli.LIMIT)
        self.assertEqual(job.finish(), 137, job.text)


if __name__ == "__main__":
    cli.main()
