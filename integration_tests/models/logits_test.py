#!/usr/bin/env python3
"""Tests `annulus logits` against transformers: every family and scaling of the rotary embedding, on one rank and over a
zigzag ring, in bf16, and errors."""

import itertools
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


def distance(got, exact):
    """Returns how far tensors are apart, relative to the size of the second one."""
    return ((got.double() - exact).norm() / exact.norm()).item()


def gradients(results):
    """Returns all gradients in one vector. That of a bias of keys alone, for example, nearly cancels and is mostly rounding."""
    return torch.cat([value.flatten() for name, value in sorted(results.items()) if name not in ("logits", "loss")])


class Logits(cli.CliTest):
    def logits(self, folder, data, *more, ranks=1):
        models.write(data, self.path("in.safetensors"))
        words = ["logits", "--model", folder, "--input", "in.safetensors", "--output", "out.safetensors", *more]
        if ranks > 1:
            words = ["launch", "-n", str(ranks), *words, "--layout", "zigzag"]
        code, out, err = self.annulus(*words)
        self.assertEqual(code, 0, err)
        return models.read(self.path("out.safetensors"))

    def assert_close(self, got, exact, reference, floor, what):
        """Asserts that `got` is at most four times as far from `exact` as `reference` is: twice, because several ranks round the
        parts of a sum and then the sum, and twice for chance. `floor` is a relative error that is allowed besides."""
        self.assertEqual(got.keys(), exact.keys(), what)
        for name, value in exact.items():
            self.assertEqual(got[name].shape, value.shape, (what, name))
        for part in (lambda of: of["logits"], gradients):
            allowed = 4 * distance(part(reference), part(exact)) + floor
            self.assertLessEqual(distance(part(got), part(exact)), allowed, what)
        # A loss is log(sum(exp(logits))) - logit, which changes by at most twice what the logits change by.
        largest = (got["logits"].double() - exact["logits"]).abs().max().item()
        self.assertLessEqual(abs(got["loss"].double() - exact["loss"]).item(), 2 * largest + floor * exact["loss"].item(), what)

    def assert_exact(self, got, exact, nudged, what):
        """The same for results in fp64, from tables of the rotary embedding in fp32, in which two programs may differ. Here each
        parameter is compared by itself."""
        self.assertTrue(all(value.dtype == torch.float64 for value in got.values()), what)
        self.assert_close(got, exact, nudged, 1e-12, what)
        for name, value in exact.items():
            allowed = 4 * distance(nudged[name], value) + 1e-12
            if name != "loss":
                self.assertLessEqual(distance(got[name], value), allowed, (what, name))

    def match(self, names):
        # In fp64 each model is compared over ranks, to 1e-12. What fp32 adds are other kernels and roundings, so each model runs
        # in it either alone or over four ranks.
        for name, ranks in zip(names, itertools.cycle((4, 1))):
            data = models.batch(vocab=models.CONFIGS[name].vocab_size)
            folder = models.save(models.make(name), self.path(name.replace(" ", "_")))
            exact = models.expected(models.make_exact(name), data)
            nudged = models.expected(models.nudge_tables(models.make_exact(name)), data)
            self.assert_exact(self.logits(folder, data, "--backward", "--dtype", "fp64", ranks=2), exact, nudged, name)
            theirs = models.expected(models.make(name), data)
            got = self.logits(folder, data, "--backward", ranks=ranks)
            self.assert_close(got, exact, theirs, 2**-24, (name, ranks))

    def test_llamas_of_every_scaling_match_transformers(self):
        self.match(models.LLAMAS)

    def test_mistral_and_qwen_match_transformers(self):
        self.match(models.OTHERS)

    def test_smollm_and_gemma_match_transformers(self):
        self.match(models.BY_LAYER)

    def test_accepts_the_older_spelling_of_rotary_keys(self):
        data = models.batch()
        for name in ("llama 2", "llama, linear", "llama 3.1", "mistral, yarn", "smollm 3, windows", "gemma 3, linear"):
            folder = models.save(models.make(name), self.path(name.replace(" ", "_")))
            wanted = self.logits(folder, data, "--backward")
            models.old_spelling(folder)
            got = self.logits(folder, data, "--backward")
            self.assertEqual(got.keys(), wanted.keys())
            for key, value in wanted.items():
                self.assertTrue(torch.equal(got[key], value), (name, key))

    def test_last_option_gives_the_last_position(self):
        folder = models.save(models.make("qwen 3"), self.path("model"))
        data = {"tokens": models.batch(length=51)["tokens"]}
        whole = self.logits(folder, data, "--dtype", "fp64")
        self.assertEqual(list(whole), ["logits"])
        for ranks in (1, 3):
            last = self.logits(folder, data, "--last", "--dtype", "fp64", ranks=ranks)["logits"]
            self.assertEqual(list(last.shape), [2, models.VOCAB])
            self.assertLess(distance(last, whole["logits"][:, -1]), 1e-12)

    def test_layout_that_was_left_out_is_zigzag_and_said(self):
        folder = models.save(models.make("llama 2"), self.path("model"))
        zigzag = self.logits(folder, models.batch(), ranks=2)["logits"]
        words = ["--model", folder, "--input", "in.safetensors", "--output", "again.safetensors"]
        code, _, err = self.annulus("launch", "-n", "2", "logits", *words)
        self.assertEqual(code, 0, err)
        self.assertIn("--layout was not given, so 2 ranks divide the positions zigzag", err)
        self.assertTrue(torch.equal(models.read(self.path("again.safetensors"))["logits"], zigzag))

    def test_pattern_option_replaces_the_models_pattern(self):
        config = models.CONFIGS["mistral"]
        folder = models.save(models.make("mistral"), self.path("model"))
        data = models.batch()
        wide = type(config)(**config.to_dict() | {"sliding_window": None})
        exact = models.expected(models.make_exact("mistral", wide), data)
        nudged = models.expected(models.nudge_tables(models.make_exact("mistral", wide)), data)
        causal = ["--pattern", '{ kind = "causal" }', "--dtype", "fp64"]
        self.assert_exact(self.logits(folder, data, "--backward", *causal, ranks=2), exact, nudged, "causal")

    def test_bf16_is_as_accurate_as_transformers(self):
        data = models.batch()
        for name in set(models.CONFIGS) - {"llama, odd"}:  # which has a smaller vocabulary
            folder = models.save(models.make(name), self.path(name.replace(" ", "_")))
            exact = models.expected(models.make_exact(name), data)["logits"]
            self.assertGreater(exact.numel(), 100_000)
            with torch.no_grad():
                theirs = models.make(name, torch.bfloat16)(input_ids=data["tokens"]).logits.float()
            allowed = 1.1 * (theirs - exact).square().mean().sqrt().item()
            for ranks in (1, 2) if name in ("llama 3.1", "qwen 3") else (1,):
                ours = self.logits(folder, data, "--dtype", "bf16", ranks=ranks)["logits"]
                self.assertLess((ours - exact).square().mean().sqrt().item(), allowed, (name, ranks))

    def test_refuses_invalid_inputs(self):
        folder = models.save(models.make("llama 2"), self.path("model"))
        good = models.batch(length=40)

        def refused(code, says, data, *more, model=folder, output="out.safetensors"):
            models.write(data, self.path("in.safetensors"))
            self.assert_refused(
                code, says, "logits", "--model", model, "--input", "in.safetensors", "--output", output, *more
            )

        tokens = good["tokens"]
        refused(3, "vocabulary of 320", good | {"tokens": tokens + 300})
        refused(3, "vocabulary of 320", good | {"targets": tokens + 300})
        refused(3, "vocabulary of 320", {"tokens": -tokens})
        refused(3, "should be I64", good | {"tokens": tokens.int()})
        refused(3, r"should be \[batch, length\]", {"tokens": tokens[0]})
        refused(3, "should be that of tokens", good | {"targets": tokens[:, 1:]})
        refused(3, 'no tensor "tokens"', {"targets": tokens})
        refused(3, 'no tensor "targets"', {"tokens": tokens}, "--backward")
        refused(3, "none counts", good | {"targets": torch.full_like(tokens, -100)}, "--backward")
        refused(2, "same file", good, output="in.safetensors")
        refused(2, "dtype", good, "--dtype", "fp8")
        refused(2, "on CPUs only", good, "--dtype", "fp64", "--device", "cuda")
        refused(2, "step", good, "--step", "3")
        refused(3, "nothing", good, model=self.path("nothing"))
        refused(8, "nowhere", good, output="nowhere/out.safetensors")
        models.write({"tokens": tokens[:, :3]}, self.path("in.safetensors"))
        words = ["--model", folder, "--input", "in.safetensors", "--output", "out.safetensors"]
        code, _, err = self.annulus("launch", "-n", "4", "logits", *words)
        self.assertEqual(code, 4, err)
        self.assertIn("use fewer ranks", err)
        self.assertFalse(os.path.exists(self.path("out.safetensors")))


if __name__ == "__main__":
    cli.main(workers=3)
