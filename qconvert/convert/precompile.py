"""Runs each kind of operation of a plan once on a few zeros, so that its kernels are loaded.

numba compiles a kernel on its first call and caches it on disk; doing that before the work keeps
several threads from compiling the same kernel, and lets the caller say what the wait is for.
"""

from __future__ import annotations

from math import lcm

import numpy as np

from qconvert.core.encodings import AffineMin, Codebook, Encoding, GgmlBlocks, Unquantized
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, GgmlRows, Value
from qconvert.plan.plan import Plan, Unit


def warm(plan: Plan) -> None:
    """Apply every distinct chain of operations of the plan to as few rows of zeros as it takes."""
    seen: set[tuple[object, ...]] = set()
    for unit in plan.units:
        kind = (unit.inputs[0].tensor.encoding, unit.output.encoding, *(type(op) for op in unit.ops))
        if unit.ops and kind not in seen:
            seen.add(kind)
            _apply(unit)


def _apply(unit: Unit) -> None:
    tensor = unit.inputs[0].tensor
    made = lcm(*(op.granule for op in unit.ops))
    value = _zeros(tensor.encoding, made * unit.rows // max(1, unit.output.rows), tensor.width)
    for op in unit.ops:
        ready = op.finalize(op.reduce(value)) if op.needs_reduction else op
        weighted = op.quantizes and bool(unit.statistics)
        ones_I = np.ones(value.width, np.float32)
        value, _ = ready.apply(value, (RowStatistics(0, value.rows, ones_I),) if weighted else ())


def _zeros(encoding: Encoding, rows: int, width: int) -> Value:
    if isinstance(encoding, Unquantized):
        return DenseRows(np.zeros((rows, width), encoding.dtype.carrier), encoding.dtype)
    if isinstance(encoding, GgmlBlocks):
        return GgmlRows(np.zeros((rows, encoding.row_bytes(width)), np.uint8), encoding)
    codes_RI = np.zeros((rows, width), np.uint8)
    scales_RG = np.zeros((rows, encoding.groups(width)), encoding.scale_dtype.carrier)
    if isinstance(encoding, AffineMin):
        return AffineMinRows(codes_RI, scales_RG, scales_RG, encoding)
    if isinstance(encoding, Codebook):
        return CodebookRows(codes_RI, scales_RG, encoding, 1.0 if encoding.second == "divided" else None)
    zeros_RG = None if encoding.symmetric else np.zeros(scales_RG.shape, np.uint8)
    groups_I = np.zeros(width, np.int32) if encoding.act_order else None
    return AffineIntRows(codes_RI, scales_RG, zeros_RG, encoding, groups_I)
