"""Finds and opens the files that a user names. Used by inputs.py and by all that read a tokenizer or a description of shards.

Nothing here waits for the writer of a pipe, and nothing that a glob matches is passed over: what is neither a file nor a
folder is refused by name.
"""

import glob
import os
import stat

from errors import INPUT, Refused, unreadable

KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe (FIFO)"), (stat.S_ISSOCK, "a socket"))


def require_file(path, status):
    """Refuses what is not a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for test, words in KINDS if test(status.st_mode)), "a device")
        raise Refused(INPUT, f"{path} is {kind}, but a file is expected")


def open_file(path):
    """Opens a regular file to read its bytes. Raises OSError, and Refused for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        require_file(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def matches(pattern):
    """Returns the paths of a glob, sorted, without folders. Raises Refused if there is none, and for folders and links that
    the glob would pass over because they cannot be read."""
    if os.path.lexists(pattern):  # a file may have any name, also one that looks like a glob
        if os.path.isdir(pattern):
            raise Refused(INPUT, f"--input {pattern} is a folder: name its files, --input '{pattern.rstrip('/')}/**'")
        return [pattern]
    parts = pattern.split("/")
    for n in range(1, len(parts) + (parts[-1] == "**")):
        above = "/".join(parts[:n])
        if glob.has_magic(above) and "**" not in parts[:n]:
            for path in glob.glob(above):
                try:
                    os.stat(path)
                except OSError as error:
                    raise unreadable(path, error)
        listed = n == len(parts) or glob.has_magic(parts[n]) or "**" in parts[:n]
        for folder in glob.glob(above + "/", recursive=True):
            if not os.access(folder, os.X_OK | (os.R_OK if listed else 0)):
                raise Refused(INPUT, f"--input {pattern} looks into {folder}, which cannot be read: Permission denied")
    found = [path for path in sorted(glob.glob(pattern, recursive=True)) if not os.path.isdir(path)]
    if not found:
        raise Refused(INPUT, f"--input {pattern} matches no file")
    return found
