"""Panels of float32 numbers are the rows as they are stored; of many, kernels make what they make of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook
from qconvert.core.values import DenseRows
from qconvert.quant import affine, codebook_encode, float32_panels
from qconvert.quant.casts import cast
from qconvert.quant.ggml import encode_rows

ROWS, WIDTH = 301, 512  # more numbers than a panel, and rows that fill none


def block(dtype: DType, rows: int = ROWS, width: int = WIDTH) -> DenseRows:
    numbers = np.random.default_rng(rows * width).standard_normal((rows, width)).astype(np.float32)
    return cast(DenseRows(numbers, DType.F32), dtype)[0]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    ("rows", "width", "multiple"), [(ROWS, WIDTH, 16), (ROWS, 700, 128), (5, 3, 16), (0, 8, 1)]
)
def test_all_rows_are_yielded_in_turn_as_float32(dtype: DType, rows: int, width: int, multiple: int) -> None:
    stored, seen = block(dtype, rows, width), 0
    wide_RI = cast(stored, DType.F32)[0].rows_RI
    for run, panel_RI in float32_panels.float32_panels(stored, multiple):
        assert run.start == seen and run.start % multiple == 0
        assert panel_RI.dtype == np.float32 and panel_RI.flags.c_contiguous
        assert np.array_equal(panel_RI, wide_RI[run])
        seen = run.stop
    assert seen == rows


def test_a_panel_holds_so_many_numbers_or_the_rows_that_belong_together() -> None:
    sizes = [panel.size for _, panel in float32_panels.float32_panels(block(DType.BF16))]
    assert len(sizes) > 1 and max(sizes) <= float32_panels._NUMBERS
    ((_, whole),) = float32_panels.float32_panels(block(DType.BF16), 512)
    assert whole.shape == (ROWS, WIDTH)


IMPORTANCE_I = np.linspace(0.5, 2, WIDTH, dtype=np.float32)
INT4 = AffineInt(4, 128, True, DType.F32)
E4M3_BLOCKS = Codebook("e4m3", 128, DType.F32, DType.F32, group_rows=128)
E4M3_WHOLE = Codebook("e4m3", None, DType.F32, DType.F32, group_rows=None)
NF4 = Codebook("nf4", 64, DType.F32, DType.F32)
Encoder = Callable[[DenseRows], tuple[Sequence[np.ndarray], object]]


def _ggml(name: str, importance_I: np.ndarray | None = None) -> Encoder:
    return lambda rows: ([encode_rows(rows, name, importance_I=importance_I)], None)


def _coded(encoding: Codebook, weights_I: np.ndarray | None = None, whole: float | None = None) -> Encoder:
    def encoded(rows: DenseRows) -> tuple[Sequence[np.ndarray], object]:
        made, lost = codebook_encode.encode(rows, encoding, weights_I=weights_I, whole=whole)
        return made.arrays, lost

    return encoded


def _int4(rows: DenseRows) -> tuple[Sequence[np.ndarray], object]:
    made, lost = affine.quantize_stacked(rows, 7, INT4, search=True)  # of 43 rows each
    return made.arrays, lost


ENCODERS = {
    "int4": _int4,
    "Q4_0": _ggml("Q4_0"),
    "Q4_K weighted": _ggml("Q4_K", IMPORTANCE_I),
    "e4m3 blocks": _coded(E4M3_BLOCKS),
    "e4m3 blocks weighted": _coded(E4M3_BLOCKS, IMPORTANCE_I),
    "e4m3 whole": _coded(E4M3_WHOLE, whole=4.0),
    "nf4 weighted": _coded(NF4, IMPORTANCE_I),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda dtype: dtype.name)
def test_what_is_made_of_several_panels_is_made_of_the_whole(dtype: DType, name: str) -> None:
    """Codes, scales and errors are those of the same numbers in float32, which are one panel."""
    narrow = block(dtype)
    (arrays, lost), (wanted, wanted_lost) = map(ENCODERS[name], (narrow, cast(narrow, DType.F32)[0]))
    assert len(arrays) == len(wanted) > 0 and lost == wanted_lost
    assert all(np.array_equal(a, b) for a, b in zip(arrays, wanted, strict=True))
