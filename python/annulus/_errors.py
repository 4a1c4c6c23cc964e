"""The error that annulus raises in Python, with the text that the library gives. Used by every module of the
package."""

import contextlib
import re
from collections.abc import Iterator

_OWN = re.compile(r"\[[a-z_/ ]+\] ")  # the room that an annulus::Error names first


class AnnulusError(RuntimeError):
    """What annulus refuses: "[room] what was expected, what came, what to do"."""


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Raises the library's errors, which reach Python as RuntimeError, as AnnulusError. All others pass.

    For backward and compiled calls, which this package does not see:

        with annulus.errors():
            loss.backward()
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AnnulusError) or not _OWN.match(str(error)):
            raise
        raise AnnulusError(str(error)) from None
