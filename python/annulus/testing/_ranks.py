"""`ranks` and `run_ranks`: tests of code over torch.distributed, as processes on this machine. Used by users (docs/tutorials/
distributed-tests.md)."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from ._pool import Pool, RankResult
from ._rank import Place


class RanksFailed(AssertionError):
    """A function failed on some rank. results: what became of it on each, a RankResult; the text is the report of all."""

    def __init__(self, message: str, results: list[RankResult]) -> None:
        super().__init__(message)
        self.results = results


def place_of(function: Callable[..., Any]) -> Place:
    """Returns where a function is defined. Raises ValueError for one that another process cannot import."""
    name = function.__qualname__
    if "<" in name:
        raise ValueError(
            f"ranks are processes of their own, which import the function: {name} must be defined at the top of a module or in a class "
            "there, not inside a function"
        )
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not os.path.exists(file):
        raise ValueError(f"ranks are processes of their own, which import the function: {name} must be written in a file")
    return Place(function.__module__, os.path.abspath(file), name)


def _indented(text: str, mark: str) -> str:
    return "".join(f"{mark}{line}\n" for line in text.rstrip("\n").split("\n")) if text.strip() else ""


def report(name: str, results: list[RankResult], deadline: float) -> str:
    """Returns what is said about a function that failed on some rank: failures first, then who waited, then all output."""
    failed = [r for r in results if r.state in ("raised", "died", "hung")]
    lines = [f"{name}: {len(failed)} of {len(results)} ranks failed\n"]
    for r in failed:
        if r.error is not None:
            lines.append(f"rank {r.rank} raised {r.error.kind}: {r.error.message}\n" + _indented(r.error.traceback, "    "))
        elif r.state == "died":
            how = f"signal {-r.exit}" if r.exit is not None and r.exit < 0 else f"exit code {r.exit}"
            lines.append(f"rank {r.rank} ended with {how}\n")
        else:
            lines.append(f"rank {r.rank} had not returned after {deadline:g} s; it was here:\n" + _indented(r.stack, "    "))
    for r in results:
        if r.state == "waiting":
            lines.append(f"rank {r.rank} was still running; it was here:\n" + _indented(r.stack, "    "))
    for r in results:
        if r.output.strip():
            lines.append(f"output of rank {r.rank}:\n" + _indented(r.output, "    "))
    return "".join(lines).rstrip("\n")


def run_ranks(
    size: int,
    function: Callable[..., Any],
    /,
    *arguments: Any,
    deadline: float = 60.0,
    environment: Mapping[str, str] | None = None,
    **named: Any,
) -> list[Any]:
    """Calls a function in `size` new processes, which are the ranks of torch.distributed over gloo on loopback, and returns what it
    returned, by rank.

    function: one at the top of a module, or a method, for which each rank makes an object. It finds its group initialised.
    arguments, named: what it is called with, on every rank; they and the results must be picklable.
    deadline: seconds for the call, after the ranks have joined. environment: more variables for the ranks. Each rank has one thread
        for computing unless OMP_NUM_THREADS is set.

    Raises RanksFailed, with one report of all ranks, if a rank raises an exception, ends, or has not returned at the deadline; the
    others are then ended, and the stacks of those that waited are in the report. What ranks print is printed when all have returned.
    No rank is left behind, on KeyboardInterrupt or the death of this process either. Ranks are forked from processes that have
    imported torch and do nothing else, one for each number of a rank; these end with this process.
    """
    return _called(size, function, arguments, named, deadline, environment)


def _called(
    size: int,
    function: Callable[..., Any],
    arguments: tuple,
    named: Mapping[str, Any],
    deadline: float,
    environment: Mapping[str, str] | None,
) -> list[Any]:
    __tracebackhide__ = True  # the report has the tracebacks of ranks
    place = place_of(function)
    with Pool(size, environment) as pool:
        results = pool.run(place, arguments, named, deadline)
    if any(r.state != "returned" for r in results):
        skips = [r.error for r in results if r.error is not None and r.error.skipped]
        if skips and all(r.state in ("waiting", "returned") or (r.error and r.error.skipped) for r in results):
            _skip(skips[0].message)
        raise RanksFailed(report(f"{function.__qualname__} on {size} rank{'s' * (size > 1)}", results, deadline), results)
    for r in results:
        print(_indented(r.output, f"rank {r.rank} | "), end="")
    return [r.value for r in results]


def _skip(reason: str) -> None:
    try:
        import pytest
    except ImportError:
        import unittest

        raise unittest.SkipTest(reason) from None
    pytest.skip(reason)


def ranks(
    *sizes: int, deadline: float = 60.0, environment: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test for pytest of a function that runs on every rank, once for each number of ranks:

        @annulus.testing.ranks(1, 2, 4)
        def test_sum_over_ranks():
            x = torch.ones(3)
            dist.all_reduce(x)
            assert x[0] == dist.get_world_size()

    The function finds torch.distributed initialised (`run_ranks`, which has the settings). It may take fixtures and parameters that
    are picklable, and `ranks`, their number. Methods get a new object on each rank.

    Raises ValueError for no or a wrong number of ranks.
    """
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"ranks expects numbers of ranks, such as ranks(1, 2, 4), but got {sizes}")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        import pytest

        signature = inspect.signature(test)
        wants = "ranks" in signature.parameters

        @functools.wraps(test)
        def run(*own: Any, ranks: int, **named: Any) -> None:
            __tracebackhide__ = True
            _called(ranks, test, (), named | ({"ranks": ranks} if wants else {}), deadline, environment)

        parameters = list(signature.parameters.values())
        if not wants:
            parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("ranks", sizes, ids=[f"{n}-ranks" for n in sizes])(run)

    return decorate
