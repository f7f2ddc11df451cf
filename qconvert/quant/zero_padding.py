"""Pads weights of any encoding with rows and columns that dequantize to exact zeros.

The padding is a code that dequantizes to 0 under any scale, so a partly filled group can be completed; new
groups repeat the scale (and zero point) of their neighbour.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qconvert.core import values
from qconvert.quant.codebook import TABLES
from qconvert.quant.dequantize import zeros_of
from qconvert.quant.packed_codes import codes_of, words_of


def zero_rows(row: values.Value, count: int) -> values.Value:
    """Returns `count` rows of zeros in the encoding of `row`, a value of one row whose scales they repeat."""
    blank: values.Value
    match row:
        case values.DenseRows() | values.GgmlRows():
            return row.with_arrays(
                tuple(np.zeros((count, array.shape[1]), array.dtype) for array in row.arrays)
            )
        case values.AffineMinRows():
            codes_RX, mins_RG = _min_codes(row, row.width), np.zeros_like(row.mins_RG)
            blank = replace(row, codes_RX=codes_RX, mins_RG=mins_RG)
            if values.is_packed(row.codes_RX):
                blank = replace(blank, codes_RX=words_of(blank))
        case values.AffineIntRows():
            blank = replace(row, codes_RX=_zero_codes(row, row.width))
            if values.is_packed(
                row.codes_RX
            ):  # so that the rows they are stacked with have the same array type
                blank = replace(blank, codes_RX=words_of(blank))
        case values.CodebookRows():
            blank = replace(row, codes_RI=np.full_like(row.codes_RI, _zero_code(row)))
    return blank.with_arrays(tuple(np.repeat(array, count, axis=0) for array in blank.arrays))


def pad_columns(value: values.Value, width: int) -> values.Value:
    """Returns the rows padded with zeros to `width` columns, which must be whole groups."""
    rows, have = value.rows, value.width
    match value:
        case values.DenseRows():
            return value.with_arrays(
                (_append(value.rows_RI, np.zeros((rows, width - have), value.rows_RI.dtype)),)
            )
        case values.GgmlRows():
            raise AssertionError("blocks are not padded")
        case values.AffineMinRows():
            groups = value.encoding.groups(width)
            return values.AffineMinRows(
                _append(codes_of(value), _min_codes(value, width - have)),
                _repeat_last(value.scales_RG, groups),
                _append(
                    value.mins_RG, np.zeros((rows, groups - value.mins_RG.shape[1]), value.mins_RG.dtype)
                ),
                value.encoding,
            )
        case values.AffineIntRows():
            return _pad_integers(value, width)
        case values.CodebookRows():
            more = np.full((rows, width - have), _zero_code(value), np.uint8)
            scales_RG = _repeat_last(value.scales_RG, value.encoding.groups(width))
            return replace(value, codes_RI=_append(value.codes_RI, more), scales_RG=scales_RG)


def _min_codes(value: values.AffineMinRows, columns: int) -> np.ndarray:
    """Codes that are zeros where the min, the zero point or the middle is 0: uint8 [rows, columns]."""
    middle = 1 << (value.encoding.bits - 1) if value.encoding.offset == "middle" else 0
    return np.full((value.rows, columns), middle, np.uint8)


def _pad_integers(value: values.AffineIntRows, width: int) -> values.AffineIntRows:
    encoding, have = value.encoding, value.width
    groups = encoding.groups(width)
    order_I = value.groups_I
    if order_I is not None:
        more_I = np.arange(have, width) // (encoding.group_size or width)
        order_I = np.concatenate([order_I, more_I.astype(order_I.dtype)])
    grown = replace(
        value,
        scales_RG=_repeat_last(value.scales_RG, groups),
        zeros_RG=None if value.zeros_RG is None else _repeat_last(value.zeros_RG, groups),
        groups_I=order_I,
    )
    return replace(grown, codes_RX=_append(codes_of(value), _zero_codes(grown, width)[:, have:]))


def _zero_codes(value: values.AffineIntRows, width: int) -> np.ndarray:
    """Returns the code of 0 in every column, the zero point of its group: [rows, width]."""
    zeros_RG = zeros_of(value)
    if value.groups_I is not None:
        return zeros_RG[:, value.groups_I]
    return np.repeat(zeros_RG, width // zeros_RG.shape[1], axis=1)


def _zero_code(value: values.CodebookRows) -> int:
    """Returns the first code of a table whose value is 0."""
    return int(np.flatnonzero(TABLES[value.encoding.table] == 0)[0])


def _append(array: np.ndarray, more: np.ndarray) -> np.ndarray:
    return np.concatenate([array, more], axis=1)


def _repeat_last(array_RG: np.ndarray, groups: int) -> np.ndarray:
    """Repeats the last column until there are `groups` of them."""
    return _append(array_RG, np.repeat(array_RG[:, -1:], groups - array_RG.shape[1], axis=1))
