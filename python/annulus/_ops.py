"""The signatures of the operators torch.ops.annulus, which PyTorch makes at run time, for type checkers and readers: what
`annulus.load` returns is typed by this. A test compares them with the schemas of python/ops. Used by users and by _library.py.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import SymInt, Tensor

Int: TypeAlias = int | SymInt


class Operators(Protocol):
    """What torch.ops.annulus has. `annulus.attention` and the other functions of the package call these and check more.

    `pattern` is inline TOML, `group` the name of a process group, or "" for the ranks of mpirun or this process alone.
    """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, pattern: str, *, group: str = "", layout: str = "contiguous",
                  schedule: str = "auto", within: int = 0, scale: float | None = None, dropout: float = 0.0, seed: Int = 0,
                  step: Int = 0, layer: int = 0, first_row: Int = 0, query_offset: Int = 0, softcap: float = 0.0,
                  cu_seqlens: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """Exact attention over the ranks of `group`. Collective, as is its backward."""

    def attention_with_lse(self, q: Tensor, k: Tensor, v: Tensor, pattern: str, *, group: str = "", layout: str = "contiguous",
                           schedule: str = "auto", within: int = 0, scale: float | None = None, dropout: float = 0.0,
                           seed: Int = 0, step: Int = 0, layer: int = 0, first_row: Int = 0, query_offset: Int = 0,
                           softcap: float = 0.0, cu_seqlens: Tensor | None = None,
                           sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns (out, lse)."""

    def attention_forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, sinks: Tensor | None, pattern: str,
                          group: str, layout: str, schedule: str, within: int, scale: float | None, dropout: float, seed: Int,
                          step: Int, layer: int, first_row: Int, query_offset: Int, softcap: float, keep: bool,
                          differentiable: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the two above call: a policy of selective checkpointing names it. Returns (out, lse, saved_k, saved_v, selected,
        number)."""

    def attention_backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved_k: Tensor,
                           saved_v: Tensor, selected: Tensor, number: Tensor, dlse: Tensor | None, cu_seqlens: Tensor | None,
                           sinks: Tensor | None, pattern: str, group: str, layout: str, schedule: str, within: int,
                           scale: float | None, dropout: float, seed: Int, step: Int, layer: int, first_row: Int,
                           query_offset: Int, softcap: float, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the backward calls. Returns (dq, dk, dv, dsinks)."""

    def all_reduce(self, x: Tensor, *, group: str = "") -> Tensor:
        """The sum over the ranks. Collective, as is its backward."""

    def all_reduce_numbered(self, x: Tensor, backward_of: Tensor | None, group: str) -> tuple[Tensor, Tensor]:
        """What `all_reduce` calls. Returns (sum, number)."""

    def rank(self, group: str = "") -> int:
        """This process's rank."""

    def size(self, group: str = "") -> int:
        """The number of ranks."""

    def plan(self, pattern: str, length: int, ranks: int, *, heads: int = 1, kv_heads: int = 0, batch: int = 1, head_dim: int = 128,
             element_bytes: int = 2, layout: str = "contiguous", schedule: str = "auto", within: int = 0, query_offset: int = 0,
             key_length: int | None = None, lengths: Sequence[int] | None = None, cu_seqlens: Tensor | None = None,
             keep: bool = True, prove: bool = True, machine: str = "") -> str:
        """The JSON that `annulus plan --json` prints."""

    def plan_ahead(self, pattern: str, length: int, *, heads: int = 1, kv_heads: int = 0, batch: int = 1, group: str = "",
                   layout: str = "contiguous", schedule: str = "auto", within: int = 0, query_offset: int = 0,
                   key_length: int | None = None, lengths: Sequence[int] | None = None, cu_seqlens: Tensor | None = None,
                   keep: bool = True) -> None:
        """Begins to plan a later attention on another thread."""

    def tree_positions(self, lengths: Tensor, parents: Tensor) -> Tensor:
        """The position of each token of a row of prefix trees. `annulus.Tree` calls these three."""

    def tree_targets(self, lengths: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (source, target, weight)."""

    def tree_of_rollouts(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (tokens, lengths, parents, leaves)."""

    def token_mask(
        self,
        shown: Tensor,
        *,
        group: str = "",
        layout: str = "",
        lengths: Sequence[int] | None = None,
        schedule: str = "auto",
        within: int = 0,
    ) -> tuple[str, int]:
        """Makes a mask of tokens. Returns (digest, number): what a pattern names as mask_digest, and what release_mask takes."""

    def release_mask(self, number: int) -> None:
        """Releases a mask, unless a backward still needs it."""

    def layout_positions(self, layout: str, length: int, rank: int, size: int) -> Tensor:
        """The positions of one rank of `size`, int64. `annulus.Sharding` calls these two."""

    def dealt_by(self, layout: str, pattern: str, cu_seqlens: Tensor | None = None) -> str:
        """The layout that is dealt by the pairs of a pattern, with the documents of cu_seqlens."""

    def choose_layout(self, pattern: str, length: int, *, heads: int = 1, kv_heads: int = 0, batch: int = 1, group: str = "",
                      schedule: str = "auto", within: int = 0) -> tuple[str, str]:
        """The layout in which attention is predicted to take least time, and why. Collective."""

    def stats(self, group: str = "") -> str:
        """What was sent over `group`, and planned, as JSON."""

    def build_info(self) -> str:
        """What the library was built from, as JSON."""

    def set_timeout(self, seconds: float) -> None:
        """Sets the deadline of an operation between ranks."""

    def release_ended_groups(self) -> None:
        """Drops what is kept of groups that destroy_process_group has ended."""
