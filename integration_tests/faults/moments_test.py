#!/usr/bin/env python3
"""Ranks that are stopped or killed at each moment of a run: while they start, in the forward, the backward, the update, a
save, a validation and an evaluation. Long; the other tests of this folder have one or two moments of each fault."""

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


class MomentsTest(faults.FaultTest):
    def check(self, job, rank, moment, step, name):
        host = faults.NAMES[rank]
        pid = job.stop_at(rank, moment, step)
        if self.signal == signal.SIGKILL:
            os.kill(pid, signal.SIGKILL)
            self.named(job, f"killed in {name}", rf"annulus: rank {rank} was ended by signal 9", 10)
            self.assertEqual(job.finish(), 137, job.text)
        else:
            self.named(job, f"stopped in {name}", rf"annulus: rank {rank} on host {host} has been stopped \(SIGSTOP\)")
            self.assertEqual(job.finish(), 6, job.text)
        self.assert_nothing_left(*faults.NAMES)

    def check_evaluation(self):
        cli.write_tiny_run(self.folder, 1)
        job = self.launch("train", "config.toml")
        self.assertEqual(job.finish(), 0, job.text)
        job = self.launch("evaluate", "runs/tiny-001", "--data", "text.txt", "--rows", "100000")
        self.check(job, 1, "attention forward", -1, "evaluation")


def add_tests():
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in (0, 1):
            for name, (moment, tiny) in TRAIN.items():
                def test(self, number=number, rank=rank, name=name, moment=moment, tiny=tiny):
                    self.signal = number
                    self.check(self.train(tiny=tiny), rank, moment, 3 if moment else -1, name)
                setattr(MomentsTest, f"test_{number.name}_of_rank_{rank}_in_{name.replace(' ', '_')}", test)

        def test_evaluation(self, number=number):
            self.signal = number
            self.check_evaluation()
        setattr(MomentsTest, f"test_{number.name}_in_an_evaluation", test_evaluation)


add_tests()

if __name__ == "__main__":
    cli.main()
