"""Puts the factors of inputs into a plan: into every row slice of what makes them, and of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.factors import Factors, Floats
from qconvert.models import Architecture, Parameter
from qconvert.models.scale_pairs import ScalableInput
from qconvert.ops import Cast
from qconvert.plan.plan import Plan, RowSlice, Unit


@dataclass(frozen=True, slots=True, eq=False)
class ScaledInput:
    """An input whose channels are scaled: columns of its readers times `factors_I`, its sources divided.

    `factors_I` float32 [I]; `power` is the exponent of the input's magnitudes that they were chosen with,
    `error` what the readers' outputs lose, as a share of what they lose without factors.
    """

    input: ScalableInput
    factors_I: Floats
    power: float
    error: float


def record_of(scaled: Sequence[ScaledInput]) -> Json:
    """What a manifest says of the inputs that could be scaled, and of each that is, by what makes it."""
    sources = {
        each.input.name: {
            "power": each.power,
            "factors": [float(f"{bound:.6g}") for bound in (each.factors_I.min(), each.factors_I.max())],
            "readers": len(each.input.readers),
            "error": float(f"{each.error:.6g}"),
        }
        for each in scaled
        if each.power
    }
    return {"method": "awq", "inputs": len(scaled), "sources": sources}


def parameters_in(piece: RowSlice, architecture: Architecture) -> Iterator[tuple[Parameter, RowSlice]]:
    """The parameters that have rows in a slice, each with those rows."""
    entry = architecture.fused.get(piece.tensor.name)
    parameter = architecture.parameter(piece.tensor.name)
    if entry is None:
        if parameter is not None:
            yield parameter, piece
        return
    for run, rows in zip(entry.runs, entry.rows, strict=True):
        shared = _shared(rows, range(piece.start, piece.stop, piece.step))
        if shared:
            yield (
                entry.members[run.member],
                piece._replace(start=shared[0], stop=shared[-1] + 1, step=shared.step),
            )


def _shared(a: range, b: range) -> range:
    """The numbers that two ranges share, one of which takes every number, or both the same steps."""
    step = max(a.step, b.step)
    first, last = max(a.start, b.start), min(a.stop, b.stop)
    stepped = a if a.step == step else b
    first += (stepped.start - first) % step
    other = b if stepped is a else a
    if first >= last or (first - other.start) % other.step:
        return range(0)
    return range(first, last, step)


def with_factors(plan: Plan, architecture: Architecture, scaled: Iterable[ScaledInput]) -> Plan:
    """The plan that reads every source divided, and every reader multiplied, by the factors of their input.

    What stays plain is rounded to the type that it has in the plan.
    """
    tensors = {piece.tensor.name: piece.tensor for unit in plan.units for piece in unit.inputs}
    found = factors_by_tensor(tensors.values(), architecture, scaled)

    def one(unit: Unit) -> Unit:
        factors = [found.get(piece.tensor.name) for piece in unit.inputs]
        if not any(factors):
            return unit
        inputs = tuple(
            piece._replace(factors=each or Factors())
            for piece, each in zip(unit.inputs, factors, strict=True)
        )
        encoding = unit.output.encoding
        ops = (*unit.ops, Cast(encoding.dtype)) if isinstance(encoding, Unquantized) else unit.ops
        return unit._replace(read=inputs, ops=ops)

    return plan.each(one)


def factors_by_tensor(
    tensors: Iterable[ModelTensor], architecture: Architecture, scaled: Iterable[ScaledInput]
) -> dict[str, Factors]:
    """What the numbers of stored tensors, fused or not, are scaled by, of those that are."""
    columns: dict[str, Floats] = {}
    divisors: dict[str, tuple[Floats, float]] = {}
    for each in scaled:
        columns |= {reader.name: each.factors_I for reader in each.input.readers}
        for source in each.input.sources:
            divisors[source.name] = each.factors_I, each.input.offset if source.param == "weight" else 0.0
    found = {}
    for tensor in tensors:
        members = _members(tensor, architecture)
        if any(member.name in columns or member.name in divisors for member in members):
            found[tensor.name] = _factors(tensor, architecture, members, columns, divisors)
    return found


def _members(tensor: ModelTensor, architecture: Architecture) -> Sequence[Parameter]:
    entry, parameter = architecture.fused.get(tensor.name), architecture.parameter(tensor.name)
    return entry.members if entry else [parameter] if parameter else []


def _factors(
    tensor: ModelTensor,
    architecture: Architecture,
    members: Sequence[Parameter],
    columns: Mapping[str, Floats],
    divisors: Mapping[str, tuple[Floats, float]],
) -> Factors:
    entry = architecture.fused.get(tensor.name)
    if entry is None:
        name = members[0].name
        if name not in divisors:
            return Factors((columns.get(name),))
        divided, offset = divisors[name]
        return Factors((columns.get(name),), ((range(tensor.rows), divided),), offset)
    each = len(entry.fusion.members) if entry.fusion.per_expert else len(members)
    # Members that are fused read one input: the first of every expert has the columns of all.
    of_runs = tuple(columns.get(member.name) for member in members[::each])
    same = all(columns_I is of_runs[0] for columns_I in of_runs)
    rows = tuple(
        (rows, divisors[members[run.member].name][0][run.start : run.stop])
        for run, rows in zip(entry.runs, entry.rows, strict=True)
        if members[run.member].name in divisors
    )
    return Factors(of_runs[:1] if same else of_runs, rows)
