"""Functions that ranks_test.py runs on ranks, and a program that it interrupts."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def total(x, factor=1):
    """Adds up x times the rank over all ranks, and says so."""
    t = torch.tensor(float(x * dist.get_rank() * factor))
    dist.all_reduce(t)
    print(f"I am {dist.get_rank()}")
    return t.item(), dist.get_world_size(), os.getpid()


def raises():
    if dist.get_rank() == 1:
        print("about to fail", file=sys.stderr)
        raise KeyError("no such key")
    dist.barrier()


def template():
    return os.getppid()


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


def hangs(folder):
    """Every rank leaves its number and that of a process that it started, and rank 0 waits for nobody."""
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    waits_for_nobody(folder)


def waits_for_nobody(folder):
    if dist.get_rank() == 0:
        dist.recv(torch.empty(1), 1)
    while not os.path.exists(os.path.join(folder, "end")):
        time.sleep(0.01)


def returns_what_cannot_be_sent():
    return lambda: None


if __name__ == "__main__":
    from annulus.testing import run_ranks

    run_ranks(2, hangs, sys.argv[1], deadline=100)
