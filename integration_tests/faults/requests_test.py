#!/usr/bin/env python3
"""Requests to stop a job on two hosts: it writes a checkpoint, says how to continue, and ends with a code that says so; a
second request ends it at once. moments_test.py has every signal at every moment."""

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


class RequestsTest(faults.FaultTest):
    def test_SIGTERM_in_the_forward_and_resume(self):
        step = self.stops(signal.SIGTERM, "layer forward")
        job = self.launch("train", "config.toml", "--resume", "--set", f"run.steps={step + 1}")
        self.assertEqual(job.finish(), 0, job.text)
        self.assertIn(f"resumed after step {step}", job.text["out"])
        self.assertEqual([m["step"] for m in self.metrics() if "loss" in m], list(range(1, step + 2)))

    def test_SIGINT_while_saving(self):
        self.stops(signal.SIGINT, "save checkpoint", checkpoint={"every": 1})

    def test_SIGUSR1_in_a_validation(self):
        self.stops(signal.SIGUSR1, "validation", validation={"every": 1, "batches": 4})

    def test_a_second_signal_ends_the_job_at_once(self):
        """Although a rank stands still, so that the step cannot be finished."""
        job = self.train(after=30, tiny={"checkpoint": {"every": 1}})
        job.stop_at(1, "layer forward", 3)
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("the ranks finish their step and stop")
        job.process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        self.assertEqual(job.finish(), 143, job.text)
        print(f"\nsecond signal: ended after {time.monotonic() - begin:.1f} s", flush=True)
        self.assertLess(time.monotonic() - begin, 15, job.text)
        self.assertGreaterEqual(self.checkpoints()[-1], 1)
        self.assertIn("to continue from the checkpoint of step", job.text["err"])
        self.assert_nothing_left(*faults.NAMES)


if __name__ == "__main__":
    cli.main()
