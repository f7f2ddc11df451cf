"""Dispatches rows to the kernel that encodes blocks of their GGML type, and counts overflowed scales.

A kernel takes the flat array of whole rows, in float32, and the flat array of bytes; a weighted kernel also
the importance of every column. Types without one ignore importance, as llama-quantize
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.ggml_types import GGMLType
from qconvert.core.values import DenseRows
from qconvert.quant.casts import cast
from qconvert.quant.float32_panels import float32_panels
from qconvert.quant.ggml import (
    float4,
    iq1,
    iq2,
    iq3,
    iq4,
    kquants_affine,
    kquants_symmetric,
    legacy,
    ternary,
    two_bits,
)

# Bounds every stored scale and minimum, in units of the block's largest magnitude. A fitted slope is a mean
# of differences of two weights over differences of their codes, which are 1 or more, so at most 2; its
# minimum is at most 31 slopes and a weight.
_FARTHEST = 64
_LARGEST_HALF = 65504


@dataclass(frozen=True, slots=True)
class _Encoder:
    """The kernels of a type, and the byte offsets of a block's half-precision scales and minimums."""

    plain: Callable[[np.ndarray, np.ndarray], None] | None  # None: nothing without importance
    weighted: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None
    halves: tuple[int, ...] = (0,)


def _variant(which: bool | int, plain: Any, weighted: Any, halves: tuple[int, ...] = (0,)) -> _Encoder:
    """Returns the kernels of one of the types that share them: with five bits or not, or by their bits."""
    return _Encoder(partial(plain, which), partial(weighted, which), halves)


_SYMMETRIC = legacy.encode_symmetric, legacy.encode_symmetric_weighted
_AFFINE = legacy.encode_affine, legacy.encode_affine_weighted
_AFFINE_K = kquants_affine.encode_affine, kquants_affine.encode_affine_weighted
_ENCODERS: Mapping[str, _Encoder] = {
    "Q4_0": _variant(False, *_SYMMETRIC),
    "Q4_1": _variant(False, *_AFFINE, (0, 2)),
    "Q5_0": _variant(True, *_SYMMETRIC),
    "Q5_1": _variant(True, *_AFFINE, (0, 2)),
    "Q8_0": _Encoder(legacy.encode_q8_0),
    "Q2_K": _variant(2, *_AFFINE_K, (80, 82)),
    "Q3_K": _Encoder(kquants_symmetric.encode_q3_k, kquants_symmetric.encode_q3_k_weighted, (108,)),
    "Q4_K": _variant(4, *_AFFINE_K, (0, 2)),
    "Q5_K": _variant(5, *_AFFINE_K, (0, 2)),
    "Q6_K": _Encoder(kquants_symmetric.encode_q6_k, kquants_symmetric.encode_q6_k_weighted, (208,)),
    "IQ1_S": _Encoder(None, iq1.encode_iq1_s_weighted),
    "IQ1_M": _Encoder(iq1.encode_iq1_m, iq1.encode_iq1_m_weighted, (48,)),
    "IQ2_XXS": _Encoder(None, iq2.encode_iq2_xxs_weighted),
    "IQ2_XS": _Encoder(None, iq2.encode_iq2_xs_weighted),
    "IQ2_S": _Encoder(iq2.encode_iq2_s, iq2.encode_iq2_s_weighted),
    "IQ3_XXS": _Encoder(iq3.encode_iq3_xxs, iq3.encode_iq3_xxs_weighted),
    "IQ3_S": _Encoder(iq3.encode_iq3_s, iq3.encode_iq3_s_weighted),
    "IQ4_NL": _Encoder(iq4.encode_iq4_nl, iq4.encode_iq4_nl_weighted),
    "IQ4_XS": _Encoder(iq4.encode_iq4_xs, iq4.encode_iq4_xs_weighted),
    "MXFP4": _Encoder(float4.encode_mxfp4, halves=()),
    "NVFP4": _Encoder(float4.encode_nvfp4, halves=()),
    "Q1_0": _Encoder(two_bits.encode_q1_0),
    "Q2_0": _Encoder(two_bits.encode_q2_0),
    "TQ1_0": _Encoder(ternary.encode_tq1_0, halves=(52,)),
    "TQ2_0": _Encoder(ternary.encode_tq2_0, halves=(64,)),
}

ENCODED = frozenset(_ENCODERS)
"""The names of the block types that `encode_rows` writes."""


def encode_rows(block: DenseRows, type_name: str, *, importance_I: np.ndarray | None = None) -> np.ndarray:
    """Returns rows as GGML blocks, byte for byte as llama-quantize writes them on x86-64 (but see `iq3`).

    `block` holds [R, I] finite numbers, I a multiple of the type's block (ValueError otherwise); `type_name`
    is a GGMLType name in `ENCODED`; `importance_I` the mean squared activation of every column (an imatrix
    entry over its count), at least 0, without which the types of `WEIGHED` raise ValueError. Returns uint8
    [R, bytes per row]. A scale beyond half precision becomes infinite, as in the reference (see
    `overflowed`). Thread-safe; releases the GIL.
    """
    kind, encoder = GGMLType[type_name], _ENCODERS[type_name]
    rows, width = block.rows_RI.shape
    if width % kind.block:
        raise ValueError(f"rows of {width} elements are not divisible by the block of {kind.block}")
    bytes_RB = np.empty((rows, width // kind.block * kind.block_bytes), np.uint8)
    encode = _kernel(encoder, type_name, importance_I, width)
    for run, wide_RI in float32_panels(block):
        encode(wide_RI.reshape(-1), bytes_RB[run].reshape(-1))
    return bytes_RB


def _kernel(
    encoder: _Encoder, type_name: str, importance_I: np.ndarray | None, width: int
) -> Callable[[np.ndarray, np.ndarray], None]:
    """Returns what encodes flat rows to flat bytes, with the importance where the type heeds it."""
    weighted = encoder.weighted
    if importance_I is not None and weighted is not None:
        if importance_I.shape != (width,):
            raise ValueError(f"importance of shape {importance_I.shape} for rows of {width} elements")
        wide_I = np.ascontiguousarray(importance_I, np.float32)
        return lambda rows, out: weighted(rows, wide_I, out)
    if encoder.plain is None:
        raise ValueError(f"{type_name} needs the importance of every column")
    return encoder.plain


def overflowed(block: DenseRows, bytes_RB: np.ndarray, type_name: str, peak: float) -> int:
    """Returns how many scales and minimums of finite weights overflowed to infinity in these blocks.

    `peak` is an upper bound of the magnitudes in `block`; where it is small nothing is searched.
    """
    if peak * _FARTHEST < _LARGEST_HALF:
        return 0
    kind = GGMLType[type_name]
    blocks_NB = bytes_RB.reshape(-1, kind.block_bytes)
    wide = block if block.dtype is DType.F64 else cast(block, DType.F32)[0]
    finite_N = np.isfinite(wide.rows_RI).reshape(-1, kind.block).all(axis=1)
    halves = (_halves(blocks_NB[finite_N], at, type_name) for at in _ENCODERS[type_name].halves)
    return sum(int(np.count_nonzero(~np.isfinite(half_N1))) for half_N1 in halves)


def _halves(blocks_NB: np.ndarray, at: int, type_name: str) -> np.ndarray:
    """Returns the half-precision number at a byte offset; that of IQ1_M is in the top bits of four words."""
    if type_name != "IQ1_M":
        return blocks_NB[:, at : at + 2].view("<f2")
    nibbles_N4 = np.ascontiguousarray(blocks_NB[:, at:]).view("<u2") >> 12
    bits_N = nibbles_N4[:, 0] | nibbles_N4[:, 1] << 4 | nibbles_N4[:, 2] << 8 | nibbles_N4[:, 3] << 12
    return np.asarray(bits_N).view("<f2")
