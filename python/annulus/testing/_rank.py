"""What one rank's process does once _template.py has forked it for a pool: joins a group over gloo on loopback, then runs the functions
that arrive over a pipe and sends back what they return or raise.

The process ends when the pipe closes and when its template dies. SIGUSR1 writes the stacks of all threads into a file, even while
the process waits inside a collective.
"""

import contextlib
import ctypes
import datetime
import dis
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """Where a function is defined, so that another process can find it: pickle does not carry functions that a decorator replaced."""

    module: str
    file: str
    name: str


class Raised(NamedTuple):
    """An exception of a rank, without the object, which may not be picklable. deliberate: code in Python raised it by `raise` or
    `assert`, as opposed to an error of an operator. of_torch: torch's own Python did."""

    kind: str
    message: str
    traceback: str
    deliberate: bool
    of_torch: bool
    skipped: bool


def found(place: Place) -> Callable[..., Any]:
    """Returns the function of a place, bound to a new object if it is a method. Imports its module."""
    name = "__mp_main__" if place.module == "__main__" else place.module  # what is guarded by __name__ does not run
    module = sys.modules.get(name)
    if module is None and name != "__mp_main__":
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
    if module is None or not _same_file(getattr(module, "__file__", None), place.file):
        spec = importlib.util.spec_from_file_location(name, place.file)  # a test that is on no path, or the program itself
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if name == "__mp_main__":
            sys.modules["__main__"] = module  # by which its classes are pickled
        spec.loader.exec_module(module)
    owner: Any = None
    thing: Any = module
    for part in place.name.split("."):
        owner, thing = thing, getattr(thing, part)
    function = thing
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__get__(owner()) if isinstance(owner, type) and not isinstance(owner.__dict__[part], staticmethod) else function


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


def raised(error: BaseException) -> Raised:
    """Describes an exception."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    deliberate = of_torch = False
    if last is not None:
        code = last.tb_frame.f_code
        deliberate = dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
        of_torch = last.tb_frame.f_globals.get("__name__", "").startswith(("torch.distributed.distributed_c10d", "torch.autograd"))
    kind = type(error).__name__
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this file's own frame
    text = "".join(traceback.format_exception(type(error), error, below or error.__traceback__))
    return Raised(kind, str(error), text, deliberate, of_torch, kind in ("Skipped", "SkipTest"))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _join(rank: int, size: int, port: int, timeout: float) -> None:
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def serve(pipe: Connection) -> None:
    """Runs what arrives until the pipe closes."""
    while True:
        try:
            place, arguments, named = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("returned", found(place)(*arguments, **named))
            content = pickle.dumps(answer)
        except BaseException as error:  # also SystemExit and what pytest.skip raises
            content = pickle.dumps(("raised", raised(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(content)


def main(template: int, connection: Connection, stacks: int, rank: int, size: int, port: int, timeout: float) -> NoReturn:
    """Is the rank until it ends. template: the process that has forked it. stacks: the file for stacks. port: of the pool's store."""
    _die_with(template)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        _join(rank, size, port, timeout)
        connection.send_bytes(pickle.dumps(("returned", None)))
        serve(connection)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent gave this rank up
    except BaseException as error:
        connection.send_bytes(pickle.dumps(("raised", raised(error))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
