"""Defines the tables that codes index: the 4- and 8-bit floats, and bitsandbytes' code books.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0) and OCP 8-bit Floating Point v1.0 (E4M3 without
infinities, E5M2) for the floats; `create_normal_map` and the FP4 table in bitsandbytes 0.50 for `nf4` and
`fp4`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.values import CodebookRows, DenseRows
from qconvert.quant.casts import cast


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Returns the values of all codes of a signed float with subnormals and no special values, float32."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    return (sign * size).astype(np.float32)


_E4M3, _E5M2 = _small_float(4, 3, 7), _small_float(5, 2, 15)
_E4M3[[0x7F, 0xFF]] = np.nan
_E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
_E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
# Quantiles of the normal distribution, the same number of them on each side of an exact zero.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

_POSITIVE_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)

TABLES: Mapping[str, np.ndarray] = MappingProxyType(
    {
        "e2m1": _small_float(2, 1, 1),
        "e4m3": _E4M3,
        "e5m2": _E5M2,
        "nf4": np.array(_NF4, np.float32),
        "fp4": np.concatenate([_POSITIVE_FP4, 0 - _POSITIVE_FP4]),  # both zeros are positive
        "int8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    }
)
_E8M0 = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)
_SCALES = {DType.F8_E8M0: _E8M0, DType.F8_E4M3: TABLES["e4m3"]}


def wide(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Returns an array of a float type, 8-bit ones included, widened exactly to float32."""
    if dtype in _SCALES:
        return np.take(_SCALES[dtype], array)
    return cast(DenseRows(array, dtype), DType.F32)[0].rows_RI


def with_tensor_number(
    scales_RG: np.ndarray, divisor: float | None, factor: float | None = None
) -> np.ndarray:
    """Scales, float32, divided by or multiplied with the one number of their tensor, where there is one."""
    if divisor is not None:
        return np.asarray(scales_RG / np.float32(divisor))
    return scales_RG if factor is None else np.asarray(scales_RG * np.float32(factor))


def scale_of_all(value: CodebookRows) -> float | None:
    """The one scale of a tensor that has no other, as a number; None where there are more."""
    encoding = value.encoding
    if encoding.group_rows is not None:
        return None
    return float(wide(value.scales_RG[:1], encoding.scale_dtype)[0, 0])
