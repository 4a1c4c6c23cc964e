"""Finds the input files and reads their documents. Used by work.py, bench.py and the workers of pool.py.

A document is a whole text file, a field of a line of JSONL, or a column of a row of Parquet; with --loss, --chat or --weight a
line of JSONL or a row of Parquet as a whole (targets.py), a *record*. Files are read in units of about a mebibyte, each of which
one worker takes: some text files, the lines that begin in a range of bytes, or some rows. With --group a unit is a whole file.
The units depend only on the files, and so do the documents and their order.
"""

import contextlib
import gzip
import json
import os
import zlib
from dataclasses import dataclass

from errors import INPUT, RESOURCE, Refused, unreadable
from files import matches, open_file, require_file

UNIT = 1 << 20  # bytes
FILES_IN_UNIT = 1000
PACKINGS = {".gz": "gz", ".zst": "zst"}
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class Input:
    path: str
    kind: str  # "text", "jsonl" or "parquet"
    packing: str  # "", "gz" or "zst"
    size: int
    changed: int  # nanoseconds

    def require_unchanged(self, status):
        if (status.st_size, status.st_mtime_ns) != (self.size, self.changed):
            raise Refused(INPUT, f"{self.path} has changed since tokenizing began: its tokens would not fit those of "
                                 "the finished shards; remove the output folder to begin again")


def find(patterns, kind="auto"):
    """Returns the files that the globs match, each once, in the order of the globs and sorted within one. Raises Refused."""
    found = {}
    for pattern in patterns:
        for path in matches(os.path.expanduser(pattern)):
            found.setdefault(os.path.abspath(path), None)
    return [describe(path, kind) for path in found]


def describe(path, kind):
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error)
    require_file(path, status)
    stem, ending = os.path.splitext(path)
    packing = PACKINGS.get(ending, "")
    if packing:
        ending = os.path.splitext(stem)[1]
    kind = KINDS.get(ending, "text") if kind == "auto" else kind
    if kind == "parquet" and packing:
        raise Refused(INPUT, f"{path}: a Parquet file must not be compressed as a whole; unpack it")
    return Input(path, kind, packing, status.st_size, status.st_mtime_ns)


# ---- Units, in the order of the documents. The coordinator (work.py) makes them.


@dataclass(frozen=True)
class Unit:
    input: int  # its index in the list of inputs; for several text files that of the first
    number: int  # of the unit within its file
    cost: int  # bytes of the file, for the progress
    task: tuple  # the argument of Reader.documents


def units(inputs, field, at=(0, 0), records=None, whole_files=False):
    """Yields all units from number at[1] of input at[0] on. `records`: as for Reader. `whole_files`: a file of records is one unit.
    Raises Refused if a file cannot be read."""
    i, number = at
    while i < len(inputs):
        one = inputs[i]
        if one.kind == "text":
            end, size = i, 0
            while (end < len(inputs) and inputs[end].kind == "text" and end - i < FILES_IN_UNIT
                   and (end == i or size + inputs[end].size <= UNIT)):
                size += inputs[end].size
                end += 1
            yield Unit(i, 0, size, ("texts", i, end))
            i, number = end, 0
            continue
        for unit in [Unit(i, 0, one.size, ("file", i))] if whole_files else units_of(one, i, field, records):
            if unit.number >= number:
                yield unit
        i, number = i + 1, 0


def units_of(one, i, field, records):
    """Returns the units of a file that is no text."""
    if one.kind == "parquet":
        return parquet_units(one, i, field, records)
    if one.packing:
        return packed_units(one, i)
    return (Unit(i, k, min(UNIT, one.size - s), ("lines", i, s, min(s + UNIT, one.size)))
            for k, s in enumerate(range(0, one.size, UNIT)))


def packed_units(one, i):
    """Yields the units of a compressed file: the lines that begin in each range of its unpacked bytes."""
    rest, seen, start, done, number = bytearray(), 0, 0, 0, 0
    for data, raw in unpack(one):
        rest += data
        while True:
            last = (number + 1) * UNIT - 1 - start  # the unit ends with the first line that ends here or later
            end = rest.find(b"\n", max(last, seen)) + 1
            if not end:
                seen = len(rest)
                break
            yield Unit(i, number, raw - done, ("bytes", i, start, bytes(rest[:end])))
            del rest[:end]
            seen, start, done = 0, start + end, raw
            number = max(number + 1, start // UNIT)
    if rest:
        yield Unit(i, number, one.size - done, ("bytes", i, start, bytes(rest)))


def parquet_units(one, i, field, records):
    file, names = open_parquet(one, field, records)
    # A column of lists or structs is several in the file: messages.list.element.content.
    paths = [file.metadata.schema.column(n).path for n in range(file.metadata.num_columns)]
    columns = [n for n, path in enumerate(paths) if any(path == name or path.startswith(name + ".") for name in names)]
    number = 0
    for group in range(file.metadata.num_row_groups):
        info = file.metadata.row_group(group)
        rows = max(1, info.num_rows * UNIT // max(1, sum(info.column(n).total_uncompressed_size for n in columns)))
        for first in range(0, info.num_rows, rows):
            count = min(rows, info.num_rows - first)
            yield Unit(i, number, one.size * count // max(1, file.metadata.num_rows), ("rows", i, group, first, count))
            number += 1


def open_parquet(one, field, records):
    """Returns the file and the names of the columns to be read: `field`, and with `records` those of them that it has. Raises
    Refused."""
    import pyarrow
    import pyarrow.parquet

    try:
        one.require_unchanged(os.stat(one.path))
        file = pyarrow.parquet.ParquetFile(one.path)
        schema = file.schema_arrow
    except OSError as error:
        if error.errno is not None:
            raise unreadable(one.path, error)
        raise Refused(INPUT, f"{one.path} is not a Parquet file that can be read: {one_line(error)}")
    except pyarrow.ArrowException as error:
        raise Refused(INPUT, f"{one.path} is not a Parquet file that can be read: {one_line(error)}")
    if field not in schema.names:
        raise Refused(INPUT, f"{one.path} has no column \"{field}\": --field takes one of {', '.join(schema.names)}")
    names = [field] if records is None else [name for name in schema.names if name == field or name in records]
    for name in names:
        kind = schema.field(name).type
        if not (is_text(kind) if records is None else is_json(kind)):
            expected = "text" if records is None else "text, numbers, lists or structs"
            raise Refused(INPUT, f"{one.path}: the column \"{name}\" is of type {kind}, but {expected} is expected")
    return file, names


def is_text(kind):
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def is_json(kind):
    """Whether values of this type are those of JSON."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return all(is_json(kind.field(n).type) for n in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind):
        return is_json(kind.value_type)
    return is_text(kind) or any(test(kind) for test in (types.is_integer, types.is_floating, types.is_boolean, types.is_null))


def without_nulls(value):
    """Returns a value of Parquet as JSON would have it: what a struct has not is null there."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def one_line(error):
    return " ".join(str(error).split())


# ---- Reading.


def unpack(one):
    """Yields (unpacked bytes, position in the file) of a compressed file, piece by piece. Raises Refused."""
    try:
        with open_file(one.path) as f:
            one.require_unchanged(os.fstat(f.fileno()))
            if one.packing == "gz":
                with gzip.GzipFile(fileobj=f) as g:
                    while data := g.read(UNIT):
                        yield data, f.tell()
                return
            import zstandard

            frame = None
            while piece := f.read(UNIT // 4):
                while piece:
                    if frame is None:
                        frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                    data = frame.decompress(piece)
                    if data:
                        yield data, f.tell()
                    piece = b""
                    if frame.eof:
                        piece, frame = frame.unused_data, None
            if frame is not None:
                raise Refused(INPUT, f"{one.path} ends inside its compressed data: it is truncated")
    except EOFError:
        raise Refused(INPUT, f"{one.path} ends inside its compressed data: it is truncated")
    except OSError as error:
        if error.errno is not None:
            raise unreadable(one.path, error)
        raise Refused(INPUT, f"{one.path} cannot be unpacked: {one_line(error)}")
    except Exception as error:
        if isinstance(error, zlib.error) or type(error).__name__ == "ZstdError":
            raise Refused(INPUT, f"{one.path} cannot be unpacked: {one_line(error)}")
        raise


@contextlib.contextmanager
def opened(one):
    """The file of an input, which must not have changed. Raises Refused, also if it cannot be read."""
    try:
        with open_file(one.path) as f:
            one.require_unchanged(os.fstat(f.fileno()))
            yield f
    except OSError as error:
        raise unreadable(one.path, error)


def decode(raw, replace, where):
    try:
        return raw.decode("utf-8", "replace" if replace else "strict")
    except UnicodeDecodeError as error:
        raise Refused(INPUT, f"{where()}: byte {error.start} is not UTF-8; convert the file, or replace such bytes by "
                             "U+FFFD with --bad-utf8 replace")


class Reader:
    """Reads the documents of units, in a worker. It keeps a Parquet file open from one unit to the next."""

    def __init__(self, inputs, field, replace, records=None):
        """records: documents are records, of which these are the fields besides `field`; None: they are texts."""
        self.inputs, self.field, self.replace, self.records = inputs, field, replace, records
        self.opened = None  # for Parquet: (input, group), the next row, the batches that follow, the rest of the current one

    def documents(self, task):
        """Returns the texts of a unit's documents, or records, each with a function that names its place. Raises Refused, which
        names the place in the file."""
        kind, i, *rest = task
        try:
            return getattr(self, kind)(i, *rest)
        except MemoryError:
            raise Refused(RESOURCE, f"there is not enough memory for a document of {self.inputs[i].path}")

    def file(self, i):
        """Yields the documents of a whole file."""
        for unit in units_of(self.inputs[i], i, self.field, self.records):
            yield from self.documents(unit.task)

    def texts(self, begin, end):
        return [self.text(self.inputs[i]) for i in range(begin, end)]

    def text(self, one):
        if one.packing:
            raw = b"".join(data for data, _ in unpack(one))
        else:
            with opened(one) as f:
                raw = f.read()
        return decode(raw, self.replace, lambda: one.path)

    def lines(self, i, begin, end):
        """Returns the documents of the lines that begin in the bytes [begin, end)."""
        one = self.inputs[i]
        with opened(one) as f:
            if begin:
                f.seek(begin - 1)
                begin += len(f.readline(end - begin + 1)) - 1
            data = f.read(max(0, end - begin))
            if data and not data.endswith(b"\n"):
                data += f.readline()
        return self.bytes(i, begin, data)

    def bytes(self, i, begin, data):
        one, texts, at = self.inputs[i], [], begin
        for line in data.split(b"\n"):
            if at == 0 and line.startswith(b"\xef\xbb\xbf"):
                line, at = line[3:], 3
            if line.strip():
                texts.append(self.value(one, line, lambda at=at: f"{one.path}, line {line_number(one, at)}"))
            at += len(line) + 1
        return texts

    def record(self, text, where):
        """Returns the value of a text of JSON."""
        try:
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                raise
            except ValueError:  # an integer of more digits than Python converts; no number is used
                return json.loads(text, parse_int=float)
        except json.JSONDecodeError as error:
            raise Refused(INPUT, f"{where()} is not JSON: {one_line(error)}")
        except RecursionError:
            raise Refused(INPUT, f"{where()} is nested too deeply: more than some hundred lists and objects in each other "
                                 "cannot be read; leave the line out")

    def value(self, one, line, where):
        text = decode(line, self.replace, where)
        record = self.record(text, where)
        if not isinstance(record, dict):
            raise Refused(INPUT, f"{where()} is not a JSON object: {{\"{self.field}\": \"...\"}} is expected")
        if self.records is not None:
            return self.without_surrogates(record, where), where
        if self.field not in record:
            raise Refused(INPUT, f"{where()} has no field \"{self.field}\": --field takes one of {', '.join(record)}")
        value = record[self.field]
        if not isinstance(value, str):
            raise Refused(INPUT, f"{where()}: the field \"{self.field}\" is {json.dumps(value)[:40]}, but a text is expected")
        return self.without_surrogates(value, where)

    def without_surrogates(self, value, where):
        """Returns a value of JSON whose texts UTF-8 can express."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, "\ud800"
            if not self.replace:
                raise Refused(INPUT, f"{where()}: the text holds half of a surrogate pair, which UTF-8 cannot express; "
                                     "repair it, or replace it by U+FFFD with --bad-utf8 replace")
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return text if isinstance(value, str) else json.loads(text)
        return value

    def rows(self, i, group, first, count):
        import pyarrow

        one = self.inputs[i]
        try:
            if self.opened is None or self.opened[0] != (i, group) or self.opened[1] > first:
                file, names = open_parquet(one, self.field, self.records)
                batches = file.iter_batches(batch_size=max(count, 64), row_groups=[group], columns=names)
                self.opened = (i, group), 0, batches, []
            _, at, batches, rest = self.opened
            texts = []
            while at < first + count:
                if not rest:
                    batch = next(batches)
                    rest = batch.column(0).to_pylist() if self.records is None else batch.to_pylist()
                take = min(first + count - at, len(rest))
                texts += rest[max(0, first - at):take]
                at, rest = at + take, rest[take:]
            self.opened = (i, group), at, batches, rest
        except (pyarrow.ArrowException, OSError, StopIteration, UnicodeDecodeError) as error:
            raise Refused(INPUT, f"{one.path}: the rows from {first:,} on of row group {group} cannot be read: "
                                 f"{one_line(error)}")
        if self.records is not None:
            return [(without_nulls(record), lambda n=n: f"{one.path}, row {n:,} of row group {group}")
                    for n, record in enumerate(texts, first)]
        if None in texts:
            raise Refused(INPUT, f"{one.path}: row {first + texts.index(None):,} of row group {group} has no text in "
                                 f"the column \"{self.field}\"; remove such rows")
        return texts


def line_number(one, at):
    """Returns the number, from 1, of the line that begins at unpacked byte `at`. Reads the file, so only errors use it."""
    if not one.packing:
        with open_file(one.path) as f:
            return 1 + sum(piece.count(b"\n") for piece in pieces(f, at))
    count, left = 1, at
    for data, _ in unpack(one):
        count += data[:left].count(b"\n")
        left -= len(data)
        if left <= 0:
            break
    return count


def pieces(file, size):
    while size > 0 and (data := file.read(min(size, 1 << 20))):
        size -= len(data)
        yield data
