"""What plans cost and are proved to do, and whether PyTorch, this machine and annulus fit together. For people, and
for programs that plan ahead. Nothing here is collective.
"""

import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import _library
from ._errors import errors
from ._operators import Group, Pattern, group_name, pattern_text


def plan(
    pattern: Pattern,
    length: int,
    ranks: int,
    *,
    heads: int = 1,
    kv_heads: int = 0,
    batch: int = 1,
    head_dim: int = 128,
    element_bytes: int = 2,
    layout: str = "contiguous",
    schedule: str = "auto",
    query_offset: int = 0,
    key_length: int | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    keep: bool = True,
    prove: bool = True,
) -> dict[str, Any]:
    """What `annulus plan --json` prints of attention over `length` positions and `ranks` ranks: what ranks send, hold
    and compute, and under "proof" whether every pair is computed exactly once, without a deadlock.

    kv_heads: 0 stands for `heads`. key_length: where there are other keys than queries. lengths: the ranks'
    contiguous parts, in place of a layout. keep: False plans what torch.compile runs, whose backward sends again what
    the forward held last.
    """
    with errors():
        text = torch.ops.annulus.plan(
            pattern_text(pattern),
            length,
            ranks,
            heads=heads,
            kv_heads=kv_heads,
            batch=batch,
            head_dim=head_dim,
            element_bytes=element_bytes,
            layout=layout,
            schedule=schedule,
            query_offset=query_offset,
            key_length=key_length,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            keep=keep,
            prove=prove,
        )
    return json.loads(text)


def plan_ahead(
    pattern: Pattern,
    length: int,
    *,
    heads: int = 1,
    kv_heads: int = 0,
    batch: int = 1,
    group: Group = None,
    layout: str = "contiguous",
    schedule: str = "auto",
    query_offset: int = 0,
    key_length: int | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    keep: bool = True,
) -> None:
    """Begins to plan an attention that is to come, on another thread: the next step's documents, while this one
    computes.

    length: of the whole sequence. heads, batch and the rest are those of the call to come, which finds the plan or
    waits for what is left of it. keep: False where that call comes from torch.compile.
    """
    with errors():
        torch.ops.annulus.plan_ahead(
            pattern_text(pattern),
            length,
            heads=heads,
            kv_heads=kv_heads,
            batch=batch,
            group=group_name(group),
            layout=layout,
            schedule=schedule,
            query_offset=query_offset,
            key_length=key_length,
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            keep=keep,
        )


def stats(group: Group = None) -> dict[str, Any]:
    """What this process has sent for attention over `group`, forward and backward, and what it has planned."""
    with errors():
        return json.loads(torch.ops.annulus.stats(group_name(group)))


def _groups() -> str:
    if not dist.is_available() or not dist.is_initialized():
        return "none: torch.distributed.init_process_group has not been called"
    config = dist.get_backend_config()
    said = f"{dist.get_world_size()} processes, {config}"
    backends = dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD]
    if "gloo" in backends or not torch.cuda.is_available():
        return said
    return said + '; tensors on CUDA need a backend for CPU tensors besides: init_process_group("cpu:gloo,cuda:nccl")'


def doctor() -> str:
    """A table of what was found, for people, and what does not fit. `print(annulus.doctor())`"""
    built = json.loads(torch.ops.annulus.build_info())
    fits = ".".join(built["torch"].split(".")[:2]) == ".".join(torch.__version__.split(".")[:2])
    devices = torch.cuda.device_count()
    cuda = "the library computes on it" if built["cuda"] else "built without it: tensors on the CPU alone"
    try:
        transformers = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        transformers = "not installed"
    rows = [
        ("annulus", f"{built['version']}, {_library.path()}"),
        ("torch", f"{torch.__version__}; the library was built against {built['torch']}"),
        ("CUDA", f"{devices} devices; {cuda}"),
        ("MPI", "ranks of mpirun, where no group is given" if built["mpi"] else "no: give a group"),
        ("gloo, NCCL", ", ".join("yes" if has() else "no" for has in (dist.is_gloo_available, dist.is_nccl_available))),
        ("group", _groups()),
        ("processor", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("kernel", built["cpu_kernel"]),
        ("transformers", transformers),
    ]
    if not fits:
        rows.append(("WRONG", "library and torch are of different minor versions: rebuild it (./annulus torch)"))
    return "\n".join(f"{name:<14}{text}" for name, text in rows)
