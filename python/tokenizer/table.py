"""Makes tokens.table, which holds the bytes of every id, so that programs can decode without the tokenizer's library
(runtime/data/shards/token_table.h reads it and describes its layout). Used by work.py, and by `tokenizer table`, which
`annulus sample` runs for a folder in Hugging Face's layout.

The bytes follow from the tokenizer's decoder. The table is then compared with the library: every id alone, every id twice
in a row, and random sequences. If the library decodes any of them differently, no table is made.
"""

import random
import struct
from array import array

import xxhash

from errors import INPUT, RESOURCE, Refused
from tokenizer import Tokenizer

KEEP, STRIP_ONE, STRIP_FIRST_TOKEN, STRIP_UNTIL_TEXT = range(4)  # the rule for spaces at the beginning of a text
ORDINARY, SPECIAL, UNUSED, UNSTRIPPED = range(4)  # SPECIAL: not text; UNSTRIPPED: keeps spaces that the rule strips
HEADER = 64
METASPACE = "\u2581"


class Unknown(Exception):
    """Says why there is no table for a decoder."""


def byte_level_characters():
    """Returns the byte that each of 256 characters stands for in a byte-level BPE: GPT-2's bytes_to_unicode, inverted."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    table = {chr(b): b for b in plain}
    others = [b for b in range(256) if b not in set(plain)]
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


def byte_token(text):
    """Returns the byte of a token such as "<0x0A>"; None for other tokens."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return None


def steps_of(decoder):
    if decoder is None:
        raise Unknown("the tokenizer has no decoder")
    return [step for one in decoder["decoders"] for step in steps_of(one)] if decoder["type"] == "Sequence" else [decoder]


def of_hugging_face(behind):
    """Returns (bytes by id, kinds by id, rule) of a tokenizer of Hugging Face's library. Raises Unknown."""
    characters, mark, rule, change = byte_level_characters(), METASPACE, KEEP, []
    steps = steps_of(behind.description.get("decoder"))
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            change.append(lambda t: bytes(map(characters.get, t)) if all(c in characters for c in t) else t.encode())
        elif kind == "Metaspace":
            mark = step.get("replacement", METASPACE)
            change.append(lambda t, mark=mark: t.replace(mark, " "))
            if step.get("prepend_scheme", "always") != "never":
                rule = STRIP_FIRST_TOKEN
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            change.append(lambda t, a=step["pattern"]["String"], b=step["content"]: t.replace(a, b))
        elif kind == "ByteFallback":
            change.append(lambda t: t if byte_token(t) is None else byte_token(t))
        elif kind == "Strip" and step["content"] == " " and step["start"] <= 1 and step["stop"] == 0:
            rule = STRIP_ONE if step["start"] else rule
        elif kind != "Fuse":
            raise Unknown(f"its decoder has a step of kind {kind}, which does not determine the bytes of single tokens")

    added = behind.library.get_added_tokens_decoder()
    texts, kinds = [b""] * behind.vocab, [UNUSED] * behind.vocab
    for as_written, i in behind.vocabulary.items():
        token = as_written
        for step in change:
            if isinstance(token, str):
                token = step(token)
        texts[i] = token if isinstance(token, bytes) else token.encode("utf-8")
        kinds[i] = SPECIAL if i in added and added[i].special else ORDINARY
        if rule == STRIP_FIRST_TOKEN and kinds[i] == ORDINARY and b" " in texts[i] and mark not in as_written:
            kinds[i] = UNSTRIPPED  # a space of the token itself
    return texts, kinds, rule


def of_sentencepiece(behind):
    library = behind.library
    texts, kinds = [], []
    for i in range(behind.vocab):
        piece, kind = library.id_to_piece(i), ORDINARY
        if library.is_control(i):
            piece, kind = piece.encode("utf-8"), SPECIAL
        elif library.is_unknown(i):
            piece, kind = library.decode([i]).encode("utf-8"), UNSTRIPPED
        elif library.is_byte(i):
            piece, kind = byte_token(piece), UNSTRIPPED
        elif library.is_unused(i):
            piece, kind = b"", UNUSED
        else:
            piece = piece.replace(METASPACE, " ").encode("utf-8")
        texts.append(piece)
        kinds.append(kind)
    # Which spaces are stripped depends on the model's normalizer; decoding a few ids shows it.
    marks = [i for i in range(behind.vocab) if texts[i].startswith(b" ") and texts[i].strip() and kinds[i] == ORDINARY]
    alone = library.piece_to_id(METASPACE)
    if not marks or not library.decode(marks[:1]).startswith(" "):
        several = alone != library.unk_id() and marks and not library.decode([alone, marks[0]]).startswith(" ")
        return texts, kinds, STRIP_UNTIL_TEXT if several else STRIP_ONE
    return texts, kinds, KEEP


def decode(texts, kinds, rule, ids, specials=False):
    """Returns the bytes that the table gives for some ids, by the rules of the program that reads it."""
    out, first = b"", True
    for i in ids:
        if kinds[i] == UNUSED or kinds[i] == SPECIAL and not specials:
            continue
        text = texts[i]
        if kinds[i] == UNSTRIPPED:
            pass
        elif rule == STRIP_FIRST_TOKEN and first:
            text = text.replace(b" ", b"")
        elif rule == STRIP_UNTIL_TEXT and not out or rule == STRIP_ONE and first:
            text = text[1:] if text.startswith(b" ") else text
        first = first and not (rule == STRIP_FIRST_TOKEN or texts[i])
        out += text
    return out


def library_decode(tokenizer):
    """Returns a function that decodes many sequences of ids to texts, without special tokens."""
    if tokenizer.kind == "tokenizers":
        return lambda lists: tokenizer.behind.library.decode_batch(lists, skip_special_tokens=True)
    return lambda lists: [tokenizer.behind.library.decode(ids) for ids in lists]


def disagreement(tokenizer, texts, kinds, rule):
    """Returns ids that the library decodes differently, None if there are none. If the table's bytes are not UTF-8, the
    library must write U+FFFD somewhere; which bytes these stand for cannot be compared."""
    used = [i for i in range(len(texts)) if kinds[i] != UNUSED]
    plain = [i for i in used if kinds[i] != SPECIAL]
    words = [i for i in plain if texts[i].strip() and texts[i].isascii()]
    draw = random.Random(1)
    lists = [[i] for i in used] + [[words[0], i, i] for i in used if words]
    lists += [draw.choices(used, k=32) for _ in range(500)] + [draw.choices(plain or used, k=32) for _ in range(500)]
    lists += [[i, j, k] for i in plain[:1] for j in plain[-40:] for k in plain[-40:]]
    for ids, said in zip(lists, library_decode(tokenizer)(lists)):
        ours = decode(texts, kinds, rule, ids)
        try:
            if ours.decode("utf-8") != said:
                return ids
        except UnicodeDecodeError:
            if "\ufffd" not in said:
                return ids
    return None


def make_table(tokenizer):
    """Returns (the content of the file, None), or (None, why there is no table)."""
    try:
        of = of_hugging_face if tokenizer.kind == "tokenizers" else of_sentencepiece
        texts, kinds, rule = of(tokenizer.behind)
    except Unknown as unknown:
        return None, str(unknown)
    wrong = disagreement(tokenizer, texts, kinds, rule)
    if wrong is not None:
        return None, f"the library decodes the ids {wrong[:8]} differently than the bytes of the tokens"
    offsets, total = array("Q", [0]), 0
    for text in texts:
        total += len(text)
        offsets.append(total)
    body = offsets.tobytes() + bytes(kinds) + b"".join(texts)
    header = struct.pack("<8sIIQQ", b"ANNTABLE", 1, rule, len(texts), total) + bytes.fromhex(tokenizer.digest)
    return header + xxhash.xxh3_128_digest(body) + body, None


def main(options):
    tokenizer = Tokenizer(options.tokenizer)
    content, why = make_table(tokenizer)
    if content is None:
        raise Refused(INPUT, f"the bytes of the tokens of {tokenizer.file} cannot be determined: {why}")
    try:
        with open(options.output, "wb") as f:
            f.write(content)
    except OSError as error:
        raise Refused(RESOURCE, f"{options.output} cannot be written: {error.strerror}")
    return 0
