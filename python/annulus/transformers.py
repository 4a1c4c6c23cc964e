"""Registers annulus as an attention of transformers (`attn_implementation="annulus"`), in one process or over a group.

    annulus.transformers.register(group=mesh["context"], layout="zigzag")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="annulus")
    loss = model(**annulus.transformers.shard_batch(batch)).loss

The masks that transformers' mask interface passes to layers are read exactly: causal, bidirectional, sliding windows, and
documents that are packed into a row. Any other mask raises an error that names it, so no layer ever computes with a mask
that differs from the model's. Users import this module as annulus.transformers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ._errors import AnnulusError
from ._operators import Group, all_reduce, attention, group_name, size
from ._sharding import shard, shift_labels, unshard


@dataclasses.dataclass(eq=False)
class Mask:
    """What layers get as `attention_mask`: the pairs within a band and within a document. Made once for each forward."""

    left: int | None  # a query sees keys from query - left on; None: from the first
    right: int | None  # and up to query + right; None: up to the last
    query_offset: int
    padding_mask: bool  # whether one was given (without padding): transformers then does not look for documents
    documents: list[list[int]] | None  # their lengths, a list for each row of the batch; None: each row is one document
    gathered: bool = False  # whether `documents` are those of whole rows

    def pattern(self, keys: int) -> dict[str, Any]:
        if self.left is None and self.right is None:
            pattern: dict[str, Any] = {"kind": "full"}
        elif self.left is None and self.right == 0:
            pattern = {"kind": "causal"}
        else:
            ends = [keys if end is None else end for end in (self.left, self.right)]
            pattern = {"kind": "window", "left": ends[0], "right": ends[1]}
        return pattern if self.documents is None else pattern | {"documents": self.documents}


def _refuse(what: str, instead: str) -> AnnulusError:
    return AnnulusError(f"[transformers] {what}, which annulus cannot express: {instead}")


# ---- Masks of transformers, which are functions made of functions.


def _read(function: Callable, mask: Mask) -> Tensor | None:
    """Restricts `mask` to what `function` allows. Returns the numbers of packed documents [batch, n] if it distinguishes
    documents, otherwise None."""
    if function is masking_utils.causal_mask_function:
        mask.right = 0 if mask.right is None else min(mask.right, 0)
        return None
    if function is masking_utils.bidirectional_mask_function:
        return None
    maker = getattr(function, "__qualname__", repr(function)).removesuffix(".<locals>.inner_mask")
    made_of = {}
    if getattr(function, "__module__", None) == masking_utils.__name__ and function.__closure__ is not None:
        made_of = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))
    match maker, made_of:
        case "sliding_window_overlay", {"sliding_window": int(window)} if window > 0:
            mask.left = window - 1 if mask.left is None else min(mask.left, window - 1)
            return None
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(window)}:
            mask.left, mask.right = (window if end is None else min(end, window) for end in (mask.left, mask.right))
            return None
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as numbers}:
            return numbers
        case "remap_positions_for_packed_sequence", {"mask_function": inner, "position_ids": Tensor() as ids}:
            # Within a document position ids count up by one, so a band of position ids is the same band of indices.
            if _read(inner, mask) is None:
                return (ids.diff(dim=1, prepend=ids[:, :1] - 1) != 1).cumsum(1)
        case "and_masks.<locals>.and_mask", {"mask_functions": tuple(parts)}:
            numbers = [n for n in (_read(part, mask) for part in parts) if n is not None]
            if all(torch.equal(n, numbers[0]) for n in numbers):
                return numbers[0] if numbers else None
    raise _refuse(
        f"the mask of this model is made by {maker}",
        'choose attn_implementation="sdpa" or "eager" for it. annulus supports causal and bidirectional masks, sliding '
        "windows and packed documents",
    )


def _lengths(numbers: Tensor) -> list[list[int]] | None:
    """Returns the lengths of the runs of equal numbers in each row, padded with 0; None if every row is one run."""
    rows = [row.unique_consecutive(return_counts=True)[1].tolist() for row in numbers]
    most = max(map(len, rows))
    return None if most == 1 else [row + [0] * (most - len(row)) for row in rows]


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    group: Group,
    **_: Any,
) -> Mask:
    hidden = 0
    if attention_mask is not None:
        # A cache of fixed size has more keys than these; they come after every query.
        hidden = (attention_mask[:, kv_offset : kv_offset + kv_length] == 0).sum().cpu()
        if size(group) > 1:
            hidden = all_reduce(hidden, group=group)  # padding on any rank is refused on all
    if hidden:
        raise _refuse(
            f"attention_mask hides {int(hidden)} positions (padding)",
            "pack rows instead of padding them (DataCollatorWithFlattening, position_ids that restart at 0 with each "
            'document and attention_mask=None), or pad on the right with labels of -100 and attention_mask=None',
        )
    mask = Mask(None, None, int(q_offset) - kv_offset, attention_mask is not None, None)
    numbers = _read(mask_function, mask)
    if numbers is not None:
        mask.documents = _lengths(numbers.expand(batch_size, -1))
    return mask


# ---- Attention over several ranks.


def _check_positions(position_ids: Tensor) -> None:
    if position_ids.dim() != 2:
        raise _refuse(
            f"position_ids are {list(position_ids.shape)}, not [batch, n], as with several axes (multimodal rotary)",
            "over several ranks use a model with one position for each token",
        )


def _gather_documents(mask: Mask, position_ids: Tensor | None, batch: int, group: Group, layout: str) -> None:
    """Finds the documents of whole rows from the position ids of all ranks. Collective; it raises on all ranks or none."""
    if position_ids is None:
        raise AnnulusError(
            "[transformers] over several ranks attention needs position_ids, but this model does not pass them to its "
            "layers: without them annulus cannot distinguish documents or check a rank's rotary positions; use one rank"
        )
    _check_positions(position_ids)
    ids = position_ids.detach().cpu().expand(batch, -1)
    counted = (ids == torch.arange(ids.shape[1])).all().to(ids.dtype)
    whole = unshard(torch.cat([ids, counted.expand(1, ids.shape[1])]), layout, group)
    if whole[-1].all():
        raise AnnulusError(
            f"[transformers] the position ids of each of the {size(group)} ranks count from 0, as if each held the beginning "
            "of the rows: pass position_ids=annulus.shard(position_ids, layout, group), or use "
            "annulus.transformers.shard_batch. If a document does begin with every contiguous part, use the layout "
            "'zigzag', which distinguishes the two cases"
        )
    whole = whole[:-1]
    begins = whole.diff(dim=1, prepend=whole[:, :1] - 1) != 1
    if (elsewhere := whole[begins & (whole != whole[:, :1])]).numel() > 0:
        raise AnnulusError(
            "[transformers] every document of a row must begin at the row's first position id, but when the parts of the "
            f"{size(group)} ranks are put together in the registered layout {layout!r}, one begins at {int(elsewhere[0])}: cut "
            "rows in that layout, as annulus.transformers.shard_batch does by default, and let position ids count up by one"
        )
    documents = _lengths(begins.cumsum(1))
    if documents is not None and mask.padding_mask:
        raise AnnulusError(
            "[transformers] position_ids restart within a row, but transformers distinguishes packed documents only if "
            "there is no attention_mask: leave it out"
        )
    mask.documents, mask.gathered = documents, True


# ---- The attention of a layer.

# Arguments that models pass to every attention and that no attention reads.
_HARMLESS = {
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "shift_labels",
    "sliding_window", "use_cache", "cu_seq_lens_k", "cu_seq_lens_q",
}  # fmt: skip


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    group: Group,
    layout: str,
    schedule: str,
    **others: Any,
) -> tuple[Tensor, None]:
    mask = attention_mask
    if not isinstance(mask, Mask):
        raise _refuse(
            "this model has no mask of transformers' mask interface"
            if mask is None
            else f"attention_mask is a {type(mask).__name__} {list(mask.shape)} of its own",
            "pass rows without a mask and documents by position_ids, with a model that uses create_causal_mask or the like",
        )
    if dropout != 0:
        raise _refuse(f"attention_dropout is {dropout}, drawn by PyTorch's generator", "set it to 0")
    for name, given in others.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise _refuse(f"this model's attention takes {name}", 'choose attn_implementation="sdpa" or "eager" for it')
    if others.get("output_attentions"):
        raise _refuse("output_attentions asks for probabilities", "no rank ever holds them all; leave it out")
    if is_causal is not None and is_causal != (mask.right == 0):
        raise _refuse(f"a layer has is_causal={is_causal}, but its mask differs", "change one of them")
    window = others.get("sliding_window")
    if window is not None and mask.left != window - 1:
        raise _refuse(
            f"a layer has sliding_window={window}, but its mask's window is {mask.left and mask.left + 1}",
            "change one of them",
        )
    if size(group) > 1:
        if others.get("use_cache"):
            raise _refuse("a cache of keys over several ranks", "pass use_cache=False")
        balancing = others.get("output_router_logits")
        if balancing is None:
            balancing = getattr(getattr(module, "config", None), "output_router_logits", False)
        if balancing:
            raise _refuse(
                "output_router_logits over several ranks asks for a balancing loss over the tokens of all ranks",
                "set it to False, as an argument and in the configuration",
            )
        if not mask.gathered:
            _gather_documents(mask, others.get("position_ids"), query.shape[0], group, layout)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        _check_boundaries(name, others.get(name), mask)
    out = attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        mask.pattern(key.shape[2]),
        group=group,
        layout=layout,
        schedule=schedule,
        scale=0.0 if scaling is None else scaling,
        layer=getattr(module, "layer_idx", None) or 0,
        query_offset=mask.query_offset,
    )
    return out, None


def _check_boundaries(name: str, boundaries: Tensor | None, mask: Mask) -> None:
    """Checks that boundaries of whole rows, which a collator may also pass, are those of the documents in the position
    ids."""
    if boundaries is None:
        return
    given = boundaries.diff().tolist()
    known = [n for n in (mask.documents or [[sum(given)]])[0] if n > 0]
    if len(mask.documents or [0]) != 1 or [n for n in given if n > 0] != known:
        raise _refuse(f"{name} has documents of {given} tokens, but position_ids has {known}", "make them agree")


_registered: dict[str, tuple[Group, str]] = {}  # group and layout by name


def register(group: Group = None, layout: str = "contiguous", schedule: str = "auto", name: str = "annulus") -> None:
    """Registers `attn_implementation=name` as attention over the ranks of `group`, whose rows are cut by `layout`.

    group, layout, schedule: as in `annulus.attention`. Registering a name again replaces it; several names can serve
    several groups. The group is kept by its name, so that destroy_process_group can end it.
    """
    group = None if group is None else group_name(group)
    _registered[name] = group, layout
    AttentionInterface.register(name, functools.partial(_attend, group=group, layout=layout, schedule=schedule))
    AttentionMaskInterface.register(name, functools.partial(_make_mask, group=group))


def shard_batch(
    batch: Mapping[str, Tensor], layout: str | None = None, group: Group = None, *, name: str = "annulus"
) -> dict[str, Any]:
    """Returns the arguments of a causal language model on this rank, from a batch of whole rows that every rank has.

    batch: input_ids [batch, n]; labels [batch, n], if a loss is wanted; position_ids [batch or 1, n], which restart with
    each packed document. Labels are shifted before they are cut and do not cross documents. The loss that the model then
    returns is this rank's part: the sum over the ranks is the mean over the batch's labels, and the same holds for
    gradients. layout and group: by default those registered under `name`.

    Raises AnnulusError if there is no layout, for padding, and for other keys in the batch.
    """
    if layout is None and name not in _registered:
        raise AnnulusError(
            f"[transformers] no layout is given, and no attention of the name {name!r} is registered: call "
            "annulus.transformers.register first, or pass layout and group"
        )
    registered = _registered.get(name, (None, layout))
    group, layout = registered[0] if group is None else group, layout or registered[1]
    if unknown := set(batch) - {"input_ids", "labels", "position_ids", "attention_mask"}:
        raise AnnulusError(f"[transformers] expected a batch of input_ids, labels and position_ids, but it has {sorted(unknown)}")
    whole = {key: value for key, value in batch.items() if value is not None}
    mask = whole.pop("attention_mask", None)
    if mask is not None and not mask.all():
        raise _refuse("attention_mask has padding", "pack rows instead of padding them")
    ids = whole["input_ids"]
    positions = whole.setdefault("position_ids", torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
    _check_positions(positions)
    whole["position_ids"] = positions.expand(ids.shape)  # so that every entry has a row for each row of the batch
    if "labels" in whole:
        whole["shift_labels"] = shift_labels(whole.pop("labels"), whole["position_ids"])
    part: dict[str, Any] = dict(shard(whole, layout, group), use_cache=False)
    if "shift_labels" in whole:
        part["labels"] = part["shift_labels"]  # models compute a loss only if there are labels
        part["num_items_in_batch"] = int((whole["shift_labels"] != -100).sum())
    return part
