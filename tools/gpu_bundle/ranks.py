#!/usr/bin/env python3
"""Runs a test of several ranks with mpirun. Called by run.sh; report.py reads what it prints with failed_cases.

    ranks.py --time SECONDS MPIRUN ARGUMENTS...

If the ranks run a GoogleTest program, the first case that fails or crashes on one of them ends them all
(tests/comm/suite.cc). Then they start again without the cases that have failed, up to MOST_AGAIN times, and the lines
"[ WITHOUT  ] Suite.Case" say which these are. mpirun ends the ranks shortly before SECONDS are over. The exit code is
that of the first mpirun.
"""

import argparse
import re
import subprocess
import sys
import time

import cases
import processes

MOST_AGAIN = 3
LEAST = 20  # seconds that must be left to start again
EARLIER = 5  # seconds before the time is over

STARTED = re.compile(r"\[ RUN      \] (\S+)\s*$")
ENDED = re.compile(r"\[ *(?:OK|SKIPPED) *\] (\S+?),? ?(?:where .*)?\(\d+ ms\)\s*$")
FAILED = re.compile(r"\[  FAILED  \] (\S+?),? (?:where .*)?(?:on this rank|\(\d+ ms\))")
WITHOUT = re.compile(r"^\[ WITHOUT  \] (\S+)$")


def failed_cases(text):
    """The cases that failed in one run of the ranks, or else those that began more often than they ended, with the lines
    that were printed since the case began on the first rank."""
    running, lines, failed = {}, {}, {}
    for line in text.splitlines():
        started, ended, fails = STARTED.search(line), ENDED.search(line), FAILED.search(line)
        if started:
            name = started.group(1)
            running[name] = running.get(name, 0) + 1
            lines.setdefault(name, [])
        elif ended:
            running[ended.group(1)] = running.get(ended.group(1), 0) - 1
        elif fails:
            failed.setdefault(fails.group(1), list(lines.get(fails.group(1), [])))
        else:
            for name, count in running.items():
                if count > 0:
                    lines[name].append(line)
    return failed or {name: lines[name] for name, count in running.items() if count > 0}


def runs_of(text):
    """The output of each run."""
    runs = [[]]
    for line in text.splitlines():
        if not WITHOUT.match(line):
            runs[-1].append(line)
        elif runs[-1]:
            runs.append([])
    return ["\n".join(lines) for lines in runs]


def run(command, until):
    """Runs mpirun. Returns its exit code and what it printed."""
    seconds = max(1, int(until - time.monotonic()) - EARLIER)
    process = subprocess.Popen([command[0], "--timeout", str(seconds), *command[1:]], stdout=subprocess.PIPE)
    text = b""
    for line in processes.lines(process):
        if line is not None:
            text += line + b"\n"
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()
    return processes.wait(process, float("inf")), text.decode(errors="replace")


def run_all(command, until):
    """Runs mpirun, and again without the cases that failed. Returns the first exit code."""
    first, text = run(command, until)
    code, failed = first, {}
    for _ in range(MOST_AGAIN):
        failed_now = failed_cases(text) if code else {}
        failed.update(failed_now)
        if not failed_now or until - time.monotonic() < LEAST:
            break
        print("".join("[ WITHOUT  ] %s\n" % name for name in failed), end="", flush=True)
        code, text = run([*command, "--gtest_filter=" + cases.filter_without(command, failed)], until)
    return first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=3600)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    until = time.monotonic() + options.time
    processes.listen()
    try:
        first = run_all(options.command, until)
    except processes.ToldToEnd:
        sys.exit(processes.exit_code())
    sys.exit(first if first >= 0 else 128 - first)


if __name__ == "__main__":
    main()
