#!/usr/bin/env python3
"""Compares the losses of 12 steps of AdamW by `annulus train`, in fp64, with a PyTorch training loop over transformers; also
where some targets do not count, and where they have weights."""

import json
import math
import os
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import cli  # noqa: E402
import model_folders as models  # noqa: E402
import torch  # noqa: E402

STEPS, WARMUP, LR, DOCUMENTS, LENGTH = 12, 4, 2e-3, 4, 96

# Each document is a row, and each step takes all rows, so their order does not matter.
CONFIG = f"""
[run]
name = "model"
steps = {STEPS}
log_every = 1
[data]
train = [{{ files = ["documents.bin"], format = "nanogpt", begin = 0 }}]
context = {LENGTH}
batch = {DOCUMENTS}
packing = "document"
validation_fraction = 0
[model]
from = "model"
dtype = "fp64"
[optimizer]
lr = {LR}
warmup = {WARMUP}
weight_decay = 0.1
[validation]
every = 0
[checkpoint]
every = 0
"""


def documents():
    draw = torch.Generator().manual_seed(5)
    made = torch.randint(1, models.VOCAB, (DOCUMENTS, LENGTH + 1), generator=draw)
    made[:, 0] = 0
    return made


def drawn_weights(values):
    """Returns a weight for each token of the documents, in runs of five; nothing counts in the last document."""
    draw = torch.Generator().manual_seed(6)
    runs = torch.randint(0, len(values), (DOCUMENTS, LENGTH // 5 + 1), generator=draw)
    weights = torch.tensor(values)[runs].repeat_interleave(5, 1)[:, :LENGTH + 1].contiguous()
    weights[-1] = 0
    return weights


def shard_of(rows, weights):
    """Returns a shard of version 2 as docs/reference/formats.md describes it, without the checksums that only --verify compares."""
    ids, flat = rows.flatten().tolist(), weights.flatten().tolist()
    changes = [i for i in range(1, len(flat)) if flat[i] != flat[i - 1]]
    ends, starts = changes + [len(flat)], [0] + changes
    body = struct.pack(f"<{len(ids)}H", *ids)
    body += bytes(-len(body) % 8)
    offsets = 4096 + len(body)
    body += struct.pack(f"<{len(rows) + 1}Q", *range(0, len(ids) + 1, rows.shape[1]))
    hashes = 4096 + len(body)
    body += bytes(8 * len(rows))
    at = 4096 + len(body)
    body += struct.pack(f"<{len(ends)}Q", *ends) + struct.pack(f"<{len(ends)}f", *(flat[i] for i in starts))
    above = [w for w in flat if w > 0]
    header = struct.pack("<8sIIQQQQQ32sQQQQff", b"ANNTOKEN", 2, 2, len(ids), len(rows), models.VOCAB, offsets, hashes, bytes(32), 0,
                         at, len(ends), len(above), min(above), max(above))
    return header.ljust(4096, b"\0") + body + bytes(-len(body) % 8)


def losses_of_pytorch(model, of_tokens=None):
    """Trains as docs/how-to/optimizer.md describes: weight decay of matrices, a linear warm-up, half a cosine to a tenth."""
    model.train()
    weights = list(model.parameters())
    groups = [{"params": [w for w in weights if w.dim() == 2], "weight_decay": 0.1},
              {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    rows, losses = documents(), []
    for step in range(STEPS):
        share = (step + 1) / WARMUP
        if step >= WARMUP:
            share = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))
        for group in optimizer.param_groups:
            group["lr"] = LR * share
        if of_tokens is not None and set(of_tokens.flatten().tolist()) == {0.0, 1.0}:
            loss = model(input_ids=rows, labels=rows.masked_fill(of_tokens == 0, -100)).loss  # the library's own
        else:
            logits = model(input_ids=rows[:, :-1]).logits
            nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
            of_targets = (torch.ones(rows.shape) if of_tokens is None else of_tokens)[:, 1:].flatten().double()
            loss = (nats * of_targets).sum() / of_targets.sum()
        optimizer.zero_grad()
        loss.backward()
        # Not by clip_grad_norm_, which divides by 1e-6 more than the norm.
        norm = torch.nn.utils.get_total_norm([w.grad for w in weights])
        for w in weights:
            w.grad /= max(norm, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


class TrainModel(cli.CliTest):
    def losses(self, ranks, *sets):
        words = ["train", "config.toml", "--set", "attention.even=false", *sets]
        code, out, err = self.annulus(*(["launch", "-n", str(ranks)] if ranks > 1 else []), *words)
        self.assertEqual(code, 0, out + err)
        runs = sorted(os.listdir(self.path("runs")))
        with open(self.path(f"runs/{runs[-1]}/metrics.jsonl")) as f:
            return [line["loss"] for line in map(json.loads, f) if "loss" in line]

    def match(self, names):
        documents().numpy().astype("uint16").tofile(self.path("documents.bin"))
        with open(self.path("config.toml"), "w") as f:
            f.write(CONFIG)
        for name in names:
            models.save(models.make(name), self.path("model"))
            wanted = losses_of_pytorch(models.make_exact(name))
            self.assertLess(wanted[-1], 0.9 * wanted[0], "nothing was learned")
            # Two programs may differ in the rotary tables, which are fp32, by a unit in the last place, and updates amplify that
            # (and rounding in fp64: tests/common/equal_losses.h).
            nudged = losses_of_pytorch(models.nudge_tables(models.make_exact(name)))
            off = [abs(a - b) for a, b in zip(nudged, wanted)]
            for ranks in (1, 4) if name in ("llama 3.1", "qwen 3", "gemma 3") else (2,):
                got = self.losses(ranks)
                self.assertEqual(len(got), STEPS)
                for step, (ours, theirs) in enumerate(zip(got, wanted)):
                    allowed = 4 * max(off[: step + 1]) + 1e-12 * 10 ** (step / 10) * theirs
                    self.assertLessEqual(abs(ours - theirs), allowed, (name, ranks, step))

    def test_losses_of_targets_that_count_in_part_match_pytorch(self):
        models.save(models.make("llama 3.1"), self.path("model"))
        with open(self.path("config.toml"), "w") as f:
            f.write(CONFIG.replace('{ files = ["documents.bin"], format = "nanogpt", begin = 0 }', '"some.tokens"'))
        for values in ([0.0, 1.0], [0.0, 0.25, 1.0, 3.0]):
            weights = drawn_weights(values)
            with open(self.path("some.tokens"), "wb") as f:
                f.write(shard_of(documents(), weights))
            wanted = losses_of_pytorch(models.make_exact("llama 3.1"), weights)
            nudged = losses_of_pytorch(models.nudge_tables(models.make_exact("llama 3.1")), weights)
            off = [abs(a - b) for a, b in zip(nudged, wanted)]
            # The rows of a step in batches that are accumulated, on one rank and over two.
            for ranks, *sets in ((1, "data.batch=2", "data.accumulate=2"),
                                 (2, "data.batch=1", "data.accumulate=4", "attention.layout=striped")):
                got = self.losses(ranks, *(word for one in sets for word in ("--set", one)))
                self.assertEqual(len(got), STEPS)
                for step, (ours, theirs) in enumerate(zip(got, wanted)):
                    allowed = 4 * max(off[: step + 1]) + 1e-12 * 10 ** (step / 10) * theirs
                    self.assertLessEqual(abs(ours - theirs), allowed, (values, ranks, sets, step))
            code, out, err = self.annulus("evaluate", "model", "--data", "some.tokens", "--length", str(LENGTH), "--packing", "document",
                                          "--dtype", "fp64", "--json", "results.json")
            self.assertEqual(code, 0, out + err)
            with open(self.path("results.json")) as f:
                found = json.load(f)["sources"][0]["all"]
            self.assertAlmostEqual(found["loss"], wanted[0], delta=4 * off[0] + 1e-6 * wanted[0])
            self.assertEqual(found["targets"], (weights[:, 1:] > 0).sum().item())
            self.assertEqual("weight" in found, len(values) > 2)

    def test_losses_of_llamas_match_pytorch(self):
        self.match([name for name in models.LLAMAS if name != "llama, odd"])  # which has a smaller vocabulary

    def test_losses_of_mistral_and_qwen_match_pytorch(self):
        self.match(models.OTHERS)

    def test_losses_of_smollm_and_gemma_match_pytorch(self):
        self.match(models.BY_LAYER)


if __name__ == "__main__":
    cli.main(workers=2)
