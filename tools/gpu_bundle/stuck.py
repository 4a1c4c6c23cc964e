"""Says where processes hang, in lines "stuck: ..." on standard error. cases.py does so before it ends a case, and run.sh
before the time of another step is up.

    stuck.py PID     of this process and all that it has started: of each thread what the kernel knows
"""

import os
import shutil
import subprocess
import sys

import processes

MOST_THREADS = 64  # of each process
MOST_SAID = 200000  # characters of a debugger
DEBUGGER = 20  # seconds that a debugger may take


def read(path):
    try:
        with open(path, errors="replace") as f:
            return f.read().replace("\0", " ").strip()
    except OSError as error:
        return error.strerror


def say(text):
    for line in text.splitlines():
        print("stuck: " + line, file=sys.stderr)
    sys.stderr.flush()


def family(pid):
    """The process and all that descend from it."""
    parents = {}
    for other in filter(str.isdigit, os.listdir("/proc")):
        fields = read("/proc/%s/stat" % other).rpartition(")")[2].split()
        if len(fields) > 1 and fields[1].isdigit():  # it may have ended meanwhile
            parents.setdefault(int(fields[1]), []).append(int(other))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def say_threads(pid):
    say("process %d: %s" % (pid, read("/proc/%d/cmdline" % pid)[:200]))
    try:
        threads = sorted(os.listdir("/proc/%d/task" % pid), key=int)
    except OSError:
        return
    for thread in threads[:MOST_THREADS]:
        about = [read("/proc/%d/task/%s/%s" % (pid, thread, name)) for name in ("comm", "wchan", "syscall", "stack")]
        say("thread %s %s: waits in %s; system call %s" % (thread, *about[:3]))
        if about[3].startswith("["):  # only root may read it
            say("\n".join("    " + line for line in about[3].splitlines()))


def say_all(pid):
    """Says what there is to know of a process and its children. It is no failure if that does not succeed."""
    try:
        for one in family(pid):
            say_threads(one)
        say_stacks(pid)
    except Exception as error:
        say("%s: %s" % (type(error).__name__, error))


def say_stacks(pid):
    """The stacks of all threads, if there is a debugger."""
    path = os.environ.get("PATH", "") + ":/usr/local/cuda/bin"
    debugger = shutil.which("cuda-gdb", path=path) or shutil.which("gdb", path=path)
    if not debugger:
        return
    env = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "LD_PRELOAD")}  # those are for the tests
    _, text = processes.output_of([debugger, "-p", str(pid), "-batch", "-ex", "thread apply all bt"], DEBUGGER, env=env,
                                  stderr=subprocess.STDOUT)
    say(text[:MOST_SAID])


if __name__ == "__main__":
    for process in family(int(sys.argv[1])):
        if process != os.getpid():
            say_threads(process)
