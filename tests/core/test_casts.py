"""Rounding between float dtypes against torch, and what is found in blocks that are not finite."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.quant.casts import Difference, cast, compare, first_nonfinite, flaw_and_peak

FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
BIG = 100_003  # more than one piece, and no round number


def to_torch(block: DenseRows) -> Any:
    torch = pytest.importorskip("torch")
    if block.dtype is DType.BF16:
        return torch.from_numpy(block.rows_RI.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(block.rows_RI)


def torch_dtype(dtype: DType) -> Any:
    torch = pytest.importorskip("torch")
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return getattr(torch, names[dtype.code])


def every_sixteen_bits(dtype: DType) -> DenseRows:
    return DenseRows(np.arange(1 << 16, dtype=np.uint16).view(dtype.carrier).reshape(256, 256), dtype)


def hard_numbers(dtype: DType) -> DenseRows:
    """Random bits of the dtype: every exponent, subnormals, infinities and NaNs."""
    words = np.random.default_rng(0).integers(0, 256, (4, 50_000 * dtype.nbytes // 4), dtype=np.uint8)
    return DenseRows(words.view(dtype.carrier), dtype)


def same_numbers(ours: DenseRows, theirs: Any) -> None:
    found, wanted = to_torch(ours).double().numpy(), theirs.double().numpy()
    np.testing.assert_array_equal(found, wanted)  # NaN where NaN
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize(("source", "target"), list(product((DType.F16, DType.BF16), FLOATS)))
def test_every_sixteen_bit_float_casts_as_in_torch(source: DType, target: DType) -> None:
    block = every_sixteen_bits(source)
    same_numbers(cast(block, target)[0], to_torch(block).to(torch_dtype(target)))


@pytest.mark.parametrize("target", [DType.F16, DType.BF16])
def test_float32_rounds_as_in_torch(target: DType) -> None:
    torch = pytest.importorskip("torch")
    block = hard_numbers(DType.F32)
    same_numbers(cast(block, target)[0], to_torch(block).to(torch_dtype(target)))
    # Ties: halfway between neighbours of the target.
    halfway = np.arange(1 << 16, dtype=np.uint32).reshape(256, 256) << 16 | 0x8000
    ties = DenseRows(halfway.view(np.float32), DType.F32)
    same_numbers(cast(ties, DType.BF16)[0], to_torch(ties).to(torch.bfloat16))


def test_float64_rounds_once() -> None:
    # Just above halfway between 1 and 1 + 2**-7, by less than float32 can hold: rounding twice gives 1.
    rows_RI = np.array([[1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40, 1 + 2.0**-8 - 2.0**-40]])
    bf16, _ = cast(DenseRows(rows_RI, DType.F64), DType.BF16)
    assert cast(bf16, DType.F64)[0].rows_RI.tolist() == [[1 + 2.0**-7, -1 - 2.0**-7, 1.0]]


def test_float64_rounds_to_the_nearest_bfloat16() -> None:
    rng = np.random.default_rng(0)
    rows_RI = rng.standard_normal((10, 1000)) * 2.0 ** rng.integers(-140, 120, (10, 1000))
    bf16, overflow = cast(DenseRows(rows_RI, DType.F64), DType.BF16)
    found = cast(bf16, DType.F64)[0].rows_RI
    size = np.maximum(np.frexp(rows_RI)[1] - 8, -133)
    assert overflow == 0
    np.testing.assert_array_equal(found, np.ldexp(np.rint(np.ldexp(rows_RI, -size)), size))


def test_overflow_counts_finite_numbers_only() -> None:
    rows_RI = np.array([[65504, 65519.9, 65520, -1e5, np.inf, np.nan, 3.4e38]], np.float32)
    assert cast(DenseRows(rows_RI, DType.F32), DType.F16)[1] == 3
    assert cast(DenseRows(rows_RI, DType.F32), DType.BF16)[1] == 1
    assert cast(DenseRows(rows_RI.astype(np.float64) * 10, DType.F64), DType.F32)[1] == 1
    assert cast(DenseRows(rows_RI, DType.F32), DType.F64)[1] == 0


def test_a_cast_to_its_own_dtype_is_the_block() -> None:
    block = hard_numbers(DType.F16)
    assert cast(block, DType.F16)[0] is block


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [0, 7, BIG - 1])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_the_first_nonfinite_number_is_found(dtype: DType, index: int, bad: float) -> None:
    numbers = np.full((1, BIG), 1e4, np.float32)
    clean, _ = cast(DenseRows(numbers, DType.F32), dtype)
    assert first_nonfinite(clean) == -1
    numbers[0, [index, -1]] = bad
    assert first_nonfinite(cast(DenseRows(numbers, DType.F32), dtype)[0]) == index


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [0, 5, BIG - 1])
def test_the_largest_magnitude_before_a_flaw_is_found(dtype: DType, index: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((1, BIG)).clip(-2, 2).astype(np.float32)
    numbers[0, index] = -1024
    assert flaw_and_peak(cast(DenseRows(numbers, DType.F32), dtype)[0]) == (-1, 1024)
    numbers[0, 5] = np.nan
    flaw, peak = flaw_and_peak(cast(DenseRows(numbers, DType.F32), dtype)[0])
    assert flaw == 5 and (peak == 1024 if index == 0 else peak <= 2)


def test_nothing_is_wrong_with_an_empty_block() -> None:
    empty = DenseRows(np.zeros((0, 8), np.float32), DType.F32)
    assert first_nonfinite(empty) == -1
    assert cast(empty, DType.BF16)[0].rows_RI.shape == (0, 8)
    assert compare(empty, empty) == Difference(0.0, 0.0, 0.0, 0, 0)


@pytest.mark.parametrize(("first", "second"), list(product(FLOATS, FLOATS)))
def test_differences_of_any_two_dtypes(first: DType, second: DType) -> None:
    rng = np.random.default_rng(1)
    a, _ = cast(DenseRows(rng.standard_normal((3, BIG // 3)), DType.F64), first)
    b, _ = cast(DenseRows(rng.standard_normal((3, BIG // 3)), DType.F64), second)
    b.rows_RI[0, :10] = cast(DenseRows(np.ones((1, 10)), DType.F64), second)[0].rows_RI
    a.rows_RI[0, :10] = cast(DenseRows(np.ones((1, 10)), DType.F64), first)[0].rows_RI
    wide_a, wide_b = to_torch(a).double().numpy(), to_torch(b).double().numpy()
    found = compare(a, b)
    assert found.max_abs == pytest.approx(np.abs(wide_a - wide_b).max(), rel=1e-6)
    assert found.sum_sq_diff == pytest.approx(((wide_a - wide_b) ** 2).sum(), rel=1e-6)
    assert found.sum_sq_a == pytest.approx((wide_a**2).sum(), rel=1e-6)
    assert found.equal_count == (wide_a == wide_b).sum() >= 10
    assert found.count == wide_a.size


def test_nonfinite_numbers_are_equal_to_themselves_only() -> None:
    a = DenseRows(np.array([[np.inf, np.nan, -np.inf, 0.0, 1.0]], np.float32), DType.F32)
    same = compare(a, DenseRows(a.rows_RI * np.float32(1), DType.F32))
    assert (same.equal_count, same.max_abs, same.sum_sq_diff) == (5, 0.0, 0.0)
    finite = DenseRows(np.array([[1e38, 2, -1e38, -0.0, 1.0]], np.float32), DType.F32)
    other = compare(a, finite)
    assert other.equal_count == 2
    assert not np.isfinite(other.max_abs)


def test_squares_beyond_float32_are_summed() -> None:
    a = DenseRows(np.full((1, 4), 3e38, np.float32), DType.F32)
    b = DenseRows(np.full((1, 4), -3e38, np.float32), DType.F32)
    found = compare(a, b)
    assert found.sum_sq_a == pytest.approx(4 * 9e76, rel=1e-6)
    assert found.sum_sq_diff == pytest.approx(4 * 36e76, rel=1e-6)
    assert found.max_abs == pytest.approx(6e38, rel=1e-6)
