"""Encodes rows as IQ3_XXS and IQ3_S: signs apart, and magnitudes on a lattice in 4 dimensions.

v = d * (2 * s + 1) * sign * point (a quarter of that for XXS): a 4-bit scale code s per 32 elements, and the
index of one of 256 or 512 points per 4 elements. S stores all signs, XXS seven of eight. Source:
quantize_row_iq3_xxs_impl and quantize_row_iq3_s_impl in ggml-quants.c.

One difference: after 32 zeros in a super-block that is not zero, quantize_row_iq3_s_impl does not advance its
pointers, so that what follows is stored 32 elements too early and decoded wrong. Here it is stored where it
belongs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.ggml.lattice_search import (
    ALL_IF_ANY,
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
from qconvert.quant.ggml.tiles import (
    add_squares,
    gather,
    stacked,
    tile,
    weigh_by_importance,
    weigh_by_square,
)
from qconvert.quant.simd.lanes import LANES, kernel, routine, splat, store, where

BLOCK = 256
_SIZE, _CELL, _LEVELS, _GROUPS = 32, 4, 8, 8
_ZERO, _TWO, _FIFTEEN = np.float32(0), np.float32(2), np.float32(15)
_STEPS, _SEVEN_BITS, _BYTE = np.float32(31), np.float32(127), np.float32(255)
_NOTHING_XXS = np.float32(1e-8)  # GROUP_MAX_EPS_IQ3_XXS
_SMALLEST = np.float32(1e-45)  # of all float32, so that only a zero is below it: IQ3_S
_GROWN_XXS, _GROWN_S = np.float32(1.0125), np.float32(1.033)  # the last factors of d
_TRIALS_XXS, _TRIALS_S = trials_around(15, 0.2, 15), trials_around(15, 0.2, 9)
_NO_IMPORTANCE = np.empty(0, np.float32)
_WORK = 5 * _SIZE + 2 * 8 + 2


def encode_iq3_xxs(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ3_XXS of the flat array of whole rows to the flat `out`."""
    _encode(True, rows, _NO_IMPORTANCE, BLOCK, out, lattice("IQ3_XXS"))


def encode_iq3_xxs_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    _encode(True, rows, importance, importance.size, out, lattice("IQ3_XXS"))


def encode_iq3_s(rows: np.ndarray, out: np.ndarray) -> None:
    """Writes IQ3_S of the flat array of whole rows to the flat `out`."""
    _encode(False, rows, _NO_IMPORTANCE, BLOCK, out, lattice("IQ3_S"))


def encode_iq3_s_weighted(rows: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
    """Does the same with weights: `importance` is the mean squared activation of every column."""
    _encode(False, rows, importance, importance.size, out, lattice("IQ3_S"))


@kernel
def _encode(
    even: bool, rows: np.ndarray, importance: np.ndarray, width: int, out: np.ndarray, points: Any
) -> None:
    """Writes XXS, whose signs are `even` per 8 elements, or S; without importance a row is one block wide."""
    starts, indices = np.empty(LANES, np.intp), np.empty(64 * LANES, np.int32)
    signs, codes = np.empty(32 * LANES, np.uint8), np.empty(_GROUPS * LANES, np.uint8)
    x, scales, d, work = tile(BLOCK), tile(_GROUPS), tile(1), tile(_WORK)
    count = rows.size // width
    for row in range(0, count, LANES):
        for column in range(0, width, BLOCK):
            stacked(starts, row, count, width, column)
            gather(rows, starts, BLOCK, x)
            variance = _TWO * add_squares(splat(_ZERO), x, BLOCK) / np.float32(BLOCK)
            greatest = splat(_ZERO)
            for group in range(_GROUPS):
                scale = _fit(x, importance, column, group, variance, even, points, indices, signs, work)
                store(scales, group * LANES, scale)
                greatest = where(greatest > scale, greatest, scale)
            store(d, 0, greatest / _STEPS * (_GROWN_XXS if even else _GROWN_S))
            put_scale_codes(scales, _GROUPS, 15, greatest / _STEPS, codes)
            for k in range(LANES):
                if even:
                    _put_xxs(indices, signs, codes, d[k], k, out, starts[k] // BLOCK * 98)
                else:
                    _put_s(indices, signs, codes, d[k], k, out, starts[k] // BLOCK * 110)


@routine
def _fit(
    all_x: np.ndarray, importance: np.ndarray, column: int, group: int, variance: Any, even: bool,
    points: Any, indices: np.ndarray, all_signs: np.ndarray, work: np.ndarray,
) -> Any:  # fmt: skip
    """Fits the 32 elements of a group: writes indices and signs, returns the scale as lanes, at least 0."""
    size = _SIZE * LANES
    x = all_x[group * size : (group + 1) * size]
    signs = all_signs[group * 4 * LANES : (group + 1) * 4 * LANES]
    sizes, w, root = work[:size], work[size : 2 * size], work[2 * size : 3 * size]
    odds, new = work[3 * size : 4 * size], work[4 * size : 5 * size]
    on, lanes = work[5 * size : 5 * size + 16 * LANES], work[5 * size + 16 * LANES :]
    if importance.size:
        weigh_by_importance(x, w, importance, column + group * _SIZE, _SIZE, variance)
    else:
        weigh_by_square(x, w, _SIZE)
    square_roots(w, root, _SIZE)
    split_signs(x, w, sizes, signs, _SIZE, even)
    peak = largest(sizes, _SIZE)
    scale = fit_to_lattice(
        sizes, w, root, _SIZE, _CELL, _LEVELS, _TRIALS_XXS if even else _TRIALS_S, peak, peak / _FIFTEEN,
        OFF_LATTICE if even else ALL_IF_ANY, points, odds, new, on, lanes,
    )  # fmt: skip
    used = above(peak, _NOTHING_XXS if even else _SMALLEST)
    scale = unsigned(scale, used, signs, 4, _SEVEN_BITS if even else _BYTE)
    put_indices(odds, _SIZE, _CELL, _LEVELS, used, points, indices, group * 8, lanes)
    return scale


@routine
def _put_xxs(
    indices: np.ndarray, signs: np.ndarray, codes: np.ndarray, d: np.float32, k: int, out: np.ndarray, at: int
) -> None:
    """Writes d, the indices, and per 32 elements a word of four times seven signs and the scale."""
    put_half(out, at, d)
    for cell in range(64):
        out[at + 2 + cell] = indices[cell * LANES + k] if d > _ZERO else 0
    for group in range(_GROUPS):
        word = np.int64(codes[group * LANES + k]) << 28
        for byte in range(4):
            word |= np.int64(signs[(group * 4 + byte) * LANES + k]) << 7 * byte
        for byte in range(4):
            out[at + 66 + group * 4 + byte] = (word >> 8 * byte) & 0xFF if d > _ZERO else 0


@routine
def _put_s(
    indices: np.ndarray, signs: np.ndarray, codes: np.ndarray, d: np.float32, k: int, out: np.ndarray, at: int
) -> None:
    """Writes d, the low bytes of indices, their ninth bits, signs, and the nibbles of scales."""
    put_half(out, at, d)
    for cell in range(64):
        out[at + 2 + cell] = indices[cell * LANES + k] & 0xFF
    for byte in range(8):
        high = 0
        for bit in range(8):
            high |= (indices[(byte * 8 + bit) * LANES + k] >> 8) << bit
        out[at + 66 + byte] = high
    for cell in range(32):
        out[at + 74 + cell] = signs[cell * LANES + k]
    for byte in range(4):
        low, high = codes[2 * byte * LANES + k], codes[(2 * byte + 1) * LANES + k]
        out[at + 106 + byte] = low | high << 4
