#!/usr/bin/env python3
"""Tests what tools/test_report.py counts, prints and returns for events and XML files of Bazel and GoogleTest."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

REPORT = os.path.abspath(sys.argv.pop(1))

GTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="5" failures="1" disabled="1" errors="0" time="0" name="AllTests">
  <testsuite name="A" tests="4" failures="1" disabled="1" skipped="1" errors="0">
    <testcase name="ok" status="run" result="completed" classname="A" />
    <testcase name="skipped" status="run" result="skipped" classname="A">
      <skipped message="t/mixed.cc:3&#x0A;no GPU: &lt;here&gt;"><![CDATA[t/mixed.cc:3
no GPU: <here>]]></skipped>
    </testcase>
    %s
    <testcase name="DISABLED_later" status="notrun" result="suppressed" classname="A" />
  </testsuite>
  <testsuite name="All/P" tests="1"><testcase name="each/0" status="run" result="completed" classname="All/P" /></testsuite>
</testsuites>
"""
BAD = """<testcase name="bad" status="run" result="completed" classname="A">
      <failure message="t/mixed.cc:4&#x0A;why" type=""><![CDATA[t/mixed.cc:4
why]]></failure></testcase>"""
# Bazel writes this for tests without GoogleTest.
PLAIN = '<?xml version="1.0"?><testsuites><testsuite name="t/x" tests="1"><testcase name="t/x" status="run"/></testsuite></testsuites>'


class ReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.events = [{"id": {"started": {}}, "started": {"optionsDescription": "--keep_going"}}]

    def tearDown(self):
        self.folder.cleanup()

    def write(self, name, text):
        path = os.path.join(self.folder.name, name)
        with open(path, "w") as f:
            f.write(text)
        return path

    def target(self, label, kind="cc_test rule", success=True, tags=()):
        self.events.append({"id": {"targetConfigured": {"label": label}}, "configured": {"targetKind": kind, "tag": list(tags)}})
        self.events.append({"id": {"targetCompleted": {"label": label}}, "completed": {"success": True} if success else {}})

    def result(self, label, status, xml, log="", shard=1, attempt=1, seconds=0, cached=False):
        files = []
        for kind, text in (("test.log", log), ("test.xml", xml)):
            if text is not None:
                path = self.write("%s.%d.%d.%s" % (label.replace("/", "_"), shard, attempt, kind), text)
                files.append({"name": kind, "uri": "file://" + path})
        self.events.append({"id": {"testResult": {"label": label, "run": 1, "shard": shard, "attempt": attempt}},
                            "testResult": {"status": status, "testActionOutput": files, "cachedLocally": cached,
                                           "testAttemptDurationMillis": str(int(1000 * seconds))}})

    def report(self, *options, said=""):
        events = self.write("events.json", "\n".join(json.dumps(e) for e in self.events))
        done = subprocess.run([sys.executable, REPORT, "--said", self.write("said", said), *options, events],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout

    def last(self, out):
        return out.rstrip("\n").split("\n")[-1]

    def test_counts_each_googletest_case(self):
        self.target("//t:good")
        self.result("//t:good", "PASSED", GTEST % "")
        code, out = self.report()
        self.assertEqual(code, 0, out)
        self.assertEqual(self.last(out), "2 passed, 0 failed")
        self.assertIn("\n1 skipped:\n  //t:good A.skipped: no GPU: <here>\n", out)

    def test_shows_failing_case_and_its_output(self):
        self.target("//t:mixed")
        self.result("//t:mixed", "FAILED", GTEST % BAD,
                    log="[ RUN      ] A.ok\nnoise\n[ RUN      ] A.bad\nwhy\n[  FAILED  ] A.bad (0 ms)\n")
        code, out = self.report()
        self.assertEqual(code, 1, out)
        self.assertEqual(self.last(out), "2 passed, 1 failed")
        self.assertIn("FAILED //t:mixed: A.bad", out)
        self.assertIn("  why\n", out)
        self.assertNotIn("noise", out)

    def test_other_tests_count_as_one(self):
        self.target("//t:plain", "sh_test rule")
        self.result("//t:plain", "PASSED", PLAIN, log="fine\n")
        self.target("//t:nothing", "sh_test rule")
        self.result("//t:nothing", "PASSED", None, log="fine\n")
        self.target("//t:torn", "sh_test rule")
        self.result("//t:torn", "FAILED", "<testsuites name='AllTests'><testcase", log="last words\n")
        code, out = self.report()
        self.assertEqual(code, 1)
        self.assertEqual(self.last(out), "2 passed, 1 failed")
        self.assertIn("last words", out)

    def test_a_file_of_googletest_that_cannot_be_read_is_a_failure(self):
        self.target("//t:written_twice", "sh_test rule")
        self.result("//t:written_twice", "PASSED", GTEST % "" + "s>", log="[==========] 2 tests ran.\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("FAILED //t:written_twice: test.xml cannot be read: ", out)

    def test_crash_counts_as_failure(self):
        self.target("//t:crash")
        self.result("//t:crash", "FAILED", GTEST % "", log="terminate called\n")
        code, out = self.report()
        self.assertEqual(code, 1)
        self.assertEqual(self.last(out), "2 passed, 1 failed")
        self.assertIn("terminate called", out)

    def test_timeout_counts_as_failure(self):
        self.target("//t:slow", "sh_test rule")
        self.result("//t:slow", "TIMEOUT", PLAIN)
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))

    def test_shards_add_up(self):
        self.target("//t:shards")
        self.result("//t:shards", "PASSED", GTEST % "", shard=1)
        self.result("//t:shards", "FAILED", GTEST % BAD, shard=2)
        self.assertEqual(self.last(self.report()[1]), "4 passed, 1 failed")

    def test_second_attempt_is_a_failure_in_ci_only(self):
        self.target("//t:flaky", "sh_test rule")
        self.result("//t:flaky", "FAILED", PLAIN, attempt=1)
        self.result("//t:flaky", "PASSED", PLAIN, attempt=2)
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "1 passed, 0 failed"))
        self.assertIn("//t:flaky: passed, but needed a second attempt", out)
        code, out = self.report("--ci")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("FAILED //t:flaky: needed a second attempt", out)

    def test_skip_line_counts_as_skipped(self):
        self.target("//t:root", "sh_test rule")
        self.result("//t:root", "PASSED", PLAIN, log="SKIPPED: needs root\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "0 passed, 0 failed"))
        self.assertIn("//t:root: needs root", out)

    def test_skip_line_of_a_googletest_program_without_a_case_counts(self):
        self.target("//t:isa")
        self.result("//t:isa", "PASSED", '<testsuites name="AllTests"><testsuite name="A"><testcase name="a" classname="A" '
                                         'status="notrun" result="suppressed"/></testsuite></testsuites>',
                    log="[==========] Running 1 test.\nSKIPPED: this processor has no AMX\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "0 passed, 0 failed"))
        self.assertIn("//t:isa: this processor has no AMX", out)

    def test_skip_that_ci_forbids_is_a_failure_in_ci(self):
        self.target("//t:hosts", "sh_test rule")
        self.result("//t:hosts", "PASSED", PLAIN, log="SKIPPED, A FAILURE IN CI: no namespaces\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "0 passed, 0 failed"))
        self.assertIn("//t:hosts: no namespaces", out)
        code, out = self.report("--ci")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("no namespaces", out)

    def test_lists_cases_that_unittest_skips(self):
        self.target("//t:python", "sh_test rule")
        self.result("//t:python", "PASSED", PLAIN, log="""test_a (__main__.ATest.test_a) ... ok
test_b (__main__.ATest.test_b) ... skipped 'no tmpfs: "why"'
test_c (__main__.ATest.test_c)
A docstring stands on a line of its own. ... skipped "it isn't here"
test_d (tests.other.BTest) ... skipped 'older Pythons'
setUpClass (__main__.CTest) ... skipped 'the whole class'
test_e (__main__.ATest.test_e) ... what a program said
skipped 'noise'
test_f (__main__.ATest.test_f) ... 
  test_f (__main__.ATest.test_f) (ranks=4) ... skipped 'a part'

----------------------------------------------------------------------
Ran 6 tests in 0.001s

OK (skipped=6)
""")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "1 passed, 0 failed"))
        self.assertIn("""
6 skipped:
  //t:python ATest.test_b: no tmpfs: "why"
  //t:python ATest.test_c: it isn't here
  //t:python BTest.test_d: older Pythons
  //t:python CTest.setUpClass: the whole class
  //t:python ATest.test_e: noise
  //t:python ATest.test_f (ranks=4): a part
""", out)

    def test_a_test_of_skipped_cases_alone_has_not_passed(self):
        self.target("//t:python", "sh_test rule")
        self.result("//t:python", "PASSED", PLAIN, log="test_a (__main__.A.test_a) ... skipped 'no GPU'\n\n"
                                                       "Ran 1 test in 0.001s\n\nOK (skipped=1)\n")
        self.target("//t:ranks", "sh_test rule")
        self.result("//t:ranks", "PASSED", PLAIN, log="[ RUN      ] A.b\nt/a.cc:3: Skipped\nno GPU\n\n"
                                                      "[  SKIPPED ] A.b (0 ms)\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "0 passed, 0 failed"))
        self.assertIn("\n2 skipped:\n  //t:python A.test_a: no GPU\n  //t:ranks A.b: no GPU\n", out)

    def test_counts_skips_that_unittest_does_not_name(self):
        self.target("//t:silent", "sh_test rule")
        self.result("//t:silent", "PASSED", PLAIN, log="..ss\nRan 4 tests in 0.001s\n\nOK (expected failures=1, skipped=2)\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "1 passed, 0 failed"))
        self.assertIn("//t:silent 2 cases: no reason given: the test's unittest.main lacks verbosity=2", out)

    def test_a_failed_test_still_lists_what_it_skipped(self):
        self.target("//t:python", "sh_test rule")
        self.result("//t:python", "FAILED", PLAIN, log="test_a (__main__.A.test_a) ... skipped 'no GPU'\n"
                                                       "Ran 2 tests in 0.001s\n\nFAILED (failures=1, skipped=1)\n")
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("//t:python A.test_a: no GPU", out)

    def test_lists_cases_that_a_googletest_program_of_several_ranks_skips(self):
        one = ("[ RUN      ] Ranks/A.ok/2\n[       OK ] Ranks/A.ok/2 (1 ms)\n[ RUN      ] A.left\nt/a.cc:3: Skipped\n"
               "needs a tmpfs\n\n[  SKIPPED ] A.left (0 ms)\n[ RUN      ] Ranks/A.wide/2\nt/a.cc:9: Skipped\n\n"
               "[  SKIPPED ] Ranks/A.wide/2, where GetParam() = 2 (0 ms)\n[  PASSED  ] 1 test.\n"
               "[  SKIPPED ] 2 tests, listed below:\n[  SKIPPED ] A.left\n")
        self.target("//t:ranks", "sh_test rule")
        self.result("//t:ranks", "PASSED", PLAIN, log=one + one)
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "1 passed, 0 failed"))
        self.assertIn("\n2 skipped:\n  //t:ranks A.left: needs a tmpfs\n  //t:ranks Ranks/A.wide/2: no reason given\n", out)

    def test_cases_skipped_for_one_reason_share_a_line(self):
        self.target("//t:gpu")
        self.result("//t:gpu", "PASSED", '<testsuites name="AllTests"><testsuite name="G">%s</testsuite></testsuites>' % "".join(
            '<testcase name="t%d" classname="G" status="run" result="skipped"><skipped message="f.cc:1&#x0A;no GPU"/></testcase>' % i
            for i in range(5)))
        code, out = self.report()
        self.assertEqual((code, self.last(out)), (0, "0 passed, 0 failed"))
        self.assertIn("\n5 skipped:\n  //t:gpu 5 cases, G.t0 ...: no GPU\n", out)

    def test_build_failure_shows_compiler_output(self):
        self.target("//t:broken", success=False)
        self.target("//t:library", "cc_library rule", success=False)
        code, out = self.report("--bazel-exit=1", said="t/broken.cc:1: error: no\n")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 2 failed"))
        self.assertIn("t/broken.cc:1: error: no", out)
        self.assertIn("could not be built:\n  //t:broken\n  //t:library", out)

    def test_bazel_failure_counts_as_failure(self):
        code, out = self.report("--bazel-exit=37", said="Bazel's server is out of memory\n")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("out of memory", out)

    def test_build_file_error_counts_as_failure(self):
        self.events.append({"id": {"pattern": {"pattern": ["//x/..."]}},
                            "aborted": {"reason": "LOADING_FAILURE", "description": "no such package"}})
        code, out = self.report("--bazel-exit=1")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("//x/...", out)

    def test_target_that_ended_for_an_unknown_reason_counts_as_nothing_but_the_build_as_failed(self):
        self.events.append({"id": {"targetCompleted": {"label": "//t:t"}}, "aborted": {}})
        code, out = self.report("--bazel-exit=1", said="missing input file\n")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))
        self.assertIn("missing input file", out)

    def test_lists_the_slowest_of_many_targets(self):
        for i in range(10):
            self.target("//t:t%d" % i)
            self.result("//t:t%d" % i, "PASSED", PLAIN, seconds=10 * i, cached=i == 9)
        self.result("//t:t3", "PASSED", PLAIN, shard=2, seconds=100)
        out = self.report()[1]
        self.assertIn("slowest of 9 targets that ran:\n    130 s  //t:t3\n     80 s  //t:t8\n", out)
        self.assertNotIn("//t:t9", out)
        self.assertNotIn("//t:t0", out)

    def test_lists_no_times_of_few_targets(self):
        self.target("//t:t")
        self.result("//t:t", "PASSED", PLAIN, seconds=10)
        self.assertNotIn("slowest", self.report()[1])

    def test_names_sweeps_that_did_not_run(self):
        self.target("//t:good")
        self.result("//t:good", "PASSED", GTEST % "")
        self.target("//t:long_test", tags=["sweep"])
        code, out = self.report()
        self.assertEqual(code, 0)
        self.assertIn("not run: 1 long sweep (./annulus test --all)", out)

    def test_nothing_to_run_returns_bazels_exit_code(self):
        code, out = self.report("--bazel-exit=4")
        self.assertEqual((code, self.last(out)), (4, "0 passed, 0 failed"))

    def test_accepts_truncated_events(self):
        self.target("//t:good")
        self.result("//t:good", "PASSED", GTEST % "")
        events = self.write("cut.json", "\n".join(json.dumps(e) for e in self.events) + '\n{"id": {"testRes')
        done = subprocess.run([sys.executable, REPORT, "--bazel-exit=37", events], stdout=subprocess.PIPE, text=True)
        self.assertEqual((done.returncode, self.last(done.stdout)), (1, "2 passed, 1 failed"))

    def test_build_counts_as_one(self):
        self.target("//t:library", "cc_library rule")
        self.target("//t:good")
        code, out = self.report("--build")
        self.assertEqual((code, self.last(out)), (0, "1 passed, 0 failed"))
        self.target("//t:broken", success=False)
        code, out = self.report("--build", "--bazel-exit=1")
        self.assertEqual((code, self.last(out)), (1, "0 passed, 1 failed"))


if __name__ == "__main__":
    unittest.main()
