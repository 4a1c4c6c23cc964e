#!/usr/bin/env python3
"""Tests run.py and report.py of a bundle for GPUs over scripts in place of the programs: what is recorded of steps that fail,
crash or hang, what is on disk when it is ended or killed, how the next call goes on, and which LibTorch it refuses.
tools/gpu_bundle/bundle_test.py tests real bundles.

gpu_bundle_test.py PATH/tools/gpu_bundle/run.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(sys.argv.pop(1)))

# Prints what GoogleTest prints for its cases, each of which ends as its name says.
PROGRAM = """#!/usr/bin/env python3
import os, signal, subprocess, sys
assert ("GTEST_SHARD_INDEX" in os.environ) == ("GTEST_TOTAL_SHARDS" in os.environ)  # GoogleTest refuses one of them
cases = sys.argv[1:][int(os.environ.get("GTEST_SHARD_INDEX", 0))::int(os.environ.get("GTEST_TOTAL_SHARDS", 1))]
say = lambda text: print(text, flush=True)
ends = {"fails": "FAILED ", "skips": "SKIPPED"}
say("[==========] Running %d tests from 1 test suite." % len(cases))
for case in cases:
    say("[ RUN      ] S." + case)
    with open("../ran", "a") as f:
        f.write(case + " ")
    if case == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif case == "exits":
        os._exit(0)
    elif case == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        with open("../hanging", "w") as f:
            f.write("%d %d %s" % (os.getpid(), child.pid, os.environ["TMPDIR"]))
        child.wait()
    elif case in ends:
        say("a.cc:3: Failure\\nwhy it " + case)
    say("[ %s ] S.%s, where GetParam() = 1 (5 ms)" % (ends.get(case, "      OK"), case))
say("[==========] %d tests from 1 test suite ran. (5 ms total)" % len(cases))
sys.exit("fails" in cases)
"""
ANNULUS = """#!/bin/bash
[[ $1 == doctor ]] && { echo "  device       %s"; exit; }
echo '%s'
echo '{"bench":"gpu", cut off'
"""
MEASURED = {
    "device": "NVIDIA H100", "versions": "CUDA 13.0, NCCL 2.28.9",
    "figures": [{"name": "dense forward 8192", "unit": "TFLOP/s", "value": 612.52, "median": 610, "operators": "cudnn"}],
    "ratios": [{"name": "gpu/dense", "ratio": 1.02, "low": 1.0, "high": 1.1, "goal": 1.031},
               {"name": "gpu/ring", "ratio": 1.2, "goal": 1.06}, {"name": "gpu/mixed", "ratio": 1, "invalid": "not the same"}]}


def gtest(name, *cases, limit=60, **more):
    return {"name": name, "parts": ["tests"], "kind": "gtest", "command": ["./program", *cases], "limit": limit, **more}


def plain(name, text, **more):
    return {"name": name, "parts": ["tests"], "command": ["bash", "-c", text], "limit": 60, **more}


BENCH = {"name": "bench dense", "parts": ["bench", "dense"], "command": ["annulus", "bench"], "limit": 60, "gpu": True}


class GpuBundleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.entropy = tempfile.NamedTemporaryFile(suffix=".so")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", cls.entropy.name, os.path.join(SCRIPTS, "entropy.c")], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.entropy.close()

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="bundle ")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        for name in ("run.py", "report.py"):
            shutil.copy(os.path.join(SCRIPTS, name), self.folder)
        self.out = self.path("report")
        self.write("built.json", json.dumps({"LibTorch": "2.11.0", "CUDA": "13.0"}))
        self.write("torch/version.py", "__version__ = '2.11.1+cu130'\ncuda: Optional[str] = '13.0'\n")
        for library in ("libtorch_cpu.so", "libtorch_cuda.so"):
            self.write("torch/lib/" + library, "")
        self.write("files/program", PROGRAM, 0o755)
        self.device("cuda, 1 GPU")
        os.makedirs(self.path("lib"))
        shutil.copy(self.entropy.name, self.path("lib/libannulus_entropy.so"))

    def path(self, name):
        return os.path.join(self.folder, name)

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def write(self, name, text, mode=0o644):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as f:
            f.write(text)
        os.chmod(self.path(name), mode)

    def device(self, text):
        line = json.dumps(dict(MEASURED, bench="gpu")).replace('{"device"', '{"bench":"gpu","device"')
        self.write("files/launcher/annulus", ANNULUS % (text, line), 0o755)

    def begin(self, *args, steps=None):
        if steps:
            self.write("steps.json", json.dumps(steps))
        # With the default action of Ctrl-C, which a background job of a script would ignore.
        return subprocess.Popen([self.path("run.py"), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=dict(os.environ, LIBTORCH=self.path("torch"), PATH=self.path("tools") + ":" + os.environ["PATH"]),
                                cwd=self.folder,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def run_steps(self, *args, steps=None):
        """Runs them. Returns the exit code, the result of each step, and the report."""
        started = self.begin("--out", self.out, *args, steps=steps)
        printed, errors = started.communicate(timeout=120)
        self.assertNotIn("Traceback", errors)
        if started.returncode not in (2, 9):
            self.assertEqual(printed, self.read("report/report.txt"))
        return started.returncode, self.results(), printed

    def results(self, folder="report"):
        """(result, reason) of each step."""
        entries = [json.loads(line) for line in self.read(folder + "/results.jsonl").splitlines() if line.endswith("}")]
        return {e["step"]: (e["result"], e["reason"]) for e in entries if "step" in e}

    def until_it_hangs(self):
        """Returns the processes of the case that hangs, and its folder for temporary files."""
        deadline = time.monotonic() + 60
        while not os.path.exists(self.path("hanging")) or len(self.read("hanging").split()) < 3:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        pids = self.read("hanging").split()
        os.remove(self.path("hanging"))
        return pids

    def expect_gone(self, *pids):
        deadline = time.monotonic() + 60
        while any(os.path.exists("/proc/%s/exe" % pid) for pid in pids):  # a zombie has none
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_what_fails_crashes_or_hangs_is_recorded_and_the_rest_runs(self):
        code, results, text = self.run_steps(steps=[
            gtest("mixed", "passes", "fails", "skips"), gtest("crash", "passes", "crashes", "lost"), gtest("exit", "exits"),
            gtest("hang", "passes", "hangs", limit=2), gtest("shards", "a", "crashes", "b", "c", shards=2), gtest("empty"),
            dict(gtest("missing"), command=["./none"]), plain("exits with 3", "echo why; exit 3"), plain("hidden", "exit 0"),
            plain("no second GPU", "echo 'SKIPPED: one GPU'"), BENCH, dict(plain("tool", ""), command=["no-such-tool"])])
        self.assertEqual(code, 1)
        failed = {name: reason for name, (result, reason) in results.items() if result == "failed"}
        self.assertEqual(set(failed), {"mixed", "crash", "exit", "hang", "shards", "empty", "missing", "exits with 3"})
        self.assertEqual(failed["mixed"], "")  # the case says why
        self.assertIn("FAILED: mixed: S.fails\n    a.cc:3: Failure\n    why it fails\n", text)
        self.assertIn("skipped: mixed: S.skips\n    a.cc:3: Failure\n    why it skips\n", text)
        self.assertEqual(failed["crash"], "segmentation fault before its end, in S.crashes")
        self.assertEqual(failed["exit"], "exit code 0 before its end, in S.exits")
        self.assertEqual(failed["hang"], "did not end within 2 s, in S.hangs")
        self.assertEqual(failed["empty"], "it ran no cases")
        self.assertRegex(failed["missing"], "cannot be started: .*No such file")
        self.assertEqual(failed["exits with 3"], "exit code 3\nwhy")
        self.assertEqual(results["no second GPU"], ("skipped", "one GPU"))
        self.assertEqual(results["tool"], ("skipped", "this machine has no no-such-tool"))
        self.assertEqual(sorted(self.read("ran").split()), sorted(
            "passes fails skips passes crashes exits passes hangs a b crashes".split()))  # c was of the shard that crashed
        self.expect_gone(*self.until_it_hangs()[:2])
        self.assertEqual(sorted(os.listdir(self.out)), ["output.txt", "report.txt", "results.jsonl"])
        self.assertIn("==== exits with 3\nwhy\n", self.read("report/output.txt"))
        # Passed: passes of three programs, a and b, doctor, hidden and the benchmark.
        self.assertEqual(text.splitlines()[-1], "8 passed, 8 failed, 3 skipped, 0 left out")
        self.assertIn("Measured on NVIDIA H100, CUDA 13.0, NCCL 2.28.9:\n", text)
        for row in ("| gpu/dense | 1.020 | 1.000 to 1.100 | at most 1.031: met |", "| gpu/ring | 1.200 | 1.200 to 1.200 | at most 1.06: missed |",
                    "| gpu/mixed | 1.000 | 1.000 to 1.000 | INVALID: not the same |",
                    "| dense forward 8192 | 612.5 | 610 | TFLOP/s | cudnn |"):
            self.assertIn(row + "\n", text)

    def test_ctrl_c_ends_what_it_started_and_the_next_call_runs_the_rest(self):
        steps = [gtest("first", "a"), gtest("second", "b", "hangs"), gtest("third", "c"), BENCH]
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                started = self.begin("--out", self.out, steps=steps)
                *pids, scratch = self.until_it_hangs()
                started.send_signal(number)
                printed, _ = started.communicate(timeout=60)
                self.assertEqual(started.returncode, 130)
                self.expect_gone(*pids)
                self.assertFalse(os.path.exists(scratch))
                self.assertEqual(self.results(), {
                    "doctor": ("passed", ""), "first": ("passed", ""), "third": ("left out", "run.py was ended before it"),
                    "second": ("left out", "run.py was ended during it, in S.hangs"), "bench dense": ("left out", "run.py was ended before it")})
                self.assertEqual(printed.splitlines()[-1], "3 passed, 0 failed, 0 skipped, 3 left out")  # b, too
        self.write("files/program", PROGRAM.replace('"hangs"', '"hangs no more"'), 0o755)
        code, results, text = self.run_steps()
        self.assertEqual((code, {result for result, _ in results.values()}), (0, {"passed"}), text)
        self.assertEqual(self.read("ran").split(), "a b hangs b hangs b hangs c".split())

    def test_a_killed_call_leaves_all_results_so_far(self):
        steps = [gtest("first", "a", "fails"), gtest("second", "b", "hangs"), BENCH]
        started = self.begin("--out", self.out, steps=steps)
        *pids, scratch = self.until_it_hangs()
        started.kill()
        started.communicate()
        self.expect_gone(pids[0])
        os.kill(int(pids[1]), signal.SIGKILL)
        shutil.rmtree(scratch)  # which no process is left to do
        self.assertIn("FAILED: first: S.fails", self.read("report/report.txt"))
        told = subprocess.run([self.path("run.py"), "--report", "--out", self.out], capture_output=True, text=True)
        self.assertEqual(told.returncode, 1, told.stderr)
        self.assertIn("left out: second\n    run.py was killed during it, in S.hangs", told.stdout)
        self.assertEqual(told.stdout.splitlines()[-1], "3 passed, 1 failed, 0 skipped, 1 left out")  # a, b, doctor
        with open(self.path("report/results.jsonl"), "a") as f:
            f.write('{"step": "thi')  # half a line
        self.write("files/program", PROGRAM.replace('"hangs"', '"hangs no more"'), 0o755)
        _, _, text = self.run_steps()
        self.assertEqual(text.splitlines()[-1], "5 passed, 1 failed, 0 skipped, 0 left out")
        self.assertEqual(self.read("ran").split(), "a fails b hangs b hangs".split())
        self.assertEqual(self.read("report/output.txt").count("==== second"), 2)

    def test_a_step_ends_with_the_time_and_tests_leave_some_of_it_to_benchmarks(self):
        steps = [gtest("long", "a", "hangs", parts=["tests", "long"]), *[gtest("hang %d" % i, "hangs") for i in range(1, 9)], BENCH]
        self.write("run.py", self.read("run.py").replace("LEAST = 5 ", "LEAST = 1 "), 0o755)
        long = self.begin("--out", self.path("long"), "--minutes", "0.1", "--only", "long", steps=steps)
        many = self.begin("--minutes", "0.15", "--limit", "1.5", *("--only=hang %d" % i for i in range(1, 9)), "--only", "bench")
        for started in (long, many):
            started.communicate(timeout=120)
        self.assertEqual((long.returncode, many.returncode), (0, 1))
        self.assertRegex(self.results("long")["long"][1], r"^the time was up after \d s, in S.hangs")
        self.assertEqual(self.results("long")["long"][0], "left out")
        results = self.results("gpu-report")
        self.assertEqual(results["hang 1"], ("failed", "did not end within 1 s, in S.hangs"))
        self.assertEqual(results["bench dense"], ("passed", ""))
        self.assertEqual(results["hang 8"], ("left out", "no time left of 0.15 minutes"))

    def test_without_a_gpu_benchmarks_are_skipped(self):
        self.device("cpu: no driver")
        code, results, _ = self.run_steps("--only", "dense", steps=[gtest("first", "a"), BENCH])
        self.assertEqual((code, results), (0, {"doctor": ("passed", ""), "bench dense": ("skipped", "no GPU: cpu: no driver")}))
        self.write("tools/nvidia-smi", "#!/bin/bash\necho NVIDIA H100, 535.1", 0o755)
        code, results, text = self.run_steps()
        self.assertEqual((code, results["doctor"]), (1, ("failed", "nvidia-smi lists NVIDIA H100, 535.1, but annulus finds no GPU: cpu: no driver")))
        self.assertIn("\nGPUs         NVIDIA H100, 535.1\n", text)

    def test_another_libtorch_is_refused(self):
        # That of Python's package says its version in version.py, an unpacked one in build-version.
        for name, text, wanted in (
                ("version.py", "__version__ = '2.9.1+cu130'\n", "LibTorch 2.9.1 in .*, but this bundle was built with 2.11.0"),
                ("version.py", "__version__ = '2.11.0'\ncuda: Optional[str] = '12.6'\n", "is for CUDA 12, but .* for CUDA 13"),
                ("build-version", "2.11.0+cu126", "is for CUDA 12, but .* for CUDA 13")):
            self.write("torch/version.py", "")
            self.write("torch/" + name, text)
            started = self.begin("--out", self.out, steps=[gtest("first", "a")])
            self.assertRegex(started.communicate()[1], "^run.py: .*" + wanted)
            self.assertEqual(started.returncode, 9)
        self.assertFalse(os.path.exists(self.out))

    def test_bad_options_and_the_report_of_another_bundle_are_refused(self):
        self.run_steps(steps=[gtest("first", "a")])
        for args, wanted in ((["--only", "all"], "expected one of first, tests"), (["--minutes", "0"], "positive"), (["--"], "a command")):
            started = self.begin(*args)
            _, errors = started.communicate()
            self.assertEqual(started.returncode, 2, args)
            self.assertRegex(errors, "run.py: .*" + wanted)
        self.write("MANIFEST", "another")
        self.assertIn("has the report of another bundle", self.begin("--out", self.out).communicate()[1])
        self.assertEqual(self.begin("--", "annulus", "doctor").communicate()[0], "  device       cuda, 1 GPU\n")


if __name__ == "__main__":
    unittest.main()
