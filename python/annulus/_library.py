"""Finds and loads the shared library that registers torch.ops.annulus. Used by every other module of the package.

The library is ANNULUS_TORCH_LIBRARY if that is set, else the file in the package, as in a wheel, else the one that
`./annulus torch` built in the clone that contains this package.
"""

import atexit
import gc
import mmap
import os
import re
from typing import cast

import torch

from ._ops import Operators

_HERE = os.path.dirname(os.path.abspath(__file__))
_BUILT = os.path.join(_HERE, "..", "..", ".bazel", "bin", "python", "ops", "libannulus_torch.so")

try:
    from ._built import TORCH, VERSION  # written into a wheel by tools/wheel/wheel.py

    __version__ = VERSION
except ImportError:
    TORCH, __version__ = None, "0+clone"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _cuda_of(file: str) -> str | None:
    """Returns the major version of the CUDA runtime that a library links; None if it links none."""
    with open(file, "rb") as library, mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content:
        name = re.search(rb"\0libcudart\.so\.(\d+)\0", content)
        return name.group(1).decode() if name else None


def path() -> str:
    """Returns the path of the library's file, which need not exist."""
    packed = os.path.join(_HERE, "libannulus_torch.so")
    default = packed if os.path.exists(packed) else os.path.normpath(_BUILT)
    return os.path.realpath(os.environ.get("ANNULUS_TORCH_LIBRARY") or default)


def _register() -> None:
    own = "ANNULUS_TORCH_LIBRARY" not in os.environ
    if own and TORCH is not None and _minor(torch.__version__) != _minor(TORCH):
        raise ImportError(
            f"this wheel of annulus {__version__} was built for torch {_minor(TORCH)}, but torch {torch.__version__} is "
            f"installed: their binary interfaces differ. Install torch {_minor(TORCH)}.*, or the wheel of annulus that was "
            f"built for torch {_minor(torch.__version__)}"
        )
    file = path()
    if not os.path.exists(file):
        raise ImportError(
            f"the library of annulus was expected at {file}, but there is no such file: build it with `./annulus torch`, "
            "or set ANNULUS_TORCH_LIBRARY to its path"
        )
    if file in torch.ops.loaded_libraries:
        return
    # Otherwise two CUDA versions would be loaded, or one would be missing, with an obscure error.
    cuda, own = _cuda_of(file), torch.version.cuda
    if cuda is not None and (own is None or own.split(".")[0] != cuda):
        raise ImportError(
            f"the library of annulus, {file}, was built for CUDA {cuda}, but torch {torch.__version__} is for "
            f"{'CPUs only' if own is None else 'CUDA ' + own}: install a torch for CUDA {cuda}, or build annulus against "
            "this torch: `LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])') ./annulus torch`"
        )
    try:
        torch.ops.load_library(file)
    except OSError as error:
        raise ImportError(
            f"the library of annulus, {file}, does not load into torch {torch.__version__}: {error}. Build it against "
            "this torch: `LIBTORCH=$(python3 -c 'import torch; print(torch.__path__[0])') ./annulus torch`"
        ) from error
    atexit.register(_release_ended_groups)


def _release_ended_groups() -> None:
    """Ends the threads of destroyed process groups while they can still release Python tensors."""
    gc.collect()  # frees modules that hold a group in a reference cycle, as FSDP's do
    torch.ops.annulus.release_ended_groups()


def load(timeout: float | None = None) -> Operators:
    """Returns torch.ops.annulus, the operators themselves, with the signatures that `Operators` has.

    timeout: the deadline of an operation between ranks in seconds, from 0.1 to 31536000 (a year). The default is
        ANNULUS_TIMEOUT, or 300 if that is unset. Raises AnnulusError for other numbers.
    """
    from ._errors import errors

    if timeout is not None:
        with errors():
            torch.ops.annulus.set_timeout(timeout)
    return cast(Operators, torch.ops.annulus)


_register()
