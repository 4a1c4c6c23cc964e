"""How exact results must be, for tests in Python. tests/common/exactness.h gives the reasons."""

import torch

# Of fp64 results that are equal by mathematics, relative to the magnitudes of what is added up.
EXACT = 1e-12

# How many times the error of a plain computation is allowed.
MULTIPLE = 4


def largest(t):
    return t.detach().abs().max().item() if t.numel() else 0.0


def error(got, want):
    """Returns the largest difference, or infinity if shapes differ or a number is not finite."""
    if got.shape != want.shape:
        return float("inf")
    difference = (got.detach().double() - want.detach().double()).abs()
    return largest(difference.nan_to_num(float("inf")))


def agree(got, want, what="", terms=None):
    """Asserts that results in fp64 are equal up to the rounding of sums of magnitude `terms`, by default of the largest
    element or of 1."""
    allowed = EXACT * (max(1, largest(want)) if terms is None else terms)
    assert error(got, want) <= allowed, (what, f"off by {error(got, want):.2g}, allowed are {allowed:.2g}")


def as_exact(got, usual, exact, what="", terms=None, dtype=None):
    """Asserts that the error of `got` is at most MULTIPLE times that of `usual`, the same computation done plainly in the
    same dtype, and one rounding of `terms`, by default of the largest element. It was computed in `dtype`, by default its
    own or that of `usual`."""
    unit = max(torch.finfo(d).eps for d in ([dtype] if dtype else [got.dtype, usual.dtype])) / 2
    allowed = MULTIPLE * (error(usual, exact) + unit * (largest(exact) if terms is None else terms))
    assert error(got, exact) <= allowed, (what, f"off by {error(got, exact):.2g}, allowed are {allowed:.2g}")
