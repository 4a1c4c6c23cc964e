#!/usr/bin/env python3
"""Tests `annulus plan --model`: the tables of docs/explanation/memory.md, exact JSON, longest rows, and errors."""

import json
import os
import re
import shlex
import shutil
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import cli  # noqa: E402

ROOT = os.path.dirname(HERE)
CONFIG = """
[run]
steps = 1
[data]
train = ["nowhere/*.tokens"]
context = 4096
batch = 2
[model]
layers = 4
dim = 256
heads = 4
dtype = "bf16"
[optimizer]
lr = 1e-3
"""
NUMBERS = re.compile(r"^ +([0-3]) +(no|yes)((?: +[\d.]+){6})  (yes|no) +(.*)$", re.M)


class PlanMemoryTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        shutil.copytree(os.path.join(ROOT, "configs"), self.path("configs"))
        with open(self.path("small.toml"), "w") as f:
            f.write(CONFIG)

    def plan(self, *more, ranks=4, memory="1GB"):
        args = ["plan", "--model", "small.toml", "--ranks", str(ranks), "--device-memory", memory, *more]
        code, out, err = self.annulus(*args)
        self.assertEqual((code, err), (0, ""), out)
        return out

    def json(self, *more, **options):
        return json.loads(self.plan("--json", *more, **options))

    def test_docs_page_shows_the_printed_tables(self):
        with open(os.path.join(ROOT, "docs", "explanation", "memory.md")) as f:
            shown = re.findall(r"^    (\./annulus plan .*)\n\n```\n((?:[^`].*\n|\n)*)```$", f.read(), re.M)
        self.assertEqual(len(shown), 6)
        for command, table in shown:
            code, out, err = self.annulus(*shlex.split(command)[1:])
            self.assertEqual((code, err, out), (0, "", table), command)

    def test_table_agrees_with_json(self):
        rows, fits = NUMBERS.findall(self.plan()), self.json()["fits"]
        self.assertEqual(len(rows), 8)
        for (level, recompute, numbers, does, longest), fit in zip(rows, fits):
            self.assertEqual((int(level), recompute == "yes"), (fit["shard"], fit["recompute"]))
            self.assertEqual([f"{b / 1e6:.1f}" for b in fit["bytes"].values()], numbers.split())
            self.assertEqual(does == "yes", fit["fits"])
            self.assertEqual(int(longest.replace(",", "")), fit["longest_context"])

    def test_bytes_add_up(self):
        plan = self.json()
        weights = plan["parameters"]
        # A unit (each of the 4 layers, the embedding, the output) ends at a multiple of 16 elements for each of 4 ranks, and
        # its vectors begin at one of 16.
        padding = 6 * (4 * 16 + 16)
        for fit in plan["fits"]:
            held = dict(fit["bytes"])
            total = held.pop("total")
            self.assertEqual(sum(held.values()), total)
            self.assertEqual(fit["fits"], total <= 10**9)
            parts = 1 if fit["shard"] == 0 else 4
            self.assertGreaterEqual(held["optimizer"], 8 * weights / parts)
            self.assertLessEqual(held["optimizer"], 8 * (weights + padding) / parts)
        self.assertEqual((plan["data"], plan["context"], plan["shards"], plan["replicas"]), (1, 4, 4, 1))
        self.assertGreaterEqual(plan["traffic"][0]["reduce_scatter_bytes"], 3 * weights)
        self.assertLessEqual(plan["traffic"][0]["reduce_scatter_bytes"], 3 * (weights + padding))

    def test_fp64_doubles_what_fp32_takes_and_needs_a_cpu(self):
        fp32, fp64 = (self.json("--cpu", "--set", f"model.dtype={dtype}") for dtype in ("fp32", "fp64"))
        for narrow, wide in zip(fp32["fits"], fp64["fits"]):
            for kind in ("weights", "gradients", "optimizer"):
                self.assertEqual(wide["bytes"][kind], 2 * narrow["bytes"][kind], kind)
        for narrow, wide in zip(fp32["traffic"], fp64["traffic"]):
            self.assertEqual(wide["reduce_scatter_bytes"], 2 * narrow["reduce_scatter_bytes"])
        self.assert_refused(2, "plan it with --cpu", "plan", "--model", "small.toml", "--ranks", "4", "--device-memory",
                            "1GB", "--set", "model.dtype=fp64")

    def test_longest_context_fits_and_a_longer_one_does_not(self):
        fits = self.json()["fits"]
        for fit in (fits[2], fits[7]):
            at = ["--set", f"optimizer.shard={fit['shard']}", "--set", f"model.recompute={str(fit['recompute']).lower()}"]
            for more, does in ((0, True), (8, False)):
                plan = self.json(*at, "--set", f"data.context={fit['longest_context'] + more}")
                same = [f for f in plan["fits"] if (f["shard"], f["recompute"]) == (fit["shard"], fit["recompute"])]
                self.assertEqual(same[0]["fits"], does)

    def test_shards_within_a_host(self):
        within = ["--set", 'optimizer.shard_within="host"']
        plan = self.json(*within, ranks=8)
        self.assertEqual((plan["shards"], plan["replicas"]), (8, 1))
        plan = self.json(*within, "--ranks-per-host", "2", ranks=8)
        self.assertEqual((plan["shards"], plan["replicas"]), (2, 4))
        self.assertIn("state over 2 ranks, 4 times", self.plan(*within, "--ranks-per-host", "2", ranks=8))

    def test_plans_for_ranks_on_cpus(self):
        self.assertIn("\na rank has 1.0 GB", self.plan("--cpu"))
        self.assertGreater(self.json("--cpu")["fits"][7]["bytes"]["total"], 0)
        # On CPUs sums are sent in messages, which need memory of their own.
        self.assertNotEqual(self.json("--cpu")["fits"][7]["bytes"], self.json()["fits"][7]["bytes"])

    def test_says_what_prevents_a_fit(self):
        out = self.plan(memory="1MB")
        self.assertRegex(out, r"nearest: no optimizer.shard, .* rows of 8 tokens need .* of which weights, gradients and optimizer")
        self.assertEqual({row[4] for row in NUMBERS.findall(out)}, {"none"})

    def test_refuses_invalid_requests(self):
        model = ["plan", "--model", "small.toml"]
        whole = [*model, "--ranks", "4", "--device-memory", "1GB"]
        for args, code, part in [
            ([*model, "--device-memory", "1GB"], 2, "--model needs --ranks"),
            ([*model, "--ranks", "0", "--device-memory", "1GB"], 2, "--ranks must be at least 1, got 0"),
            ([*model, "--ranks", "4"], 2, "--model needs --device-memory"),
            ([*model, "--ranks", "4", "--device-memory", "141GX"], 2, '141GB or 80GiB, got "141GX"'),
            ([*whole, "--length", "99"], 2, "--length is for a plan of attention"),
            ([*whole, "--heads", "8"], 2, "--heads is for a plan of attention"),
            ([*whole, "--no-proof"], 2, "--no-proof is for a plan of attention"),
            ([*whole, "--set", "model.layesr=3"], 2, 'did you mean "model.layers"'),
            ([*whole, "--set", "mesh.context=3"], 4, "mesh"),
            ([*whole, "--set", "data.context=4099"], 4, "multiple of 8"),
            ([*whole, "--set", "optimizer.shard_within=host", "--ranks-per-host", "3"], 4, "the same number of ranks on every host"),
            ([*whole, "--set", "model.layers=100000", "--set", "model.dim=8388608"], 8, "more than any machine has"),
            (["plan", "--model", "none.toml", "--ranks", "4", "--device-memory", "1GB"], 3, "none.toml"),
            (["plan", "--ranks", "4", "--length", "99", "--cpu"], 2, "--cpu is for the memory of a training step"),
            (["plan", "--ranks", "4", "--length", "99", "--set", "a=b"], 2, "--set is for the memory of a training step"),
        ]:
            self.assert_refused(code, part, *args)


cli.main()
