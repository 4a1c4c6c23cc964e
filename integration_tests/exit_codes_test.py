#!/usr/bin/env python3
"""Tests the exit codes for files that cannot be read or written, for each subcommand, as in docs/how-to/troubleshooting.md ("Files")."""

import ctypes
import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

GUIDE = cli.HELPERS[0] if cli.HELPERS else ""
CONFIG = """
[run]
name = "tiny"
steps = 1
[data]
train = ["text.txt"]
context = 64
batch = 1
[model]
layers = 1
dim = 16
heads = 2
[optimizer]
lr = 0.01
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
BLOCKS = "{ kind = 'blocks', map = 'file', block = 16, file = '{0}' }"
LOCAL = "{ kind = 'blocks', map = 'local', block = 16, window_blocks = 0 }"


def like_everybody():
    """Makes file permissions apply to root as well, from the next program on."""
    if os.geteuid() == 0:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            if ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise OSError("the capability cannot be given up")


def documented():
    """Returns {row: {column: code}} of each table in the section "Files"."""
    with open(GUIDE) as f:
        section = re.search(r"^### Files\n(.*?)(?=^##|\Z)", f.read(), re.M | re.S).group(1)
    tables, head = [], None
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = cells[1:]
            tables.append({})
        elif not set(line) <= set("|- "):
            tables[-1][cells[0]] = dict(zip(head, map(int, cells[1:])))
    return tables


class ExitCodesTest(cli.CliTest):
    def setUp(self):
        super().setUp()
        self.write("config.toml", CONFIG)
        self.write("text.txt", "all work and no play " * 200)

    def write(self, name, text):
        with open(self.path(name), "w") as f:
            f.write(text)

    def end(self, args, **how):
        done = subprocess.run(
            [cli.ANNULUS, *args],
            cwd=self.folder,
            env=cli.environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=cli.LIMIT,
            preexec_fn=like_everybody,
            **how,
        )
        self.assertGreaterEqual(done.returncode, 0, done.stderr)
        return done.returncode, done.stderr

    READ = {
        "`train CONFIG`": ("config.toml", ["train", "{0}"]),
        "`train`, `data.train`": ("text.txt", ["train", "config.toml", "--set", "data.train=['{0}']"]),
        "`sample RUN`": ("run", ["sample", "./{0}"]),
        "`attend --input`": ("in.safetensors", ["attend", "--input", "{0}", "--output", "out"]),
        "`plan`, a block map's `file`": ("map.safetensors", ["plan", "--ranks", "2", "--length", "64", "--heads", "1", "--pattern", BLOCKS]),
        "`prove FILE`": ("plan.json", ["prove", "{0}"]),
        "`topology --xml`": ("machine.xml", ["topology", "--xml", "{0}"]),
        "`topology --load`": ("hosts.json", ["topology", "--load", "{0}"]),
        "`tokenize --inspect`, `--verify`": ("shard.bin", ["tokenize", "--inspect", "{0}"]),
        "`bench compare`": ("all.json", ["bench", "compare", "{0}", "{0}"]),
    }
    WRITTEN = {
        "`attend --output`": ["attend", "--random", "queries=8,heads=1,dim=4", "--output", "{0}"],
        "`attend --mask-out`": ["attend", "--random", "queries=32", "--pattern", LOCAL, "--mask-out", "{0}"],
        "`plan --out`": ["plan", "--ranks", "2", "--length", "64", "--heads", "1", "--out", "{0}"],
        "`plan --svg`": ["plan", "--ranks", "2", "--length", "64", "--heads", "1", "--svg", "{0}"],
        "`fit --svg`": ["fit", "config.toml", "--ranks", "1", "--cpu", "--device-memory", "1GB", "--svg", "{0}"],
        "`bench ring --json`": ["bench", "ring", "--json", "{0}"],
        "`topology --save`, `--svg`": ["topology", "-n", "1", "--save", "{0}", "--svg", "{0}"],
        "`launch --log-dir`": ["launch", "-n", "1", "--log-dir", "{0}", "selftest", "print"],
    }

    def prepared(self, name, state):
        """Makes a file or folder in this state and returns its path."""
        path = self.path(name)
        if name == "run" and state != "missing":  # of the folder of a run, the configuration is read first
            os.makedirs(path, exist_ok=True)
            path = os.path.join(path, "config.toml")
        if os.path.isfile(path) and name != "config.toml":
            os.chmod(path, 0o600)
            os.remove(path)
        if state == "a folder":
            name, path = "folder", self.path("folder")
            os.makedirs(path, exist_ok=True)
        elif state == "malformed":
            with open(path, "w") as f:
                f.write("short" if name == "text.txt" else "[what is this")
        elif state == "not readable":
            with open(path, "w") as f:
                f.write(CONFIG)
            os.chmod(path, 0)
        return "nowhere" if state == "missing" else name

    def test_codes_for_files_that_are_read(self):
        measured = {}
        for row, (name, args) in self.READ.items():
            measured[row] = {}
            for state in ("missing", "a folder", "malformed", "not readable"):
                given = self.prepared(name, state)
                code, err = self.end([word.replace("{0}", given) for word in args])
                measured[row][state] = code
                self.assertIn("annulus:", err)
                self.assertIn(given, err, f"{row}, {state}: the file is named")
            os.path.exists(self.path("config.toml")) and os.chmod(self.path("config.toml"), 0o600)
            self.write("config.toml", CONFIG)
        self.assertEqual(measured, documented()[0])

    def test_codes_for_files_that_are_written(self):
        os.makedirs(self.path("folder"))
        os.makedirs(self.path("locked"))
        os.chmod(self.path("locked"), 0o500)
        measured = {}
        for number, (row, args) in enumerate(self.WRITTEN.items()):
            measured[row] = {
                state: self.end([word.replace("{0}", path) for word in args], stdout=subprocess.DEVNULL)[0]
                for state, path in (
                    ("its folder is missing", f"nowhere-{number}/out"),
                    ("a folder", "folder"),
                    ("its folder is not writable", "locked/out"),
                )
            }
        self.assertEqual(measured, documented()[1])

    def test_codes_of_every_subcommand(self):
        _, out, _ = self.annulus("--help")
        subcommands = re.findall(r"^  (\w+) {2,}\S", out, re.M)
        self.assertIn("train", subcommands)
        expected = documented()[2]["every subcommand"]
        for subcommand in subcommands:
            with self.subTest(subcommand=subcommand), open("/dev/full", "w") as full:
                code, err = self.end([subcommand, "--help"], stdout=full)
                self.assertEqual(code, expected["standard output on a full disk"], err)
                code, err = self.end([subcommand, "--no-such-option"])
                self.assertEqual(code, expected["an unknown option"], err)

    def by_shell(self, change, *args):
        """Runs annulus after a shell has changed what it inherits; returns (exit code, standard error)."""
        done = subprocess.run(["bash", "-c", f'{change}; exec "$0" "$@"', cli.ANNULUS, *args], cwd=self.folder,
                              env=cli.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, timeout=cli.LIMIT)
        return done.returncode, done.stderr

    def test_code_beyond_the_limit_on_file_sizes(self):
        # The rank's part of the optimizer's state takes more than 8 MiB.
        launch = ["launch", "-n", "2", "train", "config.toml", "--set", "model.dim=512"]
        for limit, args in ((4, ["train", "config.toml"]), (8192, launch)):
            code, err = self.by_shell(f"ulimit -f {limit}", *args)
            self.assertEqual(code, 8, err)
            # The name of the file, and what to do.
            self.assertRegex(err, r"cannot write runs/tiny-00\d/checkpoints/\S+: File too large; this process may write files of "
                             rf"at most {1024 * limit:,} bytes: raise the limit \(ulimit -f\)")
        # MPI itself needs files, in shared memory.
        code, err = self.by_shell("ulimit -f 4", *launch)
        self.assertEqual(code, 8, err)
        self.assertIn("ulimit -f", err)

    def test_no_file_takes_the_place_of_a_closed_stream(self):
        for number, args in enumerate([["train", "config.toml"], ["launch", "-n", "2", "train", "config.toml"]], 1):
            code, err = self.by_shell("exec <&- >&- 2>&-", *args)
            self.assertEqual((code, err), (0, ""))
            run = self.path(f"runs/tiny-{number:03}")
            with open(os.path.join(run, "metrics.jsonl")) as f:
                self.assertTrue(any("loss" in json.loads(line) for line in f))
            with open(os.path.join(run, "lock")) as f:
                self.assertRegex(f.read(), r"^process \d+ on host \S+\n$")
            self.assertEqual(self.annulus("checkpoint", "verify", run)[0], 0)

    def test_code_for_a_missing_device(self):
        if os.path.exists("/dev/nvidiactl"):
            self.skipTest("there is a GPU")
        self.assert_refused(9, "no GPU", "topology", "-n", "1", "--device", "cuda")


if __name__ == "__main__":
    cli.main()
