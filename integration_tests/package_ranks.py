#!/usr/bin/env python3
"""annulus.shard and unshard over ranks: values, gradients, uneven parts, and what no layout deals. For package_*_ranks_test."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_python  # noqa: E402

torch_python.enter()

import annulus  # noqa: E402
import torch  # noqa: E402
import torch_reference  # noqa: E402

rank, size = annulus.rank(), annulus.size()
torch.manual_seed(3)

for layout in ("contiguous", "zigzag", "striped"):
    for length in (2, 8, 67):
        for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool):
            whole = (torch.randn(2, length, 3) * 100).to(dtype)
            part = annulus.shard(whole, layout)
            assert torch.equal(part, whole[:, annulus.positions(length, layout, rank=rank, size=size)])
            assert torch.equal(annulus.unshard(part, layout), whole), (layout, length, dtype)
            assert torch.equal(annulus.unshard(annulus.shard(whole[0], layout, dim=0), layout, dim=0), whole[0])

    # Attention agrees with the layouts about who has what, and gradients come home through both.
    q = torch.randn(1, 13, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(q)
    want = torch_reference.attention(q, q, q, {"kind": "causal"})
    part = annulus.shard(q, layout)
    out = annulus.unshard(annulus.attention(part, part, part, layout=layout), layout)
    assert (out - want).abs().max() < 1e-14
    # Each rank has the whole loss: what is differentiated is the sum of all of them.
    (got,) = torch.autograd.grad((out * weight).sum() / size, q)
    got = annulus.all_reduce(got)
    (wanted,) = torch.autograd.grad((want * weight).sum(), q)
    assert (got - wanted).abs().max() < 1e-13, (got - wanted).abs().max()

# Contiguous parts of any length; other layouts say what they deal.
mine = torch.full((1, rank), rank)
assert annulus.unshard(mine).tolist() == [sum([[r] * r for r in range(size)], [])]
if size > 1:
    try:
        annulus.unshard(torch.ones(1, 4 + rank), "zigzag")
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert f"the ranks hold {[4 + r for r in range(size)]} positions, but the layout 'zigzag' deals" in str(e), e

if rank == 0:
    print(f"{size} ranks: cut and put together", flush=True)
