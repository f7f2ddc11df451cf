"""Searches the scales of table codes for the least squared error, weighted by the importance of columns.

The scale that a layout's own tool takes is always among the sixteen candidates of a block, so the weighted
error never rises. 8-bit scales (MXFP4, NVFP4) have their neighbours for candidates; E4M3 weights a whole
octave, since a float's error depends on where between two powers of two its numbers lie; tables with float32
scales (NF4, FP4, int8) a ladder, each fitted by least squares to the codes that it leads to.

Lanes are candidates, not columns (as in `scale_search`): a candidate's sums run in column order, so every
machine finds the same scale.

Axes: R rows, I columns, B rows of blocks, G groups of a row, C candidates, P columns of a group padded to
whole lanes, T entries of a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook
from qconvert.core.values import DenseRows
from qconvert.quant.casts import cast
from qconvert.quant.codebook import wide, with_tensor_number
from qconvert.quant.codebook_kernels import FLOAT8, INT8, INT8_ENDS, MAGNITUDES, Table, copy_group
from qconvert.quant.dequantize import INT8_STEP
from qconvert.quant.float32_panels import float32_panels
from qconvert.quant.importance import by_groups
from qconvert.quant.simd.lanes import (
    LANES,
    absolute,
    clamp,
    first,
    kernel,
    lane,
    load,
    lowest,
    rounded_even,
    routine,
    splat,
    store,
    where,
)

_ZERO, _ONE, _INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)
_FLOAT8_MAX = np.float32(448)
# Veltkamp's splitting: what remains of a float32 of 24 significant bits has 4.
_SPLIT = np.float32(2**20 + 1)
_SMALL, _SMALL_STEP, _SMALLEST_NORMAL = np.float32(512), np.float32(1 / 512), np.float32(2**-6)
_PIECE = 1 << 13  # blocks searched at a time, so that their candidates stay in the cache
# Steps in units of the stored scale; the tool's own comes first, and wins ties.
_POWERS = np.array([0, 1, -1] + [0] * 13)  # E8M0
_NEIGHBOURS = np.array([0, *range(-5, 0), *range(1, 11)])  # E4M3: from 0.65 to 2.4 times as large
_OCTAVE = np.exp2(np.arange(LANES) / LANES).astype(np.float32)
_LADDER = np.append(1, np.geomspace(1.4, 0.5, LANES - 1)).astype(np.float32)
# Less than float32 makes of products: nothing is left to fit.
_EXACT = np.float32(1e-12)
_LARGEST_CODES = {DType.F8_E8M0: 254, DType.F8_E4M3: 126}


def weighs(encoding: Codebook) -> bool:
    """Whether scales of an encoding are searched: not the one scale of a whole tensor."""
    return encoding.table in ("e2m1", "e4m3", "nf4", "fp4", "int8") and encoding.group_rows is not None


def search_scales(
    block: DenseRows,
    encoding: Codebook,
    scales_BG: np.ndarray,
    divisor: float | None,
    factor: float | None,
    table: Table,
    weights_I: np.ndarray,
) -> np.ndarray:
    """Returns the scales of least weighted error, in the carrier and the shape of `scales_BG`.

    `block` holds the weights; `scales_BG` the scales that the layout's tool takes, one for each block of
    `encoding.group_rows` rows; `weights_I` the importance of every column (finite, at least 0).
    """
    assert encoding.group_rows is not None
    per, size = encoding.group_rows, encoding.group_size or block.width
    importance_GP = by_groups(weights_I, scales_BG.shape[1], size)
    found_BG = np.empty_like(scales_BG)
    count = max(1, _PIECE // scales_BG.shape[1])
    for run, wide_RI in float32_panels(block, per):
        for start in range(0, len(wide_RI), count * per):
            first, weights = (run.start + start) // per, wide_RI[start : start + count * per]
            piece = slice(first, first + -(-len(weights) // per))
            found_BG[piece] = _search_piece(
                weights, encoding, scales_BG[piece], divisor, factor, table, size, importance_GP
            )
    return found_BG


def _search_piece(
    weights_RI: np.ndarray,
    encoding: Codebook,
    scales_BG: np.ndarray,
    divisor: float | None,
    factor: float | None,
    table: Table,
    size: int,
    importance_GP: np.ndarray,
) -> np.ndarray:
    stored_BGC = _candidates(scales_BG, encoding)
    steps_BGC = wide(stored_BGC.reshape(-1, LANES), encoding.scale_dtype).reshape(stored_BGC.shape)
    steps_BGC = with_tensor_number(steps_BGC, divisor, factor)
    fits = encoding.table in ("nf4", "fp4", "int8")
    lanes_BG, fitted_BG = np.empty(scales_BG.shape, np.uint8), np.empty(scales_BG.shape, np.float32)
    unit = INT8_STEP if encoding.table == "int8" else _ONE
    choose_steps(
        weights_RI,
        encoding.group_rows,
        size,
        importance_GP,
        steps_BGC * unit,
        table,
        fits,
        lanes_BG,
        fitted_BG,
    )
    found_BG = np.take_along_axis(stored_BGC, lanes_BG[..., None].astype(np.intp), axis=2)[..., 0]
    return found_BG * fitted_BG if fits else found_BG


def _candidates(scales_BG: np.ndarray, encoding: Codebook) -> np.ndarray:
    """Returns sixteen storable scales for each one, itself the first."""
    dtype, one_BG1 = encoding.scale_dtype, scales_BG[..., None]
    if dtype in _LARGEST_CODES:
        offsets_C = _POWERS if dtype is DType.F8_E8M0 else _NEIGHBOURS
        near_BGC = (one_BG1.astype(np.int16) + offsets_C.astype(np.int16)).clip(1, _LARGEST_CODES[dtype])
        near_BGC[..., 0] = scales_BG
        return near_BGC.astype(np.uint8)
    factors_C = _OCTAVE if encoding.table == "e4m3" else _LADDER
    wanted_BGC = wide(scales_BG, dtype)[..., None] * factors_C
    with np.errstate(over="ignore"):
        return cast(DenseRows(wanted_BGC.reshape(-1, LANES), DType.F32), dtype)[0].rows_RI.reshape(
            wanted_BGC.shape
        )


@kernel
def choose_steps(
    weights_RI: Any,
    group_rows: Any,
    size: Any,
    importance_GP: Any,
    steps_BGC: Any,
    table: Any,
    fits: Any,
    lanes_BG: Any,
    fitted_BG: Any,
) -> None:
    """Fills the candidate of least error of every block, and by how much least squares would scale it.

    A candidate is a step: codes are dequantized to `numbers_T[code] * step`. Without `fits` errors are those
    of the candidates as they are, and the factor is 1. Where no error is finite, or the first candidate is
    exact, it stays.
    """
    rows, width = weights_RI.shape
    padded = importance_GP.shape[1]
    w_P, numbers_P = np.zeros(padded, np.float32), np.empty(padded, np.float32)
    for block in range(lanes_BG.shape[0]):
        for group in range(lanes_BG.shape[1]):
            count = min(size, width - group * size)
            unit = _ONE / steps_BGC[block, group, 0]
            ratios = load(steps_BGC[block, group], 0) * unit
            inverse = _ONE / ratios
            sums = splat(_ZERO), splat(_ZERO), splat(_ZERO)
            for row in range(block * group_rows, min(rows, (block + 1) * group_rows)):
                copy_group(weights_RI[row], group * size, count, w_P)
                for i in range(0, padded, LANES):
                    store(numbers_P, i, load(w_P, i) * unit)
                sums = _add_errors(numbers_P, importance_GP[group], count, inverse, table, sums)
            squares, products, codes = sums
            shift = splat(_ZERO)
            if fits:
                shift = where(codes > _ZERO, products / codes, shift)
            errors = ratios * ratios * (squares - shift * products)
            errors = where(absolute(errors) < _INFINITE, errors, splat(_INFINITE))
            k = first(errors == splat(lowest(errors)))
            if not lane(errors, k) < _INFINITE or lane(squares, 0) <= _EXACT * lane(codes, 0):
                k, shift = 0, splat(_ZERO)
            lanes_BG[block, group], fitted_BG[block, group] = k, _ONE + lane(shift, k)


@routine
def _add_errors(numbers_P: Any, importance_P: Any, count: Any, inverse: Any, table: Any, sums: Any) -> Any:
    """Adds a row's weighted sums of e^2, e q and q^2, of the table's numbers q and what they miss, e."""
    squares, products, codes = sums
    for i in range(count):
        t = numbers_P[i] * inverse
        q = _nearest(t, table)
        e = t - q
        weighted_e, weighted_q = importance_P[i] * e, importance_P[i] * q
        squares = squares + weighted_e * e
        products = products + weighted_e * q
        codes = codes + weighted_q * q
    return squares, products, codes


@routine
def _nearest(t: Any, table: Any) -> Any:
    """Returns the number of the table that is nearest to each lane."""
    if table.kind == INT8:
        low, high = INT8_ENDS
        return rounded_even(clamp(t, low, high))
    if table.kind == MAGNITUDES:
        size, number = absolute(t), splat(_ZERO)
        for k in range(7):
            number = where(size > table.edges_E[k], splat(table.numbers_T[k + 1]), number)
        return where(t < _ZERO, -number, number)
    if table.kind == FLOAT8:
        return _nearest_float8(t)
    number = splat(table.numbers_T[table.order_T[0]])
    for k in range(15):
        number = where(t > table.edges_E[k], splat(table.numbers_T[table.order_T[k + 1]]), number)
    return number


@routine
def _nearest_float8(t: Any) -> Any:
    """Returns the nearest number of E4M3: four significant bits, multiples of 2**-9 below 2**-6."""
    t = clamp(t, -_FLOAT8_MAX, _FLOAT8_MAX)
    spread = t * _SPLIT
    normal = spread - (spread - t)
    small = rounded_even(t * _SMALL) * _SMALL_STEP
    return where(absolute(t) < _SMALLEST_NORMAL, small, normal)
