"""Carries what a run writes to viewers: reads metrics.jsonl as it grows and shrinks (tail.py), and gives its numbers, texts and
pictures to sinks (event_files.py, wandb_records.py)."""

import datetime
import fcntl
import os
import signal
import sys
import time

import texts
from errors import BUSY, Refused
from scalars import scalars
from tail import Removed, Tail

POLL_SECONDS = 2.0


def run_is_locked(run):
    """Whether a process of this host holds the run's lock, without taking it: as run_is_locked() of runtime/report/run_files.h."""
    try:
        inode = f":{os.stat(os.path.join(run, 'lock')).st_ino} "
        with open("/proc/locks") as f:
            return any("FLOCK" in line and "->" not in line and inode in line for line in f)
    except OSError:
        return False


class Follower:
    """One run and its sinks. Not thread safe."""

    def __init__(self, run, sinks, version=""):
        """`version`: of this program; runs of another one are said. Empty: it is not known."""
        self.run, self.sinks, self.version = run, sinks, version
        self.path = os.path.join(run, "metrics.jsonl")
        self.tail = Tail(self.path)
        self.step = 0           # of the last line
        self._shown = {}        # what was shown last, by name: the configuration's text, a picture's time
        self._begun_at = None   # when the newest process began to train, in seconds since 1970
        self._second = 0.0      # seconds since then
        self._others = set()    # the other versions that were said

    def begin(self):
        # Sinks that can go on behind what they wrote do so, if all of them can.
        position = self.sinks[0].state.get("position") if len(self.sinks) == 1 else None
        on = bool(position) and self.tail.resume(position)
        if on:
            self._shown = self.sinks[0].state.get("shown", {})
            self.step = self.sinks[0].state.get("step", 0)
        for sink in self.sinks:
            sink.begin(anew=not on)

    def poll(self):
        """Carries what is new, and returns how many lines that were."""
        changes = self.tail.poll()
        live = len(changes) == 1
        for at, change in enumerate(changes):
            if not isinstance(change, Removed):
                self._take(change, self.sinks, live)
                continue
            self._for_all(lambda sink: sink.removed(change.step, self._now()))
            self.step = min(self.step, change.step - 1)
            for sink in self.sinks:
                if sink.only_grows:
                    kept = self.tail.lines()
                    self._begin_again(sink, kept[:len(kept) - len(changes[at + 1:])])
        self._show_texts()
        for sink in self.sinks:
            sink.flush()
        return sum(not isinstance(change, Removed) for change in changes)

    def end(self):
        state = {"position": self.tail.position(), "shown": self._shown, "step": self.step}
        for sink in self.sinks:
            sink.end(state)

    def _take(self, line, sinks, live=False):
        self.step = line.step
        self._tell_time(line.values, live)
        self._tell_version(line.values.get("started"))
        now = self._now()
        for sink in sinks:
            sink.scalars(line.step, now, list(scalars(line.values)))
            table = texts.started(line.values)
            if table:
                sink.text(line.step, now, "started", table)

    def _begin_again(self, sink, lines):
        sink.end({})
        sink.begin(anew=True)
        for line in lines:
            sink.scalars(line.step, None, list(scalars(line.values)))

    def _tell_time(self, values, live):
        """Lines have no time of day but the seconds since their process began to train, and the line of a start has its time."""
        start = values.get("started")
        if isinstance(start, dict) and isinstance(start.get("time"), str):
            try:
                self._begun_at = datetime.datetime.fromisoformat(start["time"].replace("Z", "+00:00")).timestamp()
                self._second = 0.0
            except ValueError:
                pass
        second = values.get("seconds")
        if isinstance(second, (int, float)):
            if self._begun_at is None or second < self._second:
                self._begun_at = (time.time() if live else os.path.getmtime(self.path)) - second
            self._second = second

    def _tell_version(self, start):
        version = start.get("version") if isinstance(start, dict) else None
        if not self.version or version in (None, self.version, *self._others):
            return
        self._others.add(version)
        warn(f"the run is of annulus {version}, this program of {self.version}: numbers may have other names, or mean something else")

    def _now(self):
        return (self._begun_at if self._begun_at is not None else time.time()) + self._second

    def _show_texts(self):
        config = texts.configuration(self.run)
        if config is not None and self._shown.get("configuration") != config:
            self._shown["configuration"] = config
            self._for_all(lambda sink: sink.code(self.step, self._now(), "configuration", config))
        for name, path, changed in texts.pictures(self.run):
            if self._shown.get(path) == changed:
                continue
            self._shown[path] = changed
            try:
                data, width, height = texts.png(path)
            except (OSError, ValueError) as error:
                warn(f"{path} is left out: {error}")
                continue
            self._for_all(lambda sink: sink.picture(self.step, self._now(), name, data, width, height))

    def _for_all(self, give):
        for sink in self.sinks:
            give(sink)


def warn(text):
    print(f"annulus: [report] {text}", file=sys.stderr, flush=True)


def hold(run, name):
    """Takes the lock of a viewer's folder, so that one process writes there. Returns the file that holds it."""
    folder = os.path.join(run, name)
    os.makedirs(folder, exist_ok=True)
    lock = open(os.path.join(folder, ".lock"), "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Refused(BUSY, f"another process writes to {folder}: it may be the one that run.tensorboard starts; wait for it to end, "
                            "or stop it") from None
    return lock


class Ending:
    """Whether to end: on SIGTERM or Ctrl-C, and once the run has ended."""

    def __init__(self, run, parent):
        self.run, self.parent, self.asked = run, parent, False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask)

    def _ask(self, *_):
        self.asked = True

    def due(self):
        gone = os.getppid() != self.parent if self.parent else not run_is_locked(self.run)
        return self.asked or gone

    def sleep(self):
        until = time.monotonic() + POLL_SECONDS
        while not self.asked and time.monotonic() < until and not (self.parent and os.getppid() != self.parent):
            time.sleep(0.1)


def follow(run, sinks, goes_on, parent, version=""):
    """Carries what there is, and with `goes_on` all that comes until the run ends (or the process `parent`, if it is not 0)."""
    follower, ending = Follower(run, sinks, version), Ending(run, parent)
    follower.begin()
    count = 0
    try:
        while True:
            last = not goes_on or ending.due()  # before the poll, so that nothing which is written meanwhile is missed
            count += follower.poll()
            if last:
                break
            ending.sleep()
    finally:
        follower.end()
    if follower.tail.damaged:
        warn(f"{follower.tail.damaged} lines of {follower.path} are no metrics, and were left out")
    if follower.tail.half:
        warn(f"{follower.path} ends within a line, which is left out: it is being written, or a process was killed")
    return count
