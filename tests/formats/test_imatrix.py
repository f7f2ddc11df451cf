"""Importance matrices: llama-imatrix's own file and its recorded sums, the older binary, damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from qconvert.core.ggml_types import KV
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.gguf.imatrix import read_imatrix
from qconvert.formats.gguf.reader import GGUFFile
from tests.support.gguf_models import imatrix_dat as dat


def test_means_are_sums_over_counts(assets: Path) -> None:
    path = assets / "fixtures" / "gguf" / "imatrix.gguf"
    found = read_imatrix(path)
    with GGUFFile(path) as file:
        sums = file.read("blk.3.ffn_down.weight.in_sum2", 0, 768).ravel()
        (count,) = file.read("blk.3.ffn_down.weight.counts", 0, 1).ravel()
    assert np.array_equal(np.array(found.means["blk.3.ffn_down.weight"], np.float32), sums / count)
    assert found.kv == (
        KV.text("quantize.imatrix.file", str(path)),
        KV.text("quantize.imatrix.dataset", "cal.txt"),
        KV.u32("quantize.imatrix.entries_count", 56),
        KV.u32("quantize.imatrix.chunks_count", 120),
    )


@pytest.mark.parametrize(("end", "dataset", "chunks"), [(b"", None, 0), (b"\7\0\0\0\2\0\0\0ab", "ab", 7)])
def test_the_older_binary(tmp_path: Path, end: bytes, dataset: str | None, chunks: int) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(dat({"blk.0.ffn_up.weight": (4, [2, 8]), "unseen": (0, [0, 0])}, end))
    found = read_imatrix(path)
    assert {n: list(m) for n, m in found.means.items()} == {
        "blk.0.ffn_up.weight": [0.5, 2.0],
        "unseen": [1.0, 1.0],
    }
    assert (found.dataset, found.chunks) == (dataset, chunks)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not an importance matrix"),
        (struct.pack("<i", 1 << 30), "1073741824 entries in 4 bytes"),
        (dat({"a": (1, [1.0])})[:-1], "runs past the end"),
        (dat({"a": (1, [1.0])}, b"\1\0\0\0\xff\0\0\0ab"), "its end runs past the end"),
        (dat({"a": (1, [1.0])}, b"\1\0\0\0\1\0\0\0ab"), "its end is not a name"),
        (dat({"a": (1, [-1.0])}), "a holds a negative or infinite mean"),
        (dat({"a": (1, [float("nan")])}), "a holds a negative or infinite mean"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "i.dat").write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match=says):
        read_imatrix(tmp_path / "i.dat")
