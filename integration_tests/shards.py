"""The main function of tests in Python that take long: if Bazel divides a test among several processes (shard_count), each
of them runs a part of the cases. Used by cli.py, by tests of python/ops/ and by those of python/tokenizer/."""

import os
import sys
import unittest


class Shard(unittest.TestLoader):
    """Loads the cases of this process: of each class every n-th one."""

    def getTestCaseNames(self, case):
        shards, shard = (int(os.environ.get(name, default)) for name, default in
                         (("TEST_TOTAL_SHARDS", 1), ("TEST_SHARD_INDEX", 0)))
        return super().getTestCaseNames(case)[shard::shards]


def main():
    if "TEST_SHARD_STATUS_FILE" in os.environ:  # it tells Bazel that the processes divide the cases
        open(os.environ["TEST_SHARD_STATUS_FILE"], "w").close()
    unittest.main(argv=[sys.argv[0]], verbosity=2, testLoader=Shard())
