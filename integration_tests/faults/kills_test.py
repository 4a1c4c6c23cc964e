#!/usr/bin/env python3
"""A process killed, or one whose system call fails, at any system call with which it writes a checkpoint (fault_at_call.cc):
the newest whole checkpoint is resumed, its bits are those of a run that nothing happened to, and so are those that follow.

By default five calls of different kinds are drawn for one process, and one for each of two ranks. With the argument --all
it is every call of two saves of one process, one behind training and the last, and every fourth of each of two ranks."""

import errno
import glob
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "annulus", "testing"))
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")
import faulty_jobs as faults
import cli

ALL = "--all" in sys.argv
PARTS = 8 if ALL else 1  # cases among which the calls of one process are divided, for shards to run
STEPS, KILLED_IN = 5, 3  # the save of step 3 and those after it; that of step 4 is the last of the runs that are killed


class KillsTest(faults.FaultTest):
    def setUp(self):
        if platform.machine() != "x86_64":
            self.skipTest("fault_at_call knows the system calls of x86-64 only")
        super().setUp()
        cli.write_tiny_run(self.folder, STEPS, checkpoint={"every": 1, "keep": 2},
                           optimizer={"schedule": "constant"})

    def annulus(self, *args, before=()):
        return subprocess.run([*before, cli.ANNULUS, *args], cwd=self.folder, env=cli.environment(), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=cli.LIMIT)

    def fault(self, nth, what):
        """The words that start a program to which this happens at its nth call."""
        return [cli.HELPERS[0], f"step-{KILLED_IN:08}", "/checkpoints", str(nth), str(what), self.path("calls")]

    def calls(self):
        with open(self.path("calls")) as f:
            return [line.split(" ", 1) for line in f.read().splitlines()]

    def reference(self, run):
        """Keeps the states of an undisturbed run, by step."""
        run("--set", "checkpoint.keep=100")
        self.assertEqual(self.checkpoints(), list(range(1, STEPS + 1)))
        self.right = {step: self.state(step) for step in self.checkpoints()}
        shutil.rmtree(self.path("runs"))

    @staticmethod
    def drawn(calls):
        """Numbers of five calls of different kinds."""
        kinds = {}
        for number, (name, path) in enumerate(calls, 1):
            kinds.setdefault((name, os.path.basename(path).split("-0")[0]), []).append(number)
        draw = random.Random(57)
        return draw.sample([draw.choice(numbers) for numbers in kinds.values()], 5)

    def resumes(self, run, place):
        """Resumes after the fault, and compares all bits with those of the undisturbed run."""
        whole = self.checkpoints()
        self.assertIn(whole[-1], range(KILLED_IN - 1, STEPS), place)
        for step in whole:
            self.assertEqual(self.state(step), self.right[step], f"step {step}, {place}")
        said = run("--resume")
        self.assertIn(f"resumed after step {whole[-1]}", said, place)
        self.assertNotIn("skipped a checkpoint", said, place)
        self.assertEqual(self.checkpoints(), [STEPS - 1, STEPS], place)
        for step in STEPS - 1, STEPS:
            self.assertEqual(self.state(step), self.right[step], f"step {step} after the resume, {place}")
        left = glob.glob(self.path("runs/tiny-001/checkpoints/.tmp-*"))
        self.assertEqual(left, [], f"the next save has not cleaned up, {place}")

    def alone(self, *more):
        done = self.annulus("train", "config.toml", *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout + done.stderr

    def kill_at_calls(self, part):
        self.reference(self.alone)
        shorter = ("--set", f"run.steps={STEPS - 1}")
        self.annulus("train", "config.toml", *shorter, before=self.fault(0, "kill"))
        calls = self.calls()
        self.assertLessEqual({"mkdir", "openat", "write", "fsync", "rename", "unlinkat"}, {name for name, _ in calls})
        for number in range(1 + part, len(calls) + 1, PARTS) if ALL else self.drawn(calls):
            shutil.rmtree(self.path("runs"))
            done = self.annulus("train", "config.toml", *shorter, before=self.fault(number, "kill"))
            self.assertEqual(done.returncode, -9, done.stderr)
            self.resumes(self.alone, f"killed at call {number}, {' '.join(self.calls()[-1])}")

    def over_hosts(self, *more, **env):
        job = self.launch("train", "config.toml", *more, after=30, **env)
        self.assertEqual(job.finish(), 0, job.text)
        return job.text["out"] + job.text["err"]

    def rank_with_fault(self, rank, nth, what):
        """A path of mpirun that lets this happen to a rank."""
        return self.mpirun_with(f"test $OMPI_COMM_WORLD_RANK != {rank} || exec {shlex.join(self.fault(nth, what))} \"$@\"")

    def kill_rank_at_calls(self, rank):
        self.reference(self.over_hosts)
        shorter = ("--set", f"run.steps={STEPS - 1}")
        self.over_hosts(*shorter, MPIRUN=self.rank_with_fault(rank, 0, "kill"))
        count = len(self.calls())
        self.assertGreater(count, 20)
        for number in range(1 + rank, count + 1, 4) if ALL else [count * (1 + rank) // 3]:
            shutil.rmtree(self.path("runs"))
            job = self.launch("train", "config.toml", *shorter, after=30, MPIRUN=self.rank_with_fault(rank, number, "kill"))
            self.assertEqual(job.finish(), 137, job.text)
            self.assertRegex(job.text["err"], rf"annulus: rank {rank} was ended by signal 9")
            self.resumes(self.over_hosts, f"rank {rank} killed at call {number}, {' '.join(self.calls()[-1])}")

    def test_input_output_error_of_a_rank(self):
        """The run ends with an error that names the rank and the file, and the older checkpoint can be resumed."""
        self.reference(self.over_hosts)
        job = self.launch("train", "config.toml", after=30, MPIRUN=self.rank_with_fault(1, 5, errno.EIO))
        self.assertEqual(job.finish(), 8, job.text)
        self.assertRegex(job.text["err"], r"on rank 1: cannot \w+ \S*\.tmp-step-00000003/\S+\.safetensors: Input/output error")
        self.assertIn("to continue from the checkpoint of step 2: ", job.text["err"])
        self.resumes(self.over_hosts, "I/O error")

    def test_restarts_end_where_a_fault_comes_again_at_its_step(self):
        """Each attempt fails as it saves step 3, the second one after it has resumed from step 2."""
        job = self.launch("--restarts", "5", "train", "config.toml", "--set", "checkpoint.background=false", after=30,
                          MPIRUN=self.rank_with_fault(1, 1, errno.EIO))
        self.assertEqual(job.finish(), 8, job.text)
        self.assertRegex(job.text["err"], r"attempt 2 of 6, after a failure in the step after step 3: continues from the checkpoint of step 2")
        self.assertRegex(job.text["err"], r"not started again: two attempts failed in the step after step 3, so the fault is probably not "
                                          r"one of the machine")
        self.assertNotIn("attempt 3", job.text["err"])
        self.assertEqual(self.checkpoints(), [1, 2])


for each_part in range(PARTS):
    def kill(self, part=each_part):
        self.kill_at_calls(part)
    setattr(KillsTest, f"test_killed_at_a_call_part_{each_part}", kill)
for each_rank in 0, 1:
    def kill_rank(self, rank=each_rank):
        self.kill_rank_at_calls(rank)
    setattr(KillsTest, f"test_rank_{each_rank}_killed_at_a_call", kill_rank)

if __name__ == "__main__":
    cli.main()
