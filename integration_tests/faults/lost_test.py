#!/usr/bin/env python3
"""Hosts, daemons and cables that are lost are named by the launcher, and nothing is left on any host."""

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

SILENT = r"annulus: host host2 \(rank 1\) does not answer any more: it is down, or the network between it and this host is"


class LostTest(faults.FaultTest):
    def running(self, *args):
        job = self.train(*args, tiny={"checkpoint": {"every": 1}})
        job.wait_for_step(3)
        return job

    def ends(self, job, code=6):
        self.assertEqual(job.finish(), code, job.text)
        self.assertIn("to continue from the checkpoint of step", job.text["err"])

    def ends_on_both_sides(self, job):
        """A host that is cut off ends its ranks by itself, a little later than the launcher ends the others."""
        begin = time.monotonic()
        while job.process.poll() is None:
            job.read(0.05)
            self.assertLess(time.monotonic() - begin, 20, job.text)
        self.assertEqual(job.process.returncode, 6, job.text)
        while job.processes():
            self.assertLess(time.monotonic() - begin, 20, "processes are left on the host that was cut off")
            time.sleep(0.05)
        self.assert_nothing_left(*faults.NAMES)

    def test_host_lost(self):
        job = self.running()
        self.hosts.kill("host2")
        self.named(job, "host lost", r"annulus: host host2 is lost: rank 1 and the watch of the host ended there at once", 10)
        self.ends(job)
        self.assert_nothing_left("host1")

    def test_daemon_lost(self):
        job = self.running()
        pid, _ = job.rank(1)
        with open(f"/proc/{pid}/stat") as f:
            daemon = int(f.read().rpartition(")")[2].split()[1])
        os.kill(daemon, signal.SIGKILL)
        self.named(job, "daemon lost",
                   r"annulus: mpirun's daemon on host host2 \(process \d+\) has ended, and rank 1 with it", 10)
        self.ends(job)
        self.assert_nothing_left(*faults.NAMES)

    def test_cable_cut(self):
        job = self.running()
        self.hosts.cut("host2")
        self.named(job, "cable cut", SILENT, 15)
        self.ends_on_both_sides(job)

    def test_one_way_loss(self):
        job = self.running()
        # What host2 sends to host1 is dropped, while the other way stays.
        self.hosts.run(["ip", "route", "add", "blackhole", f"{self.hosts.address['host1']}/32"], on="host2", check=True)
        self.named(job, "one-way loss", SILENT, 15)
        self.ends_on_both_sides(job)


if __name__ == "__main__":
    cli.main()
