#!/usr/bin/env python3
"""Tests torch.ops.annulus over process groups of gloo: starts the ranks of torch_groups.py and torch_hosts.py with torchrun.

    torch_groups_test.py CASE[,CASE...] RANKS TORCH_ROOT
"""

import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE)]
import torch_python  # noqa: E402

torch_python.enter()

os.environ["ANNULUS_TORCH_LIBRARY"] = os.path.join(os.getcwd(), "python", "ops", "libannulus_torch_wheel.so")
RANK = os.path.join(HERE, "torch_groups.py")
DEADLINE = 60  # seconds until the remaining ranks must have raised


def by_torchrun(ranks, *program):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run(run, env=env).returncode


def hosts(ranks):
    """Gives each two ranks a host name of their own, by which annulus tells hosts apart."""
    spaces = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if subprocess.run([*spaces, "hostname", "host0"], capture_output=True).returncode:
        print("SKIPPED: the system does not let a test have host names of its own")
        return 0
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # no address has these names
    named = ["sh", "-c", 'hostname "host$((LOCAL_RANK / 2))" && exec "$0" "$@"', sys.executable]
    return by_torchrun(ranks, "--no-python", *spaces, *named, os.path.join(HERE, "torch_hosts.py"))


def killed(ranks):
    """Runs the case `killed` without torchrun, which would end all ranks when one is gone."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), RANK=str(rank), WORLD_SIZE=str(ranks))
            env["STORE"] = os.path.join(folder, "store")
            children.append(subprocess.Popen([sys.executable, RANK, "killed"], env=env))
        try:
            assert children[-1].wait() == -signal.SIGKILL, children[-1].returncode
            until = time.monotonic() + DEADLINE
            return max(child.wait(timeout=max(0, until - time.monotonic())) for child in children[:-1])
        finally:
            for child in children:
                child.kill()


if __name__ == "__main__":
    case, ranks = sys.argv[1], int(sys.argv[2])
    run = {"killed": killed, "hosts": hosts}.get(case, lambda ranks: by_torchrun(ranks, RANK, case))
    sys.exit(run(ranks))
