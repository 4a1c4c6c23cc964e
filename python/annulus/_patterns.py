"""Converts attention patterns, and the masks that restrict them, to the TOML text that the operators take, and query
offsets to their numbers. Used by _attention.py, _masks.py, _operators.py and _diagnosis.py."""

import itertools
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ._errors import AnnulusError

Pattern = str | Mapping[str, Any]
QueryOffset = int | Literal["bottom-right", "top-left"]

# What these names stand for; the operators replace the first one (kBottomRight in attention/pattern/pattern.h).
_OFFSETS = {"bottom-right": -(2**60), "top-left": 0}

# Characters that must be escaped in a TOML string.
_ESCAPES = {i: f"\\u{i:04x}" for i in (*range(32), 127)} | {ord('"'): '\\"', ord("\\"): "\\\\"}


def _string(text: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of a file name that are not UTF-8
        raise AnnulusError(
            f"[pattern] a pattern is text in UTF-8, and {ascii(text)} is not UTF-8: give the file another name"
        )
    return '"' + text.translate(_ESCAPES) + '"'


def kept_ranges(kept: Any) -> list[list[list[int]]]:
    """Returns, for each batch row, the ranges [begin, end) of keys that are kept: of true, or nonzero, elements of an array
    or tensor [batch or 1, keys]."""
    shape = getattr(kept, "shape", None)
    if shape is None or len(shape) != 2:
        raise AnnulusError(
            "[pattern] kept_keys must be an array or tensor [batch or 1, keys], true where a key is no padding, but "
            + (f"is {type(kept).__name__}" if shape is None else f"has the shape {list(shape)}")
        )
    rows = []
    for row in kept.tolist():
        ranges, begin = [], 0
        for shown, alike in itertools.groupby(row, bool):
            end = begin + sum(1 for _ in alike)
            if shown:
                ranges.append([begin, end])
            begin = end
        rows.append(ranges)
    return rows


def _value(value: Any, where: str) -> str:
    if hasattr(value, "tolist"):  # scalars and arrays of NumPy, and tensors
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    if isinstance(value, Mapping):
        return _table(value, where)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item, f"{where}[{i}]") for i, item in enumerate(value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))  # infinity and NaN: the library raises an error that names the key
    raise AnnulusError(
        f"[pattern] {where} must be a number, true or false, a string or path, or a list or mapping of these, but is "
        f"{'None: leave the key out' if value is None else type(value).__name__}"
    )


def _table(table: Mapping[Any, Any], where: str) -> str:
    parts = []
    for key, value in table.items():
        if not isinstance(key, str):
            raise AnnulusError(f"[pattern] the keys of {where} must be strings, but one is {key!r}")
        if key == "kept_keys" and hasattr(value, "tolist"):
            value = kept_ranges(value)
        if key == "mask" and hasattr(value, "mask_digest"):
            key, value = "mask_digest", value.mask_digest
        name = key if key.isascii() and key.replace("_", "").isalnum() else _string(key)
        parts.append(f"{name} = {_value(value, key if where == 'a pattern' else f'{where}.{key}')}")
    return "{ " + ", ".join(parts) + " }"


def pattern_text(pattern: Pattern) -> str:
    """Returns a pattern as inline TOML (docs/explanation/attention.md). Text is returned unchanged.

    A mapping becomes TOML: {"kind": "causal"} gives '{ kind = "causal" }'. Its values may be numbers, booleans,
    strings, paths, sequences, mappings, NumPy scalars and arrays, and tensors (not under torch.compile, where a tensor
    has no content). "mask" may be an annulus.TokenMask, and "kept_keys" an array or tensor [batch or 1, keys].

    Raises AnnulusError for values of other types, naming the key.
    """
    if isinstance(pattern, str):
        return pattern
    if not isinstance(pattern, Mapping):
        raise AnnulusError(
            f"[pattern] a pattern must be inline TOML or a mapping of the same keys, but is {type(pattern).__name__}"
        )
    return _table(pattern, "a pattern")


def offset_number(query_offset: QueryOffset) -> int:
    """Returns the operators' number for a query offset. Raises AnnulusError for an unknown name."""
    if not isinstance(query_offset, str):
        return query_offset
    if query_offset not in _OFFSETS:
        raise AnnulusError(f"[pattern] query_offset must be a whole number, 'bottom-right' or 'top-left', but is {query_offset!r}")
    return _OFFSETS[query_offset]


def restricted(pattern: Pattern, **restrictions: Any) -> str:
    """Returns the text of a pattern with further keys, such as `mask`; None leaves a key out."""
    text = pattern_text(pattern).rstrip()
    given = {key: value for key, value in restrictions.items() if value is not None}
    if not given or not text.endswith("}"):
        return text
    return text[:-1].rstrip() + ", " + _table(given, "a pattern")[1:].lstrip()
