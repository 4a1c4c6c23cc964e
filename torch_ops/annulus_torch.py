"""Loads annulus into PyTorch: `import annulus_torch; annulus = annulus_torch.load()` gives torch.ops.annulus.

The library is found in ANNULUS_TORCH_LIBRARY, or where `./annulus torch` built it. See docs/embedding.md.
"""

import os

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))


def load(library=None, timeout=None):
    """torch.ops.annulus, with the operators attention, all_reduce, rank and size.

    timeout: seconds that an operation between ranks may take; by default ANNULUS_TIMEOUT, else 300.
    """
    library = library or os.environ.get("ANNULUS_TORCH_LIBRARY")
    library = library or os.path.join(_HERE, "..", ".bazel", "bin", "torch_ops", "libannulus_torch.so")
    if not os.path.exists(library):
        raise FileNotFoundError(
            f"no {os.path.normpath(library)}: build it with `./annulus torch`, or set ANNULUS_TORCH_LIBRARY"
        )
    if os.path.realpath(library) not in torch.ops.loaded_libraries:
        torch.ops.load_library(os.path.realpath(library))
    if timeout is not None:
        torch.ops.annulus.set_timeout(timeout)
    return torch.ops.annulus
