"""What the program refuses, with the exit code that it ends with (docs/user-guide.md, "Exit codes"). Used by all files."""

INTERNAL, USAGE, INPUT, BUSY, RESOURCE, UNAVAILABLE = 1, 2, 3, 7, 8, 9


class Refused(Exception):
    """Something that the user can act on: one sentence, and the exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code

    def __reduce__(self):  # workers send theirs through a pipe
        return Refused, (self.code, str(self))


def unreadable(path, error):
    """A file that could not be opened or read: input where it is not there, a resource where it may not be read."""
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    return Refused(INPUT if missing else RESOURCE, f"{path} cannot be read: {error.strerror or error}")
