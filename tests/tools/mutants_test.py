#!/usr/bin/env python3
"""Tests tools/mutants.py on a small tree of its own: mutants that are killed, survive, do not compile or no longer fit.

A script takes the place of `bazel`: the only test of the tree is a shell script, which `bash -n` "compiles" and which
fails by its exit code.
"""

import difflib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

MUTANTS = os.path.abspath(sys.argv.pop(1))

# Runs FOLDER/NAME.sh for //FOLDER:NAME and writes the events that Bazel would write.
BAZEL = r"""#!/usr/bin/env python3
import json, os, subprocess, sys
with open(os.environ["CALLS"], "a") as f:
    f.write(os.getcwd() + ": " + " ".join(sys.argv[1:]) + "\n")
if sys.argv[1] != "test":
    sys.exit(0)
option = lambda name: next((a.split("=", 1)[1] for a in sys.argv if a.startswith(name + "=")), "")
events = []
for label in sys.argv[sys.argv.index("--") + 1:]:
    script = label[2:].replace(":", "/") + ".sh"
    if not os.path.exists(script):
        continue
    events.append({"id": {"targetConfigured": {"label": label}}, "configured": {"targetKind": "cc_test rule"}})
    built = all(subprocess.run(["bash", "-n", f]).returncode == 0 for f in ("answer.sh", script))
    events.append({"id": {"targetCompleted": {"label": label}}, "completed": {"success": True} if built else {}})
    if not built:
        continue
    log, xml = (os.path.join(os.path.dirname(option("--build_event_json_file")), n) for n in ("test.log", "test.xml"))
    with open(log, "w") as f:
        code = subprocess.run(["bash", script, option("--test_filter")], stdout=f, stderr=f).returncode
    with open(xml, "w") as f:
        if code < 2:  # like a GoogleTest with one case; other codes are like a crash
            f.write('<testsuites name="AllTests"><testsuite name="Answer"><testcase name="Is42" classname="Answer" '
                    'status="%s">%s</testcase></testsuite></testsuites>'
                    % ("run" if option("--test_filter") in ("", "Answer.Is42") else "notrun",
                       '<failure message="no"/>' if code else ""))
    files = [{"name": os.path.basename(p), "uri": "file://" + p} for p in (log, xml)]
    events.append({"id": {"testResult": {"label": label, "run": 1, "shard": 1, "attempt": 1}},
                   "testResult": {"status": "FAILED" if code else "PASSED", "testActionOutput": files}})
with open(option("--build_event_json_file"), "w") as f:
    f.write("\n".join(json.dumps(e) for e in events))
"""
TEST = """. ./answer.sh
[[ $answer == 42 ]]
"""


ANSWER = ":\n" * 4 + "unused=1\nanswer=42\n" + ":\n" * 4  # the changed lines are neither the first nor the last


class MutantsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.calls = self.path("calls")
        self.write("bin/bazel", BAZEL)
        os.chmod(self.path("bin/bazel"), 0o755)
        self.write("tree/answer.sh", ANSWER)
        self.write("tree/tests/answer_test.sh", TEST)
        self.write("tree/tests/BUILD", 'cc_test(\n    name = "answer_test",\n)\n')
        self.write("tree/tests/answer_test.cc", "TEST(Answer, Is42) {}\n")
        self.write("tree/.gitignore", "/.bazel/\n")
        for words in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", "-C", self.path("tree"), *words], check=True)

    def tearDown(self):
        self.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def read(self, name):
        with open(self.path(name)) as f:
            return f.read()

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w") as f:
            f.write(text)

    def mutant(self, name, before, after, killer="//tests:answer_test --test_filter=Answer.Is42"):
        old = ANSWER if before in ANSWER else ANSWER.replace("answer=42", before)
        old, new = old.splitlines(), old.replace(before, after).splitlines()
        diff = difflib.unified_diff(old, new, "a/answer.sh", "b/answer.sh", lineterm="")
        self.write("tree/tests/mutants/%s.patch" % name,
                   "# What is wrong with it: a test's fault.\n# Killed by: %s\n\ndiff --git a/answer.sh b/answer.sh\n%s\n"
                   % (killer, "\n".join(diff)))

    def start(self, *words):
        environment = dict(os.environ, PATH=self.path("bin") + ":" + os.environ["PATH"], CALLS=self.calls)
        return subprocess.Popen([sys.executable, MUTANTS, "--root", self.path("tree"), *words], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_mutants(self, *words):
        child = self.start(*words)
        out, _ = child.communicate()
        return child.returncode, out

    def test_killed_mutant_passes_and_leaves_the_tree_alone(self):
        self.mutant("wrong_answer", "answer=42", "answer=41")
        code, out = self.run_mutants()
        self.assertEqual(code, 0, out)
        self.assertIn("killed wrong_answer", out)
        self.assertIn("Answer.Is42", out)
        self.assertEqual(out.split("\n")[-2], "1 passed, 0 failed")
        self.assertEqual(self.read("tree/answer.sh"), ANSWER)
        self.assertEqual(self.read("tree/.bazel/copy-for-mutants/tree/answer.sh"), ANSWER)
        for call in self.read("calls").splitlines():
            self.assertTrue(call.startswith(os.path.realpath(self.path("tree/.bazel/copy-for-mutants/tree")) + ": "), call)
        self.assertIn("shutdown", call)

    def test_survivor_fails_the_run(self):
        self.mutant("survivor", "unused=1", "unused=2")
        self.mutant("wrong_answer", "answer=42", "answer=41")
        code, out = self.run_mutants()
        self.assertEqual(code, 1, out)
        self.assertIn("FAILED survivor: survived: //tests:answer_test Answer.Is42 passes with it", out)
        self.assertEqual(out.split("\n")[-2], "1 passed, 1 failed")
        code, out = self.run_mutants("wrong_answer")  # runs only the named ones
        self.assertEqual((code, out.split("\n")[-2]), (0, "1 passed, 0 failed"), out)

    def test_compile_error_and_crash_do_not_count_as_killed(self):
        self.mutant("broken", "answer=42", "answer=$(")
        self.mutant("dies", "unused=1", "exit 3")
        code, out = self.run_mutants()
        self.assertEqual(code, 1, out)
        self.assertIn("FAILED broken: does not compile", out)
        self.assertIn("died without an assertion", out)
        self.assertEqual(out.split("\n")[-2], "0 passed, 2 failed")

    def test_names_patches_that_do_not_fit(self):
        self.mutant("old", "answer=40", "answer=41")
        self.write("tree/tests/mutants/empty.patch", "# Killed by: //tests:answer_test\n")
        for words in ([], ["--check"]):
            code, out = self.run_mutants(*words)
            self.assertEqual(code, 1, out)
            self.assertRegex(out, "FAILED .*old.*: does not fit any more: re-make it .*answer.sh:3")
            self.assertRegex(out, "FAILED .*empty.*: needs")
            self.assertEqual(out.split("\n")[-2], "0 passed, 2 failed")

    def test_applies_patch_to_moved_lines(self):
        self.mutant("wrong_answer", "answer=42", "answer=41")
        self.write("tree/answer.sh", "a=1\nb=2\nc=3\n" + ANSWER)  # the change is not committed
        code, out = self.run_mutants()
        self.assertEqual(code, 0, out)
        self.assertEqual(self.run_mutants("--check")[0], 0)

    def test_named_test_must_exist_and_pass_without_the_patch(self):
        self.mutant("no_target", "answer=42", "answer=41", killer="//tests:other_test")
        self.mutant("no_case", "answer=42", "answer=41", killer="//tests:answer_test --test_filter=Answer.Is43")
        for words in ([], ["--check"]):
            code, out = self.run_mutants(*words)
            self.assertEqual(code, 1, out)
            self.assertEqual(out.split("\n")[-2], "0 passed, 2 failed")
        self.assertIn("names a test that is not there: //tests:other_test", out)
        self.assertIn("names a case that is not there: Answer.Is43", out)
        self.write("tree/answer.sh", ANSWER.replace("answer=42", "answer=0"))
        self.mutant("no_target", "answer=0", "answer=41")
        code, out = self.run_mutants("no_target")
        self.assertEqual(code, 1, out)
        self.assertIn("fails without the patch, too", out)

    def test_each_named_test_must_fail(self):
        self.write("tree/tests/BUILD", 'cc_test(name = "answer_test")\ncc_test(name = "easy_test")\n')
        self.write("tree/tests/easy_test.sh", "true\n")
        self.mutant("half", "answer=42", "answer=41", killer="//tests:answer_test\n# Killed by: //tests:easy_test")
        code, out = self.run_mutants()
        self.assertEqual(code, 1, out)
        self.assertIn("survived: //tests:easy_test passes with it", out)

    def test_finds_targets_of_list_comprehensions(self):
        self.write(
            "tree/tests/BUILD",
            'cc_test(name = "answer_test")\n[sh_test(\n    name = name,\n) for name in [\n    "easy_test",\n]]\n'
            '[mpi_test(\n    name = "on_%d_ranks_test" % np,\n) for np in [2]]\n',
        )
        for at, killer in enumerate(("easy_test", "on_2_ranks_test", "on_two_ranks_test", "hard_test")):
            self.mutant(f"of_a_list_{at}", "answer=42", "answer=41", killer=f"//tests:{killer}")
        code, out = self.run_mutants("--check")
        self.assertEqual(code, 1, out)
        for at, there in enumerate((True, True, False, False)):
            self.assertEqual(f"of_a_list_{at}.patch: names a test that is not there" not in out, there, out)

    def test_unknown_name_is_refused_with_the_nearest(self):
        self.mutant("wrong_answer", "answer=42", "answer=41")
        code, out = self.run_mutants("wrong_anser")
        self.assertEqual(code, 1)
        self.assertIn("did you mean wrong_answer?", out)

    def test_run_after_an_interrupt_begins_with_a_whole_copy(self):
        self.mutant("waits", "unused=1", textwrap.dedent("""touch "$CALLS.waiting"; exec sleep 60"""))
        child = self.start()
        while not os.path.exists(self.calls + ".waiting"):
            self.assertIsNone(child.poll())
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=30)
        self.assertEqual(child.returncode, 130, out)
        self.assertIn("interrupted", out)
        self.assertEqual(self.read("tree/answer.sh"), ANSWER)
        os.remove(self.path("tree/tests/mutants/waits.patch"))
        self.mutant("wrong_answer", "answer=42", "answer=41")
        code, out = self.run_mutants()
        self.assertEqual(code, 0, out)


if __name__ == "__main__":
    unittest.main()
