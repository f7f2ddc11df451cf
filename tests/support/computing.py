"""Plans carried out in memory, tensor by tensor, without files, blocks or threads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qconvert.core.values import Value
from qconvert.models import Binding
from qconvert.plan.plan import Plan, RowSlice, Unit
from qconvert.quant.zero_padding import zero_rows
from tests.support.values import decoded, value_of

Values = Mapping[str, Value]


def random_values(binding: Binding) -> dict[str, Value]:
    """Random rows for every stored tensor, others for each."""
    tensors = binding.tensors.items()
    return {n: value_of(t.encoding, t.rows, t.width, seed=i) for i, (n, t) in enumerate(tensors)}


def _rows(piece: RowSlice, values: Values) -> Value:
    whole = values[piece.tensor.name]
    if piece.zeros_like is not None:
        row = whole.with_arrays(tuple(a[piece.zeros_like : piece.zeros_like + 1] for a in whole.arrays))
        return zero_rows(row, piece.rows)
    return whole.with_arrays(tuple(a[piece.start : piece.stop : piece.step] for a in whole.arrays))


def computed(unit: Unit, values: Values) -> Value:
    """What a unit makes of the source's values."""
    parts = [_rows(piece, values) for piece in unit.inputs]
    columns = zip(*(part.arrays for part in parts), strict=True)
    value = parts[0].with_arrays(tuple(np.concatenate(kind) for kind in columns))
    for op in unit.ops:
        ready = op.finalize(op.reduce(value)) if op.needs_reduction else op
        value, _ = ready.apply(value)
    return value


def outputs_of(plan: Plan, values: Values) -> dict[str, Value]:
    """Every tensor of the output."""
    return {unit.output.name: computed(unit, values) for unit in plan.units}


def numbers_of(plan: Plan, values: Values) -> dict[str, np.ndarray]:
    """The numbers of every tensor of the output, float32."""
    return {name: decoded(value) for name, value in outputs_of(plan, values).items()}
