#!/usr/bin/env python3
"""Runs the tests and benchmarks of this bundle on the GPUs of this machine, in the order of steps.json, and reports.

    run.py [--only PART]... [--minutes N] [--limit SECONDS] [--out FOLDER]
    run.py -- COMMAND...           one command that finds the programs and libraries here: run.py -- annulus bench gpu
    run.py --report --out FOLDER   the report again, also of what a killed run left

The machine needs an NVIDIA driver, Python, and LibTorch of the version and for the CUDA in built.json: that in LIBTORCH
(.../site-packages/torch, or an unpacked LibTorch), else the torch that python3 or python3.12 imports. It needs neither MPI
nor a network. This folder is only read. Exits with 0 if nothing failed, also if there is no GPU and all steps skip.
ANNULUS_ANY_LIBTORCH=1 accepts another LibTorch, with which programs may not start.

A step has a time limit; what fails, crashes or hangs is recorded, and the rest runs. FOLDER gets report.txt, results.jsonl
(a line for each step that ended), output.txt (what they printed) and running.* (what the present step prints). Called again
with the same FOLDER, it runs what has no result yet, and reports on both.
"""

import argparse
import ctypes
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
import report  # noqa: E402

BUNDLE = os.path.dirname(os.path.abspath(__file__))
FILES = os.path.join(BUNDLE, "files")
# Variables of a launcher or batch system that started run.py. Ranks that it starts must not join that job.
FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "ANNULUS_WORLD")
# Tests begin no later than after this share of the time if benchmarks are wanted; those that are left go last.
SHARE_OF_TESTS = 0.6
FINAL = ("passed", "failed")  # such steps need not run again
LEAST = 5  # seconds that must be left to begin a step
PATIENCE = 10  # seconds that a step which is told to end has to do so
MINUTES = 9

LIBC = ctypes.CDLL(None)
stopped = []  # the signals that asked for the end


def read_json(name):
    with open(os.path.join(BUNDLE, name)) as f:
        return json.load(f)


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def find_torch():
    """The folder of LibTorch, its version, and why it cannot be used ("": it can)."""
    built = read_json("built.json")
    find = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    torch = os.environ.get("LIBTORCH") or output_of("python3", "-c", find) or output_of("python3.12", "-c", find)
    if not torch:
        return "", "", ("no LibTorch: LIBTORCH is not set, and neither python3 nor python3.12 has torch; set "
                        "LIBTORCH=.../site-packages/torch")
    there = lambda name: os.path.exists(os.path.join(torch, "lib", name))
    text = report.read_text(os.path.join(torch, "version.py")) or report.read_text(os.path.join(torch, "build-version"))
    version, cuda = (re.search(p, text) for p in (r"\d+\.\d+\.\d+", r"(?m)\+cu(\d\d)|^cuda\b.*= '(\d+)"))
    version = version.group() if version else "unknown"
    cuda = cuda and (cuda.group(1) or cuda.group(2))
    minor, major = built["LibTorch"].rpartition(".")[0], built["CUDA"].split(".")[0]
    fault = ""
    if not there("libtorch_cpu.so"):
        fault = "there is no lib/libtorch_cpu.so in %s; LIBTORCH should be .../site-packages/torch, or an unpacked LibTorch" % torch
    elif version.rpartition(".")[0] != minor:
        fault = "LibTorch %s in %s, but this bundle was built with %s, and only %s fits it; make a bundle with that one" % (
            version, torch, built["LibTorch"], minor)
    elif not there("libtorch_cuda.so"):
        fault = "the LibTorch in %s has no CUDA (no lib/libtorch_cuda.so)" % torch
    elif cuda and cuda != major:
        fault = "the LibTorch in %s is for CUDA %s, but this bundle was built for CUDA %s, whose libraries have other names" % (
            torch, cuda, major)
    return torch, version, fault


def environment(torch):
    """The variables with which the programs find their libraries and Open MPI."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    inside = lambda *names: os.path.join(BUNDLE, *names)
    libraries = [inside("lib"), os.path.join(torch, "lib"), *sorted(glob.glob(os.path.join(torch, "..", "nvidia", "*", "lib")))]
    path = [inside("files", "launcher"), inside("mpi", "bin"), env.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    env.update(
        LD_LIBRARY_PATH=":".join([*libraries, *filter(None, [env.get("LD_LIBRARY_PATH")])]), PATH=":".join(path),
        LD_PRELOAD="libannulus_entropy.so",  # arc4random, which the C library has from 2.36 on (entropy.c)
        LIBTORCH=torch, ANNULUS_PROGRAM="annulus", PYTHONDONTWRITEBYTECODE="1",
        MPI_HOME=inside("mpi"), OPAL_PREFIX=inside("mpi"), OPAL_BINDIR=inside("mpi", "bin"), OPAL_LIBDIR=inside("lib"),
        OPAL_PKGLIBDIR=inside("mpi", "plugins"), OPAL_PKGDATADIR=inside("mpi", "share"), OPAL_SYSCONFDIR=inside("mpi", "etc"),
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.setdefault("NCCL_DEBUG", "WARN")  # why NCCL failed
    return env


def facts(torch, version):
    built = read_json("built.json")
    gpus = output_of("nvidia-smi", "--format=csv,noheader", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit")
    cpu = re.search(r"(?m)^model name\s*: (.*)", report.read_text("/proc/cpuinfo"))
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "GPUs": "; ".join(gpus.splitlines()),
        "LibTorch": "%s, %s" % (version, torch),
        "built with": ", ".join("%s %s" % item for item in built.items()),
        "system": "%s, glibc %s, %d cores of %s" % (
            platform.platform(), platform.libc_ver()[1], os.cpu_count(), cpu.group(1) if cpu else platform.machine()),
    }


def die_with_parent():
    LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def wait(processes, until, signals=0):
    """Waits until all of them have ended, until the time is over or more signals came than these. Leaves them to be reaped,
    so that their process groups still exist."""
    while time.monotonic() < until and len(stopped) <= signals:
        if all(os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for p in processes):
            return True
        time.sleep(0.05)
    return False


def kill(processes, number):
    for process in processes:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass


class Run:
    def __init__(self, out, env, scratch):
        self.out, self.env, self.scratch = out, env, scratch

    def path(self, name):
        return os.path.join(self.out, name)

    def record(self, entry):
        with open(self.path("results.jsonl"), "a") as f:
            f.write(json.dumps(entry) + "\n")
        with open(self.path("report.txt.new"), "w") as f:
            f.write(report.text_of(self.out))
        os.replace(self.path("report.txt.new"), self.path("report.txt"))

    def skip(self, step, result, reason):
        self.record(report.outcome(step, [], [], reason, result))

    def start(self, step, seconds):
        """Starts the step's processes. Their output goes to running.0, running.1, ..."""
        earlier = str(max(1, int(0.8 * seconds)))  # for commands that can end by themselves and then print more
        command = [word.replace("{seconds}", earlier) for word in step["command"]]
        env = {"HOME": self.scratch, **self.env, **step.get("env", {}), "TMPDIR": self.scratch, "TEST_TMPDIR": self.scratch,
               "MPI_TEST_TIMEOUT": earlier}
        shards = step.get("shards", 1)
        if shards > 1:
            env.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // shards)))
        processes = []
        for i in range(shards):
            share = {"GTEST_TOTAL_SHARDS": str(shards), "GTEST_SHARD_INDEX": str(i)} if shards > 1 else {}
            with open(self.path("running.%d" % i), "w") as f:
                processes.append(subprocess.Popen(
                    command, cwd=FILES, env={**env, **share}, stdin=subprocess.DEVNULL, stdout=f,
                    stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent))
        return processes

    def run(self, step, limit, until):
        """Runs a step for at most `limit` seconds, and records it. Returns what it printed."""
        began = time.monotonic()
        seconds = min(limit, until - began)
        self.record({**report.outcome(step, [], [], ""), "kind": step.get("kind"), "result": "began"})
        processes, reason, result = [], "", "failed"
        try:
            processes = self.start(step, seconds)
        except OSError as error:
            reason = "cannot be started: %s" % error
        if not wait(processes, began + seconds):
            reason = "did not end within %d s" % seconds
            if stopped:
                reason, result = "run.py was ended during it", "left out"
            elif seconds < limit:
                reason, result = "the time was up after %d s" % seconds, "left out"
            kill(processes, signal.SIGTERM)
            wait(processes, time.monotonic() + PATIENCE, len(stopped))
        kill(processes, signal.SIGKILL)  # what is left of their groups
        for process in processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                reason += "; a call of the driver keeps process %d" % process.pid
        texts = report.running(self.out)
        entry = report.outcome(step, texts, [p.returncode for p in processes], reason, result)
        entry["seconds"] = round(time.monotonic() - began)
        self.put_away(step["name"])
        self.record(entry)
        print("%-36s %s" % (step["name"], report.line_of(entry)), file=sys.stderr, flush=True)
        return "\n".join(texts)

    def put_away(self, name):
        """Appends what the present step printed to output.txt."""
        with open(self.path("output.txt"), "a") as f:
            for text in report.running(self.out):
                f.write("==== %s\n%s\n" % (name, text))
        for path in glob.glob(os.path.join(glob.escape(self.out), "running.*")):
            os.remove(path)


def run_all(run, steps, gpus, options):
    """Runs the steps that have no result yet: tests first and then, if benchmarks are wanted, those that had to wait."""
    began = time.monotonic()
    until = began + 60 * options.minutes
    doctor = {"name": "doctor", "parts": [], "command": ["annulus", "doctor"]}
    said = run.run(doctor, 60, until)
    device = re.search(r"(?m)^  device +(.*)$", said)
    no_gpu = device and not device.group(1).startswith("cuda") and "no GPU: " + device.group(1)
    if no_gpu and gpus:
        run.skip(doctor, "failed", "nvidia-smi lists %s, but annulus finds %s" % (gpus, no_gpu))
    shares = [SHARE_OF_TESTS, 1] if any("bench" in s["parts"] for s in steps) else [1]
    for share in shares:
        before = report.Results(run.out).steps
        for step in steps:
            result = before[step["name"]]["result"] if step["name"] in before else ""
            if result in FINAL or (result != "left out" and share != shares[0]):
                continue
            limit = options.limit or step["limit"] * max(1, options.minutes / MINUTES)
            end = began + 60 * options.minutes * (share if "tests" in step["parts"] else 1)
            if no_gpu and step.get("gpu"):
                run.skip(step, "skipped", no_gpu)
            elif "/" not in step["command"][0] and not shutil.which(step["command"][0], path=run.env["PATH"]):
                run.skip(step, "skipped", "this machine has no " + step["command"][0])
            elif not stopped and end - time.monotonic() >= min(LEAST, limit):
                run.run(step, limit, until)
            elif not result:  # otherwise what is known of it stands
                why = "run.py was ended before it" if stopped else "no time left of %g minutes" % options.minutes
                run.skip(step, "left out", why)


def main():
    words = sys.argv[1:]
    command = words[words.index("--") + 1:] if "--" in words else None
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PART", action="append", default=[], help="tests, bench, one of their parts, or a step")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all steps (default: 9); those without time are named")
    parser.add_argument("--limit", type=float, help="seconds for a step (default: that of steps.json, more with more --minutes)")
    parser.add_argument("--out", metavar="FOLDER", default="gpu-report", help="default: gpu-report")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(words[:words.index("--")] if "--" in words else words)
    if command == [] or options.minutes <= 0 or (options.limit or 1) <= 0:
        parser.error("expected a command after --, and positive --minutes and --limit")
    if options.report:
        print(report.text_of(options.out), end="")
        return report.Results(options.out).exit_code()
    steps = read_json("steps.json")
    known = {name for step in steps for name in [step["name"], *step["parts"]]}
    if not known >= set(options.only):
        parser.error("--only: expected one of " + ", ".join(sorted(known)))
    steps = [step for step in steps if not options.only or {step["name"], *step["parts"]} & set(options.only)]
    torch, version, fault = find_torch()
    if fault and not (os.environ.get("ANNULUS_ANY_LIBTORCH") and torch):
        print("run.py: " + fault, file=sys.stderr)
        return 9
    env = environment(torch)
    if command:
        found = shutil.which(command[0], path=env["PATH"])
        if not found:
            parser.error("no command " + command[0])
        os.execve(found, command, env)
    bundle = hashlib.sha256(report.read_text(os.path.join(BUNDLE, "MANIFEST")).encode()).hexdigest()[:16]
    out = os.path.abspath(options.out)
    try:
        os.makedirs(out, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        print("run.py: cannot write to %s: %s; name another folder with --out" % (out, error.strerror), file=sys.stderr)
        return 8
    before = report.Results(out)
    if before.bundle not in ("", bundle):
        parser.error("%s has the report of another bundle; name another folder with --out" % out)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopped.append(number))
    scratch = tempfile.mkdtemp(prefix="annulus.", dir="/tmp")  # a short path, because MPI's sockets allow no long one
    try:
        run = Run(out, env, scratch)
        if report.read_text(run.path("results.jsonl"))[-1:].strip():
            with open(run.path("results.jsonl"), "a") as f:
                f.write("\n")  # a call that was killed left half a line
        for entry in before.killed:
            run.put_away(entry["step"])
            run.record(entry)
        machine = facts(torch, version)
        run.record({"bundle": bundle, "facts": machine})
        run_all(run, steps, machine["GPUs"], options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.text_of(out), end="", flush=True)
    return 130 if stopped else report.Results(out).exit_code()


if __name__ == "__main__":
    sys.exit(main())
