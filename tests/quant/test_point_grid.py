"""Encoded rows as points: every encoding gives its numbers back, and takes other codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, GgmlBlocks, Unquantized
from qconvert.core.ggml_types import GGMLType
from qconvert.core.values import (
    AffineIntRows,
    AffineMinRows,
    CodebookRows,
    DenseRows,
    GgmlRows,
    Nested,
    Value,
)
from qconvert.ops import EncodeBlocks, EncodeTable, Quantize
from qconvert.quant.ggml import ENCODED
from qconvert.quant.point_grid import PointGrid, codes_of_points, has_points, point_grid, with_codes
from qconvert.quant.simd.packing import pack_stream
from tests.support.values import ENCODINGS, WIDTH, applied, blocks, decoded, same, value_of

MORE: tuple[Encoding, ...] = (
    *(AffineInt(bits, 64, False, DType.F32) for bits in range(2, 9)),
    *(AffineMin(bits, 64, DType.F32) for bits in range(2, 9)),
    Codebook("e4m3", None, DType.F32, DType.BF16, group_rows=None),
    Codebook("e4m3", 100, DType.F32, DType.BF16, group_rows=2),  # the last group is narrower
    blocks("IQ4_NL"),
    blocks("IQ4_XS"),
)
POINTS = tuple(encoding for encoding in (*ENCODINGS, *MORE) if has_points(encoding))
WITHOUT = tuple(encoding for encoding in (*ENCODINGS, *MORE) if not has_points(encoding))
BLOCKS = tuple(encoding for encoding in POINTS if isinstance(encoding, GgmlBlocks))


def name_of(encoding: Encoding) -> str:
    return f"{encoding.label}-{getattr(encoding, 'scale_dtype', DType.F16).label}"


def numbers_of(grid: PointGrid, codes_RI: np.ndarray) -> np.ndarray:
    """levels * step + shift, in float64."""
    groups_I = np.arange(codes_RI.shape[1]) // grid.size
    steps_RI, shifts_RI = grid.steps_RG[:, groups_I], grid.shifts_RG[:, groups_I]
    return grid.levels_T[codes_RI].astype(np.float64) * steps_RI + shifts_RI


def allowance(value: Value, grid: PointGrid) -> np.ndarray:
    """How far decoders may be from exact points: float32's rounding, or that of mins (as MLX rounds)."""
    ulp = 2.0**-23
    if isinstance(value, AffineMinRows):
        ulp = {DType.BF16: 2.0**-8, DType.F16: 2.0**-11}.get(value.encoding.scale_dtype, ulp)
    reach_RG = np.abs(grid.shifts_RG) + np.abs(grid.levels_T).max() * np.abs(grid.steps_RG)
    return np.asarray(2 * ulp * reach_RG)[:, np.arange(value.width) // grid.size]


def check_points(value: Value) -> None:
    grid = point_grid(value)
    assert grid.levels_T.dtype == grid.steps_RG.dtype == grid.shifts_RG.dtype == np.float32
    assert (np.diff(grid.levels_T) >= 0).all() and 2 <= len(grid.levels_T) <= 256
    assert grid.steps_RG.shape == grid.shifts_RG.shape == (value.rows, -(-value.width // grid.size))
    gaps = np.abs(numbers_of(grid, codes_of_points(value)) - decoded(value))
    assert (gaps <= allowance(value, grid)).all()


def other_codes(value: Value, seed: int = 1) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(
        0, len(point_grid(value).levels_T), (value.rows, value.width), np.uint8
    )
    return np.asarray(drawn)


@pytest.mark.parametrize("encoding", POINTS, ids=name_of)
def test_points_are_what_decoders_give(encoding: Encoding) -> None:
    value = value_of(encoding)
    check_points(value)
    codes_RI = other_codes(value)
    changed = with_codes(value, codes_RI)
    np.testing.assert_array_equal(codes_of_points(changed), codes_RI)
    check_points(changed)


@pytest.mark.parametrize("encoding", POINTS, ids=name_of)
def test_the_same_codes_give_the_same_bytes(encoding: Encoding) -> None:
    value = value_of(encoding)
    before = [array.copy() for array in value.arrays]
    assert same(with_codes(value, codes_of_points(value)), value)
    changed = with_codes(value, other_codes(value))
    assert same(with_codes(changed, codes_of_points(value)), value)
    assert all((a == b).all() for a, b in zip(before, value.arrays, strict=True)), "the value itself changed"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("encoding", BLOCKS, ids=name_of)
def test_blocks_of_any_bytes_keep_what_is_no_code(encoding: GgmlBlocks) -> None:
    """Against the gguf package: only the codes change, whatever the scales are."""
    random = np.random.default_rng(3)
    bytes_RB = random.integers(0, 256, (64, encoding.row_bytes(512)), np.uint8)
    value = GgmlRows(bytes_RB, encoding)
    assert same(with_codes(value, codes_of_points(value)), value)
    codes_RI = other_codes(value)
    with np.errstate(over="ignore", invalid="ignore"):
        grid = point_grid(value)
        ours = numbers_of(grid, codes_RI)
        theirs = dequantize(
            with_codes(value, codes_RI).arrays[0], GGMLQuantizationType(GGMLType[encoding.type].number)
        )
        finite = np.isfinite(theirs) & np.isfinite(ours)
        gaps, bounds = np.abs(ours - theirs)[finite], allowance(value, grid)[finite]
    assert finite.mean() > 0.5 and (gaps <= bounds).all()


def test_packed_codes_stay_packed() -> None:
    for encoding in (AffineInt(3, 32, False, DType.F16), AffineMin(6, 32, DType.F16)):
        value = value_of(encoding)
        assert isinstance(value, AffineIntRows | AffineMinRows)
        packed = replace(value, codes_RX=pack_stream(value.codes_RX, encoding.bits))
        np.testing.assert_array_equal(codes_of_points(packed), value.codes_RX)
        codes_RI = other_codes(value)
        made = with_codes(packed, codes_RI)
        assert isinstance(made, AffineIntRows | AffineMinRows) and made.codes_RX.dtype == np.int32
        np.testing.assert_array_equal(decoded(made), decoded(with_codes(value, codes_RI)))


def test_nested_scales_stay() -> None:
    value = value_of(Codebook("nf4", 64, DType.F32, DType.BF16, second="nested"))
    assert isinstance(value, CodebookRows)
    nested = Nested(np.zeros((8, 4), np.uint8), np.ones(1, np.float32), 0.5)
    made = with_codes(replace(value, nested=nested), other_codes(value))
    assert isinstance(made, CodebookRows) and made.nested is nested


def test_both_zeros_are_points_and_nan_is_none() -> None:
    value = CodebookRows(
        np.array([[0x00, 0x80, 0x7E, 0xFE]], np.uint8),
        np.ones((1, 1), np.float32),
        Codebook("e4m3", None, DType.F32, DType.BF16),
    )
    levels_T = point_grid(value).levels_T
    assert len(levels_T) == 254 and levels_T[0] == -448 and levels_T[-1] == 448
    np.testing.assert_array_equal(codes_of_points(value), [[127, 126, 253, 0]])
    with pytest.raises(ValueError, match="no finite numbers"):
        codes_of_points(replace(value, codes_RI=np.array([[0x7F, 0, 0, 0]], np.uint8)))


def test_levels_of_a_half_precision_min_are_not_rounded() -> None:
    """Which mlx.dequantize does, to the type of the mins, and MLX's matrix products do not."""
    value = AffineMinRows(
        np.array([[255, 1] * 16], np.uint8),
        np.array([[1.25]], np.float16),
        np.array([[2048]], np.float16),
        AffineMin(8, 32, DType.F16),
    )
    grid = point_grid(value)
    assert numbers_of(grid, codes_of_points(value))[0, :2].tolist() == [2366.75, 2049.25]
    assert decoded(value)[0, :2].tolist() == [2366, 2050]


@pytest.mark.parametrize("encoding", WITHOUT, ids=name_of)
def test_other_rows_have_no_points(encoding: Encoding) -> None:
    value = value_of(encoding)
    for ask in (point_grid, codes_of_points, lambda value: with_codes(value, np.zeros((8, WIDTH), np.uint8))):
        with pytest.raises(ValueError, match="no points"):
            ask(value)


@pytest.mark.parametrize(
    "encoding",
    [
        *(encoding for encoding in POINTS if isinstance(encoding, AffineInt)),
        *(e for e in POINTS if isinstance(e, Codebook) and e.table != "e5m2" and e.second != "nested"),
        *(encoding for encoding in BLOCKS if encoding.type in ENCODED),
    ],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_nearest_points_are_no_worse_than_the_encoders_choice(encoding: Encoding) -> None:
    plain_RI = np.random.default_rng(4).laplace(size=(8, WIDTH)).astype(np.float32)
    plain_RI[:, 64:96] = 0
    dense = DenseRows(plain_RI, DType.F32)
    if isinstance(encoding, AffineInt):
        value = applied(Quantize(encoding, search=True), dense)
    elif isinstance(encoding, Codebook):
        value = applied(EncodeTable(encoding), dense)
    else:
        assert isinstance(encoding, GgmlBlocks)
        value = applied(EncodeBlocks(encoding), dense)
    grid = point_grid(value)
    each_TRI = np.stack(
        [np.abs(numbers_of(grid, np.full(plain_RI.shape, t)) - plain_RI) for t in range(len(grid.levels_T))]
    )
    nearest = with_codes(value, each_TRI.argmin(axis=0).astype(np.uint8))

    def error(value: Value) -> float:
        return float(((decoded(value) - plain_RI.astype(np.float64)) ** 2).sum())

    assert error(nearest) <= error(value) * (1 + 1e-6)


def test_which_encodings_have_points() -> None:
    assert not any(map(has_points, (Unquantized(DType.F32), blocks("TQ1_0"), blocks("Q1_0"), blocks("Q2_0"))))
    written = {name for name in ENCODED if has_points(blocks(name))}
    lattices = {name for name in ENCODED if name.startswith(("IQ1", "IQ2", "IQ3"))}
    assert written == ENCODED - lattices - {"TQ1_0", "TQ2_0", "Q1_0", "Q2_0"}
