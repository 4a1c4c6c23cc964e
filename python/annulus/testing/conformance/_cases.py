"""The cases: which masks, lengths and heads an implementation is tried on. Used by the suite's other files.

Lengths are small, since faults of distributed attention lie at borders, and every border is there: between ranks, between the
chunks of a layout, between documents, at the edge of a window, inside a rank's part and across it.
"""

import dataclasses

import torch

PART = 24  # rows of a rank where lengths are even: divisible by 2, 3, 4 and 8
HEAD_SIZE = 16
FEATURES = {
    "full": "attention without a mask",
    "causal": "a causal mask",
    "window": "a sliding window",
    "documents": "packed documents, causal within each",
    "uneven lengths": "lengths that ranks do not divide",
    "empty rank": "a rank without rows",
    "grouped heads": "fewer key/value heads than query heads",
    "one kv head": "fewer key/value heads than ranks",
    "cross-attention": "queries and keys of different lengths",
    "kept keys": "keys that are padding, so that rows may see none",
    "lse": "the log-sum-exp",
    "gradients": "gradients of q, k and v",
    "fp32": "fp32",
    "bf16": "bf16",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem over `size` ranks. gain: a factor of q, for huge scores. first_key: keys before it are padding. lengths: those of
    contiguous parts where they are not as equal as can be. needs: the features that an implementation must claim."""

    name: str
    size: int
    layout: str
    length_q: int
    length_k: int
    heads: int
    kv_heads: int
    batch: int = 2
    causal: bool = False
    window: tuple[int, int] | None = None
    documents: tuple[int, ...] | None = None
    first_key: int = 0
    gain: float = 1.0
    lengths: tuple[int, ...] | None = None
    needs: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return HEAD_SIZE**-0.5


def seen(case: Case) -> torch.Tensor:
    """Returns which pairs are counted, bool [queries, keys], from the predicate that defines the case."""
    q, k = torch.arange(case.length_q)[:, None], torch.arange(case.length_k)[None, :]
    counted = torch.ones(case.length_q, case.length_k, dtype=torch.bool)
    if case.causal:
        counted &= k <= q
    if case.window is not None:
        counted &= (k >= q - case.window[0]) & (k <= q + case.window[1])
    if case.documents is not None:
        inner = torch.tensor(case.documents[1:-1], dtype=torch.int64)
        counted &= (q[..., None] >= inner).sum(-1) == (k[..., None] >= inner).sum(-1)
    return counted & (k >= case.first_key)


def cases(size: int, layout: str) -> list[Case]:
    """Returns all cases for this number of ranks and layout."""
    length = PART * size
    heads = size * -(-4 // size)  # the least multiple of the ranks from 4 on, which exchanges of heads need
    even = dict(size=size, layout=layout, length_q=length, length_k=length, heads=heads, kv_heads=heads)
    causal = even | dict(causal=True, needs=("causal",))
    found = [
        Case("full", **even, needs=("full",)),
        Case("causal", **causal),
        Case("window", **causal | dict(window=(PART // 2, 0), needs=("causal", "window"))),
        Case("wide window", **causal | dict(window=(PART + PART // 2, 0), needs=("causal", "window"))),
        # Boundaries: inside a part, right behind a rank's border, documents of one token, the longest over a border.
        Case("packed documents", **causal | dict(batch=1, documents=_documents(size), needs=("documents",))),
        Case("one document", **causal | dict(batch=1, documents=(0, length), needs=("documents",))),
        Case("grouped heads", **causal | dict(heads=2 * heads, needs=("causal", "grouped heads"))),
        Case("one kv head", **causal | dict(kv_heads=1, needs=("causal", "grouped heads", "one kv head"))),
        Case("cross-attention", **even | dict(length_k=length - 8 * size, needs=("full", "cross-attention"))),
        Case("huge scores", **causal | dict(gain=2000.0)),
        Case("fully masked rows", **causal | dict(first_key=PART // 2 + 1, needs=("causal", "kept keys"))),
    ]
    if size > 1:
        found += [_uneven(causal, size, layout), _empty(causal, size, layout)]
    return found


def _documents(size: int) -> tuple[int, ...]:
    length = PART * size
    inner = {PART // 3, PART // 3 + 1, PART - 5, *(PART * r + 1 for r in range(1, size)), length - 2}
    return (0, *sorted(inner), length)


def _uneven(causal: dict, size: int, layout: str) -> Case:
    needs = ("causal", "uneven lengths")
    if layout != "contiguous":
        length = PART * size + 2 * size - 1
        return Case("uneven lengths", **causal | dict(length_q=length, length_k=length, needs=needs))
    lengths = tuple(PART + (7, -10, 3)[r % 3] for r in range(size))
    return Case("uneven lengths", **causal | dict(length_q=sum(lengths), length_k=sum(lengths), lengths=lengths, needs=needs))


def _empty(causal: dict, size: int, layout: str) -> Case:
    needs = ("causal", "uneven lengths", "empty rank")
    if layout != "contiguous":
        return Case("empty rank", **causal | dict(length_q=size - 1, length_k=size - 1, needs=needs))
    lengths = tuple(0 if r == size // 2 else PART for r in range(size))
    return Case("empty rank", **causal | dict(length_q=sum(lengths), length_k=sum(lengths), lengths=lengths, needs=needs))
