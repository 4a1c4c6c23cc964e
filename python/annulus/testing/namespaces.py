"""Gives a test its own network and process table: the processes that it starts end with it, and no other test has its
addresses and ports.

For a test that is a program of its own, for example with hosts.py. It calls isolate() before anything else, while it has no
threads and no open files. Needs Linux, unshare of util-linux and ip of iproute2.
"""

import os
import subprocess
import sys

_MARK = "ANNULUS_TEST_NAMESPACES"
_SPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]


def _ways():
    if os.geteuid() == 0:
        yield []
    # A user who is not root, or root in a container without the permission, becomes root of a user namespace.
    yield ["--user", "--map-root-user"]


def _ip(*words):
    subprocess.run(["ip", *words], check=True)


def isolate(otherwise="SKIPPED"):
    """Starts this program again in namespaces of its own. If none can be made here, prints `otherwise` with the reason and
    exits with code 0."""
    if os.environ.pop(_MARK, ""):
        # Adds a network card, because the resolver and Open MPI treat a host with the loopback only as one without network.
        _ip("link", "add", "eth0", "type", "veth", "peer", "name", "wire")
        _ip("addr", "add", "10.231.8.1/24", "dev", "eth0")
        for card in ("lo", "eth0", "wire"):
            _ip("link", "set", card, "up")
        return
    why = []
    for user in _ways():
        command = ["unshare", *user, *_SPACES]
        try:
            tried = subprocess.run([*command, "ip", "link"], capture_output=True, text=True)
        except FileNotFoundError as error:
            why.append(str(error))
            break
        if tried.returncode == 0:
            os.environ[_MARK] = "1"
            sys.stdout.flush()
            os.execvp("unshare", [*command, sys.executable, *sys.argv])
        why.append(f"`{' '.join(command)}`: {tried.stderr.strip()}")
    print(f"{otherwise}: namespaces cannot be made on this machine: " + "; ".join(why))
    sys.exit(0)
