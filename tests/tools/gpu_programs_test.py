#!/usr/bin/env python3
"""Tests which tests a bundle for GPUs has, and what runs their programs and reads what they say, over scripts in place of the
programs; gpu_run_test.py tests run.sh as a whole."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(sys.argv.pop(1)))
sys.path.insert(0, SCRIPTS)
import cases  # noqa: E402
import collect  # noqa: E402

GPU_JOB_TEST = os.path.abspath(sys.argv.pop(1))

# What Bazel says of a test, in the words of `bazel query --output=xml`.
RULE = '<rule class="%s" name="%s"><string name="size" value="large"/><list name="srcs"><label value="//a:b.py"/></list></rule>'

# Does what gpu_job_test.py expects of annulus. The first `attend` waits for a second one to begin. That of float16 with
# a window fails. The losses of `train` have an error that depends on the dtype, on GPUs $ERRORS_OF_GPUS times that of a CPU.
ANNULUS = r"""#!/usr/bin/env python3
import glob, os, sys, time
here = os.path.dirname(os.path.abspath(sys.argv[0]))
if sys.argv[1] == "doctor":
    print("  device     cuda, 1 GPU")
elif sys.argv[1] == "train":
    settings = dict(s.split("=") for s in sys.argv[1:] if s.startswith(("device=", "model.dtype=")))
    error = {"fp64": 0, "fp32": 1e-6, "bf16": 1e-3}[settings["model.dtype"]]
    if settings["device"] == "cuda":
        error *= float(os.environ["ERRORS_OF_GPUS"])
    run = "run-%d" % os.getpid()
    os.mkdir(run)
    with open(run + "/metrics.jsonl", "w") as f:
        f.write("".join('{"loss": %.9f}\n' % (1 / (i + 1) + error * (-1) ** i) for i in range(20)))
    print("device %s, run folder %s" % (settings["device"], run))
else:
    open(os.path.join(here, "attends.%d" % os.getpid()), "w").close()
    until = time.monotonic() + 20
    while len(glob.glob(os.path.join(here, "attends.*"))) < 2:
        if time.monotonic() > until:
            sys.exit("no other command has begun")
        time.sleep(0.01)
    if "f16" in sys.argv[5] and "bf16" not in sys.argv[5] and "window" in sys.argv[7]:
        sys.exit("wrong")
    print("attend: 1 rank on GPUs, \ncheck: out ")
"""

# A GoogleTest program with the cases A.c0 to A.c11 and P/B.x/0 to P/B.x/3, in lines as GoogleTest prints them. The first
# two cases wait for one another. Each process notes its cases in $HERE/PID.
PROGRAM = r"""#!/usr/bin/env python3
import os, signal, sys, time
signal.alarm(600)  # so that nothing that hangs is left behind
here = os.path.dirname(os.path.abspath(sys.argv[0]))
cases = ["A.c%d" % n for n in range(12)] + ["P/B.x/%d" % n for n in range(4)]
filters = [a.split("=")[1] for a in sys.argv if a.startswith("--gtest_filter=")] or [""]
wanted, _, out = filters[-1].partition("-")
cases = [c for c in cases if c not in out.split(":") and (not wanted or c in wanted.split(":"))]
if "--gtest_list_tests" in sys.argv:
    print("a line\nA.\n" + "".join("  %s\n" % c[2:] for c in cases if c[0] == "A"), end="")
    print("P/B.  # TypeParam = int\n" + "".join("  %s  # GetParam() = 4-byte\n" % c[4:] for c in cases if c[0] == "P"), end="")
    print("  DISABLED_y")
    sys.exit()
def say(text):
    print(text, flush=True)
alone = "CUDA_LAUNCH_BLOCKING" in os.environ
say("Note: Google Test filter = x\n[==========] Running %d tests from 2 test suites.\n[----------] 12 tests from A" % len(cases))
failed = []
for case in cases:
    if not alone:
        with open(os.path.join(here, "ran.%d" % os.getpid()), "a") as f:
            f.write(case + "\n")
    say("[ RUN      ] " + case)
    until = time.monotonic() + 20
    while case in ("A.c0", "A.c1") and len([n for n in os.listdir(here) if n.startswith("ran.")]) < 2:
        if time.monotonic() > until:
            sys.exit("no other process has begun")
        time.sleep(0.01)
    how = os.environ.get(case.replace("/", "_").replace(".", "_"), "")
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hold":
        open(os.path.join(here, "holds"), "w").close()
        until = time.monotonic() + 60
        while not os.path.exists(os.path.join(here, "go")) and time.monotonic() < until:
            time.sleep(0.01)
    while how == "talk":
        os.write(1, b"I talk\n" * 9000)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how in ("hang", "deaf"):
        open(os.path.join(here, "hangs"), "w").close()
        signal.pause()
    if how == "fail":
        failed.append(case)
        say("a.cc:3: Failure\nwrong in %s\n[  FAILED  ] %s (1 ms)" % (case, case))
    else:
        say("of %s\n[       OK ] %s (1 ms)" % (case, case))
say("[==========] %d tests from 2 test suites ran. (3 ms total)\n[  PASSED  ] %d tests." % (len(cases), len(cases) - len(failed)))
for case in failed:
    say("[  FAILED  ] " + case)
open(os.path.join(here, "ends"), "w").close()
sys.exit(bool(failed))
"""


class GpuProgramsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="gpu programs ")
        self.addCleanup(self.folder.cleanup)

    def path(self, *names):
        return os.path.join(self.folder.name, *names)

    def program(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)
        os.chmod(self.path(name), 0o755)
        return self.path(name)

    def test_the_bundle_lists_tests_in_the_order_in_which_they_run(self):
        listed = list(dict.fromkeys(part.label for part in collect.PARTS))
        others = [("_mpi_run_test", "//a:ranks"), ("cc_test", "//b:new"), *(("cc_test", label) for label in sorted(listed))]
        self.program("tests.xml", '<?xml version="1.1"?><query>%s</query>' % "".join(RULE % rule for rule in others))
        tests = collect.read_tests(self.path("tests.xml"))
        self.assertEqual([t.label for t in tests], listed + ["//b:new", "//a:ranks"])
        self.assertEqual([t.label.split(":")[1] for t in tests][1:6], ["gpu_ops_on_gpu_test", "gpu_training_test", "gpu_job_test",
                                                                      "nccl_device_test", "nccl_test"])
        parts = [part for t in tests for part in t.parts()]
        self.assertEqual([(name, processes) for name, _, _, processes, _, _ in parts][0],
                         ("tests.attention.kernels.gpu_kernel_test.operators", 4))
        limits = {name: limit for name, _, _, _, limit, _ in parts}
        self.assertEqual((limits["tests.comm.nccl_test"], limits["tests.training.gpu_training_test"]), (60, 900))

    def test_the_bundle_has_the_files_of_groups_that_a_test_names(self):
        group = '<rule class="filegroup" name="%s"><list name="srcs">%s</list></rule>'
        labels = lambda *names: "".join('<label value="%s"/>' % name for name in names)
        test = RULE.replace("</rule>", '<list name="data">%s</list></rule>' % labels("//a:all", "//c:d.toml"))
        listed = [part.label for part in collect.PARTS]
        self.program("tests.xml", '<?xml version="1.1"?><query>%s</query>' % "".join(
            [test % ("sh_test", "//a:script"), group % ("//a:all", labels("//a:f.py", "//b:more")),
             group % ("//b:more", labels("//b:g.py"))] + [RULE % ("cc_test", label) for label in dict.fromkeys(listed)]))
        script = next(t for t in collect.read_tests(self.path("tests.xml")) if t.label == "//a:script")
        self.assertEqual(script.files, ["a/f.py", "b/g.py", "c/d.toml"])

    def gpu_job(self, errors_of_gpus):
        """Returns the cases of gpu_job_test.py that fail, the one of float16 with a window first, and its output."""
        done = subprocess.run([sys.executable, GPU_JOB_TEST, self.program("annulus", ANNULUS)], capture_output=True, text=True,
                              env=dict(os.environ, ERRORS_OF_GPUS=str(errors_of_gpus)))
        failed = [line for line in done.stderr.splitlines() if line.startswith(("FAIL:", "ERROR:"))]
        self.assertRegex(failed[0], r"^FAIL: test_attend_equals_the_oracle .*ranks=1, dtype='f16', pattern=.* kind = 'window'")
        self.assertIn("Ran 2 tests", done.stderr)
        return failed, done.stderr

    def test_commands_that_depend_on_nothing_run_at_the_same_time(self):
        failed, said = self.gpu_job(errors_of_gpus=4)
        self.assertEqual(len(failed), 1, said)

    def test_losses_of_gpus_are_held_to_those_of_the_cpu(self):
        failed, said = self.gpu_job(errors_of_gpus=20)
        self.assertEqual([line.split(" ", 2)[1] for line in failed[1:]],
                         2 * ["test_training_has_the_losses_of_the_cpu_with_any_number_of_gpus"], said)
        self.assertRegex(failed[1] + failed[2], "ranks=1, dtype='fp32'.*ranks=1, dtype='bf16'")

    def cases(self, *options, **how):
        """Runs cases.py with several processes. Returns the exit code, the results by name, and the output."""
        program = self.program("program", PROGRAM)
        done = subprocess.run([sys.executable, os.path.join(SCRIPTS, "cases.py"), "--processes", "4", *options, program],
                              capture_output=True, text=True, env=dict(os.environ, **how))
        read = cases.read_cases(done.stdout)
        for name, case in read.cases.items():
            if case.result == "passed":
                self.assertEqual(case.lines, ["of " + name], "lines of several cases are mixed")
        return done.returncode, {name: case.result for name, case in read.cases.items()}, read, done.stdout

    def kill(self, running):
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()

    def wait_for(self, path, running):
        until = time.monotonic() + 60
        while not os.path.exists(path):
            self.assertIsNone(running.poll(), "it has ended")
            self.assertLess(time.monotonic(), until, "no " + path)
            time.sleep(0.01)

    def test_several_processes_say_what_one_says(self):
        code, results, read, out = self.cases()
        self.assertEqual((code, set(results.values()), len(results)), (0, {"passed"}, 16), out)
        self.assertEqual((read.found, read.ran, read.current), (16, True, None))
        self.assertEqual(sum("[======" in line for line in out.splitlines()), 2, out)
        shares = [n for n in os.listdir(self.folder.name) if n.startswith("ran.")]
        self.assertGreater(len(shares), 1)
        ran = []
        for name in shares:
            with open(self.path(name)) as f:
                ran += f.read().split()
        self.assertEqual(sorted(ran), sorted(results))

    def test_a_case_of_several_processes_that_fails_crashes_or_hangs_costs_no_other_its_result(self):
        code, results, read, out = self.cases("--limit", "8", A_c2="fail", A_c5="crash", A_c6="hang", P_B_x_1="crash")
        bad = ("A.c2", "A.c5", "A.c6", "P/B.x/1")
        self.assertEqual(results, {name: "failed" if name in bad else "passed" for name in results}, out)
        self.assertEqual((code, len(results), read.ran), (1, 16, True))
        self.assertEqual(read.cases["A.c2"].lines[:2], ["a.cc:3: Failure", "wrong in A.c2"])
        self.assertEqual(read.cases["A.c5"].lines[0], "segmentation fault")
        self.assertEqual(read.cases["A.c6"].lines, ["did not end within 8 s"])
        self.assertTrue(read.cases["A.c2"].message.endswith("CUDA_LAUNCH_BLOCKING=1: failed"), read.cases["A.c2"].message)
        # Another call runs nothing again.
        with open(self.path("done"), "w") as f:
            f.write(out)
        code, results, _, out = self.cases("--done", self.path("done"))
        self.assertEqual(results, {}, out)

    def test_cases_that_run_when_the_time_is_up_are_named(self):
        command = [sys.executable, os.path.join(SCRIPTS, "cases.py"), "--processes", "2", self.program("program", PROGRAM)]
        for tell in (os.kill, os.killpg):  # timeout does both
            with self.subTest(tell=tell.__name__):
                running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                           env=dict(os.environ, A_c4="hang"), start_new_session=True)
                self.addCleanup(self.kill, running)
                for what in ("hangs", "ends"):  # one process hangs, the other has ended
                    self.wait_for(self.path(what), running)
                    os.remove(self.path(what))
                tell(running.pid, signal.SIGTERM)
                out, errors = running.communicate(timeout=60)
                self.assertEqual(running.returncode, 128 + signal.SIGTERM, errors)
                self.assertEqual(errors, "stuck: [ RUN      ] A.c4\n")
                results = {name: case.result for name, case in cases.read_cases(out).cases.items()}
                ended = ["A.c0", "A.c2"] + ["A.c%d" % n for n in range(1, 12, 2)] + ["P/B.x/1", "P/B.x/3"]
                self.assertEqual(results, dict.fromkeys(ended, "passed"), out)

    def test_what_was_said_before_the_time_was_up_is_not_lost(self):
        command = [sys.executable, os.path.join(SCRIPTS, "cases.py"), self.program("program", PROGRAM), "--gtest_filter=A.c2:A.c4:A.c6"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, A_c4="hold", A_c6="hang"),
                                   start_new_session=True)
        self.addCleanup(self.kill, running)
        self.wait_for(self.path("holds"), running)
        os.kill(running.pid, signal.SIGSTOP)
        open(self.path("go"), "w").close()
        self.wait_for(self.path("hangs"), running)
        os.kill(running.pid, signal.SIGTERM)
        os.kill(running.pid, signal.SIGCONT)
        out, _ = running.communicate(timeout=60)
        read = cases.read_cases(out)
        self.assertEqual({name: case.result for name, case in read.cases.items()}, {"A.c2": "passed", "A.c4": "passed", "A.c6": None})
        self.assertEqual((running.returncode, read.current.name), (128 + signal.SIGTERM, "A.c6"))

    def test_a_program_whose_threads_are_looked_at_is_ended(self):
        self.program("cuda-gdb", '#!/bin/bash\n: >"%s"\nexec tail -f /dev/null --pid=$PPID\n' % self.path("looks"))
        command = [sys.executable, os.path.join(SCRIPTS, "cases.py"), "--limit", "8", self.program("program", PROGRAM), "--gtest_filter=A.c4"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                                   env=dict(os.environ, A_c4="deaf", PATH=self.folder.name + ":" + os.environ["PATH"]))
        self.addCleanup(self.kill, running)
        self.wait_for(self.path("looks"), running)
        pid = next(n for n in os.listdir(self.folder.name) if n.startswith("ran.")).partition(".")[2]
        os.kill(running.pid, signal.SIGTERM)
        running.communicate(timeout=60)
        self.assertEqual(running.returncode, 128 + signal.SIGTERM)
        self.assertFalse(os.path.exists("/proc/" + pid))

    def test_a_case_that_prints_without_end_is_ended(self):
        code, results, _, _ = self.cases("--limit", "8", A_c7="talk")
        self.assertEqual((code, len(results), results.pop("A.c7"), set(results.values())), (1, 16, "failed", {"passed"}))

    def test_processes_that_stop_again_and_again_are_given_up(self):
        crashes = {name: "crash" for name in ["A_c%d" % n for n in range(2, 10)]}
        code, results, read, out = self.cases(**crashes)
        self.assertEqual((code, read.ran), (cases.UNFINISHED, False), out)
        self.assertIn("cases were not run", out)
        code, results, _, out = self.cases("--done", self.program("done", out), **crashes)
        self.assertEqual({results.get("P/B.x/%d" % n, "passed") for n in range(4)}, {"passed"}, out)


if __name__ == "__main__":
    unittest.main()
