"""Runs a private Slurm of several nodes on one machine: a controller and a daemon for each node, without munge and without
a database. For tests that have called require() and then namespaces.isolate(), which they need because ports are fixed.

    with Slurm(2) as slurm:
        slurm.run(["salloc", "-N", "2", "-n", "4", ...])

Slurm signals only the process groups of a job that it has started itself (proctrack/pgid); on clusters, proctrack/cgroup
ends more.

The nodes n1, n2, ... have their own host name and /dev/shm, and share this network.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

_CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0,defer_batch=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
CompleteWait=0
InactiveLimit=0
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def require():
    """Skips the test if Slurm cannot run. Called before isolate(), after which every user is root."""
    if os.geteuid() != 0:
        print("SKIPPED, A FAILURE IN CI: Slurm's daemons need root")
        sys.exit(0)
    missing = [p for p in ("slurmctld", "slurmd", "salloc", "srun", "sbatch", "sinfo") if not shutil.which(p, path=_PATH)]
    if missing:
        print("SKIPPED, A FAILURE IN CI: Slurm is not installed (Debian: slurm-wlm): " + ", ".join(missing))
        sys.exit(0)


class Slurm:
    def __init__(self, nodes, cpus=2, domain=""):
        """`domain`: what the names of nodes end in, ".cluster.example"."""
        self.names = [f"n{i}{domain}" for i in range(1, nodes + 1)]
        self.cpus = cpus

    def __enter__(self):
        # Slurm truncates the paths of its sockets to 108 characters.
        self.folder = tempfile.mkdtemp(prefix="slurm.", dir="/tmp")
        self._daemons = []
        nodes = len(self.names)
        conf = _CONF.format(
            host=socket.gethostname().split(".")[0], folder=self.folder, cpus=self.cpus,
            nodes=",".join(self.names), ports=f"[6818-{6817 + nodes}]" if nodes > 1 else "6818")
        with open(self._conf, "w") as f:
            f.write(conf)
        os.mkdir(os.path.join(self.folder, "state"))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _conf(self):
        return os.path.join(self.folder, "slurm.conf")

    def environment(self):
        return {
            "PATH": _PATH,
            "SLURM_CONF": self._conf,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def _env(self):
        return {**os.environ, **self.environment()}

    def _daemon(self, name, command):
        with open(os.path.join(self.folder, name + ".out"), "w") as out:
            self._daemons.append(
                subprocess.Popen(command, env=self._env(), stdin=subprocess.DEVNULL, stdout=out, stderr=out))

    def _start(self):
        self._daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", self._conf])
        for name in self.names:
            os.mkdir(os.path.join(self.folder, f"spool.{name}"))
            node = f"hostname {name} && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec slurmd -D -c -N {name} -f {self._conf}"
            self._daemon(f"slurmd.{name}", ["unshare", "--uts", "--mount", "sh", "-c", node])
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and all(daemon.poll() is None for daemon in self._daemons):
            idle = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], env=self._env(), capture_output=True, text=True)
            if idle.stdout.strip() == str(len(self.names)):
                return
            time.sleep(0.1)
        said = [f"{idle.stdout}{idle.stderr}"]
        for name in sorted(os.listdir(self.folder)):
            if name.endswith((".out", ".log")):
                with open(os.path.join(self.folder, name), errors="replace") as f:
                    said.append(name + ":\n" + "".join(f.readlines()[-20:]))
        raise RuntimeError("Slurm did not start: " + "\n".join(said))

    def run(self, command, **kwargs):
        """subprocess.run of a command as a user of this Slurm."""
        return subprocess.run(command, env={**kwargs.pop("env", os.environ), **self.environment()}, **kwargs)

    def popen(self, command, **kwargs):
        return subprocess.Popen(command, env={**kwargs.pop("env", os.environ), **self.environment()}, **kwargs)
