"""Shards sequences over ranks by a layout, and gathers them. Used by users, _attention.py and transformers.py.

The tensors that `shard` returns are known by how they were cut (`sharding_of`); what is computed from them is not.

A layout assigns positions of one dimension of a tensor (tokens, labels, position ids, masks, activations) to ranks.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._errors import AnnulusError, errors
from ._operators import Group, all_reduce, group_name, rank, size
from ._patterns import Pattern, pattern_text

Tensors = TypeVar("Tensors", bound="Tensor | Mapping[str, Any] | list | tuple | None")

LAYOUTS = ("contiguous", "zigzag", "striped")
DEALT = ("balanced", "per-document")  # by a pattern, which stands behind BY in the layout of an annulus.Sharding
BY = " by "
RINGS = ("ring", "double-ring", "ulysses-ring")


def is_dealt(layout: str) -> bool:
    """Whether this is the layout of an annulus.Sharding that is dealt by a pattern."""
    return layout.startswith(tuple(name + BY for name in DEALT))


def named(layout: str | None) -> str | None:
    """Returns a layout for a message: the pattern by which one is dealt may name thousands of documents."""
    return layout if layout is None or len(layout) < 100 else layout[:100] + "..."


def chosen_layout(layout: str | None, group: Group, stacklevel: int = 3) -> str:
    """Returns the layout: zigzag if it is None, with a warning if the group has several ranks. (It was contiguous, and then an
    error, in earlier versions; the version after 0.1 does not warn.)"""
    if layout is None and (ranks := size(group)) > 1:
        warnings.warn(
            f"[layout] no layout was given, so {ranks} ranks have rows cut zigzag, which was contiguous in earlier versions: "
            'pass layout="zigzag" or another one, or use annulus.Sharding',
            FutureWarning,
            stacklevel=stacklevel,
        )
    if layout == "auto":
        raise AnnulusError(
            '[layout] the layout "auto" is chosen where rows are cut, for a pattern, and these are not: make '
            'annulus.Sharding("auto", group, length=..., pattern=..., heads=...), or give annulus.shard the same, and attend by what '
            "it chose: annulus.sharding_of(tensors), or its .layout"
        )
    if layout in DEALT:
        raise AnnulusError(
            f"[layout] the layout {layout} is dealt by the pairs of a pattern, so its name is not enough: make "
            f'annulus.Sharding("{layout}", group, pattern=...), with cu_seqlens=... for packed rows, and cut and attend by it, or '
            "pass its .layout"
        )
    return layout or "zigzag"


class Problem(NamedTuple):
    """What the layouts "auto", "balanced" and "per-document" depend on: the attention that rows are cut for."""

    pattern: Pattern | None = None
    cu_seqlens: Tensor | None = None
    heads: int = 1
    kv_heads: int = 0
    batch: int = 1
    schedule: str = "auto"
    within: int = 0


def layout_for(layout: str | None, group: Group, length: int | None, problem: Problem) -> tuple[str | None, str | None]:
    """Returns the layout that "auto", "balanced" or "per-document" stands for, with the pattern if it is dealt by one, and why
    "auto" is it; other layouts as they are, with None. Collective for "auto" without cu_seqlens."""
    pattern, cu_seqlens = problem.pattern, problem.cu_seqlens
    if layout == "auto" and cu_seqlens is None:
        if length is None:
            raise AnnulusError('[layout] the layout "auto" needs the length of the whole rows: annulus.Sharding("auto", length=...)')
        text = pattern_text("{ kind = 'causal' }" if pattern is None else pattern)
        with errors():
            return torch.ops.annulus.choose_layout(
                text, length, heads=problem.heads, kv_heads=problem.kv_heads, batch=problem.batch, group=group_name(group),
                schedule=problem.schedule, within=problem.within,
            )
    if layout == "auto" or (layout in DEALT and pattern is not None):
        text = pattern_text("{ kind = 'causal' }" if pattern is None else pattern)
        name, reason = layout, None
        if layout == "auto" and problem.schedule in RINGS:
            name, reason = "per-document", "per-document: a ring's steps are even in each document"
        elif layout == "auto":
            name, reason = "balanced", "balanced: each batch is dealt by the pairs of its documents"
        with errors():
            return torch.ops.annulus.dealt_by(name, text, cu_seqlens), reason
    if any(given is not default for given, default in zip(problem, Problem())):
        raise AnnulusError(
            "[layout] pattern, cu_seqlens, heads and the like say how a layout is dealt or the layout auto chosen, but the "
            f"layout is {named(layout)!r}" + (": give the pattern as well" if layout in DEALT else ": leave them out")
        )
    return layout, None


class Cut(NamedTuple):
    """How a tensor that `shard` returned was cut: the layout, the name of the group (a group that is held cannot end), and the
    number of positions of the whole rows."""

    layout: str
    group: str | None
    length: int


# Not an attribute of the tensors, which would be saved with them.
_cuts = WeakTensorKeyDictionary()


def cut_of(tensor: object) -> Cut | None:
    """Returns how `shard` cut this tensor; None for others, and in a compiled graph."""
    if torch.compiler.is_compiling() or not isinstance(tensor, Tensor):
        return None
    return _cuts.get(tensor)


class _Cut(Protocol):  # Cut, and Sharding of _attention.py
    @property
    def layout(self) -> str: ...
    @property
    def group(self) -> Group: ...


def settled(known: Mapping[str, _Cut | None], group: Group, layout: str | None) -> tuple[Group, str | None]:
    """Returns group and layout: those given, or else the first known. Raises AnnulusError if others differ from them, unless
    each group has one rank, which has all positions in every layout."""
    for name, cut in known.items():
        if cut is None:
            continue
        group = cut.group if group is None else group
        layout = cut.layout if layout is None else layout
        if layout == cut.layout and group_name(group) == group_name(cut.group):
            continue
        there, here = size(cut.group), size(group)
        if max(there, here) > 1:
            raise AnnulusError(
                f"[layout] {name}: its rows were cut {named(cut.layout)} among the {there} ranks of the group "
                f"{group_name(cut.group)!r}, but this call takes them as {named(layout)} among the {here} of {group_name(group)!r}, "
                "which would give positions to the wrong rows: pass what they were cut by, or cut and attend by one "
                "annulus.Sharding"
            )
    return group, layout


def positions(length: int, layout: str, *, rank: int, size: int) -> Tensor:
    """Returns the positions of rank `rank` of `size`, in storage order, int64, as in attention/plan/layout.h.

    contiguous: chunk `rank` of `size`; zigzag: chunks `rank` and `2 size - 1 - rank` of `2 size`; striped: every
    size-th position from `rank` on. Any length and any number of ranks are valid. For example, of 8 positions rank 0 of 2
    has 0 1 2 3 (contiguous), 0 1 6 7 (zigzag) or 0 2 4 6 (striped). The layout of an annulus.Sharding("balanced", ...), or
    "per-document", is one, too, but not in a compiled function.
    """
    if is_dealt(layout) and size > 1:
        if torch.compiler.is_compiling():
            raise AnnulusError("[layout] cut rows by a layout that is dealt by a pattern before a compiled function")
        with errors():
            return torch.ops.annulus.layout_positions(layout, length, rank, size)
    if layout not in LAYOUTS and not is_dealt(layout):
        raise AnnulusError(
            f"[layout] the layout must be one of {', '.join(LAYOUTS)}, or that of an annulus.Sharding(\"balanced\", ...) or "
            f'"per-document", but is {layout!r}'
        )

    def chunk(i: int, chunks: int) -> Tensor:
        return torch.arange(i * length // chunks, (i + 1) * length // chunks)

    if layout == "striped":
        return torch.arange(rank, length, size) if rank < length else torch.arange(0)
    if layout == "zigzag":
        return torch.cat([chunk(rank, 2 * size), chunk(2 * size - 1 - rank, 2 * size)])
    return chunk(rank, size)


def each(tensors: Any, do: Any) -> Any:
    if isinstance(tensors, Tensor):
        return do(tensors)
    if tensors is None:
        return None
    if isinstance(tensors, Mapping):
        return {key: each(value, do) for key, value in tensors.items()}
    if isinstance(tensors, (list, tuple)):
        parts = [each(value, do) for value in tensors]
        return type(tensors)(*parts) if hasattr(tensors, "_fields") else type(tensors)(parts)  # _fields: a namedtuple
    raise AnnulusError(
        f"[layout] expected a tensor, or tensors in a mapping, list or tuple, but they hold a {type(tensors).__name__}"
    )


def _length(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise AnnulusError(f"[layout] there is no dimension {dim} to cut in a tensor of the shape {list(tensor.shape)}")
    return tensor.shape[dim]


def shard(
    tensors: Tensors,
    layout: str | None = None,
    group: Group = None,
    *,
    dim: int = 1,
    pattern: Pattern | None = None,
    cu_seqlens: Tensor | None = None,
    heads: int = 1,
    kv_heads: int = 0,
    batch: int = 1,
    schedule: str = "auto",
    within: int = 0,
) -> Tensors:
    """Returns this rank's part of whole sequences, which every rank passes: a tensor, or tensors in a mapping, list or
    tuple. Gradients flow to this rank's positions. Does not communicate, but for "auto".

    layout: zigzag if it is left out; over several ranks with a FutureWarning in this version. "auto", "balanced" and
    "per-document" take the arguments from `pattern` on, as `annulus.Sharding` does. dim: the dimension of the
    sequence. Each tensor that is returned is known by how it was cut (`sharding_of`). Shift labels first (`shift_labels`):
    the token after a rank's last one may be on another rank. A mapping with `input_ids` and `labels`, a batch for models
    that shift labels themselves, is therefore an error.

    Raises AnnulusError for an unknown layout, a dimension that a tensor lacks, and such a mapping.
    """
    if isinstance(tensors, Mapping) and {"input_ids", "labels"} <= tensors.keys():
        raise AnnulusError(
            "[layout] input_ids and labels are a batch for a model that shifts labels itself, which is wrong at the end of each "
            "part: cut it with annulus.transformers.shard_batch, or pass annulus.shift_labels(labels, position_ids) under "
            "another name, such as shift_labels"
        )
    problem = Problem(pattern, cu_seqlens, heads, kv_heads, batch, schedule, within)
    if layout == "auto":
        lengths: set[int] = set()
        each(tensors, lambda tensor: lengths.add(_length(tensor, dim)))
        if len(lengths) != 1:
            raise AnnulusError(f'[layout] "auto" chooses one layout for rows of one length, but these have {sorted(lengths)}')
        layout, _ = layout_for(layout, group, lengths.pop(), problem)
    else:
        layout, _ = layout_for(layout, group, None, problem)
    layout, own, ranks = chosen_layout(layout, group), rank(group), size(group)

    def part(tensor: Tensor) -> Tensor:
        length = _length(tensor, dim)
        taken = positions(length, layout, rank=own, size=ranks)
        part = tensor.index_select(dim, taken.to(tensor.device))
        if not torch.compiler.is_compiling():
            _cuts[part] = Cut(layout, group_name(group) or None, length)
        return part

    return each(tensors, part)


def unshard(tensors: Tensors, layout: str | None = None, group: Group = None, *, dim: int = 1) -> Tensors:
    """Gathers whole sequences on every rank from the ranks' parts: the inverse of `shard`. Collective.

    layout, group: may be left out for tensors that `shard` returned; for others a layout that is left out is zigzag, as in
    `shard`.
    Contiguous parts may have any length; those of the other layouts must have the lengths of `shard`. The gradient is
    that of the sum of all ranks' losses, as for `all_reduce`, which moves the tensors. Values are exact, except that -0
    becomes 0.

    Raises AnnulusError on all ranks if the lengths of the parts do not match the layout, and for a tensor that `shard` cut
    by another layout or group.
    """
    given, wanted = group, layout

    def whole(tensor: Tensor) -> Tensor:
        group, known = settled({"a part to gather": cut_of(tensor)}, given, wanted)
        layout = chosen_layout(known, group, stacklevel=5)
        own, ranks = rank(group), size(group)
        length = _length(tensor, dim)
        if ranks == 1:
            return tensor
        if tensor.is_complex():
            real = torch.view_as_real(tensor.resolve_conj())
            return torch.view_as_complex(unshard(real, layout, group, dim=dim % tensor.dim()))
        mine = torch.zeros(ranks, dtype=torch.int64)
        mine[own] = length
        lengths = all_reduce(mine, group=group).tolist()
        total = sum(lengths)
        if layout == "contiguous":
            taken = torch.arange(lengths[own]) + sum(lengths[:own])
        else:
            like = "contiguous" if is_dealt(layout) else layout  # deals as many
            dealt = [len(positions(total, like, rank=r, size=ranks)) for r in range(ranks)]
            if dealt != lengths:  # the same on all ranks
                raise AnnulusError(
                    f"[layout] the ranks hold {lengths} positions, but the layout {named(layout)!r} cuts {total} into {dealt}"
                )
            taken = positions(total, layout, rank=own, size=ranks)
        # A dtype of all_reduce that represents every value of the tensor exactly.
        floating = tensor.is_floating_point()
        exact = tensor.dtype if tensor.dtype == torch.float64 else torch.float32 if floating else torch.int64
        shape = list(tensor.shape)
        shape[dim] = total
        spread = tensor.new_zeros(shape, dtype=exact).index_copy(dim, taken.to(tensor.device), tensor.to(exact))
        return all_reduce(spread, group=group).to(tensor.dtype)

    return each(tensors, whole)


def shift_labels(labels: Tensor, position_ids: Tensor | None = None, *, ignore: int = -100) -> Tensor:
    """Shifts labels [batch, n] of whole rows: each position gets the label of the next one, and the last `ignore`.

    The result has the dtype of `labels`, or is int64 if that dtype cannot represent `ignore`, as uint8 and uint16, the
    dtypes of bytes and of many token files, cannot represent -100.

    position_ids: [batch or 1, n]. If given, the last position of each packed document gets `ignore` as well. A document
        begins wherever a position id is not its predecessor plus 1: labels 5 6 7 8 with position ids 0 1 0 1 give
        6 -100 8 -100.

    Raises AnnulusError if int64 cannot represent `ignore` either.
    """
    dtype = labels.dtype if _holds(labels.dtype, ignore) else torch.int64
    if not _holds(dtype, ignore):
        raise AnnulusError(f"[layout] ignore must be a number that int64 can hold, but is {ignore!r}")
    # PyTorch has few operators for the unsigned dtypes other than uint8.
    wide = labels.dtype if labels.is_floating_point() else torch.int64
    shifted = torch.full_like(labels, ignore, dtype=wide)
    shifted[:, :-1] = labels[:, 1:].to(wide)
    if position_ids is not None:
        begins = position_ids.to(torch.int64).diff(dim=1) != 1  # unsigned numbers would wrap around
        shifted[:, :-1].masked_fill_(begins, ignore)
    return shifted.to(dtype)


def _holds(dtype: torch.dtype, number: int) -> bool:
    """Returns whether a dtype can represent this integer."""
    if dtype.is_floating_point:
        return torch.tensor(float(number)).to(dtype).item() == number
    return dtype != torch.bool and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
