"""Defines element types, and the specs of stored arrays.

Tensors are processed by rows: one of two or more dimensions is seen as `[prod(shape[:-1]), shape[-1]]`; a
vector of n elements as `[n, 1]`; a scalar as `[1, 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

Json = dict[str, Any]


class DType(Enum):
    """An element type: safetensors code, bits per element, and the numpy type that carries it.

    Types that numpy lacks are carried as unsigned integers of the same width (BF16 as uint16, the 8-bit
    floats as uint8); only the kernels in `quant/` interpret them.
    """

    F64 = ("F64", 64, "<f8")
    F32 = ("F32", 32, "<f4")
    F16 = ("F16", 16, "<f2")
    BF16 = ("BF16", 16, "<u2")
    F8_E4M3 = ("F8_E4M3", 8, "|u1")
    F8_E5M2 = ("F8_E5M2", 8, "|u1")
    F8_E8M0 = ("F8_E8M0", 8, "|u1")
    I64 = ("I64", 64, "<i8")
    I32 = ("I32", 32, "<i4")
    I16 = ("I16", 16, "<i2")
    I8 = ("I8", 8, "|i1")
    U64 = ("U64", 64, "<u8")
    U32 = ("U32", 32, "<u4")
    U16 = ("U16", 16, "<u2")
    U8 = ("U8", 8, "|u1")
    BOOL = ("BOOL", 8, "|b1")

    def __init__(self, code: str, bits: int, carrier: str) -> None:
        self.code = code
        self.bits = bits
        self.carrier = carrier

    # Members are compared as objects; the hash of an Enum, that of the name, is a call of Python.
    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        """Bytes per element."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """True if an unquantized weight may be stored in this type (floating point of 16, 32 or 64 bits)."""
        return self in FLOAT_DTYPES

    @property
    def label(self) -> str:
        """The lower-case name that users read and type: `bf16`, `f32`, `i8`."""
        return self.code.lower()


FLOAT_DTYPES = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
DTYPE_BY_CODE: Mapping[str, DType] = {dtype.code: dtype for dtype in DType}


def rows_of(shape: tuple[int, ...]) -> int:
    """Returns the number of rows of a tensor of this shape (see the module's docstring)."""
    if len(shape) >= 2:
        return prod(shape[:-1])
    return shape[0] if shape else 1


def width_of(shape: tuple[int, ...]) -> int:
    """Returns the number of elements in one row of a tensor of this shape."""
    return shape[-1] if len(shape) >= 2 else 1


class Shaped:
    """What follows from a shape."""

    __slots__ = ()
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return rows_of(self.shape)

    @property
    def width(self) -> int:
        return width_of(self.shape)

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSpec(Shaped):
    """The name, element type and shape of one stored array."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.nbytes
