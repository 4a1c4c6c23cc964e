#!/usr/bin/env python3
"""Tests `annulus doctor` on hosts with real faults, which the test creates, and over several hosts.

    doctor_test.py ANNULUS MACHINE.xml
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "python", "annulus", "testing"))
import hosts as simulated
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")

MACHINE = os.path.abspath(sys.argv.pop())  # a machine with GPUs and RDMA devices
ANNULUS = os.path.abspath(sys.argv.pop())


def environment(**extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "ANNULUS_", "SLURM_"))}
    return {k: v for k, v in {**env, "OMP_NUM_THREADS": "1", **extra}.items() if v is not None}


class DoctorTest(unittest.TestCase):
    def doctor(self, *args, prefix=(), run=subprocess.run, annulus=ANNULUS, **env):
        """Runs doctor; returns the exit code, and the findings by check."""
        done = run([*prefix, annulus, "doctor", "--json", *args], env=environment(**env), stdin=subprocess.DEVNULL,
                   capture_output=True, text=True, timeout=60)
        self.assertTrue(done.stdout, done.stderr)
        said = json.loads(done.stdout)
        self.assertEqual(done.returncode, 0 if said["good"] else 9, done.stderr)
        self.assertEqual(said["good"], all(f["severity"] != "error" for f in said["findings"]))
        self.reports, self.used, self.said = said["hosts"], said.get("used"), done.stderr
        found = {}
        for finding in said["findings"]:
            found.setdefault(finding["check"], []).append(finding)
        return done.returncode, found

    def assert_found(self, found, check, severity, text, remedy, at=0):
        finding = found[check][at]
        self.assertEqual(finding["severity"], severity, finding)
        self.assertIn(text, finding["found"])
        self.assertIn(remedy, finding["remedy"])

    def in_shell(self, before):
        """Returns words that run the command after them once the shell command `before` has run."""
        return ["bash", "-c", before + ' && exec "$@"', "bash"]

    def test_finds_low_limits(self):
        # hwloc's variable gives a machine with RDMA devices. The process lacks CAP_IPC_LOCK, with which root may lock any
        # amount of memory.
        bound = ["setpriv", "--bounding-set", "-ipc_lock", "--"]
        code, found = self.doctor(prefix=[*self.in_shell("ulimit -l 64"), *bound], HWLOC_XMLFILE=MACHINE, HWLOC_THISSYSTEM="0")
        self.assertEqual(code, 9)
        self.assert_found(found, "locked-memory", "error", "64 KiB, but mlx5", "ulimit -l unlimited")
        code, found = self.doctor(prefix=[*self.in_shell("ulimit -l 64"), *bound])
        self.assertEqual(found["locked-memory"][0]["severity"], "good")
        if os.readlink("/proc/self/ns/user") == "user:[4026531837]":  # root of this namespace is root of the system
            code, found = self.doctor(prefix=self.in_shell("ulimit -l 64"), HWLOC_XMLFILE=MACHINE, HWLOC_THISSYSTEM="0")
            self.assert_found(found, "locked-memory", "good", "unlimited", "")
        code, found = self.doctor("-np", "8", prefix=self.in_shell("ulimit -n 150"))
        self.assertEqual(code, 9)
        self.assert_found(found, "open-files", "error", "150 for each process", "ulimit -n 4096")

    def test_warns_of_ranks_that_share_a_core(self):
        core = str(min(os.sched_getaffinity(0)))
        code, found = self.doctor("-n", "2", prefix=["taskset", "-c", core])
        self.assertEqual(code, 0)
        self.assert_found(found, "cores", "warning", "1 core for 2 ranks", "taskset")
        code, found = self.doctor("-n", "1", prefix=["taskset", "-c", core], OMP_NUM_THREADS="64")
        self.assert_found(found, "cores", "warning", "OMP_NUM_THREADS=64", "unset OMP_NUM_THREADS")

    def quota(self, cpus):
        """Returns words that run the command after them with the time of `cpus` processors: in a control group, which
        only root of the system may make."""
        for version, top in ((1, "/sys/fs/cgroup/cpu"), (2, "/sys/fs/cgroup"), (2, "/sys/fs/cgroup/unified")):
            group = os.path.join(top, f"annulus-doctor-test-{os.getpid()}")
            limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(cpus * 100000))} if version == 1 else {
                "cpu.max": f"{int(cpus * 100000)} 100000"}
            try:
                os.mkdir(group)
            except OSError:
                continue
            self.addCleanup(os.rmdir, group)
            try:
                for name, text in limits.items():
                    with open(os.path.join(group, name), "w") as f:
                        f.write(text)
            except OSError:
                continue
            return self.in_shell(f"echo 0 > {group}/cgroup.procs")
        self.skipTest("no control group with a quota can be made here")

    def test_threads_follow_the_quota_of_the_control_group(self):
        prefix = self.quota(0.5)
        code, found = self.doctor("-n", "1", prefix=prefix, OMP_NUM_THREADS=None)
        self.assertEqual(code, 0)
        self.assert_found(found, "cores", "warning", "the time of 0.5, for 1 rank", "--cpus")
        self.assertRegex(self.used["threads"], r"^1, for the time of 0.5 processors that the control group /annulus-doctor")
        code, found = self.doctor("-n", "1", prefix=prefix, OMP_NUM_THREADS="2")
        self.assertRegex(self.used["threads"], r"^2 \(OMP_NUM_THREADS\)")
        done = subprocess.run([*prefix, ANNULUS, "launch", "-n", "1", "--dry-run", "selftest", "print"], text=True,
                              env=environment(OMP_NUM_THREADS=None), capture_output=True, timeout=60)
        self.assertIn("its control group has the time of 0.5 processors", done.stdout)
        row = re.search(r"^ +0 .*", done.stdout.partition("placement of 1 rank")[2], re.M).group().split()
        self.assertEqual(row[6], "1", "threads of the rank: " + done.stdout)

    def openmp(self, text):
        """The settings that OpenMP's library has read, as it prints them with OMP_DISPLAY_ENV, each time it was loaded."""
        blocks = re.findall(r"OPENMP DISPLAY ENVIRONMENT BEGIN(.*?)OPENMP DISPLAY ENVIRONMENT END", text, re.S)
        return [dict(re.findall(r"(\w+) = '(.*)'", block)) for block in blocks]

    def test_threads_that_wait_give_up_their_cores(self):
        code, found = self.doctor(OMP_NUM_THREADS="2", OMP_DISPLAY_ENV="verbose")
        self.assertEqual(code, 0)
        self.assert_found(found, "thread-waits", "good", "OMP_WAIT_POLICY=passive, GOMP_SPINCOUNT=1000", "")
        read = self.openmp(self.said)
        if not read:
            self.skipTest("this OpenMP does not print what it has read")
        self.assertEqual([(block["OMP_WAIT_POLICY"], block["GOMP_SPINCOUNT"]) for block in read], [("PASSIVE", "1000")])
        # What the user has set stays.
        code, found = self.doctor(OMP_NUM_THREADS="2", OMP_DISPLAY_ENV="verbose", OMP_WAIT_POLICY="active")
        self.assert_found(found, "thread-waits", "warning", "OMP_WAIT_POLICY=active: threads that wait keep", "unset")
        self.assertEqual([block["OMP_WAIT_POLICY"] for block in self.openmp(self.said)], ["ACTIVE"])
        # A variable of another library decides nothing.
        self.doctor(OMP_NUM_THREADS="2", OMP_DISPLAY_ENV="verbose", KMP_BLOCKTIME="0")
        self.assertEqual([block["GOMP_SPINCOUNT"] for block in self.openmp(self.said)], ["1000"])
        # One thread waits for no other.
        code, found = self.doctor(OMP_DISPLAY_ENV="verbose")
        self.assert_found(found, "thread-waits", "good", "one thread", "")
        self.assertEqual(len(self.openmp(self.said)), 1)

    def test_launch_passes_on_how_threads_wait(self):
        for env, want in (({}, ["GOMP_SPINCOUNT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"]),
                          ({"GOMP_SPINCOUNT": "5"}, ["GOMP_SPINCOUNT", "OMP_NUM_THREADS"])):
            done = subprocess.run([ANNULUS, "launch", "-n", "1", "--dry-run", "selftest", "print"], text=True,
                                  env=environment(**{"OMP_NUM_THREADS": "2", **env}), capture_output=True, timeout=60)
            self.assertEqual([name for name in re.findall(r"-x (\w+)", done.stdout) if "OMP_" in name], want, done.stdout)

    def test_reads_the_version_behind_other_lines(self):
        """A wrapper of mpirun, or the dynamic linker because of LD_PRELOAD, prints lines of its own."""
        mpirun = shutil.which("mpirun")
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            wrapper = os.path.join(folder, "mpirun")
            with open(wrapper, "w") as f:
                f.write(f'#!/bin/sh\necho "loading the module of MPI"\nexec {mpirun} "$@"\n')
            os.chmod(wrapper, 0o755)
            code, found = self.doctor(MPIRUN=wrapper, LD_PRELOAD="libnowhere.so")
            self.assertEqual(code, 0, found["mpi"])

    def test_finds_unsuitable_mpirun(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
            mpirun = os.path.join(folder, "a; mpirun")
            for version, severity, text in (
                ("mpirun (Open MPI) 5.0.3", "error", "is Open MPI 5.0.3"),
                ("HYDRA build details: Version: 4.0.2", "error", "should be Open MPI 4.1 or newer"),
            ):
                with open(mpirun, "w") as f:
                    f.write(f"#!/bin/sh\necho '{version}'\n")
                os.chmod(mpirun, 0o755)
                code, found = self.doctor(MPIRUN=mpirun)
                self.assertEqual(code, 9)
                self.assert_found(found, "mpi", severity, text, "MPI_HOME=")
            code, found = self.doctor(MPIRUN=os.path.join(folder, "none"))
            self.assert_found(found, "mpi", "error", "mpirun not found", "apt-get install openmpi-bin")

    def test_finds_small_shared_memory_and_unwritable_folders(self):
        small = ["unshare", "--mount", *self.in_shell(
            "mount -t tmpfs -o size=8m tmpfs /dev/shm && mkdir /dev/shm/t && mount -t tmpfs -o ro tmpfs /dev/shm/t && cd /dev/shm/t")]
        code, found = self.doctor("-n", "2", prefix=small, TMPDIR="/dev/shm/t")
        self.assertEqual(code, 9)
        self.assert_found(found, "shared-memory", "error", "2 ranks need about 32 MiB", "--shm-size")
        self.assert_found(found, "temporary-space", "error", "/dev/shm/t is missing or cannot be written", "TMPDIR")
        self.assert_found(found, "free-disk", "warning", "/dev/shm/t is missing or cannot be written", "run.folder")

    def test_finds_interfaces_that_are_down_or_missing(self):
        subprocess.run(["ip", "link", "add", "down0", "type", "veth", "peer", "name", "down1"], check=True)
        self.addCleanup(subprocess.run, ["ip", "link", "del", "down0"], check=True)
        code, found = self.doctor("--interfaces", "down0,ib7")
        self.assertEqual(code, 9)
        self.assert_found(found, "interfaces", "error", "down0 is down; ib7 does not exist", "--interfaces")
        code, found = self.doctor(ANNULUS_INTERFACES="ib7")
        self.assert_found(found, "interfaces", "error", "ib7 does not exist", "--interfaces")
        code, found = self.doctor("--interfaces", "down0", ANNULUS_INTERFACES="ib7")
        self.assert_found(found, "interfaces", "error", "down0 is down; ", "--interfaces")

    def test_table_shows_errors_and_counts_the_rest(self):
        done = subprocess.run([*self.in_shell("ulimit -n 100"), ANNULUS, "doctor"], env=environment(), capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(done.returncode, 9)
        self.assertRegex(done.stdout, r"\nchecks: 1 error, .*\d+ good \(--all shows every one\)\n  error +open-files ")
        self.assertRegex(done.stdout, r"\n +-> ulimit -n 4096 ")
        self.assertNotIn("  good ", done.stdout)
        self.assertIn("\nfound\n  LibTorch ", done.stdout)

    def test_refuses_invalid_arguments(self):
        for args, text in (
            (["--hosts", "a b"], "--hosts"),
            (["--hosts", ""], "doctor: --hosts is empty"),
            (["--hosts", "-x"], "--hosts"),
            (["--hosts", "a", "--hostfile", "f"], "not both"),
            (["--hostfile", "no such; file"], "no such; file"),
            (["-n", "0"], "-n"),
            (["--device", "tpu"], "--device"),
        ):
            done = subprocess.run([ANNULUS, "doctor", *args], env=environment(), capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, (args, done.stdout, done.stderr))
            self.assertIn(text, done.stderr)

    def test_checks_several_hosts(self):
        with simulated.Hosts(["host1", "Host2", "host3"]) as hosts:
            # A default that a site sets for every mpirun yields to the command line.
            code, found = self.doctor("--hosts", "host1:1,Host2:1,host3:1", run=hosts.run,
                                      OMPI_MCA_orte_default_hostfile="/dev/null")
            self.assertEqual([r["name"] for r in self.reports], ["host1", "Host2", "host3"])
            for finding in sum(found.values(), []):
                self.assertIn(finding["severity"], ("good", "warning"), finding)
            for check in ("different-machines", "same-program", "same-files", "clocks", "common-network", "reachable"):
                self.assertEqual(found[check][0]["severity"], "good", found[check])
            self.assertEqual([f["host"] for f in found["cores"]], ["host1", "Host2", "host3"])

            self.assertEqual(found["same-environment"][0]["severity"], "good", found["same-environment"])

            hosts.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "/dev/shm"], on="host3", check=True)
            code, found = self.doctor("--hosts", "host1:1,Host2:1,host3:1", run=hosts.run)
            self.assertEqual(code, 9)
            self.assertEqual(found["shared-memory"][0]["severity"], "good")
            self.assert_found(found, "shared-memory", "error", "8 MiB of 8 MiB free", "--shm-size", at=2)

    def test_reports_unreachable_hosts(self):
        with simulated.Hosts(["host1", "host2"]) as hosts:
            hosts.kill("host2")
            code, found = self.doctor("--hosts", "host1:1,host2:1", run=hosts.run, ANNULUS_BOOTSTRAP_TIMEOUT="20")
            self.assertEqual(code, 9)
            self.assert_found(found, "hosts", "error", "host2", "ssh HOST true")
            self.assertIn("mpi", found)  # the findings of this host are still there

    def test_finds_another_program_on_a_host(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder, \
                simulated.Hosts(["host1", "host2"]) as hosts:
            own, other = os.path.join(folder, "annulus"), os.path.join(folder, "other")
            shutil.copy(ANNULUS, own)
            shutil.copy(ANNULUS, other)
            with open(other, "ab") as f:
                f.write(b"\0")
            hosts.run(["mount", "--bind", other, own], on="host2", check=True)
            code, found = self.doctor("--hosts", "host1:1,host2:1", run=hosts.run, annulus=own)
            self.assertEqual(code, 9)
            self.assert_found(found, "same-program", "error", "on host2", "annulus install")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
