#!/usr/bin/env python3
"""Tests `annulus topology --hosts` over three simulated hosts: each host reports, the reports are saved, and a placement is
planned later from the saved reports without the hosts."""

import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "python", "annulus", "testing"))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import cli
import hosts as simulated
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")

NAMES = ["host1", "Host2", "host3"]


class TopologyOverHosts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.hosts = simulated.Hosts(NAMES)
        cls.hosts.__enter__()
        cls.addClassCleanup(cls.hosts.__exit__)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "a user's \"plans\"; $HOME & co")
        os.mkdir(self.folder)

    def topology(self, *args):
        """Runs topology on the first host; returns (exit code, standard output, standard error)."""
        done = self.hosts.run([cli.ANNULUS, "topology", *args], cwd=self.folder, env=cli.environment(),
                              capture_output=True, text=True, timeout=cli.LIMIT)
        return done.returncode, done.stdout, done.stderr

    def test_plans_later_from_saved_hosts(self):
        code, out, err = self.topology("--hosts", "host1:2,Host2:2,host3:2", "--device", "cpu", "--context", "3", "--json",
                                       "--save", "the cluster.json", "--svg", "the cluster.svg")
        self.assertEqual(code, 0, err)
        said = json.loads(out)
        self.assertEqual([host["host"] for host in said["hosts"]], NAMES)
        for i, host in enumerate(said["hosts"], 1):
            eth0 = next(interface for interface in host["interfaces"] if interface["name"] == "eth0")
            self.assertIn(f"10.231.7.{i}/24", eth0["addresses"])
        self.assertEqual([rank["host"] for rank in said["placement"]["ranks"]],
                         ["host1"] * 2 + ["Host2"] * 2 + ["host3"] * 2)
        self.assertEqual(said["placement"]["rings"], [[0, 1, 2], [3, 4, 5]])
        crossing = [(hop["from"], hop["to"]) for hop in said["placement"]["hops"] if hop["kind"] == "network"]
        self.assertEqual(crossing, [(1, 2), (2, 0), (3, 4), (5, 3)])
        with open(os.path.join(self.folder, "the cluster.svg")) as f:
            self.assertIn("3 hosts, 6 ranks on processors, 2 rings of 3", f.read())

        code, later, err = self.topology("--load", "the cluster.json", "-n", "6", "--device", "cpu", "--context", "3",
                                         "--json")
        self.assertEqual(code, 0, err)
        self.assertEqual(json.loads(later)["placement"], said["placement"])
        self.assertEqual(json.loads(later)["hosts"], said["hosts"])

    def test_reads_a_hostfile(self):
        with open(os.path.join(self.folder, "hosts"), "w") as f:
            f.write("host3 slots=1\n# a comment\nhost1 slots=2\n")
        code, out, err = self.topology("--hostfile", "hosts", "--device", "cpu", "--json")
        self.assertEqual(code, 0, err)
        self.assertEqual([rank["host"] for rank in json.loads(out)["placement"]["ranks"]], ["host3", "host1", "host1"])

    def test_reports_unreachable_host(self):
        code, out, err = self.topology("--hosts", "host1,nowhere")
        self.assertEqual(code, 9, err)
        self.assertIn("nowhere", err)
        self.assertEqual(out, "")

    def test_refuses_invalid_hosts_and_interfaces(self):
        for args in (["--hosts", "host1,; rm -rf x"], ["--hosts", "host1,-x"], ["--hosts", "host1,host3", "--interfaces", "eth7"]):
            code, out, err = self.topology(*args)
            self.assertEqual((code, out), (2, ""), err)


if __name__ == "__main__":
    cli.main()
