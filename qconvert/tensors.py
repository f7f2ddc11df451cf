"""Names for what moves through a conversion: dtypes, tensor specs, logical tensors, values.

A *spec* describes an array as a file stores it. A *logical tensor* is what a model layer holds
(one weight), whatever the number of arrays it is spelled as; its *form* says how its numbers are
represented. A *value* is a run of rows of a logical tensor, in memory.

Rows: every tensor is cut along its leading dimensions. A tensor of two or more dimensions is seen
as `[prod(shape[:-1]), shape[-1]]`; a vector of n elements as `[n, 1]`; a scalar as `[1, 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any

from qconvert.codes import packed, unpacked, width_of_codes

if TYPE_CHECKING:
    import numpy as np


Json = dict[str, Any]


class DType(Enum):
    """An element type: safetensors code, bits per element, and the numpy type that carries it.

    Types numpy does not have travel as unsigned integers of the same width (BF16 as uint16, the
    8-bit floats as uint8); only the kernels in `quant/` read them as numbers.
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

    @property
    def nbytes(self) -> int:
        """Bytes per element."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether a weight may be stored in it as it is (16, 32 or 64 bits, floating point)."""
        return self in FLOAT_DTYPES

    @property
    def label(self) -> str:
        """The short lower-case name that users read and type: `bf16`, `f32`, `i8`."""
        return self.code.lower()


FLOAT_DTYPES = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
DTYPE_BY_CODE: Mapping[str, DType] = {dtype.code: dtype for dtype in DType}


def rows_of(shape: tuple[int, ...]) -> int:
    """The number of rows of a tensor of this shape (see the module's docstring)."""
    if len(shape) >= 2:
        return prod(shape[:-1])
    return shape[0] if shape else 1


def width_of(shape: tuple[int, ...]) -> int:
    """The number of elements in one row of a tensor of this shape."""
    return shape[-1] if len(shape) >= 2 else 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One array as a file stores it: its name, element type and shape."""

    name: str
    dtype: DType
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

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.nbytes


@dataclass(frozen=True, slots=True)
class Plain:
    """The form of a tensor stored as its own numbers."""

    dtype: DType

    @property
    def label(self) -> str:
        return self.dtype.label


@dataclass(frozen=True, slots=True)
class GroupInt:
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
class GroupMin:
    """The form of a weight on the grid `w = code * scale + min`, codes unsigned, of 2 to 8 bits.

    Its mins are numbers of `scale_dtype`, not codes, so it is finer than `GroupInt`: every grid of
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
class Blocks:
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


Quantized = GroupInt | GroupMin | Codebook
Form = Plain | Quantized | Blocks


@dataclass(frozen=True, slots=True)
class Logical:
    """A tensor of the model, however many arrays spell it: name, shape as computed with, form."""

    name: str
    shape: tuple[int, ...]
    form: Form

    @property
    def rows(self) -> int:
        return rows_of(self.shape)

    @property
    def width(self) -> int:
        return width_of(self.shape)

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Dense:
    """Rows of numbers: `rows_RI` [rows, width] in the carrier type of `dtype`."""

    rows_RI: np.ndarray
    dtype: DType

    @property
    def rows(self) -> int:
        return int(self.rows_RI.shape[0])

    @property
    def width(self) -> int:
        """The number of weights in a row (so for every kind of value)."""
        return int(self.rows_RI.shape[1])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that are cut by rows, the main one first (so for every kind of value)."""
        return (self.rows_RI,)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> Dense:
        """This value with other rows (so for every kind of value)."""
        return Dense(arrays[0], self.dtype)


@dataclass(frozen=True, slots=True)
class IntAffine:
    """Rows of a group-quantized weight on the grid `(codes - zeros) * scales`.

    codes_RX are the codes, packed or not (see `codes`); scales_RG [rows, groups] in the carrier type of
    `form.scale_dtype`; zeros_RG uint8 [rows, groups], None exactly when the form is symmetric;
    groups_I int32 [width], the group of every column, None unless the form is in activation order.
    """

    codes_RX: np.ndarray
    scales_RG: np.ndarray
    zeros_RG: np.ndarray | None
    form: GroupInt
    groups_I: np.ndarray | None = None

    @property
    def codes_RI(self) -> np.ndarray:
        """The codes, uint8 [rows, width]."""
        return unpacked(self.codes_RX, self.form.bits)

    @property
    def words_RW(self) -> np.ndarray:
        """The codes as a stream, int32 [rows, ceil(width * bits / 32)]."""
        return packed(self.codes_RX, self.form.bits)

    @property
    def rows(self) -> int:
        return int(self.codes_RX.shape[0])

    @property
    def width(self) -> int:
        return width_of_codes(self.codes_RX, self.form.bits)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        both = (self.codes_RX, self.scales_RG)
        return both if self.zeros_RG is None else (*both, self.zeros_RG)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> IntAffine:
        zeros_RG = arrays[2] if len(arrays) == 3 else None
        return IntAffine(arrays[0], arrays[1], zeros_RG, self.form, self.groups_I)


@dataclass(frozen=True, slots=True)
class MinAffine:
    """Rows of a weight on the grid `codes * scales + mins`.

    codes_RX are the codes, packed or not (see `codes`); scales_RG and mins_RG [rows, groups] in the
    carrier type of `form.scale_dtype`.
    """

    codes_RX: np.ndarray
    scales_RG: np.ndarray
    mins_RG: np.ndarray
    form: GroupMin

    @property
    def codes_RI(self) -> np.ndarray:
        """The codes, uint8 [rows, width]."""
        return unpacked(self.codes_RX, self.form.bits)

    @property
    def words_RW(self) -> np.ndarray:
        """The codes as a stream, int32 [rows, ceil(width * bits / 32)]."""
        return packed(self.codes_RX, self.form.bits)

    @property
    def rows(self) -> int:
        return int(self.codes_RX.shape[0])

    @property
    def width(self) -> int:
        return width_of_codes(self.codes_RX, self.form.bits)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.codes_RX, self.scales_RG, self.mins_RG

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> MinAffine:
        return MinAffine(arrays[0], arrays[1], arrays[2], self.form)


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales as bitsandbytes nests them: `quant.nested.TABLE[codes] * upper + offset`.

    codes_RG uint8 [rows, groups]; upper_B float32, one for every 256 of the flat codes.
    """

    codes_RG: np.ndarray
    upper_B: np.ndarray
    offset: float


@dataclass(frozen=True, slots=True)
class Coded:
    """Rows of a weight as codes of a table: `table[codes] * scales`.

    codes_RI uint8 [rows, width]; scales_RG [rows, groups] in the carrier type of
    `form.scale_dtype`, also where one scale serves several rows. Nested scales come resolved, as
    float32, and as `nested` where they are about to be written; `divisor` is the float32 by which
    `divided` ones are divided.
    """

    codes_RI: np.ndarray
    scales_RG: np.ndarray
    form: Codebook
    divisor: float | None = None
    nested: Nested | None = None

    @property
    def rows(self) -> int:
        return int(self.codes_RI.shape[0])

    @property
    def width(self) -> int:
        return int(self.codes_RI.shape[1])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.codes_RI, self.scales_RG

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> Coded:
        return Coded(arrays[0], arrays[1], self.form, self.divisor)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of GGML blocks as they are stored: `bytes_RB` uint8 [rows, form.row_bytes(width)]."""

    bytes_RB: np.ndarray
    form: Blocks

    @property
    def rows(self) -> int:
        return int(self.bytes_RB.shape[0])

    @property
    def width(self) -> int:
        return int(self.bytes_RB.shape[1]) // self.form.block_bytes * self.form.block

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.bytes_RB,)

    def with_arrays(self, arrays: tuple[np.ndarray, ...]) -> BlockRows:
        return BlockRows(arrays[0], self.form)


Value = Dense | IntAffine | MinAffine | Coded | BlockRows
