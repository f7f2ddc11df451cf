"""Converts GGML blocks to codes and scales of an encoding that other formats have too.

Two-level scales (K-quants) are multiplied out, which float32 holds exactly: a half-precision number times one
of at most 8 bits. So both dequantize to the same bits, but for q4_1 and q5_1: their scales and mins stay
float16, for which `AffineMin` rounds product and sum to float16, as mlx does.

Axes: N blocks, R rows, I columns, G groups of a row.
"""

from __future__ import annotations

import numpy as np

from qconvert.core.encodings import AffineMin, Codebook
from qconvert.core.ggml_types import GRIDS, GGMLType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, GgmlRows
from qconvert.quant.ggml.block_parts import unpacked
from qconvert.quant.ggml.code_fields import read_codes


def grid_of_blocks(value: GgmlRows) -> AffineIntRows | AffineMinRows | CodebookRows:
    """Returns rows of blocks of a type in `GRIDS` as codes and scales of that encoding, exactly."""
    name, rows = value.encoding.type, value.rows
    encoding = GRIDS[name]
    blocks = np.ascontiguousarray(value.bytes_RB).reshape(-1, GGMLType[name].block_bytes)
    if isinstance(encoding, Codebook):
        assert encoding.group_size is not None
        scales = GGMLType[name].block // encoding.group_size
        codes_RI = read_codes(name, blocks).reshape(rows, -1)
        return CodebookRows(codes_RI, np.ascontiguousarray(blocks[:, :scales]).reshape(rows, -1), encoding)
    parts = unpacked(name, blocks)
    codes_RI = np.ascontiguousarray(parts.codes_NI).reshape(rows, -1)
    numbers = [n.values_NG for n in (parts.scales, parts.mins) if n is not None]
    arrays = [n.astype(encoding.scale_dtype.carrier).reshape(rows, -1) for n in numbers]
    if isinstance(encoding, AffineMin):
        return AffineMinRows(codes_RI, arrays[0], arrays[1], encoding)
    return AffineIntRows(codes_RI, arrays[0], None, encoding)
