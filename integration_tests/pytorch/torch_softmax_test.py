#!/usr/bin/env python3
"""Tests annulus.attention with sinks and soft caps of scores in one process: values and gradients are those of transformers'
eager attention of gpt-oss and Gemma 2, and PyTorch can do with them what it does with any operator."""

import functools
import itertools
import math
import os
import sys
import unittest
from types import SimpleNamespace

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import annulus  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import torch_reference  # noqa: E402
from transformers.models.gemma2 import modeling_gemma2 as gemma2  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss  # noqa: E402

CAUSAL = {"kind": "causal"}
PATTERNS = [CAUSAL, {"kind": "full"}, {"kind": "window", "left": 3, "right": 0}, {"kind": "documents", "documents": [4, 7, 6]}]


def inputs(length=17, dtype=torch.float64, grad=True):
    """Returns q, k, v and sinks."""
    shapes = [(2, length, h, 8) for h in (4, 2, 2)] + [(4,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def eager(forward, q, k, v, pattern, **settings):
    """One of transformers' functions, on tensors of this library's shapes."""
    mask = torch_reference.count(pattern, q.shape[1], k.shape[1]).log().to(q)
    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False, head_dim=q.shape[3])
    module.sinks = settings.pop("sinks", None)
    return forward(module, *(t.transpose(1, 2) for t in (q, k, v)), mask, scaling=q.shape[3] ** -0.5, **settings)[0]


def dense(q, k, v, sinks, pattern, softcap=0.0):
    """Both together by their definitions: (out, lse)."""
    bias = torch_reference.count(pattern, q.shape[1], k.shape[1]).log().to(q)
    score = torch_reference.scores(q, k, {"kind": "full"})
    score = (softcap * torch.tanh(score / softcap) if softcap else score) + bias
    score = torch.cat([score, sinks.to(q).view(1, -1, 1, 1).expand(*score.shape[:3], 1)], -1)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], 2).transpose(1, 2)
    return (torch.softmax(score, -1)[..., :-1] @ v).transpose(1, 2), torch.logsumexp(score, -1)


class Softmax(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(4)

    def assert_same(self, got, want, x, what=""):
        exactness.agree(got, want, what)
        dout = torch.randn_like(want)
        grads = [torch.autograd.grad(y, x, dout, retain_graph=True) for y in (got, want)]
        for a, b in zip(*grads):
            exactness.agree(a, b, what)

    def test_sinks_are_those_of_gpt_oss(self):
        for pattern in PATTERNS:
            q, k, v, sinks = x = inputs()
            want = eager(gpt_oss.eager_attention_forward, q, k, v, pattern, sinks=sinks)
            self.assert_same(annulus.attention(q, k, v, pattern, sinks=sinks), want, x, pattern)

    def test_caps_are_those_of_gemma_2(self):
        # Its softmax is computed in fp32, so results are compared with the definition, and the definition with it.
        for pattern, cap in itertools.product(PATTERNS, (0.5, 50.0)):
            q, k, v, _ = x = inputs()
            want, _ = dense(*x[:3], torch.full((4,), -math.inf), pattern, cap)
            self.assert_same(annulus.attention(q, k, v, pattern, softcap=cap), want, x[:3], (pattern, cap))
            # Each probability is rounded to fp32 twice, and a sum of them multiplies at most the largest of v.
            by_gemma = eager(gemma2.eager_attention_forward, q, k, v, pattern, softcap=cap)
            allowed = 17 * 2 * torch.finfo(torch.float32).eps * exactness.largest(v)
            self.assertLessEqual(exactness.error(by_gemma, want), allowed)

    def test_both_together_with_lse(self):
        for pattern in PATTERNS:
            q, k, v, sinks = x = inputs()
            got = annulus.attention(q, k, v, pattern, sinks=sinks, softcap=1.5, return_lse=True)
            want = dense(*x, pattern, 1.5)
            weights = [torch.randn_like(t) for t in want]
            for a, b in zip(got, want):
                exactness.agree(a, b, pattern)
            for used in ([0, 1], [0], [1]):
                grads = [
                    torch.autograd.grad([y[i] for i in used], x, [weights[i] for i in used], True, allow_unused=True)
                    for y in (got, want)
                ]
                for a, b in zip(*grads):
                    exactness.agree(a, torch.zeros_like(a) if b is None else b, (pattern, used))

    def test_gradcheck(self):
        for pattern in (CAUSAL, {"kind": "dilated", "segment_lengths": [4, 8], "dilation_rates": [1, 2], "combine": "mean"}):
            run = functools.partial(lambda p, q, k, v, s: annulus.attention(q, k, v, p, sinks=s, softcap=2.0), pattern)
            self.assertTrue(torch.autograd.gradcheck(run, inputs(), fast_mode=True))

    def test_sinks_alone_may_require_a_gradient(self):
        q, k, v, sinks = x = inputs(grad=False)
        sinks.requires_grad_()
        (got,) = torch.autograd.grad(annulus.attention(q, k, v, CAUSAL, sinks=sinks).square().sum(), sinks)
        (want,) = torch.autograd.grad(dense(*x, CAUSAL)[0].square().sum(), sinks)
        exactness.agree(got, want)

    def test_extreme_sinks(self):
        q, k, v, _ = inputs(grad=False)
        plain = annulus.attention(q, k, v, CAUSAL)
        sinks = torch.tensor([-math.inf, 1e4, 0.0, -1e4], dtype=torch.float64, requires_grad=True)
        out = annulus.attention(q, k, v, CAUSAL, sinks=sinks)
        self.assertTrue(torch.equal(out[:, :, 0], plain[:, :, 0]) and torch.equal(out[:, :, 3], plain[:, :, 3]))
        self.assertEqual(exactness.largest(out[:, :, 1]), 0)
        (gradient,) = torch.autograd.grad(out.sum(), sinks)
        self.assertTrue(gradient.isfinite().all())
        self.assertEqual(gradient[[0, 1, 3]].tolist(), [0, 0, 0])

    def test_narrower_dtypes(self):
        for dtype, of_sinks in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)):
            x = [t.detach() for t in inputs(33, dtype)]
            x = [t.requires_grad_() for t in (*x[:3], x[3].to(of_sinks))]
            exact = [t.detach().double().requires_grad_() for t in x]
            got, usual, right = (
                annulus.attention(*x[:3], CAUSAL, sinks=x[3], softcap=2.0),
                dense(*x, CAUSAL, 2.0)[0],
                dense(*exact, CAUSAL, 2.0)[0],
            )
            exactness.as_exact(got, usual, right, dtype)
            dout = torch.randn_like(got)
            grads = [torch.autograd.grad(y, of, dout.to(y.dtype)) for y, of in ((got, x), (usual, x), (right, exact))]
            for a, b, c, t in zip(*grads, x):
                self.assertEqual(a.dtype, t.dtype)
                # dq and dk as in torch_ops_test; the gradient of a sink is a sum over 66 rows.
                exactness.as_exact(a, b, c, dtype, terms=66 if t is x[3] else 10, dtype=dtype)

    def test_opcheck(self):
        op = torch.ops.annulus
        for grad in (True, False):
            q, k, v, sinks = inputs(grad=grad)
            torch.library.opcheck(op.attention.default, (q, k, v, "{ kind = 'causal' }"), dict(sinks=sinks, softcap=3.0))
        settings = (None, sinks, "{ kind = 'causal' }", "", "contiguous", "auto", 0, None, 0.0, 0, 0, 0, 0, 0, 3.0, False)
        torch.library.opcheck(op.attention_forward.default, (q, k, v, *settings, False))
        out, *saved = op.attention_forward(q, k, v, *settings, False)
        torch.library.opcheck(op.attention_backward.default, (out, q, k, v, out, *saved, None, *settings))

    def test_compiles_and_autocasts(self):
        def run(q, k, v, sinks):
            return annulus.attention(q, k, v, CAUSAL, sinks=sinks, softcap=3.0)

        x = inputs(dtype=torch.float32)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for a, b in zip(*(torch.autograd.grad(f(*x).square().sum(), x) for f in (compiled, run))):
            self.assertTrue(torch.equal(a, b))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(*x)
            self.assertEqual(out.dtype, torch.bfloat16)
            grads = torch.autograd.grad(out.sum(), x)
            self.assertTrue(torch.equal(run(*x), torch.compile(run, fullgraph=True, backend="aot_eager")(*x)))
        self.assertEqual({g.dtype for g in grads}, {torch.float32})
        # The sinks are not cast.
        halves = [t.detach().bfloat16() for t in x[:3]]
        self.assertTrue(torch.equal(out, run(*halves, x[3])))

    def test_refusals(self):
        q, k, v, sinks = inputs(grad=False)
        for words, settings in (
            ("sinks must be a dense floating tensor", dict(sinks=sinks[:3])),
            ("sinks must be a dense floating tensor", dict(sinks=sinks.long())),
            ("softcap must be positive and finite", dict(softcap=-1.0)),
            ("softcap must be positive and finite", dict(softcap=math.inf)),
        ):
            with self.assertRaisesRegex(annulus.AnnulusError, words):
                annulus.attention(q, k, v, CAUSAL, **settings)
        with self.assertRaisesRegex(annulus.AnnulusError, "with dropout lse has no gradient"):
            out, lse = annulus.attention(q, k, v, CAUSAL, sinks=sinks.requires_grad_(), dropout=0.1, return_lse=True)
            with annulus.errors():
                lse.sum().backward()


if __name__ == "__main__":
    torch_python.main()
