"""How cases.py, ranks.py and stuck.py wait for the processes that they start. When they are told to end themselves, because
the step's time is over or the user ends run.sh, they have 15 seconds before they are killed.

After listen() a signal is only noted, because an exception that is raised in its handler might come anywhere. All
functions here that wait look whether one came: they then end the process for which they wait and raise ToldToEnd.
"""

import contextlib
import os
import select
import selectors
import signal
import subprocess
import tempfile
import time

PATIENCE = 5  # seconds that a process has to end after SIGTERM, and after SIGKILL
MOST_SAID = 1 << 20  # bytes that are kept of what a command says
MOST_READ = 1 << 16  # bytes at a time; as much as a pipe holds
LOOK = 0.05  # seconds

_pipe = os.pipe()  # can be read once this process was told to end
_signals = []


class ToldToEnd(Exception):
    """This process was told to end, and the process for which it waited has ended."""


def listen():
    def note(number, _):
        _signals.append(number)
        os.write(_pipe[1], b"x")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)


def exit_code():
    """That of a process which was told to end."""
    return 128 + _signals[0]


def is_told(seconds=0):
    """Whether this process was told to end, or is within these seconds."""
    return bool(select.select([_pipe[0]], [], [], seconds)[0])


def end(process):
    for ask in (process.terminate, process.kill):
        ask()
        try:
            process.wait(PATIENCE)
            return
        except subprocess.TimeoutExpired:
            pass  # a call of the driver may keep it; poll() tells


def wait(process, seconds):
    """Returns the exit code, or None if the process has not ended within these seconds."""
    until = time.monotonic() + seconds
    while process.poll() is None:
        if is_told(LOOK):
            end(process)
            raise ToldToEnd
        if time.monotonic() > until:
            return None
    return process.returncode


def lines(process):
    """Yields the lines of the process's output, a pipe, as they come, and None after each look for them, at least once a
    second. Ends with the process. If this process is told to end, the lines that were written before are yielded."""
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        selector.register(_pipe[0], selectors.EVENT_READ)
        while True:
            selector.select(timeout=1)
            told = is_told()
            if told:
                end(process)
            # A child of the process may hold the pipe open, so the end of the process is the end of the output. It is
            # asked before the pipe is read, so that no line is missed.
            ended = told or process.poll() is not None
            read = None
            with contextlib.suppress(BlockingIOError):
                read = os.read(pipe, MOST_READ)
            *whole, rest = (rest + (read or b"")).split(b"\n")
            yield from whole
            if read == b"" or ended:
                if rest:
                    yield rest
                break
            yield None
    if told:
        raise ToldToEnd


def output_of(command, seconds, **options):
    """Runs a command. Returns its exit code, or None if it was ended after these seconds, and what it said."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, **options)
        code = wait(process, seconds)
        if code is None:
            end(process)
        output.seek(0)
        return code, output.read(MOST_SAID).decode(errors="replace")
