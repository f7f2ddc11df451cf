"""Shows encoded rows as points: every number that each weight can be, once the scales are chosen.

A weight is `levels[code] * step + shift`, whatever the encoding, so that an algorithm that chooses codes
together (error feedback) needs to know no encoding; `with_codes` stores its choice beside the same scales.
The points are the exact products and sums of the stored numbers. `numbers` rounds those of a bfloat16 or
float16 `AffineMin` once more, as mlx.dequantize does; MLX's matrix products do not.

Axes: R rows, I columns, G groups of a row, T levels, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import TypeVar

import numpy as np

from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, GgmlBlocks
from qconvert.core.ggml_types import GRIDS, GGMLType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, GgmlRows, Value, is_packed
from qconvert.quant.codebook import TABLES
from qconvert.quant.dequantize import group_scales, mins_of, zeros_of
from qconvert.quant.ggml.block_parts import SCALES, ZEROS
from qconvert.quant.ggml.code_fields import CODE_FIELDS, put_codes, read_codes
from qconvert.quant.ggml.decode import E2M1_DOUBLED, IQ4_VALUES, mxfp4_scales, nvfp4_scales
from qconvert.quant.packed_codes import codes_of

_FLOAT_BLOCKS = {"MXFP4": mxfp4_scales, "NVFP4": nvfp4_scales}
_BLOCKS = (frozenset(GRIDS) | {"IQ4_NL", "IQ4_XS"}) & frozenset(CODE_FIELDS)
_PIECE = 1 << 16  # codes read at a time, so that temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class PointGrid:
    """The numbers that rows can store with the scales they have.

    `levels_T` float32 [T <= 256], rising (a table with two zeros has both, the negative one first): the
    numbers of the codes 0 to T - 1. `steps_RG` and `shifts_RG` float32 [R, G]: a weight is `levels_T[code] *
    step + shift`; steps may be 0 or negative. `size` is the number of columns of a group: column k is in
    group k // size.
    """

    levels_T: np.ndarray
    steps_RG: np.ndarray
    shifts_RG: np.ndarray
    size: int


def grid_of_columns(grid: PointGrid, columns: slice) -> PointGrid:
    """The points of consecutive columns: groups that begin before them, or end after, are cut."""
    start, size = columns.start, grid.size
    if start == 0 and -(-columns.stop // size) == grid.steps_RG.shape[1]:
        return grid
    cut = gcd(start, size) if start else size
    repeats = size // cut
    groups = slice(start // cut, -(-columns.stop // cut))
    steps_RG, shifts_RG = (
        np.repeat(each_RG[:, groups.start // repeats : -(-groups.stop // repeats)], repeats, axis=1)[
            :, groups.start % repeats :
        ][:, : groups.stop - groups.start]
        for each_RG in (grid.steps_RG, grid.shifts_RG)
    )
    return PointGrid(grid.levels_T, steps_RG, shifts_RG, cut)


def has_points(encoding: Encoding) -> bool:
    """Whether rows of an encoding have a `PointGrid`.

    All that are encoded here have, but for columns in activation order and for ternary blocks; unquantized
    rows have none.
    """
    match encoding:
        case AffineInt():
            return not encoding.act_order
        case AffineMin() | Codebook():
            return True
        case GgmlBlocks():
            return encoding.type in _BLOCKS
        case _:
            return False


def point_grid(value: Value) -> PointGrid:
    """Returns the points of encoded rows (see `has_points`)."""
    match value:
        case AffineIntRows(groups_I=None):
            # Counted from the middle, where a symmetric encoding has its zero.
            middle, steps_RG = np.float32(1 << (value.encoding.bits - 1)), group_scales(value)
            shifts_RG = (middle - zeros_of(value)) * steps_RG
            levels_T = _consecutive(value.encoding.bits) - middle
            return PointGrid(levels_T, steps_RG, shifts_RG, _size(value))
        case AffineMinRows():
            levels_T = _consecutive(value.encoding.bits)
            return PointGrid(levels_T, group_scales(value), mins_of(value), _size(value))
        case CodebookRows():
            steps_RG, table = group_scales(value), value.encoding.table
            return PointGrid(TABLES[table][_rising(table)], steps_RG, np.zeros_like(steps_RG), _size(value))
        case GgmlRows() if value.encoding.type in _BLOCKS:
            return _points_of_blocks(value)
    raise _without_points(value)


def codes_of_points(value: Value) -> np.ndarray:
    """Returns the codes of encoded rows as indices into `levels_T`, a new uint8 [R, I].

    Raises ValueError for codes of a NaN or an infinity, which are no points.
    """
    match value:
        case AffineIntRows(groups_I=None) | AffineMinRows():
            codes_RI = codes_of(value)
            return codes_RI if is_packed(value.codes_RX) else codes_RI.copy()
        case CodebookRows():
            return _indices(value.encoding.table, value.codes_RI)
        case GgmlRows() if value.encoding.type in _BLOCKS:
            return _codes_of_blocks(value)
    raise _without_points(value)


def with_codes(value: Value, codes_RI: np.ndarray) -> Value:
    """Returns the rows with the same scales and other codes: uint8 [R, I], indices into `levels_T`.

    Codes are stored as they were, packed or not; every other byte stays.
    """
    assert codes_RI.dtype == np.uint8 and codes_RI.shape == (value.rows, value.width)
    match value:
        case AffineIntRows(groups_I=None):
            return replace(value, codes_RX=_stored_like(value, codes_RI))
        case AffineMinRows():
            return replace(value, codes_RX=_stored_like(value, codes_RI))
        case CodebookRows():
            return replace(value, codes_RI=_rising(value.encoding.table)[codes_RI])
        case GgmlRows() if value.encoding.type in _BLOCKS:
            bytes_RB = np.array(value.bytes_RB, order="C")
            name, kind = value.encoding.type, value.encoding
            indices_RI = _rising(name)[codes_RI] if name in _FLOAT_BLOCKS else codes_RI
            put_codes(name, bytes_RB.reshape(-1, kind.block_bytes), indices_RI.reshape(-1, kind.block))
            return replace(value, bytes_RB=bytes_RB)
    raise _without_points(value)


def _without_points(value: Value) -> ValueError:
    return ValueError(f"{type(value).__name__} in an encoding whose codes are no points")


def _size(value: AffineIntRows | AffineMinRows | CodebookRows) -> int:
    return value.encoding.group_size or value.width


def _consecutive(bits: int) -> np.ndarray:
    return np.arange(1 << bits, dtype=np.float32)


@cache
def _rising(table: str) -> np.ndarray:
    """Returns the codes of the finite numbers of a table, uint8 [T], the smallest number first."""
    numbers = E2M1_DOUBLED if table in _FLOAT_BLOCKS else TABLES[table]
    order = np.lexsort((~np.signbit(numbers), numbers))
    return order[np.isfinite(numbers[order])].astype(np.uint8)


def _indices(table: str, codes: np.ndarray) -> np.ndarray:
    """Returns the places of codes in `_rising`."""
    rising = _rising(table)
    places = np.zeros(256, np.uint8)
    places[rising] = np.arange(len(rising))
    indices = places[codes]
    if len(rising) < len(TABLES.get(table, rising)) and (rising[indices] != codes).any():
        raise ValueError(f"codes of {table} that are no finite numbers")
    return np.asarray(indices)


def _points_of_blocks(value: GgmlRows) -> PointGrid:
    name, bits = value.encoding.type, value.encoding.bits
    blocks = np.ascontiguousarray(value.bytes_RB).reshape(-1, value.encoding.block_bytes)
    if name in _FLOAT_BLOCKS:
        levels_T, minima_NG = E2M1_DOUBLED[_rising(name)], None
        steps_NG = _FLOAT_BLOCKS[name](blocks[:, : CODE_FIELDS[name][0].start])
    else:
        bits = max(field.shift + field.bits for field in CODE_FIELDS[name])
        levels_T = IQ4_VALUES if name.startswith("IQ4") else _consecutive(bits) - ZEROS.get(name, 0)
        scales, mins = SCALES[name](blocks)
        steps_NG, minima_NG = scales.values_NG, None if mins is None else mins.values_NG
    steps_RG = steps_NG.reshape(value.rows, -1)
    shifts_RG = np.zeros_like(steps_RG) if minima_NG is None else minima_NG.reshape(value.rows, -1)
    return PointGrid(levels_T, steps_RG, shifts_RG, value.width // steps_RG.shape[1])


def _codes_of_blocks(value: GgmlRows) -> np.ndarray:
    name, kind = value.encoding.type, GGMLType[value.encoding.type]
    blocks = np.ascontiguousarray(value.bytes_RB).reshape(-1, kind.block_bytes)
    codes_NI, count = np.empty((len(blocks), kind.block), np.uint8), max(1, _PIECE // kind.block)
    for first in range(0, len(blocks), count):
        codes_NI[first : first + count] = read_codes(name, blocks[first : first + count])
    codes_RI = codes_NI.reshape(value.rows, value.width)
    return _indices(name, codes_RI) if name in _FLOAT_BLOCKS else codes_RI


_Integers = TypeVar("_Integers", AffineIntRows, AffineMinRows)


def _stored_like(value: _Integers, codes_RI: np.ndarray) -> np.ndarray:
    """Returns codes packed if those of the value are."""
    if not is_packed(value.codes_RX):
        return codes_RI
    from qconvert.quant.simd.packing import pack_stream

    return pack_stream(codes_RI, value.encoding.bits)
