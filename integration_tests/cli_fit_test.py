#!/usr/bin/env python3
"""Tests `annulus fit`: the tables of docs/explanation/memory.md, exact JSON, longest rows, folders of models, and errors."""

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
CONFIG = cli.FIT_CONFIG
# The config.json of a model with the shape of CONFIG.
FOLDER = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
NUMBERS = re.compile(r"^ +([0-3]) +(all|recompute|offload|optimizer)((?: +[\d.]+){6})  (yes|no) +([\d,]+|none|only these)(?:  (.*))?$", re.M)
ATTENTION = ("kv_bytes_sent", "gradient_bytes_sent", "query_bytes_sent")


class FitTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        shutil.copytree(os.path.join(ROOT, "configs"), self.path("configs"))
        with open(self.path("small.toml"), "w") as f:
            f.write(CONFIG)

    def fit(self, *more, model="small.toml", ranks=4, memory="1GB"):
        code, out, err = self.annulus("fit", model, "--ranks", str(ranks), "--device-memory", memory, *more)
        self.assertEqual((code, err), (0, ""), out)
        return out

    def json(self, *more, **options):
        return json.loads(self.fit("--json", *more, **options))

    def sent(self, *more, **options):
        """Returns what attention sends at each level."""
        return [{key: level[key] for key in ATTENTION} for level in self.json(*more, **options)["traffic"]]

    def write_folder(self, name="model", **keys):
        os.makedirs(self.path(name))
        with open(self.path(f"{name}/config.json"), "w") as f:
            json.dump({**FOLDER, **keys}, f)

    def test_docs_page_shows_the_printed_tables(self):
        with open(os.path.join(ROOT, "docs", "explanation", "memory.md")) as f:
            shown = re.findall(r"^    (\./annulus fit .*)\n\n```\n((?:[^`].*\n|\n)*)```$", f.read(), re.M)
        self.assertEqual(len(shown), 4)
        for command, table in shown:
            code, out, err = self.annulus(*shlex.split(command)[1:])
            self.assertEqual((code, err, out), (0, "", table), command)

    def test_table_agrees_with_json(self):
        table, plan = self.fit(), self.json()
        rows, fits = NUMBERS.findall(table), plan["fits"]
        self.assertEqual(len(rows), 16)
        for (level, keeps, numbers, does, longest, attention), fit in zip(rows, fits):
            self.assertEqual(attention, fit["attention"]["chosen"] + (" (leanest)" if fit["attention"]["leanest"] else ""))
            self.assertEqual((int(level), keeps), (fit["shard"], fit["keeps"]))
            self.assertEqual([f"{b / 1e6:.1f}" for b in fit["bytes"].values()], numbers.split())
            self.assertEqual(does == "yes", fit["fits"])
            self.assertEqual(int(longest.replace(",", "")), fit["longest_context"])
        sent = re.findall(r"^ +([0-3])((?: +[\d.]+){5})$", table, re.M)
        self.assertEqual(len(sent), 4)
        for (level, numbers), state in zip(sent, plan["traffic"]):
            parts = [state[f"{part}_bytes"] for part in ("reduce_scatter", "all_gather")] + [state[key] for key in ATTENTION]
            self.assertEqual(int(level), state["shard"])
            total = sum(parts)
            parts.pop()
            self.assertEqual([f"{b / 1e6:.1f}" for b in [*parts, total]], numbers.split())

    def test_traffic_of_the_ring(self):
        full = ["--set", "model.pattern={ kind = 'full' }", "--set", "attention.schedule=ring"]
        ring, *others = self.sent(*full)
        self.assertEqual(others, [ring] * 3)
        # The keys and values of a rank: in 4 layers 2 rows of 1,024 tokens with 4 heads of 64 elements, for K and for V.
        block = 4 * 2 * 1024 * 4 * 64 * 2
        # Over 4 ranks each sends 3 blocks in the forward. In the backward it begins with the one that it received last, so
        # that it sends 2, and 3 blocks of gradients in fp32.
        self.assertEqual(ring, {"kv_bytes_sent": (3 + 2) * block * 2, "gradient_bytes_sent": 3 * block * 4, "query_bytes_sent": 0})
        for more, times in (("--batch", "4"), 2), (("--context", "8192"), 2), (("--set", "data.accumulate=3"), 3):
            self.assertEqual(self.sent(*full, *more)[0], {key: times * sent for key, sent in ring.items()}, more)
        self.assertEqual(self.sent(ranks=1), [{key: 0 for key in ATTENTION}])
        # Of a causal mask, rows that no rank further along needs are not sent.
        self.assertLess(self.sent(*full[2:])[0]["kv_bytes_sent"], ring["kv_bytes_sent"])
        self.assertNotIn("fewer where documents end within a row", self.fit())
        self.assertIn("fewer where documents end within a row", self.fit("--set", "data.documents=true"))

    def test_model_folder_fits_like_its_configuration(self):
        self.write_folder()
        same = self.json("--batch", "2", model="model")
        self.assertEqual(same, {**self.json(), "model": "model"})
        self.assertIn("; 1 row of 4,096 tokens in a batch;", self.fit(model="model"))
        longer = ["--context", "8192", "--batch", "2", "--set", "optimizer.shard=3"]
        self.assertEqual(self.json(*longer, model="model"), {**self.json(*longer), "model": "model"})
        self.assertEqual(self.json("--set", "model.from=model"), self.json())

    def test_refuses_folders_without_a_model(self):
        self.write_folder()
        at = ["--ranks", "4", "--device-memory", "1GB"]
        os.makedirs(self.path("empty"))
        self.assert_refused(3, "empty holds no config.json", "fit", "empty", *at)
        self.write_folder("other", model_type="mamba")
        self.assert_refused(3, 'other/config.json: "model_type" is "mamba"', "fit", "other", *at)
        os.makedirs(self.path("run"))
        shutil.copy(self.path("small.toml"), self.path("run/config.toml"))
        self.assert_refused(3, "run is a run folder: name its configuration, run/config.toml", "fit", "run", *at)
        self.assert_refused(2, "model.layers = 3, but the model in model has 4", "fit", "model", *at, "--set", "model.layers=3")

    def test_former_name_still_works_with_a_notice(self):
        at = ["--ranks", "4", "--device-memory", "1GB"]
        for former in (["--model", "small.toml", *at], [*at, "--model=small.toml"]):
            code, out, err = self.annulus("plan", *former)
            self.assertEqual((code, out), (0, self.fit()), err)
            self.assertEqual(err.count("\n"), 1, err)
            self.assertIn("`plan --model CONFIG` is now `fit CONFIG`", err)
        self.assert_refused(2, "fit: unknown option --length", "plan", "--model", "small.toml", *at, "--length", "99")
        code, out, err = self.annulus("plan", "--help")
        self.assertEqual((code, err), (0, ""))
        self.assertNotIn("--model", out)

    def test_help_has_groups_and_the_overview_lists_it(self):
        code, out, err = self.annulus("fit", "--help")
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out, r"(?s)\nDevices:\n  --ranks N .*\nTraining:\n  --context N .*\nLog:\n.*\nExamples:\n")
        code, out, err = self.annulus("--help")
        self.assertRegex(out, r"\nTrain:\n(?:  .*\n)*  fit ")

    def test_bytes_add_up(self):
        plan = self.json()
        weights = plan["parameters"]
        # A unit (a half of each of the 4 layers, the embedding, the output) ends at a multiple of 16 elements for each of 4 ranks, and
        # its vectors begin at one of 16.
        padding = 10 * (4 * 16 + 16)
        for fit in plan["fits"]:
            held = dict(fit["bytes"])
            total = held.pop("total")
            self.assertEqual(sum(held.values()), total)
            self.assertEqual(fit["fits"], total <= 10**9)
            parts = 1 if fit["shard"] == 0 else 4
            if fit["keeps"] == "optimizer":  # three sets of three chunks of a unit at most
                self.assertLessEqual(held["optimizer"], 9 * 4 * min(2**22, weights))
                continue
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
        self.assert_refused(2, "plan it with --cpu", "fit", "small.toml", "--ranks", "4", "--device-memory", "1GB",
                            "--set", "model.dtype=fp64")

    def test_longest_context_fits_and_a_longer_one_does_not(self):
        fits = self.json()["fits"]
        for fit in (fits[3], fits[10], fits[11]):
            for more, does in ((0, True), (8, False)):
                plan = self.json("--set", f"data.context={fit['longest_context'] + more}")
                same = [f for f in plan["fits"] if (f["shard"], f["keeps"]) == (fit["shard"], fit["keeps"])]
                self.assertEqual(same[0]["fits"], does)

    def test_shards_within_a_host(self):
        within = ["--set", 'optimizer.shard_within="host"']
        plan = self.json(*within, ranks=8)
        self.assertEqual((plan["shards"], plan["replicas"]), (8, 1))
        plan = self.json(*within, "--ranks-per-host", "2", ranks=8)
        self.assertEqual((plan["shards"], plan["replicas"]), (2, 4))
        self.assertIn("state over 2 ranks, 4 times", self.fit(*within, "--ranks-per-host", "2", ranks=8))

    def test_plans_for_ranks_on_cpus(self):
        self.assertIn("\na rank has 1.0 GB", self.fit("--cpu"))
        self.assertGreater(self.json("--cpu")["fits"][13]["bytes"]["total"], 0)
        # On CPUs sums are sent in messages, which need memory of their own.
        self.assertNotEqual(self.json("--cpu")["fits"][13]["bytes"], self.json()["fits"][13]["bytes"])

    def test_says_where_what_is_offloaded_lies(self):
        # Two of the four layers keep theirs on the device. The input and attention's output of 2 rows of 1,024 tokens, in
        # bf16; the statistics of 4 heads in fp32; and a block of keys and values of another rank.
        kept = 2 * 1024 * (2 * 256 * 2 + 4 * 4 + 2 * 256 * 2)
        ring = ["--set", "attention.schedule=ring"]
        ways = {way["memory_offload"]: way for way in self.json(*ring)["ways"][:4]}
        on_cpus = self.json("--cpu", *ring)["ways"]
        self.assertEqual([way["moved_bytes"] for way in ways.values()], [0, 2 * kept, 2 * kept])
        self.assertEqual((ways["host"]["host_bytes_of_host"], ways["host"]["file_bytes_of_host"]), (4 * 2 * kept, 0))
        buffers = 4 * 2 * (4 * 2**20 + 4096)  # of a file of each rank
        self.assertEqual((ways["file"]["host_bytes_of_host"], ways["file"]["file_bytes_of_host"]), (4 * 2 * kept + buffers, 4 * 2 * kept))
        self.assertEqual([way["keeps"] for way in on_cpus], ["all", "recompute", "offload", "optimizer"])
        self.assertEqual((on_cpus[2]["host_bytes_of_host"], on_cpus[2]["file_bytes_of_host"]), (0, 4 * 2 * kept))
        bounded = self.json(*ring, "--set", "memory.offload=host", "--set", "memory.host=20MB", "--set", "model.recompute=true", "--set", "device=cuda")["ways"][2]
        # On their way to files and back, two layers of each rank are in the host's memory; and a layer goes to one of them whole.
        self.assertEqual(bounded["host_bytes_of_host"], 20 * 10**6 + 4 * 2 * kept + buffers)
        self.assertAlmostEqual(bounded["file_bytes_of_host"], 4 * 2 * kept - 20 * 10**6 + 4 * kept, delta=10)
        self.assertEqual(self.json("--set", "memory.device_layers=4")["ways"][2]["moved_bytes"], 0)
        out = self.fit(*ring, "--tflops", "400")
        self.assertRegex(out, r"\n +offload: host +[\d.]+ +33.8 +0.0 +8.5 +[\d.]+ +[\d.]+  yes +[\d,]+\n +offload: files +[\d.]+ +67.4 +33.8 +8.5 ")
        self.assertRegex(out, r"\nat 400.0 TFLOP/s a rank computes a step in [\d.]+ s, which hides what layers keep at these rates\n")
        self.assertEqual(os.listdir(self.path(".")).count("runs"), 0)

    def test_says_what_the_optimizer_moves(self):
        # fp32 master weights and two moments of a quarter of all elements, which are padded.
        share = self.json()["parameters"] * 12 // 4
        on_gpus, on_cpus = self.json()["ways"], self.json("--cpu")["ways"]
        for plan in on_gpus[4], on_gpus[5], on_cpus[3]:
            self.assertAlmostEqual(plan["optimizer_moved_bytes"], share, delta=share // 1000)
        self.assertGreaterEqual(on_gpus[4]["host_bytes_of_host"] - on_gpus[2]["host_bytes_of_host"], 4 * share)
        self.assertEqual((on_gpus[4]["file_bytes_of_host"], on_cpus[3]["host_bytes_of_host"]), (0, 0))
        self.assertAlmostEqual(on_cpus[3]["file_bytes_of_host"] - on_cpus[2]["file_bytes_of_host"], 4 * share, delta=share // 10)
        out = self.fit("--tflops", "400")
        self.assertRegex(out, r"\n +optimizer: host .*\n +optimizer: files ")
        self.assertRegex(out, r"\nan update is not hidden; with the optimizer's state away, at [\d.]+ [KMGT]B/s each way, it adds 5 % to that\n")
        # Where it is configured, no way keeps it on the device.
        rows = self.json("--set", "optimizer.offload=host", "--set", "device=cuda")["fits"]
        self.assertEqual({row["bytes"]["optimizer"] for row in rows[12:]}, {rows[15]["bytes"]["optimizer"]})

    def test_says_what_auto_would_choose(self):
        auto = ["--set", "attention.layout=auto", "--set", "attention.machine=h100"]
        enough, little = self.json(*auto), self.json(*auto, memory="10MB")
        self.assertEqual({fit["attention"]["leanest"] for fit in enough["fits"]}, {False})
        self.assertEqual([fit["attention"]["leanest"] for fit in little["fits"]], [not fit["fits"] for fit in little["fits"]])
        name = r"(ring|group-cast|ulysses|mesh|all-gather)[\w, -]*, layout (zigzag|contiguous|striped|balanced)"
        for fit in enough["fits"] + enough["ways"]:
            self.assertRegex(fit["attention"]["chosen"], f"^{name}$")
        self.assertRegex(self.fit(*auto, memory="10MB"), rf"\n +0 +all .* no +none  {name} \(leanest\)\n")
        fixed = self.fit("--set", "attention.schedule=ring")
        self.assertRegex(fixed, r"\n +0 +all .* yes +[\d,]+\n")
        self.assertNotIn("longest rows  attention", fixed)

    def test_minds_what_a_host_has(self):
        model = "configs/plan/8b.toml"
        at = ["--set", "optimizer.shard=3", "--context", "131072", "--set", "attention.schedule=ring"]
        memory = "24GB"
        ways = self.json(*at, ranks=8, memory=memory, model=model)["ways"]
        kept = ways[2]["host_bytes_of_host"]
        plan = self.json(*at, "--host-memory", str(kept - 1), ranks=8, memory=memory, model=model)
        self.assertEqual([way["fits"] for way in plan["ways"][2:4]], [False, True])
        self.assertLess(plan["ways"][2]["longest_context"], 131072)
        self.assertRegex(plan["nearest"]["text"], r'^memory.offload = "file" fits \(')
        both = self.fit(*at, "--host-memory", str(kept - 1), "--disk", "10GB", ranks=8, memory=memory, model=model)
        self.assertIn(" and in files of 10.0 GB; ", both)
        self.assertRegex(both, r"\n +offload: files .*  no  ")
        self.assertIn("data.context = ", both.splitlines()[-1])
        small = ["fit", "small.toml", "--ranks", "4", "--device-memory", "1GB"]
        self.assert_refused(2, '--disk must be a number of bytes such as 141GB or 80GiB, got "1 disk"', *small, "--disk", "1 disk")
        self.assert_refused(2, "--host-memory", *small, "--host-memory", "")

    def test_says_what_prevents_a_fit(self):
        out = self.fit(memory="1MB")
        self.assertRegex(out, r"nearest: no optimizer.shard, .* rows of 8 tokens need .* of which weights, gradients and optimizer")
        self.assertEqual({row[4] for row in NUMBERS.findall(out)}, {"none"})

    def test_refuses_invalid_requests(self):
        model = ["fit", "small.toml"]
        whole = [*model, "--ranks", "4", "--device-memory", "1GB"]
        for args, code, part in [
            (["fit"], 2, "fit: CONFIG_OR_FOLDER is required"),
            ([*model, "--device-memory", "1GB"], 2, "fit: --ranks is needed"),
            ([*model, "--ranks", "0", "--device-memory", "1GB"], 2, "--ranks must be at least 1, got 0"),
            ([*model, "--ranks", "4"], 2, "fit: --device-memory is needed"),
            ([*model, "--ranks", "4", "--device-memory", "141GX"], 2, '141GB or 80GiB, got "141GX"'),
            ([*whole, "--length", "99"], 2, "unknown option --length"),
            ([*whole, "--heads", "8"], 2, "unknown option --heads"),
            ([*whole, "--no-proof"], 2, "unknown option --no-proof"),
            ([*whole, "--context", "0"], 2, "--context: expected a whole number of at least 1"),
            ([*whole, "--set", "model.layesr=3"], 2, 'did you mean "model.layers"'),
            ([*whole, "--set", "mesh.context=3"], 4, "mesh"),
            ([*whole, "--context", "4099"], 4, "multiple of 8"),
            ([*whole, "--set", "optimizer.shard_within=host", "--ranks-per-host", "3"], 4, "the same number of ranks on every host"),
            ([*whole, "--set", "model.layers=100000", "--set", "model.dim=8388608"], 8, "more than any machine has"),
            (["fit", "none.toml", "--ranks", "4", "--device-memory", "1GB"], 3, "none.toml"),
            (["plan", "--ranks", "4", "--length", "99", "--cpu"], 2, "plan: unknown option --cpu"),
            (["plan", "--ranks", "4", "--length", "99", "--set", "a=b"], 2, "plan: unknown option --set"),
        ]:
            self.assert_refused(code, part, *args)


cli.main()
