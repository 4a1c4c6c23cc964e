"""Converts the masks of transformers to patterns of annulus: bands, packed documents, and hidden keys (padding). Used by
transformers.py.

transformers describes a mask by a function of indices, composed of functions, and by a 2-D attention_mask. The documents of
a row follow from its position ids alone, by one rule for any number of ranks: a document begins where they do not increase.
"""

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel, masking_utils

from ._errors import AnnulusError
from ._operators import Group, size
from ._patterns import pattern_text
from ._sharding import unshard


def refusal(what: str, instead: str) -> AnnulusError:
    return AnnulusError(f"[transformers] {what}, which annulus cannot express: {instead}")


OTHER_ATTENTION = 'choose attn_implementation="sdpa" or "eager" for it'


@dataclasses.dataclass(eq=False)
class Mask:
    """The pairs within a band and a document whose key is not hidden. Made once per forward and kind of layer; `settle`
    completes it in the first layer."""

    left: int | None  # a query attends to keys from query - left on; None: from the first
    right: int | None  # and up to query + right; None: up to the last
    query_offset: int  # query i has index i + query_offset among the keys
    queries: int
    keys: int
    visible: Tensor | None  # bool [batch, keys]; None: no key is hidden
    positions: Tensor | None = None  # the position ids [batch or 1, queries] that the model passed to its mask
    model: PreTrainedModel | None = None  # the model that made it
    models_positions: Tensor | None = None  # the model's position ids, whether or not it passed them to the mask
    cache: Any = None
    documents: Tensor | None = None  # int64 [batch, queries], ascending; None: each row is one document
    settled: bool = False
    fault: str = ""  # why it cannot be expressed; not raised at once, because layers may not use every mask
    texts: dict[int, str] = dataclasses.field(default_factory=dict)  # patterns by the number of keys

    def text(self, keys: int) -> str:
        """Returns the text of the pattern for the first `keys` keys of whole rows, cached for layers that share it."""
        if keys > self.keys:
            raise refusal(f"a layer of {_name(self.model)} has {keys} keys, but its mask {self.keys}", OTHER_ATTENTION)
        if keys not in self.texts:
            self.texts[keys] = pattern_text(self.pattern(keys))
        return self.texts[keys]

    def pattern(self, keys: int) -> dict[str, Any]:
        visible = None if self.visible is None else self.visible[:, :keys]
        if visible is not None and not visible.all():
            return {"kind": "slices", "slices": list(self._slices(visible))}
        if self.left is None and self.right is None:
            pattern: dict[str, Any] = {"kind": "full"}
        elif self.left is None and self.right == 0:
            pattern = {"kind": "causal"}
        else:
            ends = [keys if end is None else end for end in (self.left, self.right)]
            pattern = {"kind": "window", "left": ends[0], "right": ends[1]}
        if self.documents is None:
            return pattern
        lengths = lengths_of(self.documents)
        if (rest := keys - self.documents.shape[1]) > 0:  # unfilled keys of a cache of fixed size
            pattern["key_documents"] = [row + [rest] for row in lengths]
            lengths = [row + [0] for row in lengths]
        return pattern | {"documents": lengths}

    def _slices(self, visible: Tensor) -> Iterator[dict[str, Any]]:
        """Yields a slice for each document and run of visible keys. A hidden position is hidden as a key only, as in
        transformers."""
        band = {}
        if self.left is not None:
            band["lo"] = self.query_offset - self.left
        if self.right is not None:
            band["hi"] = self.query_offset + self.right
        keys = visible.shape[1]
        # Adjacent rows with equal runs and documents share slices.
        rows = [(_runs(row), self._document_ranges(i, keys)) for i, row in enumerate(visible)]
        first = 0
        for (runs, documents), alike in itertools.groupby(rows):
            count = len(list(alike))
            for begin, end in documents:
                for run_begin, run_end in runs:
                    key, last = max(begin, run_begin), min(end, run_end)
                    if key < last:
                        queries = [0, 1, self.queries] if self.documents is None else [begin, 1, end - begin]
                        yield {"queries": queries, "keys": [key, 1, last - key], "batch": [first, 1, count]} | band
            first += count

    def _document_ranges(self, row: int, keys: int) -> list[tuple[int, int]]:
        if self.documents is None:
            return [(0, keys)]
        ends = list(itertools.accumulate(n for n in lengths_of(self.documents[row : row + 1])[0] if n > 0))
        return list(zip([0, *ends], ends))

    def settle(
        self,
        position_ids: Tensor | None,
        seq_idx: Tensor | None,
        boundaries: dict[str, Tensor | None],
        batch: int,
        group: Group,
        layout: str,
    ) -> None:
        """In the first layer, finds the documents of whole rows, and over several ranks their hidden keys. Raises
        AnnulusError if the layers' arguments (seq_idx; `boundaries`, by name) imply other documents. Collective; raises
        on all ranks or none."""
        if self.settled:
            return
        if self.queries > 1 or size(group) > 1:
            self._find_documents(position_ids, seq_idx, batch, group, layout)
        for name, given in boundaries.items():
            self._check_boundaries(name, given, batch)
        self.settled = True

    def _find_documents(
        self, position_ids: Tensor | None, seq_idx: Tensor | None, batch: int, group: Group, layout: str
    ) -> None:
        ranks = size(group)
        ids = self.positions
        for other in (position_ids, self.models_positions):
            if ids is None and other is not None and other.dim() == 2 and other.shape[1] == self.queries:
                ids = other
        numbers = None if seq_idx is None else _row_numbers(seq_idx.detach().cpu(), batch, self.queries)
        if ranks > 1:
            ids, numbers = self._gather(ids, position_ids, numbers, batch, group, layout)
        elif ids is not None:
            ids = ids.detach().cpu().expand(batch, -1)
        if ids is not None:
            visible = self.visible
            if visible is not None and ranks == 1:
                visible = visible[:, self.query_offset : self.query_offset + self.queries]
            found = documents_of(ids, visible, f"the registered layout {layout!r} of {ranks} ranks" if ranks > 1 else "")
            if found is not None:
                self._check_documents()
                self.documents = found
        if numbers is not None:
            _check_same(numbers, self.documents, "seq_idx", None if ranks > 1 else self.visible)
        if self.documents is not None and isinstance(self.cache, Cache):
            _packed_caches.add(self.cache)

    def _check_boundaries(self, name: str, boundaries: Tensor | None, batch: int) -> None:
        """Checks that the boundaries of documents in the concatenated rows equal those of the position ids."""
        if boundaries is None:
            return
        given = [n for n in boundaries.diff().tolist() if n > 0]
        rows = [[self.queries]] * batch if self.documents is None else lengths_of(self.documents)
        known = [n for row in rows for n in row if n > 0]
        if given != known:
            raise refusal(f"{name} has documents of {given} tokens, but position_ids has {known}", "make them agree")

    def _check_documents(self) -> None:
        if self.positions is None:
            raise refusal(
                f"position_ids restart within a row, but {_name(self.model)} does not pass them to its mask, so its "
                "attention would cross documents",
                "give each document a row of its own",
            )
        if self.query_offset > 0:
            raise refusal(
                "position_ids restart within a row that continues a cache", "pass packed documents in one call without a cache"
            )

    def _gather(
        self, ids: Tensor | None, layers_ids: Tensor | None, numbers: Tensor | None, batch: int, group: Group, layout: str
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the position ids of whole rows and, if this rank's `numbers` are given, their document numbers."""
        if self.query_offset != 0 or (self.visible is not None and self.visible.shape[1] != self.queries):
            raise refusal("a cache of keys over several ranks", "pass whole rows, with use_cache=False")
        for given in (self.positions, layers_ids, self.models_positions):
            if given is not None:
                check_positions(given)
        if ids is None:
            raise AnnulusError(
                "[transformers] over several ranks attention needs position_ids, but this model passes them neither to its "
                "mask nor to its layers: without them annulus cannot distinguish documents or check a rank's rotary positions; "
                "use one rank"
            )
        ids = ids.detach().cpu().expand(batch, -1)
        counted = (ids == torch.arange(ids.shape[1])).all().to(ids.dtype)
        visible = torch.ones_like(ids) if self.visible is None else self.visible.to(ids.dtype)
        parts = [ids, visible, counted.expand(1, ids.shape[1])]
        if numbers is not None:
            parts.append(numbers.to(ids.dtype))
        whole = unshard(torch.cat(parts), layout, group)
        ids, visible, counted = whole[:batch], whole[batch : 2 * batch], whole[2 * batch]
        if counted.all():
            raise AnnulusError(
                f"[transformers] the position ids of each of the {size(group)} ranks count from 0, as if each held the "
                "beginning of the rows: pass position_ids=annulus.shard(position_ids, layout, group), or use "
                "annulus.transformers.shard_batch. If a document does begin with every contiguous part, use the layout "
                "'zigzag', which distinguishes the two cases"
            )
        self.queries = self.keys = ids.shape[1]
        self.visible = None if visible.all() else visible > 0
        return ids, whole[2 * batch + 1 :] if numbers is not None else None


# Caches filled with packed documents. Only the caller knows to which document later queries belong.
_packed_caches: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _name(model: object) -> str:
    return "this model" if model is None else type(model).__name__


def _runs(visible: Tensor) -> list[tuple[int, int]]:
    """Returns the runs of True as [begin, end)."""
    edges = torch.nn.functional.pad(visible.to(torch.int8), (1, 1)).diff()
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()))


def lengths_of(numbers: Tensor) -> list[list[int]]:
    """Returns the lengths of the runs of equal numbers in each row, padded with 0."""
    rows = [row.unique_consecutive(return_counts=True)[1].tolist() for row in numbers]
    most = max(map(len, rows))
    return [row + [0] * (most - len(row)) for row in rows]


def check_positions(position_ids: Tensor) -> None:
    if position_ids.dim() != 2:
        raise refusal(
            f"position_ids are {list(position_ids.shape)}, not [batch, n], as with several axes (multimodal rotary)",
            "over several ranks use a model with one position for each token",
        )


def documents_of(ids: Tensor, visible: Tensor | None, layout: str = "") -> Tensor | None:
    """Returns the index of each position's document, int64 [batch, n], or None if each row is one document.

    ids: position ids [batch, n] of whole rows. A document begins where they do not increase; hidden positions are ignored.
    visible: bool [batch, n], or None. layout: the layout from which several ranks' parts were gathered, or "".

    Raises AnnulusError if ids increase by more than 1: whether transformers begins a document there depends on the presence
    of a cache or a mask. Over several ranks it also raises if a document begins with another id than 0 or the row's first,
    which indicates that rows were sharded in another layout.
    """
    begins = torch.zeros_like(ids)
    for row, positions in enumerate(ids):
        at = torch.arange(len(positions)) if visible is None else visible[row].nonzero().flatten()
        seen = positions[at]
        steps = seen.diff()
        jumps = (steps > 1) & (steps != at.diff())
        falls = steps <= 0
        first = seen[1:][falls]
        wrong = torch.cat([seen[1:][jumps], first[(first != 0) & (first != seen[:1])] if layout else first[:0]])
        if len(wrong) and layout:
            raise AnnulusError(
                "[transformers] every document of a row must begin at 0 or at the row's first position id and count up by "
                f"one, but when the parts are put together in {layout}, {int(wrong[0])} follows another id: cut rows in that "
                "layout, as annulus.transformers.shard_batch does by default"
            )
        if len(wrong):
            place = int(at[1:][jumps][0])
            raise AnnulusError(
                "[transformers] position ids must rise by 1 within a document, and a document begins where they do not rise, "
                f"but they jump to {int(positions[place])} at index {place} of batch row {row}: let them count up by one"
            )
        begins[row, at[1:][falls]] = 1
    return begins.cumsum(1) if begins.any() else None


def _row_numbers(numbers: Tensor, batch: int, length: int) -> Tensor:
    """Expands seq_idx [batch or 1, n] to [batch, n]."""
    if numbers.dim() != 2 or numbers.shape[0] not in (1, batch) or numbers.shape[1] != length:
        raise AnnulusError(f"[transformers] seq_idx must be [{batch}, {length}], but is {list(numbers.shape)}")
    return numbers.expand(batch, -1)


def _check_same(numbers: Tensor, documents: Tensor | None, name: str, visible: Tensor | None) -> None:
    """Checks that `numbers` change exactly where `documents` do, except at hidden positions."""
    if documents is None:
        documents = torch.zeros_like(numbers)
    for row, (other, own) in enumerate(zip(numbers, documents)):
        if visible is not None:
            other, own = other[visible[row, : len(other)]], own[visible[row, : len(own)]]
        if not torch.equal(other.diff() != 0, own.diff() != 0):
            given, known = (x.unique_consecutive(return_counts=True)[1].tolist() for x in (other, own))
            raise refusal(f"{name} has documents of {given} tokens, but position_ids has {known}", "make them agree")


# ---- The tensor by which a mask passes through a model.

_LOOKS = {
    "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse",
    "is_xpu", "layout", "ndim", "requires_grad", "shape", "dim", "size", "numel", "is_complex", "is_contiguous",
    "is_floating_point", "get_device",
}  # fmt: skip
_KEEPS = {"bool", "clone", "contiguous", "cpu", "cuda", "detach", "pin_memory", "to"}


class MaskTensor(Tensor):
    """A Mask as a bool tensor [batch, 1, queries, keys] without memory. transformers and models may query its metadata and
    pass it on; computing with it raises AnnulusError."""

    mask: Mask

    @staticmethod
    def make(mask: Mask, batch: int, keys: int, device: Any) -> "MaskTensor":
        made = torch.empty(1, dtype=torch.bool, device=device).expand(batch, 1, mask.queries, keys).as_subclass(MaskTensor)
        made.mask = mask
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        attribute = func.__self__.__name__ if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]
        own = args[0] if args and isinstance(args[0], cls) else None
        if attribute in _LOOKS and name != "__set__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if own is not None and name in _KEEPS:
            return own
        if own is not None and name == "__set__" and attribute == "requires_grad" and not args[1]:
            return None
        if own is not None and name == "__getitem__" and _takes_all(own, args[1]):
            return own
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, cls)]
        mask = given[0].mask if given else None
        raise refusal(
            f"{_name(mask and mask.model)} computes with its attention mask as a tensor ({attribute})", OTHER_ATTENTION
        )


def _takes_all(tensor: MaskTensor, index: Any) -> bool:
    """Returns whether an index selects the whole mask, or its first keys, for a layer with fewer keys."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = index[:place] + (slice(None),) * (tensor.ndim - len(index) + 1) + index[place + 1 :]
    if len(index) > tensor.ndim or not all(isinstance(i, slice) for i in index):
        return False
    for dim, (taken, length) in enumerate(zip(index, tensor.shape)):
        begin, end, step = taken.indices(length)
        if begin != 0 or step != 1 or (end != length and dim != tensor.ndim - 1):
            return False
    return True


# ---- Masks of transformers, which are composed functions.


def _read(function: Callable, mask: Mask, numbers: list[Tensor]) -> None:
    """Restricts `mask` by `function`. Appends the document numbers [batch, n] that `function` compares to `numbers`."""
    if function is masking_utils.causal_mask_function:
        mask.right = 0 if mask.right is None else min(mask.right, 0)
        return
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return
    maker = getattr(function, "__qualname__", repr(function)).removesuffix(".<locals>.inner_mask")
    made_of = {}
    if getattr(function, "__module__", None) == masking_utils.__name__ and function.__closure__ is not None:
        made_of = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))
    match maker, made_of:
        case "sliding_window_overlay", {"sliding_window": int(window)} if window > 0:
            mask.left = window - 1 if mask.left is None else min(mask.left, window - 1)
            return
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(window)}:
            mask.left, mask.right = (window if end is None else min(end, window) for end in (mask.left, mask.right))
            return
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as packed}:
            numbers.append(packed)
            return
        case "remap_positions_for_packed_sequence", {"mask_function": inner, "position_ids": Tensor() as ids}:
            # Within a document position ids count up by one, so a band of position ids is the same band of indices.
            if mask.positions is None:
                mask.positions = ids
            return _read(inner, mask, numbers)
        case "and_masks.<locals>.and_mask", {"mask_functions": tuple(parts)}:
            for part in parts:
                _read(part, mask, numbers)
            return
    raise refusal(
        f"the mask of {_name(mask.model)} is made by {maker}",
        f"{OTHER_ATTENTION}. annulus supports causal and bidirectional masks, sliding windows, packed documents and padding",
    )


def _maker(mask: Mask) -> None:
    """Finds the model that makes the mask, and position ids. transformers passes position ids to a mask only if it detects
    documents in them, so they are read from the stack: from its mask function and the model's forward, which calls that."""
    frame = sys._getframe(2)
    while frame is not None and mask.model is None:  # no further: f_locals prolongs the life of a frame's tensors
        local = frame.f_locals
        ids = local.get("position_ids")
        if frame.f_globals.get("__name__") == masking_utils.__name__:
            if mask.positions is None and isinstance(ids, Tensor):
                mask.positions = ids
            if mask.cache is None:
                mask.cache = local.get("past_key_values")
        elif isinstance(local.get("self"), PreTrainedModel):
            mask.model = local["self"]
            mask.models_positions = ids if isinstance(ids, Tensor) else None
        frame = frame.f_back


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: Any = "cpu",
    **_: Any,
) -> MaskTensor:
    """Implements transformers' mask interface. Versions before 5.4 pass `cache_position`, the indices of the queries, in
    place of q_length and q_offset."""
    if cache_position is not None:
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    assert q_length is not None
    mask = Mask(None, None, int(q_offset) - kv_offset, q_length, kv_length, None)
    _maker(mask)
    numbers: list[Tensor] = []
    try:
        _read(mask_function, mask, numbers)
    except AnnulusError as error:
        mask.fault = str(error)
    if mask.positions is not None and (mask.positions.dim() != 2 or mask.positions.shape[1] != q_length):
        mask.positions = None
    if numbers and mask.positions is None:
        mask.documents = numbers[0].cpu().expand(batch_size, -1)
    if attention_mask is not None:
        visible = attention_mask[:, kv_offset : kv_offset + kv_length].cpu() > 0
        # A cache of fixed size has more keys than attention_mask. Causal queries attend to none after themselves.
        visible = torch.nn.functional.pad(visible, (0, kv_length - visible.shape[1]))
        seen = visible if mask.right != 0 else visible[:, : mask.query_offset + q_length]
        mask.visible = None if seen.all() else visible
    if mask.query_offset > 0 and mask.cache in _packed_caches:
        raise refusal("this cache was filled with packed documents", "generate from rows of one document each")
    return MaskTensor.make(mask, batch_size, kv_length, device)
