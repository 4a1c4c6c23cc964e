"""Builds the site of ./annulus docs for a test, or skips the test where something is not installed. Used by site_test.py and
site_pages_test.py."""

import os
import shutil
import subprocess
import tempfile
import unittest


def build(root, test):
    """Returns the folder with the pages of the site, which is removed after the test class `test`."""
    python = os.path.join(root, ".venv-docs", "bin", "python")
    program = os.path.join(root, ".bazel", "bin", "launcher", "annulus")
    for path in (python, program):
        if not os.path.exists(path):
            raise unittest.SkipTest(os.path.relpath(path, root) + " is not there: ./annulus docs makes it")
    if not shutil.which("doxygen"):
        raise unittest.SkipTest("no doxygen: ./annulus docs installs it")
    work = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
    test.addClassCleanup(shutil.rmtree, work)
    done = subprocess.run([python, os.path.join(root, "docs", "site", "build.py"), "--program", program, "--work", work],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return os.path.dirname(done.stdout.strip().split("\n")[-1])
