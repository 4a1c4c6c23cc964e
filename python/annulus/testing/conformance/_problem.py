"""Problem, which an adapter gets with its tensors, and how layouts give positions to ranks. Used by all of the suite.

A copy of what an adapter sees stands in each reproducer, so nothing here is needed to write an adapter or to repeat a failure.
"""

import dataclasses
from typing import Any

import torch

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclasses.dataclass
class Problem:
    """One call of attention over ranks. Positions count from 0 over the whole sequence.

    rank, size, group: this rank, the number of ranks, and None, the group of all of them.
    layout: "contiguous", "zigzag" or "striped". positions_q, positions_k: int64, the positions of this rank's rows of q, and of k and
        v. lengths_q, lengths_k: how many rows each rank has. length_q, length_k: those of the whole sequence.
    scale: the factor of q . k, 1 / sqrt(head size).
    causal: whether a query sees only keys up to its own position.
    window: (left, right), or None: a query at p sees keys from p - left to p + right, as in flash-attn.
    documents: None, or int32 [documents + 1]: the cumulative lengths of packed documents, over the whole sequence. A query sees keys
        of its own document only. The batch has one row then.
    kept_keys: None, or bool [length_k] of the whole sequence: which keys can be seen. A query that sees none gives 0.
    dtype: that of the tensors.
    """

    rank: int
    size: int
    group: Any
    layout: str
    positions_q: torch.Tensor
    positions_k: torch.Tensor
    lengths_q: list[int]
    lengths_k: list[int]
    length_q: int
    length_k: int
    scale: float
    causal: bool
    window: tuple[int, int] | None
    documents: torch.Tensor | None
    kept_keys: torch.Tensor | None
    dtype: torch.dtype


def positions(length: int, layout: str, size: int, lengths: list[int] | None = None) -> list[torch.Tensor]:
    """Returns the positions of each rank, int64, in the order in which it stores them.

    contiguous: consecutive parts, of these lengths or as equal as can be. zigzag: the sequence is cut into 2 `size` chunks, and rank r
    has chunks r and 2 `size` - 1 - r. striped: every `size`-th position from r on. Chunk i of n begins at floor(i length / n).
    """
    if lengths is not None:
        if layout != "contiguous":
            raise ValueError(f"only a contiguous layout has lengths of its own, but it is {layout}")
        return list(torch.arange(length).split(lengths))

    def chunk(i: int, chunks: int) -> torch.Tensor:
        return torch.arange(i * length // chunks, (i + 1) * length // chunks)

    if layout == "contiguous":
        return [chunk(r, size) for r in range(size)]
    if layout == "zigzag":
        return [torch.cat([chunk(r, 2 * size), chunk(2 * size - 1 - r, 2 * size)]) for r in range(size)]
    if layout == "striped":
        return [torch.arange(min(r, length), length, size) for r in range(size)]
    raise ValueError(f"the layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}")
