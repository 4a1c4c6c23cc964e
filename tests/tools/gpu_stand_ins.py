"""A bundle for GPUs whose programs are scripts, which stand in for the tests, the program and the tools of the machine.
Tests of run.sh use it (gpu_run_test.py).

These tests are called with the path of run.sh as their first argument.
"""

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(sys.argv.pop(1)))

HANG = "exec tail -f /dev/null --pid=$PPID\n"  # until somebody ends it, or it has no parent any more

# Prints the lines of GoogleTest for the cases in $CASES, except those that --gtest_filter leaves out. The name of a case
# says how it ends. What it ran is noted in $BUNDLE/ran.
PROGRAM = r"""#!/usr/bin/env python3
import os, signal, sys
signal.alarm(600)  # so that nothing that hangs is left behind
here = os.path.dirname(os.path.abspath(sys.argv[0]))
filters = [a.split("=")[1] for a in sys.argv if a.startswith("--gtest_filter=")] or [""]
wanted, _, out = filters[-1].partition("-")
out = out.split(":")
cases = [c for c in "CASES".split() if "S." + c not in out and (not wanted or "S." + c in wanted.split(":"))]
alone = os.environ.get("CUDA_LAUNCH_BLOCKING")
if "--gtest_list_tests" in sys.argv:
    print("S.\n  " + "\n  ".join(cases))
    sys.exit()
def say(text):
    print(text, flush=True)
say("Note: Google Test filter = " + "-".join(out))
say("[==========] Running %d tests from 1 test suite." % len(cases))
failed = False
for case in cases:
    with open(os.path.join(here, "..", "alone" if alone else "ran"), "a") as f:
        f.write(case + "\n")
    say("[ RUN      ] S." + case)
    if case.startswith("hangs") or case.startswith("once") and not os.path.exists(os.path.join(here, "..", "hanging")):
        open(os.path.join(here, "..", "hanging"), "w").close()
        signal.pause()
    elif case.startswith("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.path.join(here, "..", "hanging"), "w").close()
        signal.pause()
    elif case.startswith("crashes"):
        os.kill(os.getpid(), signal.SIGSEGV)
    elif case.startswith("exits"):
        os._exit(0)
    elif case.startswith("fails") or case.startswith("loses"):
        failed = True
        say("a.cc:3: Failure\n" + ("CUDA error: an illegal memory access was encountered" if case.startswith("loses") else "wrong in " + case))
        say("[  FAILED  ] S.%s, where GetParam() = 3 (1 ms)" % case)
        if case.startswith("loses") and not alone:
            signal.pause()
    elif case.startswith("skips"):
        say("a.cc:3: Skipped\nno second GPU\n")
        say("[  SKIPPED ] S.%s (0 ms)" % case)
    else:
        say("operators: cudnn 2, flash2 1")
        sys.stdout.write("no newline")
        say("[       OK ] S.%s (2 ms)" % case)
if "stuck_before_its_end" in cases:
    signal.pause()
say("[==========] %d tests from 1 test suite ran. (1 ms total)" % len(cases))
if "stuck_at_its_end" in cases:
    signal.pause()
sys.exit(failed)
"""

FIGURE = {"bench": "gpu", "part": "dense", "device": "NVIDIA H200", "versions": "CUDA 13.0",
          "figures": [{"name": "dense forward 8192", "unit": "TFLOP/s", "value": 600, "median": 590, "operators": "cudnn"}],
          "ratios": [{"name": "gpu/dense forward 8192", "ratio": 1.01, "goal": 1.031}]}


class StandInTest(unittest.TestCase):
    """A test with a bundle of stand-ins in a folder of its own, and what calls its run.sh."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="gpu run ")
        self.addCleanup(self.folder.cleanup)
        self.bundle, self.out = self.path("bundle"), self.path("report")
        os.makedirs(self.path("bundle", "bin"))
        os.makedirs(self.path("bundle", "tests"))
        for script in glob.glob(os.path.join(SCRIPTS, "*.sh")) + glob.glob(os.path.join(SCRIPTS, "*.py")):
            shutil.copy(script, self.bundle)
        self.made_of("1")
        self.write("torch/lib/libtorch_cpu.so", "")
        self.write("torch/lib/libtorch_cuda.so", "")
        self.write("torch/version.py", "__version__ = '2.11.0'\n")
        self.write("dev/nvidiactl", "")
        self.write("dev/nvidia0", "")
        self.write("bundle/configs/llama-1b.toml", "")
        self.annulus("")
        self.processes = "1"
        self.programs()

    def path(self, *names):
        return os.path.join(self.folder.name, *names)

    def write(self, name, text, mode=0o644):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as f:
            f.write(text)
        os.chmod(self.path(name), mode)

    def details(self, name):
        """The text of a file in details.tar.gz."""
        with tarfile.open(os.path.join(self.out, "details.tar.gz")) as tar:
            return tar.extractfile("./" + name).read().decode()

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def made_of(self, digest):
        names = ("COMMIT", "ANNULUS", "CUDA", "NCCL", "MPI", "COMPILER")
        self.write("bundle/bundle.env", "BUILT_LIBTORCH=2.11.0\nBUILT_DIGEST=%s\n" % digest + "".join("BUILT_%s=x\n" % n for n in names))

    def annulus(self, text):
        """The program: notes how it is called and does what `text` says, a script in which $part is the part of bench."""
        self.write("bundle/bin/annulus", '#!/bin/bash\necho "$*" >>"%s"\npart=$4\n[[ $1 == bench ]] || exit 0\n%s\n' % (
            self.path("bundle", "calls"), text), 0o755)

    def programs(self, **cases):
        """The tests of the bundle: name=cases of the part "others", operators=cases and merges=cases of their own."""
        rows = []
        for name, of_it in cases.items():
            self.write("bundle/tests/" + name, PROGRAM.replace("CASES", of_it), 0o755)
            part = name if name in ("operators", "merges") else "others"
            rows.append("\t".join([name, part, "gtest", name, self.processes, "0", "300", "-", "-", "-"]) + "\n")
        self.write("bundle/tests.tsv", "".join(rows))

    def ranks(self, name, text, limit=60):
        """Adds a test of two ranks to the bundle, and an mpirun that starts it once."""
        self.write("bundle/mpi/bin/mpirun", '#!/bin/bash\nwhile [[ $1 != */tests/* ]]; do shift; done\nexec "$@"\n', 0o755)
        self.write("bundle/tests/" + name, "#!/bin/bash\n" + text, 0o755)
        with open(self.path("bundle", "tests.tsv"), "a") as f:
            f.write("\t".join([name, "others", "mpi", name, "2", "0", str(limit), "-", "-", "-"]) + "\n")

    def nvidia_smi(self):
        """A call with -q waits until the one that goes on has given its readings."""
        os.mkfifo(self.path("read"))
        self.write("tools/nvidia-smi", """#!/bin/bash
[[ $1 == -L ]] && touch "%s"
[[ $1 == -q ]] && echo "attached GPUs: 1" && cat "%s"
[[ "$*" == *-lms* ]] || exit 0
for _ in {1..3}; do echo "0, 1980, 3201, 60, 690"; done
: >"%s"
%s""" % (self.path("dev", "nvidia0"), self.path("read"), self.path("read"), HANG), 0o755)

    def start(self, *args):
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        env["PATH"] = self.path("tools") + ":" + env["PATH"]
        env.update(LIBTORCH=self.path("torch"), ANNULUS_BUNDLE_DEVICES=self.path("dev"))
        started = subprocess.Popen([os.path.join(self.bundle, "run.sh"), "--out", self.out, *args], env=env, cwd=self.folder.name,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   start_new_session=True)
        self.addCleanup(self.kill, started)
        return started

    def run_sh(self, *args):
        started = self.start(*args)
        out, err = started.communicate(timeout=120)
        return started.returncode, self.report(), out, err

    def report(self):
        with open(os.path.join(self.out, "report.json")) as f:
            return json.load(f)

    def results(self, report, result):
        return {r["name"]: r["reason"] for r in report["results"] if r["result"] == result}

    def kill_when(self, started, there):
        """Kills run.sh, without warning, as soon as there() is true."""
        self.wait_until(there, started)
        self.kill(started)

    def wait_until(self, there, started):
        until = time.monotonic() + 60
        while not there():
            self.assertTrue(started.poll() is None and time.monotonic() < until, "run.sh has ended, or does not come to it")
            time.sleep(0.02)

    def kill(self, started):
        """Kills what is left of run.sh and all that it has started."""
        if started.poll() is not None:
            return
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        for pid in filter(str.isdigit, os.listdir("/proc")):  # `timeout` makes a group of its own for a step
            try:
                with open("/proc/%s/environ" % pid, errors="replace") as f:
                    variables = f.read().split("\0")
                if "LIBTORCH=" + self.path("torch") in variables:
                    os.killpg(os.getpgid(int(pid)), signal.SIGKILL)
                    for scratch in (v for v in variables if v.startswith("TMPDIR=/tmp/annulus.")):
                        shutil.rmtree(scratch.partition("=")[2], ignore_errors=True)
            except OSError:
                pass

    def hanging(self):
        return os.path.exists(self.path("bundle", "hanging"))

    def case_hanging(self):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.out, "running.out")) as f:
            return "[ RUN      ] S.hangs\n" in f.read()
        return False

    def few_files(self):
        found = sorted(os.path.relpath(p, self.out) for p in glob.glob(self.out + "/**", recursive=True) if not os.path.isdir(p))
        self.assertLessEqual(len(found), 8, found)
        return found

    def limits(self, first=""):
        """Notes in limits.txt how long each program of a step may take, and how it is called. Ends the first one named so
        as soon as a case of it hangs, as if its time were up."""
        os.mkfifo(self.path("never"))
        self.write("tools/timeout", """#!/bin/bash
program=${@: -1} folder="%s"
if [[ $1 == --kill-after=15 ]]; then
  echo "${program##*/} $2 $*" >>"$folder/limits.txt"
  if [[ ${program##*/} == "%s" && ! -e $folder/ended ]]; then
    "${@:3}" & touch "$folder/ended"
    until [[ -e $folder/bundle/hanging ]]; do ((SECONDS < 60)) || exit 125; read -rt 0.02 <>"$folder/never"; done
    kill $! && wait $!
    exit 124
  fi
fi
exec %s "$@"
""" % (self.folder.name, first, shutil.which("timeout")), 0o755)

    def limit_of(self, program):
        return [int(line.split()[1]) for line in self.read("limits.txt").splitlines() if line.split()[0] == program]
