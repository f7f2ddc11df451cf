"""Counts the parameters of a model by role: the table that `inspect` and every dry run print.

Works on names, shapes and encodings alone: from a bare config.json, from headers, or from a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter

from qconvert.core.dtypes import Json, rows_of, width_of
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Codebook,
    Encoding,
    GgmlBlocks,
    ModelTensor,
    Undecoded,
    Unquantized,
    by_identity,
    identity,
)
from qconvert.core.layout_traits import NO_LAYOUT, LayoutTraits
from qconvert.models import Architecture, Binding, Parameter
from qconvert.models.expanded import group_of

_NORMS = "norms"
_BIASES = "biases"
_UNKNOWN = "unknown"
# Single numbers beside the weights that scale inputs or caches; no parameters.
_SCALES = "scales"
_VISION = "vision"
# The kind of what is no parameter of the language model.
_OTHER = ""
_ROLE_AND_KIND = attrgetter("role", "kind")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bits_per_weight` counts scales and zeros; None without an encoding."""

    role: str
    tensors: int
    parameters: int
    shapes: tuple[tuple[int, ...], ...]
    encodings: tuple[str, ...]
    nbytes: int

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.nbytes / self.parameters if self.parameters and self.encodings else None


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Rows by role, and their totals; a tied head counts once."""

    rows: tuple[Row, ...]

    @property
    def tensors(self) -> int:
        return sum(row.tensors for row in self.rows)

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.parameters if self.parameters else 0.0

    def to_json(self) -> Json:
        """The table as plain data; numbers are exact, sizes in bytes."""
        rows = [
            {
                "role": row.role,
                "tensors": row.tensors,
                "parameters": row.parameters,
                "shapes": [list(shape) for shape in row.shapes],
                "forms": list(row.encodings),
                "bytes": row.nbytes,
                "bits_per_weight": row.bits_per_weight,
            }
            for row in self.rows
        ]
        return {"rows": rows, "tensors": self.tensors, "parameters": self.parameters, "bytes": self.nbytes}


def form_bytes(encoding: Encoding, shape: tuple[int, ...], layout: LayoutTraits = NO_LAYOUT) -> int:
    """Bytes of a tensor of this shape in this encoding; the few bytes of a stored shape not counted.

    `layout` is the one that it is stored in, where that is known: some store what others leave out.
    """
    if isinstance(encoding, Unquantized):
        return prod(shape) * encoding.dtype.nbytes
    if isinstance(encoding, GgmlBlocks):
        return rows_of(shape) * encoding.row_bytes(width_of(shape))
    if isinstance(encoding, Undecoded):
        return encoding.nbytes
    rows, groups = rows_of(shape), encoding.groups(width_of(shape))
    if isinstance(encoding, Codebook):
        scale_bytes = 1 if encoding.second == "nested" else encoding.scale_dtype.nbytes
        return (
            rows * -(-width_of(shape) * encoding.bits // 8) + encoding.scale_rows(rows) * groups * scale_bytes
        )
    if isinstance(encoding, AffineInt):
        return _integer_bytes(encoding, shape, layout)
    words = -(-width_of(shape) * encoding.bits // 32)
    codes = _folded_bytes(encoding, prod(shape), layout) if layout.folds else rows * 4 * words
    return codes + 2 * rows * groups * encoding.scale_dtype.nbytes // encoding.shared_rows


def _integer_bytes(encoding: AffineInt, shape: tuple[int, ...], layout: LayoutTraits) -> int:
    """Bytes of integers: packed in words, or, where a layout packs none, a byte for each number."""
    rows, width, groups = rows_of(shape), width_of(shape), encoding.groups(width_of(shape))
    stored = layout.symmetric_zeros or not encoding.symmetric
    scales, columns = groups * encoding.scale_dtype.nbytes, 4 * width if layout.act_order else 0
    if layout.packs == "no":
        return rows * (width + scales + groups * stored) + columns
    zeros = -(-rows * encoding.bits // 32) * 4 * groups if stored else 0
    return rows * (4 * -(-width * encoding.bits // 32) + scales) + zeros + columns


def _folded_bytes(encoding: AffineMin, count: int, layout: LayoutTraits) -> int:
    """Bytes of so many codes in a layout that interleaves groups of them in words."""
    folded, word = next((folded, word) for bits, folded, word in layout.folds if bits == encoding.bits)
    columns = encoding.group_size if encoding.shared_rows == 1 else count // encoding.shared_rows
    return -(-(count // columns) // folded) * columns * word


def census_of_config(architecture: Architecture) -> ParameterTable:
    """The table of the model that config.json describes, without any weights: its tower is one row."""
    tower = architecture.tower
    seen = tower.stored.values() if tower is not None else ()
    parameters = list(architecture.stored.values())
    roles = [*map(_ROLE_AND_KIND, parameters), *((_VISION, _OTHER) for _ in seen)]
    shapes = [parameter.shape for parameter in (*parameters, *seen)]
    return _gather(architecture, roles, shapes, [None] * len(roles))


def table_of_tensors(
    tensors: Mapping[str, ModelTensor], binding: Binding, layout: LayoutTraits = NO_LAYOUT
) -> ParameterTable:
    """The table of tensors stored in a layout, without recomputed buffers.

    A stored head of a tied model takes bytes, but adds no parameters.
    """
    dropped = frozenset(binding.dropped)
    kept = {name: t for name, t in tensors.items() if name not in dropped} if dropped else tensors
    parameter_table = table_of_outputs(kept, binding.architecture, layout)
    if binding.stored_tied_head is None:
        return parameter_table
    return ParameterTable(
        tuple(replace(row, parameters=0) if row.role == "lm_head" else row for row in parameter_table.rows)
    )


def table_of_outputs(
    outputs: Mapping[str, ModelTensor], architecture: Architecture, layout: LayoutTraits = NO_LAYOUT
) -> ParameterTable:
    """The table of a plan's outputs, written in a layout."""

    parameters = list(architecture.parameters_in(outputs))

    def alike(name: str, parameter: Parameter | None) -> tuple[str, str]:
        if parameter is not None:
            return parameter.role, parameter.kind
        single = name.endswith("_scale") and prod(outputs[name].shape) == 1
        return _SCALES if single else architecture.carries(name) or _UNKNOWN, _OTHER

    roles = map(alike, outputs, parameters) if None in parameters else map(_ROLE_AND_KIND, parameters)
    shapes = [tensor.shape for tensor in outputs.values()]
    return _gather(architecture, roles, shapes, [tensor.encoding for tensor in outputs.values()], layout)


def _gather(
    architecture: Architecture,
    roles: Iterable[tuple[str, str]],
    shapes: Iterable[tuple[int, ...]],
    encodings: Sequence[Encoding | None],
    layout: LayoutTraits = NO_LAYOUT,
) -> ParameterTable:
    """Group columns of tensors in the order of the model's structure; norms, biases, unknown last."""
    order = {role: i for i, role in enumerate(architecture.roles_in_order)}
    known = by_identity(encodings)
    counts = Counter(zip(roles, shapes, map(identity, encodings), strict=True))
    groups: dict[str, _Alike] = {}
    for ((role, kind), shape, number), many in counts.items():
        groups.setdefault(_group(role, kind), Counter())[shape, known[number]] += many
    ordered = sorted(groups, key=lambda group: order.get(group, len(order) + len(group)))
    return ParameterTable(tuple(_row(group, groups[group], layout) for group in ordered))


def _group(role: str, kind: str) -> str:
    return {"bias": _BIASES, "norm": _NORMS, _OTHER: role}.get(kind) or group_of(role)


_Alike = Counter[tuple[tuple[int, ...], Encoding | None]]
"""How many tensors of a role have a shape and an encoding: there are few kinds, and very many tensors."""


def _row(role: str, alike: _Alike, layout: LayoutTraits) -> Row:
    return Row(
        role=role,
        tensors=alike.total(),
        parameters=0 if role == _SCALES else sum(count * prod(shape) for (shape, _), count in alike.items()),
        shapes=tuple(dict.fromkeys(shape for shape, _ in alike)),
        encodings=tuple(dict.fromkeys(encoding.label for _, encoding in alike if encoding is not None)),
        nbytes=sum(
            count * form_bytes(encoding, shape, layout)
            for (shape, encoding), count in alike.items()
            if encoding is not None
        ),
    )


def linear_bits(
    outputs: Mapping[str, ModelTensor], architecture: Architecture, layout: LayoutTraits = NO_LAYOUT
) -> float | None:
    """Bits per weight of the linears alone (head and embedding not counted); None without any."""
    linears = Counter(
        (t.shape, t.encoding)
        for name, t in outputs.items()
        if (parameter := architecture.parameter(name)) is not None
        and parameter.param == "weight"
        and parameter.kind == "linear"
        and parameter.role != "lm_head"
    )
    weights = sum(count * prod(shape) for (shape, _), count in linears.items())
    if not weights:
        return None
    bits = 8 * sum(
        count * form_bytes(encoding, shape, layout) for (shape, encoding), count in linears.items()
    )
    return bits / weights
