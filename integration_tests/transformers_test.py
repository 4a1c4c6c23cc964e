#!/usr/bin/env python3
"""Tests attn_implementation="annulus" in one process: Llama, Mistral and Qwen 3 against transformers' own attention, and
errors that name a mask that annulus cannot express."""

import os
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import annulus.transformers  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import transformers_models as models  # noqa: E402
from transformers import masking_utils  # noqa: E402

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
            for packed in (False, True):
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

    def test_generates_the_same_tokens_with_a_cache(self):
        ids = models.batch(False)["input_ids"][:, :9]
        for name in models.CONFIGS:
            texts = [
                models.make(name, attention).generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
                for attention in ("annulus", "sdpa")
            ]
            self.assertEqual(*texts)

    def refused(self, words, name="llama", config=(), **given):
        model = models.make(name, "annulus")
        for key, value in config:
            setattr(model.config, key, value)
        batch = {"input_ids": models.batch(False)["input_ids"], "use_cache": False} | given
        with self.assertRaisesRegex(annulus.AnnulusError, r"^\[transformers\] .*" + words):
            model.train()(**batch)

    def test_refuses_what_it_cannot_express(self):
        ones = torch.ones(2, models.LENGTH, dtype=torch.int64)
        padded = ones.clone()
        padded[0, :3] = 0
        self.refused(r"attention_mask hides 3 positions \(padding\)", attention_mask=padded)
        own = torch.ones(2, 1, models.LENGTH, models.LENGTH).tril() > 0
        self.refused("attention_mask is a Tensor", attention_mask=own)
        self.refused("takes softcap", softcap=30.0)
        self.refused("takes s_aux", s_aux=torch.ones(4))
        self.refused("cu_seq_lens_q has documents of", cu_seq_lens_q=torch.tensor([0, 4, 48]))
        models.make("llama", "annulus")(input_ids=models.batch(False)["input_ids"], attention_mask=ones)

        model = models.make("llama", "annulus")
        model.model.layers[0].self_attn.attention_dropout = 0.1
        with self.assertRaisesRegex(annulus.AnnulusError, "attention_dropout is 0.1"):
            model.train()(input_ids=models.batch(False)["input_ids"])

    def test_reads_or_refuses_mask_functions(self):
        embeds = torch.zeros(1, 8, 4)
        config = models.make("mistral", "annulus").config

        def make(maker, **more):
            return maker(config, embeds, None, past_key_values=None, **more)

        mask = make(masking_utils.create_sliding_window_causal_mask)
        self.assertEqual(mask.pattern(8), {"kind": "window", "left": 4, "right": 0})
        ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
        packed = make(masking_utils.create_sliding_window_causal_mask, position_ids=ids)
        self.assertEqual(packed.pattern(8), {"kind": "window", "left": 4, "right": 0, "documents": [[3, 4, 1]]})
        full = masking_utils.create_bidirectional_mask(config, embeds, None)
        self.assertEqual(full.pattern(8), {"kind": "full"})
        both = masking_utils.create_bidirectional_sliding_window_mask(config, embeds, None)
        self.assertEqual(both.pattern(8), {"kind": "window", "left": 5, "right": 5})

        def own(batch, head, q, k):
            return k % 2 == 0

        for more in ({"or_mask_function": own}, {"and_mask_function": own}):
            with self.assertRaisesRegex(annulus.AnnulusError, "is made by (or_masks|.*own)"):
                make(masking_utils.create_causal_mask, **more)
        with self.assertRaisesRegex(annulus.AnnulusError, "is made by or_masks"):
            make(masking_utils.create_causal_mask, block_sequence_ids=torch.zeros(1, 8, dtype=torch.int64))
        config.attention_chunk_size = 4
        with self.assertRaisesRegex(annulus.AnnulusError, "is made by chunked_overlay"):
            make(masking_utils.create_chunked_causal_mask)

    def test_position_ids_of_one_row_apply_to_the_batch(self):
        batch = models.batch(False)
        for ids in (None, batch["position_ids"][:1]):
            part = annulus.transformers.shard_batch(batch | {"position_ids": ids})
            self.assertTrue(torch.equal(part["position_ids"], batch["position_ids"]))

    def test_refuses_invalid_batches(self):
        batch = models.batch(False)
        with self.assertRaisesRegex(annulus.AnnulusError, "but it has \\['pixels'\\]"):
            annulus.transformers.shard_batch(batch | {"pixels": torch.ones(1)})
        with self.assertRaisesRegex(annulus.AnnulusError, "attention_mask has padding"):
            annulus.transformers.shard_batch(batch | {"attention_mask": torch.zeros(2, models.LENGTH)})
        axes = torch.zeros(3, 2, models.LENGTH, dtype=torch.int64)
        with self.assertRaisesRegex(annulus.AnnulusError, r"position_ids are \[3, 2, 24\], not \[batch, n\]"):
            annulus.transformers.shard_batch(batch | {"position_ids": axes})
        with self.assertRaisesRegex(annulus.AnnulusError, "no attention of the name 'other' is registered"):
            annulus.transformers.shard_batch(batch, name="other")


if __name__ == "__main__":
    torch_python.main()
