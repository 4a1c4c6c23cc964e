"""Runs the program `annulus` as a user does. Used by most *_test.py files of this folder, of hosts/ and of models/.

A test file ends with `cli.main()`. Its first argument is the path of the program (see BUILD).
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import uuid

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import shards  # noqa: E402

ANNULUS = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else ""
HELPERS = [os.path.abspath(a) for a in sys.argv[2:] if not a.startswith("-")]
LIMIT = 60  # seconds until a command counts as hung

# What tests of `fit` plan: a small model on data that need not be there.
FIT_CONFIG = """
[run]
steps = 1
[data]
train = ["nowhere/*.tokens"]
context = 4096
batch = 2
[model]
layers = 4
dim = 256
heads = 4
dtype = "bf16"
[optimizer]
lr = 1e-3
"""


def environment(**extra):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "ANNULUS_")) or k == "ANNULUS_ISA"}
    # Bazel's variables, without which a rank that dies early does not look like a test that ended early.
    for name in ("TEST_PREMATURE_EXIT_FILE", "XML_OUTPUT_FILE"):
        env.pop(name, None)
    # One thread for each rank, if nothing else is asked for (.bazelrc says why); with OMP_NUM_THREADS=None the placement
    # decides.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(extra)
    return {k: v for k, v in env.items() if v is not None}


def tiny_config(steps, **more):
    """Returns the text of a configuration that trains a tiny model. `more`: keys of sections that are added or replaced."""
    sections = {
        "run": {"name": "tiny", "steps": steps, "log_every": 1},
        "data": {"train": ["text.txt"], "context": 64, "batch": 2},
        "model": {"layers": 1, "dim": 32, "heads": 2},
        "optimizer": {"lr": 0.01},
        "validation": {"every": 0},
    }
    for name, keys in more.items():
        sections[name] = {**sections.get(name, {}), **keys}
    lines = []
    for name, keys in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def write_tiny_run(folder, steps, text="all work and no play " * 500, **more):
    """Writes config.toml with tiny_config(steps, **more), and text.txt, on which it trains."""
    for name, content in [("config.toml", tiny_config(steps, **more)), ("text.txt", text)]:
        with open(os.path.join(folder, name), "w") as f:
            f.write(content)


def write_stand_in(path, python, tokenization):
    """Writes a script that replaces ./annulus, which would install and build: its subcommand `tokenizer` runs the program
    `tokenization` in this Python, every other subcommand the program under test."""
    with open(path, "w") as f:
        f.write(f'#!/bin/bash\n[[ $1 == tokenizer ]] && exec {python} -I -B {tokenization} "${{@:2}}"\nexec {ANNULUS} "$@"\n')
    os.chmod(path, 0o755)


# The beginning of a program in Python that replaces mpirun and acts as ranks on another host (write_mpirun).
RANKS_ELSEWHERE = """#!/usr/bin/env python3
import json, os, signal, socket, sys
if sys.argv[1:] == ["--version"]:
    print("mpirun (Open MPI) 4.1.4")
    sys.exit()
token, port, addresses = os.environ["ANNULUS_LAUNCHER"].split("/")
def send(connection, **message):
    connection.sendall(json.dumps(message).encode() + b"\\n")
def connect(rank, purpose="control"):
    connection = socket.create_connection((addresses.split(",")[0], int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as a rank's, whose messages do not wait
    send(connection, token=token, purpose=purpose, number=rank)
    assert json.loads(connection.recv(100)) == {"accepted": True}
    return connection
"""

# Runs mpirun, which starts each rank as "COMMAND sh PROGRAM ARGUMENT..." (mpirun_with_ranks_by).
RANKS_BY = """#!/bin/bash
args=()
for arg in "$@"; do
  if [[ $arg == {program} && -z $found ]]; then
    args+=({command} sh)
    found=1
  fi
  args+=("$arg")
done
PATH={path}:$PATH exec mpirun "${{args[@]}}"  # Open MPI looks for its own files beside the mpirun that PATH finds
"""


def kill(pids):
    """Kills these processes. Some may end before their turn, because the others have."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_with(mark):
    """Returns the pids of live processes that were started with CLI_TEST_MARK=mark in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if b"CLI_TEST_MARK=" + mark.encode() not in f.read().split(b"\0"):
                    continue
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(pid))
        except OSError:
            pass
    return found


class Running:
    """A started command whose output is read line by line."""

    def __init__(self, args, cwd, env=None, prefix=()):
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*prefix, ANNULUS, *args],
            cwd=cwd,
            env=environment(CLI_TEST_MARK=self.mark, **(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []

    def wait_for(self, *texts):
        """Reads standard output until each text has been seen in it."""
        missing = set(texts)
        while missing:
            line = self.process.stdout.readline()
            if not line:
                raise AssertionError(f"ended without {missing}: {self.lines} {self.process.stderr.read()}")
            self.lines.append(line)
            missing = {t for t in missing if t not in line}

    def signal(self, number):
        self.process.send_signal(number)

    def finish(self):
        """Waits for the end; returns (exit code, standard error). Checks that no process is left."""
        out, err = self.process.communicate(timeout=LIMIT)
        self.lines.append(out)
        left = processes_with(self.mark)
        kill(left)
        assert not left, f"processes left behind: {left}"
        return self.process.returncode, err


class CliTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write_mpirun(self, text):
        """Writes a program that a command uses with MPIRUN=<the path that is returned>."""
        with open(self.path("mpirun"), "w") as f:
            f.write(text)
        os.chmod(self.path("mpirun"), 0o755)
        return self.path("mpirun")

    def mpirun_with_ranks_by(self, *command):
        """Writes an mpirun that starts each rank as `command sh annulus ...`, and returns its path."""
        found = os.path.realpath(shutil.which("mpirun"))
        words = {"program": os.path.realpath(ANNULUS), "path": os.path.dirname(found)}
        quoted = {name: shlex.quote(word) for name, word in words.items()}
        return self.write_mpirun(RANKS_BY.format(command=shlex.join(command), **quoted))

    def start(self, *args, **kwargs):
        running = Running(args, self.folder, **kwargs)

        def stop():
            if running.process.poll() is None:
                running.process.kill()
            running.process.stdout.close()
            running.process.stderr.close()
            running.process.wait()

        self.addCleanup(stop)
        return running

    def annulus(self, *args, limit=LIMIT, **env):
        """Runs annulus to the end; returns (exit code, standard output, standard error). Of the output, which may be a
        model's text, what is not UTF-8 is replaced."""
        done = subprocess.run(
            [ANNULUS, *args],
            cwd=self.folder,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
        )
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode()

    def assert_refused(self, code, pattern, *args, **env):
        """Asserts this exit code, one line of error that matches the pattern, and no output."""
        got, out, err = self.annulus(*args, **env)
        self.assertEqual(got, code, f"{args}: {err}")
        self.assertEqual(out, "", args)
        errors = [line for line in err.splitlines() if not re.match(r"annulus: (exit code|ranks? .* failed after)", line)]
        self.assertEqual(len(errors), 1, f"{args}: {err}")
        self.assertRegex(errors[0], pattern)


main = shards.main
