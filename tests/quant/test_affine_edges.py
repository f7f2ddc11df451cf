"""The group quantizer at its edges: zeros, denormals, the largest numbers, odd widths, NaN and Inf."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, DenseRows
from qconvert.quant.affine import QuantError, dequantize, quantize
from qconvert.quant.packed_codes import codes_of
from tests.quant.test_affine import BITS, BOTH, block, encoding, gaussian, grid_RG, heavy_tailed, wide


@pytest.mark.parametrize(("symmetric", "search"), list(product(BOTH, BOTH)))
@pytest.mark.parametrize("scale_dtype", [DType.BF16, DType.F16, DType.F32])
def test_nothing_becomes_exactly_nothing(symmetric: bool, search: bool, scale_dtype: DType) -> None:
    numbers_RI = gaussian(4, 128)
    numbers_RI[0], numbers_RI[1], numbers_RI[2, :32] = 0.0, -0.0, 0.0
    value, _ = quantize(block(numbers_RI), encoding(4, 32, symmetric, scale_dtype), search=search)
    decoded_RI = wide(dequantize(value, DType.BF16))
    assert not decoded_RI[:2].any()
    assert not decoded_RI[2, :32].any()
    assert decoded_RI[2, 32:].any()
    assert (grid_RG(value)[0] > 0).all()


@pytest.mark.parametrize(("bits", "symmetric"), list(product(BITS, BOTH)))
@pytest.mark.parametrize("search", BOTH)
def test_constant_rows_keep_their_number(bits: int, symmetric: bool, search: bool) -> None:
    numbers_RI = np.repeat([[1.0], [-1.0], [3e-3], [-77.0]], 64, axis=1)
    value, error = quantize(block(numbers_RI), encoding(bits, 32, symmetric), search=search)
    scales_RG, _ = grid_RG(value)
    assert (scales_RG > 0).all()
    # A plain symmetric grid has half a step of room above its highest code.
    exact = search or not symmetric
    close = 2.0**-7 if exact else 0.5 / (2 ** (bits - 1) - 0.5) + 2.0**-7
    np.testing.assert_allclose(wide(dequantize(value, DType.F32)), numbers_RI, rtol=close)
    assert error.max_steps <= 0.5 + 2**bits / 256


@pytest.mark.parametrize(("symmetric", "search"), list(product(BOTH, BOTH)))
def test_a_scale_below_float16_loses_its_group_and_no_more(symmetric: bool, search: bool) -> None:
    numbers_RI = gaussian(2, 64)
    numbers_RI[0, :32] = np.linspace(-1e-9, 1e-9, 32)
    numbers_RI[0, 32:] = np.linspace(-1e-6, 1e-6, 32)  # steps of float16's smallest number
    value, error = quantize(block(numbers_RI), encoding(4, 32, symmetric, DType.F16), search=search)
    decoded_RI = wide(dequantize(value, DType.F32))
    assert not decoded_RI[0, :32].any()
    assert np.abs(decoded_RI[0, 32:] - numbers_RI[0, 32:]).max() < 2e-7
    assert error.overflow == 0


@pytest.mark.parametrize(("symmetric", "search"), list(product(BOTH, BOTH)))
def test_denormals_are_zeros(symmetric: bool, search: bool) -> None:
    denormals = DenseRows(np.ones((2, 64), np.uint16), DType.BF16)
    value, error = quantize(denormals, encoding(4, 32, symmetric), search=search)
    assert not wide(dequantize(value, DType.F32)).any()
    assert error.max_abs == wide(denormals).max()


@pytest.mark.parametrize(("symmetric", "search"), list(product(BOTH, BOTH)))
def test_the_largest_numbers_stay_finite(symmetric: bool, search: bool) -> None:
    numbers_RI = gaussian(2, 64)
    numbers_RI[0, [3, 5]] = 3.38e38, -3.38e38
    value, error = quantize(block(numbers_RI), encoding(4, 32, symmetric), search=search)
    scales_RG, _ = grid_RG(value)
    decoded_RI = wide(dequantize(value, DType.F32))
    assert np.isfinite(decoded_RI).all()
    np.testing.assert_allclose(decoded_RI[0, [3, 5]], numbers_RI[0, [3, 5]], atol=scales_RG[0, 0] * 0.55)
    assert error.overflow == 0
    assert error.sum_sq == pytest.approx(2 * 3.38e38**2, rel=1e-2)
    assert 0 < error.sum_sq_error < 0.01 * error.sum_sq


@pytest.mark.parametrize(("symmetric", "search"), list(product(BOTH, BOTH)))
def test_scales_too_large_for_their_type_are_counted(symmetric: bool, search: bool) -> None:
    numbers_RI = gaussian(2, 96)
    numbers_RI[0, 3], numbers_RI[1, 70] = 3e38, -2e6
    value, error = quantize(block(numbers_RI), encoding(4, 32, symmetric, DType.F16), search=search)
    assert error.overflow == 2
    assert np.isfinite(value.scales_RG).all()
    assert np.isfinite(error.sum_sq_error)


@pytest.mark.parametrize("search", BOTH)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_nonfinite_number_is_named(bad: float, search: bool) -> None:
    numbers_RI = gaussian(3, 64)
    clean, _ = quantize(block(numbers_RI), encoding(4, 32), search=search)
    numbers_RI[1, 40], numbers_RI[2, 1] = bad, np.nan
    value, error = quantize(block(numbers_RI), encoding(4, 32), search=search)
    assert error.nonfinite == 64 + 40
    np.testing.assert_array_equal(codes_of(value)[0], codes_of(clean)[0])
    assert np.isfinite(wide(dequantize(value, DType.F32))).all()


def test_numbers_beyond_float32_are_counted() -> None:
    numbers_RI = gaussian(2, 64)
    numbers_RI[0, 0] = 1e300
    _, error = quantize(DenseRows(numbers_RI, DType.F64), encoding(4, 32), search=True)
    assert (error.overflow, error.nonfinite) == (1, -1)


def test_an_outlier_costs_its_own_group_only() -> None:
    numbers_RI = gaussian(1, 128)
    clean, _ = quantize(block(numbers_RI), encoding(4, 32), search=True)
    numbers_RI[0, 5] = 32768
    value, _ = quantize(block(numbers_RI), encoding(4, 32), search=True)
    assert wide(dequantize(value, DType.F32))[0, 5] == pytest.approx(32768, rel=2.0**-8)
    np.testing.assert_array_equal(codes_of(value)[0, 32:], codes_of(clean)[0, 32:])


@pytest.mark.parametrize("width", [1, 15, 16, 17, 172])
def test_any_width_is_a_channel(width: int) -> None:
    weights = block(heavy_tailed(5, width))
    value, error = quantize(weights, encoding(4, None, symmetric=False), search=True)
    assert codes_of(value).shape == (5, width)
    assert value.scales_RG.shape == (5, 1)
    assert error.sum_sq_error <= 0.05 * error.sum_sq
    assert dequantize(value, DType.BF16).rows_RI.shape == (5, width)


def test_no_rows() -> None:
    value, error = quantize(DenseRows(np.zeros((0, 64), np.uint16), DType.BF16), encoding(4, 32), search=True)
    assert (codes_of(value).shape, value.scales_RG.shape) == ((0, 64), (0, 2))
    assert error == QuantError(0.0, 0.0, 0.0, 0.0, 0)
    assert dequantize(value, DType.BF16).rows_RI.shape == (0, 64)


@pytest.mark.parametrize("scale", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000])
def test_scales_that_are_none_decode_to_bfloat16_as_to_float32(scale: int) -> None:
    encoding = AffineInt(4, 32, symmetric=True, scale_dtype=DType.F32)
    scales_RG = np.array([[scale, 0x3F800001]], np.uint32).view(np.float32)
    value = AffineIntRows(np.tile(np.arange(16, dtype=np.uint8), (1, 4)), scales_RG, None, encoding)
    expected = torch.from_numpy(dequantize(value, DType.F32).rows_RI).bfloat16()
    found = torch.from_numpy(dequantize(value, DType.BF16).rows_RI.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
