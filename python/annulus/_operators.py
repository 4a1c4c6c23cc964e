"""Process groups of PyTorch as the operators of torch.ops.annulus know them, and the sum over their ranks. Used by users and by
the other modules of the package."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import _library  # noqa: F401  (registers the operators)
from ._errors import AnnulusError, errors

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
