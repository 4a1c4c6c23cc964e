#!/usr/bin/env python3
"""Tests what runs the programs of a bundle for GPUs and reads what they say, over scripts in place of the programs;
gpu_run_test.py tests run.sh as a whole."""

import os
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = os.path.dirname(os.path.abspath(sys.argv.pop(1)))
GPU_JOB_TEST = os.path.abspath(sys.argv.pop(1))

# Does what gpu_job_test.py expects of annulus. The first `attend` waits for a second one to begin. That of float16 with
# a window fails.
ANNULUS = r"""#!/usr/bin/env python3
import glob, os, sys, time
here = os.path.dirname(os.path.abspath(sys.argv[0]))
if sys.argv[1] == "doctor":
    print("  device     cuda, 1 GPU")
elif sys.argv[1] == "train":
    os.mkdir("run")
    with open("run/metrics.jsonl", "w") as f:
        f.write("".join('{"loss": %f}\n' % (1 / (i + 1)) for i in range(20)))
    print("device cuda, run folder run")
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

    def test_commands_that_depend_on_nothing_run_at_the_same_time(self):
        done = subprocess.run([sys.executable, GPU_JOB_TEST, self.program("annulus", ANNULUS)], capture_output=True, text=True)
        failed = [line for line in done.stderr.splitlines() if line.startswith(("FAIL:", "ERROR:"))]
        self.assertEqual(len(failed), 1, done.stderr)
        self.assertRegex(failed[0], r"^FAIL: test_attend_equals_the_oracle .*ranks=1, dtype='f16', pattern=.* kind = 'window'")
        self.assertIn("Ran 2 tests", done.stderr)


if __name__ == "__main__":
    unittest.main()
