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


class LostTest(faults.FaultTest):
    def running(self, *args):
        job = self.train(*args, tiny={"checkpoint": {"every": 1}})
        job.wait_for_step(3)
        return job

    def ends(self, job, code=6):
        self.assertEqual(job.finish(), code, job.text)
        self.assertIn("to continue from the checkpoint of step", job.text["err"])

    def test_host_lost(self):
        job = self.running()
        self.hosts.kill("host2")
        self.named(job, "host lost", faults.LOST, 10)
        self.ends(job)
        self.assert_nothing_left("host1")

    def test_daemon_lost(self):
        job = self.running()
        pid, _ = job.rank(1)
        daemon = faults.parent_of(pid)
        os.kill(daemon, signal.SIGKILL)
        self.named(job, "daemon lost", faults.DAEMON_LOST, 10)
        self.ends(job)
        self.assert_nothing_left(*faults.NAMES)

    def test_cable_cut(self):
        job = self.running()
        self.hosts.cut("host2")
        self.named(job, "cable cut", faults.SILENT, 15)
        self.ends_on_both_sides(job)

    def test_loss_from_the_host(self):
        job = self.running()
        self.drop("host2")
        self.named(job, "loss from the host", faults.SILENT, 15)
        self.ends_on_both_sides(job)

    def test_loss_towards_the_host(self):
        job = self.running()
        self.drop("host1")
        self.named(job, "loss towards the host", faults.SILENT, 15)
        self.ends_on_both_sides(job)

    def test_a_short_cut_is_no_fault(self):
        job = self.running()
        self.hosts.cut("host2")
        time.sleep(5)  # how long the cable is out
        self.hosts.mend("host2")
        _, beat = job.rank(0)
        job.wait_for_step(beat.step() + 10)
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.finish(), 143, job.text)
        self.assertNotIn("does not answer", job.text["err"])


if __name__ == "__main__":
    cli.main()
