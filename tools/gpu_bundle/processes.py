"""How cases.py, ranks.py and stuck.py wait for the processes that they start. When they are told to end themselves, because
the step's time is over or the user ends run.sh, they have 15 seconds before they are killed.

After listen() a signal is only noted, because an exception that is raised in its handler might come anywhere. wait(),
lines() and output_of() look for it while they wait. They then end their process, as far as it can be ended, and raise
ToldToEnd.
"""

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time

# Seconds that a process has to end after SIGTERM, and after SIGKILL; together less than the --kill-after of run.sh's steps.
PATIENCE = 5
MOST_READ = 1 << 20  # bytes at a time; no pipe holds more, so one read gets what a process left that has ended
LOOK = 0.05  # seconds between two looks for a signal

_pipe = os.pipe()  # can be read once this process was told to end
_signals = []


class ToldToEnd(BaseException):
    """This process was told to end, and has ended the process for which it waited."""


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
    """Ends the process, within two times PATIENCE. It does not look for signals."""
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
    while True:
        select.select([pipe, _pipe[0]], [], [], 1)
        told = is_told()
        if told:
            end(process)
        # A child of the process may hold the pipe open, so the end of the process is the end of the output. It is asked
        # before the pipe is read, so that no line is missed.
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
        return code, output.read().decode(errors="replace")
