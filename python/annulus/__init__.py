"""Exact attention over the ranks of a process group, for PyTorch programs (docs/reference/python.md).

    import annulus
    cut = annulus.Sharding("zigzag", group)
    mine = cut.shard({"tokens": tokens, "positions": positions})
    out = cut.attention(q, k, v, "{ kind = 'causal' }")

`import annulus` loads a library that registers the operators torch.ops.annulus.*; these functions call them. annulus.testing needs no
library: where none can be loaded, the first use of something else raises the ImportError that says why.
"""

try:
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
except ImportError as error:
    _error = error

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(str(_error)) from _error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
