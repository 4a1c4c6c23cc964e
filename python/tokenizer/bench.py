"""`tokenizer bench` (`annulus tokenize --bench`): compares the tokens per second of tokenize with those of the library's
own encode_batch, on the same processors in one run.

The baseline holds the documents in memory and only encodes them, with the library's threads. tokenize also starts its
processes, reads the files, hashes the tokens and writes whole shards. Both have loaded the tokenizer before. Rounds
alternate, and the best round of each side counts.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from inputs import Reader, find, units
from pool import processors
from targets import settle
from work import Work

ROUNDS = 3
BATCH = 1 << 22  # characters that the baseline encodes in one call; all at once would need too much memory

BASELINE = """
import os, sys, time
sys.path.insert(0, os.environ["ANNULUS_BENCH_FOLDER"])
from bench import baseline
baseline(sys.argv[1], sys.argv[2], sys.argv[3:])
"""


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


def baseline(threads, path, options):
    """Prints the result of encode_all. It runs in a process of its own, in which the library uses its threads."""
    from tokenizer import Tokenizer

    parsed = parse(options)
    tokenizer = Tokenizer(path, not parsed.no_special_tokens, parsed.specials_as_text)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    print(*encode_all(tokenizer, list(batches(documents(parsed))), int(threads)))


def parse(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", action="append")
    parser.add_argument("--kind")
    parser.add_argument("--field")
    parser.add_argument("--bad-utf8")
    parser.add_argument("--no-special-tokens", action="store_true")
    parser.add_argument("--specials-as-text", action="store_true")
    return parser.parse_args(words)


def main(options):
    settle(options)
    threads = options.processes or processors()
    words = [f"--input={glob}" for glob in options.input]
    words += [f"--kind={options.kind}", f"--field={options.field}", f"--bad-utf8={options.bad_utf8}"]
    words += ["--no-special-tokens"] * options.no_special_tokens + ["--specials-as-text"] * options.specials_as_text
    here = os.path.dirname(os.path.abspath(__file__))
    env = {**os.environ, "ANNULUS_BENCH_FOLDER": here, "RAYON_NUM_THREADS": str(threads)}
    os.environ["ANNULUS_PROGRESS"] = "none"
    best = {"library": 0, "tokenize": 0}
    for turn in range(ROUNDS):
        done = subprocess.run([sys.executable, "-I", "-B", "-c", BASELINE, str(threads), options.tokenizer, *words], env=env,
                              stdout=subprocess.PIPE, check=True)
        tokens, seconds = done.stdout.split()
        best["library"] = max(best["library"], int(tokens) / float(seconds))
        with tempfile.TemporaryDirectory() as folder:
            options.output = os.path.join(folder, "shards")
            work = Work(options)
            work.summary = False
            began = time.perf_counter()
            work.run()
            best["tokenize"] = max(best["tokenize"], work.tokens / (time.perf_counter() - began))
        print(f"round {turn + 1} of {ROUNDS}: {int(tokens):,} tokens; library {int(tokens) / float(seconds):,.0f} tokens/s, tokenize "
              f"{best['tokenize']:,.0f} tokens/s at best", flush=True)
    print(f"tokenize: {best['tokenize'] / best['library']:.2f} of the library's encode_batch (goal: at least 0.9), on {threads} "
          f"processor{'' if threads == 1 else 's'}")
    return 0
