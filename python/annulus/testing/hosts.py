"""Simulates several hosts on one machine: namespaces with their own host name, network card, process table and /dev/shm, on
one switch. For tests that have called namespaces.isolate().

    from annulus.testing import hosts, namespaces
    namespaces.isolate()

    with hosts.Hosts(["host1", "Host2", "host3"]) as simulated:
        simulated.run([...])         # on the first; mpirun there reaches the others by their names
        simulated.kill("Host2")      # the host is gone, processes and network card at once
        simulated.cut("host3")       # its cable is pulled
        simulated.mend("host3")      # and put back
        simulated.disturb("host3", milliseconds=20, loss=1)     # each way; needs the kernel's netem
        simulated.limit("host3", 1e6)       # bytes in a second, each way; needs the kernel's tbf

mpirun starts processes on other hosts through `agent`, which replaces ssh: it gets a host and words for a shell, and the
shell runs them with the environment of a login. Host I has the address 10.231.7.I. All hosts have this machine's files.
"""

import os
import shutil
import signal
import subprocess
import tempfile

_AGENT = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
pid=$(cat "{folder}/pid.$1" 2>/dev/null) || {{ echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255; }}
kill -0 "$pid" 2>/dev/null || {{ echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }}
tmp={tmp}/$1
time=$(cat "{folder}/time.$1" 2>/dev/null)
mkdir -p "$tmp"
shift
exec env -i PATH="$PATH" HOME="$HOME" TMPDIR="$tmp" nsenter -t "$pid" --net --uts --mount --pid $time -- sh -c "$*"
"""


class Hosts:
    def __init__(self, names, own=None, clocks=None):
        """`own`: what a host calls itself (hostname), for those that go by another name in the list. `clocks`: by how many seconds
        the monotonic clock of a host is ahead of this machine's; not of the first."""
        self.names = list(names)
        self.own = own or {}
        self.clocks = clocks or {}
        if self.clocks.keys() - set(self.names[1:]):
            raise ValueError(f"expected clocks of hosts behind the first one, {self.names[1:]}, got {self.clocks}")
        self.address = {name: f"10.231.7.{i}" for i, name in enumerate(self.names, 1)}

    def __enter__(self):
        self.folder = tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR"))
        # For Open MPI's files of each host, which else lie in /tmp under names that another test's hosts have as well.
        # Their sockets need a short path.
        self._tmp = tempfile.mkdtemp(dir="/tmp")
        self._keepers = {}
        known = "".join(f"{a} {' '.join({n: 0, self.own.get(n, n): 0})}\n" for n, a in self.address.items())
        self._write("hosts", "127.0.0.1 localhost\n" + known)
        self._write("agent", _AGENT.format(folder=self.folder, tmp=self._tmp))
        os.chmod(self._path("agent"), 0o755)
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.wait()
            keeper.stdout.close()
        for folder in (self.folder, self._tmp):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _write(self, name, text):
        with open(self._path(name), "w") as f:
            f.write(text)

    def _start_all(self):
        switch = self._start("switch", ["--net"])
        self._in_network(switch, "link", "add", "br0", "type", "bridge")
        self._in_network(switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.names, 1):
            # The first host keeps this test's process table, in which the agent finds the other hosts.
            first = i == 1
            clock = ["--time", "--monotonic", str(self.clocks[name])] if name in self.clocks else []
            init = self._start(name, ["--net", "--uts", "--mount", *clock] +
                               ([] if first else ["--pid", "--fork", "--kill-child", "--mount-proc"]))
            self._in_network(switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", str(init))
            self._in_network(switch, "link", "set", f"p{i}", "master", "br0", "up")
            self._in_network(init, "addr", "add", f"{self.address[name]}/24", "dev", "eth0")
            self._in_network(init, "link", "set", "eth0", "up")

    def _start(self, name, spaces):
        """Starts a process that keeps the namespaces and returns its pid; when it ends, the host is gone."""
        set_up = "" if name == "switch" else (
            'hostname "$1" && mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind "$2" /etc/hosts && ')
        keeper = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", set_up + "ip link set lo up && echo up && exec sleep infinity", "sh",
             self.own.get(name, name), self._path("hosts")],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._keepers[name] = keeper
        if keeper.stdout.readline() != b"up\n":
            raise RuntimeError(f"the simulated host {name} did not start")
        pid = keeper.pid
        if "--fork" in spaces:
            with open(f"/proc/{pid}/task/{pid}/children") as f:
                pid = int(f.read().split()[0])
        self._write(f"pid.{name}", str(pid))
        self._write(f"pid.{self.address.get(name, 'switch')}", str(pid))
        if name in self.clocks:
            for known in (name, self.address[name]):
                self._write(f"time.{known}", "--time")
        return pid

    @staticmethod
    def _in_network(pid, *words):
        subprocess.run(["nsenter", "-t", str(pid), "--net", "ip", *words], check=True)

    def _pid(self, name):
        with open(self._path(f"pid.{name}")) as f:
            return int(f.read())

    def environment(self):
        """Returns variables that make mpirun use `agent` as ssh and let the ranks of all hosts share this machine's cores."""
        return {
            "OMPI_MCA_plm": "rsh",
            "OMPI_MCA_plm_rsh_agent": self._path("agent"),
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def prefix(self, on=None, cwd=None):
        """Returns words that run a command on a host, the first one or `on`, in this folder or `cwd`."""
        name = on or self.names[0]
        spaces = ["--net", "--uts", "--mount"] + ([] if name == self.names[0] else ["--pid"]) + ["--time"] * (name in self.clocks)
        return ["nsenter", "-t", str(self._pid(name)), *spaces, f"--wd={cwd or os.getcwd()}", "--"]

    def run(self, command, on=None, **kwargs):
        """subprocess.run of a command on a host."""
        return self._start_there(subprocess.run, command, on, **kwargs)

    def popen(self, command, on=None, **kwargs):
        """subprocess.Popen of a command on a host."""
        return self._start_there(subprocess.Popen, command, on, **kwargs)

    def _start_there(self, start, command, on, env=os.environ, cwd=None, **kwargs):
        return start([*self.prefix(on, cwd), *command], env={**env, **self.environment()}, **kwargs)

    def kill(self, name):
        os.kill(self._pid(name), signal.SIGKILL)

    def _port(self, name):
        return f"p{self.names.index(name) + 1}"

    def cut(self, name):
        self._in_network(self._pid("switch"), "link", "set", self._port(name), "down")

    def mend(self, name):
        self._in_network(self._pid("switch"), "link", "set", self._port(name), "up")

    def disturb(self, name, milliseconds=0, loss=0):
        """Delays all that the host sends and receives, and loses that many percent of it. Raises RuntimeError if the kernel
        has no netem (module sch_netem)."""
        self._queue(name, "netem", "delay", f"{milliseconds}ms", "loss", f"{loss}%")

    def limit(self, name, bytes_per_second):
        """Lets the host send and receive at most so much. It takes the place of `disturb`, and the other way round. Raises
        ValueError for a rate of 0 or less and RuntimeError if the kernel has no tbf (module sch_tbf)."""
        if not bytes_per_second > 0:
            raise ValueError(f"a link must carry more than 0 bytes in a second, not {bytes_per_second}: `cut` interrupts it")
        self._queue(name, "tbf", "rate", f"{max(8, round(8 * bytes_per_second))}bit", "burst", "32kb", "latency", "2s")

    def _queue(self, name, kind, *words):
        """Gives both ends of the host's cable a queue of the kernel."""
        tc = shutil.which("tc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or "tc"
        for pid, card in ((self._pid("switch"), self._port(name)), (self._pid(name), "eth0")):
            done = subprocess.run(["nsenter", "-t", str(pid), "--net", tc, "qdisc", "replace", "dev", card, "root", kind, *words],
                                  capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"the link of {name} cannot be changed, which needs the kernel's {kind}: {done.stderr.strip()}")
