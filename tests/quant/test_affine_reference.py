"""The group quantizer against the definition written in plain numpy, and its search against many scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, DenseRows
from qconvert.quant.affine import dequantize, quantize
from qconvert.quant.codebook import wide
from qconvert.quant.packed_codes import codes_of, from_words, words_of
from tests.support.values import as_type, decoded

BITS = st.integers(2, 8)
SCALES = st.sampled_from([DType.F32, DType.BF16, DType.F16])
SMALLEST = {DType.F32: 2.0**-126, DType.BF16: 2.0**-126, DType.F16: 2.0**-24}
LARGEST = {DType.F32: 3.4028234663852886e38, DType.BF16: 3.3895313892515355e38, DType.F16: 65504.0}


def nearest(scale: float, dtype: DType) -> float:
    """The storable scale nearest to a float32, by torch's rounding and the bounds of the type."""
    kind = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}[dtype]
    rounded = float(torch.tensor(float(np.float32(scale)), dtype=torch.float32).to(kind))
    return min(max(rounded, SMALLEST[dtype]), LARGEST[dtype])


def min_max(group: np.ndarray, encoding: AffineInt) -> tuple[float, int, np.ndarray]:
    """Scale, zero point and codes of one group of float32 numbers, in float64, one rounding at a time."""
    top = 2**encoding.bits - 1
    if not np.isfinite(group).all():
        group = np.zeros_like(group)
    low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
    if encoding.symmetric:
        zero = 2 ** (encoding.bits - 1)
        scale = nearest(max(-low, high) / (zero - 0.5), encoding.scale_dtype)
    else:
        half = float(np.float32(high / 2 - low / 2))
        scale = nearest(half / (top / 2), encoding.scale_dtype)
        zero = int(np.clip(np.rint(np.float32(-low / scale)), 0, top))
    places = np.rint((group.astype(np.float64) / scale).astype(np.float32))
    return scale, zero, np.clip(places, -zero, top - zero) + zero


def check_against_reference(rows_RI: np.ndarray, encoding: AffineInt) -> None:
    value, _ = quantize(DenseRows(rows_RI, DType.F32), encoding, search=False)
    size = encoding.group_size or rows_RI.shape[1]
    scales_RG, codes_RI = wide(value.scales_RG, encoding.scale_dtype), codes_of(value)
    for row, group in np.ndindex(scales_RG.shape):
        columns = slice(group * size, (group + 1) * size)
        scale, zero, codes = min_max(rows_RI[row, columns], encoding)
        assert scales_RG[row, group] == scale
        held = 2 ** (encoding.bits - 1) if value.zeros_RG is None else value.zeros_RG[row, group]
        assert held == zero
        np.testing.assert_array_equal(codes_RI[row, columns], codes)


@settings(max_examples=60)
@given(
    bits=BITS,
    symmetric=st.booleans(),
    scale_dtype=SCALES,
    size=st.sampled_from([8, 16, 24, 32, None]),
    spread=st.sampled_from([1e-30, 1e-7, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 10**6),
)
def test_min_max_is_its_definition(
    bits: int, symmetric: bool, scale_dtype: DType, size: int | None, spread: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows_RI = (random.standard_t(3, (2, 96)) * spread).astype(np.float32)
    check_against_reference(rows_RI, AffineInt(bits, size, symmetric, scale_dtype))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", [DType.F32, DType.F16, DType.BF16])
def test_odd_groups_are_those_of_the_definition(symmetric: bool, scale_dtype: DType) -> None:
    """Zeros, one side only, one number, equal numbers, halves between codes, and numbers that are none."""
    rows_RI = np.zeros((9, 16), np.float32)
    rows_RI[1], rows_RI[2] = np.linspace(1, 2, 16), np.linspace(-3, -1, 16)
    rows_RI[3, 7], rows_RI[4] = -0.5, 0.125
    rows_RI[5] = np.arange(16) - 7.5  # on a grid of steps of 1, every number a half
    rows_RI[6, 3], rows_RI[7, 5] = np.nan, -np.inf
    rows_RI[8, :2] = 2.0**-120, -(2.0**-121)
    check_against_reference(rows_RI, AffineInt(4, 16, symmetric, scale_dtype))
    value, error = quantize(
        DenseRows(rows_RI, DType.F32), AffineInt(4, 16, symmetric, scale_dtype), search=True
    )
    assert error.nonfinite == 6 * 16 + 3
    assert not decoded(value)[[0, 6, 7]].any()


def test_halves_go_to_the_even_step() -> None:
    """A group whose range makes the step exactly 1, so that every half is a tie."""
    row = np.array([[0, 15, 0.5, 1.5, 2.5, 3.5, 4.5, 14.5]], np.float32)
    value, error = quantize(DenseRows(row, DType.F32), AffineInt(4, None, False, DType.F32), search=False)
    assert value.scales_RG.tolist() == [[1.0]]
    assert codes_of(value).tolist() == [[0, 15, 0, 2, 2, 4, 4, 14]]
    assert (error.max_abs, error.max_steps) == (0.5, 0.5)


@settings(max_examples=40)
@given(
    bits=BITS,
    symmetric=st.booleans(),
    scale_dtype=SCALES,
    spread=st.sampled_from([1e-7, 1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10**6),
)
def test_the_search_never_loses_to_min_max(
    bits: int, symmetric: bool, scale_dtype: DType, spread: float, seed: int
) -> None:
    """In every row, also where the search found nothing better and has to fall back."""
    random = np.random.default_rng(seed)
    rows_RI = (random.standard_normal((16, 32)) * spread).astype(np.float32)
    scheme = AffineInt(bits, 32, symmetric, scale_dtype)
    losses = []
    for search in (True, False):
        value, _ = quantize(DenseRows(rows_RI, DType.F32), scheme, search=search)
        losses.append(((decoded(value) - rows_RI.astype(np.float64)) ** 2).sum())
    assert losses[0] <= losses[1] * (1 + 1e-6)


def exhaustive(group: np.ndarray, importance: np.ndarray, bits: int, zeros: list[int]) -> float:
    """The least weighted error of a thousand scales and these zero points."""
    top, best = 2**bits - 1, np.inf
    for zero in zeros:
        reach = max(group.max() / max(top - zero, 0.5), -group.min() / max(zero, 0.5), 1e-30)
        scales = reach * np.geomspace(0.1, 1.1, 1000)[:, None]
        steps = np.clip(np.rint(group / scales), -zero, top - zero)
        best = min(best, float((importance * (group - steps * scales) ** 2).sum(1).min()))
    return best


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(2, 32), (3, 16), (3, 64), (4, 32), (6, 32)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_is_as_good_as_a_thousand_scales(
    symmetric: bool, bits: int, size: int, weighted: bool
) -> None:
    random = np.random.default_rng(bits)
    rows_RI = random.standard_t(4, (64, size)).astype(np.float32)
    importance = random.lognormal(0, 1, size) if weighted else np.ones(size)
    scheme = AffineInt(bits, size, symmetric, DType.F32)
    given_ = importance if weighted else None
    value, _ = quantize(DenseRows(rows_RI, DType.F32), scheme, search=True, weights_I=given_)
    plain, _ = quantize(DenseRows(rows_RI, DType.F32), scheme, search=False)
    found = (importance * (decoded(value) - rows_RI) ** 2).sum(1)
    least = np.array(
        [
            exhaustive(
                row.astype(np.float64),
                importance,
                bits,
                [2 ** (bits - 1)] if plain.zeros_RG is None else [int(plain.zeros_RG[i, 0])],
            )
            for i, row in enumerate(rows_RI)
        ]
    )
    # With more codes the sixteen first scales are further apart than the error's valleys.
    assert found.sum() <= (1.01 if bits < 5 else 1.03) * least.sum()


@settings(max_examples=40)
@given(
    bits=BITS, symmetric=st.booleans(), spread=st.sampled_from([0.5, 1.5, 3.0]), seed=st.integers(0, 10**6)
)
def test_weighing_errors_never_makes_the_weighted_error_worse(
    bits: int, symmetric: bool, spread: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows_RI = random.standard_normal((64, 64)).astype(np.float32)
    importance = random.lognormal(0, spread, 64)
    losses = []
    for weights_I in (importance, None):
        scheme = AffineInt(bits, 32, symmetric, DType.F32)
        value, _ = quantize(DenseRows(rows_RI, DType.F32), scheme, search=True, weights_I=weights_I)
        losses.append((importance * (decoded(value) - rows_RI.astype(np.float64)) ** 2).sum())
    assert losses[0] <= losses[1] * (1 + 1e-5)


@settings(max_examples=30)
@given(bits=BITS, seed=st.integers(0, 10**6), power=st.integers(-20, 20))
def test_a_power_of_two_scales_the_scales_alone(bits: int, seed: int, power: int) -> None:
    """Codes and zero points do not depend on the unit that weights are measured in."""
    rows_RI = np.random.default_rng(seed).standard_normal((4, 64)).astype(np.float32)
    scheme = AffineInt(bits, 32, seed % 2 == 0, DType.F32)
    for search in (True, False):
        one, _ = quantize(DenseRows(rows_RI, DType.F32), scheme, search=search)
        times, _ = quantize(DenseRows(rows_RI * np.float32(2.0**power), DType.F32), scheme, search=search)
        np.testing.assert_array_equal(codes_of(times), codes_of(one))
        np.testing.assert_array_equal(times.scales_RG, one.scales_RG * np.float32(2.0**power))


@settings(max_examples=20)
@given(bits=BITS, symmetric=st.booleans(), seed=st.integers(0, 10**6))
def test_quantizing_what_was_decoded_changes_nothing(bits: int, symmetric: bool, seed: int) -> None:
    """Numbers that lie on a grid whose both ends are in use are found there again by min-max."""
    random = np.random.default_rng(seed)
    scheme = AffineInt(bits, 32, False, DType.F32)
    codes_RI = random.integers(0, 2**bits, (3, 64), np.uint8)
    codes_RI[:, [0, 32]], codes_RI[:, [1, 33]] = 0, 2**bits - 1
    scales_RG = np.ldexp(np.float32(1), random.integers(-9, 3, (3, 2))).astype(np.float32)
    zeros_RG = random.integers(0, 2**bits, (3, 2), np.uint8)
    before = AffineIntRows(codes_RI, scales_RG, zeros_RG, scheme)
    again, error = quantize(dequantize(before, DType.F32), scheme, search=False)
    np.testing.assert_array_equal(codes_of(again), codes_RI)
    np.testing.assert_array_equal(again.scales_RG, scales_RG)
    assert error.sum_sq_error == 0 and error.max_steps == 0


@settings(max_examples=60)
@given(bits=BITS, rows=st.integers(0, 5), groups=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_words_hold_the_codes_of_any_width(bits: int, rows: int, groups: int, seed: int) -> None:
    """Rows that fill whole words stay packed in memory; others are unpacked as they are read."""
    random = np.random.default_rng(seed)
    for width in (32 * groups, 32 * groups + seed % 31 + 1):
        codes_RI = random.integers(0, 2**bits, (rows, width), np.uint8)
        scales_RG = np.ones((rows, 1), np.float32)
        value = AffineIntRows(codes_RI, scales_RG, None, AffineInt(bits, None, True, DType.F32))
        words = words_of(value)
        assert words.shape == (rows, -(-width * bits // 32)) and words.dtype == np.int32
        held = from_words(words, bits, width)
        again = AffineIntRows(held, scales_RG, None, value.encoding)
        assert again.width == width
        np.testing.assert_array_equal(codes_of(again), codes_RI)
        assert (held is words) == (width * bits % 32 == 0)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64])
def test_numbers_are_rounded_once_on_the_way_out(dtype: DType) -> None:
    """The product in float32, then the type that is asked for."""
    rows_RI = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    value, _ = quantize(DenseRows(rows_RI, DType.F32), AffineInt(5, 32, False, DType.F16), search=True)
    assert value.zeros_RG is not None
    scales = np.repeat(value.scales_RG.astype(np.float32), 32, axis=1)
    exact = (codes_of(value).astype(np.float32) - np.repeat(value.zeros_RG, 32, axis=1)) * scales
    np.testing.assert_array_equal(dequantize(value, dtype).rows_RI, as_type(exact, dtype))
