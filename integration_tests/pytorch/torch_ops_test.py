#!/usr/bin/env python3
"""Tests torch.ops.annulus in one process: values, gradcheck, opcheck, torch.compile, and errors."""

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()

import exactness  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch.utils.checkpoint  # noqa: E402
import torch_reference  # noqa: E402
from annulus import load  # noqa: E402

annulus = load()
CAUSAL = "{ kind = 'causal' }"
ADAPTIVE = "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2 }"
# The last arguments of attention_forward and attention_backward but for the very last: cu_seqlens, sinks, pattern, group, ...
SETTINGS = (None, None, CAUSAL, "", "contiguous", "auto", 0, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0)
PATTERNS = [
    {"kind": "full"},
    {"kind": "causal"},
    {"kind": "window", "left": 3, "right": 1},
    {"kind": "window", "left": 3, "right": 1, "causal": True},
    {"kind": "documents", "documents": [4, 7, 6]},
    {"kind": "blocks", "map": "local", "block": 16, "window_blocks": 0},
    {"kind": "union", "of": [{"kind": "causal"}, {"kind": "window", "left": 2, "right": 0}]},
]


def inputs(queries=17, keys=17, heads=4, kv_heads=2, dtype=torch.float64, grad=True):
    shapes = [(2, queries, heads, 8), (2, keys, kv_heads, 8), (2, keys, kv_heads, 8)]
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


class TorchOps(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)

    def test_values_and_gradients_match_the_reference(self):
        for pattern in PATTERNS:
            with self.subTest(pattern=pattern):
                q, k, v = inputs()
                out = annulus.attention(q, k, v, torch_reference.text(pattern))
                want = torch_reference.attention(q, k, v, pattern)
                exactness.agree(out, want)
                dout = torch.randn_like(out)
                for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
                    exactness.agree(a, b)

    def test_cross_attention_and_dtypes(self):
        q, k, v = inputs(9, 21)
        exactness.agree(
            annulus.attention(q, k, v, "{ kind = 'full' }"), torch_reference.attention(q, k, v, {"kind": "full"})
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = annulus.attention(*inputs(dtype=dtype), CAUSAL)
            self.assertEqual(out.dtype, dtype)

    def test_gradcheck(self):
        for pattern in PATTERNS + [
            {"kind": "dilated", "segment_lengths": [4, 8], "dilation_rates": [1, 2]},
            {"kind": "dilated", "segment_lengths": [4, 8], "dilation_rates": [1, 2], "combine": "mean"},
        ]:
            with self.subTest(pattern=pattern):
                text = torch_reference.text(pattern)
                # Element by element takes seconds for each pattern. Those of PATTERNS are also compared with the reference.
                one_by_one = pattern not in PATTERNS or pattern == {"kind": "causal"}
                self.assertTrue(torch.autograd.gradcheck(lambda *x: annulus.attention(*x, text), inputs(), fast_mode=not one_by_one))

    def test_gradcheck_with_dropout(self):
        def dropped(*x):
            return annulus.attention(*x, CAUSAL, dropout=0.3, seed=5, step=2, layer=1)

        x = inputs()
        self.assertTrue(torch.autograd.gradcheck(dropped, x, fast_mode=True))
        self.assertTrue(torch.equal(dropped(*x), dropped(*x)))
        self.assertFalse(torch.equal(dropped(*x), annulus.attention(*x, CAUSAL, dropout=0.3, seed=5, step=3, layer=1)))

    def test_first_row_gives_a_part_of_a_batch_its_own_draw(self):
        settings = dict(dropout=0.3, seed=5, step=2, layer=1)
        q, k, v = inputs()
        whole = annulus.attention(q, k, v, CAUSAL, **settings)
        second = [t[1:] for t in (q, k, v)]
        exactness.agree(annulus.attention(*second, CAUSAL, first_row=1, **settings), whole[1:])
        self.assertGreater((annulus.attention(*second, CAUSAL, **settings) - whole[1:]).abs().max().item(), 1e-3)

    def test_query_offset_places_queries_among_keys(self):
        q, k, v = inputs(21, 21)
        last = [q[:, 12:], k, v]
        for pattern in ({"kind": "causal"}, {"kind": "window", "left": 3, "right": 1}):
            text = torch_reference.text(pattern)
            want = torch_reference.attention(q, k, v, pattern)[:, 12:]
            out = annulus.attention(*last, text, query_offset=12)
            exactness.agree(out, want)
            dout = torch.randn_like(out)
            for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
                exactness.agree(a, b)

    def test_documents_may_change_with_every_call(self):
        for lengths in ([4, 7, 6], [17], [1, 16], [9, 8]):
            pattern = {"kind": "documents", "documents": lengths, "causal": True}
            x = inputs()
            exactness.agree(
                annulus.attention(*x, torch_reference.text(pattern)), torch_reference.attention(*x, pattern)
            )

    def test_documents_given_by_cu_seqlens(self):
        for kind, dtype in (({"kind": "full"}, torch.int32), ({"kind": "causal"}, torch.int64)):
            text = torch_reference.text(kind)
            for bounds in ([0, 4, 11, 17], [0, 17], [0, 0, 4, 4, 17, 17]):  # equal bounds delimit no document
                x = inputs()
                out = annulus.attention(*x, text, cu_seqlens=torch.tensor(bounds, dtype=dtype))
                lengths = [b - a for a, b in zip(bounds, bounds[1:]) if b > a]
                documents = {"kind": "documents", "documents": lengths, "causal": kind["kind"] == "causal"}
                want = torch_reference.attention(*x, documents)
                exactness.agree(out, want)
                for a, b in zip(torch.autograd.grad(out.sum(), x), torch.autograd.grad(want.sum(), x)):
                    exactness.agree(a, b)
        bounds = torch.tensor([0, 4, 17])
        # With any pattern they mean the same as documents in the pattern.
        dilated = "kind = 'dilated', segment_lengths = [4, 8], dilation_rates = [1, 2]"
        want = annulus.attention(*x, f"{{ {dilated}, documents = [4, 13] }}")
        self.assertTrue(torch.equal(annulus.attention(*x, f"{{ {dilated} }}", cu_seqlens=bounds), want))
        self.assertTrue(torch.autograd.gradcheck(lambda *x: annulus.attention(*x, CAUSAL, cu_seqlens=bounds), x))
        torch.library.opcheck(annulus.attention.default, (*x, CAUSAL), dict(cu_seqlens=bounds))
        for wrong, words in [
            (torch.tensor([1, 17]), "cu_seqlens must begin with 0, but begins with 1"),
            (torch.tensor([], dtype=torch.int64), "cu_seqlens must begin with 0, but is empty"),
            (torch.tensor([0, 9, 4, 17]), "its element 2 is 4, after 9"),
            (torch.tensor([0, 16]), "cu_seqlens must end with .* 17 queries and 17 keys, but ends with 16"),
            (torch.tensor([[0, 17]]), r"must be a dense int32 or int64 tensor .* but is \[1,2\] of Long"),
            (torch.tensor([0.0, 17.0]), r"but is \[2\] of Float"),
        ]:
            with self.assertRaisesRegex(RuntimeError, r"^\[torch\] .*" + words):
                annulus.attention(*x, CAUSAL, cu_seqlens=wrong)
        with self.assertRaisesRegex(RuntimeError, "both cu_seqlens and the pattern name documents"):
            annulus.attention(*x, "{ kind = 'documents', documents = [17] }", cu_seqlens=bounds)

    def test_boundaries_may_change_in_one_graph(self):
        def run(q, k, v, bounds):
            return annulus.attention(torch.sin(q), k, v, CAUSAL, cu_seqlens=bounds)

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        counters = torch._dynamo.utils.counters
        counters.clear()
        x = inputs()
        for bounds in ([0, 4, 17], [0, 9, 17], [0, 1, 17]):
            bounds = torch.tensor(bounds)
            got, want = (torch.autograd.grad(f(*x, bounds).square().sum(), x) for f in (compiled, run))
            for a, b in zip(got, want):
                exactness.agree(a, b)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)

    def test_saved_tensors_may_be_copied_and_used_twice(self):
        for pattern in (CAUSAL, ADAPTIVE):
            x = inputs(40, 40)

            def run():
                first = annulus.attention(*x, pattern)
                second = annulus.attention(first, x[1], x[2], pattern)
                return torch.autograd.grad((first + second).square().sum(), x)

            want = run()
            hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
            for how in (torch.autograd.graph.save_on_cpu(), hooks):
                with how:
                    got = run()
                for a, b in zip(got, want):
                    self.assertTrue(torch.equal(a, b))

    def test_plan_ahead_is_used_by_the_call(self):
        def made():
            return json.loads(annulus.stats())["plans"]["made"]

        bounds = torch.tensor([0, 30, 51])
        before = made()
        annulus.plan_ahead(CAUSAL, 51, heads=4, kv_heads=2, batch=2, cu_seqlens=bounds)
        deadline = time.monotonic() + 60
        while made() == before:
            self.assertLess(time.monotonic(), deadline)
        calls = json.loads(annulus.stats())["forward"]["calls"]
        annulus.attention(*inputs(51, 51), CAUSAL, cu_seqlens=bounds)
        self.assertEqual(made(), before + 1)
        self.assertEqual(json.loads(annulus.stats())["forward"]["calls"], calls + 1)

    def test_plan_and_build_info(self):
        plan = json.loads(annulus.plan(CAUSAL, 64, 4, layout="zigzag", heads=2, cu_seqlens=torch.tensor([0, 40, 64])))
        self.assertEqual((plan["ranks"], plan["pairs"]), (4, 2 * (40 * 41 + 24 * 25) // 2))
        self.assertTrue(plan["proof"]["holds"])
        self.assertIn("documents = [40, 24]", plan["request"])
        plan = json.loads(annulus.plan(CAUSAL, 64, 2, lengths=[60, 4], prove=False))
        self.assertIsNone(plan["proof"])
        self.assertIn("lengths 60 4", plan["request"])
        for arguments, words in [
            (dict(lengths=[60, 3]), "lengths must add up to the 64 queries"),
            (dict(lengths=[64]), "lengths must be one for each of the 2 ranks"),
            (dict(layout="zigzak"), "did you mean \"zigzag\""),
            (dict(pattern=ADAPTIVE), "there is no plan before one"),
        ]:
            with self.assertRaisesRegex(RuntimeError, words):
                annulus.plan(arguments.pop("pattern", CAUSAL), 64, 2, **arguments)
        info = json.loads(annulus.build_info())
        self.assertEqual(info["torch"].split(".")[:2], torch.__version__.split(".")[:2])
        self.assertEqual((info["mpi"], info["cuda"]), (True, False))
        self.assertIn("flash attention on CPU", info["cpu_kernel"])

    def test_traces_with_fake_tensors(self):
        """Tracing for a device does not need the device: shapes, dtypes and devices of results, and errors."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            q, k, v = (torch.empty(2, 32, h, 8, dtype=torch.bfloat16, device="cuda") for h in (4, 2, 2))
            bounds = torch.empty(3, dtype=torch.int32, device="cuda")
            for pattern in (CAUSAL, ADAPTIVE):
                for grad in (False, True):
                    x = [t.detach().requires_grad_(grad) for t in (q, k, v)]
                    out = annulus.attention(*x, pattern, group="0", cu_seqlens=bounds)
                    self.assertEqual((out.device.type, out.shape, out.dtype), ("cuda", q.shape, q.dtype))
                settings = (bounds, None, pattern, "0", *SETTINGS[4:], False)
                out, *saved = annulus.attention_forward(q, k, v, *settings, False)
                self.assertEqual([t.device.type for t in saved], ["cuda"] * len(saved))
                # Calls the operator directly, because autograd's engine would start a thread for the device.
                gradients = annulus.attention_backward(out, q, k, v, out, *saved, None, *settings)
                for got, t in zip(gradients, (q, k, v)):
                    self.assertEqual((got.device, got.shape, got.dtype), (t.device, t.shape, t.dtype))
            self.assertEqual(annulus.all_reduce(q.float(), group="0").device.type, "cuda")

    def test_selective_checkpointing_does_not_recompute_attention(self):
        policy = torch.utils.checkpoint.CheckpointPolicy

        def keep(context, op, *args, **kwargs):
            kept = op == annulus.attention_forward.default
            return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE

        weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

        def layer(q, k, v):
            return torch.tanh(annulus.attention(torch.sin(q @ weight), k, v, CAUSAL) @ weight)

        def runs(**how):
            """Returns how often attention's forward kernel ran, and the gradients."""
            torch.manual_seed(3)
            x = inputs()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                out = torch.utils.checkpoint.checkpoint(layer, *x, use_reentrant=False, **how) if how else layer(*x)
                grads = torch.autograd.grad(out.square().sum(), (*x, weight))
            return sum(e.count for e in profile.key_averages() if e.key == "annulus::tiles_forward"), grads

        plain, want = runs()
        self.assertGreater(plain, 0)
        again, got = runs(preserve_rng_state=False)
        self.assertEqual(again, 2 * plain)
        once, kept = runs(context_fn=lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(keep))
        self.assertEqual(once, plain)
        for a, b, c in zip(want, got, kept):
            self.assertTrue(torch.equal(a, b))
            self.assertTrue(torch.equal(a, c))

    def test_backward_uses_the_adaptive_blocks_of_the_forward(self):
        q, k, v = inputs(64, 64)
        self.assertTrue(torch.autograd.gradcheck(lambda *x: annulus.attention(*x, ADAPTIVE), (q, k, v), fast_mode=True))
        # If q and k are not the forward's, they select other blocks, which is detected.
        x = inputs(64, 64, grad=False)
        settings = (None, None, ADAPTIVE, *SETTINGS[3:], True)
        out, *saved = annulus.attention_forward(*x, *settings, False)
        annulus.attention_backward(out, *x, out, *saved, None, *settings)
        with self.assertRaisesRegex(RuntimeError, r"^\[torch\] attention_backward: q and k select other blocks"):
            annulus.attention_backward(out, x[0].flip(1), *x[1:], out, *saved, None, *settings)

    def test_block_mask_from_a_file(self):
        mask = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.uint8)
        header = json.dumps({"mask": {"dtype": "U8", "shape": [1, 1, 3, 3], "data_offsets": [0, 9]}}).encode()
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(struct.pack("<Q", len(header)) + header + bytes(mask.flatten().tolist()))
            file.flush()
            x = inputs(40, 40, kv_heads=4)
            out = annulus.attention(*x, f"{{ kind = 'blocks', map = 'file', file = '{file.name}', block = 16 }}")
        block = torch.arange(40) // 16
        shown = mask[block.unsqueeze(1), block.unsqueeze(0)].bool()
        q, k, v = (t.transpose(1, 2) for t in x)
        exactness.agree(out, F.scaled_dot_product_attention(q, k, v, attn_mask=shown).transpose(1, 2))

    def test_opcheck(self):
        torch.library.opcheck(annulus.attention.default, (*inputs(grad=False), CAUSAL))
        torch.library.opcheck(annulus.attention.default, (*inputs(), CAUSAL), dict(layout="zigzag", dropout=0.5, step=3))
        for pattern in (CAUSAL, ADAPTIVE):
            x = inputs(32, 32, grad=False)
            settings = (torch.tensor([0, 20, 32]), None, pattern, *SETTINGS[3:], False)
            torch.library.opcheck(annulus.attention_forward.default, (*x, *settings, False))
            out, *saved = annulus.attention_forward(*x, *settings, False)
            torch.library.opcheck(annulus.attention_backward.default, (out, *x, out, *saved, None, *settings))
        torch.library.opcheck(annulus.all_reduce.default, (torch.randn(3),))

    def test_autocast_matches_sdpa(self):
        """The dtypes of a model under autocast: projections in bf16, a residual in fp32."""
        dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
        x = [t.detach().to(d).requires_grad_() for t, d in zip(inputs(kv_heads=4, dtype=torch.float32), dtypes)]
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                out = annulus.attention(*x, CAUSAL)
                want = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in x), is_causal=True).transpose(1, 2)
            self.assertEqual((out.dtype, want.dtype), (dtype, dtype))
            exact = [t.detach().to(dtype).double().requires_grad_() for t in x]
            right = torch_reference.attention(*exact, {"kind": "causal"})
            exactness.as_exact(out, want, right)
            dout = torch.randn_like(out)
            # dq and dk are sums of differences of products of 8 elements, times an element: about 10 in sum.
            grads = [torch.autograd.grad(y, of, dout.to(y.dtype)) for y, of in ((out, x), (want, x), (right, exact))]
            for a, b, c, t in zip(*grads, x):
                self.assertEqual(a.dtype, t.dtype)
                exactness.as_exact(a, b, c, terms=10, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            double = inputs()
            self.assertEqual(annulus.attention(*double, CAUSAL).dtype, torch.float64)  # users choose fp64 on purpose
            torch.library.opcheck(annulus.attention.default, (*x, CAUSAL))
            with self.assertRaisesRegex(RuntimeError, "of one dtype"):
                annulus.attention(double[0], *x[1:], CAUSAL)
        with self.assertRaisesRegex(RuntimeError, r"^\[torch\] q, k and v must be of one dtype.*v Float"):
            annulus.attention(*x, CAUSAL)

    def test_autocast_compiles(self):
        x = [t.detach().to(d) for t, d in zip(inputs(dtype=torch.float32), (torch.bfloat16, torch.bfloat16, torch.float32))]

        def run(q, k, v):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return annulus.attention(q, k, v, CAUSAL)

        torch._dynamo.reset()
        out = torch.compile(run, fullgraph=True, backend="aot_eager")(*x)
        self.assertTrue(torch.equal(out, run(*x)))

    def test_meta_tensors_have_shapes_and_errors(self):
        """Tensors without content give results of the right shapes, and the same errors as tensors with content."""
        q, k, v = (t.to("meta") for t in inputs(9, 21, dtype=torch.bfloat16, grad=False))
        for pattern in (CAUSAL, ADAPTIVE):
            out = annulus.attention(q.requires_grad_(), k, v, pattern)
            self.assertEqual((out.device.type, out.shape, out.dtype), ("meta", q.shape, q.dtype))
            self.assertEqual(torch.autograd.grad(out.sum(), q)[0].shape, q.shape)
            with torch.device("meta"):
                self.assertEqual(annulus.attention(q, k, v, pattern).shape, q.shape)
        q = q.detach()
        real = inputs(9, 21, dtype=torch.bfloat16, grad=False)
        for given, text in [
            ((real[0], k, v), "one device, but q is BFloat16 on cpu and k BFloat16 on meta"),
            ((real[0], real[1], v), "one device, but q is BFloat16 on cpu and v BFloat16 on meta"),
            ((q, real[1], real[2]), "one device, but q is BFloat16 on meta and k BFloat16 on cpu"),
            ((q[0], k, v), r"q must be \[batch.* \[9,4,8\], \[2,21,2,8\] and \[2,21,2,8\]"),
            ((q, k, v[:, :5]), r"q must be \[batch"),
            ((q[:1], k, v), r"q must be \[batch"),
            ((q, k[..., :4], v[..., :4]), r"q must be \[batch"),
            ((q[:, :, :3], k, v), "a multiple of those of k and v"),
            ((q.float(), k, v), "one dtype on one device, but q is Float on meta and k BFloat16"),
            ((q.int(), k.int(), v.int()), "fp32, fp64, bf16 or fp16, but are Int"),
        ]:
            with self.assertRaisesRegex(RuntimeError, r"^\[torch\] .*" + text):
                annulus.attention(*given, CAUSAL)
        bounds = torch.tensor([0, 4, 9])
        for given, ends in [(inputs(9, 9, grad=False), bounds.to("meta")), ([t.to("meta") for t in inputs(9, 9, grad=False)], bounds)]:
            with self.assertRaisesRegex(RuntimeError, r"^\[torch\] .*q and cu_seqlens must both be on meta or neither"):
                annulus.attention(*given, CAUSAL, cu_seqlens=ends)
        out, *saved = annulus.attention_forward(*real, *SETTINGS, True, False)
        with self.assertRaisesRegex(RuntimeError, "all tensors must be on one device"):
            annulus.attention_backward(out.to("meta"), *real, out, *saved, None, *SETTINGS, True)
        shapes = [t.shape for t in annulus.attention_forward(q, k, v, *SETTINGS, True, False)]
        self.assertEqual(shapes, [t.shape for t in (out, *saved)])

    def test_all_reduce_has_gradients(self):
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        self.assertTrue(torch.autograd.gradcheck(lambda t: annulus.all_reduce(t * t), x))
        self.assertTrue(torch.autograd.gradgradcheck(lambda t: annulus.all_reduce(t * t), x))
        torch.library.opcheck(annulus.all_reduce.default, (x,))

    def test_compiled_gradients_match_eager(self):
        weight = torch.randn(32, 32, dtype=torch.float64, requires_grad=True)

        def model(q, k, v):
            out = annulus.attention(torch.sin(q), k, v, CAUSAL)
            return (out.flatten(2) @ weight).square().mean()

        # Inductor calls a compiler for each graph, which takes most of this test's time.
        for backend, dynamic in (("aot_eager", False), ("aot_eager", True), ("inductor", True)):
            with self.subTest(backend=backend, dynamic=dynamic):
                torch._dynamo.reset()
                compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
                for length in (17, 33):
                    q, k, v = inputs(length, length)
                    want = torch.autograd.grad(model(q, k, v), (q, k, v, weight))
                    got = torch.autograd.grad(compiled(q, k, v), (q, k, v, weight))
                    for a, b in zip(got, want):
                        exactness.agree(a, b)

    def test_errors_name_their_source(self):
        q, k, v = inputs()
        for pattern, arguments, text in [
            ("{ kind = 'casual' }", {}, r"^\[pattern\] .*did you mean \"causal\""),
            (CAUSAL, dict(layout="zigzak"), r"^\[\w+\] .*did you mean \"zigzag\""),
            (CAUSAL, dict(schedule="rung"), r"^\[\w+\] .*did you mean \"ring\""),
            (CAUSAL, dict(first_row=-1), r"^\[torch\] first_row must be the global number of batch row 0"),
            (CAUSAL, dict(dropout=1.0), r"^\[torch\] dropout must be at least 0 and below 1"),
            ("{ kind = 'documents', documents = [4, 4] }", {}, r"^\[\w+\] .*"),
        ]:
            with self.assertRaisesRegex(RuntimeError, text):
                annulus.attention(q, k, v, pattern, **arguments)
        with self.assertRaisesRegex(RuntimeError, r"^\[torch\] q must be \[batch"):
            annulus.attention(q[0], k, v, CAUSAL)
        x = inputs(grad=False)
        out, lse, *saved = annulus.attention_forward(*x, *SETTINGS, True, False)
        with self.assertRaisesRegex(RuntimeError, r"^\[attention\] .*backward.*expected lse|expected lse with sizes"):
            annulus.attention_backward(out, *x, out, lse[:1], *saved, None, *SETTINGS, True)
        loss = annulus.attention(q, k, v, CAUSAL).sum()
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, r"^\[torch\] attention has first derivatives only"):
            torch.autograd.grad(dq.sum(), q)

    def test_names_arguments_that_are_not_dense_tensors(self):
        q, k, v = inputs()
        for given, name in [((None, k, v), "q"), ((q, None, v), "k"), ((q, k, None), "v"), ((None, None, None), "q")]:
            for grad in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
                with grad, self.assertRaisesRegex(RuntimeError, rf"^\[torch\] {name} must be a tensor, but is None"):
                    annulus.attention(*given, CAUSAL)
        for tensor in (k.detach().to_sparse(), k.detach().flatten(0, 2).to_sparse_csr()):
            with self.assertRaisesRegex(RuntimeError, r"^\[torch\] k must be a dense tensor, but is sparse"):
                annulus.attention(q, tensor, v, CAUSAL)
        for x, text in [
            (None, "x is None"),
            (k.detach().to_sparse(), "x is sparse"),
            (k.bfloat16(), r"x is BFloat16: convert it first, for example with x.float\(\)"),
            (torch.ones(2, dtype=torch.int32), "x is Int: convert it first"),
        ]:
            with self.assertRaisesRegex(RuntimeError, r"^\[torch\] all_reduce takes .*" + text):
                annulus.all_reduce(x)

    def test_refuses_invalid_timeouts(self):
        for seconds in (0, -1.0, float("nan"), 1e9):
            with self.assertRaisesRegex(RuntimeError, "expected a timeout from 0.1 to 31536000 seconds, but got "):
                load(timeout=seconds)
        load(timeout=300)

    def test_refuses_torchrun_without_a_group(self):
        """Otherwise each would silently attend to its own rows only."""
        program = (
            "import annulus, torch; x = torch.ones(1, 4, 1, 8); "
            "print(annulus.attention(x, x, x).sum().item())"
        )

        def run(**variables):
            return subprocess.run(
                [sys.executable, "-c", program],
                env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), **variables),
                capture_output=True,
                text=True,
            )

        torchrun = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
        done = run(**torchrun)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stderr, r"annulus.AnnulusError: \[torch\] torchrun.* started 2 processes .* pass the name of one as group")
        done = run(**torchrun, ANNULUS_WORLD_SIZE="1")
        self.assertEqual((done.returncode, done.stdout), (0, "32.0\n"), done.stderr)

    def test_calls_from_several_threads(self):
        x = [inputs(30, 30) for _ in range(4)]
        want = [torch.autograd.grad(annulus.attention(*i, CAUSAL).square().sum(), i) for i in x]
        got = [None] * 4

        def run(n):
            for _ in range(10):
                got[n] = torch.autograd.grad(annulus.attention(*x[n], CAUSAL).square().sum(), x[n])

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for a, b in zip(got, want):
            for i, j in zip(a, b):
                self.assertTrue(torch.equal(i, j))

    def test_empty_sequences(self):
        q, k, v = inputs(0, 0)
        out = annulus.attention(q, k, v, CAUSAL)
        self.assertEqual(out.shape, q.shape)
        self.assertEqual(torch.autograd.grad(out.sum(), k)[0].shape, k.shape)


if __name__ == "__main__":
    torch_python.main(workers=3)
