#!/usr/bin/env python3
"""Runs a GoogleTest program of the bundle so that one case costs no other case its result. Called by run.sh; report.py
reads what it prints with read_cases.

    cases.py [--limit SECONDS] [--time SECONDS] [--processes N] [--done FILE] PROGRAM ARGUMENTS...

The program's lines are passed on as they come, so what has passed is known even if everything is killed. A case that
lasts longer than SECONDS is ended (and a process, END seconds after its last case), and a line says so:

    [ STOPPED  ] Suite.Case: did not end within 60 s

Before that, standard error says where its threads are (stuck.py). After that, after a crash, and after a failure that
leaves the process unable to use its GPU, another process runs the cases that are left. FILE holds the output of earlier
calls, whose finished cases are left out. With `--processes`, up to N processes run at once, each a share of the cases;
the lines of a case then come together, when it has ended.

At the end the first failed cases run again, each alone and with CUDA_LAUNCH_BLOCKING=1, which makes an error appear at
its cause. What they say goes to standard error, and how they ended to the message of the failure:

    [ ALONE    ] Suite.Case: segmentation fault

No case runs again that might not end before the `--time` for all is over. Exits with 0 if all cases passed, 1 if some
failed or stopped, and UNFINISHED if the program ended before it had run all of its cases.
"""

import argparse
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import processes  # noqa: E402
import stuck  # noqa: E402

UNFINISHED = 75
MOST_STOPPED = 4  # cases of one program that hang or crash; a device that is lost would stop them all
END = 15  # seconds that it has to end after its last case
LISTING = 60  # seconds that it has to list its cases
MOST_ALONE = 5  # failed cases that run again
ALONE = 20  # seconds that each of them may take
MOST_ALONE_SAID = 1 << 16  # characters of each that are kept

STARTED = re.compile(r"\[ RUN      \] (\S+)\s*$")
ENDED = re.compile(r"\[ *(OK|FAILED|SKIPPED) *\] (\S+?),? ?(?:where .*)?\((\d+) ms\)\s*$")
STOPPED = re.compile(r"^\[ STOPPED  \] (\S+): (.*)$")
AGAIN = re.compile(r"^\[ ALONE    \] (\S+): (.*)$")
FOUND = re.compile(r"\[==========\] Running (\d+) tests? from ")
RAN = re.compile(r"\[==========\] (\d+) tests? from .* ran\.")
# After these no call of CUDA succeeds in the process any more.
LOST = re.compile(r"CUDA.*(?:illegal memory access|device-side assert|misaligned address|unspecified launch failure|"
                  r"illegal instruction|launch timed out|uncorrectable ECC)")
SIGNALS = {signal.SIGABRT: "aborted", signal.SIGBUS: "bus error", signal.SIGFPE: "arithmetic fault",
           signal.SIGKILL: "killed", signal.SIGSEGV: "segmentation fault", signal.SIGTERM: "ended"}


class Case:
    """A case in the output: its result "passed", "failed", "skipped", or None while it has none, and its own output."""

    def __init__(self, name):
        self.name, self.result, self.seconds, self.lines, self.hung = name, None, 0.0, [], False

    @property
    def message(self):
        return "\n".join(self.lines).strip()


class Reader:
    """Reads the lines of one or several runs of a program, one after the other."""

    def __init__(self):
        self.cases = {}  # name -> Case, the latest
        self.current = None
        self.found = 0  # the cases of the latest run, as its first line says
        self.ran = False  # whether the latest run came to its end
        self.ended_before = 0  # the cases that had a result when the latest run began

    @property
    def ended(self):
        return sum(bool(c.result) for c in self.cases.values())

    def add(self, line):
        if FOUND.search(line):
            self.found, self.ran, self.current = int(FOUND.search(line).group(1)), False, None
            self.ended_before = self.ended
        elif RAN.search(line):
            self.ran, self.current = True, None
        elif STARTED.search(line):
            self.current = self.cases[STARTED.search(line).group(1)] = Case(STARTED.search(line).group(1))
        elif AGAIN.match(line) and AGAIN.match(line).group(1) in self.cases:
            name, how = AGAIN.match(line).groups()
            self.cases[name].lines.append("alone, with CUDA_LAUNCH_BLOCKING=1: " + how)
        elif self.current:
            self._add_to_case(line)

    def _add_to_case(self, line):
        case, ended, stopped = self.current, ENDED.search(line), STOPPED.match(line)
        if ended and ended.group(2) == case.name:
            before = line[:ended.start()]  # what the case printed without a newline
            case.lines += [before] if before.strip() else []
            case.result = {"OK": "passed", "FAILED": "failed", "SKIPPED": "skipped"}[ended.group(1)]
            case.seconds = int(ended.group(3)) / 1000
            self.current = None
        elif stopped and stopped.group(1) == case.name:
            case.result, self.current = "failed", None
            case.lines.append(stopped.group(2))
            case.hung = stopped.group(2).startswith("did not end")
        else:
            case.lines.append(line)


def read_cases(text):
    reader = Reader()
    for line in text.splitlines():
        reader.add(line)
    return reader


class Run:
    """One process of the program, which runs the cases that have no result yet."""

    def __init__(self, program, reader, limit, say):
        self.reader, self.limit, self.say = reader, limit, say
        done = [name for name, case in reader.cases.items() if case.result]
        self.ended_before = reader.ended
        reader.found, reader.ran, reader.current = 0, False, None
        filters = ["--gtest_filter=" + filter_without(program, done)] if done else []
        self.process = subprocess.Popen(program + filters, stdout=subprocess.PIPE)

    def end(self, look=False):
        try:
            if look:
                stuck.say_all(self.process.pid)
        finally:
            processes.end(self.process)

    def go(self):
        """Passes the lines on until the process has ended. Returns why it did; empty if it ended by itself."""
        code, lasted, looked = None, 0.0, time.monotonic()  # lasted: since a case began or ended
        for line in processes.lines(self.process):
            if line is not None:
                text, before = line.decode(errors="replace"), self.reader.current
                self.say(text)
                self.reader.add(text)
                if self.reader.current is not before:
                    lasted = 0.0
                    if before and before.result == "failed" and LOST.search(before.message) and not self.reader.ran:
                        self.end()
                        return "its process has lost the GPU"
                continue
            # If more than a second lies between two looks, this process stood still, and perhaps the program as well.
            now = time.monotonic()
            lasted, looked = lasted + min(1, now - looked), now
            if lasted > self.patience:
                break
        else:
            code = processes.wait(self.process, self.patience)
        if code is None:
            why = "did not end within %d s" % self.patience
            self.end(look=True)
            return why
        # Those who tell this process to end may tell the program as well, and its end may be seen first.
        if code and processes.is_told(processes.PATIENCE if code in (-signal.SIGTERM, -signal.SIGINT) else 0):
            raise processes.ToldToEnd
        return how_ended(code) if code < 0 else ""

    @property
    def patience(self):
        """The seconds that the current case may last or, after the last one, the process."""
        return min(self.limit, END) if self.reader.ran or 0 < self.reader.found <= self.cases_ended else self.limit

    @property
    def ended(self):
        return self.process.poll() is not None

    @property
    def cases_ended(self):
        return self.reader.ended - self.ended_before


def how_ended(code):
    return SIGNALS.get(-code, "signal %d" % -code) if code < 0 else "exit code %d" % code


def filter_without(program, done):
    """The program's own filter without the cases that are done."""
    own = [a.split("=", 1)[1] for a in program if a.startswith("--gtest_filter=")]
    positive, _, negative = (own[-1] if own else "").partition("-")
    return positive + "-" + ":".join(filter(None, [negative, *done]))


def say(text):
    print(text, flush=True)


def run(program, reader, limit, say=say, stopped=None):
    """Runs the program until all cases have a result. `say` is told each line, and `stopped` is the list of the cases that
    hung or crashed. Returns the exit code."""
    stopped = [] if stopped is None else stopped
    while True:
        if processes.is_told():
            raise processes.ToldToEnd
        one = Run(program, reader, limit, say)
        why = one.go()
        if reader.ran:
            if why:
                say("after its last case: " + why)
            code = one.process.poll()
            return code if code and code > 0 else int(bool(why) or any(c.result == "failed" for c in reader.cases.values()))
        why = why or "exit code %d" % one.process.returncode
        if reader.current:  # it was running when the process ended
            line = "[ STOPPED  ] %s: %s" % (reader.current.name, why)
            stopped.append(reader.current)
            say(line)
            reader.add(line)
        left = reader.found - one.cases_ended
        if reader.found and left <= 0:
            say("after its last case: " + why)
            return 1
        if not one.cases_ended or len(stopped) >= MOST_STOPPED or not one.ended:
            say("%s; %s cases were not run" % (why, left if reader.found else "its"))
            return UNFINISHED
        say("%s; another process runs the %d cases that are left" % (why, left))


def list_cases(program, done):
    """The cases that the program would run; empty if it does not say."""
    filters = ["--gtest_filter=" + filter_without(program, done)] if done else []
    code, text = processes.output_of([*program, *filters, "--gtest_list_tests"], LISTING)
    suite, names = None, []
    for line in text.splitlines() if code == 0 else []:
        name = line.partition("#")[0].rstrip()
        if re.fullmatch(r"\S+\.", name):
            suite = name
        elif suite and re.fullmatch(r"  \S+", name):
            names.append(suite + name.strip())
    return [name for name in names if "DISABLED_" not in name]


class Blocks:
    """Passes on the lines of one of several processes: those of a case together, when it has ended, so that the output is as
    that of one process. The lines in which a process counts its cases are left out."""

    def __init__(self, reader, lock):
        self.all, self.own, self.lock, self.lines = reader, Reader(), lock, []

    def __call__(self, text):
        before = self.own.current
        self.own.add(text)
        if before and self.own.current is not before:  # it has ended, or the next one began without its end
            ended = self.lines if self.own.current else self.lines + [text]
            self.lines = [text] if self.own.current else []
            self.pass_on(ended)
        elif self.own.current:
            self.lines.append(text)
        elif not text.startswith(("[", "Note: Google Test filter")):
            self.pass_on([text])

    def pass_on(self, lines):
        with self.lock:
            say("\n".join(lines))
            for line in lines:
                self.all.add(line)


def run_at_once(program, reader, limit, most, blocks):
    """The same as run(), with up to `most` processes at once, each with its share of the cases. `blocks` is filled with
    what each of them has said of its current case."""
    if most < 2:
        return run(program, reader, limit)
    names = list_cases(program, [name for name, case in reader.cases.items() if case.result])
    most = min(most, max(2, len(os.sched_getaffinity(0))), len(names))
    if most < 2:
        return run(program, reader, limit)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // most)))
    lock, stopped, readers = threading.Lock(), [], [Reader() for _ in range(most)]
    Blocks(reader, lock).pass_on(["[==========] Running %d tests from %d processes." % (len(names), most)])

    blocks += [Blocks(reader, lock) for _ in range(most)]

    def run_share(i):
        share = [*program, "--gtest_filter=" + ":".join(names[i::most])]
        return run(share, readers[i], limit, blocks[i], stopped)

    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        codes = list(pool.map(run_share, range(most)))
    if all(r.ran for r in readers):
        Blocks(reader, lock).pass_on(["[==========] %d tests from %d processes ran." % (len(names), most)])
    return UNFINISHED if UNFINISHED in codes else max(codes)


def run_alone(program, names, until):
    """Runs each of these failed cases again, as long as they end."""
    env = dict(os.environ, CUDA_LAUNCH_BLOCKING="1")
    for name in names[:MOST_ALONE]:
        if time.monotonic() + ALONE + 2 * processes.PATIENCE > until:
            return
        code, text = processes.output_of([*program, "--gtest_filter=" + name], ALONE, env=env, stderr=subprocess.STDOUT)
        text = text[:MOST_ALONE_SAID]
        for line in text.splitlines():
            print("alone: " + line, file=sys.stderr)
        if code is None:
            say("[ ALONE    ] %s: did not end within %d s" % (name, ALONE))
            return
        case = read_cases(text).cases.get(name)
        how = case.result if case and case.result else how_ended(code)
        causes = [line.strip() for line in case.lines if "rror" in line] if case else []
        say("[ ALONE    ] %s: %s" % (name, "; ".join([how, *causes[:1]])[:400]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--time", type=float, default=3600)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--done", metavar="FILE")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    until = time.monotonic() + options.time
    done = ""
    if options.done:
        with open(options.done, errors="replace") as f:
            done = f.read()
    blocks = []
    processes.listen()
    try:
        reader = read_cases(done)
        before = {case.name for case in reader.cases.values() if case.result}
        code = run_at_once(options.program, reader, options.limit, options.processes, blocks)
        failed = [c for c in reader.cases.values() if c.result == "failed" and c.name not in before and not c.hung]
        run_alone(options.program, [c.name for c in failed], until)
        sys.exit(code)
    except processes.ToldToEnd:
        for line in (line for block in blocks if block.own.current for line in block.lines):
            print("stuck: " + line, file=sys.stderr)
        sys.exit(processes.exit_code())
    except OSError as error:
        sys.exit("the test cannot be started: %s" % error)


if __name__ == "__main__":
    main()
