"""Prefix trees of rollouts: `Tree`, which gives a row's pattern, its rotary positions, and its targets with their weights. Used
by users."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _library  # noqa: F401  (registers the operators)
from ._errors import AnnulusError, errors


class TreeTargets(NamedTuple):
    """What predicts what, int64, one target an index: the token at row index `target` comes after the one at `source` in
    `weight` rollouts."""

    source: Tensor
    target: Tensor
    weight: Tensor


def _numbers(values: Any, what: str) -> Tensor:
    """Returns whole numbers as an int64 tensor on the CPU."""
    numbers = torch.as_tensor(values, device="cpu")
    if numbers.numel() == 0:
        numbers = numbers.to(torch.int64)
    if numbers.dim() != 1 or numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise AnnulusError(f"[pattern] {what} must be a list or tensor of whole numbers in one dimension")
    return numbers.to(torch.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """A row that holds rollouts as a prefix tree (or several trees), so that their common prefixes stand in it once:

        tree = annulus.Tree.of_rollouts([[1, 2, 3, 4], [1, 2, 5]])      # tokens 1 2 | 3 4 | 5
        out = annulus.attention(q, k, v, tree.pattern)                   # with rotary embeddings of tree.positions
        source, target, weight = tree.targets()
        loss = (weight * F.cross_entropy(logits[source], tree.tokens[target], reduction="none")).sum()

    which is the sum of the losses of all rollouts.

    lengths, parents: the tokens of each node, and the index of its parent or -1, in depth-first order, as in the pattern
        `tree` (docs/explanation/attention.md).
    tokens, leaves: the tokens of the row, and the index of the node with which each rollout ends; None unless `of_rollouts`
        made the tree.

    Raises AnnulusError for lengths and parents that are no tree, naming node and parent.
    """

    lengths: Sequence[int]
    parents: Sequence[int]
    tokens: Tensor | None = None
    leaves: Tensor | None = None
    positions: Tensor = dataclasses.field(init=False)  # [tokens of the row]: how many are before each on its path from the root

    def __post_init__(self) -> None:
        with errors():
            positions = torch.ops.annulus.tree_positions(*self._nodes())
        object.__setattr__(self, "positions", positions)

    @classmethod
    def of_rollouts(cls, rollouts: Sequence[Sequence[int] | Tensor]) -> "Tree":
        """Merges the common prefixes of rollouts, each a list or tensor of token ids. Children are in the order in which their
        first rollouts are given. Each rollout is a leaf of its own, without tokens where it equals another one or is its
        beginning."""
        if not rollouts:
            raise AnnulusError("[pattern] a tree needs at least one rollout")
        each = [_numbers(rollout, f"rollout {i}") for i, rollout in enumerate(rollouts)]
        with errors():
            tokens, lengths, parents, leaves = torch.ops.annulus.tree_of_rollouts(
                torch.cat(each), torch.tensor([len(rollout) for rollout in each])
            )
        return cls(lengths.tolist(), parents.tolist(), tokens, leaves)

    @property
    def pattern(self) -> Mapping[str, Any]:
        """The pattern of a batch of this row."""
        return {"kind": "tree", "lengths": list(self.lengths), "parents": list(self.parents)}

    def targets(self, rows: Tensor | None = None) -> TreeTargets:
        """Returns the targets of the row, in ascending order of `target`. The last token of a node has one in each child, and
        `weight` is the number of leaves below the target's node.

        rows: the indices of the rows of a part, such as `cut.positions(len(tree.positions))` of an `annulus.Sharding`, or
            what `annulus.shard` returns for `torch.arange(len(tree.positions))`. Then only targets that these rows predict
            are returned, and `source` is an index into `rows`. So the ranks have all targets, each once.
        """
        with errors():
            source, target, weight = torch.ops.annulus.tree_targets(*self._nodes())
        if rows is None:
            return TreeTargets(source, target, weight)
        index = torch.full((len(self.positions),), -1)
        index[rows.cpu()] = torch.arange(len(rows))
        own = index[source] >= 0
        return TreeTargets(index[source[own]], target[own], weight[own])

    def _nodes(self) -> tuple[Tensor, Tensor]:
        return _numbers(self.lengths, "lengths"), _numbers(self.parents, "parents")
