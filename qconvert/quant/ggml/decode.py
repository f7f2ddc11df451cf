"""What numbers do GGML blocks stand for? Decoders in numpy; the lattice types (IQ1, IQ2, IQ3) are gguf's.

A decoder turns blocks, uint8 [N, block bytes], into float32 [N, elements]. Its products and differences
are those of dequantize_row_* in ggml-quants.c, in their order, so the numbers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from qconvert.core.ggml_types import GGMLType

_PIECE = 1 << 16  # elements decoded at a time, so that temporaries stay in the cache
# The doubled values of E2M1 by code: kvalues_mxfp4 in ggml-common.h.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # kvalues_iq4nl
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


def half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The half-precision field at `at`, [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def fields(stored: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Split bytes into fields of `bits`; the lowest fields of `convert.runner` bytes come first, then the
    next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = stored.reshape(len(stored), -1, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).reshape(len(stored), -1)


def fifth_bits(stored: np.ndarray) -> np.ndarray:
    """4 bytes of bits, lowest first, as 16 where set."""
    return np.unpackbits(stored, axis=1, bitorder="little") << 4


def _in_parts(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes [N, 256] times the scales [N, P] of their parts; [N, P, 256 / P]."""
    return scales[:, :, None] * codes.reshape(*scales.shape, -1).astype(np.float32)


def _flat(parts: np.ndarray) -> np.ndarray:
    return parts.reshape(len(parts), -1)


def _q4_0(blocks: np.ndarray) -> Any:
    return (fields(blocks[:, 2:], 4, 16).astype(np.float32) - 8) * half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> Any:
    return fields(blocks[:, 4:], 4, 16) * half(blocks, 0) + half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Any:
    codes = fields(blocks[:, 6:], 4, 16) | fifth_bits(blocks[:, 2:6])
    return (codes.astype(np.float32) - 16) * half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> Any:
    codes = fields(blocks[:, 8:], 4, 16) | fifth_bits(blocks[:, 4:8])
    return codes * half(blocks, 0) + half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Any:
    return blocks[:, 2:].view(np.int8) * half(blocks, 0)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    s, m = blocks[:, :16] & 15, blocks[:, :16] >> 4
    products = _in_parts(fields(blocks[:, 16:80], 2, 32), half(blocks, 80) * s)
    return _flat(products - (half(blocks, 82) * m)[:, :, None])


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], axis=1)
    s = (low | fields(blocks[:, 104:108], 2, 4) << 4).astype(np.float32) - 32
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << 2
    return _flat(_in_parts(codes.astype(np.float32) - 4, half(blocks, 108) * s))


def scales_6(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minimums in the 12 bytes of Q4_K and Q5_K."""
    s, m, both = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    high_s, high_m = both & 15 | s >> 6 << 4, both >> 4 | m >> 6 << 4
    return np.concatenate([s & 63, high_s], axis=1), np.concatenate([m & 63, high_m], axis=1)


def _min_k(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    s, m = scales_6(blocks[:, 4:16])
    products = _in_parts(codes, half(blocks, 0) * s)
    return _flat(products - (half(blocks, 2) * m)[:, :, None])


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _min_k(blocks, fields(blocks[:, 16:], 4, 32))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    codes = fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    return _min_k(blocks, codes)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return _flat(_in_parts(codes.astype(np.float32) - 32, scales))


def _iq4_nl(blocks: np.ndarray) -> Any:
    return half(blocks, 0) * IQ4_VALUES[fields(blocks[:, 2:], 4, 16)]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    low = fields(blocks[:, 4:8], 4, 1)
    high = fields(blocks[:, 2:4], 2, 1)
    s = (low | high << 4).astype(np.float32) - 32
    return _flat(_in_parts(IQ4_VALUES[fields(blocks[:, 8:], 4, 16)], half(blocks, 0) * s))


def mxfp4_scales(stored: np.ndarray) -> np.ndarray:
    """Powers of two for their bytes, halved to suit the doubled values."""
    scales: np.ndarray = np.ldexp(np.float32(1), stored.astype(np.int32) - 128)
    return scales


def _mxfp4(blocks: np.ndarray) -> Any:
    return E2M1_DOUBLED[fields(blocks[:, 1:], 4, 16)] * mxfp4_scales(blocks[:, :1])


def nvfp4_scales(stored: np.ndarray) -> np.ndarray:
    """Numbers in E4M3 without its sign, halved to suit the doubled values; byte 0x7F stands for 0."""
    exponent = (stored >> 3 & 15).astype(np.int32)
    mantissa = (stored & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    scales: np.ndarray = np.where(exponent == 0, np.ldexp(mantissa, -10), normal)
    scales[stored == 0x7F] = 0
    return scales


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    return _flat(_in_parts(E2M1_DOUBLED[fields(blocks[:, 4:], 4, 8)], nvfp4_scales(blocks[:, :4])))


def trits(stored: np.ndarray, count: int) -> np.ndarray:
    """The `count` leading trits of bytes that hold ceil(n * 256 / 243) of a five-digit n."""
    shifted = stored[:, None, :] * _POWERS_OF_3[:count, None]
    return ((shifted.astype(np.uint16) * 3) >> 8).reshape(len(stored), -1)


def _tq1_0(blocks: np.ndarray) -> Any:
    runs = [trits(blocks[:, :32], 5), trits(blocks[:, 32:48], 5), trits(blocks[:, 48:52], 4)]
    return (np.concatenate(runs, axis=1).astype(np.float32) - 1) * half(blocks, 52)


def _tq2_0(blocks: np.ndarray) -> Any:
    return (fields(blocks[:, :64], 2, 32).astype(np.float32) - 1) * half(blocks, 64)


def _q1_0(blocks: np.ndarray) -> Any:
    positive = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return (positive.astype(np.float32) * 2 - 1) * half(blocks, 0)


def _q2_0(blocks: np.ndarray) -> Any:
    return (fields(blocks[:, 2:], 2, 1).astype(np.float32) - 1) * half(blocks, 0)


_DECODERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
}


def decode_rows(rows_RB: np.ndarray, type_name: str, width: int) -> np.ndarray:
    """The float32 numbers [R, width] of rows of blocks, uint8 [R, bytes per row].

    `type_name` is a GGMLType name of a block type. The numbers are those of the reference to the bit.
    """
    kind = GGMLType[type_name]
    decode = _DECODERS.get(type_name) or _lattice_decoder(kind)
    blocks = np.ascontiguousarray(rows_RB).reshape(-1, kind.block_bytes)
    numbers = np.empty((len(blocks), kind.block), np.float32)
    step = _PIECE // kind.block
    for start in range(0, len(blocks), step):
        numbers[start : start + step] = decode(blocks[start : start + step])
    return numbers.reshape(len(rows_RB), width)


def _lattice_decoder(kind: GGMLType) -> Callable[[np.ndarray], np.ndarray]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return partial(dequantize, qtype=GGMLQuantizationType(kind.number))
