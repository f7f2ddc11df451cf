"""Quantizes weights in groups to 2 to 8 bits, and dequantizes: `w = (code - zero) * scale`, all unsigned.

Rows are independent: any split into blocks of rows or threads gives the same bytes. A scale is rounded to its
stored type before codes are computed with it. Source of the min-max scales and of the arithmetic of
dequantizing: compressed-tensors 0.20, `calculate_qparams` and `dequantize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, DenseRows
from qconvert.quant.affine_kernels import decode_rows, decode_rows_to_bfloat16, quantize_rows
from qconvert.quant.casts import cast, compare, first_nonfinite
from qconvert.quant.float32_panels import float32_panels
from qconvert.quant.group_scales import group_spec
from qconvert.quant.importance import by_groups
from qconvert.quant.packed_codes import codes_of


@dataclass(frozen=True, slots=True)
class QuantError:
    """The error of quantizing some weights, between the weights and what is stored for them.

    Sums run over `count` weights: of squared errors and of squared weights. `max_abs` is the largest error,
    `max_steps` the largest one in units of its own scale. `nonfinite` is the flat index of the first NaN or
    Inf in the block, -1 if there is none (a group with one is quantized as zeros); `overflow` is the number
    of scales above the maximum of their type, stored as that maximum. Errors of disjoint weights add up.
    """

    sum_sq_error: float
    sum_sq: float
    max_abs: float
    max_steps: float
    count: int
    nonfinite: int = -1
    overflow: int = 0

    def __add__(self, other: QuantError) -> QuantError:
        return QuantError(
            self.sum_sq_error + other.sum_sq_error,
            self.sum_sq + other.sum_sq,
            max(self.max_abs, other.max_abs),
            max(self.max_steps, other.max_steps),
            self.count + other.count,
            self.nonfinite if self.nonfinite >= 0 else other.nonfinite,
            self.overflow + other.overflow,
        )


def quantize(
    block: DenseRows, encoding: AffineInt, *, search: bool, weights_I: np.ndarray | None = None
) -> tuple[AffineIntRows, QuantError]:
    """Quantizes rows of a weight to `encoding`; returns the quantized rows and the error.

    With `search` false: a symmetric group's scale is `2 * max|w| / (2**bits - 1)`, which moves no weight by
    more than half a step although there is one code more below zero than above; an asymmetric group's scale
    is `(max - min) / (2**bits - 1)` of a range extended to 0. With `search` true: the scale (and zero point)
    of least squared error found, each column's error weighted by `weights_I` (its importance: finite, not
    negative, at least one positive); `scale_search` holds the algorithm. Scales are always positive, although
    letting the longer side choose the sign would lose 8 % less (at 4 bits, groups of 128): vLLM's kernels for
    int8 activations misread negative ones (vllm#48905).
    """
    value, (error,) = quantize_stacked(block, 1, encoding, search=search, weights_I=weights_I)
    return value, error


def quantize_stacked(
    block: DenseRows,
    count: int,
    encoding: AffineInt,
    *,
    search: bool,
    weights_I: np.ndarray | None = None,
) -> tuple[AffineIntRows, list[QuantError]]:
    """Quantizes `count` weights of as many rows each, one below the other, as `quantize` does one by one.

    Returns the quantized rows and the error of each.
    """
    rows, width = block.rows_RI.shape
    shape = rows, encoding.groups(width), encoding.group_size or width
    assert shape[1] * shape[2] == width and not encoding.act_order, (encoding, width)
    narrow, beyond = cast(block, DType.F32) if block.dtype is DType.F64 else (block, 0)
    assert count == 1 or not beyond, "one by one where numbers exceed float32"
    codes_RI = np.empty((rows, width), np.uint8)
    scales_RG, zeros_RG = np.empty(shape[:2], np.float32), np.empty(shape[:2], np.uint8)
    tallies_T6 = np.zeros((count, 6))
    spec, importance_GP = group_spec(encoding), by_groups(weights_I, *shape[1:])
    for run, wide_RI in float32_panels(narrow):
        quantize_rows(
            wide_RI.reshape(-1, *shape[1:]), run.start, spec, search, importance_GP,
            codes_RI.reshape(shape), scales_RG, zeros_RG, tallies_T6,
        )  # fmt: skip
    stored, _ = cast(DenseRows(scales_RG, DType.F32), encoding.scale_dtype)
    value = AffineIntRows(codes_RI, stored.rows_RI, None if encoding.symmetric else zeros_RG, encoding)
    each = rows // count
    runs = (slice(first * each, (first + 1) * each) for first in range(count))
    tallies = zip(runs, tallies_T6.tolist(), strict=True)
    return value, [_error(block, value, run, tally, beyond) for run, tally in tallies]


def _error(
    block: DenseRows, value: AffineIntRows, run: slice, tally: Sequence[float], beyond: int
) -> QuantError:
    """What a run of rows lost, by the tally of the kernel."""
    sum_sq_error, sum_sq, max_abs, max_steps, too_large, flaws = tally
    nonfinite, rows = -1, DenseRows(block.rows_RI[run], block.dtype)
    if flaws:
        nonfinite = first_nonfinite(rows)
    elif not isfinite(sum_sq):
        # In float32 the squares of weights above 1e19 overflow; `compare` falls back to float64.
        made = value.with_arrays(tuple(array[run] for array in value.arrays))
        lost = compare(rows, dequantize(made, DType.F32))
        sum_sq_error, sum_sq = lost.sum_sq_diff, lost.sum_sq_a
    overflow = int(too_large) + beyond
    return QuantError(sum_sq_error, sum_sq, max_abs, max_steps, rows.rows_RI.size, nonfinite, overflow)


def dequantize(value: AffineIntRows, dtype: DType) -> DenseRows:
    """Returns a dequantized weight: `(code - zero) * scale` in float32, rounded once to `dtype`."""
    assert value.groups_I is None
    scales, _ = cast(DenseRows(value.scales_RG, value.encoding.scale_dtype), DType.F32)
    zeros_RG = value.zeros_RG
    if zeros_RG is None:
        zeros_RG = np.full(scales.rows_RI.shape, 1 << (value.encoding.bits - 1), np.uint8)
    rows, groups = zeros_RG.shape
    width = value.width
    codes_RGS = codes_of(value).reshape(rows, groups, width // groups)
    if dtype is DType.BF16:
        bfloat16_RGS = np.empty(codes_RGS.shape, np.uint16)
        decode_rows_to_bfloat16(codes_RGS, scales.rows_RI, zeros_RG, bfloat16_RGS)
        return DenseRows(bfloat16_RGS.reshape(rows, width), dtype)
    weights_RGS = np.empty(codes_RGS.shape, np.float32)
    decode_rows(codes_RGS, scales.rows_RI, zeros_RG, weights_RGS)
    return cast(DenseRows(weights_RGS.reshape(rows, width), DType.F32), dtype)[0]
