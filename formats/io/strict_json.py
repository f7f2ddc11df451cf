"""Parses JSON objects of untrusted files: config.json, shard indexes, safetensors headers.

The invariant: the result is what any strict reader of RFC 8259 returns. Python's parser accepts NaN,
infinities, endless integers, repeated keys and lone surrogates; here each is an error that names the key,
because two tools that read them differently convert two different models.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.io import limits
from qconvert.formats.io.local_file import amount, open_regular, read_exactly

_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_INFINITIES = (math.inf, -math.inf)
# Other parsers convert long integers to float64, which 10**400 overflows.
_LARGEST = int(sys.float_info.max)
# Whatever values can be flawed: halves of surrogate pairs, Python's own words; and, where every digit is a 0
# and every E is an e, long numbers and exponents. Searched for so, a header of 10 MB takes 10 ms.
_SUSPECT_WORDS = (b"\\u", b"Infinity", b"NaN")
_SUSPECT_NUMBERS = (b"0" * 19, b"e000", b"e+000", b"e-000")
_DIGITS_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_QUOTE_OR_BRACKET = re.compile(r'["\[\]{}]')


def read_json_object(path: Path, max_bytes: int = limits.CONFIG_BYTES, *, times: int = 1) -> Json:
    """Returns the JSON object in a file.

    Raises CorruptCheckpoint, naming the file and where possible the key, when there is no such file, when it
    is larger than `max_bytes`, when it holds more than `times` the values that JSON may (`limits`), or when
    it is anything but one strict JSON object.
    """
    return parse_json_object(read_bounded(path, max_bytes), shown(path.name), times=times)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Returns all bytes of a file of at most `max_bytes`; CorruptCheckpoint for a larger one."""
    name = shown(path.name)
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise CorruptCheckpoint(f"{name}: has {amount(size)}, the limit is {amount(max_bytes)}")
        buffer = bytearray(size)
        read_exactly(fd, memoryview(buffer), 0, name)
    finally:
        os.close(fd)
    return bytes(buffer)


def parse_json_object(raw: bytes, name: str, *, times: int = 1) -> Json:
    """Parses `raw` as a JSON object; CorruptCheckpoint, beginning with `name`, if it is not one."""
    if raw.startswith(_BYTE_ORDER_MARKS):
        raise CorruptCheckpoint(f"{name}: starts with a byte-order mark", "save it as UTF-8 without one")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{name}: is not UTF-8 at byte {error.start}") from error
    require_modest(raw, name, times=times)
    try:
        suspect = _is_suspect(raw)
        value = json.loads(text, object_pairs_hook=partial(_strict_object, name, suspect=suspect))
    except RecursionError:
        raise CorruptCheckpoint(f"{name}: {_deep_key(text)}is nested too deeply to be read") from None
    except ValueError as error:  # malformed, or an integer of more digits than Python converts
        raise CorruptCheckpoint(f"{name}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{name}: holds a JSON {kind_of(value)}, not an object")
    return value


def _is_suspect(raw: bytes) -> bool:
    alike = raw.translate(_DIGITS_ALIKE)
    return any(each in raw for each in _SUSPECT_WORDS) or any(each in alike for each in _SUSPECT_NUMBERS)


def require_modest(raw: bytes, name: str, *, times: int = 1) -> None:
    """Raises CorruptCheckpoint for JSON of more values than any model needs, before it is parsed.

    What is nearly all brackets, commas and keys takes 30 times its size when it is parsed.
    """
    for what, found, most in (
        ("brackets", raw.count(b"{") + raw.count(b"["), limits.JSON_BRACKETS * times),
        ("commas", raw.count(b","), limits.JSON_COMMAS * times),
        ("keys", raw.count(b":"), limits.JSON_KEYS * times + raw.count(b"://")),
    ):
        if found > most:
            raise CorruptCheckpoint(
                f"{name}: holds {found:,} {what} (limit {most:,}), more than any model needs"
            )


def kind_of(value: object) -> str:
    """Returns the JSON type of a parsed value: `list`, `string`, `number`, `boolean`, `null` or `object`."""
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", dict: "object"}
    return names.get(type(value), "null")


def _strict_object(name: str, pairs: list[tuple[str, Any]], *, suspect: bool) -> Json:
    """Builds one JSON object, refusing what Python's parser accepts beyond the standard.

    Values are looked at where the text is `suspect`: headers of many thousand tensors rarely are.
    """
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        again = (key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        repeated = next(again)
        raise CorruptCheckpoint(f"{name}: {shown(repeated)} appears twice")
    for key, value in pairs if suspect else ():
        if flaw := _flaw(key) or _flaw(value):
            raise CorruptCheckpoint(f"{name}: {shown(key)} {flaw}")
    return fields


def _flaw(value: object) -> str | None:
    """Returns why no strict parser accepts this value, None if one does; nested objects are checked."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, not a finite number"
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        return f"is a number of {value.bit_length():,} bits, beyond any float64"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair"
    if isinstance(value, list):  # in lists infinity means "no limit": Mamba's time_step_limit [0, Infinity]
        return next(filter(None, (_flaw(item) for item in value if item not in _INFINITIES)), None)
    return None


def _deep_key(text: str, max_depth: int = 100) -> str:
    """Returns the top-level key, followed by a space, under which `text` first nests over `max_depth`."""
    decoder = json.JSONDecoder()
    depth, key, position = 0, "", 0
    while depth <= max_depth and (token := _QUOTE_OR_BRACKET.search(text, position)):
        position = token.end()
        if token[0] == '"':
            string, position = decoder.raw_decode(text, token.start())
            key = f"{shown(string)} " if depth == 1 else key
        else:
            depth += 1 if token[0] in "[{" else -1
    return key
