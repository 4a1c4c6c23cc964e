"""A network and a process table of a test's own: what it starts ends with it, and its addresses and ports are nobody else's.

Used by hosts.py and slurm.py. A test calls isolate() first of all, before it has threads or opens anything.
What a host needs besides (Slurm) is asked for by its own module.
"""

import os
import subprocess
import sys

_MARK = "ANNULUS_TEST_NAMESPACES"
_SPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]


def _ways():
    if os.geteuid() == 0:
        yield []
    # Who is not root, or is root of a container without the right to, becomes root of a user namespace.
    yield ["--user", "--map-root-user"]


def _ip(*words):
    subprocess.run(["ip", *words], check=True)


def isolate():
    """Starts this program again in namespaces of its own; where none can be made, ends it as a test that skips itself."""
    if os.environ.pop(_MARK, ""):
        # A card beside the loopback: the resolver and Open MPI take a host that has none for one without a network.
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
    print("SKIPPED, A FAILURE IN CI: no namespaces can be made here: " + "; ".join(why))
    sys.exit(0)
