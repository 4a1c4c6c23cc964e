"""`tokenizer encode`: encodes the texts that come from standard input, one after the other, until that ends. Run by
launcher/tokens/tokenizer_process.cc, for `annulus sample`.

A request is a line `beginning SIZE` or `bare SIZE` and a text of SIZE bytes in UTF-8. Its answer is a line with the ids as a
list in JSON. The first error ends the program.

`beginning` encodes a prompt, which is the beginning of a document: it gets the token that documents begin with but not the one
they end with. `bare` adds no token.
"""

import itertools
import json
import os
import sys

from errors import INPUT, Refused, unreadable
from state import FINAL, read_json
from tokenizer import Tokenizer


class Encoder:
    """Encodes texts with the tokenizer at `path`, and with the settings of the shards if it lies beside some. Raises Refused."""

    def __init__(self, path):
        made = read_json(os.path.join(os.path.expanduser(path), FINAL)) or {}  # how the shards in that folder were made
        settings = made.get("settings", {})
        self.tokenizer = Tokenizer(path, special_tokens=False, specials_as_text=settings.get("specials_as_text", False))
        if made and made["tokenizer"]["digest"] != self.tokenizer.digest:
            raise Refused(INPUT, f"{self.tokenizer.file} is not the tokenizer that made the shards beside it; restore that "
                                 "tokenizer")
        self.begin = made.get("begin")
        self.front = self.tokens_in_front() if settings.get("special_tokens", True) else []

    def tokens_in_front(self):
        """Returns the tokens that the tokenizer's post-processor puts before a text."""
        if self.tokenizer.kind != "tokenizers":
            return []
        library = self.tokenizer.behind.library
        # The library tells the post-processor's tokens from those of a text, which must have one to divide them.
        for text in itertools.chain("a", self.tokenizer.behind.vocabulary):
            try:
                encoding = library.encode(text)
            except Exception:  # plain Exception: the vocabulary lacks a part of this text
                continue
            if 0 in encoding.special_tokens_mask:
                return encoding.ids[:encoding.special_tokens_mask.index(0)]
        return []

    def encode(self, text, beginning):
        try:
            ids = list(self.tokenizer.encode([text])[0])
        except Exception as error:  # the libraries raise plain Exception
            raise Refused(INPUT, f"{self.tokenizer.file} cannot encode a text of {len(text):,} characters: {error}")
        if not beginning:
            return ids
        ids = self.front + ids
        return ids if self.begin is None or ids[:1] == [self.begin] else [self.begin] + ids


def main(options):
    encoder = Encoder(options.tokenizer)
    requests, answers = sys.stdin.buffer, sys.stdout
    try:
        while header := requests.readline():
            what, size = header.split()
            text = requests.read(int(size))
            if len(text) < int(size):
                break  # the program that asks is gone
            try:
                ids = encoder.encode(text.decode("utf-8"), what == b"beginning")
            except UnicodeDecodeError as error:
                raise Refused(INPUT, f"the text to encode is not UTF-8: byte {error.start} cannot be read")
            answers.write(json.dumps(ids, separators=(",", ":")) + "\n")
            answers.flush()
    except BrokenPipeError:
        pass  # likewise
    except OSError as error:
        raise unreadable("the text to encode", error)
    return 0
