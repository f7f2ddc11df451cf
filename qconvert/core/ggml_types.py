"""Defines what a GGUF file consists of: element types, typed metadata values, tensor records.

Nothing here reads a file or computes a weight. Source: ggml/include/ggml.h and gguf.h, and docs/gguf.md of
the ggml project.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Codebook,
    Encoding,
    GgmlBlocks,
    Quantized,
    Unquantized,
)
from qconvert.errors import BadRecipe


class GGMLType(Enum):
    """An element type: its number in a file, elements per block, and bytes per block.

    `dtype` is the type of its arrays here: an unquantized type itself, U8 for the bytes of blocks.
    """

    F32 = (0, 1, 4, DType.F32)
    F16 = (1, 1, 2, DType.F16)
    Q4_0 = (2, 32, 18, DType.U8)
    Q4_1 = (3, 32, 20, DType.U8)
    Q5_0 = (6, 32, 22, DType.U8)
    Q5_1 = (7, 32, 24, DType.U8)
    Q8_0 = (8, 32, 34, DType.U8)
    Q8_1 = (9, 32, 36, DType.U8)
    Q2_K = (10, 256, 84, DType.U8)
    Q3_K = (11, 256, 110, DType.U8)
    Q4_K = (12, 256, 144, DType.U8)
    Q5_K = (13, 256, 176, DType.U8)
    Q6_K = (14, 256, 210, DType.U8)
    Q8_K = (15, 256, 292, DType.U8)
    IQ2_XXS = (16, 256, 66, DType.U8)
    IQ2_XS = (17, 256, 74, DType.U8)
    IQ3_XXS = (18, 256, 98, DType.U8)
    IQ1_S = (19, 256, 50, DType.U8)
    IQ4_NL = (20, 32, 18, DType.U8)
    IQ3_S = (21, 256, 110, DType.U8)
    IQ2_S = (22, 256, 82, DType.U8)
    IQ4_XS = (23, 256, 136, DType.U8)
    I8 = (24, 1, 1, DType.I8)
    I16 = (25, 1, 2, DType.I16)
    I32 = (26, 1, 4, DType.I32)
    I64 = (27, 1, 8, DType.I64)
    F64 = (28, 1, 8, DType.F64)
    IQ1_M = (29, 256, 56, DType.U8)
    BF16 = (30, 1, 2, DType.BF16)
    TQ1_0 = (34, 256, 54, DType.U8)
    TQ2_0 = (35, 256, 66, DType.U8)
    MXFP4 = (39, 32, 17, DType.U8)
    NVFP4 = (40, 64, 36, DType.U8)
    Q1_0 = (41, 128, 18, DType.U8)
    Q2_0 = (42, 64, 18, DType.U8)

    def __init__(self, number: int, block: int, block_bytes: int, dtype: DType) -> None:
        self.number = number
        self.block = block
        self.block_bytes = block_bytes
        self.dtype = dtype

    @property
    def is_quantized(self) -> bool:
        """True if several elements share a block (ggml_is_quantized)."""
        return self.block > 1

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block

    @property
    def encoding(self) -> Encoding:
        """The encoding of a tensor of this element type."""
        if not self.is_quantized:
            return Unquantized(self.dtype)
        return GgmlBlocks(self.name, self.block, self.block_bytes)

    @property
    def label(self) -> str:
        """The lower-case name that users read and type: `q4_k`, `bf16`."""
        return self.name.lower()


TYPE_BY_NUMBER = {kind.number: kind for kind in GGMLType}

# The block types that `quant.ggml.encode_rows` writes; named here so that a look-up imports no kernels.
WRITTEN = frozenset((
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
    "TQ1_0", "TQ2_0",
))  # fmt: skip
# Of these, the ones whose search is defined by the importance of every column alone.
WEIGHED = frozenset(("IQ1_S", "IQ2_XXS", "IQ2_XS"))
# The encoding equal to a block type, where other formats have one; two-level scales are multiplied out.
GRIDS: Mapping[str, Quantized] = {
    "Q4_0": AffineInt(4, 32, symmetric=True, scale_dtype=DType.F16),
    "Q5_0": AffineInt(5, 32, symmetric=True, scale_dtype=DType.F16),
    "Q8_0": AffineInt(8, 32, symmetric=True, scale_dtype=DType.F16),
    "Q3_K": AffineInt(3, 16, symmetric=True, scale_dtype=DType.F32),
    "Q6_K": AffineInt(6, 16, symmetric=True, scale_dtype=DType.F32),
    "Q4_1": AffineMin(4, 32, DType.F16),
    "Q5_1": AffineMin(5, 32, DType.F16),
    "Q2_K": AffineMin(2, 16, DType.F32),
    "Q4_K": AffineMin(4, 32, DType.F32),
    "Q5_K": AffineMin(5, 32, DType.F32),
    "MXFP4": Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16),
    "NVFP4": Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16),
}


# What a weight can be written in: plain numbers, and blocks.
OF_WEIGHTS = tuple(kind for kind in GGMLType if kind.name in WRITTEN or kind.name in ("F32", "F16", "BF16"))


def parse_ggml_type(text: str) -> GGMLType:
    """Returns the type of weights a user names, in any case. Raises BadRecipe listing the names.

    Integers and F64, which hold no weights, and Q8_1 and Q8_K, which no file holds, are refused.
    """
    kind, known = GGMLType.__members__.get(text.upper()), ", ".join(kind.label for kind in OF_WEIGHTS)
    if kind is None:
        raise BadRecipe(f"type {text!r}: no such tensor type", f"one of: {known}")
    if kind not in OF_WEIGHTS:
        raise BadRecipe(f"type {kind.label}: no weights are written in it", f"one of: {known}")
    return kind


IN_MEMORY_ALONE = frozenset({GGMLType.Q8_1, GGMLType.Q8_K})
"""Types of inputs as llama.cpp multiplies them: `ggml_quantize_chunk` makes no file of them."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a GGUF file: name, element type, and shape in numpy order (ggml's reversed)."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Elements in one row, ggml's innermost dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.width // self.type.block * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def stored(self) -> TensorSpec:
        """The array that stores it: its elements, or its blocks as U8 `[..., row_bytes]`."""
        if not self.type.is_quantized:
            return TensorSpec(self.name, self.type.dtype, self.shape)
        lead = self.shape[:-1] or (1,)  # a vector of blocks is one row: rows consist of whole blocks
        return TensorSpec(self.name, DType.U8, (*lead, self.row_bytes))


class KVType(Enum):
    """The type of a metadata value: its number in a file and its struct format."""

    U8 = (0, "B")
    I8 = (1, "b")
    U16 = (2, "H")
    I16 = (3, "h")
    U32 = (4, "I")
    I32 = (5, "i")
    F32 = (6, "f")
    BOOL = (7, "?")
    TEXT = (8, "")
    U64 = (10, "Q")
    I64 = (11, "q")
    F64 = (12, "d")

    def __init__(self, number: int, format_: str) -> None:
        self.number = number
        self.format = format_


ARRAY_NUMBER = 9
KV_TYPE_BY_NUMBER = {kind.number: kind for kind in KVType}

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """The type of a metadata value that is an array of `item`."""

    item: KVType


@dataclass(frozen=True, slots=True)
class KV:
    """One metadata entry. `value` is a scalar, or a tuple of scalars when `type` is an ArrayOf.

    Text may hold any bytes: those that are not UTF-8 are kept as surrogate escapes.
    """

    key: str
    type: KVType | ArrayOf
    value: Scalar | tuple[Scalar, ...]

    @classmethod
    def u8s(cls, key: str, value: bytes) -> KV:
        return cls(key, ArrayOf(KVType.U8), tuple(value))

    @classmethod
    def u16(cls, key: str, value: int) -> KV:
        return cls(key, KVType.U16, value)

    @classmethod
    def u32(cls, key: str, value: int) -> KV:
        return cls(key, KVType.U32, value)

    @classmethod
    def i32(cls, key: str, value: int) -> KV:
        return cls(key, KVType.I32, value)

    @classmethod
    def i32s(cls, key: str, value: Sequence[int]) -> KV:
        return cls(key, ArrayOf(KVType.I32), tuple(value))

    @classmethod
    def f32(cls, key: str, value: float) -> KV:
        return cls(key, KVType.F32, value)

    @classmethod
    def f32s(cls, key: str, value: Sequence[float]) -> KV:
        return cls(key, ArrayOf(KVType.F32), tuple(value))

    @classmethod
    def flag(cls, key: str, value: bool) -> KV:
        return cls(key, KVType.BOOL, value)

    @classmethod
    def flags(cls, key: str, value: Sequence[bool]) -> KV:
        return cls(key, ArrayOf(KVType.BOOL), tuple(value))

    @classmethod
    def text(cls, key: str, value: str) -> KV:
        return cls(key, KVType.TEXT, value)

    @classmethod
    def texts(cls, key: str, value: Sequence[str]) -> KV:
        return cls(key, ArrayOf(KVType.TEXT), tuple(value))
