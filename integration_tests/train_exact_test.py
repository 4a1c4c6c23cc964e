#!/usr/bin/env python3
"""Tests what a training run guarantees, through the real launcher: the same curve with 1, 2 and 4 ranks, the same bits when
it is repeated or resumed, a checkpoint on a signal even during validation, and an intact last checkpoint on a full disk.
cli_train_test.py tests what a user sees and types."""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

CONFIG = """
timeout = 30
device = "cpu"
[run]
name = "tiny"
steps = 12
log_every = 1
[data]
train = ["text/*.txt"]
context = 64
batch = 4
[model]
layers = 2
dim = 32
heads = 4
kv_heads = 2
[optimizer]
lr = 1e-2
warmup = 2
[validation]
every = 6
batches = 2
[checkpoint]
every = 4
"""

FP64 = ["--set", "model.dtype=fp64"]


def tolerance(step):
    """How much losses of step 0, 1, ... in fp64 may differ relatively: tests/common/equal_losses.h says why."""
    return 1e-12 * 10 ** (step / 10)


class TrainTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("text"))
        words = ["def ", "return ", "self.", "x = ", "for i in range(", "):\n    ", "\n", "None"]
        state, text = 12345, ""
        while len(text) < 30000:
            state = (state * 1664525 + 1013904223) % 2**32
            text += words[state >> 29]
        self.write("text/a.txt", text[:15000])
        self.write("text/b.txt", text[15000:])
        self.write("tiny.toml", CONFIG)

    def write(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)

    def read(self, name):
        with open(self.path(name), "rb") as f:
            return f.read()

    def metrics(self, run):
        """Returns the lines of steps and validations."""
        lines = [json.loads(line) for line in self.read(f"runs/{run}/metrics.jsonl").splitlines()]
        return [line for line in lines if "loss" in line or "validation_loss" in line]

    def losses(self, run):
        return [m["loss"] for m in self.metrics(run) if "loss" in m]

    def steps(self, run):
        """Returns the steps of the checkpoints, oldest first."""
        return [int(p[-8:]) for p in sorted(glob.glob(self.path(f"runs/{run}/checkpoints/step-*")))]

    def weights(self, run, step=12):
        """Returns the tensor files of a checkpoint by name: each rank's weights and its part of the optimizer state."""
        folder = f"runs/{run}/checkpoints/step-{step:08}"
        files = {f: self.read(f"{folder}/{f}") for f in os.listdir(self.path(folder)) if f.endswith(".safetensors")}
        self.assertTrue(files)
        return files

    def interrupted(self, run, step):
        """Copies a run as it would be if it had been killed after the checkpoint of this step; returns the copy's name."""
        copy = f"{run}-killed"
        shutil.copytree(self.path(f"runs/{run}"), self.path(f"runs/{copy}"))
        for later in self.steps(copy):
            if later > step:
                shutil.rmtree(self.path(f"runs/{copy}/checkpoints/step-{later:08}"))
        self.assertEqual(self.steps(copy)[-1], step)
        return copy

    def train(self, ranks, *args, code=0, **env):
        launch = ["launch", "-n", str(ranks)] if ranks else []
        got, out, err = self.annulus(*launch, "train", "tiny.toml", *args, **env)
        self.assertEqual(got, code, out + err)
        return out + err

    def assert_same_curve(self, one, *others):
        for run in others:
            for step, (a, b) in enumerate(zip(self.losses(one), self.losses(run), strict=True)):
                self.assertLessEqual(abs(a - b), tolerance(step) * a, f"{run}, step {step + 1}")

    def test_curve_does_not_depend_on_the_number_of_ranks(self):
        for ranks in (0, 2, 4):
            self.train(ranks, *FP64)
        one = self.losses("tiny-001")
        self.assertEqual(len(one), 12)
        self.assertLess(one[-1], one[0])
        self.assert_same_curve("tiny-001", "tiny-002", "tiny-003")

    def test_curve_with_patterns_by_layer_and_documents(self):
        adaptive = "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }"
        sets = ["--set", f"model.pattern=[{adaptive}, {{ kind = 'window', left = 20, right = 0 }}]"]
        sets += ["--set", "data.documents=true", "--set", "model.dropout=0.1"]
        text = self.read("text/a.txt")
        for i in range(100):
            with open(self.path(f"text/{i:03}.txt"), "wb") as f:
                f.write(text[i * 150 : i * 150 + 1 + i * 37 % 150])
        for ranks in (0, 2, 4):
            self.train(ranks, *sets, *FP64)
        one = self.metrics("tiny-001")
        self.assertIn("exposed_planning_seconds", one[0])
        self.assert_same_curve("tiny-001", "tiny-002", "tiny-003")
        code, out, err = self.annulus("sample", "tiny-001", "--prompt", "def ", "--bytes", "100")
        self.assertEqual(code, 0, err)
        self.assertTrue(out.startswith("def "), out)

    def test_repeated_run_is_bit_identical(self):
        self.train(2)
        self.train(2)
        self.assertEqual(self.losses("tiny-001"), self.losses("tiny-002"))
        self.assertEqual(self.weights("tiny-001"), self.weights("tiny-002"))

    def test_offload_changes_no_bit_and_may_be_switched_at_a_resume(self):
        sets = ["--set", "model.recompute=true", "--set", "model.layers=4", "--set", "memory.device_layers=1"]
        sets += ["--set", "optimizer.schedule=constant"]
        files = self.path("files")
        os.mkdir(files)
        offload = ["--set", "memory.offload=file", "--set", f"memory.files={files}"]
        self.train(2, *sets)
        self.train(2, *sets, *offload)
        self.assertEqual(self.losses("tiny-001"), self.losses("tiny-002"))
        self.assertEqual(self.weights("tiny-001"), self.weights("tiny-002"))
        moved = [m["offloaded_bytes"] for m in self.metrics("tiny-002") if "offloaded_bytes" in m]
        # Of each rank three layers' input, output and statistics of 4 rows of 32 tokens, and the last keys and values.
        self.assertGreater(moved[0], 3 * 4 * 32 * (2 * 32 + 4) * 4)
        self.assertEqual(moved, [moved[0] * i for i in range(1, 13)])
        for run, then in ("tiny-002", []), ("tiny-001", offload):
            resumed = self.interrupted(run, 4)
            self.train(2, *sets, *then, "--resume", resumed)
            self.assertEqual(self.losses("tiny-001"), self.losses(resumed), resumed)
            self.assertEqual(self.weights("tiny-001"), self.weights(resumed), resumed)
        self.assertEqual(os.listdir(files), [])

    def test_optimizer_in_files_changes_no_bit_and_may_be_switched_at_a_resume(self):
        files = self.path("files")
        os.mkdir(files)
        offload = ["--set", "optimizer.offload=file", "--set", f"memory.files={files}"]
        cases = (1, "model.dtype=bf16"), (2, "optimizer.shard=3", "model.dtype=bf16"), (4, "optimizer.shard=1", "mesh.data=2")
        for number, (ranks, *keys) in enumerate(cases):
            keys += ["optimizer.schedule=constant", "run.steps=6", "checkpoint.every=3"]
            sets = [w for key in keys for w in ("--set", key)]
            self.train(ranks, *sets)
            self.train(ranks, *sets, *offload)
            whole, offloaded = (f"tiny-{2 * number + i:03}" for i in (1, 2))
            self.assertGreater(self.metrics(offloaded)[-1]["offloaded_bytes"], 0)
            run, then = ((offloaded, []), (whole, offload))[number % 2]  # each way in turn, with 1 and 4 ranks and with 2
            others = [offloaded, self.interrupted(run, 3)]
            self.train(ranks, *sets, *then, "--resume", others[-1])
            for run in others:
                self.assertEqual(self.losses(whole), self.losses(run), run)
                self.assertEqual(self.weights(whole, 6), self.weights(run, 6), run)
        self.assertEqual(os.listdir(files), [])

    def test_steps_after_the_second_take_no_memory_of_the_kinds_that_the_pool_keeps(self):
        keys = ("model.dtype=bf16", "model.recompute=true", "optimizer.shard=3", "memory.offload=file", "optimizer.offload=file",
                "memory.device_layers=0", "validation.every=0", "checkpoint.every=0", "run.steps=8")
        # Ranks that lend keep each other's blocks for as long as they need them, so how many there are depends on time.
        self.train(2, *[w for key in keys for w in ("--set", key)], ANNULUS_SHARED_MEMORY="0", OMP_NUM_THREADS="1")
        taken, of_steps = {}, []
        for line in self.metrics("tiny-001"):
            if "loss" in line:
                taken = {**taken, **{name: of["taken"] for name, of in line.get("pool", {}).items()}}
                of_steps.append(taken)
        self.assertEqual(set(taken), {"travelling blocks", "gradients", "kernel scratch", "staging"})
        self.assertEqual(of_steps[1:], 7 * of_steps[1:2])
        last = [line for line in self.metrics("tiny-001") if "loss" in line][-1]
        for name, of in last["pool"].items():
            self.assertGreater(of["reused"], 5 * of["taken"] if name != "staging" else 0, name)
            self.assertTrue(0 <= of["fragmentation"] < 0.5 and of["peak"] >= of["in_use"], (name, of))

    def test_saves_behind_training_take_the_memory_of_their_copies_once(self):
        self.train(2, "--set", "checkpoint.every=2", "--set", "run.steps=8", "--set", "validation.every=0")
        pools = [line["pool"] for line in self.metrics("tiny-001") if "copies of a save" in line.get("pool", {})]
        self.assertGreater(pools[0]["copies of a save"]["in_use"], 0)
        self.assertEqual(len({pool["copies of a save"]["taken"] for pool in pools}), 1, pools)

    def test_killed_run_leaves_no_offloaded_files(self):
        os.mkdir(self.path("files"))
        sets = ["--set", "model.recompute=true", "--set", "model.layers=4", "--set", "memory.offload=file", "--set", "memory.files=files"]
        running = self.start("launch", "-n", "2", "train", "tiny.toml", *sets, "--set", "run.steps=100000", env={"ANNULUS_PROGRESS": "plain"})
        running.wait_for("step 1/")
        cli.kill(cli.processes_with(running.mark))
        running.process.communicate(timeout=cli.LIMIT)
        self.assertEqual(os.listdir(self.path("files")), [])

    def in_small_folder(self, size, *args, after="true", **env):
        """Runs annulus, and then a command, beside a file system of this size in the folder `small`, as root in a mount
        namespace; returns the exit code of annulus and all output."""
        os.makedirs(self.path("small"), exist_ok=True)
        mount = f'mount -t tmpfs -o size={size} none "{self.path("small")}" && exec "$@"'
        inside = ["unshare", "--mount", "sh", "-c", mount, "sh"]
        if subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
            self.skipTest("mounting a small disk needs root")
        both = f'"{cli.ANNULUS}" "$@"; code=$?; {after}; exit $code'
        done = subprocess.run([*inside, "sh", "-c", both, "sh", *args], cwd=self.folder, env=cli.environment(**env), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=cli.LIMIT)
        return done.returncode, done.stdout + done.stderr

    def test_disk_too_small_for_offload_is_one_error_and_the_checkpoint_stays(self):
        sets = ["--set", "model.recompute=true", "--set", "model.layers=4", "--set", "memory.offload=file"]
        self.train(2, *sets, "--set", "run.steps=4")
        kept = self.weights("tiny-001", 4)
        said = self.train(2, *sets, "--resume", "tiny-001", "--set", "memory.files=missing", code=8)
        self.assertIn("cannot make a file in missing: No such file or directory", said)
        again = ["launch", "-n", "2", "train", "tiny.toml", *sets, "--resume", "tiny-001", "--set", "memory.files=small"]
        code, said = self.in_small_folder("100k", *again)
        self.assertEqual(code, 8, said)
        self.assertRegex(said, r"memory.offload needs [\d.]+ MB of files for the 2 ranks of this host, and [\d.]+ MB are free in small: "
                                r'memory.offload = "none" fits \([\d.]+ MB a rank\); ')
        # A disk that is full although nothing said so before.
        code, said = self.in_small_folder("100k", *again, ANNULUS_MEMORY_CHECK="0")
        self.assertEqual(code, 8, said)
        self.assertRegex(said, r"memory.offload: cannot reserve [\d.]+ MB for a file in small: No space left on device")
        self.assertEqual(self.weights("tiny-001", 4), kept)
        code, said = self.in_small_folder("10m", *again)
        self.assertEqual(code, 0, said)

    def test_disk_too_small_for_the_optimizer_is_one_error_and_the_checkpoint_stays(self):
        sets = ["--set", "optimizer.offload=file"]
        self.train(2, *sets, "--set", "run.steps=4")
        kept = self.weights("tiny-001", 4)
        again = ["launch", "-n", "2", "train", "tiny.toml", *sets, "--resume", "tiny-001", "--set", "memory.files=small"]
        code, said = self.in_small_folder("100k", *again)
        self.assertEqual(code, 8, said)
        self.assertRegex(said, r"optimizer.offload needs [\d.]+ MB of files for the 2 ranks of this host, and [\d.]+ MB are free in small: "
                                r'optimizer.offload = "none" fits \([\d.]+ MB a rank\); ')
        code, said = self.in_small_folder("100k", *again, ANNULUS_MEMORY_CHECK="0")
        self.assertEqual(code, 8, said)
        self.assertRegex(said, r"optimizer.offload: cannot reserve [\d.]+ MB for a file in small: No space left on device")
        self.assertEqual(self.weights("tiny-001", 4), kept)
        code, said = self.in_small_folder("10m", *again)
        self.assertEqual(code, 0, said)

    def sharding_levels(self, levels, ranks, *sets):
        steps = ["--set", "run.steps=3", "--set", "validation.every=3"]
        for level in (0, *levels):
            self.train(ranks, *steps, *[w for s in (*sets, f"optimizer.shard={level}") for w in ("--set", s)])
        whole = self.metrics("tiny-001")
        self.assertEqual(len(self.weights("tiny-001", 3)), 2 * ranks)
        for run in (f"tiny-{i:03}" for i in range(2, 2 + len(levels))):
            for a, b in zip(whole, self.metrics(run), strict=True):
                for key in ("loss", "gradient_norm", "validation_loss"):
                    self.assertEqual(a.get(key), b.get(key), f"{run}, {key}")
            self.assertEqual(self.weights("tiny-001", 3), self.weights(run, 3), run)

    def test_every_sharding_level_is_bit_identical(self):
        self.sharding_levels((1, 2, 3), 2, "model.recompute=true", "model.tie_embeddings=true", "data.accumulate=2")

    def test_sharding_levels_are_bit_identical_in_bf16(self):
        self.sharding_levels((1, 3), 3, "mesh.data=3", "data.batch=6", "model.dtype=bf16")

    def test_sharding_levels_are_bit_identical_in_fp64_and_two_axes(self):
        self.sharding_levels((2, 3), 4, "mesh.data=2", "data.accumulate=3", "model.recompute=true", "optimizer.clip=0.1",
                                  "model.dtype=fp64")

    def stop_by(self, signal_number, code, *sets):
        """Stops a run of 3,000 small steps after its first line; returns the step of its checkpoint."""
        args = ["--set", "run.steps=3000", *sets]
        running = self.start("launch", "-n", "2", "train", "tiny.toml", *args, env={"ANNULUS_PROGRESS": "plain"})
        running.wait_for("step 1/")
        running.signal(signal_number)
        got, err = running.finish()
        out = "".join(running.lines) + err
        self.assertEqual(got, code, out)
        self.assertRegex(out, r"continue:.*--resume \S*runs/tiny-001")
        return self.steps("tiny-001")[-1]

    def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(self):
        stopped_at = self.stop_by(signal.SIGINT, 130)
        end = stopped_at + 3
        # The schedule of the learning rate ends with run.steps, so both parts must have the same. A signal cannot stop a
        # run at an exact step, so both runs are compared at a checkpoint of their schedule.
        sets = ["--set", "run.steps=3000", "--set", f"checkpoint.every={end}", "--set", "checkpoint.keep=1000",
                "--set", "validation.every=0"]
        for resume in (["--resume", "runs/tiny-001"], []):
            running = self.start("launch", "-n", "2", "train", "tiny.toml", *sets, *resume)
            while not os.path.exists(self.path(f"runs/tiny-00{1 if resume else 2}/checkpoints/step-{end:08}")):
                self.assertIsNone(running.process.poll())
                time.sleep(0.01)
            running.signal(signal.SIGTERM)
            self.assertEqual(running.finish()[0], 143)
        self.assertEqual(self.weights("tiny-001", end), self.weights("tiny-002", end))
        a, b = self.losses("tiny-001"), self.losses("tiny-002")
        self.assertEqual(a[:end], b[:end])

    def test_sigterm_during_validation_writes_a_checkpoint(self):
        sets = ["--set", "validation.every=2", "--set", "validation.batches=2000"]  # the first one follows step 2
        self.assertEqual(self.stop_by(signal.SIGTERM, 143, *sets), 2)

    def test_full_disk_keeps_the_last_checkpoint(self):
        # A checkpoint takes about 450 kB; the third does not fit, as old ones are removed only after a new one is complete.
        # The folder is gone with the namespace, so its content is listed inside.
        code, said = self.in_small_folder("1400k", "launch", "-n", "2", "train", "tiny.toml", "--set", "run.folder=small",
                                          after="ls -d small/tiny-001/checkpoints/*")
        self.assertEqual(code, 8, said)
        self.assertRegex(said, r"[Nn]o space left")
        self.assertRegex(said, r"to continue from the checkpoint of step \d+: ")
        left = re.findall(r"^small/tiny-001/checkpoints/(.*)$", said, re.M)
        self.assertGreaterEqual(len(left), 1, said)
        self.assertTrue(all(re.fullmatch(r"step-\d{8}", name) for name in left), left)


if __name__ == "__main__":
    cli.main()
