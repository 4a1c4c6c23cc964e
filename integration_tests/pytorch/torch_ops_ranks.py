#!/usr/bin/env python3
"""One rank of torch.ops.annulus under mpirun: compares its rows of output and gradients with dense attention."""

import os
import signal
import sys
import tempfile

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()

import exactness  # noqa: E402
import torch  # noqa: E402
import torch_reference  # noqa: E402
from annulus import load  # noqa: E402

annulus = load(timeout=2 if "--timeout" in sys.argv else None)
rank, size = annulus.rank(), annulus.size()
assert size == int(os.environ.get("WANT_SIZE", "1")), size

# The last rank leaves in some way after the first operation, while the others wait in a second one.
if faults := {"--fail", "--exit", "--stop", "--caught"} & set(sys.argv):
    part = torch.randn(1, 4, 2, 4)
    annulus.attention(part, part, part, "{ kind = 'causal' }")
    if rank == size - 1 and "--fail" in faults:
        raise ValueError("a rank gave up")
    if rank == size - 1 and "--exit" in faults:
        sys.exit(3)
    if rank == size - 1 and "--stop" in faults:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "--caught" in faults:
        if rank == 0:
            try:
                annulus.attention(part, part, part, "{ kind = 'causal' }")
            except RuntimeError as e:
                print(e)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        sys.exit(0)
    annulus.attention(part, part, part, "{ kind = 'causal' }")
    sys.exit("the other rank came")


def rows(layout, length):
    """Returns the positions of this rank, in storage order."""
    position = torch.arange(length)
    if layout == "striped":
        return position[rank::size]
    if layout == "uneven":
        ends = [0, *[(r + 1) * length // (size + 1) for r in range(size - 1)], length]
        return position[ends[rank] : ends[rank + 1]]
    chunks = 2 * size if layout == "zigzag" else size

    def chunk(i):
        return position[i * length // chunks : (i + 1) * length // chunks]

    return torch.cat([chunk(rank), chunk(2 * size - 1 - rank)]) if layout == "zigzag" else chunk(rank)


CASES = [
    ("contiguous", "auto", {"kind": "causal"}),
    ("zigzag", "ring", {"kind": "causal"}),
    ("striped", "all-gather", {"kind": "window", "left": 9, "right": 2}),
    ("zigzag", "mesh", {"kind": "causal"}),
    ("uneven", "ring", {"kind": "causal"}),
    ("contiguous", "group-cast", {"kind": "documents", "documents": [20, 30, 17]}),
    ("contiguous", "auto", {"kind": "union", "of": [{"kind": "full"}, {"kind": "window", "left": 4, "right": 0}]}),
]

for layout, schedule, pattern in CASES:
    torch.manual_seed(7)
    length = 67
    whole = [torch.randn(2, length, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    dout = torch.randn(2, length, 4, 8, dtype=torch.float64)
    want = torch_reference.attention(*whole, pattern)
    wanted = torch.autograd.grad(want, whole, dout)
    mine = rows(layout, length)
    parts = [t.detach()[:, mine].requires_grad_() for t in whole]
    name = "contiguous" if layout == "uneven" else layout
    for compiled in (False, True) if layout == "zigzag" else (False,):

        def attend(q, k, v):
            return annulus.attention(q, k, v, torch_reference.text(pattern), layout=name, schedule=schedule)

        run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        out = run(*parts)
        got = torch.autograd.grad(out, parts, dout[:, mine])
        for a, b in zip([out, *got], [want, *wanted]):
            exactness.agree(a, b[:, mine], (layout, schedule, pattern, compiled))

total = annulus.all_reduce(torch.full((2, 3), float(rank + 1)))
assert torch.equal(total, torch.full((2, 3), size * (size + 1) / 2.0)), total

# The gradient of the sum of all ranks' losses, also with torch.compile and of two calls.
x = torch.arange(1.0, 4.0, dtype=torch.float64) * (rank + 1)
x.requires_grad_()
for reduce in (annulus.all_reduce, torch.compile(lambda t: annulus.all_reduce(t), fullgraph=True, backend="aot_eager")):
    total = reduce(x)
    ranks = size * (size + 1) / 2.0
    assert torch.equal(total, torch.arange(1.0, 4.0, dtype=torch.float64) * ranks), total
    (dx,) = torch.autograd.grad((total.square() * (rank + 1)).sum(), x, create_graph=reduce is annulus.all_reduce)
    assert torch.equal(dx, 2 * total * ranks), (dx, total)
    if dx.requires_grad:
        (ddx,) = torch.autograd.grad(dx.sum(), x)
        assert torch.equal(ddx, torch.full_like(x, 2 * ranks * size)), ddx

# Lengths that a layout does not have are refused on all ranks; nothing hangs.
if size > 1:
    part = torch.randn(1, 5 + 3 * rank, 2, 4)
    try:
        annulus.attention(part, part, part, "{ kind = 'causal' }", layout="zigzag")
        raise AssertionError("taken")
    except RuntimeError as e:
        assert "[plan] the ranks hold 5, 8" in str(e), e

# A mistake of one rank is refused on all of them, with its number; none waits for its deadline.
if size > 1:

    def refused(words, by="[comm] ranks disagree", **other):
        part = torch.randn(1, 4, 2, 4, requires_grad=True)
        given = dict(q=part, k=part, v=part, pattern="{ kind = 'causal' }", layout="contiguous", layer=0)
        if rank == 1:
            given |= other
        try:
            settings = {name: given[name] for name in ("layout", "layer")}
            annulus.attention(given["q"], given["k"], given["v"], given["pattern"], **settings)
        except RuntimeError as e:
            assert by in str(e) and "rank 1" in str(e) and words in str(e), e
        else:
            raise AssertionError(f"taken: {words}")

    refused("k and v [batch, m, kv heads, head size]", by="[torch] on rank 1: ", k=torch.randn(1, 4, 2))
    refused("Double", by="[torch] on rank 1: ", q=torch.randn(1, 4, 2, 4, dtype=torch.float64))
    refused("q must be a tensor, but is None", by="[torch] on rank 1: ", q=None)
    refused("k must be a dense tensor", by="[torch] on rank 1: ", k=torch.randn(1, 4, 2, 4).to_sparse())
    refused("casual", by="[pattern] on rank 1: ", pattern="{ kind = 'casual' }")
    refused("left = 2", pattern="{ kind = 'window', left = 2, right = 0 }")
    refused("zigzak", by="[layout] on rank 1: ", layout="zigzak")
    refused("zigzag", layout="zigzag")
    refused("layer", layer=1)

    # The same for all_reduce; the next sum is added correctly.
    for wrong, words in [(torch.bfloat16, "x is BFloat16"), (None, "x is None")]:
        try:
            x = torch.full((2,), float(rank), dtype=wrong if wrong and rank == 1 else torch.float32)
            annulus.all_reduce(None if rank == 1 and wrong is None else x)
            raise AssertionError("taken")
        except RuntimeError as e:
            assert "[torch] on rank 1: all_reduce takes" in str(e) and words in str(e), e
        total = annulus.all_reduce(torch.full((2,), 100.0 + rank))
        assert torch.equal(total, torch.full((2,), sum(100.0 + r for r in range(size)))), total

    # A forked process cannot use its parent's connections, and its exit does not disturb them.
    child = os.fork()
    if child == 0:
        assert (annulus.rank(), annulus.size()) == (rank, size)
        for call in (lambda: annulus.attention(part, part, part, "{ kind = 'causal' }"), lambda: annulus.all_reduce(part)):
            try:
                call()
                os._exit(1)
            except RuntimeError as e:
                if "[torch] this process was forked" not in str(e):
                    os._exit(2)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0

    # A file that rank 1 does not have: each rank looks in a folder of its own.
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if rank != 1:
            header = b'{"mask": {"dtype": "U8", "shape": [1, 1, 1, 1], "data_offsets": [0, 1]}}'
            with open("mask.safetensors", "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header + b"\1")
        pattern = "{ kind = 'blocks', map = 'file', file = 'mask.safetensors', block = 16 }"
        part = torch.randn(1, 16 // size, 2, 4)
        try:
            annulus.attention(part, part, part, pattern)
            raise AssertionError("taken")
        except RuntimeError as e:
            assert "] on rank 1: " in str(e) and "mask.safetensors" in str(e), e
        os.chdir(here)

    # The same for a backward: rank 1 does not pass what its forward returned.
    part = torch.randn(1, 4, 2, 4)
    settings = (None, None, "{ kind = 'causal' }", "", "contiguous", "auto", 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0, True)
    out, lse, *saved = annulus.attention_forward(part, part, part, *settings, False)
    try:
        annulus.attention_backward(out, part, part, part, out, lse[:, :1] if rank == 1 else lse, *saved, None, *settings)
        raise AssertionError("taken")
    except RuntimeError as e:
        assert "on rank 1: " in str(e) and "expected lse" in str(e), e

    # The sizes of what a plan keeps are unknown without the plan.
    try:
        annulus.attention_forward(*[part.to("meta")] * 3, *settings, False)
        raise AssertionError("taken")
    except RuntimeError as e:
        assert "keep = True is for tensors with content" in str(e), e

    # If one rank traces and the others do not, nothing is kept and none waits.
    def attend(x):
        return annulus.attention(x, x, x, "{ kind = 'causal' }").square().sum()

    traced = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.manual_seed(rank)
    part = torch.randn(1, 4, 2, 4, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(attend(part), part)
    (got,) = torch.autograd.grad((traced if rank == 1 else attend)(part), part)
    exactness.agree(got, want)
    with torch.no_grad():
        kept = annulus.attention_forward(part, part, part, *settings[:-1], rank != 1, False)[2:4]
        assert [t.shape for t in kept] == [(0,), (0,)], kept

if rank == 0:
    print(f"{size} ranks: all as one", flush=True)
