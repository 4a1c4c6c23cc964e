"""Shards sequences over ranks by a layout, and gathers them. Used by users and by transformers.py.

Over several ranks the layout is required, and must be the same for sharding and attention, because a tensor does not carry
it. `Sharding` holds group and layout, so that neither can be omitted.

A layout assigns positions of one dimension of a tensor (tokens, labels, position ids, masks, activations) to ranks.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._errors import AnnulusError
from ._operators import Group, all_reduce, attention, rank, size
from ._patterns import Pattern

Tensors = TypeVar("Tensors", bound="Tensor | Mapping[str, Any] | list | tuple | None")

LAYOUTS = ("contiguous", "zigzag", "striped")


def chosen_layout(layout: str | None, group: Group) -> str:
    """Returns the layout; raises AnnulusError if it is None and the group has several ranks."""
    if layout is None and size(group) > 1:
        raise AnnulusError(
            f"[layout] give the layout in which rows are cut among the {size(group)} ranks, one of {', '.join(LAYOUTS)} (zigzag "
            "balances causal masks), or use annulus.Sharding"
        )
    return layout or "contiguous"


def positions(length: int, layout: str, *, rank: int, size: int) -> Tensor:
    """Returns the positions of rank `rank` of `size`, in storage order, int64, as in attention/plan/layout.h.

    contiguous: chunk `rank` of `size`; zigzag: chunks `rank` and `2 size - 1 - rank` of `2 size`; striped: every
    size-th position from `rank` on. Any length and any number of ranks are valid. For example, of 8 positions rank 0 of 2
    has 0 1 2 3 (contiguous), 0 1 6 7 (zigzag) or 0 2 4 6 (striped).
    """
    if layout not in LAYOUTS:
        raise AnnulusError(f"[layout] the layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}")

    def chunk(i: int, chunks: int) -> Tensor:
        return torch.arange(i * length // chunks, (i + 1) * length // chunks)

    if layout == "striped":
        return torch.arange(rank, length, size) if rank < length else torch.arange(0)
    if layout == "zigzag":
        return torch.cat([chunk(rank, 2 * size), chunk(2 * size - 1 - rank, 2 * size)])
    return chunk(rank, size)


def _each(tensors: Any, do: Any) -> Any:
    if isinstance(tensors, Tensor):
        return do(tensors)
    if tensors is None:
        return None
    if isinstance(tensors, Mapping):
        return {key: _each(value, do) for key, value in tensors.items()}
    if isinstance(tensors, (list, tuple)):
        parts = [_each(value, do) for value in tensors]
        return type(tensors)(*parts) if hasattr(tensors, "_fields") else type(tensors)(parts)  # _fields: a namedtuple
    raise AnnulusError(
        f"[layout] expected a tensor, or tensors in a mapping, list or tuple, but they hold a {type(tensors).__name__}"
    )


def _length(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise AnnulusError(f"[layout] there is no dimension {dim} to cut in a tensor of the shape {list(tensor.shape)}")
    return tensor.shape[dim]


def shard(tensors: Tensors, layout: str | None = None, group: Group = None, *, dim: int = 1) -> Tensors:
    """Returns this rank's part of whole sequences, which every rank passes: a tensor, or tensors in a mapping, list or
    tuple. Does not communicate. Gradients flow to this rank's positions.

    layout: required if the group has several ranks. dim: the dimension of the sequence. Shift labels first
    (`shift_labels`): the token after a rank's last one may be on another rank. A mapping with `input_ids` and `labels`, a
    batch for models that shift labels themselves, is therefore an error.

    Raises AnnulusError for an unknown layout, a dimension that a tensor lacks, and such a mapping.
    """
    if isinstance(tensors, Mapping) and {"input_ids", "labels"} <= tensors.keys():
        raise AnnulusError(
            "[layout] input_ids and labels are a batch for a model that shifts labels itself, which is wrong at the end of each "
            "part: cut it with annulus.transformers.shard_batch, or pass annulus.shift_labels(labels, position_ids) under "
            "another name, such as shift_labels"
        )
    layout, own, ranks = chosen_layout(layout, group), rank(group), size(group)

    def part(tensor: Tensor) -> Tensor:
        taken = positions(_length(tensor, dim), layout, rank=own, size=ranks)
        return tensor.index_select(dim, taken.to(tensor.device))

    return _each(tensors, part)


def unshard(tensors: Tensors, layout: str | None = None, group: Group = None, *, dim: int = 1) -> Tensors:
    """Gathers whole sequences on every rank from the ranks' parts: the inverse of `shard`. Collective.

    Contiguous parts may have any length; those of the other layouts must have the lengths of `shard`. The gradient is
    that of the sum of all ranks' losses, as for `all_reduce`, which moves the tensors. Values are exact, except that -0
    becomes 0.

    Raises AnnulusError on all ranks if the lengths of the parts do not match the layout.
    """
    layout, own, ranks = chosen_layout(layout, group), rank(group), size(group)

    def whole(tensor: Tensor) -> Tensor:
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
            dealt = [len(positions(total, layout, rank=r, size=ranks)) for r in range(ranks)]
            if dealt != lengths:  # the same on all ranks
                raise AnnulusError(
                    f"[layout] the ranks hold {lengths} positions, but the layout {layout!r} cuts {total} into {dealt}"
                )
            taken = positions(total, layout, rank=own, size=ranks)
        # A dtype of all_reduce that represents every value of the tensor exactly.
        floating = tensor.is_floating_point()
        exact = tensor.dtype if tensor.dtype == torch.float64 else torch.float32 if floating else torch.int64
        shape = list(tensor.shape)
        shape[dim] = total
        spread = tensor.new_zeros(shape, dtype=exact).index_copy(dim, taken.to(tensor.device), tensor.to(exact))
        return all_reduce(spread, group=group).to(tensor.dtype)

    return _each(tensors, whole)


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


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A layout and a group, so that sharding and attention use the same:

        cut = annulus.Sharding("zigzag", group)
        mine = cut.shard({"tokens": tokens, "positions": positions})
        out = cut.attention(q, k, v, "{ kind = 'causal' }")
    """

    layout: str = "zigzag"
    group: Group = None

    def __post_init__(self) -> None:
        positions(0, self.layout, rank=0, size=1)  # raises for an unknown layout

    def shard(self, tensors: Tensors, *, dim: int = 1) -> Tensors:
        """Calls `annulus.shard` with this layout and group."""
        return shard(tensors, self.layout, self.group, dim=dim)

    def unshard(self, tensors: Tensors, *, dim: int = 1) -> Tensors:
        """Calls `annulus.unshard` with this layout and group."""
        return unshard(tensors, self.layout, self.group, dim=dim)

    def positions(self, length: int) -> Tensor:
        """Returns this rank's positions of rows of this length."""
        return positions(length, self.layout, rank=rank(self.group), size=size(self.group))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = "{ kind = 'causal' }", **settings: Any) -> Any:
        """Calls `annulus.attention` over this group, for rows sharded by `shard`."""
        return attention(q, k, v, pattern, group=self.group, layout=self.layout, **settings)
