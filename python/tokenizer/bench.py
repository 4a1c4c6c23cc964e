"""`tokenizer bench` (`annulus tokenize --bench`): compares the tokens per second of tokenize with those of the library's
own encode_batch, on the same processors in one run.

The baseline holds the documents in memory and only encodes them, with the library's threads. tokenize also starts its
processes, reads the files, hashes the tokens and writes whole shards. Both have loaded the tokenizer before. Rounds
alternate, and the best round of each side counts.
"""

import multiprocessing
import os
import tempfile
import time

from inputs import Reader, find, units
from pool import processors
from targets import settle
from tokenizer import Tokenizer
from work import Work

ROUNDS = 3
BATCH = 1 << 22  # characters that the baseline encodes in one call; all at once would need too much memory


def documents(options):
    inputs = find(options.input, options.kind)
    reader = Reader(inputs, options.field, options.bad_utf8 == "replace")
    for unit in units(inputs, options.field):
        yield from reader.documents(unit.task)


def batches(texts):
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_all(tokenizer, made, threads):
    """Returns (tokens, seconds) of the library alone."""
    library = tokenizer.behind.library
    tokens, began = 0, time.perf_counter()
    for batch in made:
        if tokenizer.kind == "tokenizers":
            tokens += sum(map(len, library.encode_batch(batch)))
        else:
            tokens += sum(map(len, library.encode(batch, num_threads=threads)))
    return tokens, time.perf_counter() - began


def baseline(threads, options):
    """Returns what encode_all does. It runs in a process of its own, in which the library uses its threads."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    tokenizer = Tokenizer(options.tokenizer, not options.no_special_tokens, options.specials_as_text)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    return encode_all(tokenizer, list(batches(documents(options))), threads)


def main(options):
    settle(options)
    threads = options.processes or processors()
    os.environ["ANNULUS_PROGRESS"] = "none"
    best = {"library": 0, "tokenize": 0}
    for turn in range(ROUNDS):
        with multiprocessing.get_context("spawn").Pool(1) as apart:
            tokens, seconds = apart.apply(baseline, (threads, options))
        best["library"] = max(best["library"], tokens / seconds)
        with tempfile.TemporaryDirectory() as folder:
            options.output = os.path.join(folder, "shards")
            work = Work(options)
            work.summary = False
            began = time.perf_counter()
            work.run()
            best["tokenize"] = max(best["tokenize"], work.tokens / (time.perf_counter() - began))
        print(f"round {turn + 1} of {ROUNDS}: {tokens:,} tokens; library {tokens / seconds:,.0f} tokens/s, tokenize "
              f"{best['tokenize']:,.0f} tokens/s at best", flush=True)
    print(f"tokenize: {best['tokenize'] / best['library']:.2f} of the library's encode_batch (goal: at least 0.9), on {threads} "
          f"processor{'' if threads == 1 else 's'}")
    return 0
