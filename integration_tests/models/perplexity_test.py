#!/usr/bin/env python3
"""Tests that an exported folder has the perplexity of its run on the same tokens. The folder's is computed with transformers
as by lm-evaluation-harness (loglikelihood_rolling); a test compares that with the harness's own code where it is installed. The
run's is the loss of `annulus logits`."""

import importlib.util
import json
import math
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import byte_runs  # noqa: E402
import cli  # noqa: E402
import model_folders as models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
LIMIT = 240  # seconds of a command
CONTEXT = 64  # of the runs
PREFIX = 10  # what the first token of a document is predicted from; in a run on bytes, a line break
DOCUMENTS = [
    byte_runs.TEXT[:430],  # several windows, and a last one that begins further back
    " of other bytes: \u00fc\u4e16\U0001f600\n\n" * 12,
    "one window of sixty-four bytes, of which none is left for another"[:CONTEXT],
    "x",
]


def rolling_windows(tokens, prefix, length):
    """Returns pairs (context, targets) that make each token a target once, `length` tokens in one window, as
    get_rolling_token_windows and make_disjoint_window in lm_eval/utils.py do with a context of one token: each window
    continues the one before with its last token, and the last one begins as far back as a window is long."""
    windows = []
    for begin in range(0, len(tokens), length):
        end = min(begin + length, len(tokens))
        first = max(0, end - length)
        windows.append((([prefix] + tokens)[first : begin + 1], tokens[begin:end]))
    return windows


def log_likelihoods(folder, documents):
    """Returns the sum of the log-probabilities of each document's tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sums = []
    for text in documents:
        total = 0.0
        for context, targets in rolling_windows(tokenizer.encode(text), PREFIX, model.config.max_position_embeddings):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([context + targets[:-1]])).logits[0, -len(targets) :]
            total += logits.double().log_softmax(-1)[range(len(targets)), targets].sum().item()
        sums.append(total)
    return sums


def log_likelihoods_of_the_harness(folder, documents):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=3, prefix_token_id=PREFIX)
    assert model.max_length == CONTEXT
    calls = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(documents)]
    return model.loglikelihood_rolling(calls, disable_tqdm=True)


def rows_of(windows):
    """Returns the windows as the input of `annulus logits`."""
    tokens = torch.zeros(len(windows), CONTEXT, dtype=torch.int64)
    targets = torch.full_like(tokens, -100)
    for row, (context, wanted) in enumerate(windows):
        ids = context + wanted
        tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, len(context) - 1 : len(ids) - 1] = torch.tensor(wanted)
    return {"tokens": tokens, "targets": targets}


class Perplexity(cli.CliTest):
    def annulus(self, *args, **env):
        return super().annulus(*args, limit=LIMIT, **env)

    def loss(self, run, windows, *launch):
        models.write(rows_of(windows), self.path("in.safetensors"))
        words = ["logits", "--model", run, "--input", "in.safetensors", "--output", "out.safetensors"]
        code, _, err = self.annulus(*launch, *words, *(["--layout", "zigzag"] if launch else []))
        self.assertEqual(code, 0, err)
        return models.read(self.path("out.safetensors"))["loss"].item()

    def assert_agrees(self, run, folder, tokens):
        """Asserts that the folder has the run's perplexity of DOCUMENTS, whose tokens are given."""
        windows = []
        for ids in tokens:
            windows += rolling_windows(ids, PREFIX, CONTEXT)
        theirs = -sum(log_likelihoods(folder, DOCUMENTS)) / sum(map(len, tokens))
        self.assertLess(math.exp(theirs), 200, run)  # a uniform guess has 256 or more
        for launch in ((), ("launch", "-n", "2")):
            self.assertAlmostEqual(math.exp(self.loss(run, windows, *launch) - theirs), 1, delta=1e-4, msg=run)

    def test_folder_has_the_perplexity_of_its_run_on_bytes(self):
        for family in byte_runs.FAMILIES:
            byte_runs.train(self, family)
            folder, _ = byte_runs.export(self, family)
            self.assert_agrees(family, folder, [list(text.encode()) for text in DOCUMENTS])

    def test_folder_has_the_perplexity_of_its_run_on_tokens(self):
        tokenizer = models.tokenizer(self.folder)
        cli.write_tiny_run(self.folder, 20, text=byte_runs.TEXT, data={"train": ["tokens/*.tokens"]})
        script = self.path("annulus.sh")
        cli.write_stand_in(script, PYTHON, os.path.join(ROOT, "python", "tokenizer"))
        for words in (["tokenize", "--tokenizer", self.folder, "--input", "text.txt", "--output", "tokens"],
                      ["train", "config.toml", "--set", "model.vocab=300"], ["export", "tiny", "folder"]):
            code, _, err = self.annulus(*words, ANNULUS_SCRIPT=script)
            self.assertEqual(code, 0, err)
        self.assert_agrees("tiny", self.path("folder"), [tokenizer.encode(text).ids for text in DOCUMENTS])

    def test_evaluate_has_the_perplexity_of_the_harness(self):
        lines = [f"line {i:02d} of {i * i} bytes, \u00e9 and \U0001f600" for i in range(6)]
        # Whole rows: only the last window of another length would begin before its row does.
        text = "".join(line + "." * (CONTEXT - 1 - len(line.encode())) + "\n" for line in lines)
        with open(self.path("eval.txt"), "wb") as f:
            f.write(bytes([PREFIX]) + text.encode())
        byte_runs.train(self, "llama")
        folder, _ = byte_runs.export(self, "llama")
        theirs = math.exp(-log_likelihoods(folder, [text])[0] / len(text.encode()))
        for launch, model in (((), "llama"), ((), folder), (("launch", "-n", "2"), "llama")):
            code, _, err = self.annulus(*launch, "evaluate", model, "--data", "eval.txt", "--json", "results.json")
            self.assertEqual(code, 0, err)
            with open(self.path("results.json")) as f:
                ours = json.load(f)["sources"][0]
            self.assertEqual(ours["all"]["targets"], len(text.encode()))
            self.assertAlmostEqual(ours["all"]["perplexity"] / theirs, 1, delta=1e-4, msg=str(launch))

    def test_windows_are_those_of_the_harness(self):
        for text in DOCUMENTS:
            windows = rolling_windows(list(text.encode()), PREFIX, CONTEXT)
            self.assertEqual(bytes(id for _, targets in windows for id in targets).decode(), text)
        tokens = list(range(1, 11))
        self.assertEqual(rolling_windows(tokens, 0, 4), [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])])
        self.assertEqual(rolling_windows(tokens[:8], 0, 4), [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8])])
        self.assertEqual(rolling_windows(tokens[:3], 0, 4), [([0], [1, 2, 3])])
        self.assertEqual(rolling_windows([], 0, 4), [])

    @unittest.skipUnless(importlib.util.find_spec("lm_eval"), "lm_eval is not installed: pip install 'lm_eval[hf]'")
    def test_windows_and_sums_are_those_of_the_harness_itself(self):
        from lm_eval import utils

        tokens = list(range(1, 11)) * 2
        for count in range(len(tokens)):
            for length in range(1, 8):
                theirs = utils.get_rolling_token_windows(tokens[:count], 0, length, 1)
                self.assertEqual([utils.make_disjoint_window(w) for w in theirs], rolling_windows(tokens[:count], 0, length))
        byte_runs.train(self, "llama")
        folder, _ = byte_runs.export(self, "llama")
        for ours, theirs in zip(log_likelihoods(folder, DOCUMENTS), log_likelihoods_of_the_harness(folder, DOCUMENTS)):
            self.assertAlmostEqual(ours / theirs, 1, delta=1e-5)


if __name__ == "__main__":
    cli.main()
