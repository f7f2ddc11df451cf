"""What the codes of any grid stand for, and how to get from one grid to another with the codes kept.

Every loader computes a grid's numbers in its own order of roundings; `core.numbers` follows the tool that
the grid belongs to, to the bit (each rule is pinned by that tool's own output).
"""

from __future__ import annotations

from math import inf

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.quant.casts import cast, first_nonfinite
from qconvert.quant.codebook import TABLES, wide
from qconvert.quant.packed_codes import codes_of

# bitsandbytes divides by 127 by multiplying with this float32 (int8_vectorwise_dequant).
INT8_STEP = np.float32(7.874015718698502e-3)


def numbers(value: Value, dtype: DType) -> DenseRows:
    """The numbers that a value stands for, rounded to a float dtype.

    `(code - zero) * scale` and `table[code] * scale` are computed in float32 and rounded once;
    `code * scale + min` rounds product and sum to the scales' own dtype first, as MLX does. GGML
    blocks are decoded as ggml does.
    """
    # Kernels are loaded where they are needed: a command that only carries codes starts without numba.
    from qconvert.quant.affine import dequantize

    match value:
        case AffineIntRows(groups_I=None) if not value.encoding.signless_zero:
            return dequantize(value, dtype)
        case AffineIntRows():
            wide_RI = _in_order(value) if value.encoding.act_order else dequantize(value, DType.F32).rows_RI
            wide_RI += np.float32(0)  # turns -0 into +0 and nothing else
        case AffineMinRows():
            wide_RI = _min_affine(value)
        case CodebookRows():
            wide_RI = _coded(value)
        case GgmlRows():
            from qconvert.quant.ggml import decode_rows

            with np.errstate(invalid="ignore"):  # zero times infinity, for the caller to find
                wide_RI = decode_rows(value.bytes_RB, value.encoding.type, value.width)
        case DenseRows():
            return cast(value, dtype)[0]
    return cast(DenseRows(wide_RI, DType.F32), dtype)[0]


def zeros_of(value: AffineIntRows) -> np.ndarray:
    """The zeros of every group, uint8 [rows, groups], also of a symmetric grid."""
    if value.zeros_RG is not None:
        return value.zeros_RG
    return np.full(value.scales_RG.shape, 1 << (value.encoding.bits - 1), np.uint8)


def _in_order(value: AffineIntRows) -> np.ndarray:
    """Columns in activation order: every column takes the scale and zero of its own group."""
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    zeros_RI = zeros_of(value)[:, value.groups_I].astype(np.float32)
    numbers_RI: np.ndarray = (codes_of(value).astype(np.float32) - zeros_RI) * scales_RG[:, value.groups_I]
    return numbers_RI


def _min_affine(value: AffineMinRows) -> np.ndarray:
    dtype = value.encoding.scale_dtype
    scales_RG, mins_RG = wide(value.scales_RG, dtype), wide(value.mins_RG, dtype)
    codes_RGg = codes_of(value).reshape(*scales_RG.shape, -1).astype(np.float32)
    product_RGg = _rounded(codes_RGg * scales_RG[..., None], dtype)
    return _rounded(product_RGg + mins_RG[..., None], dtype).reshape(value.rows, value.width)


def _rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    flat = cast(DenseRows(array.reshape(len(array), -1), DType.F32), dtype)[0]
    return wide(flat.rows_RI, dtype).reshape(array.shape)


def _coded(value: CodebookRows) -> np.ndarray:
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    if value.divisor is not None:
        scales_RG = scales_RG / np.float32(value.divisor)
    numbers_RI = np.take(TABLES[value.encoding.table], value.codes_RI)
    numbers_RI *= _per_column(scales_RG, value.encoding.group_size, numbers_RI.shape[1])
    if value.encoding.table == "int8":
        numbers_RI *= INT8_STEP
    return numbers_RI


def column_scales(value: AffineIntRows | AffineMinRows | CodebookRows) -> np.ndarray:
    """The step of every weight as float32, to be broadcast over [rows, width]."""
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    if isinstance(value, AffineIntRows) and value.groups_I is not None:
        return scales_RG[:, value.groups_I]
    if isinstance(value, CodebookRows):
        scales_RG = scales_RG / np.float32(value.divisor or 1)
        scales_RG *= INT8_STEP if value.encoding.table == "int8" else np.float32(1)
    return _per_column(scales_RG, value.encoding.group_size, value.width)


def _per_column(scales_RG: np.ndarray, group_size: int | None, width: int) -> np.ndarray:
    """Scales repeated over the columns they serve; one scale per row broadcasts as it is."""
    return scales_RG if group_size is None else np.repeat(scales_RG, group_size, axis=1)[:, :width]


def reach(value: Value) -> float:
    """A bound that no number of finite codes exceeds in magnitude; infinite or NaN where none is at hand."""
    match value:
        case AffineIntRows():
            return 2.0**value.encoding.bits * _peak(value.scales_RG, value.encoding.scale_dtype)
        case AffineMinRows():
            dtype = value.encoding.scale_dtype
            return 2.0**value.encoding.bits * _peak(value.scales_RG, dtype) + _peak(value.mins_RG, dtype)
        case CodebookRows():
            table = TABLES[value.encoding.table]
            largest = float(np.abs(table[np.isfinite(table)]).max())
            divisor = 1.0 if value.divisor is None else abs(value.divisor)
            return largest * _peak(value.scales_RG, value.encoding.scale_dtype) / divisor if divisor else inf
        case _:
            return inf


def _peak(array_RG: np.ndarray, dtype: DType) -> float:
    """The largest magnitude in an array of any float type, NaN where one is in it."""
    return float(np.abs(wide(array_RG, dtype)).max(initial=0.0))


def first_bad_row(value: AffineIntRows | AffineMinRows | CodebookRows) -> int:
    """The first row with a NaN or Inf among its scales, mins or float codes; -1 if there is none."""
    dtype = value.encoding.scale_dtype
    bad_R = _nonfinite_rows(value.scales_RG, dtype)
    if isinstance(value, AffineMinRows):
        bad_R |= _nonfinite_rows(value.mins_RG, dtype)
    if isinstance(value, CodebookRows):
        special = np.flatnonzero(~np.isfinite(TABLES[value.encoding.table]))
        bad_R |= np.isin(value.codes_RI, special).any(axis=1) if len(special) else False
    rows = np.flatnonzero(bad_R)
    return int(rows[0]) if len(rows) else -1


def _nonfinite_rows(array_RG: np.ndarray, dtype: DType) -> np.ndarray:
    """Which rows of an array of any float type hold a NaN or Inf, bool [rows]."""
    if (
        dtype.is_float and first_nonfinite(DenseRows(array_RG, dtype)) < 0
    ):  # looks at bits: four times as fast
        return np.zeros(len(array_RG), np.bool_)
    rows_R: np.ndarray = ~np.isfinite(wide(array_RG, dtype)).all(axis=1)
    return rows_R
