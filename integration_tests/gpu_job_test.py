#!/usr/bin/env python3
"""Tests `annulus attend` and `train` on GPUs, with one rank and, if there are more GPUs, with one rank on each: attention
against the oracle, training against the same steps on a CPU in fp64. Skipped without a GPU."""

import concurrent.futures
import json
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

cli.LIMIT = 280  # the first start on a GPU loads many kernels
MOST_PROCESSES = 8
STEPS = 20
MULTIPLE = 8  # how many times the error of a CPU the error of a GPU may be, both against fp64
gpus = 0


class GpuJobTest(cli.CliTest):
    def worlds(self):
        return [n for n in (1, 2, 4, 8) if n <= gpus]

    def launch(self, ranks):
        return ["launch", "-n", str(ranks)] if ranks > 1 else []

    def test_attend_equals_the_oracle(self):
        patterns = [
            "{ kind = 'causal' }",
            "{ kind = 'window', left = 40, right = 0 }",
            "{ kind = 'dilated', segment_lengths = [64, 256], dilation_rates = [1, 4] }",
            "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 4 }",
        ]
        wanted = [(dtype, pattern) for dtype in ("bf16", "f16", "f32", "f64") for pattern in patterns]

        def attend(ranks, dtype, pattern):
            sizes = f"batch=2,queries=304,heads=4,kv_heads=2,dim=64,dtype={dtype},seed=7"
            return self.annulus(
                *self.launch(ranks), "attend", "--device", "cuda", "--random", sizes, "--pattern", pattern,
                "--layout", "zigzag", "--backward", "--check")

        # A command takes several seconds to start, on one core for each rank, so several run at once.
        processes = min(MOST_PROCESSES, max(2, len(os.sched_getaffinity(0))))
        for ranks in self.worlds():
            with concurrent.futures.ThreadPoolExecutor(max(1, processes // ranks)) as pool:
                runs = [pool.submit(attend, ranks, *what) for what in wanted]
                for (dtype, pattern), run in zip(wanted, runs):
                    with self.subTest(ranks=ranks, dtype=dtype, pattern=pattern):
                        code, out, err = run.result()
                        self.assertEqual(code, 0, err)
                        self.assertRegex(out, rf"attend: {ranks} ranks? on GPUs, ")
                        self.assertIn("check: out ", out)

    def losses(self, ranks, *more):
        """The losses of the steps of a run of small.toml with these settings."""
        settings = [word for setting in more for word in ("--set", setting)]
        code, out, err = self.annulus(*self.launch(ranks), "train", "small.toml", *settings)
        self.assertEqual(code, 0, err)
        device = next(s.partition("=")[2] for s in more if s.startswith("device="))
        self.assertIn("device " + device, out)
        folder = re.search(r"run folder (\S+)", out).group(1)
        with open(self.path(os.path.join(folder, "metrics.jsonl"))) as f:
            losses = [row["loss"] for row in map(json.loads, f) if "loss" in row]
        self.assertEqual(len(losses), STEPS)
        return losses

    def test_training_has_the_losses_of_the_cpu_with_any_number_of_gpus(self):
        with open(self.path("text.txt"), "w") as f:
            f.write("def f(x):\n    return x + 1\n" * 2000)
        with open(self.path("small.toml"), "w") as f:
            f.write(f"""
[run]
name = "small"
steps = {STEPS}
log_every = 1
[data]
train = ["text.txt"]
context = 256
batch = 2
[model]
layers = 2
dim = 128
heads = 2
ffn = 256
[optimizer]
lr = 2e-3
warmup = 5
[attention]
layout = "zigzag"
""")
        exact = self.losses(1, "device=cpu", "model.dtype=fp64")

        def error(losses):
            return max(abs(a - b) for a, b in zip(losses, exact, strict=True))

        for dtype in ("fp32", "bf16"):
            # What this dtype costs on one rank of this machine's CPU. Another order of sums is another draw of the same
            # rounding, which may be a few times as large; the units of the last place are those of a loss in fp32.
            on_cpu = error(self.losses(1, "device=cpu", "model.dtype=" + dtype))
            bound = MULTIPLE * on_cpu + 4 * max(exact) * 2**-24
            with self.subTest(dtype=dtype):
                # Otherwise the comparison would say nothing about what was learned.
                self.assertGreater(exact[0] - exact[-1], 5 * bound)
            first = None
            for ranks in self.worlds():
                with self.subTest(ranks=ranks, dtype=dtype):
                    losses = self.losses(ranks, "device=cuda", "model.dtype=" + dtype)
                    self.assertLessEqual(error(losses), bound, f"on a CPU it is {on_cpu}")
                    first = first or losses
                    self.assertLessEqual(max(abs(a - b) for a, b in zip(losses, first)), bound, "one GPU against several")


if __name__ == "__main__":
    doctor = cli.subprocess.run([cli.ANNULUS, "doctor"], capture_output=True, text=True, env=cli.environment()).stdout
    device = re.search(r"^  device +(.*)$", doctor, re.M).group(1)
    found = re.match(r"cuda, (\d+) GPU", device)  # counted by CUDA: the machine may have more than a container may use
    if not found:
        print("SKIPPED: " + device)
        sys.exit(0)
    gpus = int(found.group(1))
    cli.main()
