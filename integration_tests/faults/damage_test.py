#!/usr/bin/env python3
"""State that is wrong on two hosts: checkpoints with flipped bits, cut or missing files, weights that are not finite, bits that
change in the memory of a rank, and ranks that are given different things. It is found, said, and trains nothing."""

import glob
import json
import math
import os
import re
import shutil
import signal
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python", "annulus", "testing"))
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")
import faulty_jobs as faults
import cli


class CheckpointsTest(faults.FaultTest):
    def test_damaged_checkpoints_are_left_out(self):
        cli.write_tiny_run(self.folder, 6, checkpoint={"every": 2, "keep": 3})
        job = self.launch("train", "config.toml", after=30)
        self.assertEqual(job.finish(), 0, job.text)
        self.assertEqual(self.checkpoints(), [2, 4, 6])
        kept = {step: self.state(step) for step in (2, 4, 6)}
        folder = self.path("runs/tiny-001/checkpoints/step-")
        files = sorted(name for name in kept[6] if name.startswith("model"))
        self.assertEqual(len(files), 2, "one of each rank")

        def flip():
            with open(f"{folder}00000006/{files[1]}", "r+b") as f:
                f.seek(-1, os.SEEK_END)
                last = f.read(1)[0]
                f.seek(-1, os.SEEK_END)
                f.write(bytes([last ^ 1]))

        for damage, what, reason in [
            (flip, files[1], "a flipped bit"),
            (lambda: os.truncate(f"{folder}00000006/{files[0]}", os.path.getsize(f"{folder}00000006/{files[0]}") - 4), files[0],
             "a file that is cut"),
            (lambda: os.remove(f"{folder}00000006/{files[1]}"), files[1], "a missing file"),
        ]:
            damage()
            job = self.launch("train", "config.toml", "--resume", after=30)
            self.assertEqual(job.finish(), 0, job.text)
            self.assertRegex(job.text["out"] + job.text["err"], rf"skipped a checkpoint: \S.*{what}", reason)
            self.assertIn("resumed after step 4", job.text["out"], reason)
            self.assertEqual(self.state(4), kept[4], reason)
            # The step is saved again, in place of the damaged one, and is what it was.
            again = self.path("runs/tiny-001/checkpoints/step-00000006-2")
            self.assertFalse(os.path.exists(f"{folder}00000006"), reason)
            os.rename(again, f"{folder}00000006")
            self.assertEqual(self.state(6), kept[6], reason)

    def test_a_checkpoint_that_one_host_does_not_see(self):
        cli.write_tiny_run(self.folder, 4, checkpoint={"every": 2})
        job = self.launch("train", "config.toml", after=30)
        self.assertEqual(job.finish(), 0, job.text)
        newest = self.path("runs/tiny-001/checkpoints/step-00000004")
        self.hosts.run(["mount", "-t", "tmpfs", "tmpfs", newest], on="host2", check=True)
        job = self.launch("train", "config.toml", "--resume", after=30)
        self.assertEqual(job.finish(), 0, job.text)
        self.assertRegex(job.text["out"] + job.text["err"], r"skipped a checkpoint: .*on rank 1.*step-00000004")
        self.assertIn("resumed after step 2", job.text["out"])


class DisagreeingTest(faults.FaultTest):
    """Host 2 is given something else than host 1."""

    def refuses(self, pattern, *args, code=5):
        job = self.launch(*args, after=30)
        self.assertEqual(job.finish(), code, job.text)
        self.assertRegex(job.text["err"], pattern)
        self.assertEqual(glob.glob(self.path("runs/tiny-*")), [], "nothing has been written")

    def test_another_dtype(self):
        cli.write_tiny_run(self.folder, 4)
        self.put("host2", cli.tiny_config(4, model={"dtype": "bf16"}).encode(), self.path("config.toml"))
        self.refuses(r"config\.toml", "train", "config.toml")

    def test_other_data(self):
        cli.write_tiny_run(self.folder, 4)
        with open(self.path("text.txt"), "rb") as f:
            content = bytearray(f.read())
        content[1000] ^= 1
        self.put("host2", bytes(content), self.path("text.txt"))
        self.refuses(r"rank 0 .*data.*rank 1|data.*rank 0.*rank 1", "train", "config.toml")


class Tensors:
    """The tensors of a safetensors file in fp32, whose bytes can be read and changed."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as f:
            size = struct.unpack("<Q", f.read(8))[0]
            self.places = {name: (8 + size + begin, 8 + size + end)
                           for name, (begin, end) in ((n, t["data_offsets"]) for n, t in json.loads(f.read(size)).items() if n != "__metadata__")}

    def read(self, name):
        begin, end = self.places[name]
        with open(self.path, "rb") as f:
            f.seek(begin)
            return f.read(end - begin)

    def write(self, name, index, value):
        with open(self.path, "r+b") as f:
            f.seek(self.places[name][0] + 4 * index)
            f.write(struct.pack("<f", value))


class NotFiniteTest(faults.FaultTest):
    """A model in which what stands for one byte is not a number. The text has the byte once."""

    def setUp(self):
        super().setUp()
        cli.write_tiny_run(self.folder, 1)
        for command in ("train", "config.toml"), ("export", "tiny-001", "model"):
            self.hosts.run([cli.ANNULUS, *command], cwd=self.folder, env=cli.environment(), check=True, capture_output=True, timeout=cli.LIMIT)
        shutil.rmtree(self.path("runs"))
        Tensors(self.path("model/model.safetensors")).write("model.embed_tokens.weight", ord("Z") * 32, float("nan"))
        text = "all work and no play " * 70
        # 11 steps are a pass over the text.
        cli.write_tiny_run(self.folder, 13, text=text[:500] + "Z" + text[500:], model={"from": "model"}, data={"validation_fraction": 0.0},
                           checkpoint={"every": 1, "keep": 100})

    def not_finite(self, step):
        """The values of the checkpoint that are not finite, by tensor."""
        found = {}
        for path in glob.glob(self.path(f"runs/tiny-001/checkpoints/step-{step:08}/*.safetensors")):
            tensors = Tensors(path)
            for name in tensors.places:
                values = struct.unpack(f"<{len(tensors.read(name)) // 4}f", tensors.read(name))
                bad = sum(not math.isfinite(v) for v in values)
                if bad:
                    found[name] = found.get(name, 0) + bad
        return found

    def test_the_update_is_left_out(self):
        job = self.launch("train", "config.toml", after=30)
        self.assertEqual(job.finish(), 0, job.text)
        left_out = [m["step"] for m in self.metrics() if "loss" in m and m["loss"] is None]
        self.assertIn(len(left_out), (1, 2))
        said = job.text["out"] + job.text["err"]
        self.assertEqual([int(n) for n in re.findall(r"step (\d+): the loss or the gradients are not finite, so this update is left out", said)],
                         left_out)
        # What was not finite before still is, and nothing else has become so.
        self.assertEqual(list(self.not_finite(self.checkpoints()[-1]).values()), [1])

    def test_the_run_stops_if_it_is_to(self):
        job = self.launch("train", "config.toml", "--set", "optimizer.skips=1", after=30)
        self.assertEqual(job.finish(), 2, job.text)
        said = re.search(r"the loss or the gradients were not finite in 1 step, at step (\d+); such updates are not applied", job.text["err"])
        self.assertTrue(said, job.text)
        self.assertEqual(self.checkpoints()[-1], int(said.group(1)) - 1)
        self.assertEqual(list(self.not_finite(self.checkpoints()[-1]).values()), [1])

    def test_another_model_on_one_host(self):
        with open(self.path("model/model.safetensors"), "rb") as f:
            content = f.read()
        self.put("host2", content[:-1] + bytes([content[-1] ^ 1]), self.path("model/model.safetensors"))
        job = self.launch("train", "config.toml", after=30)
        self.assertEqual(job.finish(), 5, job.text)
        self.assertRegex(job.text["err"], r"ranks disagree before agreeing on the run: .* is \w+ on rank 0, \w+ on rank 1")
        self.assertEqual(glob.glob(self.path("runs/tiny-*")), [])


class MemoryTest(faults.FaultTest):
    """Bits of a weight that change in the memory of one rank. The learning rate is too small to change a weight, so that the
    test knows the weights that the rank has from a checkpoint."""

    def change(self, hosts, rank, **tiny):
        cli.write_tiny_run(self.folder, 1000000, optimizer={"lr": 1e-30, "shard": 0}, checkpoint={"every": 1},
                           run={"compare_copies": 1}, **tiny)
        job = self.launch("train", "config.toml", hosts=("--hosts", hosts), after=30)
        self.wait_for_checkpoint(job, 2)
        pid = job.stop_at(rank, "layer forward", 3)
        files = glob.glob(self.path(f"runs/tiny-001/checkpoints/step-{self.checkpoints()[-1]:08}/model*.safetensors"))
        weights = next(file.read(name) for file in map(Tensors, files) for name in file.places if "down" in name)[:64]
        self.assertGreater(faults.replace_in_memory(pid, weights, bytes([weights[0] ^ 1]) + weights[1:]), 0)
        os.kill(pid, signal.SIGCONT)
        return job

    def ends(self, job, pattern):
        self.named(job, "changed bits", pattern, 10)
        self.assertEqual(job.finish(), 8, job.text)
        self.assertIn("to continue from the checkpoint of step", job.text["err"])

    def test_of_two_copies_both_are_named(self):
        self.ends(self.change("host1:1,host2:1", 1),
                  r"step \d+: .*should have the same bits on all ranks, but rank 0 .*rank 1 .*hold different ones")

    def test_of_three_copies_the_odd_one_is_named(self):
        self.ends(self.change("host1:2,host2:1", 2, mesh={"data": 3}, data={"batch": 3}),
                  r"step \d+: .*should have the same bits on all ranks, but rank 2 \(?.*host2.*holds others than the other 2 ranks")


if __name__ == "__main__":
    cli.main()
