"""Cuts sequences as the layouts of annulus deal them, and puts them together again. Used by programs around attention.

A layout deals the positions of one dimension, whatever the tensor: tokens, labels, position ids, masks, activations.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._errors import AnnulusError
from ._operators import Group, all_reduce, rank, size

Tensors = TypeVar("Tensors", bound="Tensor | Mapping[str, Any] | list | tuple | None")

LAYOUTS = ("contiguous", "zigzag", "striped")


def positions(length: int, layout: str = "contiguous", *, rank: int, size: int) -> Tensor:
    """The positions that rank `rank` of `size` stores, in storage order, int64. As attention/plan/layout.h deals them:

    contiguous: chunk `rank` of `size`; zigzag: chunks `rank` and `2 size - 1 - rank` of `2 size`; striped: every
    size-th position from `rank` on. Any length over any number of ranks.
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
        return type(tensors)(_each(value, do) for value in tensors)
    raise AnnulusError(
        f"[layout] tensors must be a tensor, or tensors in a mapping, list or tuple, but hold a {type(tensors).__name__}"
    )


def _length(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise AnnulusError(f"[layout] there is no dimension {dim} to cut in a tensor of the shape {list(tensor.shape)}")
    return tensor.shape[dim]


def shard(tensors: Tensors, layout: str = "contiguous", group: Group = None, *, dim: int = 1) -> Tensors:
    """This rank's part of whole sequences, which every rank has: of a tensor, or of each tensor in a mapping, list or
    tuple.

    dim is the sequence's dimension. Shift labels first, with `shift_labels`: nothing is shifted here, and a rank's part
    does not hold the token that follows its last one. A mapping with `input_ids` and `labels` is therefore refused: it
    is a batch for models that shift labels themselves. No communication; gradients flow to the positions that were
    taken.
    """
    if isinstance(tensors, Mapping) and {"input_ids", "labels"} <= tensors.keys():
        raise AnnulusError(
            "[layout] input_ids and labels are a batch for a model that shifts labels itself, which goes wrong where a part "
            "ends: cut it with annulus.transformers.shard_batch, or give annulus.shift_labels(labels, position_ids) by "
            "another name, such as shift_labels"
        )
    own, ranks = rank(group), size(group)

    def part(tensor: Tensor) -> Tensor:
        taken = positions(_length(tensor, dim), layout, rank=own, size=ranks)
        return tensor.index_select(dim, taken.to(tensor.device))

    return _each(tensors, part)


def unshard(tensors: Tensors, layout: str = "contiguous", group: Group = None, *, dim: int = 1) -> Tensors:
    """Whole sequences, on every rank, of what each rank has of them: the inverse of `shard`. Collective.

    Contiguous parts may be of any length; those of the other layouts must be as `shard` cuts them. The gradient is
    that of the sum of all ranks' losses, as of `all_reduce`, which moves the tensors: their numbers are exact (-0
    becomes 0).
    """
    own, ranks = rank(group), size(group)

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
                    f"[layout] the ranks hold {lengths} positions, but the layout {layout!r} deals {total} as {dealt}"
                )
            taken = positions(total, layout, rank=own, size=ranks)
        # The dtypes that ranks add exactly.
        floating = tensor.is_floating_point()
        exact = tensor.dtype if tensor.dtype == torch.float64 else torch.float32 if floating else torch.int64
        shape = list(tensor.shape)
        shape[dim] = total
        spread = tensor.new_zeros(shape, dtype=exact).index_copy(dim, taken.to(tensor.device), tensor.to(exact))
        return all_reduce(spread, group=group).to(tensor.dtype)

    return _each(tensors, whole)


def shift_labels(labels: Tensor, position_ids: Tensor | None = None, *, ignore: int = -100) -> Tensor:
    """Labels [batch, n] of whole rows, shifted: at each position the label of the next one, `ignore` at the last.

    position_ids: [batch or 1, n], where packed documents are to be told apart: a document's last position gets
        `ignore` as well. A document begins wherever a position id does not follow its predecessor.
    """
    shifted = torch.full_like(labels, ignore)
    shifted[:, :-1] = labels[:, 1:]
    if position_ids is not None:
        begins = position_ids.diff(dim=1) != 1
        shifted[:, :-1].masked_fill_(begins, ignore)
    return shifted
