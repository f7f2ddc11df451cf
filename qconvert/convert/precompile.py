"""Runs each kind of operation of a plan once on a few zeros, so that its kernels are loaded.

numba compiles a kernel on its first call and caches it on disk; doing that before the work keeps
several threads from compiling the same kernel, and lets the caller say what the wait is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from math import lcm

import numpy as np

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineMin, Codebook, Encoding, GgmlBlocks, Undecoded, Unquantized
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.formats.io.local_file import octets
from qconvert.plan.plan import Plan, Unit
from qconvert.quant.casts import cast

# Numbers that a chain of operations is tried on: some hundred groups.
_SEEDED_WEIGHTS = 1 << 14


def warm(plan: Plan) -> None:
    """Apply every distinct chain of operations of the plan to as few rows of zeros as it takes."""
    for unit in _chains(plan):
        _applied(unit, _zeros(unit.source.encoding, _fewest_rows(unit), unit.source.width))


def fingerprint(plan: Plan) -> str:
    """The SHA-256, in hexadecimal, of what the plan's operations make of numbers that are always the same.

    Where it differs, another machine or another version of a library computes other numbers.
    """
    digest = sha256()
    for number, unit in enumerate(_chains(plan)):
        rows, width = _fewest_rows(unit), unit.source.width
        rows *= max(1, _SEEDED_WEIGHTS // max(1, rows * width))
        value = _seeded(unit.source.encoding, rows, width, np.random.default_rng(number))
        for array in _applied(unit, value).arrays:
            digest.update(octets(np.ascontiguousarray(array)))
    return digest.hexdigest()


def _chains(plan: Plan) -> Iterator[Unit]:
    """One unit of each chain of operations."""
    seen: set[tuple[object, ...]] = set()
    for unit, _ in plan.kinds:
        kind = (unit.source.encoding, unit.output.encoding, *(type(op) for op in unit.ops))
        if unit.ops and kind not in seen:
            seen.add(kind)
            yield unit


def _fewest_rows(unit: Unit) -> int:
    made = lcm(*(op.granule for op in unit.ops))
    return made * unit.rows // max(1, unit.output.rows)


def _applied(unit: Unit, value: Value) -> Value:
    for op in unit.ops:
        ready = op.finalize(op.reduce(value)) if op.needs_reduction else op
        weighted = op.quantizes and bool(unit.statistics)
        ones_I = np.ones(value.width, np.float32)
        value, _ = ready.apply(value, (RowStatistics(0, value.rows, ones_I),) if weighted else ())
    return value


def _seeded(encoding: Encoding, rows: int, width: int, rng: np.random.Generator) -> Value:
    """Numbers like weights; of what is quantized, any codes, and finite positive scales."""
    if isinstance(encoding, Unquantized) and encoding.dtype in (DType.F32, DType.F16, DType.BF16):
        dense = DenseRows(rng.normal(0, 0.02, (rows, width)).astype(np.float32), DType.F32)
        return cast(dense, encoding.dtype)[0]
    value = _zeros(encoding, rows, width)
    if isinstance(encoding, Unquantized):
        return value
    for array in value.arrays:
        # In any type of floating point, these bits are the pattern of a finite positive number.
        array.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, np.uint8) & 0x3B
    codes = [] if isinstance(encoding, GgmlBlocks) else [value.arrays[0]]
    if isinstance(value, AffineIntRows) and value.zeros_RG is not None:
        codes.append(value.zeros_RG)
    assert not isinstance(encoding, Undecoded), "opened only to be inspected"
    for array in codes:
        array[:] = rng.integers(0, 1 << encoding.bits, array.shape)
    return value


def _zeros(encoding: Encoding, rows: int, width: int) -> Value:
    if isinstance(encoding, Unquantized):
        return DenseRows(np.zeros((rows, width), encoding.dtype.carrier), encoding.dtype)
    if isinstance(encoding, GgmlBlocks):
        return GgmlRows(np.zeros((rows, encoding.row_bytes(width)), np.uint8), encoding)
    assert not isinstance(encoding, Undecoded), "opened only to be inspected"
    codes_RI = np.zeros((rows, width), np.uint8)
    scales_RG = np.zeros((rows, encoding.groups(width)), encoding.scale_dtype.carrier)
    if isinstance(encoding, AffineMin):
        return AffineMinRows(codes_RI, scales_RG, scales_RG, encoding)
    if isinstance(encoding, Codebook):
        divisor, factor = (1.0 if encoding.second == each else None for each in ("divided", "multiplied"))
        return CodebookRows(codes_RI, scales_RG, encoding, divisor, factor=factor)
    zeros_RG = None if encoding.symmetric else np.zeros(scales_RG.shape, np.uint8)
    groups_I = np.zeros(width, np.int32) if encoding.act_order else None
    return AffineIntRows(codes_RI, scales_RG, zeros_RG, encoding, groups_I)
