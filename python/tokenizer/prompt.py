"""`tokenizer encode-prompt`: reads a text from standard input and writes its ids as JSON to standard output. Run by
`annulus sample`.

A prompt is the beginning of a document, so it gets the token that documents begin with but not the one they end with.
"""

import json
import os
import sys

from errors import INPUT, Refused, unreadable
from state import FINAL, read_json
from tokenizer import Tokenizer


def encode_prompt(path, text):
    made = read_json(os.path.join(os.path.expanduser(path), FINAL)) or {}  # how the shards in that folder were made
    settings = made.get("settings", {})
    options = {"specials_as_text": settings.get("specials_as_text", False)}
    tokenizer = Tokenizer(path, settings.get("special_tokens", True), **options)
    if made and made["tokenizer"]["digest"] != tokenizer.digest:
        raise Refused(INPUT, f"{tokenizer.file} is not the tokenizer that made the shards beside it; restore that tokenizer")
    ids = list(tokenizer.encode([text])[0])
    if tokenizer.kind == "tokenizers":
        # Leave out the tokens that the post-processor adds after a text.
        def plain(of):
            return tokenizer.behind.library.encode(of, add_special_tokens=False).ids

        some, with_all = plain("a"), tokenizer.encode(["a"])[0]
        front = next((n for n in range(len(with_all)) if with_all[n:n + len(some)] == some), 0)
        ids = ids[:front + len(plain(text))]
    begin = made.get("begin")
    return ids if begin is None or ids[:1] == [begin] else [begin] + ids


def main(options):
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(INPUT, f"the prompt is not UTF-8: byte {error.start} cannot be read")
    except OSError as error:
        raise unreadable("the prompt", error)
    print(json.dumps(encode_prompt(options.tokenizer, text)))
    return 0
