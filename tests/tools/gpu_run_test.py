#!/usr/bin/env python3
"""Tests run.sh of a bundle for GPUs over a bundle of scripts in place of the programs: what is on disk when a call is
killed, how the next call goes on, and what the report says. tools/gpu_bundle/bundle_test.py tests real bundles."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import unittest

from gpu_stand_ins import FIGURE, HANG, StandInTest


class GpuRunTest(StandInTest):
    def test_a_case_that_hangs_or_crashes_costs_no_other_case_its_result(self):
        self.programs(t="a hangs b crashes exits loses c fails skips d")
        self.write("tools/cuda-gdb", '#!/bin/bash\necho "#0 f () of $*"\n', 0o755)
        code, report, out, _ = self.run_sh("--only", "others", "--limit", "8")
        self.assertEqual(code, 1)
        self.assertEqual(set(self.results(report, "passed")), {"t S." + c for c in "abcd"}, out)
        failed = self.results(report, "failed")
        self.assertEqual(failed["t S.hangs"], "did not end within 8 s")
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
        self.programs(t="fails")
        self.ranks("ranks", """
echo "$NCCL_DEBUG" >>"${NCCL_DEBUG_FILE//%?/x}" && echo "host:1 NCCL WARN the cause" >>"${NCCL_DEBUG_FILE//%?/x}"
""" + HANG)
        self.nvidia_smi()
        self.write("tools/dmesg", '#!/bin/bash\necho x >>"%s"\ncat -n "%s" | sed "s/x/NVRM: Xid/"\necho another\n' % (
            (self.path("messages"),) * 2), 0o755)
        _, report, out, _ = self.run_sh("--only", "others", "--limit", "20")
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
        self.assertEqual(self.results(report, "failed")["ranks"], "did not end within 20 s\nNCCL WARN the cause", out)

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
            self.programs(t="a")
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
        self.programs(t="a crashes1 crashes2 crashes3 crashes4 b", u="c")
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "u S.c"}, out)
        self.assertIn("not all of its cases could be run", self.results(report, "failed")["t"])
        # The next call runs the rest.
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "t S.b", "u S.c"}, out)
        self.assertEqual(set(self.results(report, "failed")), {"t S.crashes%d" % n for n in (1, 2, 3, 4)})
        self.assertEqual(self.read("bundle/ran").split().count("c"), 1)

    def test_a_case_that_ignores_the_request_to_end_is_ended(self):
        self.programs(t="a deaf b")
        _, report, out, _ = self.run_sh("--only", "others", "--limit", "8")
        self.assertEqual(self.results(report, "failed"), {"t S.deaf": "did not end within 8 s"}, out)
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "t S.b"})

    def test_a_process_that_hangs_after_its_last_case_is_ended_soon(self):
        self.programs(t="a stuck_at_its_end", u="b stuck_before_its_end")
        script = self.read("bundle/cases.py")
        self.write("bundle/cases.py", script.replace("END = 15 ", "END = 3 "))
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(set(self.results(report, "passed")), {"t S.a", "t S.stuck_at_its_end", "u S.b", "u S.stuck_before_its_end"}, out)
        failed = self.results(report, "failed")
        self.assertEqual(set(failed), {"t", "u"})
        for reason in failed.values():
            self.assertIn("after its last case: did not end within 3 s", reason)

    def test_a_killed_call_leaves_what_passed_and_the_next_one_goes_on(self):
        self.programs(before="x", t="a b hangs c d", after="y")
        self.kill_when(self.start("--only", "others"), self.case_hanging)
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

    def test_what_is_known_of_a_case_is_kept_if_run_sh_is_ended(self):
        self.processes = "4"
        self.programs(t="a deaf b")
        started = self.start("--only", "others")
        self.wait_until(self.hanging, started)
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=60)
        self.assertIn("stuck: [ RUN      ] S.deaf\n", self.details("logs/t.1.err"))
        self.assertIn("ended from outside", self.results(self.report(), "left out")["t"])

    def test_a_test_whose_time_is_up_is_left_out_and_the_next_call_runs_the_rest(self):
        self.programs(t="a hangs b")
        started = self.start("--only", "others", "--minutes", "1", "--limit", "300")
        self.kill_when(started, self.case_hanging)
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
        self.programs(operators="a", merges="b", t="c hangs", u="d")
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
        self.programs(operators="a", merges="b", t="c")
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

    def test_the_operators_leave_time_for_the_other_tests_and_go_on_after_them(self):
        self.programs(operators="a once b", merges="m", t="c")
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
        self.programs(operators="a", t="b")
        self.ranks("ranks", "exit 0", limit=130)
        self.limits()
        self.run_sh("--only", "tests", "--minutes", "6")
        self.assertEqual(self.limit_of("ranks"), [130])
        self.assertRegex(self.read("limits.txt"), r"(?m)^operators .* --processes 4 ")
        self.assertTrue(150 < self.limit_of("operators")[0] <= 180 < self.limit_of("t")[0], self.read("limits.txt"))

    def test_calls_go_on_part_by_part_and_another_bundle_begins_anew(self):
        self.programs(operators="a", merges="b", t="fails")
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
        self.programs(t=" ".join("%s%d_%s" % (how, n, "x" * 60) for how in ("skips", "fails") for n in range(400)))
        _, report, out, _ = self.run_sh("--only", "others")
        self.assertEqual(report["failed"], 400)
        self.assertLess(len(out), 9000)
        self.assertEqual(out.splitlines()[-1], "0 passed, 400 failed, 400 skipped")
        self.assertIn("wrong in fails3_", out)
        self.assertIn("| the tests for GPUs | `run.sh --only tests` | all pass | 0 passed, 400 failed, 400 skipped |", out)
        self.assertIn("more lines in report.txt", out)


if __name__ == "__main__":
    unittest.main()
