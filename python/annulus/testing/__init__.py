"""Tests of code over torch.distributed on one machine, without a GPU (docs/tutorials/distributed-tests.md).

`ranks` makes a pytest test that runs on several ranks, `run_ranks` calls a function on them, and
`python -m annulus.testing.conformance` holds an implementation of sequence-parallel attention against its definition. `hosts` simulates
several hosts by network namespaces, for tests that are programs. All of it is Python and torch; it uses nothing of annulus's library.
"""

from ._ranks import RanksFailed, ranks, run_ranks

RanksFailed.__module__ = __name__  # the name that users import

__all__ = ["RanksFailed", "ranks", "run_ranks"]
