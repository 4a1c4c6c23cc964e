#!/usr/bin/env python3
"""Replaces the attention of an existing PyTorch model by that of annulus, in one process or over the ranks of mpirun.

    python3 examples/pytorch/swap.py
    mpirun -n 2 python3 examples/pytorch/swap.py

The model is a small Llama-like decoder written with F.scaled_dot_product_attention. `swap` replaces only that call; the
weights stay. With several ranks, each rank has a part of every sequence: it embeds, multiplies and normalises its own
positions, and attention covers all positions. Gradients of weights are summed over the ranks.
"""

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
import annulus  # noqa: E402

# ---- The original model, which does not use annulus.


def rotate(x, positions):
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double().unsqueeze(1) * frequency
    cosine, sine = (t.to(x.dtype).unsqueeze(1) for t in (angle.cos(), angle.sin()))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.q = nn.Linear(dim, heads * self.size, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def attend(self, q, k, v):  # [batch, positions, heads, size]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def forward(self, x, positions):
        q = rotate(self.q(x).unflatten(-1, (self.heads, self.size)), positions)
        k = rotate(self.k(x).unflatten(-1, (self.kv_heads, self.size)), positions)
        v = self.v(x).unflatten(-1, (self.kv_heads, self.size))
        return self.out(self.attend(q, k, v).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim), Attention(dim, heads, kv_heads)
        self.mlp_norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, positions):
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=256, dim=64, heads=4, kv_heads=2, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, positions):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


# ---- The changes.


def swap(model, pattern="{ kind = 'causal' }", layout="zigzag"):
    """Makes every Attention of the model use annulus from now on."""
    for layer, module in enumerate(m for m in model.modules() if isinstance(m, Attention)):

        def attend(q, k, v, layer=layer):
            return annulus.attention(q, k, v, pattern, layout=layout, layer=layer)

        module.attend = attend


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = Model().double()
    text = torch.randint(256, (2, arguments.length + 1))
    positions = torch.arange(arguments.length)
    with torch.no_grad():
        before = F.cross_entropy(model(text[:, :-1], positions).flatten(0, 1), text[:, 1:].flatten())

    swap(model)
    run = torch.compile(model, fullgraph=True) if arguments.compile else model
    mine = annulus.shard(positions, "zigzag", dim=0)
    tokens, targets = annulus.shard((text[:, :-1], text[:, 1:]), "zigzag")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(run(tokens, mine).flatten(0, 1), targets.flatten(), reduction="sum") / text[:, 1:].numel()
        loss.backward()
        for p in model.parameters():
            p.grad = annulus.all_reduce(p.grad)
        optimizer.step()
        whole = annulus.all_reduce(loss.detach())
        if step == 0:
            assert abs(whole - before) < 1e-9, (whole, before)
        if annulus.rank() == 0 and step in (0, arguments.steps - 1):
            print(f"step {step}: loss {whole:.6f}" + (f" (before the swap {before:.6f})" if step == 0 else ""), flush=True)


if __name__ == "__main__":
    main()
