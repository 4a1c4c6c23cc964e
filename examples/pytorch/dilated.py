#!/usr/bin/env python3
"""A training loop written by hand: dilated attention (LongNet) over the processes of torchrun, on rows of packed
documents whose lengths change with every step.

    torchrun --nproc-per-node 2 examples/pytorch/dilated.py

Prints the losses, and how far they are from those of the same loop in one process alone; fails if that is too far.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))  # not needed with the wheel
import annulus  # noqa: E402

PATTERN = {"kind": "dilated", "segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4], "causal": True}
LENGTH, VOCABULARY, DIM, HEADS, LAYERS, STEPS = 128, 64, 32, 4, 2, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


def documents(step):
    """Returns the boundaries of the packed documents in a step's rows, and the position of each token in its document."""
    generator = torch.Generator().manual_seed(step)
    cuts = torch.randint(1, LENGTH, (3,), generator=generator).unique()
    boundaries = torch.cat([torch.tensor([0]), cuts, torch.tensor([LENGTH])])
    return boundaries, torch.cat([torch.arange(n) for n in boundaries.diff()]).unsqueeze(0)


def train(group, layout):
    torch.manual_seed(0)
    embedding, position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
    layers, head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(DIM, VOCABULARY)
    model = nn.ModuleList([embedding, position, layers, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(VOCABULARY, (2, LENGTH))
    losses = []
    for step in range(STEPS):
        boundaries, position_ids = documents(step)
        whole = {"tokens": text, "labels": annulus.shift_labels(text, position_ids), "position_ids": position_ids}
        mine = annulus.shard(whole, layout, group)

        def attend(q, k, v):
            return annulus.attention(q, k, v, PATTERN, group=group, layout=layout, cu_seqlens=boundaries)

        x = embedding(mine["tokens"]) + position(mine["position_ids"])
        for layer in layers:
            x = layer(x, attend)
        loss = F.cross_entropy(head(x).flatten(0, 1), mine["labels"].flatten(), reduction="sum")
        loss = loss / (whole["labels"] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        dist.all_reduce(loss := loss.detach(), group=group)
        losses.append(loss.item())
    return losses


def main():
    dist.init_process_group("gloo")
    over_all = train(dist.group.WORLD, "zigzag")
    alone, _ = dist.new_subgroups(1)
    by_itself = train(alone, "contiguous")
    worst = max(abs(a - b) for a, b in zip(over_all, by_itself))
    assert worst < 1e-4, (over_all, by_itself)
    if dist.get_rank() == 0:
        print(f"losses over {dist.get_world_size()} processes:", *(f"{loss:.5f}" for loss in over_all))
        print(f"in one process they differ by at most {worst:.0e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
