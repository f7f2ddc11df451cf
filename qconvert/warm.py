"""Runs each kind of operation of a plan once on a few zeros, so that its kernels are loaded.

numba compiles a kernel on its first call and caches it on disk; doing that before the work keeps
several threads from compiling the same kernel, and lets the caller say what the wait is for.
"""

from __future__ import annotations

from math import lcm

import numpy as np

from qconvert.plan import Plan, Unit
from qconvert.tensors import BlockRows, Dense, Form, GroupInt, IntAffine, Plain, Value


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
    value = _zeros(tensor.form, lcm(*(op.granule for op in unit.ops)), tensor.width)
    for op in unit.ops:
        value, _ = op.apply(value)


def _zeros(form: Form, rows: int, width: int) -> Value:
    if isinstance(form, Plain):
        return Dense(np.zeros((rows, width), form.dtype.carrier), form.dtype)
    if isinstance(form, GroupInt):
        groups = (rows, form.groups(width))
        zeros_RG = None if form.symmetric else np.zeros(groups, np.uint8)
        codes_RI = np.zeros((rows, width), np.uint8)
        return IntAffine(codes_RI, np.zeros(groups, form.scale_dtype.carrier), zeros_RG, form)
    return BlockRows(np.zeros((rows, form.row_bytes(width)), np.uint8), form)
