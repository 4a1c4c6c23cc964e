#!/usr/bin/env python3
"""Tests `annulus train` and `sample` as a user types them: stopped and resumed runs, ranks that die, and errors."""

import fcntl
import glob
import json
import os
import pty
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402


ENDLESS = ["--set", "run.steps=1000000", "--set", "checkpoint.every=1000000"]


class TrainTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        words = ["alpha", "beta", "def f(x):\n", "    return x\n"]
        text = " ".join(random.Random(1).choices(words, k=3000))
        cli.write_tiny_run(self.folder, 6, text, checkpoint={"every": 2})

    def write(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def metrics(self, run):
        return [json.loads(line) for line in self.read(f"runs/{run}/metrics.jsonl").splitlines()]

    def losses(self, run):
        return [m["loss"] for m in self.metrics(run) if "loss" in m]

    def train_in_background(self, *more, ranks=2):
        run = self.start("launch", "-n", str(ranks), "train", "config.toml", *ENDLESS, *more)
        run.wait_for("step ")
        return run

    def test_trains_resumes_and_samples(self):
        code, out, err = self.annulus("launch", "-n", "2", "train", "config.toml", ANNULUS_PROGRAM="./annulus")
        self.assertEqual(code, 0, err)
        self.assertRegex(out.splitlines()[0], r"^device cpu \(")
        self.assertEqual(len(self.losses("tiny-001")), 6)
        # The commands that it prints work unchanged.
        sample = re.search(r"^sample: +\./annulus (.*)$", out, re.M).group(1)
        code, text, err = self.annulus(*shlex.split(sample), "--bytes", "40")
        self.assertEqual(code, 0, err)
        self.assertTrue(text.startswith("def "), text)
        onward = re.search(r"^train on: +\./annulus (.*)$", out, re.M).group(1)
        code, out, err = self.annulus(*shlex.split(onward))
        self.assertEqual(code, 0, err)
        self.assertEqual(len(self.losses("tiny-001")), 12)
        self.assertIn("changed: run.steps = 12 (it was 6)", out)
        code, out, err = self.annulus("inspect", "tiny", "--length", "1")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"sizes +1 layer, width 32,")
        self.assertIn("\nat 1 token\n", out)
        # Several ranks write the text of one, once, and stop together.
        words = (*shlex.split(sample), "--bytes", "40", "--dtype", "fp64")
        alone = self.annulus(*words)
        self.assertEqual(alone[0], 0, alone[2])
        code, text, err = self.annulus("launch", "-n", "2", *words, "--sharded")
        self.assertEqual((code, text), alone[:2], err)
        endless = self.start("launch", "-n", "2", "sample", "tiny", "--prompt", "begin\n", "--temperature", "0",
                             "--bytes", "1000000000")
        endless.wait_for("begin")
        endless.signal(signal.SIGINT)
        self.assertEqual(endless.finish()[0], 130)
        # What one rank finds out ends all.
        self.assert_refused(3, "nothing", "launch", "-n", "2", "sample", "nothing")
        # Output that cannot be written is reported.
        with open("/dev/full", "w") as full:
            done = subprocess.run([cli.ANNULUS, *shlex.split(sample), "--bytes", "40"], cwd=self.folder, stdout=full,
                                  stderr=subprocess.PIPE, text=True, timeout=cli.LIMIT, env=cli.environment())
        self.assertEqual(done.returncode, 8, done.stderr)
        # The first command starts a new run when it is repeated.
        self.assertEqual(self.annulus("train", "config.toml", "--set", "run.steps=1")[0], 0)
        self.assertTrue(os.path.isdir(self.path("runs/tiny-002")))

    def test_configuration_to_begin_with_trains_as_it_is(self):
        code, out, err = self.annulus("train", "--help-config")
        self.assertEqual((code, err), (0, ""))
        self.write("my.toml", out)
        smaller = ["run.steps=1", 'data.train=["text.txt"]', "data.context=64", "model.dim=32", "checkpoint.every=0"]
        code, out, err = self.annulus("train", "my.toml", *(word for key in smaller for word in ("--set", key)))
        self.assertEqual(code, 0, err)
        self.assertEqual(len(self.losses("run-001")), 1)

    def test_resume_says_when_the_vector_instructions_changed(self):
        self.assertEqual(self.annulus("train", "config.toml", "--set", "run.steps=2", ANNULUS_ISA="baseline")[0], 0)
        more = ["train", "config.toml", "--resume", "runs/tiny-001"]
        code, out, err = self.annulus(*more, "--set", "run.steps=3", ANNULUS_ISA="baseline")
        self.assertEqual(code, 0, err)
        self.assertNotIn("vector instructions", out)
        code, out, err = self.annulus(*more, "--set", "run.steps=4", ANNULUS_ISA="avx2")
        self.assertEqual(code, 0, err)
        self.assertIn("changed: vector instructions AVX2 (they were SSE4)", out)

    def test_progress_is_live_on_a_terminal(self):
        terminal, end = pty.openpty()
        columns = 50
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with open(end, "wb") as out:
            done = subprocess.Popen(
                [cli.ANNULUS, "launch", "-n", "2", "train", "config.toml"],
                cwd=self.folder,
                env=cli.environment(TERM="xterm"),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        text = b""
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # EIO: no process has the terminal open any more
                break
            if not piece:
                break
            text += piece
        os.close(terminal)
        self.assertEqual(done.wait(timeout=cli.LIMIT), 0)
        live = [re.sub(rb"\x1b\[[?0-9]*[a-zA-Z]", b"", line) for line in re.findall(rb"\r([^\r\n]*step \d/6[^\r\n]*)", text)]
        self.assertTrue(live[0].startswith(b"step 1/6"), text)
        self.assertLess(max(map(len, live)), columns)
        # The log file has the lines that stay on the terminal, but not the live line.
        log = self.read(os.path.relpath(glob.glob(self.path("runs/logs/*/rank-0.log"))[0], self.folder))
        self.assertNotIn("\r", log)
        self.assertIn("done: 6 steps", log)

    def test_resumes_without_the_configuration(self):
        self.assert_refused(3, "runs", "train", "--resume")
        self.assert_refused(2, "name CONFIG first", "train", "--resume", "config.toml")
        self.assertEqual(self.annulus("train", "config.toml")[0], 0)
        # A newer run without a checkpoint is not chosen.
        os.makedirs(self.path("runs/tiny-002"))
        shutil.copy(self.path("runs/tiny-001/config.toml"), self.path("runs/tiny-002/config.toml"))
        for steps, which in [(8, ["tiny-001"]), (9, ["tiny"]), (10, ["runs/tiny-001"]), (11, [])]:
            args = ["train", "--resume", *which, "--set", f"run.steps={steps}"]
            code, out, err = self.annulus("launch", "-n", "2", *args)
            self.assertEqual(code, 0, err)
            self.assertIn("run folder runs/tiny-001  resumed after step", out)
            self.assertEqual(len(self.losses("tiny-001")), steps)
        code, text, err = self.annulus("sample", "tiny", "--step", "10", "--bytes", "4")
        self.assertEqual(code, 0, err)
        self.assert_refused(3, "it holds those of steps", "sample", "tiny", "--step", "3")

    def stop(self, number, code):
        run = self.train_in_background()
        run.signal(number)
        got, err = run.finish()
        self.assertEqual(got, code, err)
        out = "".join(run.lines)
        self.assertRegex(out, r"(?m)^stopped after step [\d,]+ of [\d,]+; checkpoint written \(\d+:\d\d\)$")
        onward = shlex.split(re.search(r"^continue: +(.*)$", out, re.M).group(1))[1:]
        steps = len(self.losses("tiny-001"))
        code, out, err = self.annulus(*onward, "--set", f"run.steps={steps + 3}")
        self.assertEqual(code, 0, err)
        self.assertIn(f"resumed after step {steps}", out)
        self.assertEqual(len(self.losses("tiny-001")), steps + 3)

    def test_ctrl_c_writes_a_checkpoint_and_says_how_to_continue(self):
        self.stop(signal.SIGINT, 130)

    def test_sigterm_writes_a_checkpoint_and_says_how_to_continue(self):
        self.stop(signal.SIGTERM, 143)

    def process_of(self, run, rank):
        found = [p for p in cli.processes_with(run.mark) if self.rank_of(p) == str(rank)]
        self.assertEqual(len(found), 1)
        return found[0]

    def test_killed_rank_ends_the_job(self):
        run = self.train_in_background()
        os.kill(self.process_of(run, 1), signal.SIGKILL)
        code, err = run.finish()
        self.assertEqual(code, 137, err)
        self.assertIn("rank 1 was ended by signal 9", err)

    @staticmethod
    def rank_of(pid):
        with open(f"/proc/{pid}/environ", "rb") as f:
            found = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)", f.read())
        return found.group(1).decode() if found else None

    def test_refuses_a_model_larger_than_memory(self):
        sizes = ["--set", "model.layers=100000", "--set", "model.dim=65536", "--set", "run.name=oom"]
        code, _, err = self.annulus("launch", "-n", "2", "train", "config.toml", *sizes)
        self.assertEqual(code, 8, err)
        self.assertRegex(err, r"the run needs at least \S+ PB a rank, .* for the 2 ranks of this host, and .* free")
        self.assertFalse(glob.glob(self.path("runs/oom*")))

    def test_refuses_a_folder_in_use(self):
        run = self.train_in_background(ranks=1)
        self.assert_refused(7, "tiny-001", "train", "config.toml", "--resume", "tiny-001")
        run.signal(signal.SIGINT)
        self.assertEqual(run.finish()[0], 130)

    def test_resumes_from_the_newest_whole_checkpoint(self):
        self.assertEqual(self.annulus("train", "config.toml")[0], 0)
        whole = sorted(glob.glob(self.path("runs/tiny-001/checkpoints/*")))
        self.assertEqual(len(whole), 3)  # steps 2, 4, 6
        newest = os.path.join(whole[2], "model.safetensors")
        with open(newest, "r+b") as f:
            f.truncate(os.path.getsize(newest) - 1)
        flipped = os.path.join(whole[1], "model.safetensors")
        with open(flipped, "r+b") as f:
            f.seek(-5, os.SEEK_END)
            byte = f.read(1)
            f.seek(-5, os.SEEK_END)
            f.write(bytes([byte[0] ^ 1]))
        code, out, err = self.annulus("launch", "-n", "2", "train", "config.toml", "--resume")
        self.assertEqual(code, 0, err)
        self.assertIn("resumed after step 2", out)
        self.assertEqual(len(re.findall(r"skipped a checkpoint.*step-0000000[46]", out)), 2, out)
        for path in glob.glob(self.path("runs/tiny-001/checkpoints/*/model*.safetensors")):
            os.truncate(path, 100)
        code, _, err = self.annulus("train", "config.toml", "--resume", "--set", "run.steps=9")
        self.assertEqual(code, 3, err)
        self.assertIn("no usable checkpoint", err)

    def mpirun(self, *args):
        if shutil.which("mpirun") is None:
            self.skipTest("no mpirun on PATH")
        short = tempfile.TemporaryDirectory(dir="/dev/shm")  # Open MPI's sockets need a short path
        self.addCleanup(short.cleanup)
        command = ["mpirun", "--oversubscribe", "--mca", "btl_vader_backing_directory", short.name]
        return subprocess.run(
            [*command, *args],
            cwd=self.folder,
            env=cli.environment(
                OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", TMPDIR=short.name, HOME=short.name
            ),
            capture_output=True,
            text=True,
            timeout=cli.LIMIT,
        )

    def test_plain_mpirun_prints_plain_lines_and_how_to_continue(self):
        done = self.mpirun("-np", "2", cli.ANNULUS, "train", "config.toml")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertNotIn("\x1b", done.stdout)
        onward = re.search(r"^train on: +(.*?)\r?$", done.stdout, re.M).group(1)
        self.assertIn(" launch -n 2 train config.toml --resume ", onward)

    def test_refuses_ranks_with_different_configurations(self):
        one = ["-np", "1", cli.ANNULUS, "train", "config.toml"]
        done = self.mpirun(*one, ":", *one, "--set", "optimizer.lr=0.02")
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("optimizer.lr", done.stderr)
        self.assertEqual(len(re.findall("^annulus:", done.stderr, re.M)), 1, done.stderr)
        self.assertFalse(os.path.exists(self.path("runs")))

    def test_files_follow_the_umask(self):
        for mask in (0o077, 0o027):
            before = os.umask(mask)
            try:
                code, _, err = self.annulus("launch", "-n", "2", "--log-dir", "logs", "train", "config.toml", "--trace", "2", "--set",
                                            f"run.name='masked-{mask}'")
            finally:
                os.umask(before)
            self.assertEqual(code, 0, err)
            found = set()
            for top in glob.glob(self.path(f"runs/masked-{mask}-*")) + [self.path("logs")]:
                for folder, _, files in os.walk(top):
                    for path in [folder, *(os.path.join(folder, name) for name in files)]:
                        found.add(os.path.basename(path))
                        want = (0o777 if path == folder else 0o666) & ~mask
                        self.assertEqual(os.stat(path).st_mode & 0o777, want, path)
            self.assertLess({"config.toml", "metrics.jsonl", "manifest.json", "rank-1.log", "launch.log", "lock"}, found)
            shutil.rmtree(self.path("logs"))

    def test_errors_leave_no_run_folder(self):
        self.write("broken.toml", "[run\nsteps = 3")
        self.write("wrong_type.toml", cli.tiny_config("six", checkpoint={"every": 2}))
        self.write("short.txt", "too short")
        for code, pattern, *args in [
            (2, "needs a configuration", "train"),
            (3, "missing.toml", "train", "missing.toml"),
            (3, "broken.toml", "launch", "-n", "2", "train", "broken.toml"),
            (2, "run.steps", "launch", "-n", "2", "train", "wrong_type.toml"),
            (2, 'did you mean "run.steps"', "launch", "-n", "2", "train", "config.toml", "--set", "run.step=3"),
            (2, "run.steps", "train", "config.toml", "--set", "run.steps=-1"),
            (2, 'did you mean "--resume"', "train", "config.toml", "--resum"),
            (3, "missing.txt", "train", "config.toml", "--set", 'data.train=["missing.txt"]'),
            (3, "short.txt|context", "train", "config.toml", "--set", 'data.train=["short.txt"]'),
            (4, "64", "launch", "-n", "3", "train", "config.toml"),
            (9, "cuda", "train", "config.toml", "--set", "device=cuda"),
            (3, "runs", "train", "config.toml", "--resume"),
            (3, "", "sample", "nothing"),
        ]:
            with self.subTest(args=args):
                if "device=cuda" in args and os.path.exists("/dev/nvidiactl"):
                    self.skipTest("there is a GPU")
                self.assert_refused(code, pattern or "nothing", *args)
                self.assertEqual(glob.glob(self.path("runs/tiny*")), [], args)


if __name__ == "__main__":
    cli.main()
