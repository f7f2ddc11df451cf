"""What some graphs compute with a weight every time, done once and for all: in float32, row by row.

R: rows, I: columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows
from qconvert.quant.casts import cast


def _plus_one(rows_RI: np.ndarray) -> np.ndarray:
    """A norm that scales by `1 + weight` (Gemma's), for a graph that scales by `weight`."""
    changed_RI: np.ndarray = rows_RI + np.float32(1)
    return changed_RI


def _unit_rows(rows_RI: np.ndarray) -> np.ndarray:
    """Rows of length 1 (Baichuan 2's head); torch.nn.functional.normalize, with its bound."""
    lengths_R = np.sqrt((rows_RI.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    return np.asarray(rows_RI / np.maximum(lengths_R, 1e-12).astype(np.float32))


def _minus_exp(rows_RI: np.ndarray) -> np.ndarray:
    """A decay that is stored as the logarithm of its negative (A_log of Mamba and DeltaNet)."""
    changed_RI: np.ndarray = -np.exp(rows_RI)
    return changed_RI


def _minus_one(rows_RI: np.ndarray) -> np.ndarray:
    """The inverse of `_plus_one`, up to the bits of small weights that the sum has no room for."""
    changed_RI: np.ndarray = rows_RI - np.float32(1)
    return changed_RI


def _log_minus(rows_RI: np.ndarray) -> np.ndarray:
    """The inverse of `_minus_exp`, rounded once from float64; what is no decay becomes NaN or Inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(-rows_RI.astype(np.float64)), np.float32)


def _as_they_are(rows_RI: np.ndarray) -> np.ndarray:
    return rows_RI


CHANGES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "plus_one": _plus_one,
    "unit_rows": _unit_rows,
    "minus_exp": _minus_exp,
}
# The way back of each. Rows of length 1 stay so: what divides by their length computes the same with them.
INVERSES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "plus_one": _minus_one,
    "unit_rows": _as_they_are,
    "minus_exp": _log_minus,
}


def changed(value: DenseRows, change: str) -> DenseRows:
    """The rows with the change of this name, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI
    return DenseRows(CHANGES[change](rows_RI).astype(np.float32, copy=False), DType.F32)


def restored(value: DenseRows, change: str) -> DenseRows:
    """The rows before the change of this name, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI
    return DenseRows(INVERSES[change](rows_RI).astype(np.float32, copy=False), DType.F32)


def unscaled(value: DenseRows, factor: float) -> DenseRows:
    """The rows divided by a number, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI / np.float32(factor)
    return DenseRows(rows_RI.astype(np.float32, copy=False), DType.F32)


def scaled(value: DenseRows, factor: float) -> DenseRows:
    """The rows times a number, in float32."""
    rows_RI = cast(value, DType.F32)[0].rows_RI * np.float32(factor)
    return DenseRows(rows_RI.astype(np.float32, copy=False), DType.F32)


def swapped(rows_RI: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """Columns in `outer` groups of `inner` groups each as `inner` groups of `outer` each."""
    groups = rows_RI.reshape(len(rows_RI), outer, inner, -1)
    return np.ascontiguousarray(groups.swapaxes(1, 2)).reshape(rows_RI.shape)


def transposed(rows_RI: np.ndarray, block: int) -> np.ndarray:
    """Every block of `block` rows turned: [blocks * block, I] as [blocks * I, block]."""
    blocks = rows_RI.reshape(-1, block, rows_RI.shape[1])
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1, block)
