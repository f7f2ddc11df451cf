"""Unpacks GGML blocks into codes, and the scales and mins of their groups, two-level where stored so.

The value of a group is a half-precision number, or (K-quants, IQ4_XS) a small integer times one number of the
super-block. Sources: the block structs and dequantize_row_* of ggml-common.h and ggml-quants.c.

Axes: N blocks, I columns of a block, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.quant.ggml.code_fields import fields, read_codes

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


_Scales = tuple[Numbers, Numbers | None]


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


def _half_scale(blocks: np.ndarray) -> _Scales:
    return _stored(blocks, 0), None


def _half_scale_and_min(blocks: np.ndarray) -> _Scales:
    return _stored(blocks, 0), _stored(blocks, 2)


def _q2_k(blocks: np.ndarray) -> _Scales:
    return _small(blocks[:, :16] & 15, blocks, 80), _small(blocks[:, :16] >> 4, blocks, 82, -1)


def _q3_k(blocks: np.ndarray) -> _Scales:
    low = np.concatenate([blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4], axis=1)
    s = (low | fields(blocks[:, 104:108], 2, 4) << 4).view(np.int8) - 32
    return _small(s, blocks, 108), None


def _with_mins(blocks: np.ndarray) -> _Scales:
    s, m = _scales_6(blocks[:, 4:16])
    return _small(s, blocks, 0), _small(m, blocks, 2, -1)


def _iq4_xs(blocks: np.ndarray) -> _Scales:
    s = (fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << 4).view(np.int8) - 32
    return _small(s, blocks, 0), None


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    runs = [_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)]
    return np.concatenate(runs, axis=1).astype(np.uint8)


SCALES: Mapping[str, Callable[[np.ndarray], _Scales]] = {
    "Q4_0": _half_scale,
    "Q4_1": _half_scale_and_min,
    "Q5_0": _half_scale,
    "Q5_1": _half_scale_and_min,
    "Q8_0": _half_scale,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _with_mins,
    "Q5_K": _with_mins,
    "Q6_K": lambda blocks: (_small(blocks[:, 192:208].view(np.int8), blocks, 208), None),
    "IQ4_NL": _half_scale,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": lambda blocks: (_stored(blocks, 52), None),
    "TQ2_0": lambda blocks: (_stored(blocks, 64), None),
    "Q1_0": _half_scale,
    "Q2_0": _half_scale,
}
"""The function that unpacks scales and mins of blocks, uint8 [N, block bytes], by the name of their type."""


def unpacked(type_name: str, blocks: np.ndarray) -> Parts:
    """Returns the parts of blocks, uint8 [N, block bytes], of a type in `SCALES`."""
    codes_NI = _tq1_0(blocks) if type_name == "TQ1_0" else read_codes(type_name, blocks)
    return Parts(codes_NI, *SCALES[type_name](blocks))


ZEROS: Mapping[str, int] = {
    "Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32,
    "TQ1_0": 1, "TQ2_0": 1, "Q1_0": 1, "Q2_0": 1,
}  # fmt: skip
"""The zero point of the types without mins: `(code - zero) * scale`."""
