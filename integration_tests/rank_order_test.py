#!/usr/bin/env python3
"""Tests ranks that the launcher places on hosts in turn: the job numbers them host by host, and results do not change.

Hosts are simulated by giving ranks other host names (unshare --uts); if that is not allowed, the test is skipped and says
so.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

CONFIG = """
device = "cpu"
[run]
name = "order"
steps = 3
log_every = 1
[data]
train = "words.txt"
context = 64
batch = 4
[model]
layers = 1
dim = 32
heads = 4
kv_heads = 2
ffn = 64
[optimizer]
lr = 0.01
[attention]
schedule = "ring"
[validation]
every = 0
"""

# Two hosts of two ranks: host after host, or in turn.
IN_ORDER = 'hostname host-$((OMPI_COMM_WORLD_RANK / 2)) && exec "$@"'
CYCLIC = 'hostname host-$((OMPI_COMM_WORLD_RANK % 2)) && exec "$@"'


class RankOrderTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        if shutil.which("mpirun") is None:
            self.skipTest("no mpirun on PATH")
        allowed = subprocess.run(["unshare", "--uts", "hostname", "other"], capture_output=True, text=True)
        if allowed.returncode != 0:
            self.skipTest("ranks cannot get host names of their own on this machine: " + allowed.stderr.strip())
        with open(self.path("words.txt"), "w") as f:
            f.write("for i in range(10): print(i)\n" * 400)
        with open(self.path("config.toml"), "w") as f:
            f.write(CONFIG)

    def mpirun(self, hosts, *args):
        short = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.addCleanup(short.cleanup)
        done = subprocess.run(
            ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "btl_vader_backing_directory", short.name]
            + ["-np", "4", "unshare", "--uts", "sh", "-c", hosts, "sh", cli.ANNULUS, *args],
            cwd=self.folder,
            env=cli.environment(
                TMPDIR=short.name, HOME=short.name, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1"
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=cli.LIMIT,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_attend_writes_the_same_bytes_in_any_order(self):
        written = []
        for name, hosts in (("in-order", IN_ORDER), ("cyclic", CYCLIC)):
            out = f"out-{name}.safetensors"
            args = ["attend", "--random", "queries=96,heads=4,kv_heads=2,dim=16,seed=3", "--output", out, "--backward"]
            self.mpirun(hosts, *args, "--layout", "zigzag", "--schedule", "ring")
            with open(self.path(out), "rb") as f:
                written.append(f.read())
        self.assertEqual(*written)

    def test_train_has_the_same_losses_in_any_order(self):
        losses, outputs = [], []
        for hosts in (IN_ORDER, CYCLIC):
            outputs.append(self.mpirun(hosts, "train", "config.toml"))
            with open(self.path(f"runs/order-00{len(outputs)}/metrics.jsonl")) as f:
                rows = [json.loads(line) for line in f]
            losses.append([(row["step"], row["loss"], row["gradient_norm"]) for row in rows if "loss" in row])
        self.assertEqual(len(losses[0]), 3)
        self.assertEqual(*losses)
        for out in outputs:
            self.assertIn("ring: ranks 0-3, each to the next and the last to the first", out)
        self.assertNotIn("the launcher numbers them", outputs[0])
        self.assertIn("the launcher numbers them 0 2 1 3", outputs[1])
        self.assertIn("host host-0: ranks 0-1 on cpu", outputs[1])
        self.assertIn("host host-1: ranks 2-3 on cpu", outputs[1])

    def test_launch_names_a_failed_rank_by_its_number_in_the_job(self):
        """Rank 1 of mpirun, which is rank 2 of the job, starts in a folder without the text."""
        os.mkdir(self.path("other"))
        shutil.copy(self.path("config.toml"), self.path("other"))
        mpirun = self.mpirun_with_ranks_by("unshare", "--uts", "sh", "-c", f"test $OMPI_COMM_WORLD_RANK != 1 || cd other; {CYCLIC}")
        code, _, err = self.annulus("launch", "-n", "4", "--mpi-args", "--host localhost:4", "train", "config.toml", MPIRUN=mpirun)
        self.assertEqual(code, 3, err)
        # mpirun may end that rank before it reports, and then the others name it.
        self.assertRegex(err, r"(?m)^annulus: (rank 2: \[\w+\] |ranks? .*\] on rank 2: ).*words\.txt")
        with open(glob.glob(self.path("runs/logs/*/job.log"))[0]) as f:
            lines = f.read().splitlines()
        own = [line for line in lines if " host-1 rank 2 " in line]
        self.assertEqual(lines[len(lines) - len(own) :], own, "the lines of the failed rank are not last")


cli.main()
