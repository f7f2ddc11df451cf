"""The tensors of a GGUF file, and where in the model every row of them comes from.

One description for both directions: `gguf.units` makes a plan of it, `formats.gguf_checkpoint` reads the
model's tensors out of the file by it. Pure: names, rows and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from qconvert.architecture.gguf.model import Change, Facts, Written
from qconvert.architecture.gguf.names import gguf_name
from qconvert.architecture.model import Place
from qconvert.tensors import rows_of, width_of


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to the rows of a tensor on the way to the file.

    `rows` of them are taken at once: a head's, or a block that is turned. `factor` and `groups` are those
    of the declaration.
    """

    change: Change
    rows: int = 1
    factor: float = 1.0
    groups: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows, one after another, of a tensor of the unfused model."""

    name: str
    rows: range


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of the file: its name, its shape, and the rows that it is made of before its step."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    width: int
    step: Step | None = None


def records(facts: Facts) -> Iterator[Record]:
    """Every tensor that a declaration writes for a model, in the order of its printed structure.

    Linears that stay fused and the experts of a layer come where the first of them stands. Raises
    UnsupportedModel for a role that GGUF has no name for.
    """
    for place, parts in _gathered(facts):
        for written in facts.model.written(place.group):
            yield _record(place, parts, written, facts)


def _gathered(facts: Facts) -> Iterator[tuple[Place, list[Place]]]:
    """What is written together: its place, and the places that it is stacked of."""
    architecture = facts.architecture
    wholes = {
        part.name: entry.whole
        for entry in architecture.fused.values()
        if entry.fusion.role in facts.model.whole
        for part in entry.parts
    }
    found: dict[object, tuple[Place, list[Place]]] = {}
    for place in architecture.places.values():
        whole = wholes.get(place.name)
        if whole is not None:
            found.setdefault(whole.name, (whole, []))[1].append(place)
        elif place.group != place.role:
            found.setdefault((place.group, place.layer, place.part), (place, []))[1].append(place)
        else:
            found[place.name] = place, [place]
    return iter(found.values())


def _record(place: Place, parts: Sequence[Place], written: Written, facts: Facts) -> Record:
    experts = place.group != place.role
    shape, width = (len(parts), *place.shape) if experts else place.shape, width_of(place.shape)
    pieces = [Piece(part.name, range(rows_of(part.shape))) for part in parts]
    if written.rows is not None:
        (part,) = parts
        pieces = [Piece(part.name, rows) for rows in written.rows(facts)]
        count = sum(len(piece.rows) for piece in pieces)
        shape = (count, *shape[1:]) if len(shape) < 3 else (count, width)
    step = _step(written, shape, facts)
    if experts and len(place.shape) == 1:  # biases, a row for each expert
        step = Step("transpose", place.shape[0])
    elif step is not None and step.change == "transpose":
        shape = (prod(shape[:-1]) // step.rows, width, step.rows)
    if written.shape is not None and place.part == "weight":
        shape = written.shape(facts)
    return Record(gguf_name(place.group, place.layer, place.part, written), shape, tuple(pieces), width, step)


def _step(written: Written, shape: tuple[int, ...], facts: Facts) -> Step | None:
    if written.change is None:
        return None
    block = written.block(facts) if written.block else None
    if written.change == "interleave_halves":
        assert block is not None, "whose heads?"
    if written.change == "transpose":
        block = block or rows_of(shape)
    return Step(
        written.change,
        block or 1,
        written.factor(facts) if written.factor else 1.0,
        written.groups(facts) if written.groups else (1, 1),
    )
