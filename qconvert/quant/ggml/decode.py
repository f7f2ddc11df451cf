"""Decodes GGML blocks with numpy; the lattice types (IQ1, IQ2, IQ3) with the gguf package.

A decoder turns blocks, uint8 [N, block bytes], into float32 [N, elements]. Its products and differences are
those of dequantize_row_* in ggml-quants.c, in their order, so the results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from qconvert.core.ggml_types import GGMLType
from qconvert.quant.ggml.block_parts import SCALES, ZEROS, unpacked
from qconvert.quant.ggml.code_fields import read_codes

_PIECE = 1 << 16  # elements decoded at a time, so that temporaries stay in the cache
# The doubled values of E2M1 by code: kvalues_mxfp4 in ggml-common.h.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # kvalues_iq4nl


def mxfp4_scales(stored: np.ndarray) -> np.ndarray:
    """Returns the powers of two of E8M0 bytes, halved to go with `E2M1_DOUBLED`."""
    return np.asarray(np.ldexp(np.float32(1), stored.astype(np.int32) - 128))


def nvfp4_scales(stored: np.ndarray) -> np.ndarray:
    """Returns the numbers of unsigned E4M3 bytes, halved to go with `E2M1_DOUBLED`; byte 0x7F is 0."""
    exponent = (stored >> 3 & 15).astype(np.int32)
    mantissa = (stored & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    scales: np.ndarray = np.where(exponent == 0, np.ldexp(mantissa, -10), normal)
    scales[stored == 0x7F] = 0
    return scales


def decode_rows(rows_RB: np.ndarray, type_name: str, width: int) -> np.ndarray:
    """Returns the float32 weights [R, width] of rows of blocks, uint8 [R, bytes per row].

    `type_name` is a GGMLType name of a block type. The weights are those of the reference to the bit.
    """
    kind = GGMLType[type_name]
    decode = _decoder(kind)
    blocks = np.ascontiguousarray(rows_RB).reshape(-1, kind.block_bytes)
    weights = np.empty((len(blocks), kind.block), np.float32)
    step = _PIECE // kind.block
    for start in range(0, len(blocks), step):
        weights[start : start + step] = decode(blocks[start : start + step])
    return weights.reshape(len(rows_RB), width)


def _decoder(kind: GGMLType) -> Callable[[np.ndarray], np.ndarray]:
    if kind.name in SCALES:
        return partial(_decode_parts, kind.name)
    if kind is GGMLType.MXFP4:
        return lambda blocks: E2M1_DOUBLED[read_codes("MXFP4", blocks)] * mxfp4_scales(blocks[:, :1])
    if kind is GGMLType.NVFP4:
        return lambda blocks: _scaled(E2M1_DOUBLED[read_codes("NVFP4", blocks)], nvfp4_scales(blocks[:, :4]))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return partial(dequantize, qtype=GGMLQuantizationType(kind.number))


def _decode_parts(type_name: str, blocks: np.ndarray) -> np.ndarray:
    parts = unpacked(type_name, blocks)
    codes = parts.codes_NI
    if type_name.startswith("IQ4"):
        codes = IQ4_VALUES[codes]
    elif type_name in ZEROS:
        codes = (codes - np.uint8(ZEROS[type_name])).view(np.int8)
    mins_NG = None if parts.mins is None else parts.mins.values_NG
    return _scaled(codes, parts.scales.values_NG, mins_NG)


def _scaled(codes_NI: np.ndarray, scales_NG: np.ndarray, mins_NG: np.ndarray | None = None) -> np.ndarray:
    weights_NGg = codes_NI.reshape(*scales_NG.shape, -1) * scales_NG[:, :, None]
    if mins_NG is not None:
        weights_NGg += mins_NG[:, :, None]
    return np.asarray(weights_NGg.reshape(codes_NI.shape))
