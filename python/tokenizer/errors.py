"""Errors of the program with their exit codes (docs/how-to/troubleshooting.md, "Exit codes"). Used by most files of this folder."""

INTERNAL, USAGE, INPUT, BUSY, RESOURCE, UNAVAILABLE = 1, 2, 3, 7, 8, 9


class Refused(Exception):
    """An error that the user can act on: one sentence, and the exit code of the program."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code

    def __reduce__(self):  # makes it picklable, because workers send it through a pipe
        return Refused, (self.code, str(self))


def unreadable(path, error):
    """Returns the error for a file that cannot be read: INPUT if it is missing or a folder, otherwise RESOURCE."""
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    return Refused(INPUT if missing else RESOURCE, f"{path} cannot be read: {error.strerror or error}")
