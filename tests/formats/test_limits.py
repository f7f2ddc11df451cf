"""What is too large for any model is refused by its number, before it costs time or memory."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.gguf.header import read_gguf
from qconvert.formats.huggingface.safetensors_file import tensor_spec
from qconvert.formats.huggingface.sidecars import sidecars_of
from qconvert.formats.io import limits
from qconvert.formats.io.strict_json import parse_json_object
from qconvert.quant.nibbles import pack_nibbles, unpack_nibbles


def test_rows_without_bytes_are_counted() -> None:
    assert tensor_spec("f", "w", "F32", [0, 4096]).nbytes == 0
    with pytest.raises(CorruptCheckpoint, match=r"shape \[140737488355328, 0\] has rows or columns without"):
        tensor_spec("f", "w", "F32", [1 << 47, 0])


def test_values_of_json_are_counted_before_they_are_parsed() -> None:
    for raw, what in ((b"1," * 4_100_000, "commas"), (b'"":1' * 1_300_000, "keys")):
        with pytest.raises(CorruptCheckpoint, match=f"{what} .limit"):
            parse_json_object(b"{" + raw, "f")


def test_a_long_text_of_a_gguf_is_not_read(tmp_path: Path) -> None:
    key = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IQ", 8, 1 << 27)
    (tmp_path / "m.gguf").write_bytes(head)
    os.truncate(tmp_path / "m.gguf", 1 << 28)
    with pytest.raises(CorruptCheckpoint, match=r"general\.architecture is a text of 134,217,728 bytes"):
        read_gguf(tmp_path / "m.gguf")


def test_a_sparse_licence_is_left_out(tmp_path: Path) -> None:
    for name, size in (("LICENSE", 1 << 40), ("NOTICE", limits.SIDECAR_BYTES)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    found = sidecars_of(tmp_path, ())
    assert [path.name for path in found.copied] == ["NOTICE"]
    assert [path.name for path in found.skipped] == ["LICENSE"]


def test_codes_of_one_column_are_packed_contiguously() -> None:
    """A block of one word of AWQ, whose bytes are then seen as an int32."""
    codes = np.asfortranarray(np.arange(8, dtype=np.uint8).reshape(1, 8).repeat(5, 0))
    packed = pack_nibbles(codes)
    assert packed.view("<i4").shape == (5, 1)
    assert (unpack_nibbles(packed) == codes).all()
