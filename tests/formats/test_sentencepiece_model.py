"""SentencePiece files: the library as oracle where it is there, damage refused everywhere."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.tokenizers import sentencepiece
from qconvert.formats.tokenizers.sentencepiece import Piece, PieceType, is_sentencepiece, read_sentencepiece


def varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def message(*fields: tuple[int, int | float | bytes]) -> bytes:
    """A protocol-buffer message of numbers (varint), floats and byte strings."""
    out = b""
    for field, value in fields:
        if isinstance(value, bytes):
            out += varint(field << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(field << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(field << 3) + varint(value)
    return out


PIECES = (
    message((1, b"<unk>"), (2, 0.0), (3, 2)),
    message((1, "▁the".encode()), (2, -1.5)),
    message((1, b"<0x0A>"), (2, 0.0), (3, 6)),
)
MODEL = message(
    *((1, piece) for piece in PIECES),
    (2, message((1, b"input.txt"), (3, 2), (4, 32000))),
    (3, message((1, b"identity"), (2, b"\1\2"), (3, 1), (4, 0))),
    (99, 1 << 40),
)


def test_what_the_proto_says_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(MODEL)
    model = read_sentencepiece(path)
    assert is_sentencepiece(path)
    assert model.pieces == (
        Piece("<unk>", 0.0, PieceType.UNKNOWN),
        Piece("▁the", -1.5, PieceType.NORMAL),
        Piece("<0x0A>", 0.0, PieceType.BYTE),
    )
    assert (model.is_unigram, model.charsmap) == (False, b"\1\2")
    assert (model.add_dummy_prefix, model.remove_extra_whitespaces) == (True, False)


def test_defaults_are_those_of_the_proto(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(message((1, PIECES[1])))
    model = read_sentencepiece(path)
    assert (model.is_unigram, model.charsmap) == (True, b"")
    assert (model.add_dummy_prefix, model.remove_extra_whitespaces) == (True, True)


@pytest.mark.parametrize(
    ("pieces", "says"), [((*PIECES, b""), "piece 3 is empty"), (PIECES * 2, "more than 5 pieces")]
)
def test_pieces_without_text_and_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], says: str
) -> None:
    monkeypatch.setattr(sentencepiece, "MAX_PIECES", 5)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(message(*((1, piece) for piece in pieces)))
    with pytest.raises(CorruptCheckpoint, match=says):
        read_sentencepiece(path)


def test_a_tiktoken_file_of_the_same_name_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_text("IQ== 0\nIg== 1\n")
    assert not is_sentencepiece(path)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.model: is not a SentencePiece model"):
        read_sentencepiece(path)


@given(cut=st.integers(0, len(MODEL)), at=st.integers(0, len(MODEL) - 1), byte=st.integers(0, 255))
def test_no_damage_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("damage") / "tokenizer.model"
    raw = bytearray(MODEL)
    raw[at] = byte
    path.write_bytes(raw[:cut])
    try:
        assert read_sentencepiece(path).pieces
    except CorruptCheckpoint as error:
        assert error.fact.startswith("tokenizer.model: ")


@pytest.mark.parametrize("folder", ["llama-2", "chatglm3"])
def test_real_models_read_as_the_library_reads_them(assets: Path, folder: str) -> None:
    library = pytest.importorskip("sentencepiece")
    path = assets / "tokenizers" / folder / "tokenizer.model"
    theirs = library.SentencePieceProcessor(model_file=str(path))
    ours = read_sentencepiece(path).pieces
    assert len(ours) == theirs.vocab_size()
    for i, piece in enumerate(ours):
        assert (piece.text, piece.score) == (theirs.IdToPiece(i), theirs.GetScore(i))
        flags = (theirs.IsUnknown(i), theirs.IsControl(i), theirs.IsUnused(i), theirs.IsByte(i))
        kinds = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.UNUSED, PieceType.BYTE)
        assert flags == tuple(piece.type is kind for kind in kinds)
