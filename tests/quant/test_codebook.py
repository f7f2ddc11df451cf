"""Tables, nibbles and nearest codes, against torch's own 8-bit floats and against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, Value
from qconvert.quant.codebook import TABLES, wide
from qconvert.quant.codebook_encode import encode
from qconvert.quant.dequantize import numbers, reach
from qconvert.quant.nibbles import pack_nibbles, unpack_nibbles
from qconvert.quant.packed_codes import codes_of

ALL = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("table", "dtype"),
    [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("int8", torch.int8)],
)
def test_tables_are_torch_s(table: str, dtype: torch.dtype) -> None:
    expected = torch.from_numpy(ALL.copy()).view(dtype).float().numpy()
    np.testing.assert_array_equal(TABLES[table], expected)
    assert np.array_equal(np.signbit(TABLES[table][[0, 128]]), np.signbit(expected[[0, 128]]))


def test_powers_of_two_are_torch_s() -> None:
    expected = torch.from_numpy(ALL.copy()).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(wide(ALL, DType.F8_E8M0), expected)


def test_four_bit_floats_are_those_of_the_standard() -> None:
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(TABLES["e2m1"], np.array([*positive, *(-x for x in positive)]))
    assert np.signbit(TABLES["e2m1"][8]) and not np.signbit(TABLES["fp4"][8])


@given(st.binary(min_size=2, max_size=40).filter(lambda data: len(data) % 2 == 0), st.booleans())
def test_nibbles_come_back(data: bytes, high_first: bool) -> None:
    codes_RI = (np.frombuffer(data, np.uint8) & 15).reshape(1, -1)
    packed = pack_nibbles(codes_RI, high_first=high_first)
    np.testing.assert_array_equal(unpack_nibbles(packed, high_first=high_first), codes_RI)
    first = packed[0, 0] >> 4 if high_first else packed[0, 0] & 15
    assert first == codes_RI[0, 0]


def test_float8_codes_are_rounded_as_torch_rounds() -> None:
    middles = (TABLES["e4m3"][:0x7E] + TABLES["e4m3"][1:0x7F]) / 2
    random = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 100
    values = np.concatenate([TABLES["e4m3"][:0x7F], middles, -middles, random])
    values[-1] = 448  # the largest number makes the scale 1
    encoding = Codebook("e4m3", None, DType.F32, DType.BF16)
    made, error = encode(DenseRows(values.clip(-448, 448).reshape(1, -1), DType.F32), encoding)
    expected = torch.from_numpy(values.clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8)
    np.testing.assert_array_equal(codes_of(made)[0], expected.numpy())
    assert made.scales_RG.tolist() == [[1.0]] and error.count == values.size


@pytest.mark.parametrize("table", ["nf4", "fp4", "e4m3"])
def test_every_table_entry_is_its_own_nearest(table: str) -> None:
    entries = TABLES[table][np.isfinite(TABLES[table])].reshape(1, -1)
    encoding = Codebook(table, None, DType.F32, DType.F32)
    made, error = encode(DenseRows(entries.copy(), DType.F32), encoding)
    assert isinstance(made, CodebookRows) and error.sum_sq_error == 0
    np.testing.assert_array_equal(numbers(made, DType.F32).rows_RI, entries)


def values() -> list[Value]:
    """Two rows of 32 on every kind of grid, with the farthest codes and scales of both signs."""
    scales_RG, mins_RG = np.array([[3.5], [-7.25]], np.float32), np.array([[-300.0], [2]], np.float32)
    codes_RI = np.random.default_rng(0).integers(0, 16, (2, 32), np.uint8)
    codes_RI[:, :2] = 0, 15
    zeros_RG = np.array([[0], [15]], np.uint8)
    made: list[Value] = [
        AffineIntRows(codes_RI, scales_RG, None, AffineInt(4, 32, True, DType.F32)),
        AffineIntRows(codes_RI, scales_RG, zeros_RG, AffineInt(4, 32, False, DType.F32)),
        AffineMinRows(codes_RI, scales_RG, mins_RG, AffineMin(4, 32, DType.F32)),
        CodebookRows(
            codes_RI, scales_RG, Codebook("e2m1", 32, DType.F32, DType.F32, second="divided"), 0.125
        ),
    ]
    for name, table in TABLES.items():
        finite = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
        farthest = finite[np.argsort(-np.abs(table[finite]))][:32]
        coded_RI = np.resize(farthest, (2, 32))
        made.append(CodebookRows(coded_RI, scales_RG, Codebook(name, 32, DType.F32, DType.F32)))
    return made


@pytest.mark.parametrize("value", values(), ids=lambda value: value.encoding.label)
def test_no_number_is_beyond_the_bound(value: Value) -> None:
    largest = float(np.abs(numbers(value, DType.F32).rows_RI).max())
    assert largest <= reach(value) < 300 * largest


def test_there_is_no_bound_where_a_scale_is_none() -> None:
    value = values()[0]
    assert isinstance(value, AffineIntRows)
    value.scales_RG[1] = np.nan
    assert not reach(value) < np.inf
