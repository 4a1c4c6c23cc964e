#!/usr/bin/env python3
"""Tests that a run whose ranks lend each other blocks, and which saves behind training, stays as large as it was: the resident
memory, the descriptors and the mapped files of /dev/shm of each rank. --steps=N: until which step, 60 by default."""

import json
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

STEPS = next((int(w.partition("=")[2]) for w in sys.argv if w.startswith("--steps=")), 60)
EARLY, WINDOW = 20, 10  # steps; each window has a checkpoint
SECONDS_A_STEP = 2  # from which on a step counts as hung
MIB = 1 << 20


def read(path):
    with open(path, "rb") as f:
        return f.read()


def sizes(pid):
    return {"resident": int(read(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGESIZE"),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "mapped from /dev/shm": read(f"/proc/{pid}/maps").count(b" /dev/shm/")}


class FlatMemoryTest(cli.CliTest):
    def lines(self, last_bytes=0):
        """The whole lines of metrics: all, or those in the last bytes of the file."""
        try:
            with open(self.path("runs/tiny-001/metrics.jsonl"), "rb") as f:
                size = f.seek(0, os.SEEK_END)
                begin = f.seek(max(0, size - last_bytes) if last_bytes else 0)
                return [json.loads(line) for line in f.read().split(b"\n")[begin > 0:-1]]
        except FileNotFoundError:
            return []

    def in_window(self, pids, begin):
        """What the ranks had in WINDOW steps from step `begin` on: (least, most) by rank and size."""
        until, seen, step = time.monotonic() + cli.LIMIT + SECONDS_A_STEP * STEPS, [[] for _ in pids], 0
        while step < begin + WINDOW or not seen[0]:
            self.assertLess(time.monotonic(), until, f"step {begin + WINDOW} was never made")
            step = max((line["step"] for line in self.lines(last_bytes=1 << 15)), default=0)
            if step >= begin:
                for rank, pid in enumerate(pids):
                    seen[rank].append(sizes(pid))
            time.sleep(0.02)
        return [{key: (min(s[key] for s in rank), max(s[key] for s in rank)) for key in rank[0]} for rank in seen]

    def test_stays_as_large_as_it_was(self):
        cli.write_tiny_run(self.folder, 10 ** 9, data={"context": 1024, "batch": 1}, checkpoint={"every": 10},
                           model={"layers": 2, "dim": 64, "heads": 2, "recompute": True}, optimizer={"lr": 0.001, "shard": 3})
        running = self.start("launch", "-n", "2", "train", "config.toml")
        running.wait_for("run folder")
        pids = [p for p in cli.processes_with(running.mark) if b"OMPI_COMM_WORLD_RANK=" in read(f"/proc/{p}/environ")]
        self.assertEqual(len(pids), 2)
        early, late = self.in_window(pids, EARLY), self.in_window(pids, STEPS)
        running.signal(signal.SIGINT)
        running.finish()
        self.assertIn("lent blocks", {name for line in self.lines() for name in line.get("pool", {})})
        print(f"steps {EARLY} to {EARLY + WINDOW}: {early}\nsteps {STEPS} to {STEPS + WINDOW}: {late}")
        for before, after in zip(early, late, strict=True):
            # A save under way has a file open.
            for key in ("descriptors", "mapped from /dev/shm"):
                self.assertLessEqual(after[key][0], before[key][1], key)
            # A rank that is ahead of the other holds some blocks more.
            self.assertLessEqual(after["resident"][1], before["resident"][1] + 8 * MIB)


if __name__ == "__main__":
    cli.main()
