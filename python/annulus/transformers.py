"""Registers annulus as an attention of transformers (`attn_implementation="annulus"`), in one process or over a group.

    annulus.transformers.register(group=mesh["context"], layout="zigzag")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="annulus")
    loss = model(**annulus.transformers.shard_batch(batch)).loss

The masks of transformers' mask interface are converted exactly (_transformers_masks.py): causal, bidirectional, sliding
windows, packed documents, and padding. Any other mask raises an error that names it, so no layer ever computes with a mask
that differs from the model's. Soft caps of scores (Gemma 2) and sinks (gpt-oss) are those of `annulus.attention`. Over several
ranks a model whose other layers mix positions raises an error (_transformers_probe.py). Users import this module as
annulus.transformers.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import Tensor

from ._errors import AnnulusError

SUPPORTED = ">=4.57,<6"  # also in the metadata of a wheel (tools/wheel/wheel.py); 4.57 is the first with today's masks


def _check_version(version: str) -> None:
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise ImportError(
            f"annulus.transformers needs transformers{SUPPORTED}, but {version} is installed: pip install "
            f"'transformers{SUPPORTED}'"
        )


_check_version(transformers.__version__)

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel  # noqa: E402

from . import _transformers_masks as masks  # noqa: E402
from . import _transformers_probe as probe  # noqa: E402
from ._attention import attention  # noqa: E402
from ._operators import Group, all_reduce, group_name, rank, size  # noqa: E402
from ._sharding import Problem, chosen_layout, cut_of, layout_for, shard, shift_labels  # noqa: E402
from ._transformers_masks import OTHER_ATTENTION, MaskTensor, refusal  # noqa: E402

# ---- The attention of a layer.

# Arguments that models pass to every attention, and that no attention uses.
_HARMLESS = {
    "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "shift_labels",
    "seq_idx", "sliding_window", "use_cache", "cu_seq_lens_k", "cu_seq_lens_q",
}  # fmt: skip


def _widened(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    registered: "_Registered",
    schedule: str,
    within: int,
    **others: Any,
) -> tuple[Tensor, None]:
    if probe.probing():
        return probe.attend(query, key, value), None
    if not isinstance(attention_mask, MaskTensor):
        raise refusal(
            f"{type(module).__name__} has no mask of transformers' mask interface"
            if attention_mask is None
            else f"attention_mask is a {type(attention_mask).__name__} {list(attention_mask.shape)} of its own",
            "pass rows without a mask and documents by position_ids, with a model that uses create_causal_mask or the like",
        )
    mask = attention_mask.mask
    if mask.fault:
        raise AnnulusError(mask.fault)
    if dropout != 0:
        raise refusal(f"attention_dropout is {dropout}, drawn by PyTorch's generator", "set it to 0")
    for name, given in others.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise refusal(f"{type(module).__name__} takes {name}", OTHER_ATTENTION)
    if others.get("output_attentions"):
        raise refusal("output_attentions asks for probabilities", "no rank ever holds them all; leave it out")
    if is_causal is not None and is_causal != (mask.right == 0):
        raise refusal(f"a layer has is_causal={is_causal}, but its mask differs", "change one of them")
    window = others.get("sliding_window")
    if window is not None and mask.left != window - 1:
        raise refusal(
            f"a layer has sliding_window={window}, but its mask's window is {mask.left and mask.left + 1}",
            "change one of them",
        )
    group = registered.group
    layout = registered.layout_of(mask.positions, mask.models_positions, others.get("position_ids"))
    if size(group) > 1:
        if not probe.known(module):
            raise AnnulusError(
                f"[transformers] annulus has not looked whether the layers around {type(module).__name__} can be cut "
                "among ranks: call the model itself and not its forward, or pass it to annulus.transformers.register(..., "
                "model=model)"
            )
        balancing = others.get("output_router_logits")
        if balancing is None:
            balancing = getattr(getattr(module, "config", None), "output_router_logits", False)
        if balancing:
            raise refusal(
                "output_router_logits over several ranks asks for a balancing loss over the tokens of all ranks",
                "set it to False, as an argument and in the configuration",
            )
    boundaries = {name: others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    mask.settle(others.get("position_ids"), others.get("seq_idx"), boundaries, query.shape[0], group, layout)
    # The latent attention of DeepSeek has values of another size than queries and keys. Zeros change neither scores nor sums.
    width = max(query.shape[-1], value.shape[-1])
    out = attention(
        *(_widened(t, width).transpose(1, 2) for t in (query, key, value)),
        mask.text(mask.queries if size(group) > 1 else key.shape[2]),
        group=group,
        layout=layout,
        schedule=schedule,
        within=within,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
        layer=getattr(module, "layer_idx", None) or 0,
        query_offset=mask.query_offset,
    )
    return out[..., : value.shape[-1]].contiguous(), None


@dataclasses.dataclass(eq=False)
class _Registered:
    """What a name stands for. `chosen` is what the layout "auto" is, once rows have been cut by it."""

    group: Group
    layout: str
    heads: int = 1
    kv_heads: int = 0
    schedule: str = "auto"
    within: int = 0
    chosen: str | None = None

    def layout_for(self, rows: Tensor) -> str:
        """Returns the layout by which to cut rows [batch, n]. Collective the first time for "auto"."""
        if self.layout != "auto":
            return self.layout
        if self.chosen is None and size(self.group) == 1:
            self.chosen = "zigzag"  # has all positions, as every layout
        if self.chosen is None:
            problem = Problem(None, None, self.heads, self.kv_heads, rows.shape[0], self.schedule, self.within)
            self.chosen, _ = layout_for("auto", self.group, rows.shape[1], problem)
        assert self.chosen is not None
        return self.chosen

    def layout_of(self, *positions: Tensor | None) -> str:
        """Returns the layout of rows with these position ids."""
        if self.layout != "auto":
            return self.layout
        cuts = [cut for cut in map(cut_of, positions) if cut is not None]
        if cuts:
            return cuts[0].layout
        if self.chosen is None and size(self.group) > 1:
            raise AnnulusError(
                '[transformers] the layout "auto" is chosen where rows are cut, and these were cut elsewhere: cut them with '
                "annulus.transformers.shard_batch, or register the layout by which they are cut"
            )
        return self.chosen or "zigzag"


_registered: dict[str, _Registered] = {}  # by name


def _longest(model: PreTrainedModel) -> Callable[[Tensor], Tensor | None]:
    """Returns a collective function that returns the largest position id over all ranks, or None if the model's attention
    has only one."""
    weak = weakref.ref(model)

    def longest(position_ids: Tensor) -> Tensor | None:
        model = weak()
        registered = _registered.get(model.config._attn_implementation) if model is not None else None
        if registered is None or (ranks := size(group := registered.group)) == 1:
            return None
        each = torch.zeros(ranks, dtype=torch.int64)
        if position_ids.numel() > 0:
            each[rank(group)] = position_ids.max()
        return all_reduce(each, group=group).max()

    return longest


def _call(model: PreTrainedModel, *args: Any, **given: Any) -> Any:
    """Replaces PreTrainedModel.__call__, to check a model before its first forward over several ranks. Neither torch nor
    transformers has a hook for this, and checks in _attend would miss models whose layers never call it."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name in _registered and not probe.probing() and size(_registered[name].group) > 1:
        if not probe.known(model):
            probe.check(model, _longest(model))
        if given.get("labels") is not None and given.get("shift_labels") is not None:
            probe.check_loss(model)
    return torch.nn.Module.__call__(model, *args, **given)


def register(
    group: Group = None,
    layout: str | None = None,
    schedule: str = "auto",
    name: str = "annulus",
    model: PreTrainedModel | None = None,
    within: int = 0,
) -> None:
    """Registers `attn_implementation=name` as attention over the ranks of `group`, with rows sharded by `layout`.

    group, schedule, within: as in `annulus.attention`. layout: zigzag if it is left out; over several ranks with a FutureWarning in
    this version. "auto" is the layout in which causal attention over the rows of the first batch is predicted to take least time, for
    the heads of `model` if it is given; shard_batch chooses it with that batch, together with the other ranks, and keeps it. Rows
    that `annulus.shard` cut keep their layout. Registering a name again replaces it; several groups need several
    names. Only the group's name is stored, so that destroy_process_group can free it.
    model: sets this model's attn_implementation. Over several ranks it is checked now, by three forwards of a few tokens,
    for layers that cannot be sharded; other models are checked before their first call.

    Raises AnnulusError if `model` does not use transformers' attention interface, or a module of it mixes positions outside
    attention.
    """
    group = None if group is None else group_name(group)
    registered = _Registered(group, "auto" if layout == "auto" else chosen_layout(layout, group), schedule=schedule, within=within)
    if model is not None:
        config = model.config.get_text_config()
        registered.heads = getattr(config, "num_attention_heads", None) or 1
        registered.kv_heads = getattr(config, "num_key_value_heads", None) or 0
    _registered[name] = registered
    AttentionInterface.register(name, functools.partial(_attend, registered=registered, schedule=schedule, within=within))
    AttentionMaskInterface.register(name, masks.make_mask)
    if size(group) > 1:
        PreTrainedModel.__call__ = _call
    if model is not None:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise AnnulusError(
                f"[transformers] {type(model).__name__} computes attention itself and not by transformers' attention "
                f"interface, so its attn_implementation stays {model.config._attn_implementation!r}"
            )
        if size(group) > 1:
            probe.check(model, _longest(model))


# The keys of shard_batch: sharded, or passed on for whole rows, as from a collator.
_CUT = {"input_ids", "labels", "position_ids", "attention_mask", "seq_idx"}
_WHOLE = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def shard_batch(
    batch: Mapping[str, Tensor], layout: str | None = None, group: Group = None, *, name: str = "annulus"
) -> dict[str, Any]:
    """Returns this rank's arguments of a causal language model, from a batch of whole rows that every rank passes.

    batch: input_ids [batch, n]; optionally labels [batch, n], for a loss; position_ids [batch or 1, n], which restart with
    each packed document; attention_mask [batch, n], 0 for padding. seq_idx [batch, n] and cu_seq_lens_q, cu_seq_lens_k,
    max_length_q, max_length_k, from DataCollatorWithFlattening, are passed on, and must agree with the position ids. Labels
    are shifted before they are sharded, and do not cross documents. The model's loss is this rank's part: its sum over the
    ranks is the mean over the batch's labels, and likewise for gradients. layout and group: by default those registered
    under `name`. With the layout "auto" the first call is collective (`register`).

    Raises AnnulusError if there is no layout, and for other keys in the batch.
    """
    if layout is None and name not in _registered:
        raise AnnulusError(
            f"[transformers] no layout is given, and no attention of the name {name!r} is registered: call "
            "annulus.transformers.register first, or pass layout and group"
        )
    registered = _registered.get(name, _Registered(group, layout or ""))
    group = registered.group if group is None else group
    layout = layout or registered.layout_for(batch["input_ids"])
    if unknown := set(batch) - _CUT - _WHOLE:
        raise AnnulusError(
            f"[transformers] expected a batch of {', '.join(sorted(_CUT | _WHOLE))}, but it has {sorted(unknown)}"
        )
    whole = {key: value for key, value in batch.items() if value is not None and key in _CUT}
    mask = whole.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise refusal(f"attention_mask is {list(mask.shape)}, not [batch, n]", "pass documents by position_ids")
    if mask is not None and mask.all():
        del whole["attention_mask"]
    ids = whole["input_ids"]
    positions = whole.setdefault("position_ids", torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
    masks.check_positions(positions)
    whole["position_ids"] = positions.expand(ids.shape)  # so that every entry has a row for each row of the batch
    if "labels" in whole:
        whole["shift_labels"] = shift_labels(whole.pop("labels"), whole["position_ids"])
    part: dict[str, Any] = dict(shard(whole, layout, group), use_cache=False)
    part |= {key: batch[key] for key in _WHOLE if batch.get(key) is not None}
    if "shift_labels" in whole:
        part["labels"] = part["shift_labels"]  # models compute a loss only if there are labels
        part["num_items_in_batch"] = int((whole["shift_labels"] != -100).sum())
    return part
