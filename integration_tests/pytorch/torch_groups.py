"""One rank of torch.ops.annulus over process groups. torch_groups_test.py starts the ranks.

    torch_groups.py CASE[,CASE...]
"""

import contextlib
import datetime
import itertools
import json
import os
import random
import signal
import sys

os.environ["ANNULUS_WORLD_SIZE"] = "1"  # without a group a call is computed by this process alone, as the reference

import annulus as annulus_package
import exactness
import torch
import torch.distributed as dist
import torch.utils.checkpoint
import torch_reference

CAUSAL = "{ kind = 'causal' }"
KINDS = ["full", "causal", "window", "documents", "blocks", "union", "dilated", "adaptive"]
annulus = annulus_package.load(timeout=60)


def init():
    """Returns the group of all ranks, which meet through a file if torchrun did not start them."""
    store = os.environ.get("STORE")
    where = dict(init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60), **(where if store else {}))
    return dist.group.WORLD


def dealt(layout, length, size):
    """Returns the positions of each rank, in storage order."""
    position = torch.arange(length)
    if layout == "striped":
        return [position[rank::size] for rank in range(size)]
    chunks = 2 * size if layout == "zigzag" else size
    chunk = [position[i * length // chunks : (i + 1) * length // chunks] for i in range(chunks)]
    return [torch.cat([chunk[r], chunk[2 * size - 1 - r]]) for r in range(size)] if layout == "zigzag" else chunk


def parts_of(draw, length, count):
    """Returns `count` numbers that add up to `length`."""
    cuts = sorted(draw.randrange(length + 1) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, length])]


def drawn_pattern(draw, length, kind):
    causal = draw.random() < 0.5
    if kind == "window":
        return {"kind": kind, "left": draw.randrange(20), "right": draw.randrange(6), "causal": causal}
    if kind == "documents":
        lengths = [n for n in parts_of(draw, length, draw.randrange(1, 6)) if n]
        return {"kind": kind, "documents": lengths, "causal": causal} if lengths else {"kind": "full"}
    if kind == "blocks":
        return {"kind": kind, "map": "local", "block": 16, "window_blocks": draw.randrange(3), "causal": causal}
    if kind == "union":
        return {"kind": kind, "of": [drawn_pattern(draw, length, k) for k in ("full", "window")], "causal": causal}
    if kind == "dilated":
        spec = {"segment_lengths": [8, 32], "dilation_rates": [1, 2], "combine": draw.choice(["lse", "mean"])}
        return {"kind": kind, **spec, "causal": causal}
    if kind == "adaptive":
        return {"kind": "blocks", "map": "adaptive", "block": 16, "keep": draw.randrange(1, 3), "causal": causal}
    return {"kind": kind}


def sent(group):
    return json.loads(annulus.stats(group))


def check_one(draw, kind, group):
    """Compares output and gradients of one drawn call with those of one process, and its bytes with the plan's."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    length = draw.choice([0, 1, 2, 31, 64, 67, 96, 130])
    kv_heads = draw.randrange(1, 3)
    heads = kv_heads * draw.choice([1, 2, 3]) if kind != "dilated" else 2 * kv_heads
    pattern = drawn_pattern(draw, length, kind)
    text = torch_reference.text(pattern)
    layout = draw.choice(["contiguous", "zigzag", "striped", "uneven"])
    schedule = draw.choice(["auto", "ring", "all-gather", "group-cast", "double-ring", "ulysses", "ulysses-ring", "mesh"])
    settings = dict(schedule=schedule)
    if "documents" not in pattern and draw.random() < 0.4:
        bounds = [0, *itertools.accumulate(parts_of(draw, length, draw.randrange(1, 5)))]
        settings["cu_seqlens"] = torch.tensor(bounds, dtype=draw.choice([torch.int32, torch.int64]))
    if draw.random() < 0.3:
        settings.update(dropout=0.25, seed=3, step=draw.randrange(9))
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    what = (text, layout, settings, length, heads, kv_heads, dtype)

    torch.manual_seed(draw.randrange(1 << 30))
    whole = [torch.randn(2, length, h, 8, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
    whole = [t.detach().to(dtype).requires_grad_() for t in whole]
    dout = torch.randn(2, length, heads, 8).to(dtype)
    want = annulus.attention(*whole, text, **settings)
    wanted = torch.autograd.grad(want, whole, dout)
    if schedule in ("group-cast", "double-ring", "mesh"):
        settings["within"] = draw.choice([n for n in range(size + 1) if n == 0 or size % n == 0])
    if schedule in ("ulysses", "ulysses-ring"):
        settings["within"] = draw.choice([n for n in range(1, size + 1) if size % n == 0 and heads % n == 0])

    if layout == "uneven":
        lengths = parts_of(draw, length, size)
        mine = torch.arange(length).split(lengths)[rank]
        settings["layout"] = "contiguous"
    else:
        lengths = None
        mine = dealt(layout, length, size)[rank]
        settings["layout"] = layout
    parts = [t.detach()[:, mine].requires_grad_() for t in whole]
    before = sent(group.group_name)
    out = annulus.attention(*parts, text, group=group.group_name, **settings)
    got = torch.autograd.grad(out, parts, dout[:, mine])
    after = sent(group.group_name)
    # The error of one rank is the measure, except where a selection in fp64 may be another one.
    wide = [t.detach().to(torch.float32 if kind == "adaptive" else torch.float64).requires_grad_() for t in whole]
    exact = annulus.attention(*wide, text, **(settings | {"layout": "contiguous", "within": 0}))
    exacts = torch.autograd.grad(exact, wide, dout.to(exact.dtype))
    for a, b, c in zip([out, *got], [want, *wanted], [exact, *exacts]):
        # Gradients are sums of differences of products of 8 elements, times an element: about 10 in sum.
        exactness.as_exact(a, b[:, mine], c[:, mine], what, terms=10)
    if kind == "adaptive":
        return
    size_of = dtype.itemsize
    plan = json.loads(
        annulus.plan(text, length, size, heads=heads, kv_heads=kv_heads, batch=2, head_dim=8, element_bytes=size_of,
                     lengths=lengths, **{k: settings[k] for k in ("schedule", "within", "layout", "cu_seqlens") if k in settings})
    )
    assert plan["proof"]["holds"], plan
    for direction in ("forward", "backward"):
        bytes_sent = after[direction]["bytes_sent"] - before[direction]["bytes_sent"]
        assert after[direction]["calls"] == before[direction]["calls"] + 1
        planned = plan[direction]
        low, high = (sum(planned[key][end] for key in planned if key.endswith("bytes_sent")) for end in ("least", "most"))
        assert low <= bytes_sent <= high, (what, direction, bytes_sent, planned)
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(every, torch.tensor([bytes_sent]), group=group)
        every = [t.item() for t in every]
        if direction == "forward" and "query_bytes_sent" not in planned:  # of one kind, so some rank attains each bound
            assert (min(every), max(every)) == (low, high), (what, every, planned)


def same(group):
    draw = random.Random(5)
    for i in range(48):
        check_one(draw, KINDS[i % len(KINDS)], group)


def compiled(group):
    """One graph serves all lengths and boundaries, compared with eager calls; the group's name is a constant of it."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name

    def loss(q, k, v, bounds):
        out = annulus.attention(torch.sin(q), k, v, CAUSAL, group=name, layout="zigzag", cu_seqlens=bounds)
        return out.square().sum()

    graphs = 0

    def backend(graph, example):
        nonlocal graphs
        graphs += 1
        return graph.forward

    eager_graph = torch.compile(loss, fullgraph=True, backend=backend, dynamic=True)
    aot = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for length, cuts in ((16 * size, [5]), (24 * size, [3, 9]), (40 * size, [1, 30])):
        torch.manual_seed(length)
        whole = [torch.randn(1, length, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        bounds = torch.tensor([0, *cuts, length])
        alone = annulus.attention(torch.sin(whole[0]), *whole[1:], CAUSAL, cu_seqlens=bounds).square().sum()
        wanted = torch.autograd.grad(alone, whole)
        mine = dealt("zigzag", length, size)[rank]
        for run in (loss, eager_graph, aot):
            parts = [t.detach()[:, mine].requires_grad_() for t in whole]
            got = torch.autograd.grad(run(*parts, bounds), parts)
            for a, b in zip(got, wanted):
                exactness.agree(a, b[:, mine])
    # Other lengths need no new graph; another number of boundaries may need a second one.
    assert graphs <= 2, graphs

    # With fake tensors beside the real ones, and compiled; the same on all ranks, since each call is collective.
    x = [torch.randn(1, 8, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for op in (annulus.attention.default, annulus.attention_with_lse.default):
        torch.library.opcheck(op, (*x, CAUSAL), dict(group=name, layout="zigzag"))
    torch.library.opcheck(annulus.all_reduce.default, (x[0],), dict(group=name))
    x = [t.detach() for t in x]
    settings = (None, None, CAUSAL, name, "contiguous", "ring", 0, None, 0.0, 0, 0, 0, 0, 0, 0.0, False)
    out, *saved = annulus.attention_forward(*x, *settings, True)
    torch.library.opcheck(annulus.attention_backward.default, (out, *x, out, *saved, None, *settings))


def lse(group):
    """Gradients of lse, with that of out and without; keys and values that the plan keeps; a loss on one rank alone."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name
    length = 24 * size
    adaptive = "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 1, causal = true }"
    for layout, schedule, pattern in [
        ("zigzag", "ring", CAUSAL),
        ("contiguous", "auto", "{ kind = 'window', left = 9, right = -1 }"),
        ("striped", "all-gather", "{ kind = 'dilated', segment_lengths = [8, 16], dilation_rates = [1, 2] }"),
        ("contiguous", "ring", adaptive),
    ]:
        torch.manual_seed(6)
        whole = [torch.randn(2, length, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
        weights = [torch.randn(2, length, 4, 8, dtype=torch.float64), torch.randn(2, 4, length, dtype=torch.float64)]
        want = annulus.attention_with_lse(*whole, pattern)
        mine = dealt(layout, length, size)[rank]
        parts = [t.detach()[:, mine].requires_grad_() for t in whole]
        # Which of out and lse is in the loss of a rank.
        for here in ([(0, 1)] * size, [(1,)] * size, [(0, 1), *[(0,)] * (size - 1)], [*[(0,)] * (size - 1), (1,)]):
            out = annulus.attention_with_lse(*parts, pattern, group=name, layout=layout, schedule=schedule)
            exactness.agree(out[0], want[0][:, mine], (layout, pattern))
            exactness.agree(out[1], want[1][:, :, mine], (layout, pattern))
            used = here[rank]
            cut = [weights[0][:, mine], weights[1][:, :, mine]]
            got = torch.autograd.grad([out[i] for i in used], parts, [cut[i] for i in used])
            held = [torch.zeros_like(t) for t in weights]
            for r, which in enumerate(here):
                of_rank = dealt(layout, length, size)[r]
                for i in which:
                    where = (slice(None), of_rank) if i == 0 else (slice(None), slice(None), of_rank)
                    held[i][where] = weights[i][where]
            wanted = torch.autograd.grad(want, whole, held, retain_graph=True)
            for a, b in zip(got, wanted):
                exactness.agree(a, b[:, mine], (layout, pattern, here))


def hooks(group):
    """Saved tensors may be copied to the host, recomputed, or kept in part."""
    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name
    torch.manual_seed(3)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    whole = [torch.randn(1, 16 * size, 2, 8, dtype=torch.float64) for _ in range(3)]
    mine = dealt("zigzag", 16 * size, size)[rank]
    adaptive = "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 1, causal = true }"
    policy = torch.utils.checkpoint.CheckpointPolicy

    def keep(context, op, *args, **kwargs):
        return policy.MUST_SAVE if op == annulus.attention_forward.default else policy.PREFER_RECOMPUTE

    for pattern, bounds in ((CAUSAL, None), (CAUSAL, torch.tensor([0, 7, 16 * size])), (adaptive, None)):
        held = []

        def layer(q, k, v):
            out = annulus.attention(torch.sin(q @ weight), k, v, pattern, group=name, layout="zigzag",
                                    schedule="ring", cu_seqlens=bounds)
            again = annulus.attention(out, k, v, pattern, group=name, layout="zigzag", cu_seqlens=bounds)  # twice
            return torch.tanh((out + again) @ weight)

        def run(how):
            x = [t[:, mine].clone().requires_grad_() for t in whole]
            with how() if how in (torch.autograd.graph.save_on_cpu, copies) else contextlib.nullcontext():
                y = how(layer, *x) if how in (full, reentrant, selective) else layer(*x)
            return torch.autograd.grad(y.square().sum(), (*x, weight)) if how is not reentrant else backward(y, x)

        def copies():
            return torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.clone()) or held[-1], lambda t: t.clone())

        def full(f, *x):
            return torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False)

        def reentrant(f, *x):
            return torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=True)

        def backward(y, x):
            weight.grad = None
            y.square().sum().backward()
            return [t.grad for t in (*x, weight)]

        def selective(f, *x):
            contexts = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(keep)  # noqa: E731
            return torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False, context_fn=contexts)

        want = run(None)
        for how in (torch.autograd.graph.save_on_cpu, copies, full, reentrant, selective):
            # Under a dispatch mode a plan keeps no block for the backward, which is sent again and added in another order.
            for a, b in zip(run(how), want):
                if how is selective:
                    exactness.agree(a, b, (pattern, bounds), terms=exactness.largest(b))
                else:
                    assert torch.equal(a, b), (how, pattern, bounds)
        assert held
        # The saved tensors include what the plan keeps: a block of 16 positions of 2 heads.
        assert pattern != CAUSAL or bounds is not None or any(t.shape == (32, 8) for t in held)


def sharded(group):
    """FSDP2: its hooks gather the weights of each layer and free them again, and layers are recomputed."""
    from torch.distributed.fsdp import fully_shard

    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48, bias=False, dtype=torch.float64)

        def forward(self, x, where):
            q, k, v = (t.unflatten(-1, (2, 8)) for t in self.project(x).chunk(3, -1))
            return x + annulus.attention(q, k, v, CAUSAL, group=where, layout="zigzag").flatten(2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, where):
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, where, use_reentrant=False)
            return x.square().sum()

    whole, parts = Model(), Model()
    torch.manual_seed(9)
    x = torch.randn(1, 16 * size, 16, dtype=torch.float64)
    alone = whole(x, "")
    alone.backward()
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in parts.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    loss = parts(x[:, dealt("zigzag", 16 * size, size)[rank]], name)
    loss.backward()
    total = annulus.all_reduce(loss.detach(), group=name)
    exactness.agree(total, alone)
    for a, b in zip(parts.parameters(), whole.parameters()):
        # FSDP averages over its ranks, but the gradient is the sum.
        exactness.agree(a.grad.full_tensor() * size, b.grad)


def meshes(group):
    """data x context: two groups at once, whose ranks are not ranks 0, 1, ... of the job."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    for context in (mesh["context"].get_group(), mesh["data"].get_group()):
        draw = random.Random(11)
        check_one(draw, "causal", context)
        total = annulus.all_reduce(torch.tensor([float(dist.get_rank())]), group=context.group_name)
        assert total.item() == sum(dist.get_process_group_ranks(context)), total
        assert annulus.rank(context.group_name) == dist.get_rank(context)
        assert annulus.size(context.group_name) == 2
    # One graph with a call over each axis.
    x = torch.randn(1, 8, 2, 8, dtype=torch.float64, requires_grad=True)
    names = [mesh[axis].get_group().group_name for axis in ("context", "data")]
    y = annulus.attention(annulus.attention(x, x, x, CAUSAL, group=names[0]), x, x, CAUSAL, group=names[1])
    assert torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()
    some = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        check_one(random.Random(12), "window", some)


def refused(group):
    """A mistake of one rank is raised on all of them and names that rank; the group can be used afterwards."""
    rank, name = dist.get_rank(), group.group_name

    def expect(run, *words):
        try:
            run()
        except RuntimeError as e:
            assert all(word in str(e) for word in words), (words, e)
        else:
            raise AssertionError(f"taken: {words}")
        total = annulus.all_reduce(torch.ones(1), group=name)
        assert total.item() == dist.get_world_size(), total

    def call(**other):
        x = torch.ones(1, 4, 2, 4)
        given = dict(q=x, k=x, v=x, pattern=CAUSAL) | (other if rank == 1 else {})
        tensors = [given.pop(key) for key in ("q", "k", "v", "pattern")]
        return annulus.attention(*tensors, group=name, **given)

    half = torch.ones(1, 4, 2, 4, dtype=torch.bfloat16)
    wide = torch.ones(1, 4, 2, 8)
    differ = "[comm] ranks disagree"
    expect(lambda: call(q=half, k=half, v=half), differ, "dtype", "rank 1", "BFloat16")
    expect(lambda: call(q=wide, k=wide, v=wide), differ, "head size", "rank 1")
    expect(lambda: call(pattern="{ kind = 'full' }"), differ, "pattern", "rank 1")
    expect(lambda: call(layout="zigzag"), differ, "layout", "rank 1")
    expect(lambda: call(schedule="ring"), differ, "schedule", "rank 1")
    expect(lambda: call(k=wide), "[torch] on rank 1: ", "q must be [batch")
    expect(lambda: call(cu_seqlens=torch.tensor([0, 3])), differ, "pattern", "rank 1")
    expect(lambda: call(cu_seqlens=torch.tensor([1, 3])), "[torch] on rank 1: ", "cu_seqlens must begin with 0")
    expect(lambda: call(dropout=0.5), differ, "dropout", "rank 1")
    size = dist.get_world_size()
    x = torch.ones(1, 4, 2, 4)
    ends = lambda: annulus.attention(x, x, x, CAUSAL, group=name, cu_seqlens=torch.tensor([0, 3]))  # noqa: E731
    expect(ends, "[torch] cu_seqlens must end with", f"{4 * size} queries", "ends with 3")
    # One rank is in a backward, the others in a forward.
    y = torch.ones(1, 4, 2, 4, requires_grad=True)
    out = annulus.attention(y, y, y, CAUSAL, group=name)
    order = lambda: out.sum().backward() if rank == 1 else annulus.attention(y, y, y, CAUSAL, group=name)  # noqa: E731
    expect(order, differ, "backward", "rank 1")

    # Calls of equal shape that one rank differentiates in another order, or of which it leaves one out.
    whole = torch.randn(1, 4 * size, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    z = whole[:, dealt("contiguous", 4 * size, size)[rank]].requires_grad_()
    for call in (
        lambda t: annulus.attention(t, t, t, CAUSAL, group=name),
        lambda t: annulus.attention_with_lse(t, t, t, CAUSAL, group=name)[1],
        lambda t: annulus.all_reduce(t, group=name),
    ):
        run = torch.compile(call, fullgraph=True, backend="aot_eager") if rank == 0 else call
        main, auxiliary = run(z), run(2 * z)
        numbers = [differ, "the call whose backward it is", "is number", "on rank 0, number", "on rank 1"]
        expect(lambda: (auxiliary if rank == 1 else main).sum().backward(), *numbers)  # noqa: B023
        main, auxiliary = run(z), run(2 * z)
        expect(lambda: (main.sum() + (0 if rank == 1 else auxiliary.sum())).backward(), *numbers)  # noqa: B023
        # In the same order, which need not be that of the forwards, they are right, whatever was refused before.
        main, auxiliary = run(z), run(2 * z)
        want = torch.autograd.grad((run(z) + 3 * run(2 * z)).sum(), z)[0]
        got = torch.autograd.grad(main.sum(), z)[0] + torch.autograd.grad(3 * auxiliary.sum(), z)[0]
        exactness.agree(got, want)
    # Forwards in another order differ in the layer, if the program gives it.
    twice = lambda n: annulus.attention(z, z, z, CAUSAL, group=name, layer=n)  # noqa: E731
    expect(lambda: twice(1 if rank == 1 else 0), differ, "layer is 0 on rank 0, 1 on rank 1")

    # A rank without a backward, for which the others would wait.
    missing = ["whether q, k, v or the sinks require a gradient (if none does, there is no backward", "is yes on rank 0, no on rank 1"]
    frozen = z.detach() if rank == 1 else z
    with_lse = lambda: annulus.attention_with_lse(frozen, frozen, frozen, CAUSAL, group=name)  # noqa: E731
    expect(lambda: annulus.attention(frozen, frozen, frozen, CAUSAL, group=name), differ, *missing)
    expect(with_lse, differ, *missing)
    with torch.set_grad_enabled(rank == 0):
        expect(lambda: annulus.attention(z, z, z, CAUSAL, group=name), differ, *missing)
    q = z.detach() if rank == 1 else z  # one of the three is enough
    annulus.attention(q, z, z, CAUSAL, group=name).sum().backward()

    # What is refused in a backward is refused on all ranks.
    out, denominators = annulus.attention_with_lse(z, z, z, CAUSAL, group=name, dropout=0.5)
    loss = out.sum() + (denominators.sum() if rank == 1 else 0)
    expect(lambda: loss.backward(), "[torch] on rank 1: with dropout lse has no gradient")
    try:
        annulus.attention(y, y, y, CAUSAL, group="nobody")
        raise AssertionError("taken")
    except RuntimeError as e:
        assert "no process group is registered under the name \"nobody\"" in str(e), e


def killed(group):
    """The last rank is killed between two calls: the others raise within the deadline, not only when the test ends."""
    annulus.set_timeout(5)
    x = torch.ones(1, 4, 2, 4)
    annulus.attention(x, x, x, CAUSAL, group=group.group_name)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        annulus.attention(x, x, x, CAUSAL, group=group.group_name)
    except RuntimeError as e:
        assert "[comm]" in str(e), e
        print("raised:", e, flush=True)
        # The group is unusable now; a program ends whether or not it destroys the group.
        if dist.get_rank() == 0:
            dist.destroy_process_group()
        sys.exit(0)
    raise AssertionError("the killed rank came")


def main():
    group = init()
    for case in sys.argv[1].split(","):  # in one job, since starting it takes longer than most cases
        {f.__name__: f for f in (same, compiled, lse, hooks, sharded, meshes, refused, killed)}[case](group)
        dist.barrier()
        print(f"rank {os.environ['RANK']}: {case} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
