"""Makes one file of an output apart from the others: of the units of a plan those that write into it.

What is written of an array of another file is left out here, and made where that file is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qconvert.convert.job import Job
from qconvert.convert.resume import RunJournal
from qconvert.core.dtypes import TensorSpec
from qconvert.core.protocols import ArrayRows
from qconvert.formats.io.planned_files import FilePlan, FileSink
from qconvert.models.parameter_table import form_bytes
from qconvert.plan.plan import Plan, Unit


class OneFile(FileSink):
    """The sink of one file: rows of arrays that lie in another one are made there, too."""

    def write(self, name: str, start: int, rows: Any, column: int = 0) -> None:
        if name in self.specs:
            super().write(name, start, rows, column)

    def write_all(self, arrays: Iterable[ArrayRows]) -> None:
        specs = self.specs
        super().write_all(each for each in arrays if each.name in specs)


class OfOneFile(RunJournal):
    """Marks all units but those of a file as done; they share scales with one of them."""

    def __init__(self, names: Collection[str], block_bytes: int) -> None:
        super().__init__({}, block_bytes=block_bytes, checksums=True)
        self._names = names

    @property
    def there(self) -> Collection[tuple[str, int]]:
        return _BlocksOfOthers(self._names)


@dataclass(frozen=True, slots=True)
class _BlocksOfOthers(Collection[tuple[str, int]]):
    """All blocks of units but these."""

    names: Collection[str]

    def __contains__(self, block: object) -> bool:
        return isinstance(block, tuple) and block[0] not in self.names

    def __iter__(self) -> Iterator[tuple[str, int]]:
        raise TypeError("blocks of others are not counted")

    def __len__(self) -> int:
        raise TypeError("blocks of others are not counted")


def units_of(job: Job, files: Mapping[str, FilePlan]) -> dict[str, list[Unit]]:
    """The units that have an array in each file, in the order of the plan."""
    file_of = {array: file.name for file in files.values() for array in file.specs}
    found: dict[str, list[Unit]] = {name: [] for name in files}
    for unit in job.compiled.plan.units:
        arrays: Iterable[TensorSpec] = job.container.layout.stored_arrays(unit.output)
        for name in dict.fromkeys(file_of[array.name] for array in arrays):
            found[name].append(unit)
    return found


def with_mates(units: Sequence[Unit], plan: Plan) -> Plan:
    """The plan of units and of those that share a scale with one of them."""
    groups = {op.shared_scale_group for unit in units for op in unit.ops} - {""}
    names = {unit.output.name for unit in units}
    mates = (u for u in plan.units if any(op.shared_scale_group in groups for op in u.ops)) if groups else ()
    return Plan((*units, *(unit for unit in mates if unit.output.name not in names)))


def bytes_read(units: Iterable[Unit]) -> int:
    """The bytes of the source that units read."""
    return sum(
        form_bytes(piece.tensor.encoding, (piece.stored_rows, piece.tensor.width))
        for unit in units
        for piece in unit.inputs
    )
