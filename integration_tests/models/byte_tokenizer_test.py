#!/usr/bin/env python3
"""Tests the tokenizer in the folder of an exported run on bytes: transformers and annulus read each text's bytes as its
ids, and write the text again."""

import os
import random
import struct
import sys
import unicodedata

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()
torch_python.need("transformers")

import byte_runs  # noqa: E402
import cli  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(HERE))
PYTHON = sys.argv[2] if len(sys.argv) > 2 else ""
LIMIT = 240  # seconds of a command
PROMPT = "def rank("
TEXTS = [
    "",
    " ",
    "  leading and trailing  ",
    "\n\n\r\n\ta\n",
    "\x00\x01\x7f\x80\xff",
    "do n't change 'm , or . what stands before !",
    "<s>text</s><unk><|endoftext|><|im_start|>[PAD][CLS]<|begin|><|end|><0x0A>",
    "\ufeffa mark first, \u2581metaspace, Ġ and Ċ, \u200b\u00a0",
    "\U0001f600\U0001f1e9\U0001f1ea\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd",
    "e\u0301 is not \u00e9, \ufb01 is not fi, \u212b is not \u00c5",
    "x" * 5000,
    # A character of each block of 64 has every byte that occurs in UTF-8.
    "".join(chr(c) for c in range(0x110000) if (c < 0x100 or c % 64 == c // 64 % 64) and not 0xD800 <= c < 0xE000),
]
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}


class ByteTokenizer(cli.CliTest):
    def annulus(self, *args, **env):
        return super().annulus(*args, limit=LIMIT, **env)

    def setUp(self):
        super().setUp()
        self.script = self.path("annulus.sh")
        cli.write_stand_in(self.script, PYTHON, os.path.join(ROOT, "python", "tokenizer"))

    def done(self, *args):
        code, out, err = self.annulus(*args, ANNULUS_SCRIPT=self.script)
        self.assertEqual((code, err), (0, ""), out)
        return out

    def exported(self, family):
        byte_runs.train(self, family)
        return byte_runs.export(self, family)

    def assert_reads_bytes(self, tokenizer, texts):
        for text in texts:
            ids = list(text.encode())
            self.assertEqual(tokenizer(text)["input_ids"], ids, text[:80])
            self.assertEqual(tokenizer.encode(text, add_special_tokens=False), ids, text[:80])
            for skip in (False, True):
                self.assertEqual(tokenizer.decode(ids, skip_special_tokens=skip), text)

    def test_transformers_reads_the_bytes_of_a_text(self):
        self.assertEqual(set("".join(TEXTS).encode()) | NEVER_IN_UTF8, set(range(256)))
        draw = random.Random(1)
        for family in byte_runs.FAMILIES:
            folder, out = self.exported(family)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self.assertEqual(sorted(tokenizer.get_vocab().values()), list(range(256)), family)
            for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token):
                self.assertIsNone(token, family)
            if family == "qwen2":  # as the export says
                self.assertIn("note: AutoTokenizer of transformers 5", out)
                self.assert_reads_bytes(tokenizer, [t for t in TEXTS if unicodedata.is_normalized("NFC", t)])
                tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            else:
                self.assertNotIn("AutoTokenizer", out)
            self.assert_reads_bytes(tokenizer, TEXTS)
            for _ in range(50):  # what a model may write
                written = bytes(draw.randrange(256) for _ in range(40))
                self.assertEqual(tokenizer.decode(list(written)), written.decode(errors="replace"))

    def test_transformers_writes_what_annulus_writes(self):
        folder, _ = self.exported("llama")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        prompt = ids.shape[1]
        with torch.no_grad():
            for _ in range(40):
                best = model(input_ids=ids).logits[0, -1].topk(2)
                # Each of at most 64 tensors on the way to a logit is rounded, by 2^-24 of what is in it.
                if best.values[0] - best.values[1] < 64 * 2**-24 * best.values.abs().max():
                    break
                ids = torch.cat([ids, best.indices[:1].view(1, 1)], 1)
        written = ids.shape[1] - prompt
        self.assertGreater(written, 4)
        words = ["--prompt", PROMPT, "--temperature", "0", "--tokens", str(written)]
        wanted = tokenizer.decode(ids[0].tolist())
        self.assertEqual(self.done("sample", folder, *words), wanted)
        self.assertEqual(self.done("sample", "llama", *words), wanted)
        random_words = ["--prompt", TEXTS[2] + "\U0001f600", "--seed", "3", "--tokens", "200"]
        self.assertEqual(self.done("sample", folder, *random_words), self.done("sample", "llama", *random_words))

    def test_annulus_reads_the_folder_again(self):
        folder, _ = self.exported("llama")
        with open(self.path("again.txt"), "w", newline="") as f:
            f.write("\n".join(TEXTS))
        made = ["tokenize", "--tokenizer", folder, "--input", "again.txt", "--output"]
        self.done(*made, "plain", "--format", "nanogpt", "--shard-tokens", "0", "--end", "255")  # which no text has
        with open(self.path("plain/train.bin"), "rb") as f:
            tokens = f.read()
        with open(self.path("again.txt"), "rb") as f:
            self.assertEqual(list(struct.unpack(f"<{len(tokens) // 2}H", tokens)), [*f.read(), 255])
        self.done(*made, "tokens")
        train = ["train", "config.toml", "--init", folder, "--set", "run.steps=1"]
        for name, data, says in (("text", "again.txt", "its tokenizer's ids are bytes, as the data's tokens are"),
                                 ("shards", "tokens/*.tokens", "its tokenizer is the data's")):
            out = self.done(*train, "--set", f"run.name={name}", "--set", f'data.train=["{data}"]', "--set", "model.layers=2")
            self.assertIn(says, out)
            self.done("export", name, f"{name}-folder")
            for file in ("tokenizer.json", "tokenizer_config.json"):
                with open(os.path.join(folder, file)) as of, open(self.path(f"{name}-folder/{file}")) as again:
                    self.assertEqual(again.read(), of.read(), (name, file))


if __name__ == "__main__":
    cli.main()
