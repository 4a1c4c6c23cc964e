"""Makes the text that run.sh trains and evaluates on, from a seed and nothing else. A document is a file, and every
document has a vocabulary of its own:

    qz42 hf17 qz42 bd90 hf17 ...

A word is a key of two letters and its value, two digits. The words of a document are drawn from a list that was drawn for
it, so a value can be predicted only where its word has been read before, however far back that was. A part of the
documents of `short` is a random string that is repeated: from these a model learns in few steps to look for what followed
the last time. There is nothing between a key and its value, since looking back by the last letter alone is then a help.
Half of the documents of `long` have spaces between their words, as the prompts of `evaluate --task kv --pairs 32` have.

    make.py FOLDER [--seed N] [--short-documents N] [--long-documents N] [--short N] [--long N] [--longest N]

writes these folders in FOLDER, with documents of at most so many bytes:
    short/*.txt     --short (256): to train with
    long/*.txt      --long (2048): to continue with
    longest/*.txt   --longest (none): to continue with at a second length
    held-out/*.txt  of exactly --long bytes, or --longest if given, to measure perplexity by position on
"""

import argparse
import math
import os
import random
import string

KEYS, VALUES = string.ascii_lowercase, string.digits
WORD = 5          # bytes of a word and the space behind it
REPEATED = 0.3    # the share of `short` that is repeated strings
SPACED = 0.5      # the share of `long` and `longest` that has spaces between words
MOST_WORDS = 64   # in the vocabulary of a document: the longer it is, the farther they lie apart


def evenly(draws, least, most):
    """Draws a number whose logarithm is uniform: as many below 2 x as between x and 2 x."""
    return round(math.exp(draws.uniform(math.log(least), math.log(max(least, most)))))


def vocabulary(draws, count):
    """Draws words with different keys."""
    keys = {}
    while len(keys) < count:
        keys.setdefault("".join(draws.choices(KEYS, k=2)), "".join(draws.choices(VALUES, k=2)))
    return [key + value + " " for key, value in keys.items()]


def words(draws, length, count, more=0):
    """A document of `length` bytes at most, with a vocabulary of `count` words, and `more` spaces behind each."""
    words = [word + " " * more for word in vocabulary(draws, count)]
    return "".join(draws.choices(words, k=length // (WORD + more)))


def repeated(draws, length):
    """A document of `length` bytes: a random string of letters, again and again."""
    text = "".join(draws.choices(KEYS, k=evenly(draws, 4, length / 4)))
    return (text * (length // len(text) + 1))[:length]


def write(folder, texts):
    os.makedirs(folder)
    size = count = 0
    for text in texts:
        with open(os.path.join(folder, f"{count:06}.txt"), "w", encoding="ascii") as f:
            f.write(text)
        size, count = size + len(text), count + 1
    print(f"{folder}: {count:,} documents, {size:,} bytes")


def main(arguments):
    def shorter():
        draws = random.Random(arguments.seed)
        for _ in range(arguments.short_documents):
            length = evenly(draws, arguments.short / 4, arguments.short)
            # At most half as many words as are written, so that values are asked for at every length.
            repeats = draws.random() < REPEATED
            yield repeated(draws, length) if repeats else words(draws, length, evenly(draws, 2, length / WORD / 2))

    def longer(longest):
        draws = random.Random(f"{arguments.seed} {longest}")
        for _ in range(arguments.long_documents):
            # Up to as many spaces as there are between the 32 words of a prompt, which is as long as a row.
            spaced = draws.random() < SPACED
            length, more = (longest, evenly(draws, 1, longest / 25)) if spaced else (evenly(draws, longest / 4, longest), 0)
            yield words(draws, length, evenly(draws, 8, min(MOST_WORDS, length / (WORD + more))), more)

    def held_out(longest):
        draws = random.Random(f"{arguments.seed} held-out")
        for _ in range(arguments.held_out_documents):
            yield words(draws, longest, evenly(draws, 32, MOST_WORDS))

    write(os.path.join(arguments.folder, "short"), shorter())
    write(os.path.join(arguments.folder, "long"), longer(arguments.long))
    if arguments.longest:
        write(os.path.join(arguments.folder, "longest"), longer(arguments.longest))
    write(os.path.join(arguments.folder, "held-out"), held_out(arguments.longest or arguments.long))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER")
    for name, default, what in [("--seed", 1, "of everything that is drawn"), ("--short-documents", 80000, "files of `short`"),
                                ("--long-documents", 12000, "files of `long`, and of `longest`"),
                                ("--held-out-documents", 64, "files of `held-out`"), ("--short", 256, "most bytes of a document of `short`"),
                                ("--long", 2048, "likewise of `long`"), ("--longest", 0, "likewise of `longest`; 0: no such folder")]:
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    main(parser.parse_args())
