"""Defines encodings: how the numbers of a tensor are represented, without the numbers themselves.

An encoding is plain numbers (`Unquantized`), integer codes with a scale and a zero point (`AffineInt`) or
a scale and a minimum (`AffineMin`), codes of a table (`Codebook`), or blocks of GGML (`GgmlBlocks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qconvert.core.dtypes import DType, rows_of, width_of


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The form of a tensor stored as its own numbers."""

    dtype: DType

    @property
    def label(self) -> str:
        return self.dtype.label


@dataclass(frozen=True, slots=True)
class AffineInt:
    """The form of a group-quantized weight: `w = (code - zero) * scale`, codes unsigned.

    `bits` is 2 to 8; `group_size` the number of consecutive input columns that share one scale,
    None for one scale per row ("channel"). A symmetric grid has no stored zeros: its zero is
    `2**(bits-1)`. `scale_dtype` is the type the scales are stored in. With `act_order` the columns
    of a group are not consecutive: the value brings the group of every column. Scales may be negative;
    `signless_zero` says that the format's tools compute such a group's zeros as +0, not as -0.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    scale_dtype: DType
    act_order: bool = False
    signless_zero: bool = False

    def groups(self, width: int) -> int:
        """The number of groups in a row of `width` columns, which the group size must divide."""
        return 1 if self.group_size is None else width // self.group_size

    def nbytes(self, shape: tuple[int, ...]) -> float:
        """Bytes of codes, scales and zeros for a weight of this shape, without padding."""
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
        """The type its numbers are computed to when no other is asked for."""
        return self.scale_dtype


def _group(size: int | None) -> str:
    return "channel" if size is None else f"g{size}"


@dataclass(frozen=True, slots=True)
class AffineMin:
    """The form of a weight on the grid `w = code * scale + min`, codes unsigned, of 2 to 8 bits.

    Its mins are numbers of `scale_dtype`, not codes, so it is finer than `AffineInt`: every grid of
    integer zeros has a counterpart here (`min = -zero * scale`, rounded), not the other way round.
    """

    bits: int
    group_size: int
    scale_dtype: DType

    def groups(self, width: int) -> int:
        return width // self.group_size

    @property
    def label(self) -> str:
        return f"min{self.bits}-g{self.group_size}"

    @property
    def decoded(self) -> DType:
        return self.scale_dtype


@dataclass(frozen=True, slots=True)
class Codebook:
    """The form of a weight whose codes stand for the numbers of a table: `w = table[code] * scale`.

    `table` names one of `quant.codebook.TABLES`: the floats of 4 and 8 bits (`e2m1`, `e4m3`,
    `e5m2`), and bitsandbytes' `nf4`, `fp4` and `int8`. One scale serves `group_size` columns (None: all) of
    `group_rows` rows (None: all); `scale_dtype` may itself be an 8-bit float. Scales of two levels
    have a `second` one: `nested` ones are 8-bit codes of a table of their own, `divided` ones are
    divided by one float32 per tensor. `decoded` is the type that the checkpoint computes in.
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
        """The number of scales that a row of `width` columns has (the last may serve fewer)."""
        return 1 if self.group_size is None else -(-width // self.group_size)

    def scale_rows(self, rows: int) -> int:
        """The number of rows of scales that serve `rows` rows."""
        return 1 if self.group_rows is None else -(-rows // self.group_rows)

    @property
    def is_mxfp4(self) -> bool:
        """Whether it is MXFP4 (OCP Microscaling): 32 codes of E2M1 to a power of two."""
        grid = (self.table, self.group_size, self.group_rows, self.scale_dtype, self.second)
        return grid == ("e2m1", 32, 1, DType.F8_E8M0, None)

    @property
    def is_nvfp4(self) -> bool:
        """Whether it is NVFP4, 16 codes of E2M1 to a number of E4M3; `second` says what divides these."""
        grid = (self.table, self.group_size, self.group_rows, self.scale_dtype)
        return grid == ("e2m1", 16, 1, DType.F8_E4M3)

    @property
    def label(self) -> str:
        rows = {1: "", None: "-tensor"}.get(self.group_rows, f"x{self.group_rows}")
        group = "" if rows == "-tensor" else f"-{_group(self.group_size)}"
        return f"{self.table}{group}{rows}{f'-{self.second}' if self.second else ''}"


@dataclass(frozen=True, slots=True)
class GgmlBlocks:
    """The form of a weight stored as GGML blocks: `block` weights in `block_bytes` bytes each."""

    type: str
    block: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` weights, which the block must divide."""
        return width // self.block * self.block_bytes

    @property
    def bits(self) -> int:
        """Whole bits per weight."""
        return 8 * self.block_bytes // self.block

    @property
    def decoded(self) -> DType:
        """The type its numbers are computed to when no other is asked for."""
        return DType.F32

    @property
    def label(self) -> str:
        return self.type.lower()


Quantized = AffineInt | AffineMin | Codebook
Encoding = Unquantized | Quantized | GgmlBlocks


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of the model, however many arrays spell it: name, shape as computed with, form."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def rows(self) -> int:
        return rows_of(self.shape)

    @property
    def width(self) -> int:
        return width_of(self.shape)

    @property
    def count(self) -> int:
        return prod(self.shape)
