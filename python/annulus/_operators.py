"""Python functions for the operators of torch.ops.annulus, with PyTorch's process groups, for use in a training step."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import _library  # noqa: F401  (registers the operators)
from ._errors import AnnulusError, errors
from ._patterns import Pattern, pattern_text

Group = ProcessGroup | DeviceMesh | str | None


def group_name(group: Group) -> str:
    """Returns a group's name for the operators; "" means the ranks of mpirun, or this process alone."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AnnulusError(
                f"[torch] group must be a mesh of one dimension, but has {group.ndim} ({group.mesh_dim_names}): pass the "
                'dimension that cuts the sequence, such as mesh["context"]'
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise AnnulusError(
            "[torch] group must be a ProcessGroup of torch.distributed, a DeviceMesh of one dimension, the name of a "
            f"group, or None, but is {type(group).__name__}"
        )
    return group.group_name


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
    group: Group = None,
    layout: str | None = None,
    schedule: str = "auto",
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    layer: int = 0,
    first_row: int = 0,
    query_offset: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact attention over the ranks of `group`, each of which passes its own rows of the sequence. Collective.

    q, k, v: q is [batch, n, heads, head size], k and v are [batch, m, kv heads, head size]: this rank's rows in the
        order of `layout`, in fp32, fp64, bf16 or fp16. The result has the shape and dtype of q. Its backward is
        collective as well.
    pattern: the mask, as inline TOML or as a mapping of the same keys (docs/explanation/attention.md).
    group: a ProcessGroup, a one-dimensional DeviceMesh or the name of a group. None means the ranks of mpirun if it
        started Python, otherwise this process alone.
    layout: "contiguous", "zigzag" or "striped": how the sequence was sharded (`annulus.shard`). Required if the group has
        several ranks, because the tensors do not carry it; `annulus.Sharding` holds group and layout.
    schedule: "auto", "ring", "all-gather" or "group-cast".
    cu_seqlens: the cumulative lengths of packed documents over the whole sequence: [documents + 1], int32 or int64, the
        same on all ranks. [0, 3, 8] means documents of 3 and 5 positions. Attention does not cross documents.
    scale: the factor of q . k; None and 0 mean 1 / sqrt(head size).
    dropout: the dropout rate of attention probabilities, in [0, 1). Draws depend only on `seed`, `step`, `layer`, the
        global batch row (row 0 is `first_row`), the head and the positions.
    layer: must be the same on all ranks, so that calls of different layers are never mixed up.
    query_offset: query i has position i + query_offset.
    return_lse: also returns lse [batch, heads, n], the log-sum-exp (natural logarithm) of a query's scaled scores before
        dropout, -inf for a query without keys. It is fp32, or fp64 for fp64 tensors, and differentiable; with dropout its
        backward raises AnnulusError.

    Raises AnnulusError on all ranks if their arguments differ or those of one rank are invalid.
    """
    settings = dict(layout=layout or "", schedule=schedule, scale=scale, dropout=dropout, seed=seed, step=step, layer=layer)
    settings |= dict(first_row=first_row, query_offset=query_offset, group=group_name(group), cu_seqlens=cu_seqlens)
    op = torch.ops.annulus.attention_with_lse if return_lse else torch.ops.annulus.attention
    if torch.compiler.is_compiling():
        return op(q, k, v, pattern_text(pattern), **settings)
    with errors():
        return op(q, k, v, pattern_text(pattern), **settings)


def all_reduce(x: Tensor, *, group: Group = None) -> Tensor:
    """Returns the sum of x (fp32, fp64 or int64) over the ranks, added in rank order. Collective.

    Autograd differentiates the sum of all ranks' losses, so the backward sums the gradients over the ranks.
    """
    name = group_name(group)
    if torch.compiler.is_compiling():
        return torch.ops.annulus.all_reduce(x, group=name)
    with errors():
        return torch.ops.annulus.all_reduce(x, group=name)


def _process_group(group: Group) -> ProcessGroup:
    name = group_name(group)
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)
    except RuntimeError as error:
        raise AnnulusError(f"[torch] there is no process group of the name {name!r}: {error}") from None


def rank(group: Group = None) -> int:
    """Returns the rank of this process in `group`."""
    if group is not None:
        return _process_group(group).rank()
    with errors():
        return torch.ops.annulus.rank()


def size(group: Group = None) -> int:
    """Returns the number of ranks in `group`."""
    if group is not None:
        return _process_group(group).size()
    with errors():
        return torch.ops.annulus.size()
