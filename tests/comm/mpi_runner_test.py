#!/usr/bin/env python3
"""Tests comm/testing/mpi_runner.py with a small script in place of mpirun: mpi_runner_test.py MPI_RUNNER.py."""

import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

RUNNER = os.path.abspath(sys.argv.pop(1))
# Starts -np processes, and ends with the code of the first that fails.
MPIRUN = """#!/bin/bash
while [[ $1 == -* ]]; do
  if [[ $1 == -np ]]; then n=$2; shift; elif [[ $1 == --bind-to ]]; then shift; fi
  shift
done
for ((r = 0; r < n; ++r)); do OMPI_COMM_WORLD_RANK=$r "$@" & pids[r]=$!; done
code=0
for pid in "${pids[@]}"; do wait "$pid" || { rc=$?; ((code)) || code=$rc; }; done
exit $code
"""
# What a program with GoogleTest writes: one case fails on the rank that FAILS names.
CASES = """rank=$OMPI_COMM_WORLD_RANK
echo "rank $rank of $WANT_SIZE runs"
failure=; [ "$rank" = "$FAILS" ] && failure='<failure message="ring_test.cc:7">the sum is 4</failure>'
cat >"${GTEST_OUTPUT#xml:}" <<END
<testsuites name="AllTests"><testsuite name="Ring"><testcase name="Sums" classname="Ring">$failure</testcase>
<testcase name="Waits" classname="Ring" result="skipped"><skipped message="no GPU"/></testcase></testsuite></testsuites>
END
[ -z "$failure" ]"""


class MpiRunnerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.mpirun = os.path.join(folder.name, "mpirun")
        self.report = os.path.join(folder.name, "report.xml")
        with open(self.mpirun, "w") as f:
            f.write(MPIRUN)
        os.chmod(self.mpirun, 0o755)

    def run_job(self, script, *options, **env):
        done = subprocess.run([sys.executable, RUNNER, "--mpirun=" + self.mpirun, "--report=" + self.report, *options, "--",
                               "bash", "-c", script], env={**os.environ, **env}, capture_output=True, text=True, timeout=50)
        return done.returncode, done.stdout + done.stderr

    def cases(self):
        root = ElementTree.parse(self.report).getroot()
        self.assertEqual(int(root.get("tests")), len(list(root.iter("testcase"))))
        return {case.get("name"): [f.text for f in case.findall("failure")] for case in root.iter("testcase")}

    def test_one_report_of_all_ranks_and_numbers_of_them(self):
        code, said = self.run_job("echo $OMPI_COMM_WORLD_RANK of $WANT_SIZE", "--np=1,3")
        self.assertEqual(code, 0, said)
        for ranks in (1, 3):
            for rank in range(ranks):
                self.assertIn("--- rank %d of %d ---\n%d of %d\n" % (rank, ranks, rank, ranks), said)
        self.assertEqual(self.cases(), {"on 1": [], "on 3": []})

    def test_a_case_that_fails_on_one_rank_has_failed(self):
        code, said = self.run_job(CASES, "--np=3", FAILS="1")
        self.assertEqual(code, 1, said)
        cases = self.cases()
        self.assertEqual(cases["Sums"], ["rank 1:\nthe sum is 4"])
        self.assertEqual(cases["Waits"], [])
        self.assertRegex(cases["on 3"][0], "exit code is 1, expected 0")
        code, said = self.run_job(CASES, "--np=2")
        self.assertEqual((code, self.cases()), (0, {"Sums": [], "Waits": []}), said)
        with open(self.report) as f:
            self.assertIn("no GPU", f.read())

    def test_exit_code_and_texts_are_checked(self):
        script = "echo hello; exit 3"
        for options, words in (
                (["--expect-exit=3"], ""),
                ([], "mpirun's exit code is 3, expected 0"),
                (["--expect-exit=3", "--expect-once=hello"], "2 lines hold, instead of one: hello"),
                (["--expect-exit=3", "--forbid=ell"], "the output holds: ell")):
            code, said = self.run_job(script, "--np=2", *options)
            self.assertEqual((code, words in said), (1 if words else 0, True), said)

    def test_a_hang_is_a_failure_with_the_place_of_each_rank(self):
        code, said = self.run_job("echo begins; [ $OMPI_COMM_WORLD_RANK = 0 ] || exec tail -f /dev/null", "--np=2", "--timeout=5")
        self.assertEqual(code, 1, said)
        self.assertIn("exit code is 110 (not done within 5 s), expected 0", said)
        self.assertRegex(said, r"rank 0, process \d+: (has ended|State: Z)")
        self.assertRegex(said, r"rank 1, process \d+: State: S \(sleeping\)")
        self.assertIn("--- rank 1 of 2 ---\nbegins\n", said)

    def test_what_a_job_leaves_behind_is_ended_and_named(self):
        left = os.path.join(os.path.dirname(self.report), "left")
        code, said = self.run_job("setsid tail -f /dev/null </dev/null >/dev/null 2>&1 & echo $! >%s" % left, "--np=1")
        self.assertEqual(code, 1, said)
        self.assertIn("these processes went on: tail -f /dev/null", said)
        with open(left) as f:
            self.assertFalse(os.path.exists("/proc/%s" % f.read().strip()))

    def test_a_program_that_cannot_run_here_is_skipped(self):
        code, said = self.run_job("[ $OMPI_COMM_WORLD_RANK = 0 ] && echo 'SKIPPED: no GPU'; exit 0", "--np=2", "--expect-once=sums")
        self.assertEqual(code, 0, said)
        self.assertRegex(said, "(?m)^SKIPPED: no GPU")
        self.assertFalse(os.path.exists(self.report))

    def test_faults_need_their_library(self):
        code, said = self.run_job("true", "--faults=kill:rank=0,nth=1")
        self.assertEqual(code, 2)
        self.assertIn("--faults needs --faults-library", said)


if __name__ == "__main__":
    unittest.main(verbosity=2)
