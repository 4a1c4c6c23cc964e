"""The main function of tests in Python that take long: several processes run a part of the cases each. Bazel starts them (shard_count),
or a test whose imports take seconds, as those of torch and transformers do, forks them once it has these (`workers`). Used by cli.py,
by tests of python/ops/ and by those of python/tokenizer/."""

import os
import shutil
import signal
import sys
import tempfile
import unittest


class Shard(unittest.TestLoader):
    """Loads the cases of this process: of each class every n-th one."""

    def __init__(self, shards, shard):
        super().__init__()
        self.part = slice(shard, None, shards)

    def getTestCaseNames(self, case):
        return super().getTestCaseNames(case)[self.part]


def _run(shards, shard, **how):
    return unittest.main(argv=[sys.argv[0]], verbosity=2, testLoader=Shard(shards, shard), **how)


def _fork(workers):
    """Runs the cases in so many processes, prints what each has said, and ends with 1 if one failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of Bazel, after which what was said is still printed
    started, codes = [], []
    try:
        for worker in range(workers):
            said = tempfile.TemporaryFile()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    for stream in (1, 2):
                        os.dup2(said.fileno(), stream)
                    code = 0 if _run(workers, worker, exit=False).result.wasSuccessful() else 1
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(code)
            started.append((pid, said))
        for pid, _ in started:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        for pid, _ in started[len(codes):]:
            os.kill(pid, signal.SIGTERM)
        for _, said in started:
            said.seek(0)
            shutil.copyfileobj(said, sys.stdout.buffer)
        sys.stdout.flush()
    for worker, code in enumerate(codes):
        if code not in (0, 1):
            print(f"worker {worker} ended with {code}", file=sys.stderr)
    sys.exit(1 if any(codes) else 0)


def main(workers=1):
    if "TEST_SHARD_STATUS_FILE" in os.environ:  # it tells Bazel that the processes divide the cases
        open(os.environ["TEST_SHARD_STATUS_FILE"], "w").close()
    if workers > 1:
        _fork(workers)
    _run(*(int(os.environ.get(name, default)) for name, default in (("TEST_TOTAL_SHARDS", 1), ("TEST_SHARD_INDEX", 0))))
