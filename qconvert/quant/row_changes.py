"""Applies to weights what some graphs expect precomputed (norm + 1, -exp(A_log), ...), in float32.

R: rows, I: columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.quant.casts import cast


def _unit_rows(rows_RI: np.ndarray) -> np.ndarray:
    """Normalizes rows to length 1 (Baichuan 2's head), as torch.nn.functional.normalize with its epsilon."""
    lengths_R = np.sqrt((rows_RI.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return np.asarray(rows_RI / np.maximum(lengths_R, 1e-12).astype(np.float32))


def _log_minus(rows_RI: np.ndarray) -> np.ndarray:
    """Undoes "minus_exp", rounded once from float64; numbers that are not negative become NaN or Inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(-rows_RI.astype(np.float64)), np.float32)


CHANGES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    # A norm used as `1 + weight` (Gemma's), for a graph that multiplies by `weight`.
    "plus_one": lambda rows_RI: rows_RI + np.float32(1),
    "unit_rows": _unit_rows,
    # A decay rate from its stored logarithm (A_log of Mamba and DeltaNet).
    "minus_exp": lambda rows_RI: -np.exp(rows_RI),
}
# Rows of length 1 are kept: a model that normalizes them computes the same. The sum with 1 has rounded away
# low bits of small weights.
INVERSES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "plus_one": lambda rows_RI: rows_RI - np.float32(1),
    "unit_rows": lambda rows_RI: rows_RI,
    "minus_exp": _log_minus,
}


def changed(value: DenseRows, change: str) -> DenseRows:
    """Returns the rows with the named change applied, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI
    return DenseRows(CHANGES[change](rows_RI).astype(np.float32, copy=False), DType.F32)


def restored(value: DenseRows, change: str) -> DenseRows:
    """Returns the rows with the named change undone, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI
    return DenseRows(INVERSES[change](rows_RI).astype(np.float32, copy=False), DType.F32)


def unscaled(value: DenseRows, factor: float) -> DenseRows:
    """Returns the rows divided by a number, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI / np.float32(factor)
    return DenseRows(rows_RI.astype(np.float32, copy=False), DType.F32)


def scaled(value: DenseRows, factor: float) -> DenseRows:
    """Returns the rows multiplied by a number, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI * np.float32(factor)
    return DenseRows(rows_RI.astype(np.float32, copy=False), DType.F32)


def segments_scaled(
    value: DenseRows, segments: Sequence[tuple[int, float]], *, divides: bool = False
) -> DenseRows:
    """Returns the rows multiplied, or divided, by one number for each run of so many rows, in float32.

    After the last run the first one begins again.
    """
    factors = np.array([factor for _, factor in segments], np.float32)
    factors_R = np.repeat(factors, [rows for rows, _ in segments])
    factors_RI = np.resize(factors_R, value.rows)[:, None]
    rows_RI = cast(value, DType.F32)[0].rows_RI
    return DenseRows(rows_RI / factors_RI if divides else rows_RI * factors_RI, DType.F32)


def multiplied(value: DenseRows, rows: int) -> DenseRows:
    """Returns every block of `rows` rows times the block of as many rows after it, in float32."""
    pairs = cast(value, DType.F32)[0].rows_RI.reshape(-1, 2, rows, value.width)
    return DenseRows((pairs[:, 0] * pairs[:, 1]).reshape(-1, value.width), DType.F32)


def rescaled(
    value: DenseRows, columns_RI: np.ndarray | None, divisors_R: np.ndarray | None, offset: float
) -> DenseRows:
    """Returns `(w * columns + offset) / divisors - offset` in float32.

    `columns_RI` float32 [R, I] or [1, I], `divisors_R` float32 [R]; None stands for ones.
    """
    rows_RI = cast(value, DType.F32)[0].rows_RI
    if columns_RI is not None:
        rows_RI = rows_RI * columns_RI
    if divisors_R is not None:
        rows_RI = (rows_RI + np.float32(offset)) / divisors_R[:, None] - np.float32(offset)
    return DenseRows(np.ascontiguousarray(rows_RI, np.float32), DType.F32)


def swapped(rows_RI: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """Reorders columns from `outer` groups of `inner` groups each to `inner` groups of `outer` each."""
    groups = rows_RI.reshape(len(rows_RI), outer, inner, -1)
    return np.ascontiguousarray(groups.swapaxes(1, 2)).reshape(rows_RI.shape)


def transposed(rows_RI: np.ndarray, block: int) -> np.ndarray:
    """Transposes every block of `block` rows: [blocks * block, I] to [blocks * I, block]."""
    blocks = rows_RI.reshape(-1, block, rows_RI.shape[1])
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1, block)
