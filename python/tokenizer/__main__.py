"""The program behind `annulus tokenize` and the texts that `annulus sample` encodes: it does what needs the tokenizer libraries.
`./annulus tokenizer COMMAND ...` starts it after making sure that the libraries are installed. launcher/subcommands/tokenize.cc
checks and documents the options.
"""

import argparse
import importlib
import os
import signal
import sys

from errors import RESOURCE, UNAVAILABLE, Refused
from shards import FORMATS

MODULES = {"tokenize": "work", "bench": "bench", "encode": "prompt", "table": "table"}  # whose main() does it


def parse(words):
    parser = argparse.ArgumentParser(prog="annulus tokenizer", allow_abbrev=False)
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    tokenize, bench, encode, table = (subcommands.add_parser(name, allow_abbrev=False) for name in MODULES)
    for subcommand in (tokenize, bench, encode, table):
        subcommand.add_argument("--tokenizer", required=True)
    for subcommand in (tokenize, table):
        subcommand.add_argument("--output", required=True)
    for subcommand in (tokenize, bench):
        subcommand.add_argument("--input", action="append", required=True)
        subcommand.add_argument("--format", choices=FORMATS, default="annulus")
        subcommand.add_argument("--kind", choices=("auto", "text", "jsonl", "parquet"), default="auto")
        subcommand.add_argument("--field")
        subcommand.add_argument("--loss", choices=("all", "completion", "assistant"), default="all")
        subcommand.add_argument("--prompt", default="prompt")
        subcommand.add_argument("--chat", action="store_true")
        subcommand.add_argument("--weight")
        subcommand.add_argument("--trees", action="store_true")
        subcommand.add_argument("--group")
        subcommand.add_argument("--begin")
        subcommand.add_argument("--end")
        subcommand.add_argument("--no-special-tokens", action="store_true")
        subcommand.add_argument("--specials-as-text", action="store_true")
        subcommand.add_argument("--bad-utf8", choices=("refuse", "replace"), default="refuse")
        subcommand.add_argument("--shard-tokens", type=int, default=100_000_000)
        subcommand.add_argument("--processes", type=int, default=0)
    return parser.parse_args(words)


def run(options):
    """Runs the subcommand and returns the exit code."""
    try:
        return importlib.import_module(MODULES[options.subcommand]).main(options)
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
