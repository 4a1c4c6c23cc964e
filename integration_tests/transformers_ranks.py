#!/usr/bin/env python3
"""One rank of attn_implementation="annulus": loss and gradients are those of sdpa in one process, and inputs that would
silently give another mask or other positions are refused on all ranks. Runs under mpirun, or under torchrun over gloo. The
targets transformers_*_test start it."""

import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import annulus.transformers  # noqa: E402
import torch  # noqa: E402
import transformers_models as models  # noqa: E402
from transformers import AttentionInterface, masking_utils  # noqa: E402

group = None
if "TORCHELASTIC_RUN_ID" in os.environ:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
rank, size = annulus.rank(group), annulus.size(group)

for layout in ("contiguous", "zigzag", "striped"):
    annulus.transformers.register(group, layout)
    for name in models.CONFIGS:
        for packed in (False, True):
            batch = models.batch(packed)
            shifted = annulus.shift_labels(batch["labels"], batch["position_ids"])
            wanted = []
            for dtype in (torch.float32, torch.float64):
                whole = models.make(name, "sdpa", dtype)
                loss = whole(**batch, shift_labels=shifted, use_cache=False).loss
                loss.backward()
                wanted.append((loss.item(), models.gradients(whole)))

            model = models.make(name, "annulus")
            loss = model(**annulus.transformers.shard_batch(batch)).loss
            loss.backward()
            loss = annulus.all_reduce(loss.detach(), group=group)
            grads = {n: annulus.all_reduce(g, group=group) for n, g in models.gradients(model).items()}
            models.assert_as_exact((loss.item(), grads), *wanted, (layout, name, packed))


def refused(words, **given):
    try:
        model(**given)
        raise AssertionError(f"taken: {words}")
    except annulus.AnnulusError as e:
        assert words in str(e), e


if size > 1:
    for layout in ("contiguous", "zigzag"):
        annulus.transformers.register(group, layout)
        whole = models.batch(True)
        part = annulus.shard({"input_ids": whole["input_ids"]}, layout, group)
        ids = annulus.shard(whole["position_ids"], layout, group)
        # Otherwise rotary positions would silently be wrong.
        refused(f"position ids of each of the {size} ranks count from 0", **part, use_cache=False)
        ones = torch.ones_like(part["input_ids"])
        refused("there is no attention_mask", **part, position_ids=ids, attention_mask=ones, use_cache=False)
        padding = ones.clone()
        padding[0, 0] = rank  # on the first rank only
        hiding = dict(part, position_ids=ids, attention_mask=padding, use_cache=False)
        refused("attention_mask hides 1 positions (padding)", **hiding)
        refused("a cache of keys over several ranks", **part, position_ids=ids, use_cache=True)
        # One document, with an attention_mask that hides nothing.
        single = annulus.shard(models.batch(False)["position_ids"], layout, group)
        model(**part, position_ids=single, attention_mask=ones, use_cache=False)

    # Positions of several axes, as multimodal models pass them to their attention.
    mask = masking_utils.create_causal_mask(model.config, torch.zeros(2, 8, 4), None, past_key_values=None)
    heads = torch.zeros(2, 4, 8, 8)
    axes = torch.zeros(3, 2, 8, dtype=torch.int64)
    try:
        AttentionInterface()["annulus"](model, heads, heads, heads, mask, position_ids=axes)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "position_ids are [3, 2, 8], not [batch, n]" in str(e), e

    # Documents that coincide with contiguous parts look like missing positions; zigzag distinguishes the two.
    batch = models.batch(False)
    batch["position_ids"] = batch["position_ids"] % (models.LENGTH // size)
    annulus.transformers.register(group, "contiguous")
    refused("layout 'zigzag'", **annulus.transformers.shard_batch(batch))
    annulus.transformers.register(group, "zigzag")
    model(**annulus.transformers.shard_batch(batch))

    # The balancing loss of experts is not a sum over tokens.
    part = annulus.transformers.shard_batch(models.batch(True))
    plain = model
    model = models.make("mixtral", "annulus")
    refused("output_router_logits over several ranks", **part, output_router_logits=True)
    model.config.output_router_logits = True
    refused("output_router_logits over several ranks", **part)
    model(**part, output_router_logits=False)
    model = plain

    # Rows in another layout than the registered one would have other documents.
    for layout, other in itertools.permutations(("contiguous", "zigzag", "striped"), 2):
        annulus.transformers.register(group, layout)
        for packed in (False, True):
            part = annulus.transformers.shard_batch(models.batch(packed), other, group)
            refused(f"put together in the registered layout '{layout}'", **part)

if rank == 0:
    print(f"{size} ranks: loss and gradients of one process", flush=True)
if group is not None:
    torch.distributed.destroy_process_group()
