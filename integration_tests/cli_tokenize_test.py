#!/usr/bin/env python3
"""Tests `annulus tokenize` as a user types it: shards are made, shown and checked in every format; calls are stopped and
continued; errors. tests/python/tokenizer tests the ids themselves."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "tests", "python", "tokenizer")]
import cli  # noqa: E402
import support  # noqa: E402

PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
if not os.environ.get("ANNULUS_TOKENIZER_PYTHON"):
    os.environ["ANNULUS_TOKENIZER_PYTHON"] = PYTHON
    os.execv(PYTHON, [PYTHON, "-B", *sys.argv])


class TokenizeTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        self.script = self.path("annulus.sh")
        cli.write_stand_in(self.script, PYTHON, support.PROGRAM)
        self.texts = [t for t in support.texts(200) if "<" not in t]
        support.write_jsonl(self.path("in.jsonl"), self.texts)

    def annulus(self, *args, **env):
        return super().annulus(*args, **{"ANNULUS_SCRIPT": self.script, **env})

    def tokenize(self, *more, output="out"):
        code, out, err = self.annulus("tokenize", "--tokenizer", support.tokenizer("llama3"), "--input", "in.jsonl", "--output",
                                      output, *more)
        self.assertEqual((code, err), (0, ""), out)
        return out

    def test_makes_inspects_and_verifies_every_format(self):
        expected = support.library_ids("llama3", self.texts)
        tokens = sum(map(len, expected))
        for format in ("annulus", "megatron", "llmc", "nanogpt"):
            self.tokenize("--format", format, "--begin", "<|begin_of_text|>", "--shard-tokens", "20000", output=format)
            documents, shards = support.read_folder(self.path(format))
            self.assertEqual(documents, expected)
            code, out, err = self.annulus("tokenize", "--inspect", format)
            self.assertEqual((code, err), (0, ""), format)
            self.assertRegex(out, rf"(?m)^  format +{format}, 16 bits a token$")
            self.assertRegex(out, rf"(?m)^  shards +{len(shards)}$")
            self.assertRegex(out, rf"(?m)^  documents +{len(expected):,}$")
            self.assertRegex(out, rf"(?m)^  tokens +{tokens:,}$")
            self.assertRegex(out, r"(?m)^  tokenizer +llama3 \([0-9a-f]{32}\)$")
            counted = [int(n.replace(",", "")) for n in re.findall(r"(?m)^ +[\d, -]+  +([\d,]+)  #*$", out)]
            self.assertEqual(sum(counted), len(expected))
            self.assertIn('"<|begin_of_text|>', out)
            code, out, err = self.annulus("tokenize", "--verify", format)
            self.assertEqual((code, err), (0, ""), format)
            self.assertRegex(out, rf"^{format}: {len(shards)} shards of {tokens:,} tokens, whole, and their tokens.table\n$")

    def test_inspects_a_shard_without_its_other_files(self):
        self.tokenize("--format", "nanogpt", "--shard-tokens", "0", "--end", "<|end_of_text|>")
        os.mkdir(self.path("alone"))
        os.rename(self.path("out/train.bin"), self.path("alone/train.bin"))
        documents = r"(?m)^  documents +"
        code, out, err = self.annulus("tokenize", "--inspect", "alone", "--format", "nanogpt", "--end", "996")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, documents + f"{len(self.texts)}$")
        code, out, err = self.annulus("tokenize", "--inspect", "alone/train.bin", "--format", "nanogpt", "--width", "16")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, documents + "1$")
        code, out, err = self.annulus("tokenize", "--verify", "alone", "--format", "nanogpt")
        self.assertEqual(code, 0, err)
        self.assertIn("only what the format itself stores was checked", out)

    def test_verify_finds_damage(self):
        for format, name in (("annulus", "shard-00000.tokens"), ("megatron", "shard-00000.bin"), ("llmc", "tokens_train_000000.bin"),
                             ("nanogpt", "train-00000.bin")):
            self.tokenize("--format", format, "--begin", "<|begin_of_text|>", output=format)
            with open(self.path(f"{format}/{name}"), "r+b") as f:
                f.seek(5000)
                byte = f.read(1)
                f.seek(5000)
                f.write(bytes([byte[0] ^ 4]))
            self.assert_refused(3, name, "tokenize", "--verify", format)
        with open(self.path("annulus/tokens.table"), "ab") as f:
            f.write(b"x")
        self.assert_refused(3, "annulus/tokens.table is not a valid table of tokens", "tokenize", "--inspect", "annulus")
        os.remove(self.path("annulus/shard-00000.tokens"))
        self.assert_refused(3, "shard-00000.tokens cannot be read", "tokenize", "--verify", "annulus")

    def test_continues_after_ctrl_c(self):
        big = support.texts(3000, seed=9)
        support.write_jsonl(self.path("in.jsonl"), big)
        words = ["tokenize", "--tokenizer", support.tokenizer("llama3"), "--input", "in.jsonl", "--output", "out", "--shard-tokens",
                 "20000"]
        # As a terminal does, this sends the signal to every process of the group.
        os.mkdir(self.path("out"))
        running = self.start(*words, env={"ANNULUS_SCRIPT": self.script}, prefix=("setsid",))
        support.wait_for(self.path("out/shard-00001.tokens"), running.process)
        os.killpg(running.process.pid, signal.SIGINT)
        code, err = running.finish()
        self.assertEqual(code, 130, err)
        self.assertRegex(err, r"^annulus: interrupted; \d+ finished shards are kept: the same command goes on after them\n$")
        self.assert_refused(3, "out is not finished: repeat the command that makes it", "tokenize", "--inspect", "out")
        code, out, err = self.annulus(*words)
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out, "^going on after ")
        self.assertEqual(support.read_folder(self.path("out"))[0], support.library_ids("llama3", big))

    def test_progress_is_live_on_a_terminal(self):
        support.write_jsonl(self.path("in.jsonl"), support.texts(8000))
        terminal, end = pty.openpty()
        columns = 60
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with open(end, "wb") as out:
            done = subprocess.Popen([cli.ANNULUS, "tokenize", "--tokenizer", support.tokenizer("llama3"), "--input", "in.jsonl",
                                     "--output", "out"], cwd=self.folder, env=cli.environment(TERM="xterm", ANNULUS_SCRIPT=self.script),
                                    stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        text = b""
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                break
            text += piece
        os.close(terminal)
        self.assertEqual(done.wait(cli.LIMIT), 0)
        lines = text.decode().split("\r\x1b[K")
        self.assertGreater(len(lines), 2, text)
        self.assertRegex(lines[1], r"^tokenize  [\d.]+ MB of [\d.]+ MB  [\d,]+ tokens  0 shards")
        self.assertTrue(all(len(line) < columns for line in lines[:-1]), lines)
        self.assertRegex(lines[-1], r"^[\d,]+ tokens of [\d,]+ documents")

    def test_refuses_invalid_usage_before_the_tokenizer_starts(self):
        os.chmod(self.script, 0o644)  # the script cannot be started
        some = ["tokenize", "--tokenizer", "t", "--input", "in.jsonl"]
        refused = self.assert_refused
        refused(2, "--output is missing", *some)
        refused(2, "--tokenizer is missing", "tokenize", "--input", "x", "--output", "out")
        refused(2, "--input is missing", "tokenize", "--tokenizer", "t", "--output", "out")
        refused(2, "--prompt is for --loss completion", *some, "--output", "out", "--prompt", "q")
        refused(2, "--bench measures texts", *some, "--bench", "--loss", "assistant")
        refused(2, "--bench keeps no shards", *some, "--output", "out", "--bench")
        refused(2, "--format", *some, "--output", "out", "--format", "parquet")
        refused(2, "--format text is for --inspect", *some, "--output", "out", "--format", "text")
        refused(2, "--width is for --inspect", *some, "--output", "out", "--width", "16")
        refused(2, "at least 1, got", *some, "--output", "out", "--processes", "0")
        refused(2, "at least 0, got", *some, "--output", "out", "--shard-tokens", "-1")
        refused(2, "unknown option --shard_tokens; did you mean", *some, "--output", "out", "--shard_tokens", "1")
        refused(2, "--inspect or --verify, not both", "tokenize", "--inspect", "a", "--verify", "a")
        refused(2, "--output is for making shards", "tokenize", "--inspect", "a", "--output", "out")
        refused(2, '--begin must be a token\'s id.*, got "<s>"', "tokenize", "--verify", "a", "--begin", "<s>")
        refused(9, "annulus.sh cannot be run: start it as ./annulus", *some, "--output", "out", ANNULUS_SCRIPT=self.script)
        refused(9, "this program was started without it", *some, "--output", "out", ANNULUS_SCRIPT="")
        refused(3, "nothing cannot be read", "tokenize", "--inspect", "nothing")
        os.mkdir(self.path("empty"))
        refused(3, "empty holds no shards", "tokenize", "--verify", "empty")
        self.assertFalse(os.path.exists(self.path("out")))

    def test_targets_that_count_in_part(self):
        lines = [{"prompt": f"the {word} token of ", "completion": f"{word} and more of it " * 3, "weight": i % 2 + 1}
                 for i, word in enumerate(["first", "second", "third", "fourth"] * 10)]
        lines.append({"prompt": "a question", "completion": ""})
        lines.append({"prompt": "a long question " * 40, "completion": "an answer"})
        with open(self.path("in.jsonl"), "w") as f:
            f.write("".join(json.dumps(line) + "\n" for line in lines))
        out = self.tokenize("--loss", "completion")
        counted, share = re.search(r"(?m)^targets that count: ([\d,]+) tokens \(([\d.]+) %\); in 1 document nothing counts$",
                                   out).groups()
        code, out, err = self.annulus("tokenize", "--inspect", "out")
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out, rf"(?m)^  targets +{counted} tokens count \({share} %\), with weights from 1 to 2$")
        code, out, err = self.annulus("tokenize", "--verify", "out")
        self.assertEqual((code, err), (0, ""))
        vocab = support.made_by(self.path("out"))["tokenizer"]["vocab"]
        with open(self.path("config.toml"), "w") as f:
            f.write(cli.tiny_config(3, model={"vocab": vocab}, data={"train": ["out/*.tokens"], "packing": "best-fit",
                                                                     "validation_fraction": 0}))
        code, out, err = self.annulus("pack", "config.toml", "--verify")
        self.assertEqual((code, err), (0, ""))
        targets, of_them = re.search(r"    training .*: ([\d,]+) targets in .*; ([\d,]+) targets of them count \([\d.]+ %\)", out).groups()
        self.assertEqual(of_them, counted)
        code, out, err = self.annulus("train", "config.toml")
        self.assertEqual(code, 0, out + err)
        self.assertEqual(out.count("no token counts as a target, so they teach nothing"), 1, out)
        self.assertRegex(out, r"in 1 document the prompt is longer than a row of 64 tokens, .*shard-00000.tokens, token [\d,]+ ")
        run = next(name for name in os.listdir(self.path("runs")) if name.startswith("tiny"))
        with open(self.path(f"runs/{run}/metrics.jsonl")) as f:
            last = [line for line in map(json.loads, f) if "loss" in line][-1]
        self.assertLess(last["targets_share"], 0.8)
        self.assertGreater(last["targets_share"], 0.1)
        # A damaged weight is noticed.
        path = self.path("out/shard-00000.tokens")
        with open(path, "r+b") as f:
            ends, runs = struct.unpack("<QQ", f.read(112)[96:])
            f.seek(ends + 8 * runs)
            f.write(struct.pack("<f", 0.5))
        self.assert_refused(3, "shard-00000.tokens", "tokenize", "--verify", "out")

    def test_passes_arguments_unchanged(self):
        with open(self.script, "w") as f:
            f.write('#!/bin/bash\nprintf "%s\\n" "$@"\nexit 8\n')
        code, out, _ = self.annulus("tokenize", "--tokenizer", "a b", "--input", "*.txt", "$(x)", "--output", "-o", "--begin", "<s>",
                                    "--no-special-tokens", "--processes", "3")
        self.assertEqual(code, 8)
        self.assertEqual(out.splitlines(), ["tokenizer", "tokenize", "--tokenizer=a b", "--input=*.txt", "--input=$(x)", "--output=-o",
                                            "--begin=<s>", "--shard-tokens=100000000", "--processes=3", "--no-special-tokens"])
        code, out, _ = self.annulus("tokenize", "--tokenizer", "t", "--input", "i", "--output", "o", "--loss", "completion", "--chat",
                                    "--prompt", "q", "--field", "a", "--weight", "w", "--group", "g", "--trees")
        self.assertEqual(out.splitlines()[5:], ["--field=a", "--loss=completion", "--prompt=q", "--weight=w", "--group=g",
                                                "--shard-tokens=100000000", "--processes=0", "--trees", "--chat"])

    def test_bench_compares_with_the_library(self):
        code, out, err = self.annulus("tokenize", "--bench", "--tokenizer", support.tokenizer("llama3"), "--input", "in.jsonl",
                                      "--processes", "1")
        self.assertEqual((code, err), (0, ""))
        self.assertRegex(out.splitlines()[-1], r"^tokenize: [\d.]+ of the library's encode_batch \(goal: at least 0.9\)")


if __name__ == "__main__":
    cli.main()
