"""Pool: processes that are the ranks of a job over gloo, used for one function after the other. Used by _ranks.py and by the
conformance suite. Not thread-safe: one thread uses a pool.

A pool that saw a failure is ended, because its ranks may be anywhere. What a rank starts belongs to the rank's session and ends with
it; a pool ends with its process, whatever ends that.
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from ._rank import Place, Raised
from ._template import Forked, Template, template

GRACE = 3.0  # seconds that the other ranks have once one has failed, before their stacks are taken
STACK = 2.0  # seconds within which a process writes its stacks
JOIN = 300.0  # seconds for starting Python and joining the group on a busy machine


@dataclasses.dataclass
class RankResult:
    """What became of a function on one rank. state: "returned" (with value), "raised" (with error), "died" (with exit), "hung" (at
    the deadline) or "waiting" (when another rank had failed), the last two with the stacks of its threads. output: what it wrote to
    standard output and error."""

    rank: int
    state: str
    value: Any = None
    error: Raised | None = None
    exit: int | None = None
    stack: str = ""
    output: str = ""


@dataclasses.dataclass
class _Rank:
    process: Forked
    pipe: Connection
    output: Any
    stacks: Any


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)  # the session that it leads, with all that it started
        rank.process.send_signal(signal.SIGKILL)  # if it was just forked, it does not lead one yet
    for rank in ranks:
        rank.process.wait()
        rank.output.close()
        rank.stacks.close()
    ranks.clear()


def _content(file: Any, begin: int) -> str:
    """Returns a file's bytes from `begin` on as text. The position, which the rank shares, stays."""
    with open(f"/proc/self/fd/{file.fileno()}", "rb") as readable:
        readable.seek(begin)
        return readable.read().decode(errors="replace")


class Pool:
    """`size` ranks. environment: variables for their processes besides those of this one.

    Raises RuntimeError if a rank cannot start or join.
    """

    def __init__(self, size: int, environment: Mapping[str, str] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a job needs at least 1 rank, but {size} were asked for")
        self.size = size
        self._ranks: list[_Rank] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._finalizer = weakref.finalize(self, _end, self._ranks)
        ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **(environment or {})}
        ours |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            templates = [template(rank, ours) for rank in range(size)]  # all begin before the first is waited for
            for rank in range(size):
                self._ranks.append(self._start(rank, templates[rank], ours))
            results = self._answers(JOIN, [0] * size)
        except BaseException:
            self.close()
            raise
        if failed := [r for r in results if r.state != "returned"]:
            self.close()
            one = failed[0]
            why = one.error.traceback if one.error else one.stack
            raise RuntimeError(f"rank {one.rank} of {size} did not join the group ({one.state})\n{why}{one.output}")

    def _start(self, rank: int, of: Template, environment: Mapping[str, str]) -> _Rank:
        ours, theirs = Pipe()
        output, stacks = tempfile.TemporaryFile("ab"), tempfile.TemporaryFile("ab")
        port = self._store.port
        env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        process = of.fork(theirs.fileno(), output.fileno(), stacks.fileno())
        theirs.close()
        ours.send_bytes(pickle.dumps((env, os.getcwd(), list(sys.path), (rank, self.size, port, JOIN))))
        return _Rank(process, ours, output, stacks)

    @property
    def alive(self) -> bool:
        """Whether the pool can run another function."""
        return bool(self._ranks)

    def run(
        self,
        place: Place,
        arguments: tuple,
        named: Mapping[str, Any],
        deadline: float,
        keep: Callable[[list[RankResult]], bool] = lambda results: False,
    ) -> list[RankResult]:
        """Calls a function on every rank and returns what became of it, in the order of ranks, within `deadline` seconds and some
        for stacks. Unless it returned on all ranks, or `keep` says of the results that ranks can go on, the pool is ended."""
        if not self.alive:
            raise RuntimeError("this pool was ended after a failure: make another one")
        content = pickle.dumps((place, arguments, dict(named)))
        begins = [os.fstat(r.output.fileno()).st_size for r in self._ranks]  # before any rank can write
        try:
            for rank in self._ranks:
                with contextlib.suppress(BrokenPipeError):
                    rank.pipe.send_bytes(content)
            results = self._answers(deadline, begins)
        except BaseException:  # KeyboardInterrupt: no rank outlives it
            self.close()
            raise
        if any(r.state != "returned" for r in results) and not keep(results):
            self.close()
        return results

    def _answers(self, deadline: float, begins: list[int]) -> list[RankResult]:
        """`begins`: by rank, where in its output begins what it writes for this answer."""
        results: dict[int, RankResult] = {}
        end, failed = time.monotonic() + deadline, False
        while len(results) < len(self._ranks) and (left := end - time.monotonic()) > 0:
            pipes = {r.pipe: i for i, r in enumerate(self._ranks) if i not in results}
            for pipe in wait(list(pipes), min(left, 1.0)):
                result = results[pipes[pipe]] = self._answer(pipes[pipe])
                if result.state != "returned" and not failed:
                    failed, end = True, min(end, time.monotonic() + GRACE)
        late = [i for i in range(len(self._ranks)) if i not in results]
        for i in late:  # all at once, then each is waited for
            self._ranks[i].process.send_signal(signal.SIGUSR1)
        for i in late:
            results[i] = RankResult(i, "waiting" if failed else "hung", stack=self._stack(self._ranks[i]))
        for i, rank in enumerate(self._ranks):
            results[i].output = _content(rank.output, begins[i])
        return [results[i] for i in range(len(self._ranks))]

    def _answer(self, i: int) -> RankResult:
        try:
            state, value = pickle.loads(self._ranks[i].pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return RankResult(i, "died", exit=self._ranks[i].process.wait(GRACE))
        return RankResult(i, state, error=value) if state == "raised" else RankResult(i, state, value)

    @staticmethod
    def _stack(rank: _Rank) -> str:
        text, end = "", time.monotonic() + STACK
        while time.monotonic() < end:
            before, text = text, _content(rank.stacks, 0)
            if text and text == before:  # complete
                ours = tuple(os.path.join("testing", name) for name in ("_rank.py", "_template.py"))
                return "".join(line for line in text.splitlines(True) if not any(file in line for file in ours))
            time.sleep(0.02)
        with contextlib.suppress(OSError), open(f"/proc/{rank.process.pid}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] in "Tt":
                return "the process is stopped\n"
        return text or "the process did not say where it is\n"

    def close(self) -> None:
        """Ends the ranks."""
        _end(self._ranks)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
