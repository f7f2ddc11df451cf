"""Dequantizes values of every encoding, and bounds, scales and checks them without dequantizing.

Every loader rounds in its own order; `numbers` follows the reference tool of the encoding to the bit (tests
compare each rule with that tool's output).
"""

from __future__ import annotations

from math import inf

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.quant.casts import cast, first_nonfinite
from qconvert.quant.codebook import TABLES, wide, with_tensor_number
from qconvert.quant.packed_codes import codes_of

# bitsandbytes divides by 127 by multiplying with this float32 (int8_vectorwise_dequant).
INT8_STEP = np.float32(7.874015718698502e-3)


def numbers(value: Value, dtype: DType) -> DenseRows:
    """Returns the dequantized weights of a value, rounded to a float dtype.

    `(code - zero) * scale` and `table[code] * scale` are computed in float32 and rounded once; `code * scale
    + min` rounds product and sum to the scales' own dtype first, as MLX does, and `(code - zero) * scale` of
    zeros in floating point difference and product, as HQQ does. GGML blocks are decoded as ggml does.
    """
    # Imported here so that a command that only copies codes starts without numba.
    from qconvert.quant.affine import dequantize

    match value:
        case AffineIntRows(groups_I=None) if not value.encoding.signless_zero:
            return dequantize(value, dtype)
        case AffineIntRows():
            in_order = not value.encoding.act_order
            wide_RI = dequantize(value, DType.F32).rows_RI if in_order else _dequantize_act_order(value)
            wide_RI += np.float32(0)  # turns -0 into +0 and nothing else
        case AffineMinRows():
            wide_RI = _dequantize_mins(value)
        case CodebookRows():
            wide_RI = _dequantize_codebook(value)
        case GgmlRows():
            from qconvert.quant.ggml import decode_rows

            with np.errstate(invalid="ignore"):  # zero times infinity is left for the caller to find
                wide_RI = decode_rows(value.bytes_RB, value.encoding.type, value.width)
        case DenseRows():
            return cast(value, dtype)[0]
    return cast(DenseRows(wide_RI, DType.F32), dtype)[0]


def zeros_of(value: AffineIntRows) -> np.ndarray:
    """Returns the zero point of every group, uint8 [rows, groups], also of a symmetric encoding."""
    if value.zeros_RG is not None:
        return value.zeros_RG
    return np.full(value.scales_RG.shape, 1 << (value.encoding.bits - 1), np.uint8)


def mins_of(value: AffineMinRows) -> np.ndarray:
    """Returns the weight of code 0 in every group, float32 [rows, groups], whatever the encoding stores."""
    encoding = value.encoding
    stored_RG = wide(value.mins_RG, encoding.scale_dtype)
    if encoding.offset == "min":
        return stored_RG
    scales_RG = wide(value.scales_RG, encoding.scale_dtype)
    if encoding.offset == "zero":
        return np.asarray(-stored_RG * scales_RG)
    return np.asarray(stored_RG - np.float32(1 << (encoding.bits - 1)) * scales_RG)


def _dequantize_act_order(value: AffineIntRows) -> np.ndarray:
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    zeros_RI = zeros_of(value)[:, value.groups_I].astype(np.float32)
    return np.asarray((codes_of(value).astype(np.float32) - zeros_RI) * scales_RG[:, value.groups_I])


def _dequantize_mins(value: AffineMinRows) -> np.ndarray:
    dtype = value.encoding.scale_dtype
    scales_RG, mins_RG = wide(value.scales_RG, dtype), wide(value.mins_RG, dtype)
    codes_RGg = codes_of(value).reshape(*scales_RG.shape, -1).astype(np.float32)
    if value.encoding.offset == "zero":
        apart_RGg = _rounded(codes_RGg - mins_RG[..., None], dtype)
        return _rounded(apart_RGg * scales_RG[..., None], dtype).reshape(value.rows, value.width)
    if value.encoding.offset == "middle":
        codes_RGg -= np.float32(1 << (value.encoding.bits - 1))
    product_RGg = _rounded(codes_RGg * scales_RG[..., None], dtype)
    return _rounded(product_RGg + mins_RG[..., None], dtype).reshape(value.rows, value.width)


def _rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    flat = cast(DenseRows(array.reshape(len(array), -1), DType.F32), dtype)[0]
    return wide(flat.rows_RI, dtype).reshape(array.shape)


def _dequantize_codebook(value: CodebookRows) -> np.ndarray:
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    scales_RG = with_tensor_number(scales_RG, value.divisor, value.factor)
    weights_RI = np.take(TABLES[value.encoding.table], value.codes_RI)
    weights_RI *= _per_column(scales_RG, value.encoding.group_size, weights_RI.shape[1])
    if value.encoding.table == "int8":
        weights_RI *= INT8_STEP
    return weights_RI


def group_scales(value: AffineIntRows | AffineMinRows | CodebookRows) -> np.ndarray:
    """Returns the scale (quantization step) of every group as float32 [rows, groups]."""
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    if isinstance(value, CodebookRows):
        scales_RG = with_tensor_number(scales_RG, value.divisor or 1, None)
        scales_RG = with_tensor_number(scales_RG, None, value.factor)
        scales_RG *= INT8_STEP if value.encoding.table == "int8" else np.float32(1)
    return scales_RG


def column_scales(value: AffineIntRows | AffineMinRows | CodebookRows) -> np.ndarray:
    """Returns the scale (quantization step) of every weight as float32, broadcastable to [rows, width]."""
    scales_RG = group_scales(value)
    if isinstance(value, AffineIntRows) and value.groups_I is not None:
        return scales_RG[:, value.groups_I]
    return _per_column(scales_RG, value.encoding.group_size, value.width)


def _per_column(scales_RG: np.ndarray, group_size: int | None, width: int) -> np.ndarray:
    """Repeats scales over the columns of their groups; one scale per row broadcasts as it is."""
    return scales_RG if group_size is None else np.repeat(scales_RG, group_size, axis=1)[:, :width]


def reach(value: Value) -> float:
    """Returns an upper bound of the dequantized magnitudes, up to a rounding of float32; infinite or NaN
    where none is cheap."""
    match value:
        case AffineIntRows():
            return 2.0**value.encoding.bits * _peak(value.scales_RG, value.encoding.scale_dtype)
        case AffineMinRows():
            dtype = value.encoding.scale_dtype
            steps = _peak(value.scales_RG, dtype)
            offset = _peak(value.mins_RG, dtype) * (steps if value.encoding.offset == "zero" else 1.0)
            return 2.0**value.encoding.bits * steps + offset
        case CodebookRows():
            table = TABLES[value.encoding.table]
            largest = float(np.abs(table[np.isfinite(table)]).max())
            divisor = 1.0 if value.divisor is None else abs(value.divisor)
            times = 1.0 if value.factor is None else abs(value.factor)
            peak = times * _peak(value.scales_RG, value.encoding.scale_dtype)
            return largest * peak / divisor if divisor else inf
        case _:
            return inf


def _peak(array_RG: np.ndarray, dtype: DType) -> float:
    """Returns the largest magnitude in an array of any float type, NaN if it holds one."""
    return float(np.abs(wide(array_RG, dtype)).max(initial=0.0))


def first_bad_row(value: AffineIntRows | AffineMinRows | CodebookRows) -> int:
    """Returns the first row with a NaN or Inf among its scales, mins or float codes; -1 if there is none."""
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
    """Returns which rows of an array of any float type hold a NaN or Inf, bool [rows]."""
    if dtype.is_float and first_nonfinite(DenseRows(array_RG, dtype)) < 0:  # tests bits: four times as fast
        return np.zeros(len(array_RG), np.bool_)
    return np.asarray(~np.isfinite(wide(array_RG, dtype)).all(axis=1))
