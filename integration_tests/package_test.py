#!/usr/bin/env python3
"""Tests the package annulus in one process: positions of layouts, labels, invalid groups, errors and torch.compile."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch_python  # noqa: E402

torch_python.enter()
os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] = "1"  # for a test below

import annulus  # noqa: E402
import exactness  # noqa: E402
import torch  # noqa: E402
import torch_reference  # noqa: E402


class Package(unittest.TestCase):
    def test_layouts_assign_each_position_once(self):
        for length in (0, 1, 5, 16, 67):
            for size in (1, 2, 3, 8):
                for layout in ("contiguous", "zigzag", "striped"):
                    dealt = [annulus.positions(length, layout, rank=r, size=size).tolist() for r in range(size)]
                    self.assertEqual(sorted(sum(dealt, [])), list(range(length)), (length, size, layout))
        self.assertEqual(annulus.positions(11, "contiguous", rank=1, size=4).tolist(), [2, 3, 4])
        self.assertEqual(annulus.positions(11, "zigzag", rank=0, size=4).tolist(), [0, 9, 10])
        self.assertEqual(annulus.positions(11, "striped", rank=3, size=4).tolist(), [3, 7])

    def test_labels_do_not_cross_documents(self):
        labels = torch.arange(6).view(1, 6)
        self.assertEqual(annulus.shift_labels(labels).tolist(), [[1, 2, 3, 4, 5, -100]])
        documents = torch.tensor([[0, 1, 2, 0, 1, 0]])
        self.assertEqual(annulus.shift_labels(labels, documents, ignore=-1).tolist(), [[1, 2, -1, 4, -1, -1]])
        rows = annulus.shift_labels(labels.expand(2, 6), documents)
        self.assertEqual(rows.tolist(), [[1, 2, -100, 4, -100, -100]] * 2)

    def test_shard_takes_tensors_in_mappings_lists_and_tuples(self):
        tokens = torch.arange(6).view(1, 6)
        cut = annulus.shard({"tokens": tokens, "none": None, "pair": (tokens, [tokens])}, "zigzag")
        for part in (cut["tokens"], cut["pair"][0], cut["pair"][1][0]):
            self.assertTrue(torch.equal(part, tokens))
        self.assertIsNone(cut["none"])
        with self.assertRaisesRegex(annulus.AnnulusError, "hold a str"):
            annulus.shard({"tokens": "abc"})
        with self.assertRaisesRegex(annulus.AnnulusError, r"no dimension 1 to cut in a tensor of the shape \[6\]"):
            annulus.shard(tokens[0])
        with self.assertRaisesRegex(annulus.AnnulusError, "a model that shifts labels itself"):
            annulus.shard({"input_ids": tokens, "labels": tokens})
        with self.assertRaisesRegex(annulus.AnnulusError, "'zigzak'"):
            annulus.shard(tokens, "zigzak")

    def test_accepts_pattern_as_a_mapping(self):
        q = torch.randn(2, 17, 2, 8, dtype=torch.float64)
        for pattern in (
            {"kind": "documents", "documents": [4, 7, 6], "causal": True},
            {"kind": "union", "of": [{"kind": "causal"}, {"kind": "window", "left": 2, "right": 0}]},
        ):
            want = torch_reference.attention(q, q, q, pattern)
            exactness.agree(annulus.attention(q, q, q, pattern), want)

    def test_plan_is_proved_and_plan_ahead_is_accepted(self):
        given = dict(heads=4, kv_heads=2, layout="zigzag", cu_seqlens=torch.tensor([0, 100, 512]))
        plan = annulus.plan({"kind": "window", "left": 63, "right": 0}, 512, 4, **given)
        self.assertEqual((plan["ranks"], plan["proof"]["holds"], plan["proof"]["faults"]), (4, True, []))
        in_window = sum(min(i + 1, 64) for n in (100, 412) for i in range(n))
        self.assertEqual(plan["proof"]["pairs"], 4 * in_window)
        self.assertIsNone(annulus.plan("{ kind = 'causal' }", 512, 4, prove=False)["proof"])
        with self.assertRaisesRegex(annulus.AnnulusError, "casual"):
            annulus.plan("{ kind = 'casual' }", 512, 4)

        before = annulus.stats()
        q = torch.randn(1, 40, 2, 8)
        annulus.plan_ahead({"kind": "causal"}, 40, heads=2, cu_seqlens=torch.tensor([0, 11, 40]))
        annulus.attention(q, q, q, {"kind": "causal"}, cu_seqlens=torch.tensor([0, 11, 40]))
        after = annulus.stats()
        self.assertEqual(after["forward"]["calls"], before["forward"]["calls"] + 1)

    def test_doctor_reports_versions_and_mismatches(self):
        table = annulus.doctor()
        for line in (r"annulus +\d+\.\d+\.\d+, /", rf"torch +{re.escape(torch.__version__)}; .* built against"):
            self.assertRegex(table, line)
        self.assertRegex(table, "group +none: torch.distributed.init_process_group has not been called")
        self.assertNotIn("WRONG", table)
        with unittest.mock.patch.object(torch, "__version__", "2.10.0"):
            self.assertRegex(annulus.doctor(), "WRONG +the library was built for another minor version of torch")

    def test_compiles_into_one_graph(self):
        q = torch.randn(1, 8, 2, 8, dtype=torch.float64, requires_grad=True)

        def loss(q):
            return annulus.all_reduce(annulus.attention(q, q, q, {"kind": "causal"}).square().sum())

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        wanted, got = (torch.autograd.grad(f(q), q)[0] for f in (loss, compiled))
        self.assertTrue(torch.equal(wanted, got))

    def test_raises_annulus_error(self):
        q = torch.randn(1, 8, 2, 8)
        with self.assertRaisesRegex(annulus.AnnulusError, r'^\[pattern\] .*did you mean "causal"'):
            annulus.attention(q, q, q, "{ kind = 'casual' }")
        with self.assertRaisesRegex(annulus.AnnulusError, "^\\[torch\\] all_reduce takes"):
            annulus.all_reduce(q.half())
        with self.assertRaisesRegex(annulus.AnnulusError, "group must be a ProcessGroup .* but is int"):
            annulus.attention(q, q, q, group=3)
        with self.assertRaisesRegex(annulus.AnnulusError, "no process group of the name 'nobody'"):
            annulus.shard(q, group="nobody")

    def test_errors_context_converts_errors_of_compiled_calls(self):
        q = torch.randn(1, 8, 2, 8)

        def attend(q, boundaries):
            return annulus.attention(q, q, q, {"kind": "causal"}, cu_seqlens=boundaries)

        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        self.assertEqual(compiled(q, torch.tensor([0, 3, 8])).shape, q.shape)
        with self.assertRaisesRegex(annulus.AnnulusError, r"^\[[a-z]+\] .*cu_seqlens"), annulus.errors():
            compiled(q, torch.tensor([0, 3, 9]))
        with self.assertRaises(ValueError), annulus.errors():
            raise ValueError("of others")

    def test_a_setting_with_which_gradients_are_wrong_is_replaced(self):
        """When the library is loaded, because LibTorch reads it at the first call of cuDNN's attention."""
        self.assertEqual(subprocess.check_output(["printenv", "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"]), b"0\n")

    def test_import_error_names_missing_or_unloadable_library(self):
        missing = ("/nowhere/lib.so", "expected at /nowhere/lib.so, but there is no such file: build it with")
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        for_cuda_9 = os.path.join(folder, "libannulus_torch.so")
        with open(for_cuda_9, "wb") as f:  # the table of names of a library
            f.write(b"\0libtorch_cpu.so\0libcudart.so.9\0")
        other_cuda = (for_cuda_9, f"built for CUDA 9, but torch {re.escape(torch.__version__)} is for .*: install a torch for CUDA 9, or build")
        for path, words in [missing, (__file__, "does not load into torch"), other_cuda]:
            env = dict(os.environ, ANNULUS_TORCH_LIBRARY=path, PYTHONPATH=os.pathsep.join(sys.path))
            done = subprocess.run([sys.executable, "-c", "import annulus"], env=env, capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, "ImportError: the library of annulus.*" + words)


if __name__ == "__main__":
    torch_python.main()
