"""Lowers every grid to one that the CPU kernels know: small whole codes or a table, and group numbers.

A `Recipe` says of a whole weight what is the same for all of its rows, and how rows of it come apart
into codes and the numbers of their groups; `packed_weights.py` packs what that gives, some rows at a time.
Legend: R rows, I columns, G groups of a row, S runs of groups that share a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.ggml_types import GGMLType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, GgmlRows, Value
from qconvert.quant.codebook import TABLES, wide, with_tensor_number
from qconvert.quant.dequantize import INT8_STEP
from qconvert.quant.ggml.block_parts import SCALES, ZEROS, Numbers, unpacked
from qconvert.quant.ggml.code_fields import read_codes
from qconvert.quant.ggml.decode import E2M1_DOUBLED, IQ4_VALUES, mxfp4_scales, nvfp4_scales
from qconvert.quant.packed_codes import codes_of

_BYTE_ZERO = 128
"""Codes of more than 6 bits become signed bytes by taking this away, and their zero moves with them."""
_HALF_MOST = 65504


@dataclass(frozen=True, slots=True)
class Levels:
    """Numbers of groups as they are kept: `stored_RG` in the carrier of `dtype`, or int8 (dtype I8) to be
    multiplied by `super_RS`, float32.
    """

    stored_RG: np.ndarray
    dtype: DType
    super_RS: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """Some rows: codes uint8 [R, I] (signed ones as their bytes), and the numbers of their groups."""

    codes_RI: np.ndarray
    scales: Levels
    mins: Levels | None = None
    zeros_RG: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What holds for all rows: see `PackedGrid`, whose fields these become. `take` lowers some rows.

    `kind` is that of the codes: `int4`, `table4`, `int6`, `int8`, `e4m3` or `e5m2`.
    """

    kind: str
    group: int
    take: Callable[[Value], Lowered]
    zero: int = 0
    table: np.ndarray | None = None
    divisor: float = 1.0
    factor: float = 1.0
    rounding: DType = DType.F32


def recipe_for(value: Value) -> Recipe | None:
    """How to lower a weight; None for numbers that are no grid, or one that the kernels cannot hold."""
    match value:
        case AffineIntRows(groups_I=None):
            return _of_integers(value)
        case AffineMinRows():
            return _of_mins(value)
        case CodebookRows():
            return _of_table(value)
        case GgmlRows():
            return _of_blocks(value)
    return None


def _of_integers(value: AffineIntRows) -> Recipe:
    encoding, middle = value.encoding, 1 << (value.encoding.bits - 1)
    symmetric, kind = value.zeros_RG is None, _kind(encoding.bits)
    shift = 0 if kind != "int8" else middle if symmetric else _BYTE_ZERO

    def take(rows: Value) -> Lowered:
        assert isinstance(rows, AffineIntRows)
        zeros_RG = None if rows.zeros_RG is None else (rows.zeros_RG.astype(np.int16) - shift).astype(np.int8)
        codes_RI = codes_of(rows) - np.uint8(shift) if shift else codes_of(rows)
        return Lowered(codes_RI, Levels(rows.scales_RG, encoding.scale_dtype), None, zeros_RG)

    group = encoding.group_size or value.width
    return Recipe(kind, group, take, middle - shift if symmetric else 0)


def _kind(bits: int) -> str:
    """The smallest kind of whole codes that holds so many bits."""
    return "int4" if bits <= 4 else "int6" if bits <= 6 else "int8"


def _of_mins(value: AffineMinRows) -> Recipe | None:
    encoding, kind = value.encoding, _kind(value.encoding.bits)
    if encoding.offset != "min" or encoding.bits < 2:
        return None  # rounded in another order
    shift = _BYTE_ZERO if kind == "int8" else 0
    if encoding.scale_dtype is DType.F16:
        scales, mins = (np.abs(x.astype(np.float32)).max(initial=0) for x in (value.scales_RG, value.mins_RG))
        if not scales * (1 << encoding.bits) + mins < _HALF_MOST:
            return None  # products of codes and scales may leave half precision

    def take(rows: Value) -> Lowered:
        assert isinstance(rows, AffineMinRows)
        scales, mins = (Levels(array, encoding.scale_dtype) for array in (rows.scales_RG, rows.mins_RG))
        return Lowered(codes_of(rows) - np.uint8(shift) if shift else codes_of(rows), scales, mins)

    return Recipe(kind, encoding.group_size, take, -shift, rounding=encoding.scale_dtype)


def _of_table(value: CodebookRows) -> Recipe | None:
    encoding, width = value.encoding, value.width
    if encoding.table == "e4m3" and bool((value.codes_RI & 0x7F == 0x7F).any()):
        return None  # NaN
    kept = DType.BF16 if encoding.scale_dtype in (DType.F8_E8M0, DType.F8_E4M3) else encoding.scale_dtype
    kept = kept if value.factor is None else DType.F32

    def take(rows: Value) -> Lowered:
        assert isinstance(rows, CodebookRows)
        scales_RG = rows.scales_RG
        if rows.factor is not None:  # rounded before they are multiplied with codes
            wide_RG = wide(scales_RG, encoding.scale_dtype)
            scales_RG = with_tensor_number(wide_RG, None, rows.factor)
        elif kept is not encoding.scale_dtype:  # bfloat16 holds both
            scales_RG = _upper(wide(scales_RG, encoding.scale_dtype))
        return Lowered(rows.codes_RI, Levels(scales_RG, kept))

    kind = {"int8": "int8", "e4m3": "e4m3", "e5m2": "e5m2"}.get(encoding.table, "table4")
    return Recipe(
        kind,
        encoding.group_size or width,
        take,
        table=TABLES[encoding.table] if kind == "table4" else None,
        divisor=1.0 if value.divisor is None else value.divisor,
        factor=float(INT8_STEP) if encoding.table == "int8" else 1.0,
    )


def _upper(numbers: np.ndarray) -> np.ndarray:
    """float32 numbers of at most 8 significant bits as bfloat16, in its carrier."""
    upper: np.ndarray = (np.ascontiguousarray(numbers).view(np.uint32) >> 16).astype(np.uint16)
    return upper


def _of_blocks(value: GgmlRows) -> Recipe | None:
    kind = GGMLType[value.encoding.type]
    if kind in (GGMLType.MXFP4, GGMLType.NVFP4):
        return _of_float_blocks(kind)
    if kind.name not in SCALES:
        return None
    probe = unpacked(kind.name, np.zeros((1, kind.block_bytes), np.uint8))
    table = IQ4_VALUES if kind in (GGMLType.IQ4_NL, GGMLType.IQ4_XS) else None
    zero = ZEROS.get(kind.name, 0)
    shift = _BYTE_ZERO if kind is GGMLType.Q8_0 else 0

    def take(rows: Value) -> Lowered:
        assert isinstance(rows, GgmlRows)
        parts = unpacked(kind.name, np.ascontiguousarray(rows.bytes_RB).reshape(-1, kind.block_bytes))
        codes_RI = parts.codes_NI.reshape(rows.rows, -1)
        mins = None if parts.mins is None else _by_rows(parts.mins, rows.rows)
        return Lowered(
            codes_RI - np.uint8(shift) if shift else codes_RI, _by_rows(parts.scales, rows.rows), mins
        )

    group = kind.block // probe.scales.stored_NG.shape[1]
    bits = {"Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}.get(kind.name, 4)
    return Recipe(_kind(bits) if table is None else "table4", group, take, zero - shift, table)


def _by_rows(numbers: Numbers, rows: int) -> Levels:
    stored_RG = numbers.stored_NG.reshape(rows, -1)
    if numbers.super_N is None:
        return Levels(stored_RG, DType.F16)
    return Levels(stored_RG, DType.I8, numbers.super_N.reshape(rows, -1))


def _of_float_blocks(kind: GGMLType) -> Recipe:
    """MXFP4 and NVFP4: E2M1, its numbers doubled and the scales halved."""
    heads, scales = (1, mxfp4_scales) if kind is GGMLType.MXFP4 else (4, nvfp4_scales)

    def take(rows: Value) -> Lowered:
        assert isinstance(rows, GgmlRows)
        blocks = np.ascontiguousarray(rows.bytes_RB).reshape(-1, kind.block_bytes)
        codes_RI = read_codes(kind.name, blocks).reshape(rows.rows, -1)
        stored_RG = _upper(scales(blocks[:, :heads])).reshape(rows.rows, -1)
        return Lowered(codes_RI, Levels(stored_RG, DType.BF16))

    return Recipe("table4", kind.block // heads, take, table=E2M1_DOUBLED)
