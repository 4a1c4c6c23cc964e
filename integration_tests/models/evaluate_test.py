#!/usr/bin/env python3
"""Tests `annulus evaluate`: losses by position against logits of transformers, the needle's prompts with a tokenizer, what it
writes, and a user's mistakes."""

import array
import itertools
import json
import math
import os
import sys
import xml.etree.ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import cli  # noqa: E402
import model_folders as models  # noqa: E402
import torch  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
LENGTH = 96
TEXT = "The ring carries keys and values, and every rank computes a part of what all of them see. " * 30


class Evaluate(cli.CliTest):
    def evaluate(self, *words, ranks=1, code=0, **env):
        launch = ["launch", "-n", str(ranks)] if ranks > 1 else []
        got, out, err = self.annulus(*launch, "evaluate", *words, "--json", "out.json", **env)
        self.assertEqual(got, code, err)
        if code:
            return err
        with open(self.path("out.json")) as file:
            return json.load(file)

    def test_losses_by_position_are_those_of_transformers(self):
        # Each model on one rank, and those with the same kinds of layers in one of the other ways each.
        over = ((2, ["--sharded"]), (4, ["--layout", "striped"]))
        for name, several in zip(("llama 3.1", "qwen 3", "mistral", "smollm 3, windows", "gemma 3"), itertools.cycle(over)):
            config = models.CONFIGS[name]
            tokens = torch.randint(0, config.vocab_size, (6 * LENGTH + 31,), generator=torch.Generator().manual_seed(1))
            with open(self.path("data.bin"), "wb") as file:
                array.array("H", tokens.tolist()).tofile(file)
            model = models.make(name)
            folder = models.save(model, self.path(name.replace(" ", "_")))
            count = len(tokens) - 1
            rows = -(-count // LENGTH)
            inputs, targets = torch.zeros(rows * LENGTH, dtype=torch.int64), torch.full((rows * LENGTH,), -1)
            inputs[:count], targets[:count] = tokens[:-1], tokens[1:]
            inputs, targets = inputs.view(rows, LENGTH), targets.view(rows, LENGTH)
            with torch.no_grad():
                scores = models.make_exact(name)(input_ids=inputs).logits.double().log_softmax(-1)
            losses = -scores.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2) * (targets >= 0)
            for ranks, more in ((1, []), several):
                data = "{ files = \"data.bin\", format = \"nanogpt\" }"
                results = self.evaluate(folder, "--data", data, "--length", str(LENGTH), *more, ranks=ranks)
                (source,) = results["sources"]
                self.assertEqual((source["rows"], source["all"]["targets"]), (rows, count))
                for buckets in (source["doubling"], source["even"]):
                    for bucket in buckets:
                        at = slice(bucket["begin"], bucket["end"])
                        self.assertEqual(bucket["targets"], (targets[:, at] >= 0).sum().item())
                        mean = losses[:, at].sum().item() / bucket["targets"]
                        # The goal. These models are far from uniform, and their losses about 6, so fp32 errs by much less.
                        self.assertLess(abs(bucket["loss"] - mean), 1e-5 * max(1, mean), (name, ranks, bucket))
                self.assertAlmostEqual(source["all"]["perplexity"], math.exp(source["all"]["loss"]), places=9)

    def folder_with_tokenizer(self):
        """Returns the folder of a model whose text the program can make tokens of, and the script that does it."""
        models.tokenizer(self.folder)
        folder = models.save(models.make("qwen 3"), self.path("model"))
        os.rename(self.path("tokenizer.json"), os.path.join(folder, "tokenizer.json"))
        script = self.path("annulus.sh")
        cli.write_stand_in(script, PYTHON, os.path.join(ROOT, "python", "tokenizer"))
        return folder, script

    def test_text_tasks_use_the_tokenizer_of_the_folder(self):
        folder, script = self.folder_with_tokenizer()
        with open(self.path("hay.txt"), "w") as file:
            file.write(TEXT)
        words = [folder, "--task", "needle", "--haystack", "hay.txt", "--lengths", "300,400", "--depths", "0,50,100", "--trials",
                 "2", "--needle", "The word of {key} is {value}."]
        words.append("--generate")
        one = self.evaluate(*words, "--pictures", "pictures", ANNULUS_SCRIPT=script)
        self.assertEqual([(c["length"], c["depth"]) for c in one["tasks"]], [(n, d) for n in (300, 400) for d in (0, 0.5, 1)])
        for cell in one["tasks"]:
            self.assertEqual(cell["trials"], 2)
            self.assertGreater(cell["tokens"], 1)
        root = xml.etree.ElementTree.parse(self.path("pictures/needle.svg")).getroot()
        self.assertTrue(root.tag.endswith("svg"))
        two = self.evaluate(*words, ranks=2, ANNULUS_SCRIPT=script)
        for a, b in zip(one["tasks"], two["tasks"]):
            for key in ("exact", "right", "tokens", "generated"):
                self.assertEqual(a[key], b[key])
            self.assertAlmostEqual(a["nats"], b["nats"], delta=1e-5 * a["nats"])

    def test_ruler_runs_all_of_its_tasks(self):
        folder, script = self.folder_with_tokenizer()
        words = [folder, "--task", "ruler", "--lengths", "2048", "--depths", "50", "--trials", "1", "--generate"]
        one, two = (self.evaluate(*words, ranks=ranks, ANNULUS_SCRIPT=script) for ranks in (1, 2))
        names = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe")
        self.assertLessEqual(set(names), {c["task"] for c in one["tasks"]})
        for a, b in zip(one["tasks"], two["tasks"], strict=True):
            self.assertEqual(a["trials"], 1)
            self.assertGreater(a["tokens"], 1)
            for key in ("task", "length", "depth", "exact", "right", "tokens", "generated"):
                self.assertEqual(a[key], b[key], a["task"])

    def test_text_is_refused_where_tokens_are_ids(self):
        folder, _ = self.folder_with_tokenizer()
        with open(self.path("hay.txt"), "w") as file:
            file.write(TEXT)
        code, _, err = self.annulus("evaluate", folder, "--data", "hay.txt")
        self.assertNotEqual(code, 0)
        self.assertIn("annulus tokenize", err)

    def test_mistakes_have_one_clear_message(self):
        cli.write_tiny_run(self.folder, 3)
        code, _, err = self.annulus("train", "config.toml")
        self.assertEqual(code, 0, err)
        models.save(models.make("qwen 3"), self.path("model"))
        for words, ranks, parts in (
            (["tiny"], 1, ["--data", "--task"]),
            (["tiny", "--task", "neddle"], 1, ["needle"]),
            (["tiny", "--task", "niah_single_2", "--lengths", "64"], 1, ["niah_single_2", "64"]),
            (["tiny", "--task", "copy", "--lengths", "3"], 4, ["fewer ranks"]),
            (["tiny", "--data", "nothing.txt"], 2, ["nothing.txt"]),
            (["tiny", "--data", "{ file = 1 }"], 1, ["--data", "files"]),
            (["model", "--data", "held-out"], 1, ["held-out", "Hugging Face"]),
            (["model", "--task", "needle"], 1, ["tokenizer"]),
            (["tony", "--task", "copy"], 1, ["tony"]),
            (["tiny", "--task", "kv", "--depths", "200"], 1, ["0 to 100"]),
            (["tiny", "--task", "copy", "--pairs", "4"], 1, ["--pairs", "--task kv"]),
            (["tiny", "--task", "kv", "--pairs", "1"], 1, ["2 to 512 pairs"]),
            (["tiny", "--task", "kv", "--pairs", "40", "--lengths", "64"], 1, ["kv", "64", "204"]),
            (["tiny", "--task", "kv", "--beside", "x.json"], 1, ["LABEL=FILE"]),
            (["tiny", "--data", "held-out", "--generate"], 1, ["--task"]),
            (["tiny", "--task", "kv", "--pictures", "/proc/none"], 1, ["--pictures /proc/none"]),
            (["tiny", "--task", "kv", "--pattern", "{ kind = \"casual\" }"], 1, ["causal"]),
        ):
            launch = ["launch", "-n", str(ranks)] if ranks > 1 else []
            code, _, err = self.annulus(*launch, "evaluate", *words)
            self.assertNotEqual(code, 0, words)
            for part in parts:
                self.assertIn(part, err, words)
            messages = [line for line in err.splitlines() if line.startswith("annulus: ") and "exit code" not in line]
            self.assertEqual(len(messages), 1, err)

    def test_losses_of_earlier_results_share_a_picture(self):
        cli.write_tiny_run(self.folder, 3)
        code, _, err = self.annulus("train", "config.toml")
        self.assertEqual(code, 0, err)
        self.evaluate("tiny", "--data", "held-out")
        os.rename(self.path("out.json"), self.path("before.json"))
        self.evaluate("tiny", "--data", "held-out", "--beside", "before & <now>=before.json", "--label", "after", "--pictures", "p")
        with open(self.path("p/perplexity.svg")) as file:
            picture = file.read()
        xml.etree.ElementTree.fromstring(picture)
        self.assertIn("before &amp; &lt;now&gt;", picture)
        self.assertIn("after", picture)


if __name__ == "__main__":
    cli.main(workers=2)
