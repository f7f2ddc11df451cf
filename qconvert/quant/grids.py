"""What the codes of any grid stand for, and how to get from one grid to another with the codes kept.

Every loader computes a grid's numbers in its own order of roundings; `numbers` follows the tool that
the grid belongs to, to the bit (each rule is pinned by that tool's own output).
"""

from __future__ import annotations

from math import inf

import numpy as np

from qconvert.quant.casts import cast, first_nonfinite
from qconvert.quant.codebook import TABLES, wide
from qconvert.tensors import BlockRows, Coded, Dense, DType, IntAffine, MinAffine, Value

# bitsandbytes divides by 127 by multiplying with this float32 (int8_vectorwise_dequant).
INT8_STEP = np.float32(7.874015718698502e-3)


def numbers(value: Value, dtype: DType) -> Dense:
    """The numbers that a value stands for, rounded to a float dtype.

    `(code - zero) * scale` and `table[code] * scale` are computed in float32 and rounded once;
    `code * scale + min` rounds product and sum to the scales' own dtype first, as MLX does. GGML
    blocks are decoded as ggml does.
    """
    # Kernels are loaded where they are needed: a command that only carries codes starts without numba.
    from qconvert.quant.affine import dequantize

    match value:
        case IntAffine(groups_I=None) if not value.form.signless_zero:
            return dequantize(value, dtype)
        case IntAffine():
            wide_RI = _in_order(value) if value.form.act_order else dequantize(value, DType.F32).rows_RI
            wide_RI += np.float32(0)  # turns -0 into +0 and nothing else
        case MinAffine():
            wide_RI = _min_affine(value)
        case Coded():
            wide_RI = _coded(value)
        case BlockRows():
            from qconvert.quant.ggml import decode_rows

            with np.errstate(invalid="ignore"):  # zero times infinity, for the caller to find
                wide_RI = decode_rows(value.bytes_RB, value.form.type, value.width)
        case Dense():
            return cast(value, dtype)[0]
    return cast(Dense(wide_RI, DType.F32), dtype)[0]


def zeros_of(value: IntAffine) -> np.ndarray:
    """The zeros of every group, uint8 [rows, groups], also of a symmetric grid."""
    if value.zeros_RG is not None:
        return value.zeros_RG
    return np.full(value.scales_RG.shape, 1 << (value.form.bits - 1), np.uint8)


def _in_order(value: IntAffine) -> np.ndarray:
    """Columns in activation order: every column takes the scale and zero of its own group."""
    scales_RG = wide(value.scales_RG, value.form.scale_dtype)
    zeros_RI = zeros_of(value)[:, value.groups_I].astype(np.float32)
    numbers_RI: np.ndarray = (value.codes_RI.astype(np.float32) - zeros_RI) * scales_RG[:, value.groups_I]
    return numbers_RI


def _min_affine(value: MinAffine) -> np.ndarray:
    dtype = value.form.scale_dtype
    scales_RG, mins_RG = wide(value.scales_RG, dtype), wide(value.mins_RG, dtype)
    codes_RGg = value.codes_RI.reshape(*scales_RG.shape, -1).astype(np.float32)
    product_RGg = _rounded(codes_RGg * scales_RG[..., None], dtype)
    return _rounded(product_RGg + mins_RG[..., None], dtype).reshape(value.rows, value.width)


def _rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    flat = cast(Dense(array.reshape(len(array), -1), DType.F32), dtype)[0]
    return wide(flat.rows_RI, dtype).reshape(array.shape)


def _coded(value: Coded) -> np.ndarray:
    scales_RG = wide(value.scales_RG, value.form.scale_dtype)
    if value.divisor is not None:
        scales_RG = scales_RG / np.float32(value.divisor)
    numbers_RI = np.take(TABLES[value.form.table], value.codes_RI)
    numbers_RI *= _per_column(scales_RG, value.form.group_size, numbers_RI.shape[1])
    if value.form.table == "int8":
        numbers_RI *= INT8_STEP
    return numbers_RI


def column_scales(value: IntAffine | MinAffine | Coded) -> np.ndarray:
    """The step of every weight as float32, to be broadcast over [rows, width]."""
    scales_RG = wide(value.scales_RG, value.form.scale_dtype)
    if isinstance(value, IntAffine) and value.groups_I is not None:
        return scales_RG[:, value.groups_I]
    if isinstance(value, Coded):
        scales_RG = scales_RG / np.float32(value.divisor or 1)
        scales_RG *= INT8_STEP if value.form.table == "int8" else np.float32(1)
    return _per_column(scales_RG, value.form.group_size, value.width)


def _per_column(scales_RG: np.ndarray, group_size: int | None, width: int) -> np.ndarray:
    """Scales repeated over the columns they serve; one scale per row broadcasts as it is."""
    return scales_RG if group_size is None else np.repeat(scales_RG, group_size, axis=1)[:, :width]


def reach(value: Value) -> float:
    """A bound that no number of finite codes exceeds in magnitude; infinite or NaN where none is at hand."""
    match value:
        case IntAffine():
            return 2.0**value.form.bits * _peak(value.scales_RG, value.form.scale_dtype)
        case MinAffine():
            dtype = value.form.scale_dtype
            return 2.0**value.form.bits * _peak(value.scales_RG, dtype) + _peak(value.mins_RG, dtype)
        case Coded():
            table = TABLES[value.form.table]
            largest = float(np.abs(table[np.isfinite(table)]).max())
            divisor = 1.0 if value.divisor is None else abs(value.divisor)
            return largest * _peak(value.scales_RG, value.form.scale_dtype) / divisor if divisor else inf
        case _:
            return inf


def _peak(array_RG: np.ndarray, dtype: DType) -> float:
    """The largest magnitude in an array of any float type, NaN where one is in it."""
    return float(np.abs(wide(array_RG, dtype)).max(initial=0.0))


def first_bad_row(value: IntAffine | MinAffine | Coded) -> int:
    """The first row with a NaN or Inf among its scales, mins or float codes; -1 if there is none."""
    dtype = value.form.scale_dtype
    bad_R = _nonfinite_rows(value.scales_RG, dtype)
    if isinstance(value, MinAffine):
        bad_R |= _nonfinite_rows(value.mins_RG, dtype)
    if isinstance(value, Coded):
        special = np.flatnonzero(~np.isfinite(TABLES[value.form.table]))
        bad_R |= np.isin(value.codes_RI, special).any(axis=1) if len(special) else False
    rows = np.flatnonzero(bad_R)
    return int(rows[0]) if len(rows) else -1


def _nonfinite_rows(array_RG: np.ndarray, dtype: DType) -> np.ndarray:
    """Which rows of an array of any float type hold a NaN or Inf, bool [rows]."""
    if dtype.is_float and first_nonfinite(Dense(array_RG, dtype)) < 0:  # looks at bits: four times as fast
        return np.zeros(len(array_RG), np.bool_)
    rows_R: np.ndarray = ~np.isfinite(wide(array_RG, dtype)).all(axis=1)
    return rows_R
