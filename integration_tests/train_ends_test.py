#!/usr/bin/env python3
"""Tests what a training job prints to continue it after it is killed, stalls, fails or loses its terminal."""

import glob
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402
import trace_reader  # noqa: E402

GO_ON = re.compile(r"^annulus: to continue from the checkpoint of step (\d+): (.*)$", re.M)
NO_CHECKPOINT = ("--set", "checkpoint.every=0")


class TrainEndsTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        cli.write_tiny_run(self.folder, 1000000, run={"folder": "a user's runs"}, checkpoint={"every": 1})

    def train(self, *more, ranks=2, **env):
        command = ("launch", "-n", str(ranks)) if ranks else ()
        run = self.start(*command, "train", "config.toml", *more, env={"ANNULUS_PROGRESS": "live", **env})
        run.wait_for("step ")
        return run

    def wait_for_checkpoint(self, step):
        """Waits for a checkpoint while the job runs; keeps reading its output, so that it does not block."""
        while not glob.glob(self.path(f"a user's runs/tiny-001/checkpoints/step-{step:08}*/manifest.json")):
            self.assertTrue(self.running.process.stdout.read(1), "it has ended")

    def send(self, run, rank, number):
        def is_rank(pid):
            with open(f"/proc/{pid}/environ", "rb") as f:
                return b"OMPI_COMM_WORLD_RANK=%d" % rank in f.read().split(b"\0")

        found = [pid for pid in cli.processes_with(run.mark) if is_rank(pid)]
        self.assertEqual(len(found), 1)
        os.kill(found[0], number)

    def goes_on(self, err, *more):
        """Checks that the printed command works unchanged."""
        said = GO_ON.findall(err)
        self.assertEqual(len(said), 1, err)
        step, command = int(said[0][0]), shlex.split(said[0][1])
        code, out, err = self.annulus(*command[1:], *more, "--set", f"run.steps={step + 5}")
        self.assertEqual(code, 0, err)
        self.assertGreaterEqual(int(re.search(r"resumed after step (\d+)", out).group(1)), step)

    def test_killed_rank(self):
        # The command is longer than a line that a rank can send to the launcher.
        texts = ", ".join(["'text.txt'"] * 1000)
        self.running = self.train("--set", f"data.train=[{texts}]")
        self.wait_for_checkpoint(2)
        self.send(self.running, 1, signal.SIGKILL)
        code, err = self.running.finish()
        self.assertEqual(code, 137, err)
        self.assertIn("rank 1 was ended by signal 9", err)
        self.goes_on(err)

    def losses(self, run):
        with open(self.path(f"a user's runs/{run}/metrics.jsonl")) as f:
            return [record["loss"] for record in map(json.loads, f) if "loss" in record]

    def test_a_killed_job_begins_again_and_has_the_same_losses(self):
        steps = ("--set", "run.steps=60", "--set", "checkpoint.every=10", "--set", "checkpoint.keep=10")
        code, _, err = self.annulus("launch", "-n", "2", "train", "config.toml", *steps)
        self.assertEqual(code, 0, err)
        self.running = self.start("launch", "-n", "2", "--restarts", "2", "--log-dir", "logs", "train", "config.toml", *steps,
                                  env={"ANNULUS_PROGRESS": "live"})
        while not glob.glob(self.path("a user's runs/tiny-002/checkpoints/step-00000020/manifest.json")):
            self.assertTrue(self.running.process.stdout.read(1), "it has ended")
        self.send(self.running, 1, signal.SIGKILL)
        code, err = self.running.finish()
        self.assertEqual(code, 0, err)
        self.assertRegex(err, r"attempt 2 of 3, after a failure in the step after step \d+: continues from the checkpoint of "
                              r"step \d+")
        self.assertEqual(self.losses("tiny-001"), self.losses("tiny-002"))
        for log in "logs/rank-1.log", "logs/attempt-2/rank-1.log":
            self.assertTrue(os.path.exists(self.path(log)), log)

    def test_a_fault_that_comes_again_is_not_tried_for_ever(self):
        blocked = self.path("a file")
        with open(blocked, "w"):
            pass
        code, _, err = self.annulus("launch", "-n", "2", "--restarts", "5", "train", "config.toml", "--set",
                                    f"run.folder='{blocked}'")
        self.assertEqual(code, 8, err)
        self.assertEqual(err.count("attempt 2 of 6"), 1, err)
        self.assertIn("not started again: two attempts failed before its first step", err)

    def test_restarts_are_for_what_can_resume(self):
        for words, said in [(("--restarts", "-1", "train", "config.toml"), "whole number from 0 to 1000, not -1"),
                            (("--restarts", "1", "selftest", "print"), "needs a subcommand that writes checkpoints")]:
            code, _, err = self.annulus("launch", "-n", "2", *words)
            self.assertEqual(code, 2, err)
            self.assertIn(said, err)

    def test_killed_rank_0(self):
        self.running = self.train()
        self.wait_for_checkpoint(1)
        self.send(self.running, 0, signal.SIGKILL)
        code, err = self.running.finish()
        self.assertEqual(code, 137, err)
        self.goes_on(err)

    def test_stalled_rank(self):
        self.running = self.train("--set", "timeout=2")
        self.wait_for_checkpoint(1)
        self.send(self.running, 1, signal.SIGSTOP)
        code, err = self.running.finish()
        self.assertEqual(code, 6, err)
        self.assertRegex(err, r"step \d+: .*; rank 1 is stopped \(SIGSTOP or a debugger; host \S+\)")
        # What rank 0 did last ends with what it waited for. The stopped rank writes its own only if mpirun wakes it up.
        folder = re.search(r"what the ranks did last is in (.*)/last-operations-rank-R\.json", err).group(1)
        self.assertEqual(os.path.basename(os.path.dirname(folder)), "tiny-001")
        trace = trace_reader.Trace(os.path.join(self.folder, folder, "last-operations-rank-0.json"), arrows=False)
        self.assertEqual(trace.ranks(), [0])
        self.assertTrue(trace.spans_of(0, "step"))
        missed = [b for b, _ in trace.messages if b["args"].get("unfinished")]
        self.assertTrue(missed or trace.spans_of(0, "barrier"), trace.about)
        self.goes_on(err, "--set", "timeout=60")

    def test_stalled_rank_without_launch(self):
        """Two ranks under plain mpirun: rank 0 prints how to continue, because there is no launcher to do it."""
        if shutil.which("mpirun") is None:
            self.skipTest("no mpirun on PATH")
        short = tempfile.TemporaryDirectory(dir="/dev/shm")  # Open MPI's sockets need a short path
        self.addCleanup(short.cleanup)
        mpirun = ("mpirun", "--oversubscribe", "--mca", "btl_vader_backing_directory", short.name, "-np", "2")
        env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": short.name}
        self.running = self.start("train", "config.toml", "--set", "timeout=2", prefix=mpirun,
                                  env={"ANNULUS_PROGRESS": "live", "HOME": short.name, **env})
        self.running.wait_for("step ")
        self.wait_for_checkpoint(1)
        self.send(self.running, 1, signal.SIGSTOP)
        _, err = self.running.finish()
        self.goes_on(err, "--set", "timeout=60")
        self.assertIn("rank 1 is stopped", err)

    def test_killed_before_the_first_checkpoint(self):
        run = self.train(*NO_CHECKPOINT)
        self.send(run, 1, signal.SIGKILL)
        code, err = run.finish()
        self.assertEqual(code, 137, err)
        self.assertIn("annulus: there is no checkpoint yet", err)
        self.assertNotIn("to continue from", err)

    def test_reports_a_removed_checkpoint(self):
        run = self.train(*NO_CHECKPOINT)
        run.signal(signal.SIGINT)
        self.assertEqual(run.finish()[0], 130)
        run = self.start("launch", "-n", "2", "train", "config.toml", *NO_CHECKPOINT, "--resume",
                         env={"ANNULUS_PROGRESS": "live"})
        run.wait_for("step ")
        for manifest in glob.glob(self.path("a user's runs/tiny-001/checkpoints/*/manifest.json")):
            os.remove(manifest)
        self.send(run, 1, signal.SIGKILL)
        code, err = run.finish()
        self.assertEqual(code, 137, err)
        self.assertRegex(err, r"annulus: the checkpoint of step \d+ is not in .* any more")
        self.assertNotIn("to continue from", err)

    def test_failure_before_the_run_begins(self):
        self.assert_refused(3, "missing", "launch", "-n", "2", "train", "config.toml", "--set", "data.train=['missing']")

    def test_launcher_does_not_repeat_what_the_run_printed(self):
        run = self.train(*NO_CHECKPOINT)
        run.signal(signal.SIGTERM)
        code, err = run.finish()
        self.assertEqual(code, 143, err)
        self.assertRegex("".join(run.lines), r"(?m)^\r?continue: +")
        self.assertNotIn("to continue from", err)

    def stopped_alone(self, run, code):
        got, err = run.finish()
        self.assertEqual(got, code, err)
        said = err
        self.assertEqual(len(glob.glob(self.path("a user's runs/tiny-001/checkpoints/*/manifest.json"))), 1)
        step = int(re.search(r"step-0*(\d+)", glob.glob(self.path("a user's runs/tiny-001/checkpoints/*"))[0]).group(1))
        code, out, err = self.annulus("train", "config.toml", "--resume", "--set", f"run.steps={step + 1}")
        self.assertEqual(code, 0, err)
        self.assertIn(f"resumed after step {step}", out)
        return said

    def test_closed_output_without_launch(self):
        run = self.train(*NO_CHECKPOINT, ranks=0)
        run.process.stdout.close()
        run.process.stdout = open(os.devnull)
        self.assertRegex(self.stopped_alone(run, 141), GO_ON)

    def test_closed_output_with_launch(self):
        run = self.train(*NO_CHECKPOINT)
        run.process.stdout.close()
        run.process.stdout = open(os.devnull)
        self.assertRegex(self.stopped_alone(run, 141), GO_ON)

    def test_refuses_to_resume_a_run_in_another_folder(self):
        self.assert_refused(2, "--resume FOLDER/NAME", "train", "--resume", "tiny", "--set", "run.folder=other")

    def test_closed_terminal_without_launch(self):
        run = self.train(*NO_CHECKPOINT, ranks=0)
        run.signal(signal.SIGHUP)
        self.stopped_alone(run, 129)

    def test_requests_to_stop_do_not_disturb_the_step(self):
        # While oneDNN multiplies, a signal handler on the same thread would overwrite the heap (common/interrupt.h).
        run = self.train(*NO_CHECKPOINT, ranks=0)
        while run.process.poll() is None:
            run.signal(signal.SIGUSR1)
        self.stopped_alone(run, 143)

    def test_continues_under_nohup_without_launch(self):
        run = self.start("train", "config.toml", *NO_CHECKPOINT, prefix=("nohup",), env={"ANNULUS_PROGRESS": "live"})
        run.wait_for("step ")
        run.signal(signal.SIGHUP)
        run.wait_for("step ")  # it continues
        run.signal(signal.SIGTERM)
        self.assertEqual(run.finish()[0], 143)


if __name__ == "__main__":
    cli.main()
