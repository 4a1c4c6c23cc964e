"""Writes shards of tokens, with one class for each format; docs/reference/formats.md describes their layouts. Used by work.py and
state.py.

A shard is written in its folder under a hidden name, synced, and renamed, so it exists as a whole or not at all. Its entry
in tokenization.json holds the checksum of what was written: XXH3-128 of the file, or of Megatron's .bin followed by its
.idx; and apart from these that of the file of targets, which formats without weights have beside them.
"""

import os
import struct
from array import array

import xxhash

from errors import USAGE, Refused

FORMATS = ("annulus", "megatron", "llmc", "nanogpt")
TARGETS_ENDING = ".targets"  # of the file of targets, behind the name of that of the tokens
NO_BRANCH = (1 << 64) - 1  # in place of the input behind which a branch goes on: it begins a tree
SAVED = ("rollouts", "positions", "positions_apart", "pairs", "pairs_apart")  # of trees.Tree
BOUNDARIES = ("annulus", "megatron")  # these store document boundaries; in the others the begin or end token marks them


def sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path, content):
    """Replaces the file by these bytes, or raises OSError and leaves it as it was."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.tmp")
    try:
        with open(beside, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, path)
    except BaseException:
        discard(beside)
        raise
    sync_folder(folder)


def discard(path):
    try:
        os.remove(path)
    except OSError:
        pass


def checksum(paths):
    state = xxhash.xxh3_128()
    for path in paths:
        with open(path, "rb") as f:
            while piece := f.read(1 << 22):
                state.update(piece)
    return state.hexdigest()


class Shard:
    """A shard that is being written. `width`: bytes of a token. Its methods raise OSError if the disk fails."""

    endings = (".bin",)  # of its files of tokens, in the order in which they are renamed
    stores_weights = False  # otherwise a file beside it has a byte for each token: 1 if it counts as a target
    header_bytes = 0

    def __init__(self, folder, stem, width, vocab, digest, marks):
        self.folder, self.width, self.vocab, self.digest = folder, width, vocab, digest
        self.marks = marks  # whether it says which tokens count as targets
        self.counted = self.without_targets = 0  # tokens that count; documents in which none does
        self.saved = {}  # what entries of shards with trees say of them
        self.names = [stem + ending for ending in self.endings]
        self.beside = [os.path.join(folder, f".{name}.tmp") for name in self.names]
        self.lengths, self.hashes = array("q"), array("Q")
        self.tokens = self.text_bytes = 0
        self.file = self.targets = None
        self.targets_name = stem + self.endings[0] + TARGETS_ENDING
        try:
            self.file = open(self.beside[0], "wb", buffering=1 << 20)
            self.file.write(bytes(self.header_bytes))
            if marks and not self.stores_weights:
                self.targets = open(self.targets_beside(), "wb", buffering=1 << 20)
        except BaseException:
            self.discard()
            raise

    def targets_beside(self):
        return os.path.join(self.folder, f".{self.targets_name}.tmp")

    def append(self, tokens, lengths, hashes, text_bytes, runs, trees):
        """Appends documents: their tokens as bytes, arrays with a number for each document, and for each the runs of its weights
        or None, and its trees.Tree or None."""
        if any(trees):
            self.append_trees(lengths, trees)
        self.file.write(tokens)
        self.lengths.extend(lengths)
        self.hashes.extend(hashes)
        self.tokens += sum(lengths)
        self.text_bytes += sum(text_bytes)
        if self.marks:
            self.append_weights(lengths, runs)

    def finish(self):
        """Renames the finished shard to its name; returns its entry in tokenization.json."""
        self.complete()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        entry = {"file": self.names[0], "tokens": self.tokens, "documents": len(self.lengths),
                 "bytes": sum(os.path.getsize(p) for p in self.beside), "text_bytes": self.text_bytes,
                 "checksum": checksum(self.beside)}
        if self.marks:
            entry |= {"counted": self.counted, "documents_without_targets": self.without_targets, **self.saved}
        if self.targets is not None:  # tokens are never there without it
            self.targets.flush()
            os.fsync(self.targets.fileno())
            self.targets.close()
            entry["targets_checksum"] = checksum([self.targets_beside()])
            os.replace(self.targets_beside(), os.path.join(self.folder, self.targets_name))
        for beside, name in zip(self.beside, self.names):
            os.replace(beside, os.path.join(self.folder, name))
        sync_folder(self.folder)
        return entry

    def append_weights(self, lengths, runs):
        for length, of_document in zip(lengths, runs):
            if length > 0:  # nothing predicts the first token of a document by itself
                first = of_document[0]
                self.without_targets += not (first[1] and first[0] > 1 or any(weight for _, weight in of_document[1:]))
            for count, weight in of_document:
                self.counted += count * (weight > 0)
                self.append_run(count, weight)

    def append_run(self, count, weight):
        self.targets.write(bytes([weight > 0]) * count)  # targets.py sees to it that weights are 0 and 1

    def append_trees(self, lengths, trees):
        raise NotImplementedError  # only for Annulus, as targets.settle() sees to

    def complete(self):
        pass

    def discard(self):
        for file in self.file, self.targets:
            if file is not None:
                try:
                    file.close()
                except OSError:
                    pass
        for path in [*self.beside, self.targets_beside()]:
            discard(path)


class Annulus(Shard):
    endings = (".tokens",)
    stores_weights = True
    header_bytes = 4096

    def __init__(self, *settings):
        super().__init__(*settings)
        self.ends, self.weights = array("Q"), array("f")  # of the runs
        self.weighed = 0  # tokens of all runs
        self.trees = False  # whether documents are trees; of their branches:
        self.begins, self.afters = array("Q"), array("Q")

    def append_trees(self, lengths, trees):
        self.trees, at = True, self.tokens
        for length, tree in zip(lengths, trees):
            self.begins.extend(at + begin for begin, _ in tree.branches)
            self.afters.extend(NO_BRANCH if after < 0 else at + after for _, after in tree.branches)
            for key in SAVED:
                self.saved[key] = self.saved.get(key, 0) + getattr(tree, key)
            at += length

    def append_run(self, count, weight):
        self.weighed += count
        if self.weights and self.weights[-1] == weight:
            self.ends[-1] = self.weighed
        else:
            self.ends.append(self.weighed)
            self.weights.append(weight)

    def complete(self):
        f = self.file
        end = self.header_bytes + self.tokens * self.width
        offsets_at = (end + 7) // 8 * 8
        offsets = array("Q", [0])
        total = 0
        for length in self.lengths:
            total += length
            offsets.append(total)
        f.write(bytes(offsets_at - end))
        f.write(offsets.tobytes())
        f.write(self.hashes.tobytes())
        if self.marks:
            f.write(self.ends.tobytes())
            f.write(self.weights.tobytes())
            f.write(bytes(-len(self.weights) % 2 * 4))
        branches_at = f.tell()
        f.write(self.begins.tobytes())
        f.write(self.afters.tobytes())
        f.flush()
        body = xxhash.xxh3_128()
        with open(self.beside[0], "rb") as written:
            written.seek(self.header_bytes)
            while piece := written.read(1 << 22):
                body.update(piece)
        f.seek(0)
        version = 3 if self.trees else 2 if self.marks else 1
        f.write(struct.pack("<8sIIQQQQQ", b"ANNTOKEN", version, self.width, self.tokens, len(self.lengths), self.vocab,
                            offsets_at, offsets_at + len(offsets) * 8)
                + bytes.fromhex(self.digest) + body.digest() + struct.pack("<Q", self.text_bytes))
        if self.marks:
            above = [weight for weight in self.weights if weight > 0] or [0.0]
            f.write(struct.pack("<QQQff", offsets_at + len(offsets) * 8 + len(self.hashes) * 8, len(self.ends), self.counted,
                                min(above), max(above)))
        if self.trees:
            f.write(struct.pack("<QQ", branches_at, len(self.begins)))


class Megatron(Shard):
    endings = (".bin", ".idx")
    INT32, UINT16 = 4, 8

    def complete(self):
        if max(self.lengths, default=0) >= 1 << 31:
            raise Refused(USAGE, "a document has 2^31 tokens or more, which Megatron's index cannot hold; use --format annulus")
        documents = len(self.lengths)
        pointers = array("q")
        at = 0
        for length in self.lengths:
            pointers.append(at)
            at += length * self.width
        with open(self.beside[1], "wb") as f:
            code = self.UINT16 if self.width == 2 else self.INT32
            f.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, documents, documents + 1))
            f.write(array("i", self.lengths).tobytes())
            f.write(pointers.tobytes())
            f.write(array("q", range(documents + 1)).tobytes())
            f.flush()
            os.fsync(f.fileno())


class Llmc(Shard):
    header_bytes = 1024

    def complete(self):
        if self.tokens >= 1 << 31:
            raise Refused(USAGE, "a document has 2^31 tokens or more, which llm.c's header cannot hold; use --format annulus")
        magic, version = (20240520, 1) if self.width == 2 else (20240801, 7)
        self.file.seek(0)
        self.file.write(struct.pack("<3i", magic, version, self.tokens))


class Nanogpt(Shard):
    pass


CLASSES = {"annulus": Annulus, "megatron": Megatron, "llmc": Llmc, "nanogpt": Nanogpt}


def shard_name(format, number, single):
    """Returns the name of a shard without its ending. `single`: all tokens go to one shard."""
    if format == "llmc":
        return f"tokens_train_{number:06d}"
    if format == "nanogpt":
        return "train" if single else f"train-{number:05d}"
    return f"shard-{number:05d}"


def new_shard(format, folder, number, single, width, vocab, digest, marks):
    return CLASSES[format](folder, shard_name(format, number, single), width, vocab, digest, marks)
