"""Packs the 256 codes and the group scales of a K-quant super-block into bits.

`codes` are the float32 codes of one super-block in element order, `out` is the flat array of bytes and `at`
where the field begins. Scales come as tiles of bytes [groups, lanes], of which lane `k` is stored. Codes are
packed by arithmetic on lanes: a byte is the sum of its fields, shifted by multiplication. Source: the block
structs of ggml-common.h and quantize_row_*_K_ref in ggml-quants.c.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.quant.simd.lanes import LANES, load, routine, splat, store, truncated, where

_ZERO, _ONE = np.float32(0), np.float32(1)
_FOUR, _SIXTEEN, _SIXTY_FOUR = np.float32(4), np.float32(16), np.float32(64)
_SIXTEENTH = np.float32(1 / 16)


@routine
def put_scales_4(s: np.ndarray, m: np.ndarray, k: int, out: np.ndarray, at: int) -> None:
    """Writes Q2_K's: a byte per group, its scale in the low nibble. Reduces `s` and `m` to what is stored."""
    for part in range(16):
        index = part * LANES + k
        byte = (s[index] | m[index] << 4) & 0xFF
        out[at + part] = byte
        s[index], m[index] = byte & 15, byte >> 4


@routine
def put_scales_6(s: np.ndarray, m: np.ndarray, k: int, out: np.ndarray, at: int, capped: bool) -> None:
    """Writes Q4_K's and Q5_K's: 12 bytes. The high bits of groups 4-7 are above the scales and mins of 0-3.

    Bytes above 63, from negative scales, corrupt their neighbours unless `capped`.
    """
    for part in range(4):
        low, high = part * LANES + k, (part + 4) * LANES + k
        if capped:
            s[low], m[low] = min(s[low], 63), min(m[low], 63)
            s[high], m[high] = min(s[high], 63), min(m[high], 63)
        out[at + part] = s[low] | s[high] >> 4 << 6
        out[at + part + 4] = m[low] | m[high] >> 4 << 6
        out[at + part + 8] = s[high] & 15 | (m[high] & 15) << 4
        s[low], s[high] = out[at + part] & 63, out[at + part + 8] & 15 | out[at + part] >> 6 << 4
        m[low], m[high] = out[at + part + 4] & 63, out[at + part + 8] >> 4 | out[at + part + 4] >> 6 << 4


@routine
def put_nibbles(codes: np.ndarray, out: np.ndarray, at: int) -> None:
    """Writes four bits of every code: the two halves of each 64 elements share 32 bytes."""
    for chunk in range(4):
        for element in range(0, 32, LANES):
            low = load(codes, chunk * 64 + element)
            high = load(codes, chunk * 64 + 32 + element)
            low, high = _below(low, _SIXTEEN), _below(high, _SIXTEEN)
            store(out, at + chunk * 32 + element, low + high * _SIXTEEN)


@routine
def put_pairs(codes: np.ndarray, out: np.ndarray, at: int) -> None:
    """Writes the low two bits of codes below 8: the quarters of each 128 elements share 32 bytes."""
    for half in range(2):
        for element in range(0, 32, LANES):
            start = half * 128 + element
            low = _below(load(codes, start), _FOUR) + _below(load(codes, start + 32), _FOUR) * _FOUR
            high = _below(load(codes, start + 64), _FOUR) + _below(load(codes, start + 96), _FOUR) * _FOUR
            store(out, at + half * 32 + element, low + high * _SIXTEEN)


@routine
def _below(code: Any, limit: np.float32) -> Any:
    """Reduces codes below twice the limit to below it."""
    return where(code < limit, code, code - limit)


@routine
def put_top_bits(codes: np.ndarray, limit: np.float32, out: np.ndarray, at: int) -> None:
    """Writes 32 bytes: bit j of byte e is set when the code of element 32 * j + e is `limit` or more."""
    for element in range(0, 32, LANES):
        byte = splat(_ZERO)
        bit = _ONE
        for run in range(8):
            byte = byte + where(load(codes, run * 32 + element) < limit, splat(_ZERO), splat(bit))
            bit = bit + bit
        store(out, at + element, byte)


@routine
def put_signed_scales_6(s: np.ndarray, k: int, out: np.ndarray, at: int) -> None:
    """Writes Q3_K's 16 scales in 12 bytes: low nibbles first, then the top bits, four to a byte."""
    for part in range(8):
        low, high = s[part * LANES + k], s[(part + 8) * LANES + k]
        out[at + part] = low & 15 | (high & 15) << 4
    for column in range(4):
        byte = 0
        for shift in range(4):
            byte |= s[(column + 4 * shift) * LANES + k] >> 4 << 2 * shift
        out[at + 8 + column] = byte


@routine
def put_six_bits(codes: np.ndarray, out: np.ndarray, at: int) -> None:
    """Writes Q6_K's codes: 128 bytes of low nibbles, then 64 bytes of top bits, of codes below 64.

    Quarters of each 128 elements share bytes: the first and third 32 bytes of nibbles, the second and fourth
    the next 32, all four the 32 bytes of top bits.
    """
    for half in range(2):
        for element in range(0, 32, LANES):
            start = half * 128 + element
            a, b = load(codes, start), load(codes, start + 32)
            c, d = load(codes, start + 64), load(codes, start + 96)
            high_a, high_b = truncated(a * _SIXTEENTH), truncated(b * _SIXTEENTH)
            high_c, high_d = truncated(c * _SIXTEENTH), truncated(d * _SIXTEENTH)
            nibbles = at + half * 64 + element
            store(out, nibbles, (a - high_a * _SIXTEEN) + (c - high_c * _SIXTEEN) * _SIXTEEN)
            store(out, nibbles + 32, (b - high_b * _SIXTEEN) + (d - high_d * _SIXTEEN) * _SIXTEEN)
            top_bits = high_a + high_b * _FOUR + high_c * _SIXTEEN + high_d * _SIXTY_FOUR
            store(out, at + 128 + half * 32 + element, top_bits)
