#!/usr/bin/env python3
"""Tests python/follower/: what TensorBoard's own reader and the records of Weights & Biases give back of a run's metrics. Arguments: the
Python that has the libraries (python/follower/wheels.sh), and the program annulus."""

import glob
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
PROGRAM = os.path.join(ROOT, "python", "follower")
LIMIT = 60  # seconds until a process counts as hung

if not os.environ.get("ANNULUS_FOLLOWER_PYTHON"):
    python = os.path.abspath(sys.argv[1])
    if not os.path.exists(python):
        print("SKIPPED: %s is missing: python/follower/wheels.sh --wandb makes it" % python)
        sys.exit(0)
    os.environ["ANNULUS_FOLLOWER_PYTHON"] = python
    os.environ["ANNULUS_PROGRAM"] = os.path.abspath(sys.argv[2])
    os.execv(python, [python, "-B", os.path.abspath(__file__), *sys.argv[3:]])
sys.path.insert(0, PROGRAM)

import event_files  # noqa: E402
import follower  # noqa: E402
from tail import Line, Removed, Tail  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

PYTHON, ANNULUS = os.environ["ANNULUS_FOLLOWER_PYTHON"], os.environ["ANNULUS_PROGRAM"]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"><rect width="40" height="30" fill="red"/></svg>'


def line(step, **values):
    return {"step": step, "loss": 5 / step, "gradient_norm": 0.1 * step, "tokens": 1000 * step,
            "sources": {"web": {"rows": step, "epochs": step / 7}}, "seconds": float(step), **values}


TINY = """
device = "cpu"
[run]
name = "tiny"
steps = 4
log_every = 1
[data]
train = ["text.txt"]
context = 64
batch = 2
validation_fraction = 0.1
[model]
layers = 1
dim = 32
heads = 2
[optimizer]
lr = 0.01
spike = 10.0
[validation]
every = 2
batches = 1
[checkpoint]
every = 2
"""


def numbers_of(values, path=()):
    """Each number below an object of metrics.jsonl, and null in place of one, with its path; but for those that say what was
    started."""
    for key, value in values.items() if isinstance(values, dict) else ((str(i), v) for i, v in enumerate(values)):
        if not path and key in ("step", "started", "memory_plan"):
            continue
        if isinstance(value, (dict, list)):
            yield from numbers_of(value, (*path, key))
        elif value is None or isinstance(value, (int, float)):
            yield (*path, key), value


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


class RunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        self.run_folder = os.path.join(folder.name, "tiny-001")
        os.mkdir(self.run_folder)
        self.metrics = os.path.join(self.run_folder, "metrics.jsonl")
        with open(os.path.join(self.run_folder, "config.toml"), "w") as f:
            f.write('[run]\nname = "tiny"\n')

    def add(self, *lines, end="\n"):
        with open(self.metrics, "a") as f:
            f.write("\n".join(json.dumps(one) for one in lines) + end)

    def replace(self, *lines):
        """As MetricsWriter removes lines: by another file of the same name."""
        with open(self.metrics + ".new", "w") as f:
            f.write("".join(json.dumps(one) + "\n" for one in lines))
        os.replace(self.metrics + ".new", self.metrics)

    def program(self, *words):
        done = subprocess.run([PYTHON, "-I", "-B", PROGRAM, "--run=" + self.run_folder, *words], capture_output=True, text=True,
                              timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr

    def read(self):
        reader = EventAccumulator(os.path.join(self.run_folder, "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
        reader.Reload()
        return reader

    def scalars(self, name):
        return [(e.step, e.value) for e in self.read().Scalars(name)]

    def expect_numbers(self, lines):
        for name, number in (("training/loss", lambda v: v["loss"]), ("training/tokens", lambda v: v["tokens"]),
                             ("sources/web/epochs", lambda v: v["sources"]["web"]["epochs"])):
            self.assertEqual(self.scalars(name), [(v["step"], single(number(v))) for v in lines])


class TailTest(RunTest):
    def test_takes_whole_lines_only(self):
        tail = Tail(self.metrics)
        self.assertEqual(tail.poll(), [])  # there is no file yet
        self.add({"step": 1}, {"step": 2}, end="")
        self.assertEqual(tail.poll(), [Line(1, {"step": 1})])
        self.add(end="\n")
        self.assertEqual(tail.poll(), [Line(2, {"step": 2})])
        self.assertEqual(tail.poll(), [])

    def test_tells_of_removed_lines(self):
        tail = Tail(self.metrics)
        self.add({"step": 1}, {"step": 2}, {"step": 3})
        tail.poll()
        self.replace({"step": 1}, {"step": 1, "rewound_from": 3}, {"step": 2, "loss": 9})
        self.assertEqual(tail.poll(), [Removed(2), Line(1, {"step": 1, "rewound_from": 3}), Line(2, {"step": 2, "loss": 9})])
        self.assertEqual(tail.lines()[-1], Line(2, {"step": 2, "loss": 9}))

    def test_what_is_no_metric_is_counted(self):
        tail = Tail(self.metrics)
        with open(self.metrics, "w") as f:
            f.write('{"step": 1}\nnothing\n[1]\n{"step": "2"}\n{"step": true}\n{"step": 3}\n')
        self.assertEqual([c.step for c in tail.poll()], [1, 3])
        self.assertEqual(tail.damaged, 4)


class EventFilesTest(RunTest):
    def test_reader_gives_the_numbers_of_metrics(self):
        lines = [line(s) for s in (1, 2, 3, 40)]
        self.add(*lines, {"step": 40, "validation_loss": None, "ranks": {"compute_seconds": {"most": 2.5, "most_rank": 3}}})
        code, out, err = self.program("--tensorboard")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("(5 lines of metrics)", out)
        self.expect_numbers(lines)
        (step, value), = self.scalars("validation/validation_loss")
        self.assertTrue(step == 40 and value != value)
        self.assertEqual(self.scalars("ranks/compute_seconds/most_rank"), [(40, 3)])
        text, = self.read().Tensors("configuration")
        self.assertIn(b'name = "tiny"', text.tensor_proto.string_val[0])

    def test_reader_gives_every_number_of_a_real_run(self):
        run = os.path.dirname(self.run_folder)
        with open(os.path.join(run, "text.txt"), "w") as f:
            f.write("all work and no play " * 500)
        with open(os.path.join(run, "config.toml"), "w") as f:
            f.write(TINY)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ANNULUS_")}
        subprocess.run([ANNULUS, "train", "config.toml"], cwd=run, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL,
                       env={**clean, "OMP_NUM_THREADS": "1"})
        self.run_folder = os.path.join(run, "runs", "tiny-001")
        code, _, err = self.program("--tensorboard", "--version=0.1.0")
        self.assertEqual((code, err), (0, ""))
        expected = {}
        with open(os.path.join(self.run_folder, "metrics.jsonl")) as f:
            for values in map(json.loads, f):
                for path, number in numbers_of(values):
                    expected.setdefault(path, []).append((values["step"], number))
        self.assertGreater(len(expected), 60)
        reader = self.read()
        # A number of a line itself is in a group that viewers show together; all others have their whole path.
        tags = {tuple(tag.split("/")): tag for tag in reader.Tags()["scalars"]}
        self.assertEqual(len(tags), len(expected), sorted(set(expected) ^ set(tags)))
        for path, points in expected.items():
            tag, = [tag for parts, tag in tags.items() if parts == path or (len(path) == 1 and len(parts) == 2 and parts[1:] == path)]
            read = [(e.step, e.value) for e in reader.Scalars(tag)]
            self.assertEqual([repr(p) for p in read], [repr((step, single(math.nan if v is None else v))) for step, v in points], tag)

    def test_goes_on_where_it_ended(self):
        lines = [line(s) for s in (1, 2, 3, 4)]
        self.add(*lines[:2])
        self.assertEqual(self.program("--tensorboard")[0], 0)
        self.add(*lines[2:])
        self.assertIn("(2 lines of metrics)", self.program("--tensorboard")[1])
        self.expect_numbers(lines)

    def test_a_run_that_was_resumed_without_a_follower(self):
        self.add(*(line(s) for s in (1, 2, 3, 4)))
        self.program("--tensorboard")
        again = [line(1), line(2), line(3, loss=7.5), line(5)]
        self.replace(*again)
        self.assertEqual(self.program("--tensorboard")[0], 0)
        self.expect_numbers(again)

    def test_a_run_that_goes_back_while_it_is_followed(self):
        sink = event_files.EventFiles(os.path.join(self.run_folder, "tensorboard"))
        one = follower.Follower(self.run_folder, [sink])
        one.begin()
        self.add(*(line(s) for s in (10, 20, 30)))
        self.assertEqual(one.poll(), 3)
        self.expect_numbers([line(s) for s in (10, 20, 30)])  # they are on disk while the run goes on
        self.replace(line(10), line(20), {"step": 20, "rewound_from": 30, "gradient_norm": 1e9}, line(30, loss=0.5))
        self.assertEqual(one.poll(), 2)
        one.end()
        self.expect_numbers([line(10), line(20), line(30, loss=0.5)])
        self.assertEqual(self.scalars("training/rewound_from"), [(20, 30)])
        self.assertNotIn(1e9, [v for _, v in self.scalars("training/gradient_norm")])

    def test_a_follower_that_was_killed(self):
        sink = event_files.EventFiles(os.path.join(self.run_folder, "tensorboard"))
        one = follower.Follower(self.run_folder, [sink])
        one.begin()
        self.add(line(1), line(2))
        one.poll()
        del one  # without its end
        self.add(line(3))
        self.assertIn("(3 lines of metrics)", self.program("--tensorboard")[1])
        self.expect_numbers([line(1), line(2), line(3)])

    def test_pictures_of_evaluations(self):
        os.mkdir(os.path.join(self.run_folder, "pictures"))
        with open(os.path.join(self.run_folder, "pictures", "perplexity.svg"), "w") as f:
            f.write(SVG)
        with open(os.path.join(self.run_folder, "broken.png"), "w") as f:
            f.write("no picture")
        self.add(line(7))
        code, _, err = self.program("--tensorboard")
        self.assertEqual(code, 0)
        self.assertIn("broken.png is left out", err)
        image, = self.read().Images("evaluation/perplexity")
        self.assertEqual((image.step, image.width, image.height, image.encoded_image_string[:4]), (7, 80, 60, b"\x89PNG"))
        self.program("--tensorboard")
        self.assertEqual(len(self.read().Images("evaluation/perplexity")), 1)

    def test_following_ends_with_the_run(self):
        self.add(line(1))
        parent = subprocess.Popen(["bash", "-c", '"$@" --parent=$$ & read -r', "-", PYTHON, "-I", "-B", PROGRAM, "--run=" + self.run_folder,
                                   "--tensorboard", "--follow"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        state = os.path.join(self.run_folder, "tensorboard", ".state.json")
        until = time.monotonic() + LIMIT
        while not os.path.exists(state) and time.monotonic() < until:
            time.sleep(0.05)
        self.add(line(2))
        parent.stdin.close()
        out = parent.stdout.read().decode()  # until the follower has ended, too
        parent.stdout.close()
        parent.wait(LIMIT)
        self.assertIn("(2 lines of metrics)", out)
        self.expect_numbers([line(1), line(2)])


class MistakesTest(RunTest):
    def test_a_run_of_another_version_is_said(self):
        self.add({"step": 0, "started": {"version": "9.9"}}, line(1), {"step": 1, "started": {"version": "9.9"}}, line(2))
        for version, said in (("0.1.0", ["annulus: [report] the run is of annulus 9.9, this program of 0.1.0: numbers may have other "
                                         "names, or mean something else"]), ("9.9", [])):
            self.add(line(3))
            shutil.rmtree(os.path.join(self.run_folder, "tensorboard"), ignore_errors=True)
            code, _, err = self.program("--tensorboard", "--version=" + version)
            self.assertEqual((code, err.splitlines()), (0, said))

    def test_half_a_line_at_the_end_is_said(self):
        self.add(line(1), line(2), end="")
        code, out, err = self.program("--tensorboard")
        self.assertEqual(code, 0)
        self.assertIn("(1 lines of metrics)", out)
        self.assertIn("metrics.jsonl ends within a line, which is left out: it is being written, or a process was killed", err)
        self.expect_numbers([line(1)])
        self.add(end="\n")
        code, _, err = self.program("--tensorboard")
        self.assertEqual((code, err), (0, ""))
        self.expect_numbers([line(1), line(2)])

    def expect_refused(self, exit_code, *texts):
        code, out, err = self.program("--tensorboard")
        self.assertEqual((code, out), (exit_code, ""), err)
        for text in texts:
            self.assertIn(text, err)

    def test_without_metrics_nothing_is_written(self):
        self.expect_refused(3, "metrics.jsonl holds no line of metrics", "--follow")
        self.add({"step": 1}, end="")
        self.expect_refused(3, "metrics.jsonl holds no line of metrics")
        self.assertEqual(sorted(os.listdir(self.run_folder)), ["config.toml", "metrics.jsonl"])

    def test_a_folder_that_is_no_run(self):
        os.remove(os.path.join(self.run_folder, "config.toml"))
        self.expect_refused(3, "this is not a run folder")

    def test_two_at_a_time(self):
        self.add(line(1))
        lock = follower.hold(self.run_folder, "tensorboard")
        self.expect_refused(7, "another process writes to")
        lock.close()

    def test_a_folder_that_cannot_be_written(self):
        self.add(line(1))
        with open(os.path.join(self.run_folder, "tensorboard"), "w"):
            pass
        self.expect_refused(8, "tensorboard")


def wandb_rows(path):
    """The history of a .wandb file: a log of LevelDB's format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2
    with open(path, "rb") as f:
        data = f.read()
    at, part, rows = 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = wandb_internal_pb2.Record.FromString(part)
            part = b""
            if record.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows


WANDB_GOES_BACK = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import follower, wandb_records
run, path = sys.argv[2], os.path.join(sys.argv[2], "metrics.jsonl")
one = follower.Follower(run, [wandb_records.WandbRecords(run, {})])
one.begin()
for lines in sys.argv[3:]:
    with open(path + ".new", "w") as f:
        f.writelines(json.dumps(line) + "\\n" for line in json.loads(lines))
    os.replace(path + ".new", path)
    one.poll()
one.end()
"""


class WandbTest(RunTest):
    def setUp(self):
        super().setUp()
        try:
            import wandb  # noqa: F401
        except ImportError:
            self.skipTest("wandb is not installed: python/follower/wheels.sh --wandb")

    def test_records_hold_the_numbers_of_metrics(self):
        lines = [line(s) for s in (1, 2, 3)]
        self.add(*lines)
        code, out, err = self.program("--wandb")
        self.assertEqual((code, err), (0, ""))
        self.assertIn("wandb sync", out)
        record, = glob.glob(os.path.join(self.run_folder, "wandb", "offline-run-*", "*.wandb"))
        rows = [r for r in wandb_rows(record) if "training/loss" in r]
        self.assertEqual([(r["step"], r["training/loss"], r["sources/web/epochs"]) for r in rows],
                         [(v["step"], v["loss"], v["sources"]["web"]["epochs"]) for v in lines])

    def test_a_run_that_goes_back_is_another_record(self):
        # In a process of its own, because the client's files are complete once its process has ended.
        subprocess.run([PYTHON, "-B", "-c", WANDB_GOES_BACK, PROGRAM, self.run_folder, json.dumps([line(1), line(2)]),
                        json.dumps([line(1), line(2, loss=9.5), line(3)])], check=True, timeout=LIMIT)
        records = glob.glob(os.path.join(self.run_folder, "wandb", "offline-run-*", "*.wandb"))
        steps = sorted([(r["step"], r["training/loss"]) for r in wandb_rows(p) if "training/loss" in r] for p in records)
        self.assertEqual(steps, [[(1, 5.0), (2, 2.5)], [(1, 5.0), (2, 9.5), (3, 5 / 3)]])


if __name__ == "__main__":
    unittest.main()
