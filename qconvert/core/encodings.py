"""Defines encodings: how a tensor is represented, without its values.

A tensor is unquantized (`Unquantized`), or has integer codes with a scale and a zero point (`AffineInt`) or
with a scale and a minimum (`AffineMin`), codes of a table (`Codebook`), or GGML blocks (`GgmlBlocks`). What
is only named and measured is `Undecoded`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from qconvert.core.dtypes import DType, Shaped, rows_of, width_of


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The encoding of an unquantized tensor."""

    dtype: DType

    @property
    def label(self) -> str:
        return self.dtype.label


@dataclass(frozen=True, slots=True)
class AffineInt:
    """The encoding of a group-quantized weight: `w = (code - zero) * scale`, codes unsigned.

    `bits` is 2 to 8; `group_size` the number of consecutive input columns that share one scale, None for one
    scale per row ("channel"). A symmetric encoding stores no zero points: they are `2**(bits-1)`.
    `scale_dtype` is the type the scales are stored in. With `act_order` (GPTQ's) the columns of a group are
    not consecutive: the value holds the group of every column. Scales may be negative; `signless_zero` is
    True if the format's reference dequantizer yields +0.0 (never -0.0).
    """

    bits: int
    group_size: int | None
    symmetric: bool
    scale_dtype: DType
    act_order: bool = False
    signless_zero: bool = False

    def groups(self, width: int) -> int:
        """Returns the number of groups in a row of `width` columns, a multiple of the group size."""
        return 1 if self.group_size is None else width // self.group_size

    def nbytes(self, shape: tuple[int, ...]) -> float:
        """Returns the bytes of codes, scales and zero points of a weight of this shape, without padding."""
        rows, width = rows_of(shape), width_of(shape)
        zero_bits = 0 if self.symmetric else self.bits
        per_row = self.bits * width + self.groups(width) * (self.scale_dtype.bits + zero_bits)
        return rows * per_row / 8

    @property
    def label(self) -> str:
        order = "-actorder" if self.act_order else ""
        return f"int{self.bits}{'' if self.symmetric else '-asym'}-{_group(self.group_size)}{order}"

    @property
    def decoded(self) -> DType:
        """The type it is dequantized to when no other is asked for."""
        return self.scale_dtype


def _group(size: int | None) -> str:
    return "channel" if size is None else f"g{size}"


@dataclass(frozen=True, slots=True)
class AffineMin:
    """The encoding `w = code * scale + min` (MLX's "affine", GGML's `_1` and K types), codes of 1 to 8 bits.

    Mins are stored as `scale_dtype`, not as codes, so every `AffineInt` has a counterpart here (`min = -zero
    * scale`, rounded), but not the other way round. What is stored in their place is said by `offset`: the
    "min" itself, a "zero" point of `(code - zero) * scale` (HQQ), or the weight in the "middle" of the codes,
    `(code - 2**(bits-1)) * scale + middle` (torchao). One scale may be that of `shared_rows` rows, as many
    apart as they are in a row of them (HQQ's axis 0); values have it in each.
    """

    bits: int
    group_size: int
    scale_dtype: DType
    offset: Literal["min", "zero", "middle"] = "min"
    shared_rows: int = 1

    def groups(self, width: int) -> int:
        return width // self.group_size

    @property
    def label(self) -> str:
        group = f"g{self.group_size}" if self.shared_rows == 1 else f"rows{self.shared_rows}"
        return f"{self.offset}{self.bits}-{group}"

    @property
    def decoded(self) -> DType:
        return self.scale_dtype


@dataclass(frozen=True, slots=True)
class Codebook:
    """The encoding of a weight whose codes index a table: `w = table[code] * scale`.

    `table` names one of `quant.codebook.TABLES`: the floats of 4 and 8 bits (`e2m1`, `e4m3`, `e5m2`), and
    bitsandbytes' `nf4`, `fp4` and `int8`. A scale applies to a block of `group_size` columns (None: all) and
    `group_rows` rows (None: all); `scale_dtype` may itself be an 8-bit float. Two-level scales have a
    `second` level: `nested` scales are 8-bit codes of a table of their own, `divided` scales are divided by
    one float32 per tensor, `multiplied` ones multiplied with it. `decoded` is the type that the checkpoint
    computes in.
    """

    table: str
    group_size: int | None
    scale_dtype: DType
    decoded: DType
    group_rows: int | None = 1
    second: str | None = None

    @property
    def bits(self) -> int:
        return 8 if self.table in ("e4m3", "e5m2", "int8") else 4

    def groups(self, width: int) -> int:
        """Returns the number of scales of a row of `width` columns (the last may apply to fewer columns)."""
        return 1 if self.group_size is None else -(-width // self.group_size)

    def scale_rows(self, rows: int) -> int:
        """Returns the number of rows of scales for `rows` rows of the weight."""
        return 1 if self.group_rows is None else -(-rows // self.group_rows)

    @property
    def has_tensor_number(self) -> bool:
        """True where one float32 per tensor divides, or multiplies, all scales."""
        return self.second in ("divided", "multiplied")

    @property
    def is_mxfp4(self) -> bool:
        """True for MXFP4 (OCP Microscaling): groups of 32 E2M1 codes, scales powers of two (E8M0)."""
        key = (self.table, self.group_size, self.group_rows, self.scale_dtype, self.second)
        return key == ("e2m1", 32, 1, DType.F8_E8M0, None)

    @property
    def is_nvfp4(self) -> bool:
        """True for NVFP4: groups of 16 E2M1 codes, E4M3 scales, with or without a second level."""
        key = (self.table, self.group_size, self.group_rows, self.scale_dtype)
        return key == ("e2m1", 16, 1, DType.F8_E4M3)

    @property
    def label(self) -> str:
        rows = {1: "", None: "-tensor"}.get(self.group_rows, f"x{self.group_rows}")
        group = "" if rows == "-tensor" else f"-{_group(self.group_size)}"
        return f"{self.table}{group}{rows}{f'-{self.second}' if self.second else ''}"


@dataclass(frozen=True, slots=True)
class GgmlBlocks:
    """The encoding of a weight in GGML blocks: `block` weights in `block_bytes` bytes each."""

    type: str
    block: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Returns the bytes of a row of `width` weights, a multiple of the block."""
        return width // self.block * self.block_bytes

    @property
    def bits(self) -> int:
        """Bits per weight, rounded down."""
        return 8 * self.block_bytes // self.block

    @property
    def decoded(self) -> DType:
        """The type it is dequantized to when no other is asked for."""
        return DType.F32

    @property
    def label(self) -> str:
        return self.type.lower()


@dataclass(frozen=True, slots=True)
class Undecoded:
    """The encoding of a weight in a format that is known by name alone: mean bits of a code, and bytes."""

    format: str
    bits: float
    nbytes: int

    @property
    def label(self) -> str:
        return f"{self.format}-{self.bits:.1f}"

    @property
    def decoded(self) -> DType:
        """The type that its own loader computes in."""
        return DType.F16


Quantized = AffineInt | AffineMin | Codebook
Encoding = Unquantized | Quantized | GgmlBlocks | Undecoded


AnyEncoding = TypeVar("AnyEncoding", bound=Encoding | None)
identity = id
"""What tells the encodings of very many tensors apart, as long as these are held: to hash one by its fields
takes as long as all else. Equal ones may have several, for they may have been made twice.
"""


def by_identity(encodings: Iterable[AnyEncoding]) -> dict[int, AnyEncoding]:
    """Encodings by their `identity`, each once, in order."""
    listed = list(encodings)
    return dict(zip(map(identity, listed), listed, strict=True))


@dataclass(frozen=True, slots=True)
class ModelTensor(Shaped):
    """A tensor of the model, however many arrays store it: name, shape as computed with, encoding.

    One that an adapter changes as it is read has the rank of what is added, 0 where the adapter replaces it;
    its encoding is an object of such tensors alone.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    adapter_rank: int | None = None

    def row_of_a_table(self) -> tuple[str, str, str]:
        """Name, shape and encoding, as tables show them."""
        return self.name, "x".join(map(str, self.shape)), self.encoding.label
