"""Quantizes the scales of 4-bit blocks to 8 bits: bitsandbytes' double quantization.

A scale is `TABLE[code] * upper + offset`: the offset is the mean of all scales of the tensor, `upper` the
largest distance from it in 256 consecutive scales of the file. Source: bitsandbytes 0.50 (`functional.py`:
create_dynamic_map, quantize_blockwise, quantize_4bit with compress_statistics). Codes here are the nearest
ones; its CPU kernel takes a neighbour 15 times in 10,000.

Axes: R rows, G scales of a row, B runs of 256 scales.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from qconvert.core.values import CodebookRows, Nested

BLOCK = 64
RUN = 256


def _table() -> np.ndarray:
    """Returns the signed 8-bit dynamic map: seven decades, each with twice the entries of the one below."""
    numbers = [np.float32(0), np.float32(1)]
    for decade in range(7):
        ends = _linspace(2**decade + 1)
        middles = (ends[:-1] + ends[1:]) / np.float32(2)
        positive = np.float32(10.0 ** (decade - 6)) * middles
        numbers += [*positive, *-positive]
    return np.sort(np.array(numbers, np.float32))


def _linspace(count: int) -> np.ndarray:
    """Returns torch.linspace from 0.1 to 1: each product and sum rounded to float32 once, the second half
    counted back from the end.
    """
    first, last = np.float64(np.float32(0.1)), np.float64(1)
    step = np.float64(np.float32(np.float32(last - first) / np.float32(count - 1)))
    index = np.arange(count)
    numbers = np.where(index < count // 2, first + step * index, last - step * (count - 1 - index))
    return np.asarray(numbers.astype(np.float32))


TABLE = _table()
_MIDDLES = (TABLE[1:] + TABLE[:-1]) / np.float32(2)


def rows_together(width: int) -> int:
    """Returns how many rows of `width` columns have scales that fill whole runs."""
    return RUN // gcd(max(1, width // BLOCK), RUN)


def sums(scales_RG: np.ndarray) -> np.ndarray:
    """Returns the sum and the count of the scales of every run, float64 [runs, 2]; rows are whole runs."""
    flat = scales_RG.astype(np.float64).ravel()
    starts = np.arange(0, flat.size, RUN)
    counts = np.minimum(RUN, flat.size - starts)
    return np.stack([np.add.reduceat(flat, starts), counts], axis=1) if flat.size else np.empty((0, 2))


def offset_of(sums_B2: np.ndarray) -> float:
    """Returns the mean of all scales as a float32. (Sums are float64 here, float32 in bitsandbytes.)"""
    total, count = sums_B2.sum(axis=0)
    return float(np.float32(total / count)) if count else 0.0


def nest(value: CodebookRows, offset: float) -> tuple[CodebookRows, float]:
    """Returns the same codes with nested scales, and the largest change of a weight in steps.

    The rows must be whole runs (`rows_together`), except the last of a tensor.
    """
    rows, groups = value.scales_RG.shape
    flat = (value.scales_RG - np.float32(offset)).ravel()
    sizes = np.abs(flat)
    starts = np.arange(0, flat.size, RUN)
    upper_B = np.maximum.reduceat(sizes, starts) if flat.size else np.empty(0, np.float32)
    upper = np.repeat(upper_B, RUN)[: flat.size]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(upper > 0, flat * (np.float32(1) / upper), np.float32(0))
    codes = np.searchsorted(_MIDDLES, scaled).astype(np.uint8)
    scales_RG = (TABLE[codes] * upper + np.float32(offset)).reshape(rows, groups)
    moved_RG = np.abs(scales_RG.astype(np.float64) - value.scales_RG)
    steps_RG = np.divide(moved_RG, np.abs(scales_RG), out=np.zeros_like(moved_RG), where=moved_RG > 0)
    nested = Nested(codes.reshape(rows, groups), upper_B, offset)
    made = replace(
        value, scales_RG=scales_RG, encoding=replace(value.encoding, second="nested"), nested=nested
    )
    return made, float(steps_RG.max(initial=0.0))
