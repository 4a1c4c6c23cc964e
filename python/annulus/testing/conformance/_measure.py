"""What a rank does: loads an adapter, calls it with its rows, and returns what came out. Called on all ranks by _suite.py."""

import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._cases import FEATURES, Case
from ._definition import DTYPES, Inputs, draw, project
from ._problem import LAYOUTS, Problem, positions


class Claims(NamedTuple):
    """What an adapter says of itself by attributes: layout; unclaimed, {feature: why}; package and version of what it calls; and its
    source, for reproducers."""

    name: str
    layout: str
    unclaimed: dict[str, str]
    package: str
    version: str
    source: str


class Measured(NamedTuple):
    """One rank's results by name (None: not returned), texts about those of a wrong shape or dtype, which of q, k and v were changed,
    and which results differed in a second call."""

    results: dict[str, Tensor | None]
    malformed: list[str]
    changed: list[str]
    unequal: list[str]


def load(adapter: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the module and the function of MODULE:FUNCTION, where MODULE is a name or the path of a file."""
    module, _, name = adapter.partition(":")
    if not name:
        raise ValueError(f"expected MODULE:FUNCTION, such as adapters/mine.py:attention, but got {adapter!r}")
    if not module.endswith(".py"):
        loaded = importlib.import_module(module)
    else:
        key = "adapter_" + os.path.basename(module)[:-3]
        if key not in sys.modules:
            spec = importlib.util.spec_from_file_location(key, module)
            if spec is None or spec.loader is None or not os.path.exists(module):
                raise ValueError(f"there is no file {module}")
            sys.modules[key] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[key])
        loaded = sys.modules[key]
    return loaded, getattr(loaded, name)


def describe(adapter: str) -> Claims:
    """Returns an adapter's claims. Raises ValueError for an unknown layout or feature."""
    module, function = load(adapter)
    layout, unclaimed = getattr(function, "layout", "contiguous"), dict(getattr(function, "unclaimed", {}))
    if layout not in LAYOUTS:
        raise ValueError(f"{adapter}: layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}")
    if wrong := sorted(set(unclaimed) - set(FEATURES)):
        raise ValueError(f"{adapter}: unclaimed names {', '.join(wrong)}, but features are {', '.join(FEATURES)}")
    package = getattr(function, "package", "")
    version = importlib.metadata.version(package) if package else ""
    return Claims(adapter.rpartition(":")[2], layout, unclaimed, package, version, inspect.getsource(module))


def problem_of(case: Case, dtype: str) -> Problem:
    """Returns what this rank's adapter gets for a case."""
    rank, lengths = dist.get_rank(), list(case.lengths) if case.lengths else None
    of_q = positions(case.length_q, case.layout, case.size, lengths)
    of_k = of_q if case.length_k == case.length_q else positions(case.length_k, case.layout, case.size)
    return Problem(
        rank=rank, size=case.size, group=None, layout=case.layout,
        positions_q=of_q[rank], positions_k=of_k[rank], lengths_q=[len(p) for p in of_q], lengths_k=[len(p) for p in of_k],
        length_q=case.length_q, length_k=case.length_k, scale=case.scale, causal=case.causal, window=case.window,
        documents=None if case.documents is None else torch.tensor(case.documents, dtype=torch.int32),
        kept_keys=None if case.first_key == 0 else torch.arange(case.length_k) >= case.first_key,
        dtype=DTYPES[dtype],
    )


def _local(problem: Problem, inputs: Inputs) -> Inputs:
    of_q, of_k = problem.positions_q, problem.positions_k
    x = inputs.x[:, of_q]
    x_k = x if inputs.x is inputs.x_k else inputs.x_k[:, of_k]
    return inputs._replace(q=inputs.q[:, of_q], k=inputs.k[:, of_k], v=inputs.v[:, of_k], dout=inputs.dout[:, of_q],
                           x=x, x_k=x_k, dy=inputs.dy[:, of_q])


def _call(function: Any, problem: Problem, mine: Inputs, gradients: bool) -> tuple[dict[str, Tensor | None], list[str], list[str]]:
    before = {"q": mine.q, "k": mine.k, "v": mine.v}
    given = {name: t.clone().requires_grad_(gradients) for name, t in before.items()}
    answer = function(*given.values(), problem)
    out, lse = answer if isinstance(answer, (tuple, list)) else (answer, None)
    results: dict[str, Tensor | None] = {"out": out.detach().clone(), "lse": None if lse is None else lse.detach().clone()}
    wanted = {"out": mine.q.shape, "lse": (mine.q.shape[0], mine.q.shape[2], mine.q.shape[1])}
    if gradients:
        if out.shape == mine.q.shape:
            out.backward(mine.dout)
        for name, t in given.items():
            results["d" + name] = torch.zeros_like(t) if t.grad is None else t.grad.clone()
            wanted["d" + name] = t.shape
    malformed = [
        f"{name} has the shape {list(t.shape)}, expected was {list(wanted[name])}"
        for name, t in results.items() if t is not None and t.shape != wanted[name]
    ]
    malformed += [] if out.dtype == mine.q.dtype else [f"out is {out.dtype}, expected was {mine.q.dtype}"]
    if gradients and out.shape == mine.q.shape:
        malformed += [f"{name} got no gradient" for name, t in given.items() if t.grad is None]
    changed = [name for name, t in given.items() if not torch.equal(t.detach(), before[name])]
    return results, malformed, changed


def measure(adapter: str, case: Case, dtype: str, seed: int, gradients: bool) -> Measured:
    """Calls the adapter, forward and backward, twice."""
    _, function = load(adapter)
    problem = problem_of(case, dtype)
    mine = _local(problem, draw(case, dtype, seed))
    results, malformed, changed = _call(function, problem, mine, gradients)
    again, _, _ = _call(function, problem, mine, gradients)
    unequal = [n for n, t in results.items() if t is not None and not _same_bits(t, again[n])]
    return Measured(results, malformed, changed, unequal)


def _same_bits(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))


def measure_layer(adapter: str, case: Case, dtype: str, seed: int) -> Measured:
    """Returns this rank's gradients of a layer's weights, for the part of the loss that its rows have."""
    _, function = load(adapter)
    problem = problem_of(case, dtype)
    mine = _local(problem, draw(case, dtype, seed))
    weight_in, weight_out = mine.weight_in.clone().requires_grad_(), mine.weight_out.clone().requires_grad_()
    answer = function(*project(mine.x, mine.x_k, weight_in, case), problem)
    out = answer[0] if isinstance(answer, (tuple, list)) else answer
    (out.flatten(-2) @ weight_out).backward(mine.dy)
    grads = {"weight_in": weight_in, "weight_out": weight_out}
    found: dict[str, Tensor | None] = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in grads.items()}
    return Measured(found, [f"{n} got no gradient" for n, w in grads.items() if w.grad is None], [], [])


_libc = ctypes.CDLL(None)


class Held(NamedTuple):
    """What a process holds: resident bytes, open files, threads and processes that it started."""

    memory: int
    files: int
    threads: int
    processes: int


def _held() -> Held:
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)  # so that memory that is free does not count
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    tasks = os.listdir("/proc/self/task")
    children = 0
    for task in tasks:
        with open(f"/proc/self/task/{task}/children") as file:
            children += len(file.read().split())
    return Held(memory, len(os.listdir("/proc/self/fd")), max(len(tasks), threading.active_count()), children)


def repeat(adapter: str, case: Case, dtype: str, seed: int, gradients: bool, rounds: int, rows: int) -> list[Held]:
    """Returns what this rank holds after a third, two thirds and all of 3 `rounds` calls on the same tensors, each with `rows` times
    as many rows of the case's batch, so that a tensor that is kept is seen."""
    _, function = load(adapter)
    problem = problem_of(case, dtype)
    mine = _local(problem, draw(case, dtype, seed))
    mine = mine._replace(**{n: getattr(mine, n).repeat(rows, 1, 1, 1) for n in ("q", "k", "v", "dout")})
    held = []
    for _ in range(3):
        for _ in range(rounds):
            _call(function, problem, mine, gradients)
        held.append(_held())
    return held
