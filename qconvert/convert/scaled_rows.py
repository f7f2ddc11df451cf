"""Scales rows as plans ask for it, and what was measured of the inputs that their columns read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.values import DenseRows, Value
from qconvert.plan.plan import RowSlice, Unit

if TYPE_CHECKING:
    import numpy as np


def scaled_rows(value: Value, piece: RowSlice) -> Value:
    """Plain rows of a slice, in float32, times what its tensor is scaled by."""
    import numpy as np

    from qconvert.quant.row_changes import rescaled

    assert isinstance(value, DenseRows) and piece.factors is not None, piece
    factors, row_R = piece.factors, np.arange(piece.start, piece.stop, piece.step)
    columns_KI, divisors_R = factors.columns_KI, factors.divisors_R
    if columns_KI is not None and len(columns_KI) > 1:
        columns_KI = columns_KI[row_R // (piece.tensor.rows // len(columns_KI))]
    return rescaled(value, columns_KI, None if divisors_R is None else divisors_R[row_R], factors.offset)


def scaled_moments(moments_I: np.ndarray, unit: Unit, row: int) -> np.ndarray:
    """The mean squares of what a row of a unit reads: inputs are divided where its columns are scaled."""
    for piece in unit.inputs:
        if row >= piece.rows:
            row -= piece.rows
            continue
        columns_KI = piece.factors.columns_KI if piece.factors else None
        if columns_KI is None or columns_KI.shape[1] != len(moments_I):
            return moments_I
        run = (piece.start + row * piece.step) // (piece.tensor.rows // len(columns_KI))
        scaled_I: np.ndarray = moments_I / columns_KI[run] ** 2
        return scaled_I
    return moments_I
