"""Runs all cases of an adapter on pools of ranks and collects verdicts. Used by __main__.py, examples/conformance and tests."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._pool import Pool, RankResult
from .._rank import Place
from . import _measure
from ._cases import FEATURES, HEAD_SIZE, Case, cases
from ._definition import DTYPES
from ._judge import Expected, Finding, expected, judge
from ._measure import Claims, Held, Measured

VERDICTS = {
    "ok": "right, the same bits twice, inputs unchanged",
    "wrong": "returned without an error, but not what the definition gives",
    "changes inputs": "q, k or v have other values afterwards",
    "non-deterministic": "two calls gave different bits",
    "leaks": "memory, files, threads or processes grow with each call",
    "crash": "an error that does not come from a check, a process that ended, or an error on some ranks alone",
    "hang": "not returned at the deadline",
    "refused": "every rank raised an error of a check, with the reason",
    "not claimed": "the project does not say that it supports this",
}
FAILURES = ("wrong", "changes inputs", "non-deterministic", "leaks", "crash", "hang")
REPEATED = "repeated calls"
ROUNDS = 8  # calls in each third of the repeated ones
TENSOR = 1 << 18  # bytes of q in a repeated call, of which 8 exceed an allocator's noise


@dataclasses.dataclass
class Cell:
    """The verdict on one case in one dtype over `size` ranks, with its reason in words and the results that were compared."""

    case: str
    size: int
    dtype: str
    verdict: str
    reason: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    reproducer: str = ""

    @property
    def wrong(self) -> list[Finding]:
        return [f for f in self.findings if f.wrong]


@dataclasses.dataclass
class Outcome:
    """All verdicts on an adapter."""

    adapter: str
    claims: Claims
    cells: list[Cell]

    @property
    def failed(self) -> list[Cell]:
        return [c for c in self.cells if c.verdict in FAILURES]


class Ranks:
    """A pool of ranks that serves one case after the other, and that suites may share. After a failure there is a new one. Ranks that
    all raised the same error of a check are kept, but what fails on such ranks is tried again on new ones. environment: variables for
    ranks. Not thread-safe."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment
        self._pool: Pool | None = None
        self.kept = False  # ranks that refused something before

    def call(self, size: int, function: Callable[..., Any], arguments: tuple, deadline: float) -> list[RankResult]:
        """Calls a function on `size` ranks."""
        if self._pool is None or not self._pool.alive or self._pool.size != size:
            self.close()
            self._pool = Pool(size, self._environment)
        place = Place(function.__module__, function.__code__.co_filename, function.__qualname__)
        results = self._pool.run(place, arguments, {}, deadline, keep=_refused)
        fine = all(r.state == "returned" for r in results)
        if not fine and self.kept and not _refused(results):
            self.close()
            return self.call(size, function, arguments, deadline)
        self.kept = self.kept or (not fine and self._pool.alive)
        return results

    def close(self) -> None:
        """Ends the ranks. Others are started when they are needed."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self.kept = None, False

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Suite:
    """Runs an adapter, MODULE:FUNCTION, on ranks. seed: of the drawn inputs. deadline: seconds of a case. Not thread-safe."""

    def __init__(self, adapter: str, ranks: Ranks, *, seed: int = 1, deadline: float = 30.0) -> None:
        self.adapter, self.ranks, self.seed, self.deadline = adapter, ranks, seed, deadline

    def run(
        self, sizes: Sequence[int], dtypes: Iterable[str] = ("fp32", "bf16"), only: Iterable[str] | None = None,
        progress: Callable[[Cell], None] = lambda cell: None,
    ) -> Outcome:
        """Runs the cases, or those named in `only`, over these numbers of ranks. Raises RuntimeError if the adapter cannot be loaded,
        and ValueError without a number of ranks."""
        if not sizes:
            raise ValueError("expected at least one number of ranks")
        cells: list[Cell] = []
        for size in sizes:
            claims = self._describe(size)
            of_size: list[Cell] = []
            for case in cases(size, claims.layout):
                for dtype in dtypes:
                    if only is None or case.name in only:
                        of_size.append(self._cell(case, dtype, claims))
                        progress(of_size[-1])
            if only is None or REPEATED in only:
                of_size.append(self._repeated(size, dtypes, claims))
                progress(of_size[-1])
            _compare_dtypes(of_size)
            cells += of_size
        return Outcome(self.adapter, claims, cells)

    def _describe(self, size: int) -> Claims:
        results = self._call(size, _measure.describe)
        failed = [r for r in results if r.state != "returned"]
        if failed:
            one = failed[0]
            raise RuntimeError(f"{self.adapter} cannot be loaded: {one.error.traceback if one.error else one.state}\n{one.output}")
        return results[0].value

    def _call(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[RankResult]:
        return self.ranks.call(size, function, (self.adapter, *arguments), self.deadline)

    def _cell(self, case: Case, dtype: str, claims: Claims) -> Cell:
        cell = Cell(case.name, case.size, dtype, "ok")
        for feature in (*case.needs, dtype):
            if feature in claims.unclaimed:
                cell.verdict, cell.reason = "not claimed", f"{FEATURES[feature]}: {claims.unclaimed[feature]}"
                return cell
        gradients = "gradients" not in claims.unclaimed
        wanted = expected(case, dtype, self.seed)
        self._measured(cell, wanted, self._call(case.size, _measure.measure, case, dtype, self.seed, gradients))
        if cell.verdict == "wrong" and self.ranks.kept:  # perhaps of what ranks had left when they refused something
            self.ranks.close()
            cell = Cell(case.name, case.size, dtype, "ok")
            self._measured(cell, wanted, self._call(case.size, _measure.measure, case, dtype, self.seed, gradients))
        if gradients and cell.verdict not in ("refused", "crash", "hang"):
            layer = Cell(case.name, case.size, dtype, "ok")
            self._measured(layer, wanted, self._call(case.size, _measure.measure_layer, case, dtype, self.seed))
            cell.findings += layer.findings
            if cell.verdict == "ok" and layer.verdict != "ok":
                cell.verdict = layer.verdict
                cell.reason = "through a layer, where q, k and v are views of one projection: " + layer.reason
        return cell

    def _measured(self, cell: Cell, wanted: Expected, results: list[RankResult]) -> None:
        if any(r.state != "returned" for r in results):
            cell.verdict, cell.reason = _failure(results, self.deadline)
            return
        measured: list[Measured] = [r.value for r in results]
        cell.findings = judge(wanted, measured)
        malformed = sorted({text for m in measured for text in m.malformed})
        changed = sorted({name for m in measured for name in m.changed})
        unequal = [name for name in measured[0].results if any(name in m.unequal for m in measured)]
        if cell.wrong or malformed:
            cell.verdict = "wrong"
            cell.reason = "; ".join([describe(f) for f in cell.wrong] + malformed + [f"{name} was changed" for name in changed])
        elif changed:
            cell.verdict, cell.reason = "changes inputs", ", ".join(changed)
        elif unequal:
            cell.verdict, cell.reason = "non-deterministic", ", ".join(unequal)

    def _repeated(self, size: int, dtypes: Iterable[str], claims: Claims) -> Cell:
        case = repeated_case(size, claims)
        dtype = next((d for d in dtypes if d not in claims.unclaimed), "")
        if not dtype or case is None:
            return Cell(REPEATED, size, dtype, "not claimed")
        cell = Cell(REPEATED, size, dtype, "ok")
        of_rank = _bytes_of_q(case, dtype)
        rows = -(-TENSOR // of_rank) if case.documents is None else 1  # documents are of one row
        gradients = "gradients" not in claims.unclaimed
        for rounds in (ROUNDS, 4 * ROUNDS):  # what grows is tried again for longer, since allocators and caches grow at first
            repeated = (self.adapter, case, dtype, self.seed, gradients, rounds, rows)
            results = self.ranks.call(size, _measure.repeat, repeated, 4 * self.deadline)
            if any(r.state != "returned" for r in results):
                cell.verdict, cell.reason = _failure(results, 4 * self.deadline)
                break
            reasons = [text for r in results for text in _grown(r.rank, r.value, rounds)]
            cell.verdict, cell.reason = ("leaks", "; ".join(reasons)) if reasons else ("ok", "")
            if not reasons:
                break
        return cell


def repeated_case(size: int, claims: Claims) -> Case | None:
    """Returns the case whose call is repeated: the first of three that the adapter claims."""
    for name, need in (("causal", "causal"), ("full", "full"), ("one document", "documents")):
        if need not in claims.unclaimed:
            return next(c for c in cases(size, claims.layout) if c.name == name)
    return None


def _bytes_of_q(case: Case, dtype: str) -> int:
    """Returns the bytes of one rank's part of q in an even case."""
    return case.batch * case.length_q // case.size * case.heads * HEAD_SIZE * DTYPES[dtype].itemsize


def _grown(rank: int, held: list[Held], rounds: int) -> list[str]:
    """Returns what a rank holds more of after each third of the calls: a growth that stops is a cache."""
    found = []
    for name, least in (("memory", 3 * rounds * TENSOR // 4), ("files", rounds // 2), ("threads", rounds // 2), ("processes", rounds // 2)):
        growth = [getattr(b, name) - getattr(a, name) for a, b in zip(held, held[1:])]
        if all(g >= least for g in growth):
            amount = growth[-1] / rounds / (2**20 if name == "memory" else 1)
            found.append(f"rank {rank}: {amount:.1f} {'MiB of memory' if name == 'memory' else name} more with each call")
    return found


def _refused(results: list[RankResult]) -> bool:
    """Whether every rank raised an error by a check in Python. One of the library that communicates is none."""
    errors = [r.error for r in results]
    return all(e is not None and e.deliberate and not e.of_torch and e.message.strip() for e in errors)


def _failure(results: list[RankResult], deadline: float) -> tuple[str, str]:
    raised = [r for r in results if r.error is not None]
    if _refused(results):
        return "refused", f"{raised[0].error.kind}: {raised[0].error.message.strip()}"
    died = [r for r in results if r.state == "died"]
    hung = [r for r in results if r.state == "hung"]
    if died:
        how = ", ".join(f"rank {r.rank} ended with {'signal' if r.exit and r.exit < 0 else 'exit code'} {abs(r.exit or 0)}" for r in died)
        return "crash", f"{how}{': ' + _last(died[0].output) if died[0].output.strip() else ''}"
    if raised:
        alone = "" if len(raised) == len(results) else f"on rank {', '.join(str(r.rank) for r in raised)} alone, while others waited: "
        return "crash", f"{alone}{raised[0].error.kind}: {raised[0].error.message.strip()}"
    where = next((line.strip() for line in hung[0].stack.splitlines() if "File" in line and "torch" not in line), "") if hung else ""
    return "hang", f"rank {', '.join(str(r.rank) for r in hung)} had not returned after {deadline:g} s{': ' + where if where else ''}"


def _last(text: str) -> str:
    return text.strip().splitlines()[-1]


def describe(f: Finding) -> str:
    """Returns a finding in words."""
    where = f" on rank {f.rank}, positions {f.rows}" if f.rows else ""
    looks = f"; {f.looks_like}" if f.looks_like else ""
    return f"{f.tensor} is off by {f.error:.2g} (allowed {f.allowed:.1g}){where}{looks}"


def _compare_dtypes(cells: list[Cell]) -> None:
    right = {(c.case, c.size) for c in cells if c.dtype == "fp32" and not c.wrong and c.findings}
    for cell in cells:
        if cell.dtype != "fp32" and cell.verdict == "wrong" and (cell.case, cell.size) in right:
            for finding in cell.wrong:
                finding.looks_like = f"right in fp32: partial sums or statistics are kept in {cell.dtype}"
            cell.reason = "; ".join(describe(f) for f in cell.wrong)
