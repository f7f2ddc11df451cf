"""Random values of every encoding, for laws that hold of all of them."""

from __future__ import annotations

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, GgmlBlocks, Unquantized
from qconvert.core.ggml_types import GRIDS, GGMLType
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.ops import Op
from qconvert.quant.casts import cast
from qconvert.quant.codebook import TABLES
from qconvert.quant.dequantize import numbers
from qconvert.quant.ggml import encode_rows

WIDTH = 256


def blocks(name: str) -> GgmlBlocks:
    kind = GGMLType[name]
    return GgmlBlocks(name, kind.block, kind.block_bytes)


# Every kind of encoding that a checkpoint may hold, on rows of 256 columns.
ENCODINGS: tuple[Encoding, ...] = (
    *(Unquantized(dtype) for dtype in (DType.F32, DType.F16, DType.BF16, DType.F64)),
    *(AffineInt(bits, 32, True, DType.BF16) for bits in range(2, 9)),
    AffineInt(4, 64, False, DType.F16),
    AffineInt(3, None, False, DType.F32),
    AffineInt(4, 32, True, DType.F16, signless_zero=True),
    AffineInt(4, 32, False, DType.F16, act_order=True),
    AffineInt(8, None, True, DType.F32),
    AffineMin(4, 32, DType.BF16),
    AffineMin(2, 16, DType.F32),
    *(Codebook(table, 64, DType.F32, DType.BF16) for table in ("nf4", "fp4")),
    Codebook("nf4", 64, DType.F32, DType.BF16, second="nested"),
    Codebook("int8", None, DType.F32, DType.F16),
    Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=4),
    Codebook("e4m3", None, DType.BF16, DType.BF16),
    Codebook("e5m2", None, DType.F32, DType.BF16, group_rows=None),
    Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16),
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16),
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided"),
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="multiplied"),
    *(blocks(name) for name in GRIDS),
)


def as_type(numbers_RI: np.ndarray, dtype: DType) -> np.ndarray:
    """Numbers rounded to a float type, in its carrier."""
    return cast(DenseRows(numbers_RI.astype(np.float64), DType.F64), dtype)[0].rows_RI


def value_of(encoding: Encoding, rows: int = 8, width: int = WIDTH, seed: int = 0) -> Value:
    """Random rows of an encoding: every code may occur, scales differ, and all numbers are finite."""
    random = np.random.default_rng(seed)
    if isinstance(encoding, Unquantized):
        return DenseRows(as_type(random.standard_normal((rows, width)), encoding.dtype), encoding.dtype)
    if isinstance(encoding, GgmlBlocks) and encoding.type == "NVFP4":  # not encoded from numbers
        bytes_RNb = random.integers(0, 256, (rows, width // 64, 36), np.uint8)
        bytes_RNb[..., :4] = random.integers(0x20, 0x7F, (rows, width // 64, 4), np.uint8)
        return GgmlRows(bytes_RNb.reshape(rows, -1), encoding)
    if isinstance(encoding, GgmlBlocks):
        plain = DenseRows(random.standard_normal((rows, width), np.float32), DType.F32)
        return GgmlRows(encode_rows(plain, encoding.type), encoding)
    groups = encoding.groups(width)
    codes_RI = random.integers(0, 1 << encoding.bits, (rows, width), np.uint8)
    scales_RG = _scales(encoding, random, rows, groups)
    if isinstance(encoding, Codebook):
        codes_RI[~np.isfinite(TABLES[encoding.table][codes_RI])] = 0
        number = float(np.float32(random.uniform(1, 1000))) if encoding.has_tensor_number else None
        if number and encoding.second == "multiplied":
            return CodebookRows(codes_RI, scales_RG, encoding, factor=float(np.float32(1 / number)))
        return CodebookRows(codes_RI, scales_RG, encoding, number)
    if isinstance(encoding, AffineMin):
        mins_RG = as_type(random.uniform(-2, 0.5, (rows, groups)), encoding.scale_dtype)
        return AffineMinRows(codes_RI, scales_RG, mins_RG, encoding)
    zeros_RG = random.integers(0, 1 << encoding.bits, (rows, groups), np.uint8)
    order_I = None
    if encoding.act_order:
        order_I = random.permutation(np.arange(width) // (encoding.group_size or width)).astype(np.int32)
    return AffineIntRows(codes_RI, scales_RG, None if encoding.symmetric else zeros_RG, encoding, order_I)


def _scales(
    encoding: AffineInt | AffineMin | Codebook, random: np.random.Generator, rows: int, groups: int
) -> np.ndarray:
    if encoding.scale_dtype is DType.F8_E8M0:
        return random.integers(118, 136, (rows, groups), np.uint8)
    if encoding.scale_dtype is DType.F8_E4M3:
        return random.integers(0x20, 0x7F, (rows, groups), np.uint8)
    scales_RG = random.uniform(0.01, 0.1, (rows, groups))
    if isinstance(encoding, Codebook) and encoding.group_rows != 1:
        per = encoding.group_rows or rows
        scales_RG = np.repeat(scales_RG[::per], per, axis=0)[:rows]
    return as_type(scales_RG, encoding.scale_dtype)


def encoding_of(value: Value) -> Encoding:
    return Unquantized(value.dtype) if isinstance(value, DenseRows) else value.encoding


def decoded(value: Value) -> np.ndarray:
    """The numbers of a value, float32."""
    return numbers(value, DType.F32).rows_RI


def applied(op: Op, value: Value) -> Value:
    """What an operation makes of a whole tensor, which it sees first where it needs to."""
    if op.needs_reduction:
        op = op.finalize(op.reduce(value))
    return op.apply(value)[0]


def same(a: Value, b: Value) -> bool:
    """Whether two values are equal to the bit."""
    if type(a) is not type(b) or encoding_of(a) != encoding_of(b) or len(a.arrays) != len(b.arrays):
        return False
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(a.arrays, b.arrays, strict=True)
    )
