"""Exact attention over the ranks of a process group, for PyTorch programs (docs/reference/python.md).

    import annulus
    cut = annulus.Sharding("zigzag", group)
    mine = cut.shard({"tokens": tokens, "positions": positions})
    out = cut.attention(q, k, v, "{ kind = 'causal' }")

`import annulus` loads a library that registers the operators torch.ops.annulus.*; these functions call them.
"""

from ._attention import Sharding, attention, sharding_of
from ._diagnosis import doctor, plan, plan_ahead, stats
from ._errors import AnnulusError, errors
from ._library import __version__, load
from ._masks import TokenMask
from ._operators import all_reduce, rank, size
from ._ops import Operators
from ._sharding import positions, shard, shift_labels, unshard
from ._trees import Tree, TreeTargets

AnnulusError.__module__ = __name__  # the name that users import

__all__ = [
    "AnnulusError",
    "Operators",
    "Sharding",
    "TokenMask",
    "Tree",
    "TreeTargets",
    "__version__",
    "all_reduce",
    "attention",
    "doctor",
    "errors",
    "load",
    "plan",
    "plan_ahead",
    "positions",
    "rank",
    "shard",
    "sharding_of",
    "shift_labels",
    "size",
    "stats",
    "unshard",
]
