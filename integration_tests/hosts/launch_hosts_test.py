#!/usr/bin/env python3
"""Tests `annulus launch` over three simulated hosts: the same output, logs, exit codes and losses as on one host, and
errors that name what is wrong with a host."""

import fcntl
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import termios
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "python", "annulus", "testing"))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import cli
import hosts as simulated
import namespaces
import trace_reader

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")

NAMES = ["host1", "Host2", "host3"]  # a capital letter in a name is allowed


class OverHosts(unittest.TestCase):
    NAMES, OWN, CLOCKS = NAMES, {}, {}

    @classmethod
    def setUpClass(cls):
        cls.hosts = simulated.Hosts(cls.NAMES, cls.OWN, cls.CLOCKS)
        cls.hosts.__enter__()
        cls.addClassCleanup(cls.hosts.__exit__)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        # A path may contain any character.
        self.folder = os.path.join(folder.name, "a user's \"runs\"; $HOME & co")
        os.mkdir(self.folder)
        cli.write_tiny_run(self.folder, 3)

    def path(self, name):
        return os.path.join(self.folder, name)

    def launch(self, *args, program=None, **env):
        """Runs launch on the first host; returns (exit code, standard output, standard error)."""
        done = self.hosts.run([program or cli.ANNULUS, "launch", *args], cwd=self.folder, env=cli.environment(**env),
                              capture_output=True, text=True, timeout=cli.LIMIT)
        return done.returncode, done.stdout, done.stderr

    def start(self, *args, **env):
        run = self.hosts.popen([cli.ANNULUS, "launch", *args], cwd=self.folder, env=cli.environment(**env), text=True,
                               stdin=-3, stdout=-1, stderr=-1)
        self.addCleanup(lambda: (run.kill(), run.communicate()))
        return run

    def wait_for(self, run, *texts):
        missing, seen = set(texts), []
        while missing:
            line = run.stdout.readline()
            self.assertTrue(line, f"ended without {missing}: {seen}")
            seen.append(line)
            missing = {t for t in missing if t not in line}

    def log(self, name, folder="logs"):
        with open(os.path.join(self.path(folder), name)) as f:
            return f.read()

    def losses(self, run):
        with open(self.path(f"runs/{run}/metrics.jsonl")) as f:
            return [record["loss"] for record in map(json.loads, f) if "loss" in record]

    def assert_ranks_on(self, names, *args):
        code, out, err = self.launch(*args, "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(re.findall(r"rank \d of \d on \S+", out)),
                         [f"rank {rank} of {len(names)} on {name}" for rank, name in enumerate(names)])

    def on(self, host, *command):
        self.hosts.run(command, on=host, check=True)

    def put(self, host, text, over):
        """Gives the file `over` another content on this host only."""
        other = self.path(f"other-{len(os.listdir(self.folder))}")
        with open(other, "wb") as f:
            f.write(text)
        shutil.copymode(over, other)
        self.on(host, "mount", "--bind", other, over)
        self.addCleanup(self.on, host, "umount", over)


class LaunchHostsTest(OverHosts):
    def test_places_ranks_by_the_list_and_merges_their_output(self):
        code, out, err = self.launch("--hosts", "Host2:1,host1:2,host3:1", "--log-dir", "logs", "selftest", "print")
        self.assertEqual(code, 0, err)
        want = ["rank 0 of 4 on Host2", "rank 1 of 4 on host1", "rank 2 of 4 on host1", "rank 3 of 4 on host3"]
        self.assertEqual(sorted(out.splitlines()), sorted([want[0]] + [f"[rank {i}] {want[i]}" for i in (1, 2, 3)]))
        for rank in range(4):
            self.assertIn(f"[rank {rank}] " * (rank > 0) + f"standard error of rank {rank}\n", err)
            self.assertIn(want[rank], self.log(f"rank-{rank}.log"))
            self.assertIn(f"standard error of rank {rank}", self.log(f"rank-{rank}.log"))
        self.assertRegex(self.log("launch.log"), r"placement of 4 ranks[^$]*--host Host2,host1,host1,host3")
        # mpirun puts each ssh into a process group of its own, as that process does itself. If mpirun comes second it
        # warns that it was refused, which is no fault.
        said = [line for line in self.log("mpirun.log").splitlines() if "Warning: setpgid(" not in line]
        self.assertEqual(said, [], "nothing goes through mpirun")

    def test_hostfile_of_addresses_with_fewer_ranks_than_slots(self):
        with open(self.path("the hosts"), "w") as f:
            f.write("# ours\n10.231.7.3 slots=2\n10.231.7.1 slots=4 max_slots=4\n")
        # A default that a site sets for every mpirun yields to the host file.
        code, out, err = self.launch("--hostfile", "the hosts", "-n", "3", "selftest", "print",
                                     OMPI_MCA_orte_default_hostfile=self.path("text.txt"))
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(re.findall(r"rank \d of 3 on \S+", out)),
                         ["rank 0 of 3 on host3", "rank 1 of 3 on host3", "rank 2 of 3 on host1"])

    def test_accepts_hosts_given_to_mpirun(self):
        code, out, err = self.launch("-n", "2", "--mpi-args", "--host host3,Host2", "--log-dir", "logs", "selftest", "print")
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(line.split(" on ")[0] for line in out.splitlines()), ["[rank 1] rank 1 of 2", "rank 0 of 2"])
        self.assertIn("rank 1 of 2 on", self.log("rank-1.log"))
        code, _, err = self.launch("--hosts", "host1:2", "--mpi-args", "--host host3", "selftest", "print")
        self.assertEqual(code, 2)
        self.assertIn("named twice, by --hosts and, to mpirun, by --host", err)

    def test_dry_run_shows_the_placement_and_starts_nothing(self):
        code, out, err = self.launch("--hosts", "host1:2,host3:2", "--dry-run", "selftest", "exchange")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"placement of 4 ranks")
        self.assertRegex(out, r"mpirun -np 4 .*--host host1,host1,host3,host3 .* selftest exchange\n")
        self.assertFalse(os.path.exists(self.path("runs")))

    def test_ranks_exchange_messages_across_hosts(self):
        code, out, err = self.launch("--hosts", "host1:1,Host2:1,host3:1", "selftest", "exchange")
        self.assertEqual((code, out), (0, "3 ranks exchanged over mpi: all arrived\n"), err)

    def test_returns_exit_codes_of_remote_ranks(self):
        hosts = ("--hosts", "host1:1,Host2:1,host3:1")
        code, _, err = self.launch(*hosts, "selftest", "exit", "--rank", "2", "--code", "42")
        self.assertEqual(code, 42, err)
        self.assertIn("annulus: rank 2 ended with exit code 42\n", err)
        code, _, err = self.launch(*hosts, "--log-dir", "logs", "selftest", "fail", "--rank", "1")
        self.assertEqual(code, 3, err)
        self.assertIn("annulus: rank 1: [selftest] this rank was told to fail", err)
        self.assertEqual(err.count("told to fail"), 1, err)
        self.assertIn("told to fail", self.log("rank-1.log"))
        code, _, err = self.launch(*hosts, "selftest", "kill", "--rank", "2")
        self.assertEqual(code, 137, err)
        self.assertIn("annulus: rank 2 was ended by signal 9", err)

    def test_ctrl_c_lets_remote_ranks_finish(self):
        run = self.start("--hosts", "host1:1,Host2:1,host3:1", "--log-dir", "logs", "selftest", "stop")
        self.wait_for(run, "rank 0 waits", "[rank 1] rank 1 waits", "[rank 2] rank 2 waits")
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=cli.LIMIT)
        self.assertEqual(run.returncode, 130, err)
        self.assertIn("annulus: stopped", err)
        for rank in range(3):
            self.assertIn(f"rank {rank} stops", self.log(f"rank-{rank}.log"))

    def test_names_the_rank_whose_link_is_slow(self):
        tc = shutil.which("tc", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        self.on("Host2", tc, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "50mbit", "burst", "32kb", "latency",
                "2s")
        self.addCleanup(self.on, "Host2", tc, "qdisc", "del", "dev", "eth0", "root")
        cli.write_tiny_run(self.folder, 20, data={"context": 1026}, run={"slow_steps": 5, "slow_seconds": 0})
        code, out, err = self.launch("--hosts", "host1:1,Host2:1,host3:1", "train", "config.toml")
        self.assertEqual(code, 0, err)
        self.assertEqual(re.findall(r"warning: (the link from rank \d on \S+ to rank \d on \S+ is slow|rank \d)", out),
                         ["the link from rank 1 on Host2 to rank 2 on host3 is slow"], out)
        with open(self.path("runs/tiny-001/metrics.jsonl")) as f:
            slow = [line for line in map(json.loads, f) if "slow_rank" in line]
        self.assertEqual([(line["slow_rank"], line["slow_host"], line["slow_link_to"]) for line in slow], [(1, "Host2", 2)])
        self.assertLessEqual(slow[0]["step"], 2 * 5)
        self.assertIn(slow[0]["slow_since"], range(1, slow[0]["step"] - 4))

    def test_training_has_the_same_losses_as_on_one_host(self):
        for hosts in (("-n", "4"), ("--hosts", "host1:2,Host2:1,host3:1")):
            code, out, err = self.launch(*hosts, "train", "config.toml", "--set", "run.folder='runs'")
            self.assertEqual(code, 0, err)
        self.assertRegex(out, r"host Host2: rank 2 ")
        alone, over = self.losses("tiny-001"), self.losses("tiny-002")
        self.assertEqual(len(alone), 3)
        for a, b in zip(alone, over, strict=True):
            self.assertAlmostEqual(a, b, delta=1e-5 * a)

    def test_attention_across_hosts_matches_the_oracle(self):
        code, out, err = self.launch("--hosts", "host1:1,Host2:2,host3:1", "attend", "--random", "queries=64,heads=2,dim=8",
                                     "--check")
        self.assertEqual(code, 0, out + err)

    def test_starts_a_subcommand_of_annulus_bench(self):
        """`bench` belongs to annulus_bench, which asks the hosts and starts the ranks itself."""
        bench = ("bench", "comm", "--part", "exchange", "--smallest", "1024", "--largest", "1024", "--rounds", "1")
        code, out, err = self.launch("--hosts", "host1:1,host3:1", *bench)
        self.assertEqual(code, 0, err)
        self.assertIn("exchange", out)
        # A host that does not report is tried alone, with `annulus_bench version`.
        code, _, err = self.launch("--hosts", "host1:1,nobody:1", *bench)
        self.assertEqual(code, 9, err)
        self.assertIn("on 1 host of --hosts: host nobody: ssh: Could not resolve hostname nobody", err)

    def test_program_path_may_hold_spaces_and_quotes(self):
        program = self.path("my annulus; 'v2'")
        shutil.copy(cli.ANNULUS, program)
        code, out, err = self.launch("--hosts", "host1:1,host3:1", "selftest", "print", program=program)
        self.assertEqual(code, 0, err)
        self.assertIn("rank 1 of 2 on host3", out)


class FullNamesTest(OverHosts):
    """Names with dots, which Open MPI cuts unless it is told not to. Two hosts differ in their domains only."""

    NAMES = ["node1.a.example", "node2.a.example", "node2.b.example"]

    def test_hosts_named_in_full(self):
        self.assert_ranks_on(self.NAMES, "--hosts", ",".join(name + ":1" for name in self.NAMES))

    def test_hostfile_of_full_names_a_short_name_and_an_address(self):
        with open(self.path("hosts"), "w") as f:
            f.write("node1 slots = 1\n10.231.7.2\nnode2.b.example\n10.231.7.2\n")
        self.assert_ranks_on([self.NAMES[i] for i in (0, 1, 1, 2)], "--hostfile", "hosts")

    def test_unknown_full_name_is_named_in_full(self):
        code, _, err = self.launch("--hosts", "node1.a.example:1,node3.a.example:1", "selftest", "print")
        self.assertEqual(code, 9, err)
        self.assertIn("host node3.a.example: ssh: Could not resolve hostname node3.a.example", err)


class ShortOwnNamesTest(OverHosts):
    """The same where hosts call themselves by the first part of their names."""

    NAMES = ["node1.a.example", "node2.a.example", "node3.b.example"]
    OWN = {"node1.a.example": "node1", "node2.a.example": "node2", "node3.b.example": "node3"}

    def test_hosts_named_in_full(self):
        self.assert_ranks_on(["node1", "node2", "node3"], "--hosts", ",".join(name + ":1" for name in self.NAMES))

    def test_hostfile_of_full_names_a_short_name_and_an_address(self):
        with open(self.path("hosts"), "w") as f:
            f.write("node1\nnode2.a.example\n10.231.7.3\n")
        self.assert_ranks_on(["node1", "node2", "node3"], "--hostfile", "hosts", "-n", "3")


class FaultyHostsTest(OverHosts):
    TWO = ("--hosts", "host1:1,host3:1")

    def assert_refused(self, code, pattern, *args, **env):
        got, out, err = self.launch(*args, **env)
        self.assertEqual((got, out), (code, ""), err)
        self.assertRegex(err, pattern)
        self.assertFalse(os.path.exists(self.path("runs")), "no rank has started")
        return err

    def test_refuses_another_program_on_a_host(self):
        with open(cli.ANNULUS, "rb") as f:
            self.put("host3", f.read() + b"another build", os.path.realpath(cli.ANNULUS))
        err = self.assert_refused(5, r"annulus: .*program", *self.TWO, "selftest", "print")
        self.assertIn("what differs between the hosts:", err)

    def test_refuses_another_configuration_on_a_host(self):
        self.put("host3", cli.tiny_config(3, optimizer={"lr": 0.02}).encode(), self.path("config.toml"))
        self.assert_refused(5, r"config\.toml", *self.TWO, "train", "config.toml")

    def test_ignores_differences_of_hosts_without_ranks(self):
        self.put("host3", cli.tiny_config(3, optimizer={"lr": 0.02}).encode(), self.path("config.toml"))
        code, out, err = self.launch("-n", "2", "--hosts", "host1:1,Host2:1,host3:1", "train", "config.toml")
        self.assertEqual(code, 0, err)
        self.assertNotIn("same-files", err)

    def test_refuses_one_host_under_two_names(self):
        err = self.assert_refused(4, r"different-machines: localhost and host1 are names of one machine", "--hosts",
                                  "localhost:1,host1:1", "selftest", "print")
        self.assertIn("name each machine once", err)

    def test_reports_ssh_that_asks_for_a_password(self):
        """ssh has no terminal on which to ask, and the error says so, although the user has one."""
        agent = os.path.join(os.path.dirname(self.folder), "agent")  # Open MPI splits it at spaces
        with open(agent, "w") as f:
            f.write('#!/bin/sh\n(read answer < /dev/tty) 2>/dev/null || { echo "Permission denied (publickey)."; exit 255; } >&2\n')
        os.chmod(agent, 0o755)
        user, terminal = os.openpty()
        self.addCleanup(os.close, user)

        def sit_down():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        done = self.hosts.run(["env", f"OMPI_MCA_plm_rsh_agent={agent}", cli.ANNULUS, "launch", *self.TWO, "selftest", "print"],
                              cwd=self.folder, env=cli.environment(), stdin=terminal, preexec_fn=sit_down,
                              capture_output=True, text=True, timeout=cli.LIMIT)
        os.close(terminal)
        self.assertEqual(done.returncode, 9, done.stderr)
        self.assertIn("host host3: Permission denied (publickey).", done.stderr)

    def test_reports_host_without_the_program(self):
        self.on("host3", "mount", "-t", "tmpfs", "empty", os.path.dirname(os.path.realpath(cli.ANNULUS)))
        self.addCleanup(self.on, "host3", "umount", os.path.dirname(os.path.realpath(cli.ANNULUS)))
        self.assert_refused(9, r"host host3: .*could not access or execute an executable", *self.TWO, "selftest", "print")

    def test_reports_unknown_host(self):
        err = self.assert_refused(9, r"host nobody: ssh: Could not resolve hostname nobody", "--hosts",
                                  "host1:1,nobody:1,host3:1", "selftest", "print")
        self.assertIn("on 1 host of --hosts: host nobody: ", err)
        self.assertIn("`ssh HOST true`", err)

    def test_reports_interfaces_that_do_not_reach_other_hosts(self):
        self.assert_refused(2, r"interface eth9 .*is not on this host; interfaces with an address here: eth0, lo",
                            *self.TWO, "--interfaces", "eth9", "selftest", "print")
        self.assert_refused(2, r"interface lo is the loopback, which does not reach host host3", *self.TWO,
                            "--interfaces", "lo", "selftest", "print")
        # An interface that only this host has, so it leads to no other host.
        self.on("host1", "ip", "link", "add", "eth5", "type", "veth", "peer", "name", "wire5")
        self.on("host1", "ip", "addr", "add", "10.9.9.1/24", "dev", "eth5")
        for card in ("eth5", "wire5"):
            self.on("host1", "ip", "link", "set", card, "up")
        self.addCleanup(self.on, "host1", "ip", "link", "del", "eth5")
        self.assert_refused(9, r"host host3: mpirun's daemon there does not answer.*`--interfaces` names those", *self.TWO, "--interfaces", "eth5", "selftest",
                            "print", ANNULUS_BOOTSTRAP_TIMEOUT="4")

    def test_refuses_more_ranks_than_slots(self):
        self.assert_refused(2, "3 ranks do not fit into the 2 slots", "-n", "3", *self.TWO, "selftest", "print")
        self.assert_refused(2, "the number of ranks on host host3", "--hosts", "host1:2,host3", "selftest", "print")
        self.assert_refused(2, '"host1;reboot" is not the name of a host', "--hosts", "host1;reboot", "selftest", "print")


class LostHostTest(OverHosts):
    def test_reports_host_lost_during_and_before_a_job(self):
        run = self.start("--hosts", "host1:1,Host2:1,host3:1", "--log-dir", "logs", "selftest", "stop")
        self.wait_for(run, "[rank 1] rank 1 waits", "[rank 2] rank 2 waits")
        self.hosts.kill("Host2")
        _, err = run.communicate(timeout=cli.LIMIT)
        self.assertEqual(run.returncode, 6, err)
        self.assertIn("annulus: host Host2 is lost: rank 1 and the watch of the host ended there at once", err)
        self.assertIn("rank 1 waits", self.log("rank-1.log"))
        code, _, err = self.launch("--hosts", "host1:1,Host2:1", "selftest", "print")
        self.assertEqual(code, 9, err)
        self.assertIn("host Host2: ssh: connect to host Host2 port 22: No route to host", err)

    def test_training_goes_on_without_a_lost_host(self):
        """With fewer ranks: the tokens come in the same order, and the losses are those of a job that was not disturbed."""
        steps = ("--set", "run.steps=40", "--set", "checkpoint.every=1", "--set", "timeout=10", "--set", "run.folder='runs'")
        code, _, err = self.launch("-n", "1", "train", "config.toml", *steps)
        self.assertEqual(code, 0, err)
        run = self.start("--restarts", "1", "--hosts", "host1:1,host3:1", "train", "config.toml", *steps)
        while not os.path.exists(self.path("runs/tiny-002/checkpoints/step-00000003/manifest.json")):
            self.assertIsNone(run.poll(), run.poll() is not None and run.communicate())
        self.hosts.kill("host3")
        _, err = run.communicate(timeout=2 * cli.LIMIT)
        self.assertEqual(run.returncode, 0, err)
        self.assertIn("host host3 is left out", err)
        self.assertIn("the job goes on with 1 rank instead of 2", err)
        alone, over = self.losses("tiny-001"), self.losses("tiny-002")
        self.assertEqual(len(alone), len(over))
        for a, b in zip(alone, over, strict=True):
            self.assertAlmostEqual(a, b, delta=1e-4 * a)


class OtherClocksTest(OverHosts):
    """Hosts whose monotonic clocks began at other times."""

    NAMES, CLOCKS = ["host1", "Host2", "host3", "host4"], {"Host2": 100_000, "host4": 3}

    def test_a_trace_of_them_has_one_time(self):
        read = [sys.executable, "-c", "import time; print(time.monotonic())"]
        ahead = float(self.hosts.run(read, on="Host2", check=True, capture_output=True).stdout) - time.monotonic()
        self.assertTrue(99_000 < ahead < 100_001, ahead)
        code, out, err = self.launch("--hosts", "host1:1,Host2:2,host3:1,host4:1", "attend", "--random", "queries=120,heads=2,dim=8",
                                     "--layout", "contiguous", "--backward", "--trace", "run.json")
        self.assertEqual(code, 0, out + err)
        trace = trace_reader.Trace(self.path("run.json"))  # which refuses messages that end before they begin
        self.assertTrue(0 < int(trace.about["clock error, ns, at most"]) < 10 ** 9, trace.about)
        over_hosts = {(a["pid"], b["pid"]) for a, b in trace.flows} - {(1, 2), (2, 1)}
        self.assertEqual({rank for pair in over_hosts for rank in pair}, set(range(5)))
        self.assertLess(max(s["ts"] + s["dur"] for s in trace.spans), cli.LIMIT * 10 ** 6)


if __name__ == "__main__":
    cli.main()
