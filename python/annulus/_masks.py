"""TokenMask, a mask of (query, key) pairs that is made once and used in many calls. Used by users and by _attention.py."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._errors import AnnulusError, errors
from ._operators import Group, group_name
from ._sharding import settled

if TYPE_CHECKING:
    from ._attention import Sharding


class TokenMask:
    """Which pairs of a query and a key are seen, for `annulus.attention(..., mask=...)` and for the key "mask" of a pattern.

    shown: a tensor or NumPy array, bool or uint8 [batch or 1, heads or 1, queries, keys], true where the query sees the key, of
        whole rows and the same on all ranks. No other shape is broadcast. It is copied, so later changes do not count.
    sharding, group, layout: how queries are cut among ranks, as in `annulus.attention`. A rank holds the bits of its own queries:
        one bit for each pair of the blocks of 128 x 128 that are shown in part. lengths: those of contiguous parts, by rank.
    schedule, within: those of the calls, if the schedule moves queries ("ulysses", "ulysses-ring" or "mesh"): the rank then holds
        the bits of the queries that it computes as well. Others, and "auto", which then chooses among others, need no more.

    Raises AnnulusError for a mask that shows no pair, and for one whose bits would take more than ANNULUS_MASKS_MIB (1024).
    Not collective. Keep it for as long as patterns name it.
    """

    def __init__(
        self,
        shown: Any,
        *,
        sharding: "Sharding | None" = None,
        group: Group = None,
        layout: str | None = None,
        lengths: Sequence[int] | None = None,
        schedule: str = "auto",
        within: int = 0,
    ) -> None:
        if torch.compiler.is_compiling():
            raise AnnulusError("[torch] make an annulus.TokenMask before a compiled function, which has no content of tensors")
        group, layout = settled({"sharding": sharding}, group, layout)
        with errors():
            self.mask_digest, number = torch.ops.annulus.token_mask(
                torch.as_tensor(shown),
                group=group_name(group),
                layout=layout or "",
                lengths=lengths,
                schedule=schedule,
                within=within,
            )
        weakref.finalize(self, torch.ops.annulus.release_mask, number)

    def __repr__(self) -> str:
        return f"annulus.TokenMask({self.mask_digest})"
