"""One interface to the tokenizer libraries: Hugging Face's `tokenizers` for tokenizer.json, `sentencepiece` for
tokenizer.model. Used by work.py (documents), prompt.py (prompts and other single texts), table.py (decoding) and bench.py.

The ids of a text are those of one plain call of the library, `encode(text)`, with the tokens that its post-processor adds
unless `special_tokens` is false. Three settings that a tokenizer.json may have kept from its training are turned off:
truncation would lose text, padding would add tokens, and dropout would make the ids random.
"""

import json
import os

import xxhash

from errors import INPUT, USAGE, Refused, unreadable
from files import open_file

NAMES = ("tokenizer.json", "tokenizer.model")


def file_of(path):
    """Returns the file of the tokenizer at `path`, a file or a folder that contains one. Raises Refused."""
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        for name in NAMES:
            if os.path.isfile(os.path.join(path, name)):
                return os.path.join(path, name)
        raise Refused(INPUT, f"the folder {path} holds no tokenizer: expected {' or '.join(NAMES)} in it")
    if not os.path.exists(path):
        raise Refused(INPUT, f"there is no tokenizer {path}: name a tokenizer.json, a tokenizer.model or a folder with one")
    return path


class HuggingFace:
    kind = "tokenizers"

    def __init__(self, path, content, special_tokens, specials_as_text):
        import tokenizers

        try:
            self.library = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise Refused(INPUT, f"{path} is not a tokenizer.json that tokenizers {tokenizers.__version__} can read: {error}")
        self.library.no_truncation()
        self.library.no_padding()
        if getattr(self.library.model, "dropout", None):
            self.library.model.dropout = None
        self.library.encode_special_tokens = specials_as_text
        self.special_tokens = special_tokens
        self.description = json.loads(content)
        self.vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.vocab = max(self.vocabulary.values(), default=-1) + 1  # ids may have gaps
        # Added tokens that are ordinary ones, such as runs of spaces. With specials_as_text, too, the library reads them.
        self.unmarked = sorted(t.content for t in self.library.get_added_tokens_decoder().values() if not t.special)

    def encode(self, texts):
        return [e.ids for e in self.library.encode_batch_fast(texts, add_special_tokens=self.special_tokens)]

    def encode_parts(self, front, back, special_tokens):
        """Returns the ids of a text in two parts, and how many of them come before the second. What the post-processor puts
        before the text counts as before it."""
        import tokenizers

        def encode(text):
            return self.library.encode(text, add_special_tokens=False)

        first, made = encode(front), encode(front + back)
        if made.ids[:len(first.ids)] != first.ids:  # a token would lie in both
            made = tokenizers.Encoding.merge([first, encode(back)])
        before = len(first.ids)
        if special_tokens:
            made = self.library.post_process(made)
            # The mask tells the post-processor's tokens from those of the text.
            before += (made.special_tokens_mask + [0]).index(0)
        return made.ids, min(before, len(made.ids))

    def id_of(self, text):
        return self.library.token_to_id(text)


class SentencePiece:
    kind = "sentencepiece"

    def __init__(self, path, content, special_tokens, specials_as_text):
        del special_tokens, specials_as_text  # a plain call adds no special tokens and reads none in a text
        import sentencepiece

        self.library = sentencepiece.SentencePieceProcessor()
        try:
            self.library.LoadFromSerializedProto(content)
        except Exception as error:
            raise Refused(INPUT, f"{path} is not a tokenizer.model that sentencepiece {sentencepiece.__version__} can read: "
                                 f"{str(error) or type(error).__name__}")
        self.vocab = self.library.get_piece_size()
        self.unmarked = []

    def encode(self, texts):
        return self.library.encode(texts, num_threads=1)

    def encode_parts(self, front, back, special_tokens):
        """As HuggingFace.encode_parts()."""
        first, ids = self.encode([front])[0], self.encode([front + back])[0]
        if ids[:len(first)] != first:
            ids = first + self.encode([back])[0]
        return ids, len(first)

    def id_of(self, text):
        found = self.library.piece_to_id(text)
        return found if self.library.id_to_piece(found) == text else None


class Tokenizer:
    """The tokenizer at `path`, a file or a folder. Raises Refused. encode() takes a list of texts and returns their ids."""

    def __init__(self, path, special_tokens=True, specials_as_text=False):
        # One process for each core is faster than the library's threads, which share a locked cache.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.file = os.path.abspath(file_of(path))
        try:
            with open_file(self.file) as f:
                self.content = f.read()
        except OSError as error:
            raise unreadable(self.file, error)
        self.digest = xxhash.xxh3_128_hexdigest(self.content)
        kind = HuggingFace if self.content.lstrip()[:1] == b"{" else SentencePiece
        self.behind = kind(self.file, self.content, special_tokens, specials_as_text)
        self.kind, self.vocab, self.encode = kind.kind, self.behind.vocab, self.behind.encode
        folder, name = os.path.split(self.file)
        self.name = os.path.basename(folder) if name in NAMES else name
        self.file_name = NAMES[0] if kind is HuggingFace else NAMES[1]

    def token(self, option, text):
        """Returns the id that an option names by number or by the token's text; None for None. Raises Refused."""
        if text is None:
            return None
        if text.isascii() and text.isdigit():
            if int(text) >= self.vocab:
                raise Refused(USAGE, f"{option} {text} is not an id of this tokenizer: its ids are below {self.vocab}")
            return int(text)
        found = self.behind.id_of(text)
        if found is None:
            raise Refused(USAGE, f"{option} \"{text}\" is not a token of {self.file}: give a token's whole text, or its id")
        return found
