#!/usr/bin/env python3
"""Ranks that are stopped or do not come on are named with their host, their step and where they stand; those that wait for
them are not, and neither is anybody over a slow link."""

import os
import signal
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "annulus", "testing"))
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")
import faulty_jobs as faults
import cli


class StuckTest(faults.FaultTest):
    def assert_ends(self, job, rank):
        """The job ends with the code of a rank that is gone, and blames no other rank."""
        self.assertEqual(job.finish(), 6, job.text)
        others = [line for line in job.text["err"].splitlines() if "annulus: rank " in line and f"rank {rank} on" not in line]
        self.assertEqual(others, [], job.text)

    def stop(self, moment, place, step=3, rank=1, **tiny):
        job = self.train(tiny=tiny)
        job.stop_at(rank, moment, step)
        host = faults.NAMES[rank]
        self.named(job, f"stopped in {moment!r}", rf"annulus: rank {rank} on host {host} has been stopped \(SIGSTOP\) for 3\.\d s; {place}")
        self.assert_ends(job, rank)

    def test_stopped_in_the_forward(self):
        self.stop("layer forward", r"step \d+: forward, layer forward.*layer 0")

    def test_stopped_while_saving(self):
        self.stop("save checkpoint", r"step \d+: save checkpoint", checkpoint={"every": 1}, rank=0)

    def test_stuck_in_user_code(self):
        job = self.launch("selftest", "stall", "--rank", "1")
        job.wait_for("rank 1 stalls", "out")
        self.named(job, "stuck in user code",
                   r"annulus: rank 1 on host host2 has made no progress for 3\.\d s and waits for no other rank: it computes "
                   r"\(R\); step 3: stall")
        self.assert_ends(job, 1)

    def test_stuck_while_it_writes_text(self):
        """A subcommand other than train and evaluate has ten times as long."""
        cli.write_tiny_run(self.folder, 1)
        job = self.launch("train", "config.toml", after=30)
        self.assertEqual(job.finish(), 0, job.text)
        job = self.launch("sample", "tiny-001", "--tokens", "1000000", after=1)
        job.wait_for(".", "out")
        pid = job.stop_at(1, None, -1, computes=True)
        faults.hold(pid)
        os.kill(pid, signal.SIGCONT)
        self.named(job, "stuck in `sample`", r"annulus: rank 1 on host host2 has made no progress for 1\d\.\d s and waits for no other rank: "
                                             r"it is held by a debugger \(t\)", 10 + 10)
        self.assert_ends(job, 1)

    def test_a_stopped_rank_is_found_and_training_goes_on_from_its_checkpoint(self):
        job = self.train("--restarts", "1", "--log-dir", "logs", steps=60, tiny={"checkpoint": {"every": 10}})
        job.stop_at(1, "layer backward", 25)
        self.named(job, "stopped in 'layer backward'", r"rank 1 on host host2 has been stopped .*layer backward")
        job.wait_for("attempt 2 of 2, after a failure in the step after step \\d+: continues from the checkpoint of step 20")
        self.assertEqual(job.finish(), 0, job.text)

    def test_a_slow_link_is_no_fault(self):
        tc = shutil.which("tc", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        self.hosts.run([tc, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "2mbit", "burst", "32kb", "latency", "2s"], on="host2",
                       check=True)
        job = self.train(steps=3, after=1, tiny={"data": {"context": 512}})
        self.assertEqual(job.finish(), 0, job.text)
        self.assertNotIn("has made no progress", job.text["err"])


if __name__ == "__main__":
    cli.main()
