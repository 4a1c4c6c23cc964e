"""Errors with an exit code, those of common/error.h."""

USAGE, INPUT, BUSY, RESOURCE, UNAVAILABLE = 2, 3, 7, 8, 9


class Refused(Exception):
    """What the user is told, and the exit code."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code
