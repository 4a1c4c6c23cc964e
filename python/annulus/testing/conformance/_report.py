"""Writes verdicts as a table in text or markdown, and as JSON. Used by __main__.py and examples/conformance."""

import dataclasses
import datetime
from typing import Any

import torch

from ._suite import FAILURES, VERDICTS, Cell, Outcome, describe

MARKS = {"not claimed": "-"}


def words(cell: Cell) -> str:
    """Returns a cell of the table."""
    if cell.verdict == "wrong":
        return "WRONG " + (" ".join(f.tensor for f in cell.wrong) or "shape")
    return cell.verdict.upper() if cell.verdict in FAILURES else MARKS.get(cell.verdict, cell.verdict)


def _columns(outcome: Outcome) -> list[tuple[int, str]]:
    return sorted({(c.size, c.dtype) for c in outcome.cells if c.dtype}, key=lambda c: (c[0], c[1] != "fp32"))


def _rows(outcome: Outcome) -> list[list[str]]:
    cells = {(c.case, c.size, c.dtype): c for c in outcome.cells}
    columns = _columns(outcome)
    rows = [["case", *(f"{size} rank{'s' * (size > 1)} {dtype}" for size, dtype in columns)]]
    for case in dict.fromkeys(c.case for c in outcome.cells):
        rows.append([case, *(words(cells[case, *c]) if (case, *c) in cells else "" for c in columns)])
    return rows


def title(outcome: Outcome) -> str:
    """Returns what was judged, with versions and the day."""
    claims = outcome.claims
    what = f"{claims.package} {claims.version}, {claims.name}" if claims.package else claims.name
    day = datetime.datetime.now(datetime.timezone.utc).date()
    return f"{what} ({claims.layout}), torch {torch.__version__.split('+')[0]}, {day}"


def _notes(outcome: Outcome) -> list[str]:
    """Returns a line for each failure and each refusal, those of equal reasons together."""
    grouped: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in outcome.cells:
        if cell.verdict in FAILURES or cell.verdict == "refused":
            detail = "" if cell.verdict == "wrong" else cell.reason
            grouped.setdefault((cell.case, cell.verdict, detail), []).append(cell)
    notes = []
    for (case, verdict, detail), cells in sorted(grouped.items(), key=lambda g: g[0][1] == "refused"):
        where = ", ".join(f"{c.size} {c.dtype}" for c in cells)
        worst = max(cells, key=lambda c: max((f.error for f in c.wrong), default=0.0))
        text = detail or worst.reason
        if verdict == "wrong" and len(cells) > 1:
            text = f"at worst over {worst.size} ranks in {worst.dtype}: {text}"
        reproducer = next((c.reproducer for c in cells if c.reproducer), "")
        notes.append(f"{case} ({where}): {verdict}: {text}" + (f"\n    python {reproducer}" if reproducer else ""))
    return notes


def text(outcome: Outcome) -> str:
    """Returns the table and the failures."""
    rows = _rows(outcome)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [title(outcome), "", *("  ".join(word.ljust(w) for word, w in zip(row, widths)).rstrip() for row in rows), ""]
    counts = {v: sum(c.verdict == v for c in outcome.cells) for v in VERDICTS}
    lines += [*_notes(outcome), ", ".join(f"{n} {v}" for v, n in counts.items() if n)]
    return "\n".join(lines) + "\n"


def markdown(outcome: Outcome) -> str:
    """Returns the same as markdown."""
    rows = _rows(outcome)
    lines = [f"### {title(outcome)}", "", *("| " + " | ".join(row) + " |" for row in rows)]
    lines.insert(3, "|" + "---|" * len(rows[0]))
    lines += ["", *(f"- {note.replace(chr(10) + '    ', ' `')}{'`' if chr(10) in note else ''}" for note in _notes(outcome))]
    return "\n".join(lines) + "\n"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the same as data: title, adapter, package, version, torch, unclaimed, and for each cell its verdict and findings."""
    claims = outcome.claims
    cells = [
        {"case": c.case, "ranks": c.size, "dtype": c.dtype, "verdict": c.verdict, "reason": c.reason, "reproducer": c.reproducer,
         "results": [{k: v for k, v in dataclasses.asdict(f).items()} | {"words": describe(f)} for f in c.findings]}
        for c in outcome.cells
    ]
    return {"title": title(outcome), "adapter": outcome.adapter, "name": claims.name, "package": claims.package, "version": claims.version,
            "torch": torch.__version__, "layout": claims.layout, "unclaimed": claims.unclaimed, "cells": cells}
