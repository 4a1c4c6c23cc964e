#!/usr/bin/env python3
"""Tests `annulus checkpoint`: showing, verifying and merging what a run of two ranks has saved, and its errors."""

import json
import os
import shutil
import struct
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cli  # noqa: E402

CONFIG = """
run = { name = "tiny", steps = 4, seed = 3 }
data = { train = ["text.txt"], context = 32, batch = 2 }
model = { layers = 1, dim = 32, heads = 2 }
optimizer.lr = 0.01
validation.every = 0
checkpoint.every = 2
"""
STEP = "runs/tiny-001/checkpoints/step-{:08}"


def tensors(path):
    """Returns {name: (dtype, shape, bytes)} of a safetensors file, read by its format."""
    with open(path, "rb") as f:
        content = f.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    header.pop("__metadata__", None)
    data = content[8 + length:]
    return {
        name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()
    }


def whole_tensors(folder):
    """Returns the tensors of a checkpoint's model, put together from the slices that its manifest names."""
    with open(os.path.join(folder, "manifest.json")) as f:
        manifest = json.load(f)
    files = {name: tensors(os.path.join(folder, name)) for name in manifest["files"]}
    found = {}
    for tensor in manifest["tensors"]:
        if tensor["name"].startswith("optimizer."):
            continue
        parts = []
        for part in tensor["slices"]:
            own = files[part["file"]]
            parts.append(own.get(tensor["name"]) or own[f"{tensor['name']}[{part['begin']}:{part['end']}]"])
        found[tensor["name"]] = (tensor["dtype"], tensor["shape"], b"".join(p[2] for p in parts))
    return found


class CheckpointTest(cli.CliTest):
    @classmethod
    def setUpClass(cls):
        cls.made = None

    def setUp(self):
        super().setUp()
        if CheckpointTest.made is None:
            with open(self.path("config.toml"), "w") as f:
                f.write(CONFIG)
            with open(self.path("text.txt"), "w") as f:
                f.write("all work and no play makes jack a dull boy\n" * 100)
            code, _, err = self.annulus("launch", "-n", "2", "train", "config.toml")
            self.assertEqual(code, 0, err)
            CheckpointTest.made = os.path.join(os.environ.get("TEST_TMPDIR", "/tmp"), f"runs-{os.getpid()}")
            shutil.copytree(self.path("runs"), CheckpointTest.made)
        else:
            shutil.copytree(CheckpointTest.made, self.path("runs"))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(CheckpointTest.made, ignore_errors=True)

    def damage(self, step, file, at):
        path = os.path.join(self.path(STEP.format(step)), file)
        with open(path, "r+b") as f:
            f.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
            byte = f.read(1)[0]
            f.seek(-1, os.SEEK_CUR)
            f.write(bytes([byte ^ 4]))

    def weights_file(self, step):
        return next(n for n in sorted(os.listdir(self.path(STEP.format(step)))) if n.startswith("model"))

    def test_show_describes_a_checkpoint(self):
        code, out, err = self.annulus("checkpoint", "show", "tiny")
        self.assertEqual(code, 0, err)
        self.assertEqual(out.splitlines()[0], STEP.format(4))
        for words in ("step         4\n", "written by   2 ranks, in version 2 of the format", "optimizer    F32: ",
                      "described as ", " dim = 32\n", "seed = 3\n", "steps here   2, 4\n"):
            self.assertIn(words, out)
        code, out, err = self.annulus("checkpoint", "show", "runs/tiny-001", "--step", "2", "--json")
        self.assertEqual(code, 0, err)
        shown = json.loads(out)
        self.assertEqual((shown["step"], shown["world"], shown["version"], shown["steps"]), (2, 2, 2, [2, 4]))
        self.assertEqual((shown["model"]["layers"], shown["extra"]["updates"]), ("1", "2"))
        wanted = whole_tensors(self.path(STEP.format(2)))
        got = {t["name"]: t for t in shown["tensors"] if not t["name"].startswith("optimizer.")}
        self.assertEqual(set(got), set(wanted))
        for name, (dtype, shape, content) in wanted.items():
            self.assertEqual((got[name]["dtype"], got[name]["shape"], got[name]["bytes"]), (dtype, shape, len(content)))

    def test_verify_names_damaged_places(self):
        code, out, err = self.annulus("checkpoint", "verify", "tiny")
        self.assertEqual(code, 0, err)
        self.assertIn(STEP.format(4) + ": whole: ", out)
        # Each damaged place is named by file, tensor and range; the other checkpoint is intact.
        weights = self.weights_file(4)
        self.damage(4, weights, -1)
        self.damage(4, weights, -30000)
        code, out, err = self.annulus("checkpoint", "verify", "tiny")
        self.assertEqual(code, 3, err)
        self.assertEqual(len(out.splitlines()), 2, out)
        for line in out.splitlines():
            self.assertRegex(line, f"^{STEP.format(4)}/{weights}: the checksum of tensor \"[a-z0-9_.]+\", "
                                   r"elements \[0:\d+\], does not match$")
        self.assertIn("is damaged in 2 places", err)
        self.assertEqual(self.annulus("checkpoint", "verify", "tiny", "--step", "2")[0], 0)
        os.remove(self.path(STEP.format(2) + "/" + self.weights_file(2)))
        self.assertEqual(self.annulus("checkpoint", "verify", "tiny", "--step", "2")[0], 3)
        self.damage(4, "manifest.json", 40)
        self.assert_refused(3, "manifest.json: ", "checkpoint", "verify", "tiny")

    def test_merge_writes_whole_tensors(self):
        code, out, err = self.annulus("checkpoint", "merge", "tiny", "--out", "all.safetensors")
        self.assertEqual((code, out), (0, "all.safetensors\n"), err)
        wanted = whole_tensors(self.path(STEP.format(4)))
        self.assertEqual(tensors(self.path("all.safetensors")), wanted)
        # A set of files: none is larger than allowed, and together they hold all tensors.
        total = sum(len(content) for _, _, content in wanted.values())
        most = max(len(content) for _, _, content in wanted.values())
        code, out, err = self.annulus("checkpoint", "merge", "tiny", "--out", "set/", "--max-file-bytes", str(most))
        self.assertEqual(code, 0, err)
        self.assertEqual(sorted(os.listdir(self.path("set"))), sorted(map(os.path.basename, out.splitlines())))
        with open(self.path("set/model.safetensors.index.json")) as f:
            index = json.load(f)
        self.assertEqual(index["metadata"]["total_size"], total)
        self.assertEqual(set(index["weight_map"]), set(wanted))
        files = sorted(set(index["weight_map"].values()))
        self.assertGreater(len(files), 1)
        self.assertEqual(files, [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))])
        together = {}
        for file in files:
            part = tensors(self.path("set/" + file))
            self.assertLessEqual(sum(len(content) for _, _, content in part.values()), most)
            self.assertTrue(all(index["weight_map"][name] == file for name in part))
            together.update(part)
        self.assertEqual(together, wanted)
        # One file is enough.
        code, out, err = self.annulus("checkpoint", "merge", "tiny", "--out", "one", "--max-file-bytes", "1GB")
        self.assertEqual((code, os.listdir(self.path("one"))), (0, ["model.safetensors"]), err)
        self.assertEqual(tensors(self.path("one/model.safetensors")), wanted)
        # A damaged checkpoint is skipped unless it is the one requested.
        self.damage(4, self.weights_file(4), -1)
        code, out, err = self.annulus("checkpoint", "merge", "tiny", "--out", "older.safetensors")
        self.assertEqual(code, 0, err)
        self.assertRegex(err, "skipped a checkpoint: .*elements")
        self.assertEqual(tensors(self.path("older.safetensors")), whole_tensors(self.path(STEP.format(2))))
        self.assert_refused(3, "the checksum of tensor", "checkpoint", "merge", "tiny", "--step", "4", "--out", "four")
        self.assertFalse([n for n in os.listdir(self.folder) if "four" in n])

    def test_refuses_invalid_arguments(self):
        os.mkdir(self.path("folder"))
        with open(self.path("there"), "w") as f:
            f.write("mine")
        for code, words, *args in (
            (2, "needs one of the words", ),
            (2, "unexpected argument \"shw\".*show", "shw", "tiny"),
            (2, "RUN is required", "show"),
            (2, "--out is required", "merge", "tiny"),
            (2, "unknown option --out", "show", "tiny", "--out", "x"),
            (2, "--max-file-bytes must be a number of bytes", "merge", "tiny", "--out", "x", "--max-file-bytes", "5X"),
            (2, "--out there already exists", "merge", "tiny", "--out", "there"),
            (2, "--out folder/ already exists", "merge", "tiny", "--out", "folder/", "--max-file-bytes", "1GB"),
            (8, "the folder of --out nowhere/x does not exist", "merge", "tiny", "--out", "nowhere/x"),
            (3, "it holds those of steps 2, 4", "show", "tiny", "--step", "3"),
            (3, "nothing", "show", "nothing"),
        ):
            with self.subTest(args=args):
                self.assert_refused(code, words, "checkpoint", *args)
        with open(self.path("there")) as f:
            self.assertEqual(f.read(), "mine")
        shutil.rmtree(self.path("runs/tiny-001/checkpoints"))
        self.assert_refused(3, "holds no checkpoint", "checkpoint", "verify", "runs/tiny-001")

    def test_full_disk_leaves_no_merged_file(self):
        for more in ([], ["--max-file-bytes", "20kB"]):
            # A limit on file sizes takes the place of a full disk: the write fails half-way.
            done = subprocess.run(
                ["bash", "-c", 'ulimit -f 16; exec "$0" "$@"', cli.ANNULUS, "checkpoint", "merge", "tiny",
                 "--out", "merged", *more],
                cwd=self.folder,
                env=cli.environment(),
                capture_output=True,
                text=True,
                timeout=cli.LIMIT,
            )
            self.assertEqual(done.returncode, 8, done.stderr)
            self.assertIn("cannot write merged", done.stderr)
            self.assertFalse([name for name in os.listdir(self.folder) if name.startswith("merged")])


cli.main()
