#!/usr/bin/env python3
"""One rank of attn_implementation="annulus": loss and gradients are those of sdpa in one process, and inputs that would
silently give another mask or other positions are refused on all ranks. Runs under mpirun, or under torchrun over gloo. The
targets transformers_*_test start it."""

import copy
import itertools
import os
import sys
import warnings

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import annulus.transformers  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers_decoders as decoders  # noqa: E402
import transformers_models as models  # noqa: E402
from transformers import AttentionInterface, masking_utils  # noqa: E402

group = None
if "TORCHELASTIC_RUN_ID" in os.environ:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
rank, size = annulus.rank(group), annulus.size(group)

for layout in ("contiguous", "zigzag", "striped"):
    annulus.transformers.register(group, layout)
    for name in models.CONFIGS | (models.ROTARY if layout == "zigzag" else {}):
        for packed in models.packings(name):
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
    model = models.make("mixtral", "annulus")
    for layout in ("contiguous", "zigzag"):
        annulus.transformers.register(group, layout)
        whole = models.batch(True)
        part = annulus.shard({"input_ids": whole["input_ids"]}, layout, group)
        ids = annulus.shard(whole["position_ids"], layout, group)
        # Otherwise rotary positions would silently be wrong.
        refused(f"position ids of each of the {size} ranks count from 0", **part, use_cache=False)
        # A document begins where position ids do not rise, whatever use_cache and a mask that hides nothing say.
        ones = torch.ones_like(part["input_ids"])
        wanted = model(**part, position_ids=ids, use_cache=False).logits
        for how in ({}, {"use_cache": True}, {"attention_mask": ones}, {"attention_mask": ones, "use_cache": False}):
            got = model(**part, position_ids=ids, **how)
            assert torch.equal(got.logits, wanted), (layout, how)
        # Keys of such a call are those of this rank only.
        single = annulus.shard(models.batch(False)["position_ids"], layout, group)
        cache = model(**part, position_ids=single).past_key_values
        more = dict(input_ids=part["input_ids"][:, :1], position_ids=single[:, -1:] + 1, past_key_values=cache)
        refused("a cache of keys over several ranks", **more)

        # What a collator says besides must be the same.
        seq_idx = (whole["position_ids"] == 0).cumsum(1).to(torch.int32)
        got = model(**part, position_ids=ids, seq_idx=annulus.shard(seq_idx, layout, group)).logits
        assert torch.equal(got, wanted), layout
        bounds = torch.tensor([0, 7, 16, 24, 27, 48], dtype=torch.int32)
        got = model(**part, position_ids=ids, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits
        assert torch.equal(got, wanted), layout
        refused(
            "seq_idx has documents of [23, 1]",
            **part,
            position_ids=ids,
            seq_idx=annulus.shard(models.last_alone(), layout, group),
        )
        refused("cu_seq_lens_k has documents of [7, 41]", **part, position_ids=ids, cu_seq_lens_k=bounds[[0, 1, -1]])

        # Positions that one rank hides are hidden from all.
        single = models.batch(False)
        single["attention_mask"] = models.padding("holes")
        got = annulus.unshard(model(**annulus.transformers.shard_batch(single)).logits, layout, group)
        usual, exact = (models.make("mixtral", "sdpa", d)(**single).logits for d in (torch.float32, torch.float64))
        exactness.as_exact(got, usual, exact, layout)

    # Models whose layers outside attention mix positions: in the first call, and where a model is registered.
    for name in models.MIXING:
        model = models.make(name, "annulus")
        refused("mixes positions outside of transformers' attention interface", **annulus.transformers.shard_batch(batch))
        try:
            annulus.transformers.register(group, "contiguous", model=models.make(name, "sdpa"))
            raise AssertionError(f"taken: {name}")
        except annulus.AnnulusError as e:
            assert "mixes positions" in str(e), e
    for mixing in models.Convolution(), models.AboveMean(), models.Index():
        model = models.make("llama", "annulus")
        model.model.layers[1].mlp = torch.nn.Sequential(model.model.layers[1].mlp, mixing)
        what = f"in LlamaForCausalLM, model.layers.1.mlp.1 ({type(mixing).__name__}) "
        refused(what, **annulus.transformers.shard_batch(batch))

    # Models that never call annulus: one without attention, and one that takes the position from the index in a part.
    for kind, words in (
        (transformers.MambaConfig, "mixes positions"),
        (transformers.BartConfig, "takes positions from the index"),
    ):
        config = kind(vocab_size=64, d_model=32, hidden_size=32, state_size=4, decoder_layers=1, num_hidden_layers=1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="annulus")
        refused(words, **annulus.transformers.shard_batch(batch))
    # A loss that is no sum over the labels that a rank was given.
    config = transformers.WhisperConfig(vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=4, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="annulus")
    refused("the loss of WhisperForCausalLM is not the sum over shift_labels", **annulus.transformers.shard_batch(batch))
    model = models.make("llama", "annulus")
    try:
        model.model.forward(
            **annulus.shard({"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}, "contiguous", group)
        )
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "call the model itself and not its forward" in str(e), e

    # To look at a model leaves no trace: neither in a generator, nor in a mode, nor in outputs that are collected.
    model = models.make("dynamic", "annulus").train()
    part = annulus.transformers.shard_batch(models.batch(False))
    state = torch.get_rng_state()
    out = model(**part, output_hidden_states=True)
    assert torch.equal(torch.get_rng_state(), state) and all(m.training for m in model.modules())
    assert len(out.hidden_states) == 4 and out.hidden_states[0].shape[1] == models.LENGTH // size
    # A copy of such a model, whose angles depend on the whole row, and the model itself with another attention.
    want = model.eval()(**part).logits
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**part).logits, want)
    model.set_attn_implementation("sdpa")
    model(**part)
    del model
    assert torch.equal(copied(**part).logits, want)
    model = models.make("mixtral", "annulus")
    model(**annulus.transformers.shard_batch(models.batch(False)))

    # Positions of several axes, as multimodal models pass them to their attention.
    mask = masking_utils.create_causal_mask(model.config, torch.zeros(2, 8, 4), None, past_key_values=None)
    heads = torch.zeros(2, 4, 8, 8)
    axes = torch.zeros(3, 2, 8, dtype=torch.int64)
    try:
        layer = model.model.layers[0].self_attn
        AttentionInterface()["annulus"](layer, heads, heads, heads, mask, position_ids=axes)
        raise AssertionError("taken")
    except annulus.AnnulusError as e:
        assert "position_ids are [3, 2, 8], not [batch, n]" in str(e), e

    # Documents that coincide with contiguous parts look like missing positions; zigzag distinguishes the two.
    batch = models.batch(False)
    batch["position_ids"] = batch["position_ids"] % (models.LENGTH // size)
    annulus.transformers.register(group, "contiguous")
    refused("layout 'zigzag'", **annulus.transformers.shard_batch(batch))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        annulus.transformers.register(group)  # zigzag
    assert [(w.category, w.filename) for w in said] == [(FutureWarning, __file__)], said
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

    # "auto" is chosen with the first batch, and stays. Results are those of the layout by name, also for rows that a user cut,
    # and for position ids that are no longer known by how they were cut.
    model = models.make("llama", "annulus")
    annulus.transformers.register(group, "auto", name="annulus", model=model)
    whole = models.batch(False)
    refused("is chosen where rows are cut", **annulus.shard({k: whole[k].clone() for k in ("input_ids",)}, "zigzag", group))
    part = annulus.transformers.shard_batch(whole)
    chosen = annulus.Sharding(
        "auto", group, length=models.LENGTH, heads=model.config.num_attention_heads, kv_heads=model.config.num_key_value_heads,
        batch=len(whole["input_ids"]),
    ).layout
    assert annulus.sharding_of(part["input_ids"]).layout == chosen, chosen
    got = model(**part), model(**{k: v.clone() if torch.is_tensor(v) else v for k, v in part.items()})
    packed = models.batch(True)
    got += (model(**annulus.transformers.shard_batch(packed)),)
    assert annulus.sharding_of(annulus.transformers.shard_batch(packed)["input_ids"]).layout == chosen
    striped = annulus.shard({k: packed[k] for k in ("input_ids", "position_ids")}, "striped", group)
    got += (model(**striped, use_cache=False),)
    annulus.transformers.register(group, chosen)
    wanted = model(**annulus.transformers.shard_batch(whole)), model(**annulus.transformers.shard_batch(packed))
    for one, want in zip(got, (wanted[0], wanted[0], wanted[1])):
        assert torch.equal(one.logits, want.logits) and torch.equal(one.loss, want.loss), chosen
    annulus.transformers.register(group, "striped")
    assert torch.equal(got[3].logits, model(**striped, use_cache=False).logits)

    # Rows in another layout than the registered one would have other documents.
    for layout, other in itertools.permutations(("contiguous", "zigzag", "striped"), 2):
        annulus.transformers.register(group, layout)
        for packed in (False, True):
            part = annulus.transformers.shard_batch(models.batch(packed), other, group)
            refused(f"put together in the registered layout '{layout}'", **part)

    # Models of text and pictures pass labels on to the model inside them, which computes no loss; and what its layers multiply
    # by must stay as autograd kept it.
    annulus.transformers.register(group, "zigzag")
    batch = models.batch(False)
    shifted = annulus.shift_labels(batch["labels"], batch["position_ids"])
    for name in ("gemma3", "gemma4"):
        wanted = []
        for dtype in (torch.float32, torch.float64):
            whole = decoders.make(decoders.config(name), "own").to(dtype).eval()
            whole(**batch, shift_labels=shifted, use_cache=False).loss.backward()
            wanted.append(whole.get_input_embeddings().weight.grad)
        model = decoders.make(decoders.config(name), "annulus").eval()
        model(**annulus.transformers.shard_batch(batch)).loss.backward()
        got = annulus.all_reduce(model.get_input_embeddings().weight.grad, group=group)
        exactness.as_exact(got, *wanted, name)

if rank == 0:
    print(f"{size} ranks: loss and gradients of one process", flush=True)
if group is not None:
    torch.distributed.destroy_process_group()
