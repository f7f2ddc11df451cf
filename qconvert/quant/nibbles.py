"""Packs two 4-bit codes per byte, in either order."""

from __future__ import annotations

import numpy as np


def pack_nibbles(codes_RI: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Packs uint8 codes [rows, width], width even, to bytes [rows, width / 2], the first code low."""
    first, second = codes_RI[:, 0::2], codes_RI[:, 1::2]
    low, high = (second, first) if high_first else (first, second)
    packed_RB = np.empty(low.shape, np.uint8)  # of one column, numpy would keep the strides of `low`
    np.bitwise_or(low, high << 4, out=packed_RB)
    return packed_RB


def unpack_nibbles(bytes_RB: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Returns the codes that `pack_nibbles` packed, uint8 [rows, 2 * bytes]."""
    codes_RBn = np.empty((*bytes_RB.shape, 2), np.uint8)
    codes_RBn[..., int(high_first)] = bytes_RB & 0xF
    codes_RBn[..., 1 - int(high_first)] = bytes_RB >> 4
    return codes_RBn.reshape(len(bytes_RB), -1)
