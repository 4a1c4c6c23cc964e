#!/usr/bin/env python3
"""annulus.shard and unshard over ranks: values, gradients, uneven parts, and parts that no layout has.

Runs under mpirun, or under torchrun over gloo. The targets package_*_test start it."""

import os
import pickle
import re
import sys
import warnings

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

by_documents = annulus.Sharding("balanced", group, pattern={"kind": "causal", "documents": [9, 3, 1]}).layout
for layout in ("contiguous", "zigzag", "striped", by_documents):
    for length in (13,) if layout == by_documents else (2, 8, 67):
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

# A rank holds the bits of its own queries, and attends by them.
shown = torch.rand(1, 2, 140, 140) < 0.3
shown[..., 0] = True
q = torch.randn(1, 140, 2, 4, dtype=torch.float64, requires_grad=True)
rows = q.transpose(1, 2)
want = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=shown).transpose(1, 2)
weight = torch.randn_like(want)
(wanted,) = torch.autograd.grad((want * weight).sum(), q)
for layout in ("contiguous", "zigzag", "striped"):
    cut = annulus.Sharding(layout, group)
    for mask in (annulus.TokenMask(shown, sharding=cut), shown):
        part = cut.shard(q)
        out = cut.unshard(cut.attention(part, part, part, "{ kind = 'full' }", mask=mask))
        exactness.agree(out, want)
        (got,) = torch.autograd.grad((out * weight).sum() / size, q)
        exactness.agree(annulus.all_reduce(got, group=group), wanted)
# With a schedule that moves queries it holds the bits of those that it computes as well.
cut = annulus.Sharding("zigzag", group)
for where in (dict(schedule="mesh", within=size), dict(schedule="ulysses", within=2 if size % 2 == 0 else 1)):
    computed = annulus.TokenMask(shown, sharding=cut, **where)
    equal = annulus.TokenMask(shown, sharding=cut)  # the latest of these, which does not serve
    for mask in (computed, shown):
        part = cut.shard(q)
        out = cut.unshard(cut.attention(part, part, part, "{ kind = 'full' }", mask=mask, **where))
        exactness.agree(out, want)
        (got,) = torch.autograd.grad((out * weight).sum() / size, q)
        exactness.agree(annulus.all_reduce(got, group=group), wanted)
if size > 1:
    mask, part = annulus.TokenMask(shown.flip(2), sharding=cut), cut.shard(q)
    try:
        cut.attention(part, part, part, "{ kind = 'full' }", mask=mask, schedule="mesh", within=size)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "does not hold the bits of query" in str(e) and "mesh" in str(e), e
    mask = annulus.TokenMask(shown.flip(3), sharding=annulus.Sharding("striped", group))
    part = annulus.shard(q, "zigzag", group)
    try:
        annulus.attention(part, part, part, "{ kind = 'full' }", mask=mask)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "does not hold the bits of query" in str(e), e

# Dealt by packed documents, which attention is given in its pattern or as cu_seqlens; another layer has a window.
bounds = torch.tensor([0, 90, 97, 140])
for layout in ("per-document", "balanced"):
    cut = annulus.Sharding(layout, group, pattern="{ kind = 'causal' }", cu_seqlens=bounds)
    assert annulus.sharding_of(cut.shard(q)).layout == cut.layout and cut.layout.startswith(layout + " by "), cut.layout
    dealt = [annulus.positions(140, cut.layout, rank=r, size=size).tolist() for r in range(size)]
    assert sorted(sum(dealt, [])) == list(range(140)) and max(map(len, dealt)) - min(map(len, dealt)) <= 1, dealt
    for pattern in ({"kind": "causal"}, {"kind": "window", "left": 9, "right": 0}):
        want = torch.cat([torch_reference.attention(d, d, d, pattern) for d in q.split([90, 7, 43], 1)], 1)
        part = cut.shard(q)
        out = cut.unshard(cut.attention(part, part, part, pattern, cu_seqlens=bounds))
        exactness.agree(out, want)
        (got,) = torch.autograd.grad((out * weight).sum() / size, q)
        (wanted,) = torch.autograd.grad((want * weight).sum(), q)
        exactness.agree(annulus.all_reduce(got, group=group), wanted)
mask = annulus.TokenMask(shown, sharding=cut)
part = cut.shard(q)
out = cut.unshard(cut.attention(part, part, part, "{ kind = 'full' }", mask=mask))
exactness.agree(out, torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=shown).transpose(1, 2))
if size > 1:
    other = part * 1  # which does not say how it was cut
    for call in (
        lambda: annulus.shard(q, "balanced", group),
        lambda: annulus.attention(part, part, part, group=group, layout="balanced"),
        lambda: annulus.attention(other, other, other, group=group, layout="balanced"),
        lambda: cut.attention(other, other[:, :-1], other[:, :-1], "{ kind = 'full' }"),
    ):
        try:
            call()
            raise AssertionError("taken")
        except annulus.AnnulusError as e:
            assert "balanced" in str(e), e

# The layout auto: all ranks come to the same one and say why; what shard returns carries it.
q = torch.randn(1, 140, 2, 4, dtype=torch.float64)
want = torch_reference.attention(q, q, q, {"kind": "causal"})
cut = annulus.Sharding("auto", group, length=140, pattern={"kind": "causal"}, heads=2)
assert cut.layout in ("contiguous", "zigzag", "striped") or " by " in cut.layout, cut.layout
assert cut.reason.startswith(cut.layout.split()[0]) and (" predicted on " in cut.reason) == (size > 1), cut.reason
dealt = [annulus.positions(140, cut.layout, rank=r, size=size).tolist() for r in range(size)]
assert sorted(sum(dealt, [])) == list(range(140)), dealt
planned = annulus.plan("{ kind = 'causal' }", 140, size, heads=2, layout="auto", prove=False)
assert {c["layout"] for c in planned["candidates"]} == {"contiguous", "zigzag", "striped", "balanced", "per-document"}, planned
part = annulus.shard({"q": q}, "auto", group, pattern={"kind": "causal"}, heads=2)["q"]
made = annulus.sharding_of(part)
assert (made.layout, made.length) == (cut.layout, 140) and annulus.Sharding(made.layout, group, 140) == cut, made
exactness.agree(cut.unshard(annulus.attention(part, part, part, layout="auto")), want)
by_bounds = annulus.Sharding("auto", group, cu_seqlens=bounds)
assert by_bounds.layout == annulus.Sharding("balanced", group, pattern="{ kind = 'causal' }", cu_seqlens=bounds).layout
assert by_bounds.reason == "balanced: each batch is dealt by the pairs of its documents"
assert annulus.Sharding("auto", group, cu_seqlens=bounds, schedule="ring").layout.startswith("per-document by ")
other = part * 1
for words, call in {
    "needs the length": lambda: annulus.Sharding("auto", group),
    "is chosen where rows are cut": lambda: annulus.attention(other, other, other, group=group, layout="auto"),
    "but these have": lambda: annulus.shard([q, q[:, :5]], "auto", group),
    "must not name a file": lambda: annulus.Sharding("auto", group, 64, {"kind": "blocks", "map": "file", "file": "m"}),
}.items():
    try:
        call()
        raise AssertionError(f"taken: {words}")
    except annulus.AnnulusError as e:
        assert words in str(e), e
if size > 1:
    try:
        annulus.Sharding("auto", group, length=140 + rank)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "ranks disagree" in str(e), e

# Contiguous parts may have any length; other layouts report the lengths that they expect.
mine = torch.full((1, rank), rank)
assert annulus.unshard(mine, "contiguous", group).tolist() == [sum([[r] * r for r in range(size)], [])]
if size > 1:
    try:
        annulus.unshard(torch.ones(1, 4 + rank), "zigzag", group)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert f"the ranks hold {[4 + r for r in range(size)]} positions, but the layout 'zigzag' cuts" in str(e), e

# A Sharding cuts and attends by one layout.
cut = annulus.Sharding(group=group)
q = torch.randn(1, 13, 2, 4, dtype=torch.float64)
part = cut.shard(q)
assert torch.equal(part, q[:, cut.positions(13)]) and torch.equal(cut.unshard(part), q)
want = torch_reference.attention(q, q, q, {"kind": "causal"})
exactness.agree(cut.unshard(cut.attention(part, part, part)), want)

# Where shard and its like are not given a layout it is zigzag, and over several ranks a warning says so.
zigzag = q[:, annulus.positions(13, "zigzag", rank=rank, size=size)]
computed = zigzag * 1
defaults = {
    "shard": lambda: torch.equal(annulus.shard(q, group=group), zigzag),
    "unshard": lambda: torch.equal(annulus.unshard(computed, group=group), q),
    "plan_ahead": lambda: annulus.plan_ahead("{ kind = 'causal' }", 13, group=group) is None,
}
for what, call in defaults.items():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert call(), what
    assert [w.category for w in said] == [FutureWarning] * (size > 1), (what, said)
    for w in said:
        assert f"{size} ranks have rows cut zigzag" in str(w.message) and w.filename == __file__, (what, w)

# What shard returns says how it was cut, so that nothing more must be given, with no warning.
warnings.simplefilter("error")
parts = annulus.shard({"tokens": q[..., 0, 0], "more": [q]}, "striped", group)
made = annulus.sharding_of(parts)
assert (made.layout, made.length) == ("striped", 13), made
assert torch.equal(made.positions(), annulus.positions(13, "striped", rank=rank, size=size))
part = parts["more"][0]
assert torch.equal(annulus.unshard(part), q)
computed = part * 1


def attend(x):
    return annulus.attention(x, x, x, sharding=made)


for out in annulus.attention(part, part, part), attend(computed), torch.compile(attend, fullgraph=True, backend="aot_eager")(part):
    exactness.agree(annulus.unshard(out, "striped", group), want)
assert pickle.loads(pickle.dumps(part)).equal(part)

# What does not belong together is refused, and over several ranks so are tensors of which nothing is known, also in a graph.
zigzag = annulus.Sharding("zigzag", group)
longer = annulus.sharding_of(zigzag.shard(torch.ones(1, 13 + 4 * size)))
mistakes = {
    "q: its rows were cut striped among": lambda: annulus.attention(part, part, part, group=group, layout="zigzag"),
    "v: its rows were cut striped among": lambda: zigzag.attention(computed, computed, part),
    "sharding: its rows were cut zigzag among": lambda: annulus.attention(computed, computed, computed, sharding=zigzag, layout="striped"),
    "a part to gather: its rows were cut striped": lambda: annulus.unshard(part, "contiguous", group),
    "give the layout in which": lambda: annulus.attention(computed, computed, computed, group=group),
    "give the layout in which the": lambda: torch.compile(
        lambda x: annulus.attention(x, x, x, group=group), backend="aot_eager"
    )(computed),
}
for words, call in mistakes.items():
    try:
        call()
        assert size == 1, words
    except (annulus.AnnulusError, RuntimeError) as e:
        assert size > 1 and words in str(e) and f"{size} ranks" in str(e), e
always = {
    r"q has \d+ rows, but of \d+ positions cut zigzag this rank has \d+": lambda: longer.attention(computed, computed, computed),
    "no tensor that annulus.shard returned": lambda: annulus.sharding_of([part, computed]),
    "the tensors were cut in different ways": lambda: annulus.sharding_of([part, zigzag.shard(q)]),
    "give the length of the whole rows": lambda: zigzag.positions(),
}
for words, call in always.items():
    try:
        call()
        raise AssertionError(f"taken: {words}")
    except annulus.AnnulusError as e:
        assert re.search(words, str(e)), e

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
