"""Which blocks of GGML are grids that other formats have too, and what are their codes and scales?

A scale of scales (K-quants) is multiplied out, which float32 holds exactly: a half-precision number
times one of at most 8 bits. So the numbers of the grid are those of the blocks to the bit.

Axes: N blocks, R rows, I columns, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from qconvert.gguf_types import GRIDS, GGMLType
from qconvert.quant.ggml.decode import fields, fifth_bits, half, scales_6
from qconvert.tensors import BlockRows, Codebook, Coded, GroupMin, IntAffine, MinAffine


def grid_of_blocks(value: BlockRows) -> IntAffine | MinAffine | Coded:
    """Rows of blocks of a type in `GRIDS` as codes on that grid, exactly."""
    name, rows = value.form.type, value.rows
    form = GRIDS[name]
    blocks = np.ascontiguousarray(value.bytes_RB).reshape(-1, GGMLType[name].block_bytes)
    codes, *numbers = _READERS[name](blocks)
    codes_RI = np.ascontiguousarray(codes).reshape(rows, -1)
    if isinstance(form, Codebook):
        return Coded(codes_RI, numbers[0].reshape(rows, -1), form)
    arrays = [n.astype(form.scale_dtype.carrier).reshape(rows, -1) for n in numbers]
    if isinstance(form, GroupMin):
        return MinAffine(codes_RI, arrays[0], arrays[1], form)
    return IntAffine(codes_RI, arrays[0], None, form)


Fields = tuple[np.ndarray, ...]


def _q4_0(blocks: np.ndarray) -> Fields:
    return fields(blocks[:, 2:], 4, 16), half(blocks, 0)


def _q5_0(blocks: np.ndarray) -> Fields:
    return fields(blocks[:, 6:], 4, 16) | fifth_bits(blocks[:, 2:6]), half(blocks, 0)


def _q8_0(blocks: np.ndarray) -> Fields:
    return blocks[:, 2:] ^ np.uint8(0x80), half(blocks, 0)


def _q3_k(blocks: np.ndarray) -> Fields:
    low = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], axis=1)
    s = (low | fields(blocks[:, 104:108], 2, 4) << 4).astype(np.float32) - 32
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << 2
    return codes, half(blocks, 108) * s


def _q6_k(blocks: np.ndarray) -> Fields:
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    return codes, half(blocks, 208) * blocks[:, 192:208].view(np.int8)


def _q4_1(blocks: np.ndarray) -> Fields:
    return fields(blocks[:, 4:], 4, 16), half(blocks, 0), half(blocks, 2)


def _q5_1(blocks: np.ndarray) -> Fields:
    codes = fields(blocks[:, 8:], 4, 16) | fifth_bits(blocks[:, 4:8])
    return codes, half(blocks, 0), half(blocks, 2)


def _q2_k(blocks: np.ndarray) -> Fields:
    s, m = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return fields(blocks[:, 16:80], 2, 32), half(blocks, 80) * s, -(half(blocks, 82) * m)


def _q4_k(blocks: np.ndarray) -> Fields:
    s, m = scales_6(blocks[:, 4:16])
    return fields(blocks[:, 16:], 4, 32), half(blocks, 0) * s, -(half(blocks, 2) * m)


def _q5_k(blocks: np.ndarray) -> Fields:
    s, m = scales_6(blocks[:, 4:16])
    codes = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    return codes, half(blocks, 0) * s, -(half(blocks, 2) * m)


def _mxfp4(blocks: np.ndarray) -> Fields:
    return fields(blocks[:, 1:], 4, 16), np.ascontiguousarray(blocks[:, :1])


_READERS: Mapping[str, Callable[[np.ndarray], Fields]] = {
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q3_K": _q3_k,
    "Q6_K": _q6_k,
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "MXFP4": _mxfp4,
}
