"""Encodes numbers as codes of a table as the tools that own the tables do: nearest entry, scale by maximum.

`nf4` and `fp4` blocks are scaled by their largest magnitude, `int8` rows by that over 127 (`quantize_4bit`
and `int8_vectorwise_quant` in bitsandbytes 0.50, whose bytes this reproduces); `e4m3` by that magnitude
/ 448, the largest E4M3 number, so that it is met exactly (the published recipe of block-scaled FP8
checkpoints). Where tools differ over one encoding, the traits of a layout say how its own round.

Axes as in `codebook_kernels`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook
from qconvert.core.layout_traits import NEAREST, RoundingRules
from qconvert.core.values import CodebookRows, DenseRows
from qconvert.quant import codebook_kernels
from qconvert.quant.affine import QuantError
from qconvert.quant.casts import cast, first_nonfinite
from qconvert.quant.codebook import TABLES, wide, with_tensor_number
from qconvert.quant.codebook_kernels import FLOAT8, INT8, MAGNITUDES, MIDDLES, Table
from qconvert.quant.codebook_search import search_scales, weighs
from qconvert.quant.dequantize import INT8_STEP
from qconvert.quant.float32_panels import float32_panels

E4M3_MAX, E2M1_MAX = np.float32(448), np.float32(6)
# The E4M3 code of 1/8, which compressed-tensors writes for the scale of a group of zeros.
_EIGHTH = np.uint8(0x20)


def encode(
    block: DenseRows,
    encoding: Codebook,
    *,
    rounding: RoundingRules = NEAREST,
    whole: float | None = None,
    weights_I: np.ndarray | None = None,
) -> tuple[CodebookRows, QuantError]:
    """Rows of numbers as codes of `encoding.table`, and what that loses.

    The rows must be whole blocks of `encoding.group_rows`, but for the last rows of a tensor. `rounding` is a
    trait of the layout they are for; `whole` is the largest magnitude of the whole tensor, for encodings
    with a number that serves all of it (`needs_whole`). `weights_I` is the importance of every column
    (finite, not negative): it weighs errors in a search for scales where the encoding has one
    (`codebook_search.weighs`), and codes are the nearest ones.
    """
    rows, width = block.rows_RI.shape
    if encoding.group_rows is None:
        assert whole is not None
        peaks_BG = np.full((1, 1), whole, np.float32)
    else:
        peaks_BG = peaks(block, encoding)
    scales_BG, divisor, factor = _scales(peaks_BG, encoding, block.dtype, rounding, whole)
    searched = weights_I is not None and weighs(encoding)
    table = _table(encoding.table, _plain(rounding) if searched else rounding, encoding.scale_dtype)
    if weights_I is not None and searched:
        scales_BG = search_scales(block, encoding, scales_BG, divisor, factor, table, weights_I)
    scales_RG = np.repeat(scales_BG, encoding.group_rows or rows, axis=0)[:rows]
    steps_RG = with_tensor_number(wide(scales_RG, encoding.scale_dtype), divisor, factor)
    factors_RG, divide = _factors(steps_RG, encoding.table)
    if encoding.table == "int8":
        steps_RG = steps_RG * INT8_STEP
    codes_RI, size, tally_4 = np.empty((rows, width), np.uint8), encoding.group_size or width, np.zeros(4)
    for run, wide_RI in float32_panels(block):
        codebook_kernels.encode_groups(
            wide_RI, size, factors_RG[run], divide, steps_RG[run], table, codes_RI[run], tally_4
        )
    squared_error, squares, largest, steps = tally_4.tolist()
    nonfinite = first_nonfinite(block)
    lost = QuantError(squared_error, squares, largest, steps, block.rows_RI.size, nonfinite)
    return CodebookRows(codes_RI, scales_RG, encoding, divisor, factor=factor), lost


def needs_whole(encoding: Codebook) -> bool:
    """Whether a number of this encoding depends on the whole tensor."""
    return encoding.group_rows is None or encoding.has_tensor_number


def peaks(block: DenseRows, encoding: Codebook) -> np.ndarray:
    """The largest finite magnitude in every block of an encoding, float32 [blocks of rows, groups]."""
    rows, width = block.rows_RI.shape
    per = encoding.group_rows or max(1, rows)
    peaks_BG = np.zeros((-(-rows // per), encoding.groups(width)), np.float32)
    for run, wide_RI in float32_panels(block):
        codebook_kernels.find_peaks(wide_RI, run.start, per, encoding.group_size or width, peaks_BG)
    return peaks_BG


def _scales(
    peaks_BG: np.ndarray, encoding: Codebook, dtype: DType, rounding: RoundingRules, whole: float | None
) -> tuple[np.ndarray, float | None, float | None]:
    """Scales in their carrier, and the number that divides, or multiplies, all of them."""
    if encoding.table == "e4m3":
        scales_BG = peaks_BG / E4M3_MAX
        if rounding.rounds_scales:
            scales_BG = _rounded(scales_BG, encoding.scale_dtype)
            scales_BG[scales_BG == 0] = _EPSILON[encoding.scale_dtype]
        return cast(DenseRows(scales_BG, DType.F32), encoding.scale_dtype)[0].rows_RI, None, None
    if encoding.table != "e2m1":
        return peaks_BG, None, None
    if encoding.scale_dtype is DType.F8_E8M0:
        return _exponents(peaks_BG, rounding), None, None
    if encoding.second is None:
        return _nearest_float8(peaks_BG / E2M1_MAX), None, None
    assert whole is not None
    if encoding.second == "multiplied":
        return _multiplied(peaks_BG, whole)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # So does torch divide a number by a tensor.
        over = _rounded(np.full((1, 1), 1 / np.float32(whole)), dtype)
        divisor = _rounded(E4M3_MAX * E2M1_MAX * over, dtype)[0, 0]
    if not np.isfinite(divisor):
        divisor = np.float32(1)
    wanted_BG = divisor * _rounded(peaks_BG / E2M1_MAX, dtype)
    scales_BG = _nearest_float8(wanted_BG)
    scales_BG[scales_BG == 0] = _EIGHTH
    return scales_BG, float(divisor), None


def _multiplied(peaks_BG: np.ndarray, whole: float) -> tuple[np.ndarray, None, float]:
    """NVFP4's scales as ModelOpt 0.47 chooses them (`NVFP4QTensor`), all in float32; those of zeros are 1."""
    factor = np.float32(whole) / (E2M1_MAX * E4M3_MAX) or np.float32(1)
    wanted_BG = peaks_BG / (E2M1_MAX * factor)
    wanted_BG[wanted_BG == 0] = 1
    return _nearest_float8(wanted_BG.clip(_LEAST_E4M3, None)), None, float(factor)


# The smallest E4M3 number above 0.
_LEAST_E4M3 = np.float32(2.0**-9)


# torch.finfo(dtype).eps
_EPSILON = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.F32: 2.0**-23}


def _exponents(peaks_BG: np.ndarray, rounding: RoundingRules) -> np.ndarray:
    """E8M0 scales, read off the bits of the largest magnitudes."""
    if rounding.ceiling:
        exponents_BG = ((peaks_BG / E2M1_MAX).view(np.uint32).astype(np.int64) + 0x7FFFFF) >> 23
    else:  # 6 is 1.5 * 2**2; from 7/4 of a power of two on, the next one
        exponents_BG = ((peaks_BG.view(np.uint32).astype(np.int64) + (1 << 21)) >> 23) - 2
    exponents_BG[peaks_BG == 0] = rounding.zero_exponent
    return np.asarray(exponents_BG.clip(0, 254).astype(np.uint8))


def _rounded(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    rounded: np.ndarray = wide(
        cast(DenseRows(numbers.astype(np.float32), DType.F32), dtype)[0].rows_RI, dtype
    )
    return rounded


def _factors(steps_RG: np.ndarray, table: str) -> tuple[np.ndarray, bool]:
    """What numbers are multiplied by, or divided by, to be on the table; blocks of zeros stay zeros."""
    zero = steps_RG == 0
    if table in ("e4m3", "e2m1"):
        return np.where(zero, np.float32(np.inf), steps_RG), True
    with np.errstate(divide="ignore"):
        over_RG = np.float32(1) / steps_RG
    if table == "int8":  # as torch divides 127 by a tensor
        over_RG *= np.float32(127)
    return np.where(zero, np.float32(0), over_RG), False


def _plain(rounding: RoundingRules) -> RoundingRules:
    """Returns the rules without what keeps codes from being the nearest ones."""
    return replace(rounding, rounds_scales=False)


@cache
def _table(name: str, rounding: RoundingRules, dtype: DType) -> Table:
    none, numbers_T = np.empty(0, np.float32), TABLES[name]
    order_T = np.argsort(numbers_T, kind="stable").astype(np.uint8)
    if name == "e4m3":
        dropped = {DType.BF16: 16, DType.F16: 13}.get(dtype, 0) if rounding.rounds_scales else 0
        return Table(FLOAT8, none, order_T, numbers_T, dropped, signed_zero=True)
    if name == "int8":
        return Table(INT8, none, order_T, numbers_T, 0, signed_zero=True)
    if name != "e2m1":
        rising = numbers_T[order_T]
        return Table(MIDDLES, (rising[1:] + rising[:-1]) / 2, order_T, numbers_T, 0, signed_zero=True)
    edges_E = (numbers_T[1:8] + numbers_T[:7]) / 2
    upwards = np.arange(7) % 2 == 1 if rounding.halves == "even" else np.full(7, rounding.halves == "up")
    edges_E = np.where(upwards, np.nextafter(edges_E, np.float32(0)), edges_E)
    return Table(MAGNITUDES, edges_E, order_T, numbers_T, 0, rounding.signed_zero)


def _nearest_float8(numbers_RG: np.ndarray) -> np.ndarray:
    """The E4M3 codes of numbers, half to even; beyond 448 that of 448."""
    codes_RG, ones_R1 = np.empty(numbers_RG.shape, np.uint8), np.ones((len(numbers_RG), 1), np.float32)
    table, width = _table("e4m3", NEAREST, DType.F32), numbers_RG.shape[1]
    codebook_kernels.encode_groups(
        np.ascontiguousarray(numbers_RG), width, ones_R1, False, ones_R1, table, codes_RG, np.zeros(4)
    )
    return codes_RG
