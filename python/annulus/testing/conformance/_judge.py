"""Turns what ranks returned into verdicts. Used by _suite.py.

Errors are the largest difference over the largest magnitude of the tensor, over all ranks. What is allowed is MULTIPLE times the sum
of three terms: the error that one process has with a plain implementation in the same dtype, here and now; one rounding of the
result; and what one rounding in fp32 of the largest lse does. It changes a probability exp(score - lse) by that much, relatively, and
thereby a sum over probabilities by at most as much of the sum of magnitudes (`magnitudes` of _definition.py).
"""

import dataclasses

import torch
from torch import Tensor

from . import _diagnosis
from ._cases import Case, seen
from ._definition import DTYPES, Inputs, draw, exact, magnitudes, plain, results
from ._measure import Measured
from ._problem import positions

MULTIPLE = 4


@dataclasses.dataclass
class Finding:
    """One tensor of one case. error and allowed are relative to the tensor's largest magnitude. rank and rows: where it is worst, and
    which positions of that rank exceed what is allowed. looks_like: a known fault, or ""."""

    tensor: str
    error: float
    allowed: float
    rank: int = -1
    rows: str = ""
    looks_like: str = ""

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed


@dataclasses.dataclass
class Expected:
    """What a case must give, and how far off a plain computation is."""

    case: Case
    inputs: Inputs
    exact: dict[str, Tensor]
    allowed: dict[str, float]  # absolute
    of_q: list[Tensor]
    of_k: list[Tensor]


def expected(case: Case, dtype: str, seed: int) -> Expected:
    """Computes what a case must give, in one process."""
    inputs, counted = draw(case, dtype, seed), seen(case)
    want = exact(case, inputs, counted)
    usual = results(case, inputs, counted, plain)
    lse = _largest(want["lse"][want["lse"].isfinite()].abs())
    terms = magnitudes(case, inputs, counted)
    allowed = {}
    for name, t in want.items():
        unit = torch.finfo(torch.float32 if name == "lse" else DTYPES[dtype]).eps / 2
        difference = _difference(usual[name], t)
        of_lse = lse * torch.finfo(torch.float32).eps / 2 * terms.get(name, 0.0)
        allowed[name] = MULTIPLE * (_largest(difference) + unit * _magnitude(t) + of_lse)
    lengths = list(case.lengths) if case.lengths else None
    of_q = positions(case.length_q, case.layout, case.size, lengths)
    of_k = of_q if case.length_q == case.length_k else positions(case.length_k, case.layout, case.size)
    return Expected(case, inputs, want, allowed, of_q, of_k)


def _largest(t: Tensor) -> float:
    return t.max().item() if t.numel() else 0.0


def _magnitude(t: Tensor) -> float:
    return _largest(t[t.isfinite()].abs()) or 1.0


def _difference(got: Tensor, want: Tensor) -> Tensor:
    """Returns the differences, 0 where both are the same infinity, and infinity where a number is not finite or should not be."""
    difference = (got.double() - want).abs()
    return torch.where(got.double() == want, 0.0, difference.nan_to_num(float("inf")))


def judge(wanted: Expected, measured: list[Measured]) -> list[Finding]:
    """Compares what all ranks returned for a case. A result that no rank returned is left out."""
    findings, wholes = [], {}
    for name in measured[0].results:
        parts = [m.results[name] for m in measured]
        if any(p is None for p in parts) or any(name in text for m in measured for text in m.malformed if "shape" in text):
            continue
        of = [torch.arange(0)] if name.startswith("weight") else wanted.of_k if name in ("dk", "dv") else wanted.of_q
        want = wanted.exact[name]
        if name.startswith("weight"):
            whole = torch.stack([p.double() for p in parts]).mean(0)  # the loss is averaged over ranks
        else:
            whole = torch.zeros_like(want)
            for positions_, part in zip(of, parts):
                if name == "lse":
                    whole[:, :, positions_] = part.double()
                else:
                    whole[:, positions_] = part.double()
        wholes[name] = whole
        findings.append(_finding(name, whole, want, wanted.allowed[name], of))
    _name(wanted, findings, wholes)
    return findings


def _finding(name: str, whole: Tensor, want: Tensor, allowed: float, of: list[Tensor]) -> Finding:
    difference, scale = _difference(whole, want), _magnitude(want)
    finding = Finding(name, _largest(difference) / scale, allowed / scale)
    if finding.wrong and not name.startswith("weight"):
        along = 2 if name == "lse" else 1
        by_row = difference.movedim(along, 0).flatten(1).amax(1)
        finding.rank = max(range(len(of)), key=lambda r: _largest(by_row[of[r]]))
        finding.rows = _ranges([p for p in of[finding.rank].tolist() if not by_row[p] <= allowed])
    return finding


def _ranges(positions_: list[int]) -> str:
    runs: list[list[int]] = []
    for p in positions_:
        if runs and p == runs[-1][1] + 1:
            runs[-1][1] = p
        else:
            runs.append([p, p])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more runs" if len(texts) > 4 else "")


def _name(wanted: Expected, findings: list[Finding], wholes: dict[str, Tensor]) -> None:
    wrong = {f.tensor: f for f in findings if f.wrong}
    if "out" in wrong:
        wrong["out"].looks_like = _diagnosis.forward(
            wanted.case, wanted.inputs, wanted.of_q, wanted.of_k, wholes["out"], wanted.exact["out"]
        )
        return
    for name, finding in wrong.items():
        if name.startswith(("d", "weight")):
            of = [] if name.startswith("weight") else wanted.of_k if name in ("dk", "dv") else wanted.of_q
            finding.looks_like = _diagnosis.gradient(name, wholes[name], wanted.exact, of, wanted.case.size)
