"""Numbers to codes of a table, as the tools that own the tables do it: nearest entry, scale by maximum.

`nf4` and `fp4` blocks are scaled by their largest magnitude (`quantize_4bit` in bitsandbytes 0.50, whose
bytes this reproduces); `e4m3` blocks by that magnitude / 448, the largest E4M3 number, so that it is
met exactly (the published recipe of block-scaled FP8 checkpoints).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from qconvert.quant.affine import QuantError
from qconvert.quant.casts import first_nonfinite
from qconvert.quant.codebook import TABLES, wide
from qconvert.quant.grids import column_scales, numbers
from qconvert.tensors import Codebook, Coded, Dense, DType

E4M3_MAX = np.float32(448)


def encode(block: Dense, form: Codebook) -> tuple[Coded, QuantError]:
    """Rows of numbers as codes of `form.table` with float32 scales, and what that loses.

    The rows must be whole blocks of `form.group_rows`, but for the last rows of a tensor.
    """
    assert form.scale_dtype is DType.F32 and form.second is None and form.group_rows
    rows_RI = wide(block.rows_RI, block.dtype)
    largest_BG = _largest(np.abs(rows_RI), form.group_rows, form.group_size or rows_RI.shape[1])
    scales_BG = largest_BG / E4M3_MAX if form.table == "e4m3" else largest_BG
    scales_RG = np.repeat(scales_BG, form.group_rows, axis=0)[: len(rows_RI)]
    made = Coded(_codes(rows_RI, scales_RG, form), scales_RG, form)
    return made, _error(block, rows_RI, made)


def _largest(sizes_RI: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The largest number of every block of so many rows and columns; blocks at the edges are smaller."""
    by_row = np.maximum.reduceat(sizes_RI, np.arange(0, len(sizes_RI), rows), axis=0)
    largest: np.ndarray = np.maximum.reduceat(by_row, np.arange(0, sizes_RI.shape[1], columns), axis=1)
    return largest


def _codes(rows_RI: np.ndarray, scales_RG: np.ndarray, form: Codebook) -> np.ndarray:
    """The codes nearest to the scaled numbers; blocks of zeros have a scale of 0 and any code will do."""
    width, size = rows_RI.shape[1], form.group_size or rows_RI.shape[1]
    if form.table == "e4m3":
        scales_RI = np.repeat(scales_RG, size, axis=1)[:, :width]
        scaled_RI = np.divide(rows_RI, scales_RI, out=np.zeros_like(rows_RI), where=scales_RI > 0)
        return _nearest_float8(np.clip(scaled_RI, -E4M3_MAX, E4M3_MAX))
    with np.errstate(divide="ignore"):
        inverse_RG = np.where(scales_RG > 0, np.float32(1) / scales_RG, np.float32(0))
    scaled_RI = rows_RI * np.repeat(inverse_RG, size, axis=1)[:, :width]
    order, middles = _sorted_table(form.table)
    codes_RI: np.ndarray = np.take(order, np.searchsorted(middles, scaled_RI))
    return codes_RI


@cache
def _sorted_table(table: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes by rising number, and the middles between neighbours."""
    order = np.argsort(TABLES[table], kind="stable").astype(np.uint8)
    rising = TABLES[table][order]
    return order, (rising[1:] + rising[:-1]) / 2


def _nearest_float8(numbers_RI: np.ndarray) -> np.ndarray:
    """E4M3 codes, ties to the even one, of numbers within its range."""
    positive = TABLES["e4m3"][:0x7F]
    middles = np.append((positive[1:] + positive[:-1]) / 2, np.float32(np.inf))
    sizes_RI = np.abs(numbers_RI)
    codes_RI = np.searchsorted(middles, sizes_RI)
    codes_RI += (sizes_RI == middles[codes_RI]) & (codes_RI % 2 == 1)
    signed: np.ndarray = (codes_RI | np.where(np.signbit(numbers_RI), 0x80, 0)).astype(np.uint8)
    return signed


def _error(block: Dense, rows_RI: np.ndarray, made: Coded) -> QuantError:
    gaps_RI = np.abs(numbers(made, DType.F32).rows_RI - rows_RI)
    scales_RI = column_scales(made)
    steps_RI = np.divide(gaps_RI, scales_RI, out=np.zeros_like(gaps_RI), where=scales_RI > 0)
    return QuantError(
        sum_sq_error=float(np.square(gaps_RI, dtype=np.float64).sum()),
        sum_sq=float(np.square(rows_RI, dtype=np.float64).sum()),
        max_abs=float(gaps_RI.max(initial=0.0)),
        max_steps=float(steps_RI.max(initial=0.0)),
        count=rows_RI.size,
        nonfinite=first_nonfinite(block),
        overflow=0,
    )
