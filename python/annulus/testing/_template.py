"""Templates: processes that have imported torch and from which ranks are forked, because importing it takes longer than most tests.
Used by _pool.py, and run by itself as the program of a template.

Each number of a rank has a template of its own, so that ranks differ, as in a job, in what Python draws when it starts (the order of
sets of strings). A template ends with the process that started it, whatever ends that, and its ranks end with it.
"""

import contextlib
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait

_PID = struct.Struct("q")
_FORK = b"fork"  # with the files of a rank; the answer is its process. A process by itself: wait for it; the answer is its exit code


class Forked:
    """The process of a rank, which its template has forked: as subprocess.Popen, for what a pool asks of it."""

    def __init__(self, template: "Template", pid: int) -> None:
        self.pid = pid
        self._template = template
        self._exit: int | None = None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process was waited for."""
        if self._exit is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, or the negative number of the signal. Raises subprocess.TimeoutExpired."""
        if self._exit is None:
            try:
                ended = os.pidfd_open(self.pid)
                try:
                    if not wait([ended], timeout):
                        raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
                finally:
                    os.close(ended)
                self._exit = self._template.exit_of(self.pid)
            except ProcessLookupError:  # the template is gone, and this with it
                self._exit = -signal.SIGKILL
        return self._exit


class Template:
    """One template, whose environment ranks begin with. Thread-safe."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(environment), pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _close, self._channel, self._process)

    def fork(self, pipe: int, output: int, stacks: int) -> Forked:
        """Forks a rank, which takes from the pipe (environment, folder, sys.path, arguments of _rank.main). Raises RuntimeError if the
        template has ended."""
        try:
            return Forked(self, self.ask(_FORK, (pipe, output, stacks)))
        except OSError as error:
            raise RuntimeError("the process that imports torch for a rank has ended; standard error may say why") from error

    def exit_of(self, pid: int) -> int:
        """Returns how a rank that has ended did so: its exit code, or the negative number of the signal. Raises ProcessLookupError if
        the template has ended."""
        try:
            return self.ask(_PID.pack(pid))
        except OSError as error:
            raise ProcessLookupError(pid) from error

    @property
    def alive(self) -> bool:
        """Whether it runs and has answered so far."""
        return self._finalizer.alive and self._process.poll() is None

    def ask(self, request: bytes, files: tuple[int, ...] = ()) -> int:
        """Sends a request and returns the answer. Raises OSError if the template has ended."""
        with self._lock:
            try:
                socket.send_fds(self._channel, [request], files)
                answer = self._channel.recv(_PID.size)
                if not answer:
                    raise ConnectionResetError("the template has ended")
            except BaseException:  # an answer that comes later would be taken for that of another request
                self._finalizer()
                raise
            return _PID.unpack(answer)[0]


def _close(channel: socket.socket, process: subprocess.Popen) -> None:
    channel.close()
    process.kill()  # it does not see the end of a channel that a fork of this process still holds
    process.wait()


_latest: dict[tuple[int, int], tuple[dict[str, str], Template]] = {}  # by process and rank; earlier ones live as long as their ranks
_OF_A_TEST = "PYTEST_CURRENT_TEST"  # pytest changes it with each test, and no library reads it


def template(rank: int, environment: Mapping[str, str]) -> Template:
    """Returns a template for this rank that was started with this environment."""
    wanted = {name: value for name, value in environment.items() if name != _OF_A_TEST}
    key = (os.getpid(), rank)
    if key not in _latest or _latest[key][0] != wanted or not _latest[key][1].alive:
        _latest[key] = (wanted, Template(wanted))
    return _latest[key][1]


def _serve(channel: socket.socket, parent: int) -> None:
    """Answers requests until the parent has none any more or has ended."""
    ended, here = os.pidfd_open(parent), os.getpid()
    while os.getppid() == parent:
        if ended in wait([channel, ended]):
            return
        request, files, _, _ = socket.recv_fds(channel, 64, 3)
        if not request:
            return
        if request != _FORK:
            channel.send(_PID.pack(os.waitstatus_to_exitcode(os.waitpid(_PID.unpack(request)[0], 0)[1])))
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            os.close(ended)
            _become_a_rank(here, *files)
        for file in files:
            os.close(file)
        channel.send(_PID.pack(pid))


def _become_a_rank(template: int, pipe: int, output: int, stacks: int) -> None:
    try:
        os.setsid()
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        connection = Connection(pipe)
        environment, folder, path, arguments = pickle.loads(connection.recv_bytes())
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = path
        from annulus.testing._rank import main  # so that what it unpickles has the same names as in the pool's process

        main(template, connection, stacks, *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # what main does not return from


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules belong to a package
    import torch.distributed  # noqa: F401

    gc.freeze()  # so that collections of ranks do not copy the memory that they share
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):  # what else ends it is to be read
        _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(0)
