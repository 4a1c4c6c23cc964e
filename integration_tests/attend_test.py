#!/usr/bin/env python3
"""Tests `annulus attend` on 1 to 4 ranks against dense fp64 attention (attend_tool.cc), and its errors."""

import os
import re
import shlex
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402


def tool(*args):
    done = subprocess.run([cli.HELPERS[0], *map(str, args)], capture_output=True, text=True, timeout=cli.LIMIT)
    if done.returncode != 0:
        raise AssertionError(f"{args}: {done.stdout}{done.stderr}")
    return done.stdout


class AttendTest(cli.CliTest):
    def attend(self, ranks, *args):
        files = ["--input", "in.safetensors", "--output", "out.safetensors"]
        launch = ["launch", "-n", str(ranks)] if ranks else []
        code, out, err = self.annulus(*launch, "attend", *files, *args)
        self.assertEqual(code, 0, err)
        return out

    def check(self, kind="causal", left=0, right=0, offset=0, scale=0):
        tool("check", self.path("in.safetensors"), self.path("out.safetensors"), kind, left, right, offset, scale)

    def make(self, B, Sq, Sk, H, Hk, D, dtype, seed=1, magnitude=1):
        tool("make", self.path("in.safetensors"), B, Sq, Sk, H, Hk, D, dtype, seed, magnitude)

    def test_one_rank_without_launch(self):
        self.make(2, 65, 65, 4, 2, 16, "f32")
        out = self.attend(0, "--backward")
        self.assertRegex(out, r"^attend: 1 rank, ring, zigzag, 0 messages, 0 bytes sent, [\d.]+ s -> out.safetensors\n$")
        self.check()
        self.attend(0, "--kernel", "reference")  # without gradients; replaces the file
        self.check()

    def test_zigzag_ring(self):
        self.make(2, 67, 67, 4, 2, 16, "f32")
        out = self.attend(2, "--layout", "zigzag", "--schedule", "ring", "--backward")
        messages = re.search(r"2 ranks, ring, zigzag, (\d+) messages", out)
        # In the forward K and V go one hop each way. In the backward they may be kept, and gradients return.
        self.assertGreaterEqual(int(messages.group(1)), 4 + 4)
        self.check()

    def test_ring_of_four_bf16(self):
        self.make(1, 64, 64, 4, 4, 32, "bf16", magnitude=2)
        self.attend(4, "--layout", "zigzag", "--even", "--backward")
        self.check()

    def test_balanced_documents(self):
        self.make(1, 67, 67, 4, 2, 8, "f64")
        pattern = '{ kind = "causal", documents = [50, 3, 14] }'
        out = self.attend(3, "--layout", "balanced", "--pattern", pattern, "--schedule", "group-cast", "--backward", "--check")
        self.assertIn("group-cast, balanced", out)

    def test_layout_that_was_left_out_is_zigzag_and_said_once(self):
        self.make(1, 67, 67, 4, 2, 8, "f64")
        files = ["--input", "in.safetensors", "--output", "out.safetensors"]
        for layout in ([], ["--layout", "zigzag"], ["--lengths", "30,30,7"]):
            code, out, err = self.annulus("launch", "-n", "3", "attend", *files, *layout)
            self.assertEqual(code, 0, err)
            self.assertIn("contiguous, uneven" if "--lengths" in layout else "zigzag", out)
            said = [line for line in err.splitlines() if "--layout was not given, so 3 ranks divide" in line]
            self.assertEqual(len(said), 0 if layout else 1, err)
            self.check()
        code, _, err = self.annulus("attend", *files)  # one rank has all positions
        self.assertEqual((code, err), (0, ""))

    def test_window_striped_all_gather_fp64(self):
        self.make(2, 63, 63, 6, 2, 8, "f64")
        window = "{ kind = \"window\", left = 9, right = 2 }"
        self.attend(3, "--pattern", window, "--layout", "striped", "--schedule", "all-gather", "--backward")
        self.check("window", 9, 2)

    def test_schedules_that_move_queries_and_have_groups(self):
        self.make(2, 61, 61, 6, 2, 8, "f64")
        for schedule in ("double-ring", "group-cast", "ulysses", "ulysses-ring", "mesh"):
            with self.subTest(schedule=schedule):
                self.attend(4, "--schedule", schedule, "--within", "2", "--layout", "zigzag", "--backward")
                self.check()

    def test_full_with_other_key_length_and_scale(self):
        self.make(1, 31, 77, 2, 1, 16, "f64")
        self.attend(3, "--pattern", "{ kind = 'full' }", "--scale", "0.5", "--backward")
        self.check("full", scale=0.5)

    def test_query_offset_and_rows_without_keys(self):
        self.make(1, 40, 24, 2, 2, 8, "f64")
        self.attend(2, "--query-offset", "-10", "--layout", "zigzag", "--backward")  # queries 0 to 9 see no key
        self.check(offset=-10)
        self.attend(0, "--query-offset", "-10")
        self.check(offset=-10)

    def test_queries_are_aligned_by_name(self):
        for name, offset in (("bottom-right", 16), ("top-left", 0)):
            self.make(1, 24, 40, 2, 2, 8, "f64")
            self.attend(2, "--query-offset", name, "--layout", "zigzag", "--backward")
            self.check(offset=offset)
        code, out, err = self.annulus("attend", "--random", "queries=24,keys=40", "--query-offset", "bottom-right", "--check",
                                      "--pattern", "{ kind = 'dilated', segment_lengths = [8, 30], dilation_rates = [1, 3] }")
        self.assertEqual(code, 0, err)
        code, _, err = self.annulus("attend", "--random", "queries=24", "--query-offset", "bottom-left")
        self.assertEqual(code, 2, err)
        self.assertIn('--query-offset: expected a whole number, "bottom-right" or "top-left", got "bottom-left"', err)

    def test_uneven_lengths_and_reference_kernel(self):
        self.make(1, 33, 33, 2, 1, 8, "f32")
        self.attend(4, "--lengths", "1,20,0,12", "--kernel", "reference", "--backward")
        self.check()

    def test_fewer_positions_than_ranks(self):
        self.make(1, 2, 2, 1, 1, 4, "f64")
        self.attend(4, "--layout", "zigzag", "--backward")
        self.check()

    def test_checks_random_inputs_and_writes_the_map(self):
        adaptive = "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }"
        sizes = "batch=2,queries=90,heads=4,kv_heads=2,seed=7"
        args = ["attend", "--random", sizes, "--backward", "--check", "--dropout", "0.1", "--seed", "3"]
        code, out, err = self.annulus("launch", "-n", "3", *args, "--pattern", adaptive, "--mask-out", "mask")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"check: out [\d.e-]+, lse [\d.e-]+, dq [\d.e-]+, dk [\d.e-]+, dv [\d.e-]+; allowed")
        again = "{ kind = 'blocks', map = 'file', block = 16, file = 'mask', causal = true }"
        code, out, err = self.annulus("launch", "-n", "2", *args, "--pattern", again, "--layout", "zigzag")
        self.assertEqual(code, 0, err)
        self.assertIn("check: out", out)

    def test_checks_sinks_and_caps(self):
        args = ["attend", "--random", "queries=70,heads=4,kv_heads=2,dim=8,seed=3", "--backward", "--sinks", "--softcap", "1.5"]
        for ranks, check in ((1, []), (3, []), (3, ["rows=1000"])):
            code, out, err = self.annulus("launch", "-n", str(ranks), *args, "--check", *check)
            self.assertEqual(code, 0, err)
            self.assertIn("dsinks", out)

    def test_checks_mean_combine_with_inputs_of_a_file(self):
        self.make(1, 50, 50, 4, 2, 8, "f64")
        mean = "{ kind = 'dilated', segment_lengths = [20, 50], dilation_rates = [1, 2], combine = 'mean' }"
        self.assertIn("check: out", self.attend(2, "--pattern", mean, "--backward", "--check"))

    def test_checks_drawn_rows_of_a_file(self):
        self.make(1, 500, 500, 4, 2, 8, "bf16")
        out = self.attend(3, "--layout", "striped", "--backward", "--check", "rows=20,seed=5")
        self.assertIn("checked: 20 of 2,000 rows (out, lse, dq) and 20 of 1,000 keys (dk, dv), drawn with seed 5", out)
        self.assertIn("\nnot checked: the other rows and keys; ", out)
        code, out, err = self.annulus("attend", "--random", "queries=70", "--check", "rows=1000")
        self.assertEqual(code, 0, err)
        self.assertIn("checked: all 70 rows (out, lse)\nnot checked: nothing\n", out)
        for rows, words in (("rows=0", "at least 1"), ("rows=abc", "abc"), ("all", "rows=N")):
            code, _, err = self.annulus("attend", "--random", "queries=70", "--check", rows)
            self.assertEqual(code, 2, err)
            self.assertIn(words, err)

    def test_commands_printed_by_property_tests_run(self):
        for seed, ranks in [(1, 2), (2, 3), (3, 2), (4, 3)]:
            line = tool("command", seed, ranks)
            command = shlex.split(line)
            self.assertEqual(command[:4], ["./annulus", "launch", "-n", str(ranks)])
            code, out, err = self.annulus(*command[1:])
            self.assertEqual(code, 0, line + err)
            self.assertIn("check: out", out, line)

    def test_help_shows_the_defaults_of_random_inputs(self):
        code, out, _ = self.annulus("attend", "--help")
        self.assertEqual(code, 0)
        for words in ("keys=QUERIES", "heads=1,", "kv_heads=HEADS", "magnitude=1"):
            self.assertIn(words, out)
        options = re.search(r"(?s)\nOptions:\n(.*?)\nLog:\n", out).group(1)
        headings = [line for line in options.split("\n") if line and (len(line) > 80 or not line.startswith("  "))]
        self.assertEqual(headings, ["Tensors:", "Attention:", "Ranks:", "Dropout:"])

    def test_help_names_the_kinds_of_patterns_and_their_page(self):
        for subcommand in ("attend", "logits", "plan"):
            code, out, _ = self.annulus(subcommand, "--help")
            self.assertEqual(code, 0)
            said = re.search(r"(?s)--pattern TEXT +(.*?)\n  -", out).group(1)
            kinds = "full, causal, window, dilated, blocks, documents, tree, mask, union or slices; docs/explanation/attention.md"
            self.assertIn(kinds, " ".join(said.split()))

    def test_errors_leave_no_output(self):
        self.make(1, 30, 30, 4, 2, 8, "f32")
        source = self.path("in.safetensors")
        files = ["--input", "in.safetensors", "--output", "out.safetensors"]

        def refused(code, pattern, *args):
            before = sorted(f for f in os.listdir(self.folder) if f != "runs")
            self.assert_refused(code, pattern, *args)
            self.assertEqual(sorted(f for f in os.listdir(self.folder) if f != "runs"), before)

        refused(2, "--input", "attend")
        refused(2, "did you mean \"--backward\"", "attend", "--bakward")  # although required options are missing
        refused(2, "--input and --random", "attend", *files, "--random", "queries=3")
        refused(2, "did you mean \"queries\"", "attend", "--random", "querys=3")
        refused(2, "--lengths.*--layout", "attend", *files, "--lengths", "10,20", "--layout", "zigzag")
        refused(2, "--mask-out", "attend", *files, "--mask-out", "mask")
        refused(2, "--dropout", "attend", *files, "--dropout", "1")
        refused(2, "--check", "attend", "--random", "queries=100000", "--check")
        refused(4, "documents", "launch", "-n", "2", "attend", *files, "--pattern", "{ kind = 'causal', documents = [7] }")
        refused(2, "did you mean \"causal\"", "attend", *files, "--pattern", "{ kind = 'casual' }")
        refused(2, "--pattern", "attend", *files, "--pattern", "causal")
        refused(2, "did you mean \"zigzag\"", "launch", "-n", "2", "attend", *files, "--layout", "zigzak")
        refused(2, "schedule", "attend", *files, "--schedule", "rung")
        refused(2, "kernel", "attend", *files, "--kernel", "attn")
        refused(2, "--scale", "attend", *files, "--scale", "nan")
        refused(2, "query-offset", "attend", *files, "--query-offset", "x")
        refused(3, "missing.safetensors", "attend", "--input", "missing.safetensors", "--output", "o")
        refused(8, "folder .*nowhere", "attend", "--input", "in.safetensors", "--output", "nowhere/out.safetensors")
        refused(2, "same file", "attend", "--input", "in.safetensors", "--output", "./in.safetensors")
        blocks = "{ kind = 'blocks', map = 'local', block = 16, window_blocks = 1 }"
        written = ["attend", "--random", "queries=32", "--pattern", blocks, "--output", "new"]
        refused(2, "--mask-out ./new and --output, new, are the same file", *written, "--mask-out", "./new")
        os.mkfifo(self.path("pipe"))
        refused(2, "no regular file", "attend", "--input", "in.safetensors", "--output", "pipe")
        # 30 positions are not a multiple of the 4 chunks.
        refused(4, "30", "launch", "-n", "2", "attend", *files, "--layout", "zigzag", "--even")
        refused(4, "length", "launch", "-n", "2", "attend", *files, "--lengths", "10,10,10")
        for how, pattern in [
            ("truncate", "in.safetensors.bad"),
            ("flip", "in.safetensors.bad"),
            ("drop-v", "no tensor \"v\".*it has dout, k, q"),
            ("shape-k", "\"v\": shape .* should be like k"),
            ("dtype-k", "\"k\": dtype F64 should be q's, F32"),
            ("rank-q", "\"q\": shape .* should be \\[batch, length, heads, head size\\]"),
        ]:
            tool("garble", source, how)
            refused(3, pattern, "attend", "--input", "in.safetensors.bad", "--output", "out.safetensors")
        tool("garble", source, "drop-dout")
        refused(3, "no tensor \"dout\"", "launch", "-n", "2", "attend", "--input", "in.safetensors.bad", "--output", "o", "--backward")

    def test_full_disk_keeps_the_old_output(self):
        self.make(1, 64, 64, 4, 4, 64, "f32")
        with open(self.path("out.safetensors"), "w") as f:
            f.write("old")
        # A limit on file sizes takes the place of a full disk: the write fails half-way.
        script = 'ulimit -f 8; exec "$0" "$@"'
        done = subprocess.run(
            ["bash", "-c", script, cli.ANNULUS, "attend", "--input", "in.safetensors", "--output", "out.safetensors"],
            cwd=self.folder,
            env=cli.environment(),
            capture_output=True,
            text=True,
            timeout=cli.LIMIT,
        )
        self.assertEqual(done.returncode, 8, done.stderr)
        self.assertIn("out.safetensors", done.stderr)
        self.assertEqual(sorted(os.listdir(self.folder)), ["in.safetensors", "out.safetensors"])
        with open(self.path("out.safetensors")) as f:
            self.assertEqual(f.read(), "old")


if __name__ == "__main__":
    cli.main()
