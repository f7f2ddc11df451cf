"""Defines plans: what will be read, done and written, decided from names and shapes alone.

A plan is a flat tuple of independent units. A unit makes one tensor: it reads row slices of source
tensors, stacks them, and applies operations. Fusing is a unit with several inputs, un-fusing several
units that share an input, tying a unit fewer, untying a unit more. Nothing here opens a file or holds a
weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_
from typing import Literal, NamedTuple

from qconvert.core.encodings import Encoding, ModelTensor, Unquantized, identity
from qconvert.core.factors import Factors
from qconvert.core.short_repr import few_lines
from qconvert.core.statistics import StatisticsKey
from qconvert.models import Binding
from qconvert.ops import Op

_NAME, _QUANTIZES = attrgetter("name"), attrgetter("quantizes")
Certificate = Literal[
    "exact", "measured", "cast", "folded", "merged", "dequantized", "quantized", "requantized"
]


class RowSlice(NamedTuple):
    """Rows [start, stop) of a source tensor, or every `step`-th of them.

    With `zeros_like`, the number of a row, as many rows of zeros with that row's scales instead. With
    `factors`, those of the whole tensor, plain numbers are read as what they become. Each row of plain
    numbers is cut into `pieces` rows, one after another, which are only taken together.
    """

    tensor: ModelTensor
    start: int
    stop: int
    step: int = 1
    zeros_like: int | None = None
    factors: Factors | None = None
    pieces: int = 1

    @property
    def stored_rows(self) -> int:
        return len(range(self.start, self.stop, self.step))

    @property
    def rows(self) -> int:
        return self.stored_rows * self.pieces

    @property
    def last(self) -> int:
        """The number of the last row, of which there must be one."""
        return range(self.start, self.stop, self.step)[-1]

    def goes_on(self, piece: RowSlice) -> bool:
        """Whether a piece begins in the tensor where this one ends, both of consecutive rows."""
        plain = (
            self.step == piece.step == self.pieces == piece.pieces == 1
            and self.zeros_like is None
            and piece.zeros_like is None
        )
        return plain and self.tensor is piece.tensor and self.stop == piece.start

    def within(self, first: int, stop: int, step: int = 1) -> RowSlice:
        """Rows [first, stop) of this slice, or every `step`-th of them."""
        if self.pieces > 1:
            assert step == 1 and not first % self.pieces and not stop % self.pieces, "a row that is cut"
            first, stop = first // self.pieces, stop // self.pieces
        begin = self.start + first * self.step
        last = self.start + (stop - 1) * self.step
        return self._replace(start=begin, stop=last + 1, step=self.step * step)


class Unit(NamedTuple):
    """One tensor to be made: stack rows of tensors, apply `ops` in order, write `output`.

    `read` is the tensor that is read from its first row to its last, as most are, or slices of tensors.
    `statistics` name the measured inputs that its operations need: one for all rows, or one for each
    expert of a stack, in the order of the rows.
    """

    read: ModelTensor | tuple[RowSlice, ...]
    ops: tuple[Op, ...]
    output: ModelTensor
    statistics: tuple[StatisticsKey, ...] = ()

    @property
    def inputs(self) -> tuple[RowSlice, ...]:
        """The slices that are read, one after another."""
        return (whole(self.read),) if isinstance(self.read, ModelTensor) else self.read

    @property
    def rows(self) -> int:
        """The number of rows that are read."""
        return self.read.rows if isinstance(self.read, ModelTensor) else sum(p.rows for p in self.read)

    @property
    def source(self) -> ModelTensor:
        """The source tensor that the first rows come from."""
        return self.read if isinstance(self.read, ModelTensor) else self.read[0].tensor

    @property
    def is_scaled(self) -> bool:
        """Whether rows or columns are scaled as they are read."""
        return not isinstance(self.read, ModelTensor) and any(p.factors is not None for p in self.read)

    @property
    def kind(self) -> tuple[object, ...]:
        """What it shares with units that differ in names alone; encodings and operations by identity.

        The encoding of the output follows from these.
        """
        read = self.read
        of = (read.shape, identity(read.encoding)) if isinstance(read, ModelTensor) else (id(read),)
        return (*of, self.output.shape, *map(id, self.ops))

    @property
    def quantizes(self) -> bool:
        return any(map(_QUANTIZES, self.ops))

    @property
    def keeps_rows(self) -> bool:
        """Whether as many rows are made as are read."""
        read = self.read  # most often a tensor of the very shape
        return (isinstance(read, ModelTensor) and read.shape == self.output.shape) or (
            self.rows == self.output.rows
        )

    def row_of_a_table(self) -> tuple[str, str, str]:
        """Name and shape of the output, and its encoding with that of the source, as tables show them."""
        name, shape, encoding = self.output.row_of_a_table()
        was = self.source.encoding.label
        return name, shape, encoding if encoding == was else f"{was} -> {encoding}"

    def then(self, op: Op) -> Unit:
        """This unit with one more operation, and the encoding that it makes."""
        encoding = op.infer(self.output.encoding)
        output = ModelTensor(self.output.name, self.output.shape, encoding)
        return Unit(self.read, (*self.ops, op), output, self.statistics)

    def certificate(self, code_error: float = 0.0) -> Certificate:
        """In one word, what becomes of the numbers; `code_error` is what moving their codes changed."""
        found = {op.certificate(self.source.encoding) for op in self.ops}
        if "quantized" in found:
            return "quantized" if isinstance(self.source.encoding, Unquantized) else "requantized"
        if self.is_scaled:
            return "folded"
        if "dequantized" in found:
            return "dequantized"
        if "cast" in found:
            return "cast"
        if any(piece.tensor.adapter_rank is not None for piece in self.inputs):
            return "merged"
        return "measured" if code_error else "exact"


@dataclass(frozen=True)
class Plan:
    """Units in output order, and what is left behind: stored tensors that no unit reads."""

    units: tuple[Unit, ...]
    dropped: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Counts and the first units in a few lines: a plan has thousands."""
        parameters = sum(unit.output.count for unit in self.units)
        held = f"{len(self.units):,} units, {parameters:,} parameters, {len(self.dropped):,} tensors left out"
        rows = (unit.row_of_a_table() for unit in self.units)
        return few_lines(f"Plan: {held}", rows, len(self.units))

    @cached_property
    def outputs(self) -> dict[str, ModelTensor]:
        tensors = [unit.output for unit in self.units]
        return dict(zip(map(_NAME, tensors), tensors, strict=True))

    @cached_property
    def kinds(self) -> tuple[tuple[Unit, int], ...]:
        """A unit of each kind, and how many there are: few, of very many."""
        first: dict[tuple[object, ...], Unit] = {}
        counts = Counter[tuple[object, ...]]()
        for unit in self.units:
            kind = unit.kind
            first.setdefault(kind, unit)
            counts[kind] += 1
        return tuple((unit, counts[kind]) for kind, unit in first.items())

    def each(self, change: Callable[[Unit], Unit]) -> Plan:
        """This plan with every unit changed; itself where none is."""
        units = tuple(map(change, self.units))
        return self if all(map(is_, units, self.units)) else replace(self, units=units)

    def where(self, choose: Callable[[Encoding], Op | None]) -> Plan:
        """This plan with one more operation on the outputs for whose encoding one is chosen.

        Those of one encoding share it.
        """
        chosen: dict[int, Op | None] = {}

        def one(unit: Unit) -> Unit:
            encoding = unit.output.encoding
            if identity(encoding) not in chosen:
                chosen[identity(encoding)] = choose(encoding)
            op = chosen[identity(encoding)]
            return unit.then(op) if op else unit

        return self.each(one)


def copy_of(binding: Binding) -> Plan:
    """The plan that copies every tensor except the buffers the architecture ignores.

    Tensors come in the order of the model's printed structure, unknown ones last.
    """
    tensors = map(binding.tensors.__getitem__, chain(_in_order(binding), sorted(binding.unknown)))
    return Plan(tuple(Unit(tensor, (), tensor) for tensor in tensors), binding.dropped)


def _in_order(binding: Binding) -> Iterator[str]:
    """The stored parameters as the model prints them, a fused one where its first member is."""
    architecture, stored = binding.architecture, binding.tensors
    begun: dict[str, list[str]] = {}
    for name in sorted(name for name in architecture.fused if name in stored):
        begun.setdefault(architecture.fused[name].members[0].name, []).append(name)
    fused = frozenset(chain.from_iterable(begun.values()))
    for name in architecture.parameters:
        own = [name] if name in stored and name not in fused else []
        yield from sorted(begun[name] + own) if name in begun else own


def whole(tensor: ModelTensor) -> RowSlice:
    """All rows of a tensor."""
    return RowSlice(tensor, 0, tensor.rows)


def rows_within(inputs: Sequence[RowSlice], start: int, stop: int, step: int = 1) -> Iterator[RowSlice]:
    """Rows [start, stop) of the stacked inputs, or every `step`-th of them."""
    offset = 0
    for piece in inputs:
        first, last = max(start, offset), min(stop, offset + piece.rows)
        first += (start - first) % step
        if first < last:
            yield piece.within(first - offset, last - offset, step)
        offset += piece.rows
