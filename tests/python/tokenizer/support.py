"""Used by the tests of python/tokenizer/ and by integration_tests/cli_tokenize_test.py: the Python that has the tokenizers'
libraries, small tokenizers, inputs of every kind, and readers of every format that share no code with the program.

A test begins with `support.enter()`, before it imports a library. The first argument of its command line is that Python.
"""

import ctypes
import functools
import gzip
import json
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import unittest
import uuid

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
PROGRAM = os.path.join(ROOT, "python", "tokenizer")
LIMIT = 100  # seconds until a command counts as hung
KINDS = ("llama2", "mistral", "llama3", "qwen2", "sentencepiece")


def enter():
    """Starts this program again with the Python that is named by its first argument."""
    if os.environ.get("ANNULUS_TOKENIZER_PYTHON"):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return
    python = sys.argv.pop(1)
    os.environ["ANNULUS_TOKENIZER_PYTHON"] = python
    os.execv(python, [python, "-B", *sys.argv])


def main():
    sys.path.insert(0, os.path.join(ROOT, "integration_tests"))
    import shards

    shards.main()


NASTY = [
    "", " ", "\n", "\n\n\n", "\t \t", "  two spaces before, and behind  ", "a", "\0", "a\0b", "\x01\x02\x7f\x1b[0m", "\r\n\r", "\ufeffmark",
    "<s>", "</s> inside <s> of </s>", "<|begin_of_text|>", "a<|end_of_text|>b", "<|im_start|>user\n<|im_end|>", "<unk><0x0A>",
    "<|endoftext|><|endoftext|>", "\u2581 lower block \u2581\u2581", "I'm WE'LL they'Ve", "1234567890 3.14159 1,000,000",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea e\u0301 \u00e9 \ufb01", "\ud55c\uad6d\uc5b4 \u4e2d\u6587 \u65e5\u672c\u8a9e\u306e\u6587\u7ae0",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u1308\u12d5\u12dd", "\u03b5\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8", "\U00020000\U0010ffff\ufffd\uffff",
    "x" * 5000, " " * 3000, "\n" * 2000, "ab " * 40000, "\U0001f600" * 500,
]


def texts(count, seed=1):
    """Returns random documents of words, with those of NASTY among them."""
    draw = random.Random(seed)
    words = ["the", "token", "def f(x):\n", "    return", "=", "1234", "\u00fc\u00f1\u00ef", "\u4e16\u754c", "\U0001f389", "<s>", "--", "\n\n", "it's"]
    made = [" ".join(draw.choices(words, k=draw.randrange(0, 400))) for _ in range(count)]
    for nasty in NASTY:
        made.insert(draw.randrange(len(made) + 1), nasty)
    return made


@functools.cache
def make():
    """Returns the module examples/tokens/make.py."""
    sys.path.insert(0, os.path.join(ROOT, "examples", "tokens"))
    import make

    return make


@functools.cache
def corpus():
    """Returns the texts that tokenizers are trained on."""
    paths = list(make().python_sources())[:60]
    return [text for _, text in make().documents(paths, 400_000)] + texts(50, seed=2)


@functools.cache
def tokenizer_folders():
    return tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))


@functools.cache
def tokenizer(kind):
    """Returns the folder of a tokenizer, one of KINDS, which is trained when it is first asked for."""
    make().write_tokenizer(tokenizer_folders().name, kind, corpus(), 1000)
    return os.path.join(tokenizer_folders().name, kind)


def library_ids(kind, documents, special_tokens=True):
    """Returns the ids that one call of the library gives for each document."""
    if kind == "sentencepiece":
        import sentencepiece

        library = sentencepiece.SentencePieceProcessor(model_file=os.path.join(tokenizer(kind), "tokenizer.model"))
        return [library.encode(text) for text in documents]
    import tokenizers as library

    loaded = library.Tokenizer.from_file(os.path.join(tokenizer(kind), "tokenizer.json"))
    return [loaded.encode(text, add_special_tokens=special_tokens).ids for text in documents]


# ---- Inputs.


def write_jsonl(path, documents, field="text"):
    lines = b"".join(json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0).encode() + b"\n"
                     for i, text in enumerate(documents))
    if path.endswith(".gz"):
        half = len(lines) // 2
        lines = gzip.compress(lines[:half]) + gzip.compress(lines[half:])  # two members
    elif path.endswith(".zst"):
        import zstandard

        half = len(lines) // 2
        lines = zstandard.compress(lines[:half]) + zstandard.compress(lines[half:])
    with open(path, "wb") as f:
        f.write(lines)


def write_parquet(path, documents, field="text", rows=100):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(documents))), field: documents}), path,
                                row_group_size=rows)


# ---- Independent readers, which return a folder's documents as lists of ids.


def made_by(folder):
    with open(os.path.join(folder, "tokenization.json")) as f:
        return json.load(f)


def unpack(data, width):
    return list(struct.unpack(f"<{len(data) // width}{'H' if width == 2 else 'I'}", data))


def read_annulus(path):
    with open(path, "rb") as f:
        data = f.read()
    magic, version, width, tokens, documents, _, offsets, hashes = struct.unpack_from("<8sIIQQQQQ", data)
    assert (magic, version) == (b"ANNTOKEN", 1)
    assert len(data) == hashes + 8 * documents and offsets % 8 == 0
    ids = unpack(data[4096:4096 + tokens * width], width)
    places = struct.unpack_from(f"<{documents + 1}Q", data, offsets)
    assert places[0] == 0 and places[-1] == tokens
    return [ids[a:b] for a, b in zip(places, places[1:])]


def read_megatron(path):
    with open(path[:-4] + ".idx", "rb") as f:
        index = f.read()
    with open(path, "rb") as f:
        data = f.read()
    magic, version, code, sequences, ends = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version) == (b"MMIDIDX\0\0", 1) and len(index) == 34 + 12 * sequences + 8 * ends
    width = {4: 4, 8: 2}[code]
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{ends}q", index, 34 + 12 * sequences)
    parts = [unpack(data[p:p + n * width], width) for p, n in zip(pointers, lengths)]
    assert sum(lengths) * width == len(data)
    return [sum(parts[a:b], []) for a, b in zip(documents, documents[1:])]


def split(ids, begin, end):
    found = []
    for i, token in enumerate(ids):
        if i == 0 or (begin is None or token == begin) and (end is None or ids[i - 1] == end):
            found.append([])
        found[-1].append(token)
    return found


def read_llmc(path, begin, end):
    with open(path, "rb") as f:
        header = struct.unpack("<256i", f.read(1024))
        data = f.read()
    width = {(20240520, 1): 2, (20240801, 7): 4}[header[:2]]
    ids = unpack(data, width)
    assert header[2] == len(ids) and not any(header[3:])
    return split(ids, begin, end)


def read_nanogpt(path, width, begin, end):
    with open(path, "rb") as f:
        return split(unpack(f.read(), width), begin, end)


def read_folder(folder):
    """Returns (all documents, the documents of each shard)."""
    made = made_by(folder)
    shards = []
    for shard in made["shards"]:
        path = os.path.join(folder, shard["file"])
        shards.append({
            "annulus": lambda: read_annulus(path),
            "megatron": lambda: read_megatron(path),
            "llmc": lambda: read_llmc(path, made["begin"], made["end"]),
            "nanogpt": lambda: read_nanogpt(path, made["width"] // 8, made["begin"], made["end"]),
        }[made["format"]]())
        assert shard["tokens"] == sum(map(len, shards[-1])) and shard["documents"] == len(shards[-1])
    return sum(shards, []), shards


def contents(folder):
    """Returns {name: bytes} of all files of a folder."""
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as f:
            found[name] = f.read()
    return found


def wait_for(path, process):
    """Waits until a process has made this file in a folder that is there; takes no processor time meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    notes, ended = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), os.pidfd_open(process.pid)
    try:
        moved_to, created = 0x80, 0x100
        if libc.inotify_add_watch(notes, os.path.dirname(path).encode(), moved_to | created) < 0:
            raise OSError(ctypes.get_errno(), "the folder cannot be watched", path)
        while not os.path.exists(path):
            ready, _, _ = select.select([notes, ended], [], [], LIMIT)
            if notes in ready:
                os.read(notes, 65536)
            elif not os.path.exists(path):
                raise AssertionError(f"{path} was not made: " + ("the process ended" if ready else "it took too long"))
    finally:
        os.close(notes)
        os.close(ended)


class Test(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as f:
            f.write(content.encode() if isinstance(content, str) else content)
        return self.path(name)

    def words(self, *options, kind="llama3", output="out"):
        return ["tokenize", "--tokenizer", tokenizer(kind), "--output", self.path(output), *options]

    def start(self, words, **more):
        self.mark = uuid.uuid4().hex
        env = {**os.environ, "CLI_TEST_MARK": self.mark, "LC_ALL": "C", **more.pop("env", {})}
        more = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen([sys.executable, "-I", "-B", PROGRAM, *words], cwd=self.folder, env=env, **more)

    def run_words(self, words, **more):
        """Returns (exit code, standard output, standard error)."""
        process = self.start(words, **more)
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err

    def tokenize(self, *options, **more):
        code, out, err = self.run_words(self.words(*options, **more))
        self.assertEqual((code, err), (0, ""), out)
        return out

    def refused(self, code, pattern, words, **more):
        """Checks that the call fails with one error line that matches the pattern, and prints nothing else."""
        got, out, err = self.run_words(words, **more)
        self.assertEqual(got, code, err)
        self.assertEqual(out, "")
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertRegex(err, r"^annulus: \[tokenize\] .*" + pattern)
