#!/usr/bin/env python3
"""Tests run.sh of a bundle for GPUs over a bundle of scripts in place of the programs: what is on disk when a call is
killed, how the next call goes on, and what the report says. tools/gpu_bundle/bundle_test.py tests real bundles."""

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(sys.argv.pop(1)))
sys.path.insert(0, SCRIPTS)
import collect  # noqa: E402

HANG = "exec tail -f /dev/null --pid=$PPID\n"  # until somebody ends it, or it has no parent any more
# What Bazel says of a test, in the words of `bazel query --output=xml`.
RULE = '<rule class="%s" name="%s"><string name="size" value="large"/><list name="srcs"><label value="//a:b.py"/></list></rule>'

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
    print("S.\\n  " + "\\n  ".join(cases))
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


class GpuRunTest(unittest.TestCase):
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
        self.tests()

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

    def tests(self, **programs):
        """The tests of the bundle: name=cases of the part "others", operators=cases and merges=cases of their own."""
        rows = []
        for name, cases in programs.items():
            self.write("bundle/tests/" + name, PROGRAM.replace("CASES", cases), 0o755)
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
        self.write("tools/nvidia-smi", """#!/bin/bash
[[ $1 == -L ]] && touch "%s"
[[ $1 == -q ]] && echo "attached GPUs: 1"
[[ "$*" == *-lms* ]] || exit 0
for _ in {1..3}; do echo "0, 1980, 3201, 60, 690"; done
%s""" % (self.path("dev", "nvidia0"), HANG), 0o755)

    def start(self, *args):
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        env["PATH"] = self.path("tools") + ":" + env["PATH"]
        env.update(LIBTORCH=self.path("torch"), ANNULUS_BUNDLE_DEVICES=self.path("dev"))
        return subprocess.Popen([os.path.join(self.bundle, "run.sh"), "--out", self.out, *args], env=env, cwd=self.folder.name,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                start_new_session=True)

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
        """Kills run.sh and all that it has started, without warning, as soon as there() is true."""
        until = time.monotonic() + 60
        while not there():
            self.assertTrue(started.poll() is None and time.monotonic() < until, "run.sh has ended, or does not come to it")
            time.sleep(0.02)
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        for pid in filter(str.isdigit, os.listdir("/proc")):  # `timeout` makes a group of its own for a step
            try:
                with open("/proc/%s/environ" % pid, errors="replace") as f:
                    variables = f.read().split("\0")
                if "LIBTORCH=" + self.path("torch") in variables:
                    os.kill(int(pid), signal.SIGKILL)
                    for scratch in (v for v in variables if v.startswith("TMPDIR=/tmp/annulus.")):
                        shutil.rmtree(scratch.partition("=")[2], ignore_errors=True)
            except OSError:
                pass

    def hanging(self):
        return os.path.exists(self.path("bundle", "hanging"))

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

    # ---- Tests.

    def test_a_case_that_hangs_or_crashes_costs_no_other_case_its_result(self):
        self.tests(t="a hangs b crashes exits loses c fails skips d")
        self.write("tools/cuda-gdb", '#!/bin/bash\necho "#0 f () of $*"\n', 0o755)
        code, report, out, _ = self.run_sh("--only", "others", "--limit", "4")
        self.assertEqual(code, 1)
        self.assertEqual(set(self.results(report, "passed")), {"t S." + c for c in "abcd"}, out)
        failed = self.results(report, "failed")
        self.assertEqual(failed["t S.hangs"], "did not end within 4 s")
        alone = "alone, with CUDA_LAUNCH_BLOCKING=1: "
        self.assertEqual(failed["t S.crashes"].splitlines(), ["segmentation fault", alone + "segmentation fault"])
        self.assertEqual(failed["t S.exits"].splitlines(), ["exit code 0", alone + "exit code 0"])
        self.assertTrue(failed["t S.fails"].endswith("wrong in fails\n" + alone + "failed"), failed["t S.fails"])
        self.assertEqual(self.read("bundle/alone").split(), "crashes exits loses fails".split())  # not what hangs
        self.assertIn("wrong", failed["t S.fails"])
        self.assertEqual(set(failed), {"t S." + c for c in ("hangs", "crashes", "exits", "loses", "fails")})
        self.assertEqual(self.results(report, "skipped"), {"t S.skips": "no second GPU"})
        errors = self.details("logs/t.1.err")
        self.assertRegex(errors, r"stuck: process \d+: .*tests/t\b")
        self.assertRegex(errors, r"stuck: thread \d+ \S+: waits in .*; system call ")
        self.assertRegex(errors, r"stuck: #0 f \(\) of -p \d+ -batch -ex thread apply all bt")
        self.assertIn("alone: wrong in fails", errors)
        self.assertEqual(self.read("bundle/ran").split(), "a hangs b crashes exits loses c fails skips d".split())
        self.assertEqual(report["operators"], {"cudnn": 8, "flash2": 4})

    def test_what_may_explain_a_failure_is_in_the_details(self):
        self.tests(t="fails")
        self.ranks("ranks", """
echo "$NCCL_DEBUG" >>"${NCCL_DEBUG_FILE//%?/x}" && echo "host:1 NCCL WARN the cause" >>"${NCCL_DEBUG_FILE//%?/x}"
""" + HANG)
        self.nvidia_smi()
        self.write("tools/dmesg", '#!/bin/bash\necho x >>"%s"\ncat -n "%s" | sed "s/x/NVRM: Xid/"\necho another\n' % (
            (self.path("messages"),) * 2), 0o755)
        _, report, out, _ = self.run_sh("--only", "others", "--limit", "10")
        self.assertRegex(self.details("machine/system.txt"), r"(?s)== df -h /dev/shm /tmp\n.*== free\n.*Mem:.*open files.*== env ")
        self.assertIn("attached GPUs", self.details("machine/nvidia-smi.txt"))
        self.assertIn("not a dynamic executable", self.details("machine/ldd.annulus.txt"))
        kernel = [re.sub(r"\s+", " ", line) for line in self.details("machine/dmesg.txt").splitlines()]
        self.assertRegex(kernel[0], "== at the start of the call of 20")
        self.assertEqual(kernel[1:], [" 1 NVRM: Xid", "== after t", " 2 NVRM: Xid", "== after ranks", " 3 NVRM: Xid",
                                      "== at the end", " 4 NVRM: Xid"])
        self.assertEqual(self.details("logs/ranks.1.out"), "")
        self.assertIn("INFO\nhost:1 NCCL WARN the cause\n", self.details("logs/ranks.1.nccl"))
        self.assertRegex(self.details("logs/ranks.1.err"), r"stuck: process \d+: tail .*\nstuck: thread ")
        self.assertEqual(self.results(report, "failed")["ranks"], "did not end within 10 s\nNCCL WARN the cause", out)

    def test_ranks_start_again_without_the_cases_that_failed(self):
        self.ranks("ranks", r"""
out=${!#} wanted=
for c in S.a/1 S.fails/1 S.b S.crashes S.c; do [[ :${out#*=-}: == *:$c:* ]] || wanted+=" $c"; done
echo "[==========] Running 5 tests from 1 test suite."
for c in $wanted; do
  echo "[ RUN      ] $c" && echo "[ RUN      ] $c" && echo $c >>"%s"
  [[ $c == *crashes* ]] && kill -SEGV $$
  [[ $c == *fails* ]] && echo "a.cc:3: Failure" && echo "wrong" && echo "[  FAILED  ] $c on this rank, which ends the others" && exit 1
  echo "[       OK ] $c (3 ms)" && echo "[       OK ] $c (4 ms)"
done
[[ -e "%s" ]] && echo "[==========] 3 tests from 1 test suite ran. (3 ms total)"
""" % (self.path("ran"), self.path("whole")), limit=100)
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(self.read("ran").split(), "S.a/1 S.fails/1 S.a/1 S.b S.crashes S.a/1 S.b S.c".split(), out)
        failed = {"ranks S.fails/1": "a.cc:3: Failure\nwrong", "ranks S.crashes": "exit code 1"}
        self.assertEqual(self.results(report, "failed"), {**failed, "ranks": "exit code 1; not all of its other cases could be run"})
        # The same if the last run is whole.
        self.write("whole", "")
        self.out = self.path("again")
        _, report, _, _ = self.run_sh("--only", "others")
        self.assertEqual(self.results(report, "failed"), failed)

    def test_tests_of_kernels_run_under_compute_sanitizer_if_it_is_there(self):
        def run():
            self.tests(t="a")
            with open(self.path("bundle", "tests.tsv"), "a") as f:
                f.write("t.memcheck\tmemcheck\tmemcheck\tt\t1\t0\t300\t-\t-\t'--gtest_filter=*Merge*'\n")
            return self.run_sh("--only", "tests")[1]
        self.assertEqual(self.results(run(), "skipped"), {"t.memcheck": "there is no compute-sanitizer"})
        said = ["========= COMPUTE-SANITIZER", "[       OK ] S.a (0 ms)", "========= Invalid __global__ write of size 4 bytes", "=========     at f(int)",
                *["=========         Host Frame: g"] * 20, "========= ERROR SUMMARY: 1 error"]
        self.write("tools/compute-sanitizer", '#!/bin/bash\necho "$*" >"%s"\ncat <<"E"\n%s\nE\nexit 99\n' % (
            self.path("called"), "\n".join(said)), 0o755)
        self.out = self.path("again")
        self.run_sh("--only", "memcheck")
        report = run()  # S.a was run under compute-sanitizer only
        self.assertIn("t S.a", self.results(report, "passed"))
        self.assertEqual(self.results(report, "failed"), {"t.memcheck": "\n".join(["exit code 99", said[2], said[3], said[-1]])})
        self.assertEqual(self.read("called").strip(), "--tool memcheck --error-exitcode 99 %s --gtest_filter=*Merge*" % (
            self.path("bundle", "tests", "t")))

    def test_a_program_that_stops_again_and_again_is_given_up_and_the_next_one_runs(self):
        self.tests(t="a crashes1 crashes2 crashes3 crashes4 b", u="c")
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "u S.c"}, out)
        self.assertIn("not all of its cases could be run", self.results(report, "failed")["t"])
        # The next call runs the rest.
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "t S.b", "u S.c"}, out)
        self.assertEqual(set(self.results(report, "failed")), {"t S.crashes%d" % n for n in (1, 2, 3, 4)})
        self.assertEqual(self.read("bundle/ran").split().count("c"), 1)

    def test_a_case_that_ignores_the_request_to_end_is_ended(self):
        self.tests(t="a deaf b")
        _, report, out, _ = self.run_sh("--only", "others", "--limit", "3")
        self.assertEqual(self.results(report, "failed"), {"t S.deaf": "did not end within 3 s"}, out)
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "t S.b"})

    def test_a_process_that_hangs_after_its_last_case_is_ended_soon(self):
        self.tests(t="a stuck_at_its_end", u="b stuck_before_its_end")
        script = self.read("bundle/cases.py")
        self.write("bundle/cases.py", script.replace("END = 15 ", "END = 3 "))
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "t S.stuck_at_its_end", "u S.b", "u S.stuck_before_its_end"}, out)
        failed = self.results(report, "failed")
        self.assertEqual(set(failed), {"t", "u"})
        for reason in failed.values():
            self.assertIn("after its last case: did not end within 3 s", reason)

    def test_a_killed_call_leaves_what_passed_and_the_next_one_goes_on(self):
        self.tests(before="x", t="a b hangs c d", after="y")
        self.kill_when(self.start("--only", "others"), self.hanging)
        self.few_files()
        # The report of what the killed call left, made by hand, for example on another machine.
        subprocess.run([sys.executable, os.path.join(self.bundle, "report.py"), self.out], stdout=subprocess.DEVNULL)
        report = self.report()
        self.assertEqual(set(self.results(report, "passed")), {"before S.x", "t S.a", "t S.b"})
        self.assertEqual(self.results(report, "failed"), {})
        self.assertIn("3 of its cases are left from S.hangs on", self.results(report, "left out")["t"])
        # Now the case ends, and the folder has been copied, as by somebody who collects it.
        shutil.copytree(self.out, self.path("copied"))
        self.out = self.path("copied")
        self.write("bundle/tests/t", self.read("bundle/tests/t").replace("a b hangs c d", "a b hangs_no_more c d")
                   .replace('"hangs"', '"hangs!"'), 0o755)
        code, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(code, 0, out)
        self.assertEqual(set(self.results(report, "passed")),
                         {"before S.x", "t S.a", "t S.b", "t S.hangs_no_more", "t S.c", "t S.d", "after S.y"})
        self.assertEqual((report["failed"], report["left_out"], len(report["calls"])), (0, 0, 2))
        self.assertEqual(self.read("bundle/ran").split(), "x a b hangs hangs_no_more c d y".split())
        self.assertEqual(self.few_files(), ["details.tar.gz", "journal.tsv", "report.json", "report.txt"])

    def test_a_test_whose_time_is_up_is_left_out_and_the_next_call_runs_the_rest(self):
        self.tests(t="a hangs b")
        started = self.start("--only", "others", "--minutes", "1", "--limit", "300")
        self.kill_when(started, self.hanging)
        with open(os.path.join(self.out, "journal.tsv"), "a") as f:
            f.write("step\tt\t1\tothers\tgtest\tleft out\t60\tthe time was up after 60 s\nstep\thalf a li")
        subprocess.run([sys.executable, os.path.join(self.bundle, "report.py"), self.out], stdout=subprocess.DEVNULL)
        self.assertEqual(self.results(self.report(), "left out")["t"], "the time was up after 60 s; 2 of its cases are left from S.hangs on")

    def test_libraries_are_read_in_the_background_from_the_start(self):
        self.annulus('touch "%s"\n' % self.path("bundle", "hanging") + HANG)
        pipes = [self.path("torch/lib/x.so.1"), self.path("nvidia/cudnn/lib/y.so.9")]
        os.makedirs(self.path("nvidia/cudnn/lib"))
        for pipe in pipes:
            os.mkfifo(pipe)
        started = self.start("--only", "dense")
        for pipe in pipes:
            subprocess.run(["timeout", "20", "sh", "-c", ': >"$0"', pipe], check=True)  # waits until somebody reads it
        self.kill_when(started, self.hanging)

    def test_each_figure_is_on_disk_as_soon_as_it_is_known(self):
        self.annulus("echo '%s'\ntouch '%s'\n%s" % (json.dumps(FIGURE), self.path("bundle", "hanging"), HANG))
        self.kill_when(self.start("--only", "dense"), self.hanging)
        self.few_files()
        subprocess.run([sys.executable, os.path.join(self.bundle, "report.py"), self.out], stdout=subprocess.DEVNULL)
        report = self.report()
        self.assertEqual([f["value"] for f in report["figures"]], [600])
        self.assertEqual(report["goals_met"], 1)
        self.assertIn("run.sh was killed during it", self.results(report, "left out")["bench-dense"])
        # A later figure of the same name replaces it.
        self.annulus("echo '%s'" % json.dumps(FIGURE).replace("600", "610"))
        _, report, out, err = self.run_sh("--only", "dense")
        self.assertEqual([f["value"] for f in report["figures"]], [610], out)
        self.assertIn("bench-dense", self.results(report, "passed"))
        self.assertRegex(err, r"gpu/dense forward 8192 +1\.010 .* 1\.031 met")  # said at once
        self.assertIn("1.010 (1.010 to 1.010), met; 610 TFLOP/s by cudnn |", out)

    def test_files_are_few_and_the_details_whole_at_every_moment(self):
        self.tests(operators="a", merges="b", t="c hangs", u="d")
        self.annulus("echo '%s'" % json.dumps(FIGURE))
        self.nvidia_smi()
        started = self.start("--limit", "3")
        while started.poll() is None:
            self.few_files()
            if os.path.exists(os.path.join(self.out, "details.tar.gz")):
                with tarfile.open(os.path.join(self.out, "details.tar.gz")) as tar:
                    tar.getnames()
        started.communicate()
        self.assertEqual(self.report()["clocks"]["0"]["sm_mhz_least"], 1980)
        # Another call adds to the readings.
        self.run_sh("--only", "quickstart")
        self.assertEqual(set(self.report()["clocks"]), {"0", "0, call 2"})

    def test_what_tells_most_comes_first_and_each_part_runs_alone(self):
        self.tests(operators="a", merges="b", t="c")
        self.annulus("")
        _, report, out, _ = self.run_sh()
        names = [r["name"] for r in report["results"]]
        order = ["attend-check", "operators S.a", "merges S.b", "bench-dense", "bench-ring", "bench-train", "bench-patterns",
                 "flex-attention", "bench-longest", "t S.c"]
        self.assertEqual([n for n in names if n in order], order, out)
        for part, name in (("operators", "operators S.a"), ("merges", "merges S.b"), ("ring", "bench-ring"),
                           ("longest", "bench-longest"), ("others", "t S.c"), ("quickstart", "train-quickstart")):
            with self.subTest(part):
                self.out = self.path("only " + part)
                _, report, out, _ = self.run_sh("--only", part)
                of = {r["part"] for r in report["results"]}
                self.assertEqual(of, {part}, out)
                self.assertIn(name, [r["name"] for r in report["results"]])

    def test_the_bundle_lists_tests_in_the_order_in_which_they_run(self):
        listed = list(dict.fromkeys(part.label for part in collect.PARTS))
        others = [("_mpi_run_test", "//a:ranks"), ("cc_test", "//b:new"), *(("cc_test", label) for label in sorted(listed))]
        self.write("tests.xml", '<?xml version="1.1"?><query>%s</query>' % "".join(RULE % rule for rule in others))
        tests = collect.read_tests(self.path("tests.xml"))
        self.assertEqual([t.label for t in tests], listed + ["//b:new", "//a:ranks"])
        self.assertEqual([t.label.split(":")[1] for t in tests][1:6], ["gpu_ops_on_gpu_test", "gpu_training_test", "gpu_job_test",
                                                                      "nccl_device_test", "nccl_test"])
        parts = [part for t in tests for part in t.parts()]
        self.assertEqual([(name, processes) for name, _, _, processes, _, _ in parts][0],
                         ("tests.attention.kernels.gpu_kernel_test.operators", 4))
        limits = {name: limit for name, _, _, _, limit, _ in parts}
        self.assertEqual((limits["tests.comm.nccl_test"], limits["tests.training.gpu_training_test"]), (60, 900))

    def test_the_operators_leave_time_for_the_other_tests_and_go_on_after_them(self):
        self.tests(operators="a once b", merges="m", t="c")
        self.limits(first="operators")
        _, report, out, _ = self.run_sh("--only", "tests", "--limit", "400")
        self.assertEqual(self.read("bundle/ran").split(), ["a", "once", "m", "c", "once", "b"], out)
        passed = {"operators S.a", "operators S.once", "operators S.b", "merges S.m", "t S.c"}
        self.assertLessEqual(passed, set(self.results(report, "passed")))
        self.assertEqual((report["failed"], report["left_out"]), (0, 0))

    def test_a_gpu_whose_file_the_driver_makes_when_it_is_used_is_found(self):
        os.remove(self.path("dev", "nvidia0"))
        self.nvidia_smi()
        _, report, out, _ = self.run_sh("--only", "quickstart")
        self.assertIn("train-quickstart", self.results(report, "passed"), out)

    def test_a_short_call_shortens_no_step(self):
        self.processes = "4"
        self.tests(operators="a", t="b")
        self.ranks("ranks", "exit 0", limit=130)
        self.limits()
        self.run_sh("--only", "tests", "--minutes", "6")
        self.assertEqual(self.limit_of("ranks"), [130])
        self.assertRegex(self.read("limits.txt"), r"(?m)^operators .* --processes 4 ")
        self.assertTrue(150 < self.limit_of("operators")[0] <= 180 < self.limit_of("t")[0], self.read("limits.txt"))

    def test_calls_go_on_part_by_part_and_another_bundle_begins_anew(self):
        self.tests(operators="a", merges="b", t="fails")
        self.annulus("echo '%s'" % json.dumps(FIGURE))
        self.run_sh("--only", "tests")
        with open(os.path.join(self.out, "journal.tsv"), "a") as f:
            f.write("step\thalf")  # as a kill may leave it
        code, report, out, _ = self.run_sh("--only", "dense", "--only", "tests")
        self.assertEqual((code, len(report["calls"])), (1, 2))
        self.assertEqual(set(self.results(report, "failed")), {"t S.fails"})
        self.assertTrue({"operators S.a", "merges S.b", "bench-dense"} <= set(self.results(report, "passed")), out)
        self.assertEqual(self.read("bundle/ran").split(), ["a", "b", "fails"])  # none of them again
        self.made_of("2")
        _, report, _, _ = self.run_sh("--only", "dense")
        self.assertEqual({r["part"] for r in report["results"]}, {"dense"})

    def test_the_summary_is_short_and_ends_with_what_matters(self):
        self.tests(t=" ".join("%s%d_%s" % (how, n, "x" * 60) for how in ("skips", "fails") for n in range(400)))
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(report["failed"], 400)
        self.assertLess(len(out), 9000)
        self.assertEqual(out.splitlines()[-1], "0 passed, 400 failed, 400 skipped")
        self.assertIn("wrong in fails3_", out)
        self.assertIn("| the tests for GPUs | `run.sh --only tests` | all pass | 0 passed, 400 failed, 400 skipped |", out)
        self.assertIn("more lines in report.txt", out)


if __name__ == "__main__":
    unittest.main()
