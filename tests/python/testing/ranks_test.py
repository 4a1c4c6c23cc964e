#!/usr/bin/env python3
"""Tests of run_ranks and of the decorator ranks: results, failures in one report, and no process left behind."""

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.getcwd(), "integration_tests")]
import torch_python  # noqa: E402

torch_python.enter()
os.environ["ANNULUS_TORCH_LIBRARY"] = "/nowhere"  # the library is not needed

import annulus  # noqa: E402
import ranks_cases  # noqa: E402
from annulus.testing import RanksFailed, ranks, run_ranks  # noqa: E402

END = 30.0  # seconds within which a process that was killed is gone


def gone(pid):
    """Waits until a process has ended: its entry is not there, or that of one that nobody has waited for yet."""
    end = time.monotonic() + END
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def left(folder):
    """The processes that `hangs` named."""
    found = []
    for name in ("0", "1"):
        with open(os.path.join(folder, name)) as file:
            found += map(int, file.read().split())
    return found


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


class RanksTest(unittest.TestCase):
    def test_it_returns_what_each_rank_returned_and_prints_by_rank(self):
        words = io.StringIO()
        with contextlib.redirect_stdout(words):
            results = run_ranks(3, ranks_cases.total, 2, factor=5)
        self.assertEqual([r[:2] for r in results], [(30.0, 3)] * 3)
        self.assertEqual(len({r[2] for r in results} | {os.getpid()}), 4)
        self.assertEqual(words.getvalue(), "rank 0 | I am 0\nrank 1 | I am 1\nrank 2 | I am 2\n")
        self.assertTrue(all(gone(r[2]) for r in results))

    def test_one_report_says_who_raised_what_and_where_others_waited(self):
        with self.assertRaises(RanksFailed) as caught:
            run_ranks(2, ranks_cases.raises)
        text = str(caught.exception)
        self.assertRegex(text, r"^raises on 2 ranks: \d of 2 ranks failed\n")
        self.assertIn("rank 1 raised KeyError: 'no such key'", text)
        self.assertIn('raise KeyError("no such key")', text)
        self.assertRegex(text, r"rank 0 was still running; it was here:\n(.*\n)*.*ranks_cases.py\", line \d+ in raises")
        self.assertIn("output of rank 1:\n    about to fail", text)
        self.assertEqual([r.state for r in caught.exception.results], ["waiting", "raised"])

    def test_a_rank_that_dies_is_named(self):
        with self.assertRaisesRegex(RanksFailed, "rank 1 ended with signal 9"):
            run_ranks(2, ranks_cases.dies)

    def test_at_the_deadline_stacks_are_shown_and_nothing_is_left(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaises(RanksFailed) as caught:
                run_ranks(2, ranks_cases.hangs, folder, deadline=2)
            self.assertEqual([p for p in left(folder) if not gone(p)], [])
        text = str(caught.exception)
        self.assertIn("hangs on 2 ranks: 2 of 2 ranks failed\nrank 0 had not returned after 2 s; it was here:\n", text)
        self.assertRegex(text, r"distributed_c10d.py\", line \d+ in recv\n(.*\n)*.*in waits_for_nobody\n.*in hangs")

    def test_no_process_outlives_an_interrupt_or_a_kill(self):
        for number in (signal.SIGINT, signal.SIGKILL):
            with self.subTest(number), tempfile.TemporaryDirectory() as folder:
                env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
                job = subprocess.Popen([sys.executable, ranks_cases.__file__, folder], env=env, stderr=subprocess.DEVNULL)
                end = time.monotonic() + 120
                while not all(os.path.exists(os.path.join(folder, n)) and os.path.getsize(os.path.join(folder, n)) for n in ("0", "1")):
                    self.assertLess(time.monotonic(), end)
                    self.assertIsNone(job.poll())
                    time.sleep(0.02)
                templates = [parent(pid) for pid in left(folder)[::2]]
                job.send_signal(number)
                job.wait(END)
                pids = left(folder)
                if number == signal.SIGKILL:  # what ranks started is theirs to end
                    for pid in pids[1::2]:
                        os.kill(pid, signal.SIGKILL)
                self.assertEqual([p for p in pids + templates if not gone(p)], [])

    def test_templates_are_kept_and_replaced(self):
        first = run_ranks(2, ranks_cases.template)
        self.assertNotIn(os.getpid(), first)
        self.assertEqual(run_ranks(2, ranks_cases.template), first)
        os.kill(first[1], signal.SIGKILL)
        self.assertTrue(gone(first[1]))
        second = run_ranks(2, ranks_cases.template)
        self.assertEqual(second[0], first[0])
        self.assertNotEqual(second[1], first[1])
        third = run_ranks(2, ranks_cases.template, environment={"OMP_NUM_THREADS": "2"})
        self.assertTrue(set(third).isdisjoint(second), "its environment is another one")

    def test_what_cannot_run_on_ranks_is_refused(self):
        for function, words in [(lambda: None, "must be defined at the top of a module"), (len, "must be written in a file")]:
            with self.assertRaisesRegex(ValueError, words):
                run_ranks(1, function)
        with self.assertRaisesRegex(ValueError, "at least 1 rank"):
            run_ranks(0, ranks_cases.raises)
        with self.assertRaisesRegex(ValueError, "expects numbers of ranks"):
            ranks()
        with self.assertRaisesRegex(RanksFailed, "rank 0 raised .*pickle"):
            run_ranks(1, ranks_cases.returns_what_cannot_be_sent)

    def test_pytest_runs_a_test_for_each_number_of_ranks(self):
        if importlib.util.find_spec("pytest") is None:
            self.skipTest("the Python of LIBTORCH has no pytest")
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--rootdir", HERE, os.path.join(HERE, "pytest_cases.py")]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        self.assertIn("1 failed, 3 passed, 1 skipped", done.stdout)
        self.assertRegex(done.stdout, r"PASSED .*::test_sum\[1-ranks\]\n")
        self.assertRegex(done.stdout, r"PASSED .*::TestMethods::test_parameter\[.*2-ranks.*\]\n")
        self.assertIn("rank 1 raised AssertionError: rank 1 is not rank 0", done.stdout)
        self.assertRegex(done.stdout, r"output of rank 0:\n +said before")

    def test_the_package_says_what_is_missing(self):
        with self.assertRaisesRegex(ImportError, "expected at /nowhere, but there is no such file: build it with"):
            annulus.attention
        with self.assertRaises(AttributeError):
            annulus.nothing


if __name__ == "__main__":
    torch_python.main()
