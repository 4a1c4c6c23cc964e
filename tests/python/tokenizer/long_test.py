#!/usr/bin/env python3
"""The long version of encode_test.py: 100 MB of text found on the machine (Python sources and Debian's texts), cut into
documents of many lengths, with a tokenizer of each library. `./annulus test --all` runs it."""

import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import support  # noqa: E402

support.enter()

SIZE = 100_000_000
support.LIMIT = 600


def documents():
    make = support.make()
    draw, size = random.Random(1), 0
    texts = [text for paths in (make.python_sources(), make.debian_texts()) for _, text in make.documents(paths, SIZE // 2)]
    while size < SIZE:
        text = draw.choice(texts)
        begin = draw.randrange(len(text))
        piece = text[begin:begin + int(10 ** draw.uniform(0, 6))]
        size += len(piece.encode())
        yield piece


class Long(support.Test):
    def test_ids_of_100_megabytes_match_the_library(self):
        import tokenizers

        made = list(documents()) + support.NASTY
        third = len(made) // 3
        support.write_jsonl(self.path("a.jsonl"), made[:third])
        support.write_parquet(self.path("b.parquet"), made[third:2 * third])
        support.write_jsonl(self.path("c.jsonl.zst"), made[2 * third:])
        for kind in ("llama3", "mistral", "sentencepiece"):
            self.tokenize("--input", "a.jsonl", "--input", "b.parquet", "--input", "c.jsonl.zst", "--shard-tokens", "7000000",
                          "--processes", "3", kind=kind, output=kind)
            if kind == "sentencepiece":
                import sentencepiece

                encode = sentencepiece.SentencePieceProcessor(
                    model_file=os.path.join(support.tokenizer(kind), "tokenizer.model")).encode
            else:
                library = tokenizers.Tokenizer.from_file(os.path.join(support.tokenizer(kind), "tokenizer.json"))
                encode = lambda text, library=library: library.encode(text).ids  # noqa: E731
            texts = iter(made)
            for shard in support.made_by(self.path(kind))["shards"]:  # only one shard is in memory at a time
                for ids in support.read_annulus(self.path(f"{kind}/{shard['file']}")):
                    if ids != encode(next(texts)):
                        self.fail(f"{kind}: a document of {shard['file']} has other ids than the library gives")
            self.assertIsNone(next(texts, None))


if __name__ == "__main__":
    support.main()
