#!/usr/bin/env python3
"""Runs a program on 1, 2, ... processes under mpirun as one test: one report by rank, one result file, no process left. Called
by mpi_test (bazel/mpi.bzl) and by annulus_add_mpi_test of the package for CMake; mpi_runner.py --help lists the options.

- Each rank's output is kept apart and printed under its number. Where ranks write the XML of GoogleTest, the result file has
  their cases, and a case that failed on any rank has failed, with the ranks and what they said.
- After the deadline the stacks of all ranks are printed (by gdb where it can attach, and always what /proc says), and all
  processes are ended. This counts as exit code 110.
- A process that the job leaves behind is ended, and the test fails.
- With --hosts 2 its ranks lie on host1 and host2, simulated hosts of this machine (python/annulus/testing/hosts.py), in order
  and as evenly as they can; the program cuts them off by comm/testing/simulated_hosts.h. It is skipped where no namespaces can
  be made.
- A program that cannot run here prints a line "SKIPPED: reason" from one rank and exits with code 0 on all.

Needs Open MPI 4 or 5, Linux and Python 3.8, and no package.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree

DEADLINE_PASSED = 110
SET_CHILD_SUBREAPER = 36
PATIENCE = 5  # seconds for processes that are about to end, and for gdb
# What a rank executes: the program, with its output in a file of its own.
RANK = """rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
echo "$$ $(readlink /proc/self/ns/pid)" >"$ANNULUS_TEST_FOLDER/pid.$rank"
export GTEST_OUTPUT="xml:$ANNULUS_TEST_FOLDER/$rank.xml"
if [ -n "$ANNULUS_TEST_PRELOAD" ]; then export LD_PRELOAD="$ANNULUS_TEST_PRELOAD${LD_PRELOAD:+:$LD_PRELOAD}"; fi
exec "$0" "$@" >"$ANNULUS_TEST_FOLDER/out.$rank" 2>&1"""
# More ranks than cores are possible: ranks are not bound, and MPI yields.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl_base_warn_component_unused": "0", "OMP_NUM_THREADS": "1",
}
# In a sandbox with a process table of its own every mpirun has the same process number and so the same job number, and tests
# at the same time would map each other's segments in /dev/shm. Names of Open MPI 4 and 5; it ignores those it does not know.
BACKED = ("btl_vader", "btl_sm", "osc_sm", "osc_rdma")
# What a test may ask of simulated hosts, and variables that each of them has for itself.
ASKED = ("cut", "mend", "limit", "disturb", "kill")
KEPT = ("OMPI_", "PMIX_", "PRTE_", "PATH", "HOME", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_")


def read(path):
    try:
        with open(path, errors="replace") as f:
            return f.read()
    except OSError:
        return ""


def descendants():
    """The processes that come from this one: {pid: what it is, or "" for one that has ended}."""
    parents, names = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        stat = read("/proc/%s/stat" % pid).rpartition(")")[2].split()
        if stat:
            parents[int(pid)] = int(stat[1])
            names[int(pid)] = "" if stat[0] == "Z" else read("/proc/%s/cmdline" % pid).replace("\0", " ").strip() or "?"
    found = {}
    for pid in parents:
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid() and pid != os.getpid():
            found[pid] = names[pid]
    return found


def number_here(text):
    """The number here of a process that has written its number in its own namespace, and that namespace; "" if it is not there."""
    number, _, space = text.strip().partition(" ")
    if space in ("", os.readlink("/proc/self/ns/pid")):
        return number
    for pid in descendants():
        try:
            if os.readlink("/proc/%d/ns/pid" % pid) == space and re.search(r"(?m)^NSpid:.*\s%s$" % number, read("/proc/%d/status" % pid)):
                return str(pid)
        except OSError:
            pass
    return ""


def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_all():
    """Ends all that this test has started, by process numbers."""
    until = time.monotonic() + PATIENCE
    while any(descendants().values()) and time.monotonic() < until:
        for pid, name in descendants().items():
            if name:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(0.02)
        reap()


def left_behind(known):
    """What still runs, beside known processes, although the job has ended; ranks that mpirun has just killed may take a moment."""
    until = time.monotonic() + PATIENCE
    while True:
        reap()
        left = [name for pid, name in descendants().items() if name and pid not in known]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)


def stacks(folder, ranks):
    """Where each rank is. gdb looks at all of them at once."""
    pids = {rank: number_here(read(os.path.join(folder, "pid.%d" % rank))) for rank in range(ranks)}
    looks = {}
    if shutil.which("gdb"):
        for rank, pid in pids.items():
            if pid:
                looks[rank] = subprocess.Popen(
                    ["gdb", "-nx", "-batch", "-p", pid, "-ex", "thread apply all -ascending backtrace 25"], stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    text, until = [], time.monotonic() + PATIENCE
    for rank, pid in pids.items():
        if not pid:
            text.append("rank %d has not been started" % rank)
            continue
        said = ""
        if rank in looks:
            try:
                said = looks[rank].communicate(timeout=max(0.1, until - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                looks[rank].kill()
                said = looks[rank].communicate()[0]
        state = [line for line in read("/proc/%s/status" % pid).splitlines() if line.startswith(("State", "Threads"))]
        text.append("rank %d, process %s: %s; in the kernel: %s" % (
            rank, pid, ", ".join(" ".join(line.split()) for line in state) or "has ended", read("/proc/%s/wchan" % pid) or "?"))
        text += [line for line in said.splitlines() if line.startswith(("#", "Thread "))]
    return "\n".join(text)


class served:
    """Carries out what the program asks of simulated hosts, at a socket (simulated_hosts.h): a line with the function's name and its
    arguments, answered by "ok" or "usage: " or "failed: " with a text."""

    def __init__(self, simulated, path):
        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                words = self.rfile.readline().decode().split()
                try:
                    if len(words) < 2 or words[0] not in ASKED or words[1] not in simulated.names:
                        raise ValueError("expected one of %s and one of %s" % (", ".join(ASKED), ", ".join(simulated.names)))
                    if words[:2] == ["kill", simulated.names[0]]:
                        raise ValueError("mpirun is on this host")
                    getattr(simulated, words[0])(words[1], *map(float, words[2:]))
                    said = "ok"
                except ValueError as error:
                    said = "usage: %s" % error
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    said = "failed: %s" % error
                self.wfile.write((said.replace("\n", " ") + "\n").encode())

        self.path, self.server = path, socketserver.ThreadingUnixStreamServer(path, Handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self.path

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class Job:
    """The program on one number of processes."""

    def __init__(self, options, ranks, folder):
        self.options, self.ranks, self.folder = options, ranks, folder
        self.failures = []
        self.code = None

    def run(self):
        options = self.options
        env = dict(os.environ, **SETTINGS, TMPDIR=self.folder, WANT_SIZE=str(self.ranks), ANNULUS_TEST_FOLDER=self.folder,
                   ANNULUS_TEST_PRELOAD="")
        for name in () if options.hosts else BACKED:
            env["OMPI_MCA_%s_backing_directory" % name] = self.folder
        for name in ("TEST_PREMATURE_EXIT_FILE", "XML_OUTPUT_FILE", "GTEST_OUTPUT"):
            env.pop(name, None)
        env.setdefault("HOME", self.folder)
        if options.faults:
            env.update(ANNULUS_MPI_FAULTS=options.faults, ANNULUS_TEST_PRELOAD=os.path.abspath(options.faults_library))
        if not options.hosts:
            return self.run_on(env, [], subprocess.Popen)
        import hosts
        with hosts.Hosts(["host%d" % (i + 1) for i in range(options.hosts)]) as simulated, \
                served(simulated, os.path.join(self.folder, "hosts")) as env["ANNULUS_TEST_HOSTS"]:
            each = -(-self.ranks // options.hosts)
            words = ["--host", ",".join("%s:%d" % (name, each) for name in simulated.names)]
            # mpirun takes only its own variables to other hosts by itself.
            words += [w for name in env if re.fullmatch(r"[A-Za-z_]\w*", name) and not name.startswith(KEPT) for w in ("-x", name)]
            return self.run_on(env, words, simulated.popen)

    def run_on(self, env, words, start):
        options, known = self.options, frozenset(descendants())
        command = [options.mpirun, "--oversubscribe", "--bind-to", "none", "-np", str(self.ranks), *words, *options.mpi_arg,
                   "sh", "-c", RANK, *options.program]
        with open(os.path.join(self.folder, "mpirun"), "w") as out:
            try:
                mpirun = start(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            except OSError as error:
                self.failures.append("%s cannot be started: %s" % (options.mpirun, error.strerror))
                return
        where = ""
        try:
            code = mpirun.wait(options.timeout)
            self.code = 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            where = "\n--- where the ranks are after %g s ---\n%s\n" % (options.timeout, stacks(self.folder, self.ranks))
            self.code = DEADLINE_PASSED
            end_all()
        left = left_behind(known)
        end_all()
        self.output = self.outputs() + where
        if left:
            self.failures.append("the job has ended, but these processes went on: " + "; ".join(left))

    def outputs(self):
        """What mpirun printed, and each rank under its number."""
        text = read(os.path.join(self.folder, "mpirun"))
        for rank in range(self.ranks):
            said = read(os.path.join(self.folder, "out.%d" % rank))
            if said:
                text += "--- rank %d of %d ---\n%s%s" % (rank, self.ranks, said, "" if said.endswith("\n") else "\n")
        return text

    def judge(self):
        """Returns whether the program refused to run here."""
        options, lines = self.options, self.output.splitlines()
        if self.code == 0 and any(line.startswith("SKIPPED: ") for line in lines):
            return True
        if self.code != options.expect_exit:
            hang = " (not done within %g s)" % options.timeout if self.code == DEADLINE_PASSED else ""
            self.failures.append("mpirun's exit code is %s%s, expected %d" % (self.code, hang, options.expect_exit))
        for text in options.expect_once:
            count = sum(text in line for line in lines)
            if count != 1:
                self.failures.append("%d lines hold, instead of one: %s" % (count, text))
        self.failures += ["the output holds: " + text for text in options.forbid if text in self.output]
        return False

    def cases(self):
        """The cases of GoogleTest: {(suite, name): [element of the first rank, {what they said: [ranks]}]}."""
        cases = {}
        for rank in range(self.ranks):
            try:
                root = ElementTree.parse(os.path.join(self.folder, "%d.xml" % rank)).getroot()
            except (OSError, ElementTree.ParseError):
                continue
            for case in root.iter("testcase"):
                entry = cases.setdefault((case.get("classname"), case.get("name")), [case, {}])
                for failure in case.findall("failure"):
                    entry[1].setdefault(failure.text or failure.get("message", ""), []).append(rank)
        return cases


def described(ranks):
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, ranks))


def write_report(path, name, jobs):
    """The result file: JUnit's XML, in the form of GoogleTest's."""
    root = ElementTree.Element("testsuites", name=name)
    for job in jobs:
        suite = ElementTree.SubElement(root, "testsuite", name="on %d" % job.ranks)
        job_case = ElementTree.Element("testcase", classname=name, name="on %d" % job.ranks, status="run", result="completed")
        for failure in job.failures:
            ElementTree.SubElement(job_case, "failure", message=failure).text = failure
        # Where the program is expected to fail, what its cases say is not the test's.
        cases = {} if job.options.expect_exit else job.cases()
        if job.failures or not cases:
            suite.append(job_case)
        for (of, title), (first, said) in cases.items():
            case = ElementTree.SubElement(suite, "testcase", dict(first.attrib, classname=of, name=title + (
                "" if len(jobs) == 1 else " on %d" % job.ranks)))
            for text, ranks in said.items():
                ElementTree.SubElement(case, "failure", message=described(ranks)).text = described(ranks) + ":\n" + text
            if not said:
                case.extend(first.findall("skipped"))
        failed = sum(case.find("failure") is not None for case in suite)
        suite.attrib.update(tests=str(len(suite)), failures=str(failed))
    root.attrib.update(tests=str(sum(len(suite) for suite in root)), failures=str(sum(int(s.get("failures")) for s in root)))
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def options_of(words):
    parser = argparse.ArgumentParser(usage="mpi_runner.py [options] -- PROGRAM [ARGUMENTS]", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", default="2", help="numbers of processes, one after the other: 1,2,4")
    parser.add_argument("--name", default="", help="of the test in the result file; default: the program's")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--mpi-arg", action="append", default=[], help="an argument of mpirun")
    parser.add_argument("--timeout", type=float, default=50, help="seconds for each number of processes")
    parser.add_argument("--expect-exit", type=int, default=0, help="mpirun's exit code: that of the first rank that failed")
    parser.add_argument("--expect-once", action="append", default=[], help="text that must be in exactly one line of the output")
    parser.add_argument("--forbid", action="append", default=[], help="text that must not be in the output")
    parser.add_argument("--faults", default="", help="a plan of faults (comm/testing/fault_plan.h)")
    parser.add_argument("--faults-library", default="", help="libannulus_mpi_faults.so")
    parser.add_argument("--hosts", type=int, default=0, help="how many simulated hosts have the ranks; default: this one")
    parser.add_argument("--report", default=os.environ.get("XML_OUTPUT_FILE", ""), help="the result file")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(words)
    options.name = options.name or os.path.basename(options.program[0])
    if os.environ.get("MPI_TEST_TIMEOUT"):
        options.timeout = float(os.environ["MPI_TEST_TIMEOUT"])
    if options.faults and not os.path.exists(options.faults_library):
        parser.error("--faults needs --faults-library, the path of libannulus_mpi_faults.so")
    return options


def main(words):
    options = options_of(words)
    if options.hosts:
        here = os.path.dirname(os.path.abspath(__file__))
        sys.path[:0] = [here, os.path.join(here, "..", "..", "python", "annulus", "testing")]  # installed; in the clone
        import namespaces
        namespaces.isolate()
    # Processes whose parents end become children of this one.
    if ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("mpi_runner.py: prctl(PR_SET_CHILD_SUBREAPER) is refused, so processes could be left behind")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    jobs, skipped = [], False
    # A short path: Open MPI's unix sockets take 108 bytes.
    base = "/tmp" if options.hosts else "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folders = []
    try:
        for ranks in map(int, options.np.split(",")):
            folders.append(tempfile.mkdtemp(prefix="annulus.", dir=base))
            job = Job(options, ranks, folders[-1])
            job.run()
            jobs.append(job)
            if job.code is not None:
                skipped = job.judge() or skipped
                print(job.output, end="")
                print("mpirun exit %d" % job.code)
            for failure in job.failures:
                print("FAILED%s: %s" % (" on %d" % ranks if "," in options.np else "", failure))
            sys.stdout.flush()
        if options.report and not skipped:
            write_report(options.report, options.name, jobs)
    finally:
        end_all()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(job.failures for job in jobs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
