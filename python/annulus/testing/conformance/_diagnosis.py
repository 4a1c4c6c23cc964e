"""Names what a wrong result looks like: computes what known faults would give and says which of them it is. Used by _judge.py.

A name is a hint for whoever looks for the fault. A verdict never depends on it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ._cases import Case, seen
from ._definition import Inputs, attend

NOT_FINITE = "it has infinities or NaN"
CLOSE = 0.05  # of the error: what a named fault must leave unexplained at most


def _blocks(case: Case, of_q: list[Tensor], of_k: list[Tensor], from_of: dict[tuple[int, int], int]) -> Tensor:
    """Returns the counts if rank a, where it should attend to the block of rank b, attends to that of from_of[a, b], or to none (-1)."""
    counted = seen(case).double()
    changed = counted.clone()
    for a, b in from_of:
        changed[of_q[a][:, None], of_k[b][None, :]] = 0
    for (a, b), source in from_of.items():
        if source >= 0 and len(of_k[source]) == len(of_k[b]):
            changed[of_q[a][:, None], of_k[source][None, :]] += counted[of_q[a][:, None], of_k[b][None, :]]
    return changed


def _masks(case: Case, of_q: list[Tensor], of_k: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields known faults of masks, and the counts that they give."""
    q, k = torch.arange(case.length_q)[:, None], torch.arange(case.length_k)[None, :]
    rank_q, row_q = torch.zeros(case.length_q, dtype=torch.int64), torch.zeros(case.length_q, dtype=torch.int64)
    rank_k, row_k = torch.zeros(case.length_k, dtype=torch.int64), torch.zeros(case.length_k, dtype=torch.int64)
    for r, (p_q, p_k) in enumerate(zip(of_q, of_k)):
        rank_q[p_q], row_q[p_q] = r, torch.arange(len(p_q))
        rank_k[p_k], row_k[p_k] = r, torch.arange(len(p_k))
    apart = row_k[None, :] - row_q[:, None]
    own = rank_q[:, None] == rank_k[None, :]
    if case.causal:
        open_ = seen(replace(case, causal=False))
        yield "the causal diagonal is shifted by one: a query sees the key after its own", open_ & (k <= q + 1)
        yield "the causal diagonal is shifted by one: a query does not see its own key", open_ & (k < q)
        yield "there is no causal mask", open_
        yield "the causal mask is by rows of the parts, not by positions", open_ & (apart <= 0)
    if case.window is not None:
        left, right = case.window
        yield "the window is lost", seen(replace(case, window=None))
        for more in (1, -1):
            words = "one key too wide" if more == 1 else "one key too narrow"
            yield f"the window is {words}", seen(replace(case, window=(left + more, right)))
        whole = seen(replace(case, window=None))
        inside = (apart >= -left) & (apart <= right)
        yield "the window is applied in each block without the block's offset", whole & torch.where(own, seen(case), inside)
        yield "the window ends at the rank's own block", seen(case) & own
    if case.documents is not None:
        yield "documents are ignored", seen(replace(case, documents=None))
        for more, words in ((1, "late"), (-1, "early")):
            inner = tuple(min(max(0, e + more), case.length_q) for e in case.documents[1:-1])
            yield f"document boundaries are one token too {words}", seen(replace(case, documents=(0, *inner, case.length_q)))
    if case.first_key:
        yield "padding is seen as keys", seen(replace(case, first_key=0))
    for step in range(1, case.size):
        pairs = [(a, (a - step) % case.size) for a in range(case.size)]
        yield f"the block of ring step {step} is missing", _blocks(case, of_q, of_k, {p: -1 for p in pairs})
        stale = {(a, b): (b + 1) % case.size for a, b in pairs}
        yield f"the block of ring step {step} is stale: that of the step before is used again", _blocks(case, of_q, of_k, stale)
    if case.size > 1:
        yield "a rank sees only its own block", seen(case) & own


def forward(case: Case, inputs: Inputs, of_q: list[Tensor], of_k: list[Tensor], got: Tensor, want: Tensor) -> str:
    """Returns the fault that `out` looks like, or ""."""
    if not got.isfinite().all():
        return NOT_FINITE
    error = _largest(got - want)
    q, k, v = (t.double() for t in inputs[:3])
    for name, counted in _masks(case, of_q, of_k):
        out, _ = attend(q, k, v, counted, case.scale)
        if _largest(got - out) <= CLOSE * error:
            return name
    if case.heads != case.kv_heads:
        group = case.heads // case.kv_heads
        out, _ = attend(q, k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1), seen(case), case.scale)
        if _largest(got - out) <= CLOSE * error:
            return "query head h reads kv head h mod (kv heads), not h / (heads / kv heads)"
    return ""


def _largest(t: Tensor) -> float:
    return t.abs().nan_to_num(float("inf")).max().item() if t.numel() else 0.0


def gradient(name: str, got: Tensor, exact: dict[str, Tensor], parts: list[Tensor], size: int) -> str:
    """Returns the fault that a gradient looks like, or "". parts: the positions of each rank in dimension 1; none for weights."""
    want = exact[name]
    if not got.isfinite().all():
        return NOT_FINITE
    error = _largest(got - want)
    if _largest(got) == 0:
        return "it is zero"
    factor = ((got * want).sum() / (want * want).sum()).item()
    if _largest(got - factor * want) <= CLOSE * error:
        known = {size: "summed over the ranks once too often", 1 / size: "averaged over the ranks once too often", 2.0: "counted twice"}
        words = [text for f, text in known.items() if size > 1 and abs(factor / f - 1) < 0.02]
        return f"it is {factor:.3g} times the gradient" + (f": {' or '.join(words)}" if words else "")
    if len({len(p) for p in parts}) == 1 and size > 1:
        pieces = {"dk": ["dk", "dv"], "dv": ["dv", "dk"]}.get(name, [name])
        sources = {f"the {n} of": exact[n] for n in pieces}
        if len(pieces) == 2:
            sources["the sum of dk and dv of"] = exact["dk"] + exact["dv"]
        for words, source in sources.items():
            for shift in range(size):
                if all(_largest(got[:, p] - source[:, parts[(r - shift) % size]]) <= CLOSE * error for r, p in enumerate(parts)):
                    near = f"{shift} before" if shift <= size // 2 else f"{size - shift} after"
                    whose = "the rank itself" if shift == 0 else f"the rank {near}"
                    return f"it is {words} {whose}"
    return ""
