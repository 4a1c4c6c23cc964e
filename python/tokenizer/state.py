"""The state of the output folder: tokenization.json once all shards are finished, .tokenizing.json until then. Used by
work.py; its read_json also by prompt.py; docs/reference/formats.md describes tokenization.json."""

import fcntl
import json
import os
import re

import xxhash

from errors import BUSY, INPUT, RESOURCE, Refused
from files import open_file
from shards import TARGETS_ENDING, discard, shard_name, write_whole

FINAL, STATE = "tokenization.json", ".tokenizing.json"
LEFT_BEHIND = re.compile(r"\.(shard-\d+|train(-\d+)?|tokens_train_\d+|tokenization|\.tokenizing|tokens|tokenizer)(\.\w+)+\.tmp")


def read_json(path):
    """Returns the content of a JSON file, None if it does not exist. Raises Refused if it cannot be read."""
    try:
        with open_file(path) as f:
            return json.load(f)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Refused(INPUT, f"{path} cannot be read: {error}")


class Folder:
    """The output folder, which this process holds locked until it ends. Raises Refused."""

    def __init__(self, path, about):
        """`about`: `tokenizer`, `settings` and `inputs`, which must be the same for shards to belong together."""
        self.path, self.about = path, about
        self.shards, self.next = [], {"input": 0, "unit": 0, "document": 0}
        self.made = not os.path.isdir(path)
        try:
            os.makedirs(path, exist_ok=True)
            self.lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise Refused(RESOURCE, f"the output folder {path} cannot be made: {error.strerror}")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(BUSY, f"another process is making the shards in {path}; wait until it ends")
        self.finished = read_json(self.place(FINAL))
        state = read_json(self.place(STATE))
        if self.finished is not None:
            self.require_same(self.finished, "holds the shards")
        elif state is not None:
            self.require_same(state, "holds shards of an unfinished call")
            self.shards, self.next = state["shards"], state["next"]
            self.require_shards()
        else:
            self.require_empty()
        for name in os.listdir(path):
            if LEFT_BEHIND.fullmatch(name):
                discard(self.place(name))

    def place(self, name):
        return os.path.join(self.path, name)

    def require_same(self, there, what):
        other = "choose another --output, or remove that folder"
        here = self.about
        try:
            if there["tokenizer"]["digest"] != here["tokenizer"]["digest"]:
                raise Refused(INPUT, f"{self.path} {what} of another tokenizer, {there['tokenizer']['name']} (digest "
                                     f"{there['tokenizer']['digest']}; this one's is {here['tokenizer']['digest']}): {other}")
            for key, value in here["settings"].items():
                if there["settings"].get(key) != value:
                    raise Refused(INPUT, f"{self.path} {what} that were made with {key} = "
                                         f"{json.dumps(there['settings'].get(key))}, but this call has "
                                         f"{json.dumps(value)}: {other}")
            before, now = there["inputs"], here["inputs"]
        except (KeyError, TypeError) as error:
            raise Refused(INPUT, f"{self.path} is a folder of shards that this version cannot read ({error}): {other}")
        if before == now:
            return
        if isinstance(before, list):
            for (path, *size), (path_now, *size_now) in zip(before, now):
                if path == path_now and size != size_now:
                    raise Refused(INPUT, f"{path} has changed since tokenizing into {self.path} began: its tokens would "
                                         f"not fit those of the finished shards; {other}")
        raise Refused(INPUT, f"{self.path} {what} of other input files: {other}")

    def require_shards(self):
        for entry in self.shards:
            try:
                names = [entry["file"]] + [entry["file"][:-3] + "idx"] * (self.about["settings"]["format"] == "megatron")
                there = sum(os.path.getsize(self.place(name)) for name in names)
            except OSError as error:
                raise Refused(INPUT, f"{self.place(entry['file'])}, a finished shard, cannot be read: {error.strerror}; "
                                     "remove the output folder to begin again")
            targets = self.place(entry["file"] + TARGETS_ENDING)
            if "targets_checksum" in entry and not os.path.exists(targets):
                raise Refused(INPUT, f"{targets}, of a finished shard, is missing: remove the output folder to begin again")
            if there != entry["bytes"]:
                raise Refused(INPUT, f"{self.place(entry['file'])}, a finished shard, has changed: remove the output "
                                     "folder to begin again")

    def require_empty(self):
        for name in os.listdir(self.path):
            if not name.startswith(".") and (name in ("tokens.table", "tokenizer.json", "tokenizer.model") or re.fullmatch(
                    r"(shard-\d+|train(-\d+)?|tokens_train_\d+)\.(tokens|bin|idx)(\.targets)?", name)):
                raise Refused(INPUT, f"{self.place(name)} exists already, but not from a call of tokenize that can be "
                                     "continued: choose another --output, or remove it")

    def save(self):
        state = {"version": 1, **self.about, "next": self.next, "shards": self.shards}
        write_whole(self.place(STATE), json.dumps(state).encode())

    def add(self, entry, next):
        self.shards.append(entry)
        self.next = next
        self.save()

    def give_up(self):
        """Called after an error: removes everything of a call that has finished no shard."""
        if not self.shards and self.finished is None:
            discard(self.place(STATE))
            if self.made:
                try:
                    os.rmdir(self.path)
                except OSError:
                    pass

    def finish(self, description):
        write_whole(self.place(FINAL), (json.dumps(description, indent=1) + "\n").encode())
        discard(self.place(STATE))


def inputs_digest(inputs):
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())
