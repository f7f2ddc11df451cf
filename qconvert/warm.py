"""Runs each kind of operation of a plan once on a few zeros, so that its kernels are loaded.

numba compiles a kernel on its first call and caches it on disk; doing that before the work keeps
several threads from compiling the same kernel, and lets the caller say what the wait is for.
"""

from __future__ import annotations

from math import lcm

import numpy as np

from qconvert.ops import Surveyed
from qconvert.plan import Plan, Unit
from qconvert.tensors import (
    BlockRows,
    Blocks,
    Codebook,
    Coded,
    Dense,
    Form,
    GroupMin,
    IntAffine,
    MinAffine,
    Plain,
    Value,
)


def warm(plan: Plan) -> None:
    """Apply every distinct chain of operations of the plan to as few rows of zeros as it takes."""
    seen: set[tuple[object, ...]] = set()
    for unit in plan.units:
        kind = (unit.inputs[0].tensor.form, unit.output.form, *(type(op) for op in unit.ops))
        if unit.ops and kind not in seen:
            seen.add(kind)
            _apply(unit)


def _apply(unit: Unit) -> None:
    tensor = unit.inputs[0].tensor
    made = lcm(*(op.granule for op in unit.ops))
    value = _zeros(tensor.form, made * unit.rows // max(1, unit.output.rows), tensor.width)
    for op in unit.ops:
        settled = op.settled(op.survey(value)) if isinstance(op, Surveyed) and op.open else op
        value, _ = settled.apply(value)


def _zeros(form: Form, rows: int, width: int) -> Value:
    if isinstance(form, Plain):
        return Dense(np.zeros((rows, width), form.dtype.carrier), form.dtype)
    if isinstance(form, Blocks):
        return BlockRows(np.zeros((rows, form.row_bytes(width)), np.uint8), form)
    codes_RI = np.zeros((rows, width), np.uint8)
    scales_RG = np.zeros((rows, form.groups(width)), form.scale_dtype.carrier)
    if isinstance(form, GroupMin):
        return MinAffine(codes_RI, scales_RG, scales_RG, form)
    if isinstance(form, Codebook):
        return Coded(codes_RI, scales_RG, form, 1.0 if form.second == "divided" else None)
    zeros_RG = None if form.symmetric else np.zeros(scales_RG.shape, np.uint8)
    groups_I = np.zeros(width, np.int32) if form.act_order else None
    return IntAffine(codes_RI, scales_RG, zeros_RG, form, groups_I)
