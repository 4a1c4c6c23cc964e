#!/usr/bin/env python3
"""Tests `annulus attend` and `train` on GPUs, with one rank and, if there are more GPUs, with one rank on each. Skipped
without a GPU; it has never run on a GPU."""

import concurrent.futures
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

cli.LIMIT = 280  # the first start on a GPU loads many kernels
MOST_PROCESSES = 8
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

    def test_training_lowers_the_loss(self):
        with open(self.path("text.txt"), "w") as f:
            f.write("def f(x):\n    return x + 1\n" * 2000)
        with open(self.path("small.toml"), "w") as f:
            f.write("""
device = "cuda"
[run]
name = "small"
steps = 20
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
        for ranks in self.worlds():
            with self.subTest(ranks=ranks):
                code, out, err = self.annulus(*self.launch(ranks), "train", "small.toml")
                self.assertEqual(code, 0, err)
                self.assertIn("device cuda", out)
                folder = re.search(r"run folder (\S+)", out).group(1)
                with open(self.path(os.path.join(folder, "metrics.jsonl"))) as f:
                    losses = [float(x) for x in re.findall(r'"loss": ?([\d.]+)', f.read())]
                self.assertEqual(len(losses), 20)
                self.assertLess(losses[-1], 0.8 * losses[0])


if __name__ == "__main__":
    doctor = cli.subprocess.run([cli.ANNULUS, "doctor"], capture_output=True, text=True, env=cli.environment()).stdout
    device = re.search(r"^  device +(.*)$", doctor, re.M).group(1)
    found = re.match(r"cuda, (\d+) GPU", device)  # counted by CUDA: the machine may have more than a container may use
    if not found:
        print("SKIPPED: " + device)
        sys.exit(0)
    gpus = int(found.group(1))
    cli.main()
