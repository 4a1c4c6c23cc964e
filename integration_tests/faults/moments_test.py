#!/usr/bin/env python3
"""Faults at each moment of a run: while it starts, in the forward, the backward, the update, a save, a validation and an
evaluation. Ranks that are stopped, stuck, killed, abort or have no more memory, hosts, daemons and cables that are lost, and
requests to stop. Long; the other tests of this folder have one or two moments of each fault."""

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "annulus", "testing"))
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")
import faulty_jobs as faults
import cli

TRAIN = {
    "the start": (None, {}),
    "the forward": ("layer forward", {}),
    "the backward": ("layer backward", {}),
    "the update": ("update", {}),
    "saving": ("save checkpoint", {"checkpoint": {"every": 1}}),
    "validation": ("validation", {"validation": {"every": 1, "batches": 4}}),
}
EVALUATION = "an evaluation"
MIB = 1 << 20


class MomentsTest(faults.FaultTest):
    def begin(self, name):
        """Starts a job with this moment; returns it, the moment and the step from which on it is wanted."""
        if name != EVALUATION:
            moment, tiny = TRAIN[name]
            return self.train(tiny=tiny), moment, 3 if moment else -1
        cli.write_tiny_run(self.folder, 1)
        job = self.launch("train", "config.toml", after=30)
        self.assertEqual(job.finish(), 0, job.text)
        return self.launch("evaluate", "runs/tiny-001", "--data", "text.txt", "--rows", "100000"), "attention forward", -1

    def ends(self, job, fault, name, pattern, code, limit=10):
        self.named(job, f"{fault} in {name}", pattern, limit)
        self.assertEqual(job.finish(), code, job.text)
        self.assert_nothing_left(*faults.NAMES)

    def rank_fault(self, fault, rank, name):
        job, moment, step = self.begin(name)
        # One that stands still while it waits for the others cannot be told from one that waits, until `timeout`.
        pid = job.stop_at(rank, moment, step, computes=fault == "stuck")
        gone = rf"annulus: rank {rank} was ended by signal "
        if fault == "stopped":
            self.ends(job, fault, name, rf"annulus: rank {rank} on host {faults.NAMES[rank]} has been stopped \(SIGSTOP\)", 6, faults.LATEST)
        elif fault == "stuck":
            faults.hold(pid)
            os.kill(pid, signal.SIGCONT)
            # Ten times as long in phases that may last.
            limit = 10 * faults.AFTER + 10 if name == "saving" else faults.LATEST
            self.ends(job, fault, name, rf"annulus: rank {rank} on host {faults.NAMES[rank]} has made no progress for", 6, limit)
        elif fault == "killed":
            os.kill(pid, signal.SIGKILL)
            self.ends(job, fault, name, gone + "9", 137)
        elif fault == "aborts":
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
            self.ends(job, fault, name, gone + "6", 134)
        else:
            faults.MemoryGroup(self, MIB).end(pid)
            self.ends(job, fault, name, gone + "9.*lack of memory", 137)

    def host_fault(self, fault, name):
        job, moment, step = self.begin(name)
        pid = job.stop_at(1, moment, step)
        if fault == "host lost":
            self.hosts.kill("host2")
            self.named(job, f"{fault} in {name}", faults.LOST, 10)
        elif fault == "daemon lost":
            daemon = faults.parent_of(pid)
            os.kill(daemon, signal.SIGKILL)
            os.kill(pid, signal.SIGCONT)
            self.named(job, f"{fault} in {name}", faults.DAEMON_LOST, 10)
        else:
            if fault == "cable cut":
                self.hosts.cut("host2")
            else:
                self.drop("host2" if fault == "loss from the host" else "host1")
            os.kill(pid, signal.SIGCONT)
            self.named(job, f"{fault} in {name}", faults.SILENT, 15)
        self.ends_on_both_sides(job, there=fault != "host lost")

    def request(self, number, name):
        moment, tiny = TRAIN[name]
        self.stops(number, moment, step=3 if moment else -1, **tiny)


def add_tests():
    def add(words, call, *args):
        def test(self):
            call(self, *args)
        setattr(MomentsTest, "test_" + "_".join(words).replace(" ", "_"), test)

    for name in [*TRAIN, EVALUATION]:
        for rank in 0, 1:
            for fault in "stopped", "stuck", "killed", "aborts", "killed for memory":
                if (fault, name) != ("stuck", "the start"):  # the other ranks then name it: ANNULUS_BOOTSTRAP_TIMEOUT
                    add((fault, f"rank {rank}", "in", name), MomentsTest.rank_fault, fault, rank, name)
        for fault in "host lost", "daemon lost", "cable cut", "loss from the host", "loss towards the host":
            add((fault, "in", name), MomentsTest.host_fault, fault, name)
        if name not in ("the start", EVALUATION):
            for number in signal.SIGTERM, signal.SIGINT, signal.SIGUSR1:
                add((number.name, "in", name), MomentsTest.request, number, name)


add_tests()

if __name__ == "__main__":
    cli.main()
