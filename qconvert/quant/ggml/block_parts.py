"""Unpacks GGML blocks into codes, and the scales and mins of their groups, two-level where stored so.

The value of a group is a half-precision number, or (K-quants, IQ4_XS) a small integer times one number of the
super-block. Sources: the block structs and dequantize_row_* of ggml-common.h and ggml-quants.c.

Axes: N blocks, I columns of a block, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One number per group: `stored_NG`, half precision; or int8 times `super_N`, float32."""

    stored_NG: np.ndarray
    super_N: np.ndarray | None = None

    @property
    def values_NG(self) -> np.ndarray:
        """The numbers as float32, exactly."""
        values = self.stored_NG.astype(np.float32)
        return values if self.super_N is None else self.super_N[:, None] * values


@dataclass(frozen=True, slots=True)
class Parts:
    """Unpacked blocks: codes uint8 [N, I], the scales of their groups, and the added mins, if any."""

    codes_NI: np.ndarray
    scales: Numbers
    mins: Numbers | None = None


def fields(stored: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Splits bytes into fields of `bits`: of each `run` bytes the lowest fields first, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = stored.reshape(len(stored), -1, 1, run)
    return ((runs >> shifts) & ((1 << bits) - 1)).reshape(len(stored), -1)


def _fifth_bits(stored: np.ndarray) -> np.ndarray:
    """Returns the bits of 4 bytes, lowest first, as 16 where set."""
    return np.unpackbits(stored, axis=1, bitorder="little") << 4


def _scales_6(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 8 scales and 8 minimums in the 12 bytes of Q4_K and Q5_K."""
    s, m, both = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    high_s, high_m = both & 15 | s >> 6 << 4, both >> 4 | m >> 6 << 4
    return np.concatenate([s & 63, high_s], axis=1), np.concatenate([m & 63, high_m], axis=1)


def _trits(stored: np.ndarray, count: int) -> np.ndarray:
    """Returns the `count` leading trits of bytes that hold ceil(n * 256 / 243) of a five-digit n."""
    shifted = stored[:, None, :] * _POWERS_OF_3[:count, None]
    return ((shifted.astype(np.uint16) * 3) >> 8).reshape(len(stored), -1)


def _stored(blocks: np.ndarray, at: int) -> Numbers:
    return Numbers(np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2"))


def _small(stored_NG: np.ndarray, blocks: np.ndarray, at: int, sign: int = 1) -> Numbers:
    """Returns small integers to be multiplied by the half-precision number at `at`."""
    upper_N = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)
    return Numbers(stored_NG.astype(np.int8), upper_N * np.float32(sign))


def _q5_1(blocks: np.ndarray) -> Parts:
    codes = fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return Parts(codes, _stored(blocks, 0), _stored(blocks, 2))


def _q2_k(blocks: np.ndarray) -> Parts:
    scales, mins = _small(blocks[:, :16] & 15, blocks, 80), _small(blocks[:, :16] >> 4, blocks, 82, -1)
    return Parts(fields(blocks[:, 16:80], 2, 32), scales, mins)


def _q3_k(blocks: np.ndarray) -> Parts:
    low = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], axis=1)
    s = (low | fields(blocks[:, 104:108], 2, 4) << 4).view(np.int8) - 32
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << 2
    return Parts(codes, _small(s, blocks, 108))


def _with_mins(blocks: np.ndarray, codes: np.ndarray) -> Parts:
    s, m = _scales_6(blocks[:, 4:16])
    return Parts(codes, _small(s, blocks, 0), _small(m, blocks, 2, -1))


def _q6_k(blocks: np.ndarray) -> Parts:
    codes = fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << 4
    return Parts(codes, _small(blocks[:, 192:208].view(np.int8), blocks, 208))


def _iq4_xs(blocks: np.ndarray) -> Parts:
    s = (fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << 4).view(np.int8) - 32
    return Parts(fields(blocks[:, 8:], 4, 16), _small(s, blocks, 0))


def _tq1_0(blocks: np.ndarray) -> Parts:
    runs = [_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)]
    return Parts(np.concatenate(runs, axis=1).astype(np.uint8), _stored(blocks, 52))


PARTS: Mapping[str, Callable[[np.ndarray], Parts]] = {
    "Q4_0": lambda blocks: Parts(fields(blocks[:, 2:], 4, 16), _stored(blocks, 0)),
    "Q4_1": lambda blocks: Parts(fields(blocks[:, 4:], 4, 16), _stored(blocks, 0), _stored(blocks, 2)),
    "Q5_0": lambda blocks: Parts(
        fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6]), _stored(blocks, 0)
    ),
    "Q5_1": _q5_1,
    "Q8_0": lambda blocks: Parts(blocks[:, 2:] ^ np.uint8(0x80), _stored(blocks, 0)),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda blocks: _with_mins(blocks, fields(blocks[:, 16:], 4, 32)),
    "Q5_K": lambda blocks: _with_mins(
        blocks, fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << 4
    ),
    "Q6_K": _q6_k,
    "IQ4_NL": lambda blocks: Parts(fields(blocks[:, 2:], 4, 16), _stored(blocks, 0)),
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda blocks: Parts(fields(blocks[:, :64], 2, 32), _stored(blocks, 64)),
    "Q1_0": lambda blocks: Parts(
        np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") << 1, _stored(blocks, 0)
    ),
    "Q2_0": lambda blocks: Parts(fields(blocks[:, 2:], 2, 1), _stored(blocks, 0)),
}
"""The function that unpacks blocks, uint8 [N, block bytes], by the name of their type."""

ZEROS: Mapping[str, int] = {
    "Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32,
    "TQ1_0": 1, "TQ2_0": 1, "Q1_0": 1, "Q2_0": 1,
}  # fmt: skip
"""The zero point of the types without mins: `(code - zero) * scale`."""
