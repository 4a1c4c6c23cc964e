"""Jobs over two simulated hosts in which a test causes a fault at a chosen moment. Used by the *_test.py files of this folder.

A moment is where a rank's main thread stands, as its beat says (common/trace/beat.h): the test reads the rank's page as the
watch of its host does. Every test prints the seconds until the fault was named.
"""

import ctypes
import glob
import hashlib
import json
import mmap
import os
import re
import selectors
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(FOLDER)), "python", "annulus", "testing"))
sys.path.insert(0, os.path.dirname(FOLDER))
import cli  # noqa: E402
import hosts as simulated  # noqa: E402

AFTER = 3  # --stuck-after
LATEST = AFTER + 10  # seconds until a rank that stands still must be named
NAMES = ["host1", "host2"]

# What the launcher says of the second host, which has rank 1.
LOST = r"annulus: host host2 is lost: rank 1 and the watch of the host ended there at once"
DAEMON_LOST = r"annulus: mpirun's daemon on host host2 \(process \d+\) has ended, and rank 1 with it"
SILENT = r"annulus: host host2 \(rank 1\) does not answer any more: it is down, or the network between it and this host is"

# BeatPage: mark, own, others, step, expected, lasting, waits, depth, and places of 24, 64, 2, 1 (+ 1) and 4 bytes.
_MARK = 0x616E6E756C757301
_HEAD, _PLACE, _DEEPEST = struct.Struct("QQQqiiiI"), struct.Struct("24s64sh?xi"), 16


class Beat:
    """The beat of a process, read from outside."""

    def __init__(self, pid):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                found = "annulus-beat" in os.readlink(path)
            except OSError:
                continue
            if found:
                with open(path, "rb") as f:
                    self.page = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
                if _HEAD.unpack_from(self.page)[0] != _MARK:
                    break  # the launcher does not know of it yet
                return
        raise LookupError(f"process {pid} has no beat yet")

    def step(self):
        return _HEAD.unpack_from(self.page)[3]

    def waits(self):
        """Whether it waits for other ranks."""
        return _HEAD.unpack_from(self.page)[6] > 0

    def places(self):
        depth = min(_HEAD.unpack_from(self.page)[7], _DEEPEST)
        at = _HEAD.size
        return [_PLACE.unpack_from(self.page, at + i * _PLACE.size)[0].split(b"\0")[0].decode() for i in range(depth)]


def state_of(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as f:
        return int(f.read().rpartition(")")[2].split()[1])


def is_alive(pid):
    try:
        return state_of(pid) not in "ZX"
    except OSError:
        return False


def environment_of(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return f.read().split(b"\0")
    except OSError:
        return []


def hold(pid):
    """Lets the main thread of a process stand still, as if its code did not end, while its other threads run. It ends with
    the calling process."""
    seize, interrupt, ends_with_tracer = 0x4206, 0x4207, 0x100000
    libc = ctypes.CDLL(None, use_errno=True)
    for request, data in (seize, ends_with_tracer), (interrupt, 0):
        if libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, ctypes.c_long(data)) != 0:
            raise OSError(ctypes.get_errno(), f"ptrace of {pid}")


class MemoryGroup:
    """A control group (version 1) whose processes may use so many bytes. Skips the test where none can be made."""

    ROOT = "/sys/fs/cgroup/memory"

    def __init__(self, test, limit):
        self.path = f"{self.ROOT}/annulus-faults-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            os.mkdir(self.path)
        except OSError as error:
            test.skipTest(f"control groups of memory (version 1) cannot be made here: {error}")
        test.addCleanup(self.close)
        with open(f"{self.path}/memory.limit_in_bytes", "w") as f:
            f.write(str(limit))

    def close(self):
        """Ends what is left in the group, and removes it."""
        deadline = time.monotonic() + cli.LIMIT
        while True:
            with open(f"{self.path}/cgroup.procs") as f:
                for pid in f.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            try:
                return os.rmdir(self.path)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def end(self, pid):
        """Takes in a process, and one that needs too much memory, so that the kernel ends both, the larger one first."""
        with open(f"{self.path}/cgroup.procs", "w") as f:
            f.write(str(pid))
        needs = "import sys; open(sys.argv[1], 'w').write('0'); b'x' * (1 << 28)"
        subprocess.run([sys.executable, "-S", "-c", needs, f"{self.path}/cgroup.procs"], timeout=cli.LIMIT)


def replace_in_memory(pid, old, new):
    """Replaces bytes wherever they are in the memory that a stopped process may write to; returns in how many places."""
    found = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if not rights.startswith("rw") or "[v" in line:
                continue
            begin, end = (int(x, 16) for x in span.split("-"))
            memory.seek(begin)
            try:
                content = memory.read(end - begin)
            except OSError:
                continue  # of a device
            at = content.find(old)
            while at >= 0:
                memory.seek(begin + at)
                memory.write(new)
                found += 1
                at = content.find(old, at + 1)
    return found


class Job:
    """A running `launch` on the first host, whose output is read as it comes."""

    def __init__(self, test, args, env):
        self.mark = uuid.uuid4().hex
        self.process = test.hosts.popen([cli.ANNULUS, "launch", *args], cwd=test.folder, stdin=-3, stdout=-1, stderr=-1,
                                        env=cli.environment(ANNULUS_TEST_MARK=self.mark, ANNULUS_PROGRESS="plain", **env))
        self.text = {"out": "", "err": ""}
        self.selector = selectors.DefaultSelector()
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self.selector.register(stream, selectors.EVENT_READ, name)

    def read(self, seconds):
        """Reads what comes within so many seconds; returns whether more may come."""
        for key, _ in self.selector.select(seconds):
            data = key.fileobj.read()
            if data:
                self.text[key.data] += data.decode(errors="replace")
            elif data is not None:
                self.selector.unregister(key.fileobj)
        return bool(self.selector.get_map())

    def wait_for(self, pattern, stream="err", limit=cli.LIMIT):
        """Waits until the output has this pattern; returns the seconds."""
        begin = time.monotonic()
        while not re.search(pattern, self.text[stream]):
            more = self.read(0.05)
            if not re.search(pattern, self.text[stream]) and (not more or time.monotonic() - begin > limit):
                raise AssertionError(f"no {pattern!r} within {time.monotonic() - begin:.1f} s: {self.text}")
        return time.monotonic() - begin

    def finish(self, limit=cli.LIMIT):
        """Waits for the end and returns the exit code. Checks that no process is left."""
        begin = time.monotonic()
        while self.read(0.05):
            if time.monotonic() - begin > limit:
                raise AssertionError(f"it has not ended within {limit} s: {self.text}")
        code = self.process.wait(limit)
        left = self.processes()
        if left:
            raise AssertionError(f"processes are left: {[(pid, open(f'/proc/{pid}/cmdline').read()) for pid in left]}")
        return code

    def processes(self):
        """The processes of the job on all hosts, but for mpirun's daemons on others, which have none of its variables."""
        mark = b"ANNULUS_TEST_MARK=" + self.mark.encode()
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and mark in environment_of(pid) and is_alive(pid)]

    def ranks(self):
        """The processes of the ranks that run, by rank."""
        found = {}
        for pid in self.processes():
            for variable in environment_of(pid):
                if variable.startswith(b"OMPI_COMM_WORLD_RANK=") and self.is_annulus(pid):
                    found[int(variable.partition(b"=")[2])] = pid
        return found

    @staticmethod
    def is_annulus(pid):
        try:
            return os.path.realpath(f"/proc/{pid}/exe") == os.path.realpath(cli.ANNULUS)
        except OSError:
            return False

    def rank(self, rank):
        """The process of a rank, once it has a beat."""
        deadline = time.monotonic() + cli.LIMIT
        while time.monotonic() < deadline:
            try:
                pid = self.ranks()[rank]
                return pid, Beat(pid)
            except (KeyError, LookupError, OSError):
                if not self.read(0.01):
                    break
        raise AssertionError(f"rank {rank} has not started: {self.text}")

    def wait_for_step(self, step):
        """Waits until rank 0 of a run is in this step."""
        _, beat = self.rank(0)
        deadline = time.monotonic() + cli.LIMIT
        while beat.step() < step:
            if not self.read(0.01) or time.monotonic() > deadline:
                raise AssertionError(f"no step {step}: {self.text}")

    def stop_at(self, rank, moment, step=0, computes=False):
        """Stops a rank while its main thread is in an operation of this name, at this step or later; None: at once; if
        `computes`, while it waits for no other rank. Returns its process."""
        pid, beat = self.rank(rank)
        deadline = time.monotonic() + cli.LIMIT
        while time.monotonic() < deadline and self.read(0):
            if moment is not None and (beat.step() < step or moment not in beat.places()):
                continue
            os.kill(pid, signal.SIGSTOP)
            while state_of(pid) != "T":
                pass
            if (moment is None or moment in beat.places()) and not (computes and beat.waits()):
                return pid
            os.kill(pid, signal.SIGCONT)
        raise AssertionError(f"rank {rank} did not come to {moment!r}: {self.text}")

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


class FaultTest(unittest.TestCase):
    HOSTS = ("--hosts", "host1:1,host2:1")

    RUNS = "runs"

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.before_hosts()
        self.hosts = simulated.Hosts(NAMES)
        self.hosts.__enter__()
        self.addCleanup(self.hosts.__exit__)

    def before_hosts(self):
        """Mounts what all hosts have."""

    def path(self, name):
        return os.path.join(self.folder, name)

    def launch(self, *args, hosts=None, after=AFTER, **env):
        job = Job(self, [*(hosts or self.HOSTS), "--stuck-after", str(after), *args], env)
        self.addCleanup(job.end)
        return job

    def train(self, *args, steps=1000000, after=AFTER, tiny=None, **env):
        cli.write_tiny_run(self.folder, steps, **(tiny or {}))
        return self.launch(*args, "train", "config.toml", after=after, **env)

    def mpirun_with(self, line):
        """Writes an mpirun that starts each rank after this line of a shell, whose arguments are the rank's program and
        arguments; returns its path."""
        path, mpirun = self.path("start"), self.path("mpirun")
        found = os.path.realpath(shutil.which("mpirun"))
        words = {"command": path, "program": os.path.realpath(cli.ANNULUS), "path": os.path.dirname(found)}
        with open(path, "w") as f:
            f.write(f"#!/bin/sh\nshift\n{line}\nexec \"$@\"\n")
        with open(mpirun, "w") as f:
            f.write(cli.RANKS_BY.format(**{k: shlex.quote(v) for k, v in words.items()}))
        os.chmod(path, 0o755)
        os.chmod(mpirun, 0o755)
        return mpirun

    def stops(self, number, moment, rank=1, step=3, **tiny):
        """Sends a signal to the launcher while a rank is in this moment of a run. Asserts that the run saves and says how it
        can be continued; returns the step of its last checkpoint."""
        job = self.train(after=30, tiny=tiny)
        pid = job.stop_at(rank, moment, step)
        begin = time.monotonic()
        job.process.send_signal(number)
        job.wait_for("the ranks finish their step and stop")
        os.kill(pid, signal.SIGCONT)
        code = job.finish()
        print(f"\n{number.name} in {moment!r}: ended after {time.monotonic() - begin:.1f} s", flush=True)
        self.assertEqual(code, 128 + number, job.text)
        said = re.search(r"stopped after step ([\d,]+) of .*; checkpoint written", job.text["out"])
        self.assertTrue(said, job.text)
        self.assertRegex(job.text["out"], r"continue: .* --resume \S*runs/tiny-001")
        stopped_at = int(said.group(1).replace(",", ""))
        self.assertEqual(self.checkpoints()[-1], stopped_at)
        self.assert_nothing_left(*NAMES)
        return stopped_at

    def named(self, job, fault, pattern, limit=LATEST, stream="err"):
        """Waits until the fault is named, which happened just now, and prints after how many seconds."""
        seconds = job.wait_for(pattern, stream)
        print(f"\n{fault}: named after {seconds:.1f} s", flush=True)
        self.assertLess(seconds, limit, job.text)
        return seconds

    def put(self, host, content, over):
        """Gives the file `over` another content on this host only."""
        other = self.path(f"other-{uuid.uuid4().hex}")
        with open(other, "wb") as f:
            f.write(content)
        shutil.copymode(over, other)
        self.hosts.run(["mount", "--bind", other, over], on=host, check=True)

    def read_only(self, folder, *names):
        """Lets nobody on these hosts write to this folder, apart from files that are open there."""
        aside = tempfile.mkdtemp(dir=self.folder)  # a place at which nobody writes while it is not read-only yet
        for name in names:
            self.hosts.run(["sh", "-c", 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && mount --bind "$2" "$1"', "sh",
                            folder, aside], on=name, check=True)

    def checkpoints(self, run="tiny-001"):
        """The steps of the run's whole checkpoints, oldest first."""
        found = glob.glob(self.path(f"{self.RUNS}/{run}/checkpoints/step-*/manifest.json"))
        return sorted(int(re.search(r"/step-(\d+)", path).group(1)) for path in found)

    def state(self, step, run="tiny-001"):
        """The tensor files of a checkpoint: digests of their bytes by name."""
        folder = self.path(f"{self.RUNS}/{run}/checkpoints/step-{step:08}")
        files = {}
        for path in glob.glob(f"{folder}/*.safetensors"):
            with open(path, "rb") as f:
                files[os.path.basename(path)] = hashlib.sha256(f.read()).hexdigest()
        self.assertTrue(files, folder)
        return files

    def metrics(self, run="tiny-001"):
        with open(self.path(f"{self.RUNS}/{run}/metrics.jsonl")) as f:
            return [json.loads(line) for line in f]

    def drop(self, host):
        """Drops what this host sends to the other, while the other way stays."""
        other = next(name for name in NAMES if name != host)
        self.hosts.run(["ip", "route", "add", "blackhole", f"{self.hosts.address[other]}/32"], on=host, check=True)

    def ends_on_both_sides(self, job, there=True):
        """A host that is cut off ends its ranks by itself, a little later than the launcher ends the others."""
        begin = time.monotonic()
        while job.process.poll() is None:
            job.read(0.05)
            self.assertLess(time.monotonic() - begin, 20, job.text)
        self.assertEqual(job.process.returncode, 6, job.text)
        while job.processes():
            self.assertLess(time.monotonic() - begin, 20, "processes are left on the host that was cut off")
            time.sleep(0.05)
        self.assert_nothing_left(*NAMES[:2 if there else 1])

    def wait_for_checkpoint(self, job, step):
        """Waits until a checkpoint of this step or a later one is whole."""
        deadline = time.monotonic() + cli.LIMIT
        while not self.checkpoints() or self.checkpoints()[-1] < step:
            if not job.read(0.01) or time.monotonic() > deadline:
                raise AssertionError(f"no checkpoint of step {step}: {job.text}")

    def continues(self, job, *more):
        """Asserts that a job that has failed says which checkpoint it can be continued from, and that this works for a step
        more; returns its step."""
        said = re.search(r"to continue from the checkpoint of step ([\d,]+): ", job.text["err"])
        self.assertTrue(said, job.text)
        step = int(said.group(1).replace(",", ""))
        again = self.launch("train", "config.toml", *more, "--resume", f"{self.RUNS}/tiny-001", "--set", f"run.steps={step + 1}", after=30)
        self.assertEqual(again.finish(), 0, again.text)
        self.assertIn(f"resumed after step {step}", again.text["out"])
        return step

    def assert_nothing_left(self, *names):
        """Nothing is left in the shared memory of these hosts."""
        for name in names:
            left = self.hosts.run(["ls", "-A", "/dev/shm"], on=name, capture_output=True, text=True, check=True).stdout.split()
            self.assertEqual(left, [], f"on {name}")
