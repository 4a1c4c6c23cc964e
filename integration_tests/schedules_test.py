#!/usr/bin/env python3
"""Compares the learning rates that `annulus train` writes to metrics.jsonl with those of PyTorch's schedulers.

    schedules_test.py ANNULUS TORCH_FOLDER
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_python  # noqa: E402

torch_python.enter()

import cli  # noqa: E402
import torch  # noqa: E402
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR  # noqa: E402

LR, STEPS, WARMUP, DECAY, LEAST = 3e-2, 240, 20, 60, 0.1
CONFIG = f"""
device = "cpu"
[run]
name = "tiny"
steps = {STEPS}
log_every = 1
[data]
train = ["text.txt"]
context = 8
batch = 1
validation_fraction = 0.0
[model]
layers = 1
dim = 8
heads = 2
[optimizer]
lr = {LR}
min_lr_ratio = {LEAST}
[validation]
every = 0
[checkpoint]
every = 0
"""


def rates(make):
    """Returns the rate of each step, with the scheduler that `make` makes for an optimizer."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = make(optimizer)
    of_steps = []
    for _ in range(STEPS):
        of_steps.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return of_steps


def warmed_up(*parts):
    """LinearLR over WARMUP steps, then each of (a scheduler of the optimizer, the step from which it applies)."""

    def make(optimizer):
        warmup = LinearLR(optimizer, start_factor=1 / WARMUP, end_factor=1.0, total_iters=WARMUP - 1)
        return SequentialLR(optimizer, [warmup, *[part(optimizer) for part, _ in parts]], [at for _, at in parts])

    return make


def line(steps):
    return lambda optimizer: LinearLR(optimizer, start_factor=1.0, end_factor=LEAST, total_iters=steps)


def cosine(steps):
    return lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps, eta_min=LR * LEAST)


def constant(optimizer):
    return ConstantLR(optimizer, factor=1.0, total_iters=0)


class SchedulesTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        with open(self.path("text.txt"), "w") as f:
            f.write("for i in range(10):\n    print(i)\n" * 100)
        with open(self.path("tiny.toml"), "w") as f:
            f.write(CONFIG)
        self.runs = 0

    def trained(self, **keys):
        sets = [word for key, value in keys.items() for word in ("--set", f"optimizer.{key}={value}")]
        # Without the stub libraries of tools/cuda_stubs.py.
        code, out, err = self.annulus("train", "tiny.toml", *sets, LD_LIBRARY_PATH=None)
        self.assertEqual(code, 0, out + err)
        self.runs += 1
        with open(self.path(f"runs/tiny-{self.runs:03}/metrics.jsonl")) as f:
            return [line["learning_rate"] for line in map(json.loads, f) if "loss" in line]

    def assert_equal(self, want, **keys):
        got = self.trained(**keys)
        self.assertEqual(len(got), STEPS)
        for step, (a, b) in enumerate(zip(got, want, strict=True)):
            self.assertLessEqual(abs(a - b), 1e-12 * LR, f"{keys}, step {step + 1}")

    def test_cosine_matches_pytorch(self):
        self.assert_equal(rates(warmed_up((cosine(STEPS - WARMUP), WARMUP))), warmup=WARMUP)
        self.assert_equal(rates(cosine(STEPS)), schedule="cosine")

    def test_linear_matches_pytorch(self):
        self.assert_equal(rates(warmed_up((line(STEPS - WARMUP), WARMUP))), schedule="linear", warmup=WARMUP)
        self.assert_equal(rates(line(STEPS)), schedule="linear")

    def test_constant_matches_pytorch(self):
        self.assert_equal(rates(warmed_up((constant, WARMUP))), schedule="constant", warmup=WARMUP)

    def test_warmup_stable_decay_matches_pytorch(self):
        self.assert_equal(rates(warmed_up((constant, WARMUP), (line(DECAY), STEPS - DECAY))), schedule="wsd",
                          warmup=WARMUP, decay=DECAY)

        # Without steps left for a stable phase, the rate falls from the end of the warm-up on.
        def factor(step):
            return (step + 1) / WARMUP if step < WARMUP else 1 - (1 - LEAST) * (step - WARMUP) / (STEPS - WARMUP)

        self.assert_equal(rates(lambda optimizer: LambdaLR(optimizer, factor)), schedule="wsd", warmup=WARMUP,
                          decay=STEPS)


if __name__ == "__main__":
    cli.main()
