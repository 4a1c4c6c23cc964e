"""AnnulusError, with which the library's errors are raised in Python. Used by the other modules of the package."""

import contextlib
import re
from collections.abc import Iterator

_OWN = re.compile(r"\[[a-z_/ ]+\] ")  # the text of an annulus::Error begins with its module


class AnnulusError(RuntimeError):
    """An error of annulus: "[module] what was expected, what came, what to do"."""


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Converts the library's errors, which reach Python as RuntimeError, to AnnulusError. Other errors pass unchanged.

    Use it around backward and compiled calls, which this package does not wrap:

        with annulus.errors():
            loss.backward()
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AnnulusError) or not _OWN.match(str(error)):
            raise
        raise AnnulusError(str(error)) from None
