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
    columns_RI, divisors_R = None, None
    if any(columns_I is not None for columns_I in factors.columns):
        ones_I = np.ones(piece.tensor.width, np.float32)
        columns_KI = np.stack([ones_I if each is None else each for each in factors.columns])
        columns_RI = columns_KI[row_R // _rows_of_run(piece)] if len(columns_KI) > 1 else columns_KI
    if factors.divisors:
        whole_R = np.ones(piece.tensor.rows, np.float32)
        for rows, divided in factors.divisors:
            whole_R[rows.start : rows.stop : rows.step] = divided
        divisors_R = whole_R[row_R]
    return rescaled(value, columns_RI, divisors_R, factors.offset)


def _rows_of_run(piece: RowSlice) -> int:
    """The number of rows of a tensor that have the same factors of columns."""
    return piece.tensor.rows // len(piece.factors.columns) if piece.factors else piece.tensor.rows


def scaled_moments(moments_I: np.ndarray, unit: Unit, row: int) -> np.ndarray:
    """The mean squares of what a row of a unit reads: inputs are divided where its columns are scaled."""
    for piece in unit.inputs:
        if row >= piece.rows:
            row -= piece.rows
            continue
        columns = piece.factors.columns if piece.factors else (None,)
        columns_I = columns[(piece.start + row * piece.step) // _rows_of_run(piece)]
        if columns_I is None or len(columns_I) != len(moments_I):
            return moments_I
        scaled_I: np.ndarray = moments_I / columns_I**2
        return scaled_I
    return moments_I
