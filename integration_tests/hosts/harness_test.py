#!/usr/bin/env python3
"""Tests the simulated hosts with mpirun. If this fails, the other tests of this folder prove nothing."""

import os
import subprocess
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "python", "annulus", "testing"))
import hosts as simulated
import namespaces

namespaces.isolate(otherwise="SKIPPED, A FAILURE IN CI")


class HarnessTest(unittest.TestCase):
    def said(self, hosts, command, **kwargs):
        done = hosts.run(command, capture_output=True, text=True, timeout=60, **kwargs)
        self.assertEqual(done.returncode, 0, done.stderr)
        return sorted(done.stdout.split("\n"))[1:]

    def test_mpirun_reaches_every_host(self):
        with simulated.Hosts(["host1", "Host2", "host3"]) as hosts:
            command = ["mpirun", "--host", "host1:2,Host2:1,host3:1", "--oversubscribe", "hostname"]
            self.assertEqual(self.said(hosts, command), ["Host2", "host1", "host1", "host3"])

    def test_each_host_has_its_own_shared_memory(self):
        with simulated.Hosts(["host1", "host2"]) as hosts:
            self.said(hosts, ["touch", "/dev/shm/here"])
            self.assertEqual(hosts.run(["ls", "/dev/shm"], on="host2", capture_output=True).stdout, b"")
            self.assertEqual(hosts.run(["ls", "/dev/shm"], on="host1", capture_output=True).stdout, b"here\n")

    def test_killed_host_is_unreachable(self):
        with simulated.Hosts(["host1", "host2"]) as hosts:
            ping = ["bash", "-c", "exec 3<>/dev/tcp/host2/1"]
            self.assertIn(b"refused", hosts.run(ping, capture_output=True).stderr)  # the host answers
            hosts.kill("host2")
            done = hosts.run(["mpirun", "--host", "host1,host2", "hostname"], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("No route to host", done.stderr)

    def test_cut_cable_is_mended(self):
        with simulated.Hosts(["host1", "host2"]) as hosts:
            connect = ["timeout", "1", "bash", "-c", "exec 3<>/dev/tcp/host2/1"]
            hosts.cut("host2")
            self.assertNotIn(b"refused", hosts.run(connect, capture_output=True).stderr)
            hosts.mend("host2")
            self.assertIn(b"refused", hosts.run(["timeout", "20", *connect[2:]], capture_output=True).stderr)

    def test_limited_link_carries_less(self):
        serve = ("import socket\ns = socket.create_server(('', 7000))\nprint('up', flush=True)\n"
                 "while True:\n    c, _ = s.accept()\n    try:\n        c.sendall(bytes(200000))\n    except OSError:\n        pass\n    c.close()")
        read = "import socket\nc = socket.create_connection(('host2', 7000))\nn = 0\nwhile d := c.recv(65536): n += len(d)\nprint(n)"
        with simulated.Hosts(["host1", "host2"]) as hosts:
            server = hosts.popen([sys.executable, "-c", serve], on="host2", stdout=subprocess.PIPE)
            self.addCleanup(server.stdout.close)
            self.addCleanup(server.wait, 20)  # it ends with its host
            self.assertEqual(server.stdout.readline(), b"up\n")
            hosts.limit("host2", 1000)
            self.assertEqual(hosts.run(["timeout", "1", sys.executable, "-c", read], capture_output=True).stdout, b"")
            hosts.limit("host2", 1e8)
            self.assertEqual(hosts.run(["timeout", "30", sys.executable, "-c", read], capture_output=True).stdout, b"200000\n")
            self.assertRaises(ValueError, hosts.limit, "host2", 0)

    def test_disturbed_link_is_slow(self):
        with simulated.Hosts(["host1", "host2"]) as hosts:
            try:
                hosts.disturb("host2", milliseconds=300)
            except RuntimeError as error:
                self.skipTest(str(error))
            # The answer comes after 600 ms, behind this deadline.
            connect = ["timeout", "0.4", "bash", "-c", "exec 3<>/dev/tcp/host2/1"]
            self.assertNotIn(b"refused", hosts.run(connect, capture_output=True).stderr)
            hosts.disturb("host2")
            self.assertIn(b"refused", hosts.run(["timeout", "20", *connect[2:]], capture_output=True).stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=2)
