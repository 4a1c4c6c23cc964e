"""`python -m annulus.testing.conformance MODULE:FUNCTION`: holds an implementation of sequence-parallel attention against its definition.

MODULE is the name of a module or the path of a file. The exit code is 0 if nothing failed, 1 if something did (what is refused by name
or not claimed does not count), and 2 for arguments or an adapter that cannot be used.
"""

import argparse
import json
import os
import sys

from . import _report
from ._cases import cases
from ._definition import DTYPES
from ._reproducer import write
from ._suite import REPEATED, Cell, Ranks, Suite


def _sizes(text: str) -> list[int]:
    sizes = [int(word) for word in text.split(",")]
    if not all(1 <= n <= 64 for n in sizes):
        raise ValueError
    return sizes


def _names(allowed: list[str]):
    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        if wrong := [w for w in words if w not in allowed]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(allowed)}, but got {', '.join(wrong)}")
        return words

    return parse


def main(arguments: list[str] | None = None) -> int:
    """Runs the suite and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m annulus.testing.conformance", description=__doc__.split("\n\n")[0])
    parser.add_argument("adapter", metavar="MODULE:FUNCTION", help="called as f(q, k, v, problem) on every rank (docs/conformance.md)")
    parser.add_argument("--ranks", type=_sizes, default=[2, 4], help="numbers of ranks, such as 1,2,3,4,8 (default: 2,4)")
    parser.add_argument("--dtypes", type=_names(list(DTYPES)), default=list(DTYPES), help="some of fp32,bf16 (default: both)")
    names = [*(c.name for c in cases(2, "contiguous")), REPEATED]
    parser.add_argument("--cases", type=_names(names), help=f"some of {', '.join(names)} (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the drawn inputs (default: 1)")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds of one case (default: 30)")
    parser.add_argument("--out", metavar="FILE", help="writes the report as well: .json, .md, or text; reproducers go beside it")
    given = parser.parse_args(arguments)
    folder = os.path.splitext(given.out)[0] + "-reproducers" if given.out else "reproducers"

    def progress(cell: Cell) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{cell.size} ranks, {cell.dtype}, {cell.case}: {cell.verdict}", end="", file=sys.stderr, flush=True)

    try:
        with Ranks() as ranks:
            suite = Suite(given.adapter, ranks, seed=given.seed, deadline=given.deadline)
            outcome = suite.run(given.ranks, given.dtypes, given.cases, progress)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    for cell in outcome.failed:
        cell.reproducer = write(outcome, cell, folder)
    text = _report.text(outcome)
    print(text, end="")
    if given.out:
        content = {".json": lambda: json.dumps(_report.as_json(outcome), indent=1) + "\n", ".md": lambda: _report.markdown(outcome)}
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(content.get(os.path.splitext(given.out)[1], lambda: text)())
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
