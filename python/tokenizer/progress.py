"""Shows the progress of tokenizing: on a terminal one line that is overwritten, elsewhere a line every ten seconds.
ANNULUS_PROGRESS and ANNULUS_COLUMNS change this as for training (docs/reference/subcommands.md). Used by work.py."""

import os
import shutil
import sys
import time

from errors import USAGE, Refused


def counted(number, noun):
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_text(number):
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000


def duration_text(seconds):
    seconds = int(seconds + 0.5)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


class Progress:
    EVERY = {"live": 0.2, "plain": 10.0, "none": float("inf")}

    def __init__(self, total, done):
        """`total`: bytes to read; `done`: those of them that an earlier call has read."""
        asked = os.environ.get("ANNULUS_PROGRESS", "")
        if asked not in ("", *self.EVERY):
            raise Refused(USAGE, f"ANNULUS_PROGRESS: expected live, plain or none, got \"{asked}\"")
        terminal = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self.mode = asked or ("live" if terminal else "plain")
        self.total, self.done, self.before = total, done, done
        self.began = self.said = time.monotonic()
        self.shown = False

    def update(self, cost, tokens, shards):
        self.done += cost
        now = time.monotonic()
        if now - self.said < self.EVERY[self.mode]:
            return
        self.said = now
        rate = (self.done - self.before) / max(now - self.began, 1e-9)
        line = (f"tokenize  {bytes_text(self.done)} of {bytes_text(self.total)}  {counted(tokens, 'token')}  "
                f"{counted(shards, 'shard')}  {bytes_text(rate)}/s")
        if rate > 0:
            line += f"  {duration_text(max(0, self.total - self.done) / rate)} left"
        if self.mode == "live":
            columns = os.environ.get("ANNULUS_COLUMNS", "")
            width = int(columns) if columns.isdigit() and int(columns) else shutil.get_terminal_size().columns
            print("\r\033[K" + line[:width - 1], end="", flush=True)
            self.shown = True
        else:
            print(line, flush=True)

    def end(self):
        """Removes the live line, so that the next output begins on an empty line."""
        if self.shown:
            print("\r\033[K", end="", flush=True)
            self.shown = False
