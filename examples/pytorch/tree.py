#!/usr/bin/env python3
"""Reinforcement learning on a group of rollouts (as in GRPO: one prompt, several answers) as a prefix tree, cut over the
processes of torchrun.

    torchrun --nproc-per-node 2 examples/pytorch/tree.py

What rollouts have in common is computed once. Prints what that saves, and how far the loss and the gradients are from those of
the same rollouts packed one after the other in one process; fails if that is too far.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))  # not needed with the wheel
import annulus  # noqa: E402

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS = 64, 32, 4, 2, 2


def rotate(x, positions):
    half = x.shape[-1] // 2
    angle = positions.double()[:, None, None] * 10000.0 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        size = DIM // HEADS
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * size, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, positions, attend):
        y = self.norms[0](x)
        q, k, v = (linear(y).unflatten(-1, (-1, DIM // HEADS)) for linear in (self.q, self.k, self.v))
        x = x + self.out(attend(rotate(q, positions), rotate(k, positions), v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens, positions, attend):  # tokens [n], positions [n]
        x = self.embedding(tokens)[None]
        for layer in self.layers:
            x = layer(x, positions, attend)
        return self.head(x)[0]


def group_of_rollouts():
    """Returns a prompt with eight answers, some of which begin alike."""
    torch.manual_seed(1)

    def text(length):
        return torch.randint(VOCABULARY, (length,))

    prompt, thoughts = text(96), [text(24), text(17)]
    return [torch.cat([prompt, thoughts[i % 3], text(10 + 3 * i)] if i % 3 < 2 else [prompt, text(40)]) for i in range(8)]


def as_tree(model, tree, group):
    """Returns the sum of the losses of all rollouts, and leaves its gradients in the model: the tree over the ranks of `group`."""
    cut = annulus.Sharding("zigzag", group)
    mine = cut.positions(len(tree.tokens))
    tokens, positions = cut.shard((tree.tokens, tree.positions), dim=0)
    logits = model(tokens, positions, lambda q, k, v: cut.attention(q, k, v, tree.pattern))
    source, target, weight = tree.targets(mine)  # those that this rank's rows predict
    losses = F.cross_entropy(logits[source], tree.tokens[target], reduction="none")
    loss = (weight * losses).sum()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    return annulus.all_reduce(loss.detach(), group=group)


def packed(model, rollouts, alone):
    """Returns the same sum for the rollouts one after the other, in this process alone."""
    lengths = torch.tensor([len(rollout) for rollout in rollouts])
    boundaries = F.pad(lengths.cumsum(0), (1, 0))
    tokens, positions = torch.cat(rollouts), torch.cat([torch.arange(n) for n in lengths])
    cut = annulus.Sharding("contiguous", alone)
    logits = model(tokens, positions, lambda q, k, v: cut.attention(q, k, v, cu_seqlens=boundaries))
    labels = annulus.shift_labels(tokens[None], positions[None])[0]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    return loss.detach(), annulus.plan({"kind": "causal"}, len(tokens), 1, cu_seqlens=boundaries)["pairs"]


def main():
    dist.init_process_group("gloo")
    alone, _ = dist.new_subgroups(1)
    rollouts = group_of_rollouts()
    tree = annulus.Tree.of_rollouts(rollouts)
    torch.manual_seed(0)  # the same weights in every process
    model, other = Model().double(), Model().double()
    other.load_state_dict(model.state_dict())

    loss = as_tree(model, tree, dist.group.WORLD)
    wanted, all_pairs = packed(other, rollouts, alone)
    worst = max(((p.grad - w.grad).norm() / w.grad.norm()).item() for p, w in zip(model.parameters(), other.parameters()))
    assert abs(loss - wanted) < 1e-10 * wanted and worst < 1e-10, (loss, wanted, worst)
    if dist.get_rank() == 0:
        pairs = annulus.plan(tree.pattern, len(tree.tokens), 1)["pairs"]
        tokens = sum(len(rollout) for rollout in rollouts)
        print(f"{len(rollouts)} rollouts in {len(tree.lengths)} nodes: {len(tree.tokens)} tokens instead of {tokens}, "
              f"{pairs} pairs of query and key instead of {all_pairs}")
        print(f"loss {loss:.6f} over {dist.get_world_size()} processes, {wanted:.6f} packed in one")
        print(f"gradients differ by at most {worst:.0e} of their norm", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
