"""Loads annulus into PyTorch: `import annulus_torch; annulus = annulus_torch.load()` gives torch.ops.annulus.

The library is found in ANNULUS_TORCH_LIBRARY, or where `./annulus torch` built it. See docs/embedding.md.
"""

import os
import sys

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))


def _end_with_the_others(hook):
    """After an error nobody caught, this process does not wait for the other ranks at its end: mpirun then ends them."""

    def report(*error):
        hook(*error)
        sys.stderr.flush()
        # Libraries print errors that they have dealt with through this hook, too (PyTorch, where it misses NumPy); an
        # error that ends the program has no caller left.
        if sys._getframe().f_back is None:
            torch.ops.annulus.abandon()

    return report


def load(library=None):
    """torch.ops.annulus, with the operators attention, all_reduce, rank and size."""
    library = library or os.environ.get("ANNULUS_TORCH_LIBRARY")
    library = library or os.path.join(_HERE, "..", ".bazel", "bin", "torch_ops", "libannulus_torch.so")
    if not os.path.exists(library):
        raise FileNotFoundError(
            f"no {os.path.normpath(library)}: build it with `./annulus torch`, or set ANNULUS_TORCH_LIBRARY"
        )
    if os.path.realpath(library) not in torch.ops.loaded_libraries:
        torch.ops.load_library(os.path.realpath(library))
        sys.excepthook = _end_with_the_others(sys.excepthook)
    return torch.ops.annulus
