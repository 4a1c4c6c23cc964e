"""The operators of torch.ops.annulus with groups as PyTorch has them. What programs call in a training step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import _library  # noqa: F401  (registers the operators)
from ._errors import AnnulusError, errors

Group = ProcessGroup | DeviceMesh | str | None
Pattern = str | Mapping[str, Any]


def group_name(group: Group) -> str:
    """The name by which the operators know a group; "" for the ranks of mpirun, or the process by itself."""
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise AnnulusError(
                f"[torch] group must be a mesh of one dimension, but has {group.ndim} ({group.mesh_dim_names}): take the "
                'one that cuts the sequence, such as mesh["context"]'
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise AnnulusError(
            "[torch] group must be a ProcessGroup of torch.distributed, a DeviceMesh of one dimension, the name of a "
            f"group, or None, but is {type(group).__name__}"
        )
    return group.group_name


def pattern_text(pattern: Pattern) -> str:
    """A pattern as the operators take it: inline TOML (docs/attention.md). A mapping is written as TOML, text is
    given back."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return "{ " + ", ".join(f"{key} = {text(item)}" for key, item in value.items()) + " }"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(text, value)) + "]"
        if isinstance(value, bool):
            return "true" if value else "false"
        return f"'{value}'" if isinstance(value, str) else repr(value)

    return pattern if isinstance(pattern, str) else text(pattern)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern = "{ kind = 'causal' }",
    *,
    group: Group = None,
    layout: str = "contiguous",
    schedule: str = "auto",
    cu_seqlens: Tensor | None = None,
    scale: float = 0.0,
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    layer: int = 0,
    first_row: int = 0,
    query_offset: int = 0,
) -> Tensor:
    """Exact attention over the ranks of `group`, each of which gives its own rows of the sequence. Collective.

    q: [batch, n, heads, head size], k and v: [batch, m, kv heads, head size], this rank's rows in the order of
        `layout`; fp32, fp64, bf16 or fp16. The result is like q. Its backward is collective, too.
    pattern: which pairs of positions are counted, as inline TOML or as a mapping of the same keys (docs/attention.md).
    group: a ProcessGroup, a DeviceMesh of one dimension or the name of a group. None: the ranks of mpirun where
        Python was started under it, otherwise this process by itself.
    layout: "contiguous", "zigzag" or "striped": how the sequence was cut (`annulus.shard`).
    schedule: "auto", "ring", "all-gather" or "group-cast".
    cu_seqlens: where packed documents begin in the whole sequence, and where the last one ends: [documents + 1],
        int32 or int64, the same on all ranks. Attention does not cross documents.
    scale: 0 stands for 1 / sqrt(head size).
    dropout: of probabilities. The draw is a function of `seed`, `step`, `layer`, the global batch row (row 0 is
        `first_row`) and the position alone.
    query_offset: query i has the position i + query_offset.

    Raises AnnulusError on all ranks where they disagree or one of them gives what cannot be taken.
    """
    settings = dict(layout=layout, schedule=schedule, scale=scale, dropout=dropout, seed=seed, step=step, layer=layer)
    settings |= dict(first_row=first_row, query_offset=query_offset, group=group_name(group), cu_seqlens=cu_seqlens)
    if torch.compiler.is_compiling():
        return torch.ops.annulus.attention(q, k, v, pattern_text(pattern), **settings)
    with errors():
        return torch.ops.annulus.attention(q, k, v, pattern_text(pattern), **settings)


def all_reduce(x: Tensor, *, group: Group = None) -> Tensor:
    """The sum of x over the ranks, in rank order: fp32, fp64 or int64. Collective.

    What is differentiated is the sum of all ranks' losses, so its backward sums the gradients over the ranks.
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
    """This process's rank among those that attend together."""
    if group is not None:
        return _process_group(group).rank()
    with errors():
        return torch.ops.annulus.rank()


def size(group: Group = None) -> int:
    """How many ranks attend together."""
    if group is not None:
        return _process_group(group).size()
    with errors():
        return torch.ops.annulus.size()
