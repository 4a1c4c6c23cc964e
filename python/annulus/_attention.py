"""Attention over ranks, and `Sharding`, which holds what sharding and attention must agree on. Used by users and by
transformers.py."""

import dataclasses
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._errors import AnnulusError, errors
from ._operators import Group, group_name, rank, size
from ._masks import TokenMask
from ._patterns import Pattern, QueryOffset, kept_ranges, offset_number, pattern_text, restricted
from ._sharding import Cut, Problem, Tensors, chosen_layout, cut_of, each, is_dealt, layout_for, positions, settled, shard, unshard
from ._sharding import named


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = ..., *, return_lse: Literal[False] = ..., **settings: Any
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = ..., *, return_lse: Literal[True], **settings: Any
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = "{ kind = 'causal' }",
    *,
    sharding: "Sharding | None" = None,
    group: Group = None,
    layout: str | None = None,
    schedule: str = "auto",
    within: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    layer: int = 0,
    first_row: int = 0,
    query_offset: QueryOffset = 0,
    mask: TokenMask | Any | None = None,
    kept_keys: Any | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact attention over the ranks of `group`, each of which passes its own rows of the sequence. Collective.

    q, k, v: q is [batch, n, heads, head size], k and v are [batch, m, kv heads, head size]: this rank's rows in the
        order of `layout`, in fp32, fp64, bf16 or fp16. The result has the shape and dtype of q. Its backward is
        collective as well.
    pattern: the mask, as inline TOML or as a mapping of the same keys (docs/explanation/attention.md).
    sharding: how the rows were cut, and among whom, in place of `group` and `layout`: an `annulus.Sharding`, such as
        `annulus.sharding_of(tokens)` for `tokens` that `annulus.shard` returned.
    group: a ProcessGroup, a one-dimensional DeviceMesh or the name of a group. None means the ranks of mpirun if it
        started Python, otherwise this process alone.
    layout: "contiguous", "zigzag", "striped", or that of a balanced `annulus.Sharding`: how the sequence was sharded
        (`annulus.shard`); "auto" stands for what the sharding, or q, k or v, says was chosen. Over several ranks it is
        required without `sharding`, unless q, k or v is itself a tensor that `annulus.shard` returned, because others do not
        carry it.
    schedule: "ring", "all-gather", "group-cast", "double-ring", "ulysses", "ulysses-ring", "mesh", or "auto": the one predicted to
        take least time on the machine that ANNULUS_MACHINE names (docs/explanation/attention.md).
    within: how many consecutive ranks form an inner group, such as those of a host, for schedules with groups. 0: the
        schedule's own choice.
    cu_seqlens: the cumulative lengths of packed documents over the whole sequence: [documents + 1], int32 or int64, the
        same on all ranks. [0, 3, 8] means documents of 3 and 5 positions. Attention does not cross documents.
    scale: the factor of q . k; None and 0 mean 1 / sqrt(head size).
    softcap: a soft cap c of the scores, as in Gemma 2: a score is c tanh(scale q . k / c). 0 means none.
    sinks: a learned logit for each query head in the denominator of its softmax, as in gpt-oss: [heads], of any floating dtype,
        on every rank or none. -inf means no sink. The gradient is the part of this rank's queries: add it up over the ranks
        like that of any weight that all ranks have.
    dropout: the dropout rate of attention probabilities, in [0, 1). Draws depend only on `seed`, `step`, `layer`, the
        global batch row (row 0 is `first_row`), the head and the positions.
    layer: must be the same on all ranks, so that calls of different layers are never mixed up.
    query_offset: query i has position i + query_offset. "bottom-right" gives the last query the position of the last key, as
        other libraries align queries that are fewer than keys; "top-left" is 0.
    mask: which of the pattern's pairs are seen: an `annulus.TokenMask`, or what one is made of, [batch or 1, heads or 1, queries,
        keys] of whole rows, from which each call makes one.
    kept_keys: which keys are no padding: a tensor or array [batch or 1, keys] of whole rows, true or nonzero for keys that are
        seen. A query that sees no key gives 0.
    return_lse: also returns lse [batch, heads, n], the log-sum-exp (natural logarithm) of a query's scaled scores before
        dropout, with its head's sink; -inf for a query without keys or sink. It is fp32, or fp64 for fp64 tensors, and
        differentiable; with dropout its backward raises AnnulusError.

    Raises AnnulusError on all ranks if their arguments differ or those of one rank are invalid. What does not belong together
    is refused before ranks communicate: another group or layout than that of `sharding`, or by which `annulus.shard` cut q,
    k or v, and a q that does not have the positions of `sharding`.
    """
    if sharding is not None:
        sharding.require(q)
    known = {"sharding": sharding, "q": cut_of(q), "k": cut_of(k), "v": cut_of(v)}
    if layout == "auto":  # what was chosen where the rows were cut
        layout = chosen_layout(layout, group) if all(cut is None for cut in known.values()) else None
    group, layout = settled(known, group, layout)
    settings = dict(layout=layout or "", schedule=schedule, within=within, scale=scale)
    settings |= dict(dropout=dropout, seed=seed, step=step, layer=layer)
    settings |= dict(first_row=first_row, query_offset=offset_number(query_offset), group=group_name(group), cu_seqlens=cu_seqlens)
    settings |= dict(softcap=softcap, sinks=sinks)
    op = torch.ops.annulus.attention_with_lse if return_lse else torch.ops.annulus.attention
    if mask is not None and not isinstance(mask, TokenMask):
        # Autograd keeps its bits for the backward.
        mask = TokenMask(mask, group=group, layout=layout, schedule=schedule, within=within)
    text = restricted(pattern, mask=mask, kept_keys=None if kept_keys is None else kept_ranges(kept_keys))
    if torch.compiler.is_compiling():
        return op(q, k, v, text, **settings)
    with errors():
        return op(q, k, v, text, **settings)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A layout and a group, so that sharding and attention use the same:

        cut = annulus.Sharding("zigzag", group)
        mine = cut.shard({"tokens": tokens, "positions": positions})
        out = cut.attention(q, k, v, "{ kind = 'causal' }")

    length: the number of positions of the whole rows, where it is known, as in `sharding_of`. Queries with other positions are
    then refused.

    "balanced" gives each rank as many counted pairs as the others, whatever the documents of packed rows, and needs the pattern
    whose pairs are counted, with the boundaries of its documents; it is another layout for each batch with other documents:

        cut = annulus.Sharding("balanced", group, pattern="{ kind = 'causal' }", cu_seqlens=cu_seqlens)

    "per-document" deals each document as "zigzag" deals a row, so that all steps of a ring are even, and takes the same.

    "auto" takes the layout in which the call of attention is predicted to take least time on the ranks' hosts and the machine that
    ANNULUS_MACHINE names, and needs the length of the whole rows; with cu_seqlens it is "balanced" by these documents, or
    "per-document" if schedule is a ring:

        cut = annulus.Sharding("auto", group, length=65536, pattern="{ kind = 'causal' }", heads=32, kv_heads=8)

    All ranks of the group make it together, and compare their arguments. kv_heads: 0 means as many as `heads`. batch, schedule,
    within: as in the later calls. `reason` says what was chosen and why. The default pattern is causal.

    Layers with other patterns may attend by it as well. Its attribute `layout` is the layout that was chosen, or the name with the
    pattern by which it is dealt, which all functions take where they take a layout. Raises AnnulusError for a pattern and the like
    with another layout.
    """

    layout: str = "zigzag"
    group: Group = None
    length: int | None = None
    pattern: dataclasses.InitVar[Pattern | None] = None
    cu_seqlens: dataclasses.InitVar[Tensor | None] = None
    heads: dataclasses.InitVar[int] = 1
    kv_heads: dataclasses.InitVar[int] = 0
    batch: dataclasses.InitVar[int] = 1
    schedule: dataclasses.InitVar[str] = "auto"
    within: dataclasses.InitVar[int] = 0
    reason: str | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __post_init__(
        self, pattern: Pattern | None, cu_seqlens: Tensor | None, heads: int, kv_heads: int, batch: int, schedule: str, within: int
    ) -> None:
        problem = Problem(pattern, cu_seqlens, heads, kv_heads, batch, schedule, within)
        layout, reason = layout_for(self.layout, self.group, self.length, problem)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "reason", reason)
        chosen_layout(self.layout, None)  # raises for a balanced one without a pattern
        if not is_dealt(self.layout):
            positions(0, self.layout, rank=0, size=1)  # raises for an unknown layout

    def shard(self, tensors: Tensors, *, dim: int = 1) -> Tensors:
        """Calls `annulus.shard` with this layout and group."""
        return shard(tensors, self.layout, self.group, dim=dim)

    def unshard(self, tensors: Tensors, *, dim: int = 1) -> Tensors:
        """Calls `annulus.unshard` with this layout and group."""
        return unshard(tensors, self.layout, self.group, dim=dim)

    def positions(self, length: int | None = None) -> Tensor:
        """Returns this rank's positions of rows of this length, by default of its own."""
        length = self.length if length is None else length
        if length is None:
            raise AnnulusError("[layout] give the length of the whole rows: this annulus.Sharding has none of its own")
        return positions(length, self.layout, rank=rank(self.group), size=size(self.group))

    def require(self, q: Tensor) -> None:
        """Raises AnnulusError if q [batch, n, ...] does not have as many rows as this rank has positions. A compiled graph, which
        knows no groups, does not check it."""
        if self.length is None or torch.compiler.is_compiling() or q.dim() < 2:
            return
        if q.shape[1] != (rows := len(self.positions())):
            raise AnnulusError(
                f"[layout] q has {q.shape[1]} rows, but of {self.length} positions cut {named(self.layout)} this rank has {rows}: pass "
                "the sharding of the tensor that q was computed from"
            )

    def attention(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = "{ kind = 'causal' }", **settings: Any) -> Any:
        """Calls `annulus.attention` over this group, for rows sharded by `shard`."""
        return attention(q, k, v, pattern, sharding=self, **settings)


def sharding_of(tensors: Tensors) -> Sharding:
    """Returns how `shard` cut this tensor, or all tensors in a mapping, list or tuple: layout, group and length.

    Raises AnnulusError if `shard` has returned none of them, or they were cut in different ways, or in a compiled graph. What is
    computed from such a tensor, also a copy on another device, is another tensor.
    """
    found: list[Cut | None] = []
    each(tensors, lambda tensor: found.append(cut_of(tensor)))
    if not found or None in found:
        raise AnnulusError(
            "[layout] this is no tensor that annulus.shard returned, but perhaps computed from one: ask the tensor itself, or "
            "keep the annulus.Sharding that cut it"
        )
    if len(set(found)) > 1:
        raise AnnulusError(f"[layout] the tensors were cut in different ways: {', '.join(map(str, dict.fromkeys(found)))}")
    return Sharding(*found[0])
