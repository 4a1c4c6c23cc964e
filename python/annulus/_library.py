"""Finds and loads the shared library that registers torch.ops.annulus. Used by every other module of the package.

It is, in this order, the file that ANNULUS_TORCH_LIBRARY names, the one that lies in the package (a wheel's), or the
one that `./annulus torch` built in the clone that this package lies in.
"""

import os
from typing import Any

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_BUILT = os.path.join(_HERE, "..", "..", ".bazel", "bin", "torch_ops", "libannulus_torch.so")

try:
    from ._built import TORCH, VERSION  # written into a wheel by tools/wheel.py

    __version__ = VERSION
except ImportError:
    TORCH, __version__ = None, "0+clone"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def path() -> str:
    """The library's file, which need not be there."""
    packed = os.path.join(_HERE, "libannulus_torch.so")
    default = packed if os.path.exists(packed) else os.path.normpath(_BUILT)
    return os.path.realpath(os.environ.get("ANNULUS_TORCH_LIBRARY") or default)


def _register() -> None:
    own = "ANNULUS_TORCH_LIBRARY" not in os.environ
    if own and TORCH is not None and _minor(torch.__version__) != _minor(TORCH):
        raise ImportError(
            f"this wheel of annulus {__version__} was built for torch {_minor(TORCH)}, but torch {torch.__version__} is "
            f"installed: their binary interfaces differ. Install torch {_minor(TORCH)}.* beside it, or the wheel of "
            f"annulus that was built for torch {_minor(torch.__version__)}"
        )
    file = path()
    if not os.path.exists(file):
        raise ImportError(
            f"the library of annulus is not in {file}: build it with `./annulus torch`, or name it in "
            "ANNULUS_TORCH_LIBRARY"
        )
    if file in torch.ops.loaded_libraries:
        return
    try:
        torch.ops.load_library(file)
    except OSError as error:
        raise ImportError(
            f"the library of annulus, {file}, does not load into torch {torch.__version__}: {error}. Was it built against "
            "this torch (`LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])') ./annulus torch`)?"
        ) from error


def load(timeout: float | None = None) -> Any:
    """torch.ops.annulus, the operators themselves.

    timeout: seconds that an operation between ranks may take; by default ANNULUS_TIMEOUT, else 300.
    """
    from ._errors import errors

    if timeout is not None:
        with errors():
            torch.ops.annulus.set_timeout(timeout)
    return torch.ops.annulus


_register()
