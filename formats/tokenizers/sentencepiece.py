"""Parses the pieces of a SentencePiece model file from its protocol-buffer bytes.

Reads only what a tokenizer file for another program needs: pieces with score and type, the algorithm, and the
normaliser's settings. Source: sentencepiece_model.proto of google/sentencepiece (ModelProto, TrainerSpec,
NormalizerSpec) and the protocol-buffers wire format; fields not named here are skipped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from qconvert.errors import CorruptCheckpoint, shown
from qconvert.formats.io.strict_json import read_bounded

MAX_MODEL_BYTES = 64 << 20  # gemma's, the largest in use, has 4 MB

MAX_PIECES = 1 << 19  # gemma 3, the most in use, has 262,144


class PieceType(IntEnum):
    """ModelProto.SentencePiece.Type; GGUF's token types have the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """A token: its text, its log probability or merge order, and its type."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """A model's pieces by id, and its normaliser's settings."""

    pieces: tuple[Piece, ...]
    is_unigram: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    @property
    def unknown(self) -> int | None:
        """The id of the piece for unknown text."""
        return next((i for i, piece in enumerate(self.pieces) if piece.type is PieceType.UNKNOWN), None)


def is_sentencepiece(path: Path) -> bool:
    """True if the file begins like a SentencePiece model (tiktoken files use the same name)."""
    return path.is_file() and path.open("rb").read(1) == b"\x0a"


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Reads a model file; CorruptCheckpoint when it is not one."""
    raw = read_bounded(path, MAX_MODEL_BYTES)
    name = shown(path.name)
    try:
        return _model(raw)
    except (ValueError, IndexError, struct.error) as error:
        raise CorruptCheckpoint(f"{name}: is not a SentencePiece model ({error})") from error


def _model(raw: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    algorithm, charsmap, prefix, squeeze = 1, b"", 1, 1  # the .proto's defaults
    for field, value in _fields(raw):
        if field == 1:
            pieces.append(_piece(_bytes(value), len(pieces)))
        elif field == 2:
            algorithm = _number(dict(_fields(_bytes(value))).get(3, algorithm))
        elif field == 3:
            spec = dict(_fields(_bytes(value)))
            charsmap = _bytes(spec.get(2, b""))
            prefix, squeeze = _number(spec.get(3, 1)), _number(spec.get(4, 1))
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(tuple(pieces), algorithm == 1, charsmap, bool(prefix), bool(squeeze))


def _piece(raw: bytes, row: int) -> Piece:
    if row >= MAX_PIECES:
        raise ValueError(f"more than {MAX_PIECES:,} pieces")
    fields = dict(_fields(raw))
    score = fields.get(2, b"\0\0\0\0")
    text = _bytes(fields.get(1, b"")).decode("utf-8")
    if not text:
        raise ValueError(f"piece {row} is empty")  # the library refuses it too (InitializePieces)
    return Piece(text, struct.unpack("<f", _bytes(score))[0], PieceType(_number(fields.get(3, 1))))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes are expected")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes where a number is expected")
    return value


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message: varints as numbers, everything else as bytes."""
    position = 0
    while position < len(raw):
        tag, position = _varint(raw, position)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            number, position = _varint(raw, position)
            yield field, number
            continue
        if wire == 2:
            size, position = _varint(raw, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + size > len(raw):
            raise ValueError(f"field {field} needs {size} bytes at byte {position} of {len(raw)}")
        yield field, raw[position : position + size]
        position += size


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError(f"a number of more than 64 bits before byte {position}")
