"""Tests that ranks_test.py gives to pytest: three pass, one fails, and one is skipped."""

import pytest
import torch
import torch.distributed as dist
from annulus.testing import ranks


@ranks(1, 2)
def test_sum(tmp_path, ranks):
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == ranks == dist.get_world_size() and tmp_path.exists()


@ranks(2)
def test_fails():
    print("said before")
    assert dist.get_rank() == 0, "rank 1 is not rank 0"


class TestMethods:
    @ranks(2)
    @pytest.mark.parametrize("word", ["one"])
    def test_parameter(self, word):
        assert word == "one" and isinstance(self, TestMethods)

    @ranks(2)
    def test_skips(self):
        pytest.skip("nothing to see")
