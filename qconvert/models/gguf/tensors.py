"""Lists the tensors of a GGUF file, and which rows of which model tensors they hold.

One description for both directions: `plan.gguf.tensors` makes a plan of it, `checkpoint.gguf_model` reads the
model's tensors from a file by it. Pure: names, rows and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from qconvert.core.dtypes import rows_of, width_of
from qconvert.core.row_transforms import RowTransform
from qconvert.models.expanded import Parameter
from qconvert.models.gguf.declaration import Facts, Written
from qconvert.models.gguf.names import gguf_name


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a tensor of the unfused model, each cut into as many as `pieces`."""

    name: str
    rows: range
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of the file: its name, its shape, and the rows it is made of before its transform.

    A `copy` is a tensor that nothing reads, with the rows of another one.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    width: int
    step: RowTransform | None = None
    copy: bool = False


def records(facts: Facts) -> Iterator[Record]:
    """Yields every tensor that a declaration writes for a model, in the order of its printed structure.

    Linears that stay fused and the experts of a layer come at the position of the first of them. Raises
    UnsupportedModel for a role that GGUF has no name for.
    """
    for gathered in _gathered(facts):
        for written in facts.model.written(gathered.of.group):
            yield _record(gathered, written, facts)
    yield from _copies(facts)


def _copies(facts: Facts) -> Iterator[Record]:
    """Yields the tensors that nothing reads, under the names of their layers."""
    by_place = {(p.role, p.layer): p for p in facts.architecture.parameters.values() if p.param == "weight"}
    for copy in facts.model.copies(facts) if facts.model.copies else ():
        found = by_place[copy.role, copy.source]
        (written,) = facts.model.written(copy.role)
        record = _record(_Gathered(found, [found]), written, facts)
        yield replace(record, name=gguf_name(copy.role, copy.layer, "weight", written), copy=True)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What one tensor of the file holds: a parameter, the ones in it, and what is done with these."""

    of: Parameter
    parts: list[Parameter]
    stacked: bool = False
    multiplied: bool = False


def _gathered(facts: Facts) -> Iterator[_Gathered]:
    """Yields each tensor's parameter and those in it, in the order of the model's."""
    architecture = facts.architecture
    wholes = {
        part.name: entry.whole
        for entry in architecture.fused.values()
        if entry.fusion.role in facts.model.whole
        for part in entry.members
    }
    stacks = {role: whole for whole, roles in facts.model.stacks.items() for role in roles}
    products = {role: made for made, roles in facts.model.products.items() for role in roles}
    found: dict[object, _Gathered] = {}
    for parameter in architecture.parameters.values():
        whole = wholes.get(parameter.name)
        role = stacks.get(parameter.role)
        if whole is not None:
            found.setdefault(whole.name, _Gathered(whole, [])).parts.append(parameter)
        elif parameter.role in products:
            made = parameter._replace(role=products[parameter.role])
            product = found.setdefault((made.role, made.layer), _Gathered(made, [], multiplied=True))
            product.parts.append(parameter)
        elif parameter.group != parameter.role or role is not None:
            first = parameter if role is None else parameter._replace(role=role)
            key = (first.group, parameter.layer, parameter.param)
            found.setdefault(key, _Gathered(first, [], stacked=True)).parts.append(parameter)
        else:
            found[parameter.name] = _Gathered(parameter, [parameter])
    return iter(found.values())


def _record(gathered: _Gathered, written: Written, facts: Facts) -> Record:
    parameter, parts, stacked = gathered.of, gathered.parts, gathered.stacked
    if gathered.multiplied:
        return _product(gathered, written)
    shape, width = (len(parts), *parameter.shape) if stacked else parameter.shape, width_of(parameter.shape)
    pieces = [Piece(part.name, range(rows_of(part.shape))) for part in parts]
    if written.rows is not None:
        (part,) = parts
        pieces = [Piece(part.name, rows) for rows in written.rows(facts)]
        count = sum(len(piece.rows) for piece in pieces)
        shape = (count, *shape[1:]) if len(shape) < 3 else (count, width)
    step = _step(written, shape, facts)
    if stacked and len(parameter.shape) == 1:  # biases, a row for each expert
        step = RowTransform("transpose", parameter.shape[0])
    elif step is not None and step.change == "transpose":
        shape = (prod(shape[:-1]) // step.rows, width, step.rows)
    if written.shape is not None and parameter.param == "weight":
        shape = written.shape(facts)
    return Record(
        gguf_name(parameter.group, parameter.layer, parameter.param, written),
        shape,
        tuple(pieces),
        width,
        step,
    )


def _product(gathered: _Gathered, written: Written) -> Record:
    """The product of a vector and a row that is as long."""
    of = gathered.of
    vector, row = sorted(gathered.parts, key=lambda part: len(part.shape))
    count = prod(vector.shape)
    return Record(
        gguf_name(of.role, of.layer, of.param, written),
        vector.shape,
        (Piece(vector.name, range(count)), Piece(row.name, range(rows_of(row.shape)), count)),
        1,
        RowTransform("multiply", count),
    )


def _step(written: Written, shape: tuple[int, ...], facts: Facts) -> RowTransform | None:
    if written.change is None:
        return None
    block = written.block(facts) if written.block else None
    if written.change == "interleave_halves":
        assert block is not None, "whose heads?"
    if written.change == "transpose":
        block = block or rows_of(shape)
    return RowTransform(
        written.change,
        block or 1,
        written.factor(facts) if written.factor else 1.0,
        written.groups(facts) if written.groups else (1, 1),
        written.segments(facts) if written.segments else (),
    )
