"""Makes corpora and tokenizers from files of this machine, for trying annulus with tokens without downloading text.

    make.sh FOLDER [--megabytes N] [--vocab N]

writes these files in FOLDER:
    python.jsonl            Python sources, one file in each line
    debian.jsonl.gz         texts of Debian's packages (/usr/share/doc), one file in each line
    licenses/*.txt          the files of /usr/share/common-licenses
    tokenizers/llama2/      tokenizer.json: BPE with byte fallback; the normalizer replaces spaces by a character
    tokenizers/mistral/     tokenizer.json: the same, but the pre-tokenizer replaces them
    tokenizers/llama3/      tokenizer.json: byte-level BPE with Llama 3's pattern; its post-processor adds <|begin_of_text|>
    tokenizers/qwen2/       tokenizer.json: byte-level BPE with Qwen 2's pattern and NFC; no token is added
    tokenizers/sentencepiece/  tokenizer.model: BPE with byte fallback and the settings of Llama 2's

Each tokenizer has the class and pattern of the one that it is named after, and a vocabulary trained on these corpora.
make.sh runs this file; tests/python/tokenizer uses its functions.
"""

import argparse
import glob
import gzip
import io
import json
import os
import sys
import sysconfig

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
SPACE = "\u2581"


# ---- Corpora.


def read_text(path):
    """Returns the text of a file, unpacked if it is compressed; None if it cannot be read or is not UTF-8."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            return f.read().decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return None


def python_sources():
    yield from sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "**", "*.py"), recursive=True))
    yield from sorted(glob.glob(os.path.join(sysconfig.get_path("purelib"), "**", "*.py"), recursive=True))


def debian_texts():
    for path in sorted(glob.glob("/usr/share/doc/**", recursive=True)):
        if os.path.isfile(path) and not path.endswith((".html", ".png", ".svg", ".pdf", ".js", ".css")):
            yield path


def documents(paths, limit):
    """Yields (path, text) of files, as many as `limit` bytes of text allow."""
    size = 0
    for path in paths:
        text = read_text(path)
        if text and "\0" not in text:
            size += len(text.encode("utf-8"))
            if size > limit:
                return
            yield path, text


def write_jsonl(path, texts):
    """Writes texts and returns their number."""
    count = 0
    # Opened in this way, gzip writes no time, so the bytes are the same each time.
    with open(path, "wb") as f, gzip.GzipFile("", "wb", 6, f, 0) if path.endswith(".gz") else f as out:
        for name, text in texts:
            out.write(json.dumps({"path": name, "text": text}, ensure_ascii=False).encode("utf-8") + b"\n")
            count += 1
    return count


# ---- Tokenizers: functions of an iterable of texts, which they read once.


def fallback_model(texts, vocab):
    """Returns a BPE tokenizer with a token for every byte, as sentencepiece makes it, for llama2 and mistral."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    first = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    trained.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab, limit_alphabet=200, initial_alphabet=[SPACE], special_tokens=first, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(models.BPE(model["vocab"], [tuple(m) for m in model["merges"]], unk_token="<unk>", fuse_unk=True,
                                     byte_fallback=True))
    tokenizer.add_special_tokens(first[:3])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    add_begin(tokenizer, "<s>")
    return tokenizer


def add_begin(tokenizer, token, *before):
    from tokenizers import processors

    template = processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1",
                                             special_tokens=[(token, tokenizer.token_to_id(token))])
    tokenizer.post_processor = processors.Sequence([*before, template]) if before else template


def llama2(texts, vocab):
    from tokenizers import normalizers

    tokenizer = fallback_model(texts, vocab)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return tokenizer


def mistral(texts, vocab):
    from tokenizers import pre_tokenizers

    tokenizer = fallback_model(texts, vocab)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    return tokenizer


def byte_level(texts, vocab, pattern, specials, normalizer=None):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated", False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab - len(specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens(specials)  # after the others, as in the published tokenizers
    return tokenizer


def llama3(texts, vocab):
    from tokenizers import processors

    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(texts, vocab, LLAMA3_PATTERN, specials)
    add_begin(tokenizer, specials[0], processors.ByteLevel(trim_offsets=True))
    return tokenizer


def qwen2(texts, vocab):
    from tokenizers import normalizers

    return byte_level(texts, vocab, QWEN2_PATTERN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())


def sentencepiece_model(texts, vocab):
    """Returns the content of a tokenizer.model."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines() if line.strip()), model_writer=model,
        model_type="bpe", vocab_size=vocab, byte_fallback=True, character_coverage=0.9995, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        allow_whitespace_only_pieces=True, max_sentence_length=1 << 16, num_threads=1, minloglevel=2)
    return model.getvalue()


HUGGING_FACE = {"llama2": llama2, "mistral": mistral, "llama3": llama3, "qwen2": qwen2}
TOKENIZERS = (*HUGGING_FACE, "sentencepiece")


def write_tokenizer(folder, name, texts, vocab):
    """Trains one of TOKENIZERS on `texts`, a list, and writes it to the folder `name` in `folder`."""
    folder = os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    if name in HUGGING_FACE:
        HUGGING_FACE[name](texts, vocab).save(os.path.join(folder, "tokenizer.json"))
        return
    with open(os.path.join(folder, "tokenizer.model"), "wb") as f:
        f.write(sentencepiece_model(texts, vocab))


def main():
    parser = argparse.ArgumentParser(prog="make.sh", description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--megabytes", type=float, default=20, help="size of each corpus at most (default: 20)")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens in each vocabulary, at least 1000 (default: 8192)")
    options = parser.parse_args()
    if not options.folder:
        parser.error("the folder is empty: name one")
    os.makedirs(os.path.join(options.folder, "licenses"), exist_ok=True)
    limit = int(options.megabytes * 1e6)
    sample = []
    for name, paths in (("python.jsonl", python_sources()), ("debian.jsonl.gz", debian_texts())):
        texts = list(documents(paths, limit))
        count = write_jsonl(os.path.join(options.folder, name), texts)
        size = sum(len(text) for _, text in texts)
        print(f"{name}: {count:,} documents, {size / 1e6:.1f} million characters", flush=True)
        sample += [text for _, text in texts[::max(1, size // 4_000_000)]]  # a part of the texts is enough to train a tokenizer
    for path, text in documents(sorted(glob.glob("/usr/share/common-licenses/*")), limit):
        with open(os.path.join(options.folder, "licenses", os.path.basename(path) + ".txt"), "w", encoding="utf-8") as f:
            f.write(text)
    for name in TOKENIZERS:
        write_tokenizer(os.path.join(options.folder, "tokenizers"), name, sample, options.vocab)
    print("tokenizers: " + ", ".join(sorted(os.listdir(os.path.join(options.folder, "tokenizers")))))


if __name__ == "__main__":
    sys.exit(main())
