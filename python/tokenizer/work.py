"""`tokenizer tokenize`: turns input files into shards. This is the coordinator: it gives units to the pool and writes the
results in the order of the units, so the shards do not depend on the number of processes. __main__.py and bench.py run it.

A shard ends before the document that would make it larger than --shard-tokens. After each shard the state file says where
the next one begins, and a call after an interrupted one continues there.
"""

import json
import os
import signal
import sys
import time

import xxhash

from errors import INPUT, RESOURCE, USAGE, Refused
from inputs import find, units
from pool import Pool, processors
from progress import Progress, bytes_text, counted, duration_text
from shards import BOUNDARIES, SAVED, new_shard, write_whole
from state import Folder, inputs_digest
from table import make_table
from targets import Targets, fields, is_plain, require_records, settle
from tokenizer import Tokenizer


class Interrupted(Exception):
    def __init__(self, number):
        super().__init__()
        self.code = 128 + number


class Signals:
    """Notes the first signal to end; the second ends the process at once, and the workers exit with it."""

    def __init__(self):
        self.number = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.note)

    def note(self, number, _):
        if self.number is not None:
            os._exit(128 + number)
        self.number = number

    def require_none(self):
        if self.number is not None:
            raise Interrupted(self.number)


def boundaries_are_found(begin, end, width):
    """Returns the check of a worker's results for formats without boundaries. In them a document begins where `begin`
    follows `end`, or at the one of them that is used, so this must not occur inside a document."""

    def check(inputs, task, result):
        tokens, lengths, *_ = result
        tokens = memoryview(tokens).cast("H" if width == 2 else "I")
        at = 0
        for document, length in enumerate(lengths):
            ids = tokens[at:at + length].tolist()
            at += length
            if begin is None:
                wrong = end in ids[:-1]
            elif end is None:
                wrong = begin in ids[1:]
            else:
                wrong = begin in ids[1:] and (end, begin) in zip(ids, ids[1:])
            if wrong:
                path = inputs[task[1] + document if task[0] == "texts" else task[1]].path
                raise Refused(INPUT, f"{path}: the token that separates documents stands inside one, so its boundaries could "
                                     "not be found in this format; use --specials-as-text or --format annulus")

    return check


def no_check(inputs, task, result):
    pass


class Work:
    """One call of tokenize. Raises Refused, Interrupted, and OSError if the disk fails."""

    def __init__(self, options):
        self.options = o = options
        settle(o)
        self.signals = Signals()
        if o.format == "llmc" and not 0 < o.shard_tokens < 1 << 31:
            raise Refused(USAGE, f"--shard-tokens {o.shard_tokens}: expected 1 to 2147483647, which a shard of llm.c can hold")
        self.tokenizer = t = Tokenizer(o.tokenizer, not o.no_special_tokens, o.specials_as_text)
        self.begin, self.end = t.token("--begin", o.begin), t.token("--end", o.end)
        if o.format not in BOUNDARIES:
            if self.begin is None and self.end is None:
                raise Refused(USAGE, f"--format {o.format} has no place for the boundaries of documents: give the token that "
                                     "documents begin or end with by --begin or --end, which marks the boundaries")
            if self.begin == self.end:
                raise Refused(USAGE, f"--begin and --end are the same token, {self.begin}: with --format {o.format} give one "
                                     "of them")
        self.width = 2 if t.vocab <= 1 << 16 else 4
        self.inputs, self.records = find(o.input, o.kind), fields(o)
        self.targets = None
        if not is_plain(o):
            require_records(o, self.inputs)
            self.targets = Targets(t, o, self.begin, self.end)
        settings = {"format": o.format, "field": o.field, "kind": o.kind, "special_tokens": not o.no_special_tokens,
                    "specials_as_text": o.specials_as_text, "bad_utf8": o.bad_utf8, "begin": self.begin, "end": self.end,
                    "shard_tokens": o.shard_tokens, "library": library_version(t.kind)}
        if self.targets is not None:  # shards of texts keep the settings of earlier versions
            chat = self.targets.chat
            settings |= {"loss": o.loss, "chat": o.chat, "prompt": o.prompt, "weight": o.weight}
            if self.targets.trees:
                settings |= {"trees": o.trees, "group": o.group}
            if chat is not None:
                settings |= {"chat_template": xxhash.xxh3_128_hexdigest(chat.text().encode()),
                             "chat_library": f"transformers {chat.version}"}
        files = [[one.path, one.size, one.changed] for one in self.inputs]
        self.inputs_summary = {"files": len(files), "bytes": sum(one.size for one in self.inputs),
                               "digest": inputs_digest(files)}
        about = {"tokenizer": {"digest": t.digest, "name": t.name, "vocab": t.vocab}, "settings": settings}
        final = os.path.join(o.output, "tokenization.json")
        self.folder = Folder(o.output, {**about, "inputs": self.inputs_summary if os.path.exists(final) else files})
        self.summary = True
        self.shard, self.tokens = None, sum(s["tokens"] for s in self.folder.shards)

    def run(self):
        if self.folder.finished is not None:
            print(f"{self.options.output} holds all shards of these inputs already: "
                  f"{counted(self.folder.finished['tokens'], 'token')} of "
                  f"{counted(self.folder.finished['documents'], 'document')}")
            return 0
        began = time.monotonic()
        before = len(self.folder.shards)
        if before:
            print(f"going on after {counted(before, 'finished shard')}", flush=True)
        at = self.folder.next
        self.progress = Progress(sum(one.size for one in self.inputs), sum(one.size for one in self.inputs[:at["input"]]))
        self.folder.save()
        check = (no_check if self.options.format in BOUNDARIES else
                 boundaries_are_found(self.begin, self.end, self.width))
        pool = Pool(self.options.processes or processors(), self.tokenizer, self.targets, self.inputs, self.options.field,
                    self.records, self.options.bad_utf8 == "replace", self.width, self.begin, self.end, check)
        try:
            self.encode(pool)
            if not self.tokens:
                raise Refused(INPUT, "the input files hold no tokens: " + ", ".join(self.options.input))
            if self.shard is not None:
                self.close_shard({"input": len(self.inputs), "unit": 0, "document": 0})
        finally:
            self.progress.end()
            pool.close()
            if self.shard is not None:
                self.shard.discard()
        self.finish(time.monotonic() - began)
        return 0

    def encode(self, pool):
        at = self.folder.next
        skip = at["document"]
        todo = units(self.inputs, self.options.field, (at["input"], at["unit"]), self.records, self.options.group is not None)
        sent, results, sent_units, written = 0, {}, {}, 0
        window = (Pool.DEPTH + 2) * len(pool.workers)  # results that wait for an earlier unit stay in memory
        error = None
        while True:
            self.signals.require_none()
            while todo is not None and sent - written < window and pool.has_room():
                try:
                    unit = next(todo)
                except StopIteration:
                    todo = None
                except Refused as refused:  # raised after the units before it are written
                    todo, error = None, refused
                else:
                    sent_units[sent] = (unit.input, unit.number, unit.cost, unit.task[0] == "texts")
                    pool.send(sent, unit.task)
                    sent += 1
            if todo is None and written == sent:
                break
            for number, result in pool.results(0.5):
                results[number] = result
            while written in results:
                result = results.pop(written)
                if isinstance(result, Refused):
                    raise result
                self.write(sent_units.pop(written), result, skip)
                skip = 0
                written += 1
        if error is not None:
            raise error

    def write(self, unit, result, first):
        """Writes the documents of a unit, from number `first` on."""
        i, number, cost, texts = unit
        tokens, lengths, hashes, sizes, runs, trees = result
        tokens = memoryview(tokens)
        limit = self.options.shard_tokens or 1 << 62
        at = sum(lengths[:first]) * self.width
        while first < len(lengths):
            if self.shard is None:
                self.shard = new_shard(self.options.format, self.options.output, len(self.folder.shards),
                                       self.options.shard_tokens == 0, self.width, self.tokenizer.vocab,
                                       self.tokenizer.digest, self.options.marks)
            end, total = first, 0
            while end < len(lengths) and (self.shard.tokens + total + lengths[end] <= limit
                                          or not self.shard.lengths and end == first):
                total += lengths[end]
                end += 1
            size = total * self.width
            self.shard.append(tokens[at:at + size], lengths[first:end], hashes[first:end], sizes[first:end], runs[first:end],
                              trees[first:end])
            self.tokens += total
            first, at = end, at + size
            if end < len(lengths):
                self.close_shard({"input": i + end, "unit": 0, "document": 0} if texts else
                                 {"input": i, "unit": number, "document": end})
        self.progress.update(cost, self.tokens, len(self.folder.shards))

    def close_shard(self, next):
        entry = self.shard.finish()
        self.shard = None
        self.folder.add(entry, next)

    def finish(self, seconds):
        t, o, shards = self.tokenizer, self.options, self.folder.shards
        write_whole(os.path.join(o.output, t.file_name), t.content)
        table, why_not = make_table(t)
        if table is not None:
            write_whole(os.path.join(o.output, "tokens.table"), table)
        documents, text_bytes = (sum(s[key] for s in shards) for key in ("documents", "text_bytes"))
        saved = {key: sum(s[key] for s in shards) for key in SAVED if all(key in s for s in shards)}
        self.folder.finish({
            "version": 1, "format": o.format, "width": 8 * self.width,
            "tokenizer": {"digest": t.digest, "name": t.name, "vocab": t.vocab, "file": t.file_name},
            "begin": self.begin, "end": self.end, "tokens": self.tokens, "documents": documents,
            "text_bytes": text_bytes, **({"counted": sum(s["counted"] for s in shards)} if o.marks else {}), **saved,
            "settings": self.folder.about["settings"], "inputs": self.inputs_summary,
            "shards": shards})
        if not self.summary:
            return
        print(f"{counted(self.tokens, 'token')} of {counted(documents, 'document')}, "
              f"{bytes_text(text_bytes)} of text ({text_bytes / self.tokens:.2f} bytes a token), in "
              f"{counted(len(shards), 'shard')} of {o.output}; {duration_text(seconds)}")
        if o.marks:
            count, without = (sum(s[key] for s in shards) for key in ("counted", "documents_without_targets"))
            print(f"targets that count: {counted(count, 'token')} ({100 * count / self.tokens:.1f} %)"
                  + (f"; in {counted(without, 'document')} nothing counts" if without else ""))
        if saved:
            print(f"{counted(saved['rollouts'], 'rollout')} in {counted(documents, 'tree')}: "
                  f"{saved['positions']:,} positions instead of {saved['positions_apart']:,} ({fewer(saved, 'positions')}), and "
                  f"{saved['pairs']:,} pairs of query and key instead of {saved['pairs_apart']:,} ({fewer(saved, 'pairs')})")
        if o.specials_as_text and t.behind.unmarked:
            print(f"--specials-as-text left {counted(len(t.behind.unmarked), 'added token')} as they are, because the tokenizer does "
                  f"not mark them as special: {', '.join(map(json.dumps, t.behind.unmarked))}")
        if why_not:
            print(f"there is no tokens.table, so `annulus sample` and --inspect show ids: {why_not}")


def fewer(saved, what):
    """Returns how much smaller a number is than that of the rollouts apart: "-62.5 %"."""
    return f"{100 * (saved[what] / max(1, saved[what + '_apart']) - 1):+.1f} %"


def library_version(kind):
    from importlib.metadata import version

    return f"{kind} {version(kind)}"


def main(options):
    options.output = os.path.abspath(os.path.expanduser(options.output))
    work = None
    try:
        work = Work(options)
        return work.run()
    except Interrupted as interrupted:
        keep(work)
        print(f"annulus: interrupted; {kept(work)}", file=sys.stderr)
        return interrupted.code
    except BrokenPipeError:
        keep(work)
        return 128 + signal.SIGPIPE
    except Refused as refused:
        keep(work)
        if refused.code == RESOURCE and work is not None:
            raise Refused(RESOURCE, f"{refused}; {kept(work)}")
        raise
    except OSError as error:
        keep(work)
        where = error.filename or options.output
        raise Refused(RESOURCE, f"{where} could not be written: {error.strerror} (is the disk full?); {kept(work)}")


def keep(work):
    if work is not None:
        work.folder.give_up()


def kept(work):
    count = len(work.folder.shards) if work is not None else 0
    if not count:
        return "no shard was finished, and nothing is left behind"
    return f"{counted(count, 'finished shard')} {'is' if count == 1 else 'are'} kept: the same command goes on after them"
