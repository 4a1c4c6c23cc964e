#!/usr/bin/env python3
"""Tests annulus.attention(..., return_lse=True) in one process: values and gradients of lse, and where it has none."""

import os
import sys
import unittest

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()

import annulus  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import torch_reference  # noqa: E402

ADAPTIVE = {"kind": "blocks", "map": "adaptive", "block": 16, "keep": 2}
PATTERNS = [
    {"kind": "full"},
    {"kind": "causal"},
    {"kind": "window", "left": 3, "right": -1},
    {"kind": "window", "left": -1, "right": 2},
    {"kind": "documents", "documents": [4, 7, 6]},
    {"kind": "union", "of": [{"kind": "causal"}, {"kind": "window", "left": 2, "right": 0}]},
]
DILATED = {"kind": "dilated", "segment_lengths": [4, 8], "dilation_rates": [1, 2]}


def inputs(length=17, dtype=torch.float64, grad=True):
    return [torch.randn(2, length, h, 8, dtype=dtype, requires_grad=grad) for h in (4, 2, 2)]


def reference(q, k, v, pattern):
    return torch_reference.attention(q, k, v, pattern), torch_reference.lse(q, k, pattern)


class Lse(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(2)

    def test_values_and_gradients_match_the_reference(self):
        for pattern in PATTERNS:
            with self.subTest(pattern=pattern):
                x = inputs()
                got, want = annulus.attention(*x, pattern, return_lse=True), reference(*x, pattern)
                for a, b in zip(got, want):
                    exactness.agree(a, b)
                weights = [torch.randn_like(t) for t in want]
                for used in ([0, 1], [0], [1]):  # both have a gradient, or one of them
                    grads = [
                        torch.autograd.grad([y[i] for i in used], x, [weights[i] for i in used], True, allow_unused=True)
                        for y in (got, want)
                    ]
                    for a, b in zip(*grads):
                        exactness.agree(a, torch.zeros_like(a) if b is None else b)

    def test_gradcheck(self):
        def run(*x):
            out, lse = annulus.attention(*x, pattern, scale=0.7, return_lse=True)
            return out, lse.masked_fill(lse.isinf(), 0)  # of queries without keys, for numerical derivatives

        for pattern in (DILATED, DILATED | {"combine": "mean"}, {"kind": "causal"}):
            self.assertTrue(torch.autograd.gradcheck(run, inputs(), fast_mode=True))
        pattern = ADAPTIVE
        self.assertTrue(torch.autograd.gradcheck(run, inputs(64), fast_mode=True))

    def test_narrower_dtypes(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = [t.detach().requires_grad_() for t in inputs(33, dtype)]
            exact = [t.detach().double().requires_grad_() for t in x]
            got, usual, right = (
                annulus.attention(*x, return_lse=True),
                reference(*x, {"kind": "causal"}),
                reference(*exact, {"kind": "causal"}),
            )
            self.assertEqual((got[0].dtype, got[1].dtype), (dtype, torch.float32))
            weights = torch.randn_like(got[0]), torch.randn_like(got[1])
            grads = [
                torch.autograd.grad(y, of, [w.to(t.dtype) for w, t in zip(weights, y)])
                for y, of in ((got, x), (usual, x), (right, exact))
            ]
            # Gradients are sums of differences of products of 8 elements, times an element: about 10 in sum.
            for a, b, c in zip((*got, *grads[0]), (*usual, *grads[1]), (*right, *grads[2])):
                exactness.as_exact(a, b, c, dtype, terms=10, dtype=dtype)

    def test_partial_results_can_be_merged(self):
        """Keys in two parts, whose results are merged by lse, with the gradients of attention over all of them."""
        x = inputs()
        q, k, v = x
        full = {"kind": "full"}
        parts = [annulus.attention(q, k[:, s], v[:, s], full, return_lse=True) for s in (slice(5), slice(5, None))]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(o * (part - lse).exp().transpose(1, 2).unsqueeze(-1) for o, part in parts)
        want = torch_reference.attention(*x, full)
        exactness.agree(out, want)
        weight = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(out, x, weight), torch.autograd.grad(want, x, weight)):
            exactness.agree(a, b)

    def test_a_query_without_keys(self):
        q, k, v = inputs()
        out, lse = annulus.attention(q, k, v, {"kind": "window", "left": 2, "right": 0}, query_offset=10, return_lse=True)
        self.assertEqual(lse.isinf().sum(), 2 * 4 * 8)  # queries at positions 19 to 26, of keys up to 16
        self.assertTrue((lse[..., 9:] == -torch.inf).all() and (out[:, 9:] == 0).all())
        weight = torch.randn_like(lse)
        weight[..., 9:] = torch.nan  # whatever the loss makes of -inf
        for a in torch.autograd.grad(lse, (q, k), weight):
            self.assertTrue(a.isfinite().all())

    def test_is_the_same_attention(self):
        x = inputs(dtype=torch.float32)
        plain = annulus.attention(*x)
        out, lse = annulus.attention(*x, return_lse=True, scale=None)
        self.assertTrue(torch.equal(out, plain))
        for a, b in zip(*(torch.autograd.grad(t.square().sum(), x) for t in (out, plain))):
            self.assertTrue(torch.equal(a, b))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = annulus.attention(*x, return_lse=True)
            self.assertEqual((out.dtype, lse.dtype), (torch.bfloat16, torch.float32))
        out, lse = annulus.attention(*(t.to("meta") for t in x), return_lse=True)
        self.assertEqual((out.shape, lse.shape, lse.dtype), (x[0].shape, (2, 4, 17), torch.float32))

    def test_scale(self):
        x = inputs()
        usual = annulus.attention(*x)
        for scale in (None, 0, 0.0, 1 / 8**0.5):
            self.assertTrue(torch.equal(annulus.attention(*x, scale=scale), usual))
            self.assertTrue(torch.equal(torch.ops.annulus.attention(*x, "{ kind = 'causal' }", scale=scale), usual))
        self.assertFalse(torch.equal(annulus.attention(*x, scale=0.5), usual))

    def test_dropout_leaves_lse_without_a_gradient(self):
        x = inputs()
        settings = dict(dropout=0.5, seed=3)
        out, lse = annulus.attention(*x, **settings, return_lse=True)
        self.assertTrue(torch.equal(lse, annulus.attention(*x, return_lse=True)[1]))
        plain = annulus.attention(*x, **settings)
        for a, b in zip(*(torch.autograd.grad(t.sum(), x) for t in (out, plain))):
            self.assertTrue(torch.equal(a, b))
        out, lse = annulus.attention(*x, **settings, return_lse=True)
        with self.assertRaisesRegex(annulus.AnnulusError, r"^\[torch\] with dropout lse has no gradient"), annulus.errors():
            (out.sum() + lse.sum()).backward()

    def test_compiles_and_passes_opcheck(self):
        x = inputs()

        def loss(q, k, v):
            out, lse = annulus.attention(torch.sin(q), k, v, {"kind": "causal"}, return_lse=True)
            return out.square().sum() + lse.sin().sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for a, b in zip(*(torch.autograd.grad(f(*x), x) for f in (compiled, loss))):
            exactness.agree(a, b)
        op = torch.ops.annulus.attention_with_lse.default
        for grad in (True, False):
            torch.library.opcheck(op, (*inputs(grad=grad), "{ kind = 'causal' }"), dict(scale=0.3))

    def test_second_derivatives_are_refused(self):
        q, k, v = inputs()
        for y in annulus.attention(q, k, v, return_lse=True):
            (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True, retain_graph=True)
            with self.assertRaisesRegex(annulus.AnnulusError, r"^\[torch\] attention has first derivatives only"):
                with annulus.errors():
                    torch.autograd.grad(dq.sum(), k)
        settings = (None, None, "{ kind = 'causal' }", "", "contiguous", "auto", 0, None, 0.0, 0, 0, 0, 0, 0, 0.0, False, True)
        out = torch.ops.annulus.attention_forward(q, k, v, *settings)[0]
        with self.assertRaisesRegex(RuntimeError, r"^\[torch\] attention_forward has no gradient of its own"):
            out.sum().backward()


if __name__ == "__main__":
    torch_python.main()
