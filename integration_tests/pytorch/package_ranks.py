#!/usr/bin/env python3
"""annulus.shard and unshard over ranks: values, gradients, uneven parts, and parts that no layout has.

Runs under mpirun, or under torchrun over gloo. The targets package_*_test start it."""

import os
import sys

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()

import annulus  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import torch_reference  # noqa: E402

group = None
if "TORCHELASTIC_RUN_ID" in os.environ:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
rank, size = annulus.rank(group), annulus.size(group)
torch.manual_seed(3)

for layout in ("contiguous", "zigzag", "striped"):
    for length in (2, 8, 67):
        for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.complex64, torch.complex128):
            whole = torch.randn(2, length, 3, dtype=torch.complex128) * 100
            whole = (whole if dtype.is_complex else whole.real).to(dtype)
            part = annulus.shard(whole, layout, group)
            assert torch.equal(part, whole[:, annulus.positions(length, layout, rank=rank, size=size)])
            assert torch.equal(annulus.unshard(part, layout, group), whole), (layout, length, dtype)
            assert torch.equal(annulus.unshard(part, layout, group, dim=-2), whole)
            part = annulus.shard(whole[0], layout, group, dim=0)
            assert torch.equal(annulus.unshard(part, layout, group, dim=0), whole[0])

    # Attention and the layouts give each rank the same positions, and gradients flow back through both.
    q = torch.randn(1, 13, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(q)
    want = torch_reference.attention(q, q, q, {"kind": "causal"})
    part = annulus.shard(q, layout, group)
    out = annulus.unshard(annulus.attention(part, part, part, group=group, layout=layout), layout, group)
    exactness.agree(out, want)
    # Each rank has the whole loss, and autograd differentiates the sum of all of them.
    (got,) = torch.autograd.grad((out * weight).sum() / size, q)
    got = annulus.all_reduce(got, group=group)
    (wanted,) = torch.autograd.grad((want * weight).sum(), q)
    exactness.agree(got, wanted)

# Contiguous parts may have any length; other layouts report the lengths that they expect.
mine = torch.full((1, rank), rank)
assert annulus.unshard(mine, "contiguous", group).tolist() == [sum([[r] * r for r in range(size)], [])]
if size > 1:
    try:
        annulus.unshard(torch.ones(1, 4 + rank), "zigzag", group)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert f"the ranks hold {[4 + r for r in range(size)]} positions, but the layout 'zigzag' cuts" in str(e), e

# A Sharding cuts and attends by one layout. Over several ranks a layout that is left out is an error, also in a graph.
cut = annulus.Sharding(group=group)
q = torch.randn(1, 13, 2, 4, dtype=torch.float64)
part = cut.shard(q)
assert torch.equal(part, q[:, cut.positions(13)]) and torch.equal(cut.unshard(part), q)
exactness.agree(cut.unshard(cut.attention(part, part, part)), torch_reference.attention(q, q, q, {"kind": "causal"}))
left_out = {
    "shard": lambda: annulus.shard(q, group=group),
    "unshard": lambda: annulus.unshard(part, group=group),
    "plan_ahead": lambda: annulus.plan_ahead("{ kind = 'causal' }", 13, group=group),
    "attention": lambda: annulus.attention(part, part, part, group=group),
    "compiled": lambda: torch.compile(lambda x: annulus.attention(x, x, x, group=group), backend="aot_eager")(part),
}
for what, call in left_out.items():
    try:
        call()
        assert size == 1, what
    except (annulus.AnnulusError, RuntimeError) as e:
        assert size > 1 and "give the layout in which" in str(e) and f"{size} ranks" in str(e), e

# A group may be a mesh of one dimension or a name, and is a constant of a compiled graph.
if group is not None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size, 1), mesh_dim_names=("context", "other"))
    q = torch.randn(1, 4, 2, 4, dtype=torch.float64, requires_grad=True)
    wanted = annulus.attention(q, q, q, group=group, layout="zigzag")
    for given in (mesh["context"], mesh["context"].get_group().group_name, mesh["context"].get_group()):
        assert (annulus.rank(given), annulus.size(given)) == (rank, size)

        def attend(q, given=given):
            return annulus.attention(q, q, q, group=given, layout="zigzag")

        for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            out = run(q)
            assert torch.equal(out, wanted)
            out.sum().backward()
    try:
        annulus.attention(q, q, q, group=mesh)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "group must be a mesh of one dimension, but has 2" in str(e), e

# Inside annulus.errors() an error of a backward is an AnnulusError; here the ranks reduce tensors of different shapes.
if size > 1:
    sums = [annulus.all_reduce(torch.ones(n, requires_grad=True), group=group) for n in (3, 4)]
    try:
        with annulus.errors():
            sums[min(rank, 1)].sum().backward()
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "all_reduce" in str(e), e

if rank == 0:
    print(f"{size} ranks: cut and put together", flush=True)
if group is not None:
    torch.distributed.destroy_process_group()
