"""The program behind `annulus tokenize` and the prompts of `annulus sample`: it does what needs the tokenizer libraries.
`./annulus tokenizer VERB ...` starts it after making sure that the libraries are installed. launcher/verbs/tokenize.cc
checks and documents the options.
"""

import argparse
import os
import signal
import sys

from errors import RESOURCE, UNAVAILABLE, Refused
from shards import FORMATS


def parse(words):
    parser = argparse.ArgumentParser(prog="annulus tokenizer", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    tokenize = verbs.add_parser("tokenize", allow_abbrev=False)
    bench = verbs.add_parser("bench", allow_abbrev=False)
    prompt = verbs.add_parser("encode-prompt", allow_abbrev=False)
    table = verbs.add_parser("table", allow_abbrev=False)
    for verb in (tokenize, bench, prompt, table):
        verb.add_argument("--tokenizer", required=True)
    for verb in (tokenize, table):
        verb.add_argument("--output", required=True)
    for verb in (tokenize, bench):
        verb.add_argument("--input", action="append", required=True)
        verb.add_argument("--format", choices=FORMATS, default="annulus")
        verb.add_argument("--kind", choices=("auto", "text", "jsonl", "parquet"), default="auto")
        verb.add_argument("--field", default="text")
        verb.add_argument("--begin")
        verb.add_argument("--end")
        verb.add_argument("--no-special-tokens", action="store_true")
        verb.add_argument("--specials-as-text", action="store_true")
        verb.add_argument("--bad-utf8", choices=("refuse", "replace"), default="refuse")
        verb.add_argument("--shard-tokens", type=int, default=100_000_000)
        verb.add_argument("--processes", type=int, default=0)
    return parser.parse_args(words)


def run(options):
    """Runs the verb and returns the exit code."""
    try:
        if options.verb == "tokenize":
            from work import main as verb
        elif options.verb == "bench":
            from bench import main as verb
        elif options.verb == "table":
            from table import main as verb
        else:
            from prompt import main as verb
        return verb(options)
    except Refused as refused:
        print(f"annulus: [tokenize] {refused}", file=sys.stderr)
        return refused.code
    except ImportError as error:
        print(f"annulus: [tokenize] {error}: run ./annulus tokenize, which installs what is missing", file=sys.stderr)
        return UNAVAILABLE


def open_standard_streams():
    """Opens standard streams that were closed on /dev/null: files would otherwise get their numbers, and output and errors
    would go into these files."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the smallest free number
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))


def main():
    open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the program without a traceback
    code = run(parse(sys.argv[1:]))
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is left in the buffer
        if code == 0 and not isinstance(error, BrokenPipeError):
            print(f"annulus: [tokenize] standard output could not be written: {error.strerror}", file=sys.stderr)
        code = code or (128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else RESOURCE)
    return code


if __name__ == "__main__":
    sys.exit(main())
