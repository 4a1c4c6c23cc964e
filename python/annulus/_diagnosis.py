"""Diagnosis and planning: the cost and proof of a plan, planning ahead, communication statistics, and the compatibility of
PyTorch, this machine and annulus. Users call these functions through the package. None of them is collective.
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
from ._operators import Group, group_name
from ._patterns import Pattern, QueryOffset, offset_number, pattern_text
from ._sharding import chosen_layout


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
    layout: str | None = None,
    schedule: str = "auto",
    within: int = 0,
    query_offset: QueryOffset = 0,
    key_length: int | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    keep: bool = True,
    prove: bool = True,
    machine: str = "",
) -> dict[str, Any]:
    """Returns the output of `annulus plan --json` for attention over `length` positions and `ranks` ranks: what each rank
    sends, holds and computes, and under "proof" whether every pair is computed exactly once, without a deadlock.

    layout: zigzag by default; "auto": the one predicted to take least time, which "layout" of the result names. kv_heads: 0
    means `heads`. key_length: the number of keys, if not `length`. lengths: the lengths of contiguous parts, by rank, in place
    of a layout. keep: False for a call under torch.compile, whose backward receives again the keys and values that the forward
    held last. prove: False omits the proof. machine: "h100", "h200", "a100", "b200", "cpu" or the path of a profile, by which
    schedule "auto" chooses; empty: that of ANNULUS_MACHINE, or else "cpu". "candidates" has what it chose from, with their
    predicted seconds.

    Raises AnnulusError for invalid arguments.
    """
    layout = layout or ("zigzag" if lengths is None else "contiguous")
    given = dict(locals())
    with errors():
        given |= {"pattern": pattern_text(pattern), "query_offset": offset_number(query_offset)}
        return json.loads(torch.ops.annulus.plan(**given))


def plan_ahead(
    pattern: Pattern,
    length: int,
    *,
    heads: int = 1,
    kv_heads: int = 0,
    batch: int = 1,
    group: Group = None,
    layout: str | None = None,
    schedule: str = "auto",
    within: int = 0,
    query_offset: QueryOffset = 0,
    key_length: int | None = None,
    lengths: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    keep: bool = True,
) -> None:
    """Starts planning a later call of attention on another thread, for example for the next step's documents.

    length: the length of the whole sequence. layout: zigzag if it is left out, as in `annulus.shard`. The other arguments
    are those of the later call, which uses the plan, or waits until it is ready. keep: must be False if that call is compiled by torch.compile.
    """
    given = dict(locals())
    with errors():
        given |= {"pattern": pattern_text(pattern), "group": group_name(group), "query_offset": offset_number(query_offset)}
        given["layout"] = chosen_layout(layout, group) if lengths is None else layout or "contiguous"
        torch.ops.annulus.plan_ahead(**given)


def stats(group: Group = None) -> dict[str, Any]:
    """Returns statistics of this process's attention over `group`, and of its planning:
    {"forward": {"calls", "messages_sent", "bytes_sent", "exposed_seconds"}, "backward": ..., "plans": ...}.
    "exposed_seconds" is a CPU's wait for transfers, and 0 on a GPU."""
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
    return said + '; tensors on CUDA also need a backend for CPU tensors: init_process_group("cpu:gloo,cuda:nccl")'


def doctor() -> str:
    """Returns a readable table of the environment and its problems: `print(annulus.doctor())`."""
    built = json.loads(torch.ops.annulus.build_info())
    fits = ".".join(built["torch"].split(".")[:2]) == ".".join(torch.__version__.split(".")[:2])
    devices = torch.cuda.device_count()
    cuda = "the library computes on it" if built["cuda"] else "the library was built without it: tensors on the CPU only"
    try:
        transformers = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        transformers = "not installed"
    rows = [
        ("annulus", f"{built['version']}, {_library.path()}"),
        ("torch", f"{torch.__version__}; the library was built against {built['torch']}"),
        ("CUDA", f"{devices} devices; {cuda}"),
        ("MPI", "the ranks of mpirun, if no group is given" if built["mpi"] else "no: pass a group"),
        ("gloo, NCCL", ", ".join("yes" if has() else "no" for has in (dist.is_gloo_available, dist.is_nccl_available))),
        ("group", _groups()),
        ("processor", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"),
        ("kernel", built["cpu_kernel"]),
        ("transformers", transformers),
    ]
    if not fits:
        rows.append(("WRONG", "the library was built for another minor version of torch: rebuild it with `./annulus torch`"))
    return "\n".join(f"{name:<14}{text}" for name, text in rows)
