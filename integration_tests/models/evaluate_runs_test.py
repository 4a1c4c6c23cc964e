#!/usr/bin/env python3
"""Tests `annulus evaluate` on runs: the step it takes, the numbers of each source, the tasks of a validation, bytes of a
tokenizer's tokens, ties that it counts, and models, rows and tasks that do not belong together."""

import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import cli  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
SOURCES = ["a/*.txt", "b/*.txt"]
TRIALS = 2  # of validation.tasks, at the depths 25 % and 75 %
COPIED = 16  # tokens of the answer of the task copy
WORDS = ["the ring passes keys " * 5, "then the other rank adds them to the sum " * 5]


def nats_of(cells):
    return {(c["task"], c["depth"], c["trials"]): c["nats"] for c in cells}


class EvaluateRuns(cli.CliTest):
    @classmethod
    def setUpClass(cls):
        """Trains the run `tiny` on two sources, in fp64, with a checkpoint and a validation every two steps, and exports it."""
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        cls.addClassCleanup(folder.cleanup)
        test = cls("annulus")
        test.folder = cls.shared = folder.name
        for source, words in (("a", "def rank(ring):"), ("b", "All work and no play.")):
            os.mkdir(test.path(source))
            for i in range(12):
                with open(test.path(f"{source}/{i}.txt"), "w") as f:
                    f.write(f"{words} {i * i}\n" * (1 + 2 * i))
        cli.write_tiny_run(
            folder.name, 4,
            data={"validation_fraction": 0.4},
            model={"dtype": "fp64"},
            checkpoint={"every": 2},
            # More batches than there are rows that are held out.
            validation={"every": 2, "batches": 60, "tasks": ["copy", "induction"], "trials": TRIALS},
        )
        sources = ", ".join(f'{{ files = "{files}" }}' for files in SOURCES)
        test.done("train", "config.toml", "--set", f"data.train=[{sources}]")
        test.done("export", "tiny", "folder")
        with open(test.path("runs/tiny-001/metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        cls.validations = {line["step"]: line for line in lines if "validation_loss" in line}

    def setUp(self):
        self.folder = self.shared
        self.script = self.path("annulus.sh")
        cli.write_stand_in(self.script, PYTHON, os.path.join(ROOT, "python", "tokenizer"))

    def annulus(self, *args, ranks=1, **env):
        launch = ["launch", "-n", str(ranks)] if ranks > 1 else []
        return super().annulus(*launch, *args, **env)

    def done(self, *args, **env):
        code, out, err = self.annulus(*args, **env)
        self.assertEqual(code, 0, err)
        return out, err

    def evaluate(self, *words, **env):
        """Returns the results, and what is printed."""
        out, _ = self.done("evaluate", *words, "--json", "out.json", **env)
        with open(self.path("out.json")) as f:
            return json.load(f), out

    def assert_one_message(self, parts, *args, ranks=1):
        code, out, err = self.annulus(*args, ranks=ranks, ANNULUS_SCRIPT=self.script)
        self.assertNotEqual(code, 0, out)
        messages = [line for line in err.splitlines() if re.match(r"annulus: (ranks? [-0-9, ]+: )?\[", line)]
        self.assertEqual(len(messages), 1, err)
        for part in parts:
            self.assertIn(part, messages[0])

    def copied(self, name):
        """Copies the exported folder to `name`; returns the copy's path."""
        return shutil.copytree(self.path("folder"), self.path(name))

    def test_each_step_has_the_losses_of_its_own_validation(self):
        self.assertEqual(sorted(self.validations), [2, 4])
        self.assertGreater(abs(self.validations[2]["validation_loss"] - self.validations[4]["validation_loss"]), 1e-3)
        for step, ranks, words in ((2, 1, ["--step", "2"]), (4, 1, ["--step", "4"]), (4, 1, []), (2, 2, ["--step", "2"])):
            results, _ = self.evaluate("tiny", "--data", "held-out", "--dtype", "fp64", *words, ranks=ranks)
            self.assertEqual(results["step"], step)
            validation = self.validations[step]
            self.assertEqual([s["name"] for s in results["sources"]], list(validation["validation_sources"]))
            self.assertEqual(len(results["sources"]), len(SOURCES))
            for source in results["sources"]:
                self.assertAlmostEqual(source["all"]["loss"], validation["validation_sources"][source["name"]]["loss"], delta=1e-11)
            nats, targets = (sum(s["all"][key] for s in results["sources"]) for key in ("nats", "targets"))
            self.assertAlmostEqual(nats / targets, validation["validation_loss"], delta=1e-11)
        self.assert_one_message(["3"], "evaluate", "tiny", "--data", "held-out", "--step", "3")

    def test_each_source_has_the_numbers_that_it_has_alone(self):
        together, out = self.evaluate("tiny", "--data", SOURCES[0], "--data", SOURCES[1])
        self.assertEqual([s["name"] for s in together["sources"]], SOURCES)
        for source in together["sources"]:
            alone, _ = self.evaluate("tiny", "--data", source["name"])
            self.assertEqual(alone["sources"], [source])
            self.assertIn(source["name"], out)
        self.assertNotEqual(together["sources"][0]["all"], together["sources"][1]["all"])

    def test_validation_tasks_are_those_of_evaluate(self):
        words = ["tiny", "--dtype", "fp64", "--task", "copy", "--task", "induction", "--depths", "25,75", "--trials"]
        one, two = (self.evaluate(*words, str(trials))[0]["tasks"] for trials in (1, 2))
        got = self.validations[4]["validation_tasks"]
        self.assertEqual(list(got), ["copy", "induction"])
        # Prompt i is the one of trial i at the depth (i + 0.5) / TRIALS; copy has no depth.
        copy = next(c for c in two if c["task"] == "copy")
        self.assertEqual((copy["depth"], copy["trials"], copy["tokens"]), (None, TRIALS, TRIALS * COPIED))
        self.assertAlmostEqual(got["copy"]["loss"], copy["nats"] / copy["tokens"], delta=1e-11)
        self.assertEqual(got["copy"]["exact"], copy["accuracy"])
        nats = nats_of(one) | nats_of(two)
        second = nats["induction", 0.75, 2] - nats["induction", 0.75, 1]
        self.assertAlmostEqual(got["induction"]["loss"], (nats["induction", 0.25, 1] + second) / 2, delta=1e-11)
        # No other prompts give this loss.
        self.assertNotAlmostEqual(nats["induction", 0.25, 2], nats["induction", 0.25, 1] + second, delta=1e-6)

    def test_training_refuses_tasks_that_its_rows_cannot_have(self):
        ids = '[{ files = "ids.bin", format = "nanogpt" }]'
        with open(self.path("ids.bin"), "wb") as f:
            f.write(struct.pack("<400H", *(i * i % 300 for i in range(400))))
        for ranks, parts, sets in (
            (1, ["copy", "34", "32"], ['validation.tasks=["copy"]', "data.context=32"]),
            (2, ["copy", "34", "32"], ['validation.tasks=["copy"]', "data.context=32"]),
            (1, ["validation.tasks", "needle", "ids of a tokenizer"],
             ['validation.tasks=["needle"]', f"data.train={ids}", "model.vocab=300", "data.validation_fraction=0"]),
        ):
            words = [word for each in [*sets, "run.name=refused"] for word in ("--set", each)]
            self.assert_one_message(parts, "train", "config.toml", *words, ranks=ranks)
        self.assertFalse([name for name in os.listdir(self.path("runs")) if name.startswith("refused")])

    def test_ties_are_counted_and_printed(self):
        folder = self.copied("tied")
        words = [folder, "--task", "copy", "--lengths", "40,48", "--trials", "2", "--generate"]
        results, out = self.evaluate(*words, "--dtype", "fp64", ranks=2)
        self.assertEqual(results["near_ties"], 0)
        self.assertNotIn("near ties", out)
        self.tie_logits(folder)
        choices = 2 * 2 * COPIED  # two lengths, two trials, and a token at a time
        for dtype in ("fp64", "fp32"):
            results, out = self.evaluate(*words, "--dtype", dtype, ranks=2)
            self.assertEqual(results["near_ties"], choices)
            self.assertIn(f"near ties: {choices} choices between tokens", out)
        sample = ["sample", folder, "--prompt", "def ", "--tokens", "5", "--temperature", "0"]
        _, err = self.done(*sample, ranks=2, ANNULUS_SCRIPT=self.script)
        self.assertIn("5 of 5 choices were between candidates that rounding may swap", err)
        _, err = self.done(*sample, ANNULUS_SCRIPT=self.script)
        self.assertEqual(err, "")

    def tie_logits(self, folder):
        """Gives all tokens the output weights of the first, and so the same logits."""
        path = os.path.join(folder, "model.safetensors")
        with open(path, "r+b") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            head = json.loads(f.read(size))["lm_head.weight"]
            begin, end = head["data_offsets"]
            f.seek(8 + size + begin)
            row = f.read((end - begin) // head["shape"][0])
            f.seek(8 + size + begin)
            f.write(row * head["shape"][0])

    def tokenizer(self, folder):
        """Writes to FOLDER the tokenizer of bytes with an id for `the`, 257, and one that ends a document, 258."""
        with open(os.path.join(self.path("folder"), "tokenizer.json")) as f:
            made = json.load(f)
        made["model"]["vocab"] |= {"th": 256, "the": 257}
        made["model"]["merges"] = [["t", "h"], ["th", "e"]]
        made["added_tokens"] = [{"id": 258, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
                                 "normalized": False, "special": True}]
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "tokenizer.json"), "w") as f:
            json.dump(made, f)
        return folder

    def test_bits_per_byte_are_of_the_bytes_of_the_tokens(self):
        with open(self.path("words.jsonl"), "w") as f:
            f.writelines(json.dumps({"text": text}) + "\n" for text in WORDS)
        self.done("tokenize", "--tokenizer", self.tokenizer(self.path("tokenizer")), "--input", "words.jsonl", "--output", "tokens",
                  "--end", "<|end|>", ANNULUS_SCRIPT=self.script)
        sets = ["run.name=ids", 'data.train=["tokens/*.tokens"]', "data.validation_fraction=0", "model.vocab=270", "run.steps=1",
                "validation.tasks=[]"]
        self.done("train", "config.toml", *(word for each in sets for word in ("--set", each)))
        results, _ = self.evaluate("ids", "--data", "tokens/*.tokens", "--dtype", "fp64")
        (source,) = results["sources"]
        # `th` and `the` are a token each, and the one that ends a document stands for no bytes. The first token of all, of
        # three bytes, is nowhere predicted.
        tokens = sum(len(text.replace("the", "t").replace("th", "t")) + 1 for text in WORDS)
        self.assertEqual(source["all"]["targets"], tokens - 1)
        bits = source["all"]["nats"] / math.log(2)
        self.assertAlmostEqual(source["bits_per_byte"] * (sum(map(len, WORDS)) - len("the")), bits, delta=1e-9 * bits)

    def test_refuses_a_tokenizer_with_more_ids_than_the_model(self):
        folder = self.copied("foreign")
        self.tokenizer(folder)
        with open(self.path("hay.txt"), "w") as f:
            f.write("then the other rank adds them to the sum. " * 30)
        words = ["evaluate", folder, "--task", "needle", "--haystack", "hay.txt", "--lengths", "500", "--depths", "50", "--trials", "1"]
        parts = ["a prompt of needle has the id 25", "the model's vocabulary has 256", "the tokenizer is not the model's"]
        for ranks in (1, 2):
            self.assert_one_message(parts, *words, ranks=ranks)


if __name__ == "__main__":
    cli.main()
