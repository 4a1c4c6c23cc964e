#!/usr/bin/env python3
"""Tests `annulus sample` with a folder in Hugging Face's layout: it writes the text of transformers, and where it ends.

    sample_folder_test.py ANNULUS PYTHON [--all] TORCH_ROOT      --all: each model in each way of running it
"""

import itertools
import json
import os
import sys

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
PROMPT = "The ring passes keys"
ALL = "--all" in sys.argv
OVER_RANKS = [(("launch", "-n", "2"), ()), (("launch", "-n", "4"), ("--sharded",))]


class SampleFolder(cli.CliTest):
    def setUp(self):
        super().setUp()
        self.script = self.path("annulus.sh")
        cli.write_stand_in(self.script, PYTHON, os.path.join(ROOT, "python", "tokenizer"))

    def sample(self, *more):
        code, out, err = self.annulus("sample", *more, ANNULUS_SCRIPT=self.script)
        self.assertEqual((code, err), (0, ""), out)
        return out

    def greedy(self, model, ids, steps):
        """Returns the most likely ids by transformers, up to the first for which another one is nearly as likely."""
        chosen = []
        with torch.no_grad():
            for _ in range(steps):
                best = model(input_ids=torch.tensor([ids + chosen])).logits[0, -1, :300].topk(2)
                # Each of at most 64 tensors on the way to a logit is rounded, by 2^-24 of what is in it.
                if best.values[0] - best.values[1] < 64 * 2**-24 * best.values.abs().max():
                    break
                if best.indices[0] == model.config.eos_token_id:
                    break
                chosen.append(int(best.indices[0]))
        return chosen

    def compare_texts(self, names):
        """Compares the text of each model with that of transformers, on one rank and over 2 or 4; --all: over both."""
        for name, over in zip(names, itertools.cycle(OVER_RANKS)):
            model = models.make(name)
            folder = models.save(model, self.path(name.replace(" ", "_")))
            tokenizer = models.tokenizer(folder)
            ids = tokenizer.encode(PROMPT).ids
            chosen = self.greedy(model, ids, 60)
            self.assertGreater(len(chosen), 8, name)
            wanted = tokenizer.decode(ids + chosen)
            words = ("sample", folder, "--prompt", PROMPT, "--temperature", "0", "--tokens", str(len(chosen)))
            for ranks, more in [((), ()), *(OVER_RANKS if ALL else [over])]:
                code, got, err = self.annulus(*ranks, *words, *more, ANNULUS_SCRIPT=self.script)
                self.assertEqual((code, got), (0, wanted), f"{name}, {ranks}: {err}")

    def test_text_of_llamas_matches_transformers(self):
        self.compare_texts(models.LLAMAS)

    def test_text_of_other_families_matches_transformers(self):
        self.compare_texts(models.OTHERS)

    def test_text_of_smollm_and_gemma_matches_transformers(self):
        self.compare_texts(models.BY_LAYER)

    def test_refuses_ids_beyond_the_models_vocabulary(self):
        config = models.CONFIGS["llama 2"]
        small = type(config)(**config.to_dict() | {"vocab_size": 256})
        folder = models.save(models.make("llama 2", config=small), self.path("model"))
        models.tokenizer(folder)
        code, out, err = self.annulus("sample", folder, "--prompt", PROMPT, ANNULUS_SCRIPT=self.script)
        self.assertEqual((code, out), (3, ""), err)
        self.assertRegex(err, "gives the id [0-9]+, but the model has 256")

    def test_stops_at_the_models_end_tokens(self):
        model = models.make("llama 3.1")
        folder = models.save(model, self.path("model"))
        tokenizer = models.tokenizer(folder)
        ids = tokenizer.encode(PROMPT).ids
        chosen = self.greedy(model, ids, 12)
        end = next(i for i in range(3, len(chosen)) if chosen[i] not in chosen[:i])
        words = [folder, "--prompt", PROMPT, "--temperature", "0", "--tokens", "12"]
        whole = self.sample(*words)
        with open(os.path.join(folder, "generation_config.json"), "w") as f:
            json.dump({"eos_token_id": [1, chosen[end]], "bos_token_id": 0}, f)
        cut = self.sample(*words)
        self.assertTrue(whole.startswith(cut))
        self.assertLess(len(cut), len(whole))
        # Without a prompt the text begins after the token with which documents begin.
        self.assertNotEqual(self.sample(folder, "--tokens", "5", "--seed", "3"), "")

    def test_refuses_invalid_options(self):
        folder = models.save(models.make("qwen 2.5"), self.path("model"))
        refused = [("holds no tokenizer", [folder, "--prompt", "x"])]
        models.tokenizer(folder)
        for says, words in [
            ("--step selects a checkpoint of a run", [folder, "--prompt", "x", "--step", "3"]),
            ("--top-p", [folder, "--prompt", "x", "--top-p", "0"]),
            ("give a --prompt", [folder]),
            ("dtype", [folder, "--prompt", "x", "--dtype", "fp8"]),
        ]:
            code, out, err = self.annulus("sample", *words, ANNULUS_SCRIPT=self.script)
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(says, err)
        os.remove(os.path.join(folder, "tokenizer.json"))
        for says, words in refused:
            code, out, err = self.annulus("sample", *words, ANNULUS_SCRIPT=self.script)
            self.assertEqual((code, out), (3, ""), err)
            self.assertIn(says, err)


if __name__ == "__main__":
    cli.main(workers=2)
