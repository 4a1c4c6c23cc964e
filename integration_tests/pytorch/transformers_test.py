#!/usr/bin/env python3
"""Tests attn_implementation="annulus" in one process: Llama, Mistral, Qwen 3 and Mixtral against transformers' own
attention, with documents, padding and caches, and errors that name a mask that annulus cannot express."""

import functools
import os
import sys
import unittest
import unittest.mock

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import annulus.transformers  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import transformers_models as models  # noqa: E402
from annulus import _transformers_masks  # noqa: E402
from transformers import AttentionInterface, BloomConfig, DataCollatorWithFlattening, GPTJConfig, masking_utils  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

annulus.transformers.register()


class Transformers(unittest.TestCase):
    def run_model(self, name, attention, packed, dtype=torch.float32, **how):
        model = models.make(name, attention, dtype)
        batch = models.batch(packed)
        if attention == "annulus":
            out = model(**annulus.transformers.shard_batch(batch), **how)
        else:
            shifted = annulus.shift_labels(batch["labels"], batch["position_ids"])
            out = model(**batch, shift_labels=shifted, use_cache=False, **how)
        out.loss.backward()
        return out.loss.item(), models.gradients(model)

    def test_losses_and_gradients_match_sdpa_and_eager(self):
        for name in models.CONFIGS:
            for packed in models.packings(name):
                got, exact = self.run_model(name, "annulus", packed), self.run_model(name, "sdpa", packed, torch.float64)
                for attention in ("sdpa", "eager"):
                    usual = self.run_model(name, attention, packed)
                    models.assert_as_exact(got, usual, exact, (name, packed, attention))

    def test_documents_and_windows_change_the_result(self):
        """The results compared above differ from those of plain causal attention."""
        plain = models.make("llama", "annulus")(**annulus.transformers.shard_batch(models.batch(False))).logits
        batch = models.batch(True)
        self.assertGreater((models.make("llama", "annulus")(**batch, use_cache=False).logits - plain).abs().max(), 1e-3)
        masks = []
        for attention, dtype in (("annulus", torch.float32), ("sdpa", torch.float32), ("sdpa", torch.float64)):
            model = models.make("mistral", attention, dtype)
            masks.append(model(**models.batch(False)).logits)
            model.config.sliding_window = None
            self.assertGreater((model(**models.batch(False)).logits - masks[-1]).abs().max(), 1e-3)
        exactness.as_exact(*masks)

    def test_checkpointing_and_autocast_keep_the_loss(self):
        model = models.make("qwen3", "annulus")
        batch = annulus.transformers.shard_batch(models.batch(True))
        wanted = self.run_model("qwen3", "annulus", True)
        for reentrant in (False, True):
            model.zero_grad()
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            loss = model(**batch).loss
            loss.backward()
            got = loss.item(), models.gradients(model)
            models.assert_as_exact(got, wanted, self.run_model("qwen3", "sdpa", True, torch.float64), reentrant)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, usual = model(**batch).loss, torch.tensor(self.run_model("qwen3", "sdpa", True)[0])
            exactness.as_exact(got, usual, torch.tensor(wanted[0]), dtype=torch.bfloat16)

    def assert_logits_as_sdpa(self, name, given, instead=(), places=None):
        """`instead`: arguments of the model with sdpa that differ. Its logits are compared at `places`."""
        usual, exact = (models.make(name, "sdpa", d)(**given | dict(instead)).logits for d in (torch.float32, torch.float64))
        got = models.make(name, "annulus")(**given).logits
        places = torch.ones(2, models.LENGTH) > 0 if places is None else places
        exactness.as_exact(got[places], usual[places], exact[places], (name, list(given)))

    def test_documents_begin_where_position_ids_do_not_rise(self):
        """Whatever use_cache and a mask of ones say, with which transformers does not look for documents."""
        batch = models.batch(True)
        del batch["labels"]
        alone = {"use_cache": False, "attention_mask": None}
        ones = torch.ones(2, models.LENGTH, dtype=torch.int64)
        for name in models.CONFIGS.keys() - models.UNPACKED:
            for how in ({}, {"use_cache": True}, {"attention_mask": ones}, {"attention_mask": ones, "use_cache": False}):
                self.assert_logits_as_sdpa(name, batch | how, alone)
        # An id that repeats begins a document as well: the second of these rows is one with a document of one position.
        repeated = batch | {"position_ids": torch.stack([torch.arange(24), torch.tensor([0, *range(23)])])}
        self.assert_logits_as_sdpa("llama", repeated, alone)

    def test_what_else_names_documents_must_agree(self):
        rows = [{"input_ids": list(range(3, 3 + n))} for n in (7, 9, 8)]
        batch = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows))
        model = models.make("llama", "annulus")
        wanted = model(**batch | {"use_cache": False}).loss
        plain = {key: batch[key] for key in ("input_ids", "labels", "position_ids")}
        self.assertEqual(wanted, model(**plain).loss)
        out = model(**annulus.transformers.shard_batch(batch))
        exactness.as_exact(out.loss, wanted, models.make("llama", "sdpa", torch.float64)(**plain, use_cache=False).loss)
        for other in (batch["seq_idx"] * 0, models.last_alone()[:1]):
            with self.assertRaisesRegex(annulus.AnnulusError, r"seq_idx has documents of .* but position_ids has \[7, 9, 8\]"):
                model(**batch | {"seq_idx": other})
        for missing in ("position_ids", "seq_idx"):
            with self.assertRaisesRegex(annulus.AnnulusError, "has documents of"):
                model(**batch | {missing: None if missing == "position_ids" else torch.zeros(1, 24, dtype=torch.int32)})

    def test_positions_that_a_mask_does_not_get_or_that_jump_are_refused(self):
        batch = models.batch(True)
        del batch["labels"]
        real = modeling_llama.create_causal_mask
        with unittest.mock.patch.object(
            modeling_llama, "create_causal_mask", lambda **more: real(**more | {"position_ids": None})
        ):
            for how in ({}, {"use_cache": False}):
                self.refused("LlamaModel does not pass them to its mask", **batch | how)
            models.make("llama", "annulus")(**models.batch(False))
        jumping = torch.arange(24).expand(2, 24).clone()
        jumping[1, 9:] += 5
        for how in ({}, {"use_cache": False}, {"attention_mask": torch.ones(2, 24)}):
            self.refused("they jump to 14 at index 9 of batch row 1", position_ids=jumping, **how)
        model = models.make("llama", "annulus")
        cache = model(**batch, use_cache=True).past_key_values
        with self.assertRaisesRegex(annulus.AnnulusError, "this cache was filled with packed documents"):
            model(input_ids=batch["input_ids"][:, :1], past_key_values=cache)
        cache = model(input_ids=batch["input_ids"][:, :3], use_cache=True).past_key_values
        with self.assertRaisesRegex(annulus.AnnulusError, "restart within a row that continues a cache"):
            model(input_ids=batch["input_ids"][:, 3:6], position_ids=torch.tensor([[3, 0, 1]] * 2), past_key_values=cache)

    def test_padding_hides_keys(self):
        ids = models.batch(False)["input_ids"]
        for name in models.CONFIGS:
            # In fp64 eager attention gives NaN where a query sees nothing, since its softmax is computed in fp32.
            for where in ("right",) if name in models.EAGER else ("left", "right", "holes"):
                mask = models.padding(where)
                for positions in (None, (mask.cumsum(1) - 1).clamp(min=0)):
                    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
                    self.assert_logits_as_sdpa(name, given, {"use_cache": False}, mask > 0)
        # Padding does not hide where documents begin, and a row without any key is no error.
        mask = models.padding("holes")
        packed = {"input_ids": ids, "position_ids": models.batch(True)["position_ids"], "attention_mask": mask}
        tree = (packed["position_ids"] == 0).cumsum(1)
        own = (tree[:, None, :, None] == tree[:, None, None, :]) & (mask[:, None, None, :] > 0)
        own = own & torch.ones(models.LENGTH, models.LENGTH).tril().bool()
        self.assert_logits_as_sdpa("llama", packed, {"attention_mask": own}, mask > 0)
        mask = models.padding("all")
        self.assert_logits_as_sdpa("llama", {"input_ids": ids, "attention_mask": mask}, {"use_cache": False}, mask > 0)

    def test_generates_the_same_tokens_with_a_cache(self):
        ids = models.batch(False)["input_ids"][:, :9]
        padded = torch.ones_like(ids)
        padded[0, :3] = 0
        for name in models.CONFIGS:
            for cache in (None, "static"):
                for mask in (None, padded):
                    how = dict(
                        max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation=cache, attention_mask=mask
                    )
                    texts = [models.make(name, attention).generate(ids, **how) for attention in ("annulus", "sdpa")]
                    self.assertEqual(*(text.tolist() for text in texts))
                # A padded row has the text that it has alone.
                alone = models.make(name, "annulus").generate(ids[:1, 3:], **how | {"attention_mask": None})
                self.assertEqual(texts[0][0, 3:].tolist(), alone[0].tolist())

    def refused(self, words, name="llama", config=(), **given):
        model = models.make(name, "annulus")
        for key, value in config:
            setattr(model.config, key, value)
        batch = {"input_ids": models.batch(False)["input_ids"], "use_cache": False} | given
        with self.assertRaisesRegex(annulus.AnnulusError, r"^\[transformers\] .*" + words):
            model.train()(**batch)

    def test_refuses_what_it_cannot_express(self):
        ones = torch.ones(2, models.LENGTH, dtype=torch.int64)
        own = torch.ones(2, 1, models.LENGTH, models.LENGTH).tril() > 0
        self.refused("attention_mask is a Tensor", attention_mask=own)
        self.refused("takes an_unknown_argument", an_unknown_argument=30.0)
        self.refused("GptOssModel does not pass them to its mask", "gpt_oss", position_ids=models.batch(True)["position_ids"])
        self.refused(r"cu_seq_lens_q has documents of \[4, 44\] tokens, but position_ids has \[24, 24\]",
                     cu_seq_lens_q=torch.tensor([0, 4, 48]))  # fmt: skip
        models.make("llama", "annulus")(input_ids=models.batch(False)["input_ids"], attention_mask=ones)

        model = models.make("llama", "annulus")
        model.model.layers[0].self_attn.attention_dropout = 0.1
        with self.assertRaisesRegex(annulus.AnnulusError, "attention_dropout is 0.1"):
            model.train()(input_ids=models.batch(False)["input_ids"])

    def test_refuses_models_that_compute_with_a_mask(self):
        """A mask has the shape of one, but no numbers."""
        config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
        bloom = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="annulus")
        with self.assertRaisesRegex(annulus.AnnulusError, r"BloomModel computes with its attention mask as a tensor \(add\)"):
            bloom(models.batch(False)["input_ids"])
        config = models.make("llama", "annulus").config
        mask = masking_utils.create_causal_mask(config, torch.zeros(2, 8, 4), None, past_key_values=None)
        self.assertEqual((mask.shape, mask.dtype, mask.ndim), ((2, 1, 8, 8), torch.bool, 4))
        for same in (mask.contiguous(), mask.to("cpu"), mask.detach(), mask[:, :, :, :8], mask[..., :4], mask[:, :]):
            self.assertIs(same.mask, mask.mask)
        for compute in (
            lambda m: m + 0, lambda m: 0.5 * m, lambda m: torch.ones(8) - m, lambda m: ~m, lambda m: m[0], lambda m: m.sum(),
            lambda m: m[..., -4:], lambda m: m[:, :, 1:], lambda m: torch.where(m, 1, 0), lambda m: torch.cat([m, m]),
            lambda m: m.data, lambda m: m.tolist(), lambda m: bool(m.all()), lambda m: m.masked_fill_(m, False),
        ):  # fmt: skip
            with self.assertRaisesRegex(annulus.AnnulusError, "computes with its attention mask as a tensor"):
                compute(mask)

    def test_both_forms_of_the_mask_function_are_read(self):
        """That of transformers before 5.4 gets the indices of the queries, not their number and the first."""
        made = _transformers_masks.make_mask
        visible = torch.tensor([[False] * 2 + [True] * 6])
        for older, newer in (
            ({"cache_position": torch.arange(3, 8)}, {"q_length": 5, "q_offset": 3}),
            ({"cache_position": torch.arange(7, 8)}, {"q_length": 1, "q_offset": torch.tensor(7)}),
        ):
            read = functools.partial(made, batch_size=1, kv_length=8, attention_mask=visible)
            masks = [read(**older), read(**newer)]
            self.assertEqual(masks[0].mask.pattern(8), masks[1].mask.pattern(8))
            self.assertEqual(masks[0].shape, masks[1].shape)
            offset = 3 if "q_offset" in newer and newer["q_length"] == 5 else 7
            key = {"queries": [0, 1, 8 - offset], "keys": [2, 1, 6], "batch": [0, 1, 1], "hi": offset}
            self.assertEqual(masks[0].mask.pattern(8), {"kind": "slices", "slices": [key]})

    def test_registers_models(self):
        model = models.make("llama", "sdpa")
        annulus.transformers.register(name="annulus-own", model=model)
        self.assertEqual(model.config._attn_implementation, "annulus-own")
        config = GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
        with self.assertRaisesRegex(annulus.AnnulusError, "GPTJForCausalLM computes attention itself .* stays 'eager'"):
            annulus.transformers.register(model=transformers.AutoModelForCausalLM.from_config(config))

    def test_versions_of_transformers(self):
        for version in ("4.57.6", "5.0.0", "5.24.0.dev0", transformers.__version__):
            annulus.transformers._check_version(version)
        for version in ("4.40.2", "4.56.0", "6.0.0"):
            with self.assertRaisesRegex(ImportError, rf"needs transformers>=4.57,<6, but {version} is installed"):
                annulus.transformers._check_version(version)

    def test_reads_or_refuses_mask_functions(self):
        embeds = torch.zeros(1, 8, 4)
        config = models.make("mistral", "annulus").config

        def make(maker, **more):
            return maker(config, embeds, None, past_key_values=None, **more)

        mask = make(masking_utils.create_sliding_window_causal_mask)
        self.assertEqual(mask.mask.pattern(8), {"kind": "window", "left": 4, "right": 0})
        ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
        packed = make(masking_utils.create_sliding_window_causal_mask, position_ids=ids)
        packed.mask.settle(None, None, {}, 1, None, "contiguous")
        self.assertEqual(packed.mask.pattern(8), {"kind": "window", "left": 4, "right": 0, "documents": [[3, 4, 1]]})
        full = masking_utils.create_bidirectional_mask(config, embeds, None)
        self.assertEqual(full.mask.pattern(8), {"kind": "full"})
        both = masking_utils.create_bidirectional_sliding_window_mask(config, embeds, None)
        self.assertEqual(both.mask.pattern(8), {"kind": "window", "left": 5, "right": 5})

        def own(batch, head, q, k):
            return k % 2 == 0

        def refused(words, maker, **more):
            """Where a layer uses the mask: models may make one that none of their layers uses."""
            heads = torch.zeros(1, 1, 8, 4)
            with self.assertRaisesRegex(annulus.AnnulusError, "which annulus cannot express") as raised:
                AttentionInterface()["annulus"](torch.nn.Identity(), heads, heads, heads, make(maker, **more))
            self.assertRegex(str(raised.exception), "is made by " + words)

        for more in ({"or_mask_function": own}, {"and_mask_function": own}):
            refused("(or_masks|.*own)", masking_utils.create_causal_mask, **more)
        refused("or_masks", masking_utils.create_causal_mask, block_sequence_ids=torch.zeros(1, 8, dtype=torch.int64))
        config.attention_chunk_size, config.sliding_window = 4, 0
        refused("chunked_overlay", masking_utils.create_chunked_causal_mask)
        refused("sliding_window_overlay", masking_utils.create_sliding_window_causal_mask)

    def test_position_ids_of_one_row_apply_to_the_batch(self):
        batch = models.batch(False)
        for ids in (None, batch["position_ids"][:1]):
            part = annulus.transformers.shard_batch(batch | {"position_ids": ids})
            self.assertTrue(torch.equal(part["position_ids"], batch["position_ids"]))

    def test_refuses_invalid_batches(self):
        batch = models.batch(False)
        with self.assertRaisesRegex(annulus.AnnulusError, "but it has \\['pixels'\\]"):
            annulus.transformers.shard_batch(batch | {"pixels": torch.ones(1)})
        with self.assertRaisesRegex(annulus.AnnulusError, r"attention_mask is \[2, 1, 24, 24\], not \[batch, n\]"):
            annulus.transformers.shard_batch(batch | {"attention_mask": torch.zeros(2, 1, 24, 24)})
        axes = torch.zeros(3, 2, models.LENGTH, dtype=torch.int64)
        with self.assertRaisesRegex(annulus.AnnulusError, r"position_ids are \[3, 2, 24\], not \[batch, n\]"):
            annulus.transformers.shard_batch(batch | {"position_ids": axes})
        with self.assertRaisesRegex(annulus.AnnulusError, "no attention of the name 'other' is registered"):
            annulus.transformers.shard_batch(batch, name="other")


if __name__ == "__main__":
    torch_python.main()
