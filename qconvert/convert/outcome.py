"""Gathers what a run reports: the blocks that are written, and what the output lost by them."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from qconvert.ops import OutputError
from qconvert.plan.plan import Unit

if TYPE_CHECKING:
    from qconvert.quant.affine import QuantError


class WrittenRows(NamedTuple):
    """Rows of one array, or the columns [column, column + width) of them, with their CRC-32 if one was
    asked for.
    """

    name: str
    start: int
    rows: int
    width: int
    crc32: int | None
    column: int = 0


class WrittenParts(Mapping[str, Sequence[WrittenRows]]):
    """Every part that was written of an array, by the array's name; held as columns, for there are very many.

    `add` each part once.
    """

    __slots__ = ("_columns", "_last")

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        # Start, rows, width, CRC-32 (-1: none), column; and the number of the array's part before (-1: none).
        self._columns = array("q")

    def add(self, part: WrittenRows) -> None:
        before, number = self._last.get(part.name, -1), len(self._columns) // _FIELDS
        crc32 = -1 if part.crc32 is None else part.crc32
        self._columns.extend((part.start, part.rows, part.width, crc32, part.column, before))
        self._last[part.name] = number

    def __getitem__(self, name: str) -> Sequence[WrittenRows]:
        """The parts of one array in the order in which they were added."""
        found, number = [], self._last[name]
        while number >= 0:
            start, rows, width, crc32, column, number = self._columns[
                number * _FIELDS : (number + 1) * _FIELDS
            ]
            found.append(WrittenRows(name, start, rows, width, None if crc32 < 0 else crc32, column))
        return found[::-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)


_FIELDS = 6


@dataclass(frozen=True, slots=True)
class BlockDone:
    """One block of a unit is written, that of so many `rows` of the output from `start` on; `last` marks the
    unit's last one to finish.

    `code_error` is how far a weight has moved at most, in units of its quantization step, on the way to
    another quantization format, `output_error` what the output of its linear loses, where codes were chosen
    together. A thread took `seconds` for it, and its parts have `bytes_written`; both are 0 of a block that
    an earlier run has made.
    """

    unit: Unit
    start: int
    rows: int
    bytes_read: int
    parts: tuple[WrittenRows, ...]
    error: QuantError | None
    last: bool
    code_error: float = 0.0
    output_error: OutputError | None = None
    seconds: float = field(default=0.0, compare=False)
    bytes_written: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run, gathered from its events, by name: every part written of an array, and for
    outputs the error of quantizing, the most that kept codes moved a weight (0 is exact), and the error of
    a linear's output where codes were chosen together.

    Both errors are there once the outcome is `settled`.
    """

    written: WrittenParts = field(default_factory=WrittenParts)
    errors: dict[str, QuantError] = field(default_factory=dict)
    code_errors: dict[str, float] = field(default_factory=dict)
    output_errors: dict[str, OutputError] = field(default_factory=dict)
    _blocks: dict[str, list[tuple[int, QuantError | None, OutputError | None]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, done: BlockDone) -> None:
        """Take in the event of one block."""
        name = done.unit.output.name
        for part in done.parts:
            self.written.add(part)
        if done.code_error:
            self.code_errors[name] = max(self.code_error(name), done.code_error)
        if done.error is not None or done.output_error is not None:
            self._blocks[name].append((done.start, done.error, done.output_error))

    def code_error(self, name: str) -> float:
        """The most that kept codes moved a weight of this output; 0 is exact."""
        return self.code_errors.get(name, 0.0)

    def settle(self, units: Iterable[Unit]) -> None:
        """Sum errors in the order of the plan's units and their rows, in whichever they were made."""
        for name in (unit.output.name for unit in units):
            blocks = sorted(self._blocks.pop(name, ()), key=lambda block: block[0])
            errors = [error for _, error, _ in blocks if error is not None]
            if errors:
                self.errors[name] = reduce(add, errors)
            output_errors = [error for _, _, error in blocks if error is not None]
            if output_errors:
                self.output_errors[name] = reduce(add, output_errors)

    def certificates(self, units: Iterable[Unit]) -> dict[str, int]:
        """How many tensors are exact, measured, quantized, requantized and so on, by name."""
        found = Counter(unit.certificate(self.code_error(unit.output.name)) for unit in units)
        return dict(sorted(found.items()))
