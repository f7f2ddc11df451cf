"""Casts float arrays between dtypes, finds the first NaN or Inf, and measures differences.

Works through flat pieces that fit the cache, so it runs at memory speed with little memory. numpy has no
bfloat16: it is carried as uint16, the upper half of a float32 (see `DType`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows

_PIECE = 1 << 16
# The bits of +Inf. Without the sign bit floats sort as their bits do: these bits and above are Inf or NaN.
_INF_BITS = {DType.BF16: 0x7F80, DType.F16: 0x7C00, DType.F32: 0x7F800000, DType.F64: 0x7FF << 52}


@dataclass(frozen=True, slots=True)
class Difference:
    """The element-wise difference of two arrays of equal shape; sums are float64.

    `sum_sq_diff` sums (a - b)^2 and `sum_sq_a` a^2; `max_abs` is the largest |a - b|. Both are NaN or Inf
    when a differing element is not finite. `equal_count` counts equal elements (0 equals -0, NaN equals NaN)
    among `count`. Differences of disjoint elements add up.
    """

    max_abs: float
    sum_sq_diff: float
    sum_sq_a: float
    equal_count: int
    count: int

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            float(np.maximum(self.max_abs, other.max_abs)),
            self.sum_sq_diff + other.sum_sq_diff,
            self.sum_sq_a + other.sum_sq_a,
            self.equal_count + other.equal_count,
            self.count + other.count,
        )


def cast(block: DenseRows, dtype: DType) -> tuple[DenseRows, int]:
    """Returns the block in another float dtype, rounded once (half to even), and how many finite numbers
    became infinite. A block that has the dtype already is returned itself.
    """
    if block.dtype is dtype:
        return block, 0
    rows_RI = np.empty(block.rows_RI.shape, dtype.carrier)
    overflow = 0
    for stored, rounded in zip(_pieces(block.rows_RI), _pieces(rows_RI), strict=True):
        numbers = _numbers(stored, block.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            rounded[:] = (
                _to_bfloat16(numbers) if dtype is DType.BF16 else numbers.astype(dtype.carrier, copy=False)
            )
        infinite = np.count_nonzero(_nonfinite(rounded, dtype))
        if infinite:
            overflow += infinite - np.count_nonzero(_nonfinite(stored, block.dtype))
    return DenseRows(rows_RI, dtype), overflow


def cast_integers(block: DenseRows, dtype: DType) -> tuple[DenseRows, int]:
    """Returns the block in another integer dtype, and how many of its numbers that cannot hold."""
    limits = np.iinfo(dtype.carrier)
    beyond = np.count_nonzero((block.rows_RI < limits.min) | (block.rows_RI > limits.max))
    return DenseRows(block.rows_RI.astype(dtype.carrier), dtype), int(beyond)


def first_nonfinite(block: DenseRows) -> int:
    """Returns the flat index of the block's first NaN or Inf, -1 when every number is finite."""
    return flaw_and_peak(block)[0]


def first_nan(block: DenseRows) -> int:
    """Returns the flat index of the first NaN of a small block, -1 when there is none."""
    flaws = (_magnitudes(block.rows_RI, block.dtype) > _INF_BITS[block.dtype]).ravel()
    return int(flaws.argmax()) if flaws.any() else -1


def flaw_and_peak(block: DenseRows) -> tuple[int, float]:
    """Returns the flat index of the block's first NaN or Inf, -1 when every number is finite; and the largest
    magnitude before it, 0 when there is none.
    """
    start = peak = 0
    for stored in _pieces(block.rows_RI):
        magnitudes = _magnitudes(stored, block.dtype)
        largest = int(magnitudes.max())
        if largest >= _INF_BITS[block.dtype]:
            at = int((magnitudes >= _INF_BITS[block.dtype]).argmax())
            return start + at, _number(max(peak, int(magnitudes[:at].max(initial=0))), block.dtype)
        peak = max(peak, largest)
        start += stored.size
    return -1, _number(peak, block.dtype)


def compare(a: DenseRows, b: DenseRows) -> Difference:
    """Returns the difference of two blocks of equal shape, in any float dtypes."""
    assert a.rows_RI.shape == b.rows_RI.shape, (a.rows_RI.shape, b.rows_RI.shape)
    total = Difference(0.0, 0.0, 0.0, 0, 0)
    for stored_a, stored_b in zip(_pieces(a.rows_RI), _pieces(b.rows_RI), strict=True):
        total += _difference(_numbers(stored_a, a.dtype), _numbers(stored_b, b.dtype))
    return total


def _difference(a: np.ndarray, b: np.ndarray) -> Difference:
    wide = np.result_type(a, b, np.float32)
    a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = a - b
        same = a == b
        if not same.all():
            same |= np.isnan(a) & np.isnan(b)
            # Inf - Inf is NaN even where both are equal.
            gaps[same] = 0
        squares = float(np.square(gaps).sum()), float(np.square(a).sum())
        if wide == np.float32 and not np.isfinite(squares).all():
            return _difference(a.astype(np.float64), b.astype(np.float64))
    return Difference(float(np.abs(gaps).max()), *squares, int(np.count_nonzero(same)), a.size)


def _pieces(rows_RI: np.ndarray) -> Iterator[np.ndarray]:
    flat = np.ascontiguousarray(rows_RI).reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield flat[start : start + _PIECE]


def _nonfinite(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Returns where a piece is not finite; a single False when all of it is finite."""
    magnitudes = _magnitudes(stored, dtype)
    if magnitudes.max() < _INF_BITS[dtype]:
        return np.zeros(1, np.bool_)
    return np.asarray(magnitudes >= _INF_BITS[dtype])


def _magnitudes(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Returns the bits of a piece without the sign bits; they sort as the magnitudes do."""
    bits = stored.view(f"<u{dtype.nbytes}")
    return np.asarray(bits & bits.dtype.type((1 << (dtype.bits - 1)) - 1))


def _number(bits: int, dtype: DType) -> float:
    stored = np.array([bits], f"<u{dtype.nbytes}").view(dtype.carrier)
    return float(_numbers(stored, dtype)[0])


def _numbers(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Returns a piece in a dtype numpy computes with: bfloat16 widened to float32, others unchanged."""
    if dtype is not DType.BF16:
        return stored
    bits = stored.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    wide = _round_to_odd(numbers) if numbers.dtype == np.float64 else numbers.astype(np.float32, copy=False)
    bits = wide.view(np.uint32)
    upper = bits >> 16
    rounded = ((upper & 1) + 0x7FFF + bits) >> 16
    nan = np.isnan(numbers)
    if nan.any():
        # Rounding could carry a NaN's mantissa into its sign: keep its upper half and make it quiet.
        rounded[nan] = upper[nan] | 0x40
    return rounded.astype(np.uint16)


def _round_to_odd(numbers: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32, an inexact result to an odd mantissa.

    Rounding that once more, to fewer bits, gives what rounding the float64 directly would (Boldo and
    Melquiond, "Emulation of a FMA and correctly rounded sums", 2008); rounding twice to nearest would not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = numbers.astype(np.float32)
        even = nearest.view(np.uint32) & 1 == 0
        beyond = np.where(numbers > nearest, np.inf, -np.inf).astype(np.float32)
        return np.where(even & (numbers != nearest), np.nextafter(nearest, beyond), nearest)
