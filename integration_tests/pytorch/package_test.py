#!/usr/bin/env python3
"""Tests the package annulus in one process: positions of layouts, labels, invalid groups, errors and torch.compile."""

import collections
import collections.abc
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

sys.path[:0] = [here := os.path.dirname(os.path.abspath(__file__)), os.path.dirname(here)]
import torch_python  # noqa: E402

torch_python.enter()
os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] = "1"  # for a test below

import annulus  # noqa: E402
import exactness  # noqa: E402
import numpy as np  # noqa: E402
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

    def test_balanced_layouts_assign_each_position_once_and_share_the_pairs(self):
        bounds = torch.tensor([0, 2000, 2100, 2150, 4096])
        cut = annulus.Sharding("balanced", pattern={"kind": "causal"}, cu_seqlens=bounds)
        pairs = torch.cat([torch.arange(1, n + 1) for n in bounds.diff().tolist()])
        for size in (1, 2, 4, 7):
            dealt = [annulus.positions(4096, cut.layout, rank=r, size=size) for r in range(size)]
            self.assertEqual(sorted(torch.cat(dealt).tolist()), list(range(4096)))
            self.assertLessEqual(max(int(pairs[own].sum()) for own in dealt), 1.05 * pairs.sum() / size)
        self.assertEqual(annulus.Sharding(cut.layout), cut)
        for given, said in (
            (("balanced",), "is dealt by the pairs of a pattern"),
            (("zigzag", None, None, "{ kind = 'causal' }"), "leave them out"),
            (("balanced", None, None, None, bounds), "give the pattern as well"),
            (("balanced", None, None, "{ kind = 'blocks', map = 'file', file = 'm.npy' }"), "must not name a file"),
        ):
            with self.assertRaisesRegex(annulus.AnnulusError, said):
                annulus.Sharding(*given)
        with self.assertRaisesRegex(annulus.AnnulusError, "4096"):  # the documents are those of other rows
            annulus.positions(4000, cut.layout, rank=0, size=2)

    def test_labels_do_not_cross_documents(self):
        labels = torch.arange(6).view(1, 6)
        self.assertEqual(annulus.shift_labels(labels).tolist(), [[1, 2, 3, 4, 5, -100]])
        documents = torch.tensor([[0, 1, 2, 0, 1, 0]])
        self.assertEqual(annulus.shift_labels(labels, documents, ignore=-1).tolist(), [[1, 2, -1, 4, -1, -1]])
        rows = annulus.shift_labels(labels.expand(2, 6), documents)
        self.assertEqual(rows.tolist(), [[1, 2, -100, 4, -100, -100]] * 2)

    def test_queries_are_aligned_by_name(self):
        torch.manual_seed(4)
        q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64, requires_grad=True) for n in (9, 21, 21))
        for name, offset in (("bottom-right", 12), ("top-left", 0)):
            want, got = (annulus.attention(q, k, v, query_offset=value) for value in (offset, name))
            self.assertTrue(torch.equal(got, want))
            for a, b in zip(*(torch.autograd.grad(out.sum(), (q, k, v)) for out in (got, want))):
                self.assertTrue(torch.equal(a, b))
            plans = [annulus.plan("{ kind = 'causal' }", 9, 2, key_length=21, query_offset=value) for value in (offset, name)]
            self.assertEqual(plans[0]["request"], plans[1]["request"])
        with self.assertRaisesRegex(annulus.AnnulusError, "'bottom-right' or 'top-left', but is 'bottom'"):
            annulus.attention(q, k, v, query_offset="bottom")

    def test_trees_have_each_rollout_as_a_path(self):
        torch.manual_seed(6)
        for trial in range(60):
            rollouts = [torch.randint(1 + trial % 3, (length,)).tolist() for length in torch.randint(9, (1 + trial % 7,))]
            tree = annulus.Tree.of_rollouts(rollouts)
            begins = torch.tensor([0, *tree.lengths]).cumsum(0)
            of_node = [list(range(begins[i], begins[i + 1])) for i in range(len(tree.lengths))]
            paths = []  # the row indices of each rollout
            for leaf in tree.leaves.tolist():
                path, node = [], leaf
                while node >= 0:
                    path, node = of_node[node] + path, tree.parents[node]
                paths.append(path)
            self.assertEqual([tree.tokens[path].tolist() for path in paths], rollouts)
            self.assertEqual([tree.positions[path].tolist() for path in paths], [list(range(len(r))) for r in rollouts])
            self.assertEqual(len(tree.tokens), len({tuple(r[: i + 1]) for r in rollouts for i in range(len(r))}))
            expected = collections.Counter(pair for path in paths for pair in zip(path, path[1:]))
            targets = tree.targets()
            self.assertEqual({(s, t): w for s, t, w in zip(*(part.tolist() for part in targets))}, expected)
            self.assertEqual(targets.target.tolist(), sorted(targets.target.tolist()))
            for layout in ("contiguous", "zigzag", "striped"):
                found = []
                for rank in range(3):
                    rows = annulus.positions(len(tree.tokens), layout, rank=rank, size=3)
                    part = tree.targets(rows)
                    found += zip(rows[part.source].tolist(), part.target.tolist(), part.weight.tolist())
                self.assertEqual(sorted(found), sorted((s, t, w) for (s, t), w in expected.items()))
        with self.assertRaisesRegex(annulus.AnnulusError, "node 2 of a tree cannot have the parent 3, which comes after it"):
            annulus.Tree([1, 1, 1, 1], [-1, 0, 3, 0])
        with self.assertRaisesRegex(annulus.AnnulusError, "at least one rollout"):
            annulus.Tree.of_rollouts([])
        with self.assertRaisesRegex(annulus.AnnulusError, "rollout 1 must be a list or tensor of whole numbers"):
            annulus.Tree.of_rollouts([[1], [0.5]])

    def test_labels_whose_dtype_cannot_hold_ignore_become_int64(self):
        ids = torch.tensor([[0, 200, 156, 255, 7, 1]])
        positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
        for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int32, torch.int64):
            for ids_of in (positions, positions.to(torch.uint8), positions.to(torch.uint16)):
                got = annulus.shift_labels(ids.to(dtype), ids_of)
                self.assertEqual(got.dtype, torch.int64 if not dtype.is_signed else dtype)
                self.assertEqual(got.tolist(), [[200, 156, -100, 7, -100, -100]])
            got = annulus.shift_labels(ids.to(dtype), positions, ignore=100)  # which each of them holds
            self.assertEqual((got.dtype, got.tolist()), (dtype, [[200, 156, 100, 7, 100, 100]]))
        self.assertEqual(annulus.shift_labels(ids.to(torch.uint8), ignore=256).tolist(), [[200, 156, 255, 7, 1, 256]])
        self.assertEqual(annulus.shift_labels(torch.ones(1, 2, dtype=torch.bool)).tolist(), [[1, -100]])
        self.assertEqual(annulus.shift_labels(ids.bfloat16()).dtype, torch.bfloat16)
        # Unsigned position ids wrap around: 0 follows 255 as 1 follows 0.
        wrapped = torch.tensor([[254, 255, 0, 1]], dtype=torch.uint8)
        self.assertEqual(annulus.shift_labels(wrapped.long(), wrapped).tolist(), [[255, -100, 1, -100]])
        with self.assertRaisesRegex(annulus.AnnulusError, "ignore must be a number that int64 can hold"):
            annulus.shift_labels(ids, ignore=1 << 63)

    def test_shard_takes_tensors_in_mappings_lists_and_tuples(self):
        tokens = torch.arange(6).view(1, 6)
        cut = annulus.shard({"tokens": tokens, "none": None, "pair": (tokens, [tokens])}, "zigzag")
        for part in (cut["tokens"], cut["pair"][0], cut["pair"][1][0]):
            self.assertTrue(torch.equal(part, tokens))
        Row = collections.namedtuple("Row", "tokens mask")
        row = annulus.unshard(annulus.shard(Row(tokens, None)))
        self.assertTrue(isinstance(row, Row) and torch.equal(row.tokens, tokens) and row.mask is None)
        best = annulus.shard(tokens.max(1, keepdim=True))  # one of PyTorch's own named tuples
        self.assertTrue(type(best) is torch.return_types.max and best.values.item() == 5)
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

    def test_patterns_take_values_of_other_libraries(self):
        def request(pattern):
            return annulus.plan(pattern, 17, 1, prove=False)["request"]

        for lengths in (np.array([4, 7, 6]), torch.tensor([4, 7, 6], dtype=torch.int32), (4, np.int16(7), np.uint8(6)),
                        collections.namedtuple("Lengths", "a b c")(4, torch.tensor(7), 6)):
            pattern = {"kind": np.str_("documents"), "documents": lengths, "causal": np.bool_(True)}
            self.assertEqual(request(pattern), request("{ kind = 'documents', documents = [4, 7, 6], causal = true }"))
        steps = {"kind": "blocks", "map": "hierarchical", "levels": np.array([[1, 2], [4, 16]])}
        self.assertEqual(request(steps), request("{ kind = 'blocks', map = 'hierarchical', levels = [[1, 2], [4, 16]] }"))
        self.assertEqual(request({"kind": "documents", "documents": range(8, 10)}),
                         request("{ kind = 'documents', documents = [8, 9] }"))
        for pattern, words in [
            ({"kind": "window", "left": np.float32(1.5), "right": 0}, '"left" must be a whole number'),
            ({"kind": "window", "left": float("inf"), "right": 0}, '"left" must be a whole number'),
            ({"kind": "window", "left": None, "right": 0}, r"^\[pattern\] left must be a number, .* None: leave the key out"),
            ({"kind": "union", "of": [{"kind": {1}}]}, r"^\[pattern\] of\[0\].kind must be .* but is set"),
            ({"kind": "causal", 3: 4}, "the keys of a pattern must be strings, but one is 3"),
            ({"kind": "causal", "a 'b'\n": 1}, "has no key"),
            ([{"kind": "causal"}], r"^\[pattern\] a pattern must be inline TOML or a mapping .* but is list"),
        ]:
            with self.assertRaisesRegex(annulus.AnnulusError, words):
                request(pattern)

    def test_patterns_take_any_file_name(self):
        header = b'{"mask": {"dtype": "U8", "shape": [1, 1, 2, 2], "data_offsets": [0, 4]}}'
        q = torch.randn(1, 20, 1, 8, dtype=torch.float64)
        want = annulus.attention(q, q, q, {"kind": "blocks", "map": "local", "block": 16, "window_blocks": 0})
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        for name in ("it's", 'a "b" \\ c', "tab\t line\n del\x7f bell\a", "längs 数 \U0001f600", "{ = }, #"):
            path = os.path.join(folder, name)
            with open(path, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header + b"\1\0\0\1")
            for given in (path, pathlib.Path(path), os.fsencode(path)):
                pattern = {"kind": "blocks", "map": "file", "file": given, "block": 16}
                exactness.agree(annulus.attention(q, q, q, pattern), want, name)
        with self.assertRaisesRegex(annulus.AnnulusError, r"^\[pattern\] a pattern is text in UTF-8, .* another name"):
            annulus.attention(q, q, q, {"kind": "blocks", "map": "file", "file": b"\xff", "block": 16})

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

    def test_masks_and_kept_keys_are_those_of_sdpa(self):
        q, k, v = (torch.randn(2, 150, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
        weight = torch.randn(2, 150, 4, 8, dtype=torch.float64)

        def both(pattern, shown, **given):
            out = annulus.attention(q, k, v, pattern, **given)
            rows = [t.repeat_interleave(4 // t.shape[2], 2).transpose(1, 2) for t in (q, k, v)]
            want = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=shown).transpose(1, 2)
            exactness.agree(out, want)
            for got, wanted in zip(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(want, (q, k, v), weight)):
                exactness.agree(got, wanted)

        causal = torch.ones(150, 150, dtype=torch.bool).tril()
        for sizes in ((1, 1), (2, 1), (1, 4), (2, 4)):
            shown = torch.rand(*sizes, 150, 150) < 0.5
            shown[..., 0] = True
            mask = annulus.TokenMask(shown)
            both("{ kind = 'full' }", shown.expand(2, -1, -1, -1), mask=mask)
            both({"kind": "causal", "mask": mask}, shown.expand(2, -1, -1, -1) & causal)
            both({"kind": "full"}, shown.expand(2, -1, -1, -1), mask=shown.to(torch.uint8).numpy())  # kept by autograd alone
        kept = torch.rand(2, 150) < 0.7
        kept[:, 0] = True
        both("{ kind = 'full' }", kept[:, None, None].expand(2, 1, 150, 150), kept_keys=kept)
        both({"kind": "causal", "kept_keys": kept.numpy()}, kept[:, None, None] & causal)
        run = lambda: annulus.attention(q, k, v, {"kind": "causal", "mask": mask})  # noqa: E731
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(), annulus.attention(q, k, v, mask=mask)))
        kept[1] = False  # a row of padding alone
        out = annulus.attention(q, k, v, "{ kind = 'full' }", kept_keys=kept)
        self.assertEqual(out[1].count_nonzero(), 0)
        self.assertEqual(sum(g[1].count_nonzero() for g in torch.autograd.grad(out.sum(), (q, k, v))), 0)

    def test_masks_refuse_what_they_cannot_be(self):
        ones = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        q = torch.randn(2, 8, 4, 8)
        for shown, part in ((ones[0, 0], r"mask\[None, None\]"), (ones[0], r"mask\[:, None\]"), (ones.float(), "mask == 0"),
                            (~ones, "shows no pair")):
            with self.assertRaisesRegex(annulus.AnnulusError, part):
                annulus.TokenMask(shown)
        for shown in (ones.expand(3, 1, 8, 8), ones.expand(1, 2, 8, 8), torch.ones(1, 1, 8, 9, dtype=torch.bool)):
            with self.assertRaisesRegex(annulus.AnnulusError, r"expected \[2 or 1, 4 or 1, 8, 8\]"):
                annulus.attention(q, q, q, mask=shown)
        gone = annulus.TokenMask(ones).mask_digest
        with self.assertRaisesRegex(annulus.AnnulusError, "no mask has the digest"):
            annulus.attention(q, q, q, {"kind": "causal", "mask_digest": gone})
        with self.assertRaisesRegex(annulus.AnnulusError, r"\[batch or 1, keys\]"):
            annulus.attention(q, q, q, kept_keys=ones)
        with self.assertRaisesRegex(annulus.AnnulusError, "keeps no key"):
            annulus.attention(q, q, q, kept_keys=~ones[0, 0, :1])
        mask = annulus.TokenMask(ones)
        self.assertTrue(annulus.plan({"kind": "causal", "mask": mask}, 8, 2)["proof"]["holds"])

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

    def test_written_signatures_of_operators_are_those_registered(self):
        optional = {"Optional[Tensor]": torch.Tensor | None, "Optional[int]": int | None, "Optional[float]": float | None,
                    "Optional[List[int]]": collections.abc.Sequence[int] | None}
        plain = {"Tensor": torch.Tensor, "str": str, "int": int, "float": float, "bool": bool}

        def typed(schema):
            return int | torch.SymInt if schema.kind() == "SymIntType" else (optional | plain)[str(schema)]

        registered = {}
        for schema in torch._C._jit_get_all_schemas():
            if schema.name.startswith("annulus::"):
                returned = [typed(r.real_type) for r in schema.returns]
                registered[schema.name.split("::")[1]] = inspect.Signature([
                    inspect.Parameter(a.name, inspect.Parameter.KEYWORD_ONLY if a.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                                      default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
                                      annotation=typed(a.real_type)) for a in schema.arguments],
                    return_annotation=tuple[tuple(returned)] if len(returned) > 1 else (returned or [None])[0])
        written = {}
        for name, function in vars(annulus.Operators).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                signature = inspect.signature(function)
                written[name] = signature.replace(parameters=list(signature.parameters.values())[1:])  # without self
        self.assertEqual(written, registered)
        self.assertIs(inspect.signature(annulus.load).return_annotation, annulus.Operators)

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
            for use in ("import annulus; annulus.attention", "from annulus import attention"):
                done = subprocess.run([sys.executable, "-c", use], env=env, capture_output=True, text=True)
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, "ImportError: the library of annulus.*" + words)


if __name__ == "__main__":
    torch_python.main()
