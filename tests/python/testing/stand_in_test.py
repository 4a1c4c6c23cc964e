#!/usr/bin/env python3
"""Tests of the stand-in for flash-attn on CPUs against the definition: what is judged with it must not be wrong because of it."""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.getcwd(), "integration_tests"))
import torch_python  # noqa: E402

torch_python.enter()
sys.path.insert(0, os.path.join(os.getcwd(), "examples", "conformance", "stand_ins"))

import torch  # noqa: E402
from annulus.testing.conformance._definition import attend  # noqa: E402
from flash_attn import flash_attn_func, flash_attn_interface, flash_attn_varlen_func  # noqa: E402

SCALE = 0.3


def drawn(queries, keys, batch=2, heads=4, kv_heads=2, size=8):
    torch.manual_seed(1)
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    return [torch.randn(batch, n, h, size) for n, h in shapes]


def seen(queries, keys, causal=False, window=(-1, -1)):
    """The mask of flash-attn's documentation: aligned at the bottom right."""
    apart = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window[0], 0 if causal else window[1]
    return (apart >= -left if left >= 0 else apart == apart) & (apart <= right if right >= 0 else apart == apart)


def gradients(function, tensors, dout):
    tensors = [t.clone().requires_grad_() for t in tensors]
    out, lse = function(*tensors)
    out.backward(dout)
    return [out.detach(), lse.detach(), *(t.grad for t in tensors)]


class StandInTest(unittest.TestCase):
    def equal(self, got, want):
        for g, w in zip(got, want, strict=True):
            self.assertEqual(g.shape, w.shape)
            torch.testing.assert_close(g.double(), w.double(), rtol=1e-4, atol=1e-5)  # fp32 sums of some ten terms

    def test_masks_forward_and_backward(self):
        for queries, keys, settings in [
            (13, 13, {}), (13, 13, {"causal": True}), (7, 13, {"causal": True}), (13, 13, {"window_size": (4, 2)}),
            (9, 13, {"causal": True, "window_size": (5, 0)}), (13, 7, {"causal": True}),
        ]:
            with self.subTest(queries=queries, keys=keys, **settings):
                *tensors, dout = drawn(queries, keys)
                counted = seen(queries, keys, settings.get("causal", False), settings.get("window_size", (-1, -1)))
                got = gradients(
                    lambda *t: flash_attn_func(*t, softmax_scale=SCALE, return_attn_probs=True, **settings)[:2], tensors, dout
                )
                want = gradients(lambda *t: attend(*t, counted, SCALE), [t.double() for t in tensors], dout.double())
                want[1] = want[1].masked_fill(want[1] == -torch.inf, torch.inf)  # as FlashAttention 2 has it
                self.equal(got, want)

    def test_documents(self):
        *tensors, dout = drawn(13, 13, batch=1)
        ends = torch.tensor([0, 3, 4, 13], dtype=torch.int32)
        of = torch.bucketize(torch.arange(13), ends[1:], right=True)
        counted = seen(13, 13, causal=True) & (of[:, None] == of[None, :])

        def packed(*t):
            out, lse, _ = flash_attn_varlen_func(
                *(x[0] for x in t), ends, ends, 9, 9, softmax_scale=SCALE, causal=True, return_attn_probs=True
            )
            return out[None], lse[None]

        want = gradients(lambda *t: attend(*t, counted, SCALE), [t.double() for t in tensors], dout.double())
        self.equal(gradients(packed, tensors, dout), want)

    def test_a_block_of_keys_with_the_merged_out_and_lse(self):
        """The backward of a ring: each block's gradients add up to those of all keys."""
        q, k, v, dout = drawn(11, 12)
        want = gradients(lambda *t: attend(*t, seen(11, 12), SCALE), [q.double(), k.double(), v.double()], dout.double())
        out, lse = want[0].float(), want[1].float()
        dq, parts = torch.zeros_like(q), []
        for block in (slice(0, 5), slice(5, 12)):
            grads = [torch.empty_like(t) for t in (q, k[:, block], v[:, block])]
            flash_attn_interface._flash_attn_backward(
                dout, q, k[:, block], v[:, block], out, lse, *grads, 0.0, SCALE, False, -1, -1, 0.0, None, False
            )
            dq += grads[0]
            parts.append(grads[1:])
        self.equal([dq, *(torch.cat(p, 1) for p in zip(*parts))], want[2:])

    def test_what_it_has_not_is_refused(self):
        q, k, v, _ = drawn(4, 4)
        for settings in ({"dropout_p": 0.1}, {"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}):
            with self.assertRaisesRegex(NotImplementedError, "no dropout, soft cap, ALiBi"):
                flash_attn_func(q, k, v, **settings)


if __name__ == "__main__":
    torch_python.main()
