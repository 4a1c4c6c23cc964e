#!/usr/bin/env python3
"""Disks on two hosts that are full or cannot be written to while a run saves or offloads: it says which file of which rank,
stops or goes on as it is configured, and the older checkpoint can be resumed."""

import errno
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "annulus", "testing"))
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")
import faulty_jobs as faults
import cli

EACH = {"every": 1, "keep": 2}  # a checkpoint after each step
ON = {**EACH, "on_error": "continue"}


class SmallDiskTest(faults.FaultTest):
    def before_hosts(self):
        """Both hosts have the same small disk."""
        os.mkdir(self.path("small"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", self.path("small")], check=True)
        self.addCleanup(subprocess.run, ["umount", self.path("small")], check=True)

    def running(self, checkpoint, **tiny):
        job = self.train(after=30, tiny={"run": {"folder": self.RUNS}, "checkpoint": checkpoint, **tiny})
        self.wait_for_checkpoint(job, 2)
        return job

    def fill(self):
        with open(self.path("small/filler"), "wb", buffering=0) as f:
            try:
                while True:
                    f.write(bytes(4096))
            except OSError as error:
                self.assertEqual(error.errno, errno.ENOSPC)

    def stops_by_request(self, job):
        job.process.send_signal(signal.SIGTERM)
        self.assertEqual(job.finish(), 143, job.text)


class SavingTest(SmallDiskTest):
    """The run's folder is on the small disk."""

    RUNS = "small"

    def test_full_disk_stops_the_run(self):
        job = self.running(EACH)
        self.fill()
        self.named(job, "full disk", r"cannot write \S*small/tiny-001/\S+.*No space left on device; free some space", 10)
        self.assertEqual(job.finish(), 8, job.text)
        os.remove(self.path("small/filler"))
        self.assertGreaterEqual(self.continues(job), 2)

    def test_full_disk_and_the_run_goes_on(self):
        job = self.running(ON)
        self.fill()
        self.named(job, "full disk", r"no checkpoint of step [\d,]+ could be written: .*No space left on device.*; the run goes on", 10,
                   "out")
        before = self.checkpoints()[-1]
        self.state(before)
        _, beat = job.rank(0)
        job.wait_for_step(beat.step() + 20)
        os.remove(self.path("small/filler"))
        self.wait_for_checkpoint(job, before + 20)
        self.stops_by_request(job)
        self.assertEqual(self.metrics()[-1]["step"], self.checkpoints()[-1])

    def test_read_only_on_one_host_stops_the_run(self):
        job = self.running(EACH)
        folder = self.path("small/tiny-001/checkpoints")
        self.read_only(folder, "host2")
        self.named(job, "read-only folder", r"on rank 1: cannot create \S+/checkpoints/\S+: Read-only file system", 10)
        self.assertEqual(job.finish(), 8, job.text)
        self.hosts.run(["umount", folder], on="host2", check=True)
        self.assertGreaterEqual(self.continues(job), 2)

    def test_read_only_on_one_host_and_the_run_goes_on(self):
        job = self.running(ON)
        folder = self.path("small/tiny-001/checkpoints")
        self.read_only(folder, "host2")
        self.named(job, "read-only folder", r"no checkpoint of step [\d,]+ could be written: .*on rank 1: cannot create \S+: "
                                            r"Read-only file system.*; the run goes on", 10, "out")
        before = self.checkpoints()[-1]
        self.hosts.run(["umount", folder], on="host2", check=True)
        self.wait_for_checkpoint(job, before + 1)
        self.stops_by_request(job)


class OffloadingTest(SmallDiskTest):
    """Offloaded state is on the small disk, and the run's folder is not."""

    OFFLOAD = {"memory": {"offload": "file", "files": "small", "device_layers": 0}, "model": {"recompute": True, "layers": 2},
               "optimizer": {"offload": "file"}}

    def test_offloading_goes_on_when_the_disk_is_full(self):
        """Because what it needs there was reserved before the first step."""
        job = self.running(EACH, **self.OFFLOAD)
        self.fill()
        _, beat = job.rank(0)
        self.wait_for_checkpoint(job, beat.step() + 5)
        self.stops_by_request(job)

    def test_offloading_to_a_read_only_folder_of_one_host(self):
        job = self.running(EACH, **self.OFFLOAD)
        self.stops_by_request(job)
        kept = self.state(self.checkpoints()[-1])
        self.read_only(self.path("small"), "host2")
        job = self.launch("train", "config.toml", "--resume")
        self.assertEqual(job.finish(), 8, job.text)
        self.assertRegex(job.text["err"], r"rank 1.*cannot make a file in small: Read-only file system")
        self.assertEqual(self.state(self.checkpoints()[-1]), kept)


if __name__ == "__main__":
    cli.main()
