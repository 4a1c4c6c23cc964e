"""Follows a run's metrics.jsonl while lines are added to it, and removed: a run that returns to a checkpoint, or is resumed
from one, replaces the file by one without the lines of later steps (runtime/run/metrics.h)."""

import hashlib
import json
import os
from dataclasses import dataclass


@dataclass
class Line:
    """A line was added."""
    step: int
    values: dict


@dataclass
class Removed:
    """All lines from a step on were removed."""
    step: int


def step_and_values(raw):
    """The step and the object of a line, or None if it is not one of metrics."""
    try:
        values = json.loads(raw)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return (step, values) if isinstance(step, int) and not isinstance(step, bool) else None


def whole_lines(f):
    """The lines from here on, without an incomplete last one: another process may be writing it."""
    return [raw for raw in f if raw.endswith(b"\n")]


class Tail:
    """Not thread safe. `damaged` counts lines that are not metrics."""

    def __init__(self, path):
        self.path = path
        self.damaged = 0
        self.half = False  # whether the file went on behind its last whole line when it was read
        self._taken = []  # (step or None, digest up to and with this line) of each line, the second from line to line
        self._offset = 0  # bytes of whole lines that were taken
        self._inode = None

    def position(self):
        """What restores this place in another process (resume())."""
        return {"lines": len(self._taken), "digest": self._taken[-1][1] if self._taken else ""}

    def resume(self, position):
        """Goes to a place that position() gave, if the file still begins as it did. Returns whether it does."""
        count = position.get("lines") if isinstance(position, dict) else None
        with self._opened() as f:
            lines = whole_lines(f)
        if not isinstance(count, int) or not 0 <= count <= len(lines):
            return False
        for raw in lines[:count]:
            self._take(raw)
        if self.position() == position:
            return True
        self.__init__(self.path)
        return False

    def poll(self):
        """What has changed since the last call: a list of Line and Removed, in order."""
        changes = []
        with self._opened() as f:
            status = os.fstat(f.fileno())
            if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                changes += self._replaced(whole_lines(f))
            self._inode = status.st_ino
            f.seek(self._offset)
            for raw in whole_lines(f):
                changes += self._take(raw)
            self.half = f.tell() > self._offset
        return changes

    def lines(self):
        """All lines up to this place again: a list of Line."""
        with self._opened() as f:
            found = map(step_and_values, f.read(self._offset).splitlines())
        return [Line(*one) for one in found if one]

    def _opened(self):
        try:
            return open(self.path, "rb")
        except FileNotFoundError:  # the run has not begun to train
            return open(os.devnull, "rb")

    def _replaced(self, lines):
        """Goes back to the last line that both files begin with."""
        taken, self._taken, self._offset = self._taken, [], 0
        for raw, (_, digest) in zip(lines, taken):
            if self._digest(raw) != digest:
                break
            self._take(raw, count=False)
        gone = [step for step, _ in taken[len(self._taken):] if step is not None]
        return [Removed(min(gone))] if gone else []

    def _digest(self, raw):
        before = self._taken[-1][1] if self._taken else ""
        return hashlib.blake2b(before.encode() + raw, digest_size=16).hexdigest()

    def _take(self, raw, count=True):
        digest = self._digest(raw)
        found = step_and_values(raw)
        self._taken.append((found[0] if found else None, digest))
        self._offset += len(raw)
        self.damaged += count and found is None
        return [Line(*found)] if found else []
