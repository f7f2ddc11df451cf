"""Encodes rows as IQ2_XXS, IQ2_XS and IQ2_S: signs apart, and magnitudes on a lattice in 8 dimensions.

v = d * (2 * s + 1) * sign * point / 8: a 4-bit scale code s per 32 elements (XXS) or 16, and the index of one
of 256, 512 or 1024 points per 8 elements. S stores all signs, the others seven of eight. Source:
quantize_row_iq2_xxs_impl, quantize_row_iq2_xs_impl and quantize_row_iq2_s_impl in ggml-quants.c; the first
two need the importance of every column.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.lattice_search import (
    ALWAYS,
    OFF_LATTICE,
    above,
    fit_to_lattice,
    largest,
    put_indices,
    put_scale_codes,
    split_signs,
    square_roots,
    trials_around,
    unsigned,
)
from qconvert.quant.ggml.lattices import lattice
from qconvert.quant.ggml.scalars import put_half
from qconvert.quant.ggml.search import NOTHING, fit_nonnegative, nonnegative_trials
from qconvert.quant.ggml.tiles import add_squares, gather, stacked, tile, weigh_by_importance
from qconvert.quant.simd.lanes import LANES, kernel, load, routine, splat, store, where

BLOCK = 256
_CELL, _LEVELS = 8, 3
_ZERO, _ONE, _TWO, _THREE = (np.float32(number) for number in (0, 1, 2, 3))
_QUARTER, _STEPS = np.float32(0.25), np.float32(31)
_SEVEN_BITS, _BYTE = np.float32(127), np.float32(255)
_NOTHING_S = np.float32(1e-8)  # GROUP_MAX_EPS_IQ2_S
_SHRUNK_S = np.float32(0.9875)  # the last factor of d
_FEW_TRIALS, _TRIALS = trials_around(5, 0.1, 6), trials_around(5, 0.1, 9)
_PEAK_TRIALS = nonnegative_trials(4)
_NO_IMPORTANCE = np.empty(0, np.float32)


def encode_iq2_xxs_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ2_XXS of rows, flat; `importance` is the mean squared activation of every column."""
    _encode_xxs(rows, importance, out, lattice("IQ2_XXS"))


def encode_iq2_xs_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ2_XS of rows, flat; `importance` is the mean squared activation of every column."""
    _encode(True, rows, importance, importance.size, out, lattice("IQ2_XS"))


def encode_iq2_s(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ2_S of the flat array of whole rows to the flat `out`."""
    _encode(False, rows, _NO_IMPORTANCE, BLOCK, out, lattice("IQ2_S"))


def encode_iq2_s_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    _encode(False, rows, importance, importance.size, out, lattice("IQ2_S"))


@kernel
def _encode_xxs(rows: np.ndarray, importance: np.ndarray, out: np.ndarray, points: Any) -> None:
    size, groups = 32, 8
    starts, indices = np.empty(LANES, np.intp), np.empty(32 * LANES, np.int32)
    signs, codes = np.empty(32 * LANES, np.uint8), np.empty(groups * LANES, np.uint8)
    peak_codes = np.empty(size * LANES, np.uint8)
    all_x, sizes, w, root, odds, new = (
        tile(BLOCK), tile(size), tile(size), tile(size), tile(size), tile(size)
    )  # fmt: skip
    on, lanes, scales, d = tile(8), tile(2), tile(groups), tile(1)
    width = importance.size
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, all_x)
            variance = add_squares(splat(_ZERO), all_x, BLOCK) / np.float32(BLOCK)
            greatest = splat(_ZERO)
            for group in range(groups):
                x = all_x[group * size * LANES : (group + 1) * size * LANES]
                group_signs = signs[group * 4 * LANES : (group + 1) * 4 * LANES]
                weigh_by_importance(x, w, importance, column + group * size, size, variance)
                square_roots(w, root, size)
                split_signs(x, w, sizes, group_signs, size, True)
                peak = largest(sizes, size)
                fitted = fit_nonnegative(sizes, w, peak_codes, size, _THREE + _ONE, _PEAK_TRIALS)
                reach = fitted * _THREE
                scale = fit_to_lattice(
                    sizes, w, root, size, _CELL, _LEVELS, _FEW_TRIALS, reach, fitted, ALWAYS, points, odds,
                    new, on, lanes,
                )  # fmt: skip
                used = above(peak, NOTHING) & (reach > _ZERO)
                scale = unsigned(scale, used, group_signs, 4, _SEVEN_BITS)
                put_indices(odds, size, _CELL, _LEVELS, used, points, indices, group * 4, lanes)
                store(scales, group * LANES, scale)
                greatest = where(greatest > scale, greatest, scale)
            store(d, 0, greatest / _STEPS)
            put_scale_codes(scales, groups, 15, greatest / _STEPS, codes)
            for k in range(LANES):
                _put_xxs(indices, signs, codes, d[k], k, out, starts[k] // BLOCK * 66)


@kernel
def _encode(
    even: bool, rows: np.ndarray, importance: np.ndarray, width: int, out: np.ndarray, points: Any
) -> None:
    """Writes XS, whose signs are `even` per 8 elements, or S; without importance a row is one block wide."""
    starts, indices = np.empty(LANES, np.intp), np.empty(32 * LANES, np.int32)
    signs, codes = np.empty(32 * LANES, np.uint8), np.empty(16 * LANES, np.uint8)
    x, scales, d, work = tile(BLOCK), tile(16), tile(1), tile(5 * 16 + 4 + 2)
    share = _ONE if even else _TWO
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, x)
            variance = share * add_squares(splat(_ZERO), x, BLOCK) / np.float32(BLOCK)
            greatest = splat(_ZERO)
            for group in range(16):
                scale = _fit_16(x, importance, column, group, variance, even, points, indices, signs, work)
                store(scales, group * LANES, scale)
                greatest = where(greatest > scale, greatest, scale)
            store(d, 0, greatest / _STEPS * (_ONE if even else _SHRUNK_S))
            put_scale_codes(scales, 16, 15, greatest / _STEPS, codes)
            for k in range(LANES):
                if even:
                    _put_xs(indices, signs, codes, d[k], k, out, starts[k] // BLOCK * 74)
                else:
                    _put_s(indices, signs, codes, d[k], k, out, starts[k] // BLOCK * 82)


@routine
def _fit_16(
    all_x: np.ndarray, importance: np.ndarray, column: int, group: int, variance: Any, even: bool,
    points: Any, indices: np.ndarray, all_signs: np.ndarray, work: np.ndarray,
) -> Any:  # fmt: skip
    """Fits the 16 elements of a group: writes indices and signs, returns the scale as lanes, at least 0."""
    size = 16 * LANES
    x = all_x[group * size : (group + 1) * size]
    signs = all_signs[group * 2 * LANES : (group + 1) * 2 * LANES]
    sizes, w, root = work[:size], work[size : 2 * size], work[2 * size : 3 * size]
    odds, new = work[3 * size : 4 * size], work[4 * size : 5 * size]
    on, lanes = work[5 * size : 5 * size + 4 * LANES], work[5 * size + 4 * LANES :]
    if importance.size:
        weigh_by_importance(x, w, importance, column + group * 16, 16, variance)
    else:
        for at in range(0, size, LANES):
            value = load(x, at)
            store(w, at, _QUARTER * variance + value * value)
    square_roots(w, root, 16)
    split_signs(x, w, sizes, signs, 16, even)
    peak = largest(sizes, 16)
    scale = fit_to_lattice(
        sizes, w, root, 16, _CELL, _LEVELS, _TRIALS, peak, peak / (_TWO * _THREE - _ONE), OFF_LATTICE, points,
        odds, new, on, lanes,
    )  # fmt: skip
    used = above(peak, NOTHING if even else _NOTHING_S)
    scale = unsigned(scale, used, signs, 2, _SEVEN_BITS if even else _BYTE)
    put_indices(odds, 16, _CELL, _LEVELS, used, points, indices, group * 2, lanes)
    return scale


@routine
def _put_xxs(
    indices: np.ndarray, signs: np.ndarray, codes: np.ndarray, d: np.float32, k: int, out: np.ndarray, at: int
) -> None:
    """Writes d, then per 32 elements four indices, and a word of four times seven signs and the scale."""
    put_half(out, at, d)
    for group in range(8):
        word = np.int64(codes[group * LANES + k]) << 28
        for cell in range(4):
            here = (group * 4 + cell) * LANES + k
            out[at + 2 + group * 8 + cell] = indices[here] if d > _ZERO else 0
            word |= np.int64(signs[here]) << 7 * cell
        for byte in range(4):
            out[at + 6 + group * 8 + byte] = (word >> 8 * byte) & 0xFF if d > _ZERO else 0


@routine
def _put_xs(
    indices: np.ndarray, signs: np.ndarray, codes: np.ndarray, d: np.float32, k: int, out: np.ndarray, at: int
) -> None:
    """Writes d, then a word of nine bits of index and seven signs per cell, then the nibbles of scales."""
    put_half(out, at, d)
    for cell in range(32):
        word = indices[cell * LANES + k] | np.int64(signs[cell * LANES + k]) << 9 if d > _ZERO else 0
        out[at + 2 + 2 * cell], out[at + 3 + 2 * cell] = word & 0xFF, word >> 8
    _put_nibbles(codes, k, out, at + 66)


@routine
def _put_s(
    indices: np.ndarray, signs: np.ndarray, codes: np.ndarray, d: np.float32, k: int, out: np.ndarray, at: int
) -> None:
    """Writes d, the low bytes of indices, signs, two high bits of every index, the nibbles of scales."""
    put_half(out, at, d)
    for cell in range(32):
        out[at + 2 + cell] = indices[cell * LANES + k] & 0xFF
        out[at + 34 + cell] = signs[cell * LANES + k]
    for byte in range(8):
        high = 0
        for cell in range(4):
            high |= (indices[(byte * 4 + cell) * LANES + k] >> 8) << 2 * cell
        out[at + 66 + byte] = high
    _put_nibbles(codes, k, out, at + 74)


@routine
def _put_nibbles(codes: np.ndarray, k: int, out: np.ndarray, at: int) -> None:
    """Writes sixteen scale codes, two to a byte."""
    for byte in range(8):
        low, high = codes[2 * byte * LANES + k], codes[(2 * byte + 1) * LANES + k]
        out[at + byte] = low | high << 4
