"""Holds the names, kinds and places of very many arrays as columns.

A model of experts one by one has half a million arrays, of some twenty kinds: an element type and a shape are
held once, and of an array only its name, the number of its kind and its offset.
"""

from __future__ import annotations

from array import array
from collections.abc import ItemsView, Iterator, Mapping, ValuesView

from qconvert.core.dtypes import DType, TensorSpec

Kind = tuple[DType, tuple[int, ...]]
"""What arrays have in common: an element type and a shape."""


class ArrayTable(Mapping[str, TensorSpec]):
    """The arrays of one file: their specs by name, in order, and their offsets.

    `add` every array once; specs are made when they are asked for. The data of the file begins at `start`.
    """

    __slots__ = ("_begins", "_kind_of", "_numbers", "_rows", "kinds", "start")

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.kinds: list[Kind] = []
        self._numbers: dict[Kind, int] = {}
        self._rows: dict[str, int] = {}
        self._kind_of, self._begins = array("I"), array("q")

    def kind(self, dtype: DType, shape: tuple[int, ...]) -> int:
        """Returns the number of a kind of arrays, a new one for the first of it."""
        number = self._numbers.get((dtype, shape))
        if number is None:
            number = self._numbers[dtype, shape] = len(self.kinds)
            self.kinds.append((dtype, shape))
        return number

    def add(self, name: str, kind: int, begin: int) -> None:
        """Appends an array of a kind, which begins at byte `begin` of the data."""
        self._rows[name] = len(self._rows)
        self._kind_of.append(kind)
        self._begins.append(begin)

    def row(self, name: str) -> int:
        """Returns the position of an array in the table."""
        return self._rows[name]

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset of every array by name."""
        return _Offsets(self)

    def offset(self, name: str) -> int:
        """Returns where in the file the bytes of an array begin."""
        return self.start + self._begins[self._rows[name]]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        sizes = [TensorSpec("", *kind).nbytes for kind in self.kinds]
        return sum(map(sizes.__getitem__, self._kind_of))

    def places(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yields every array with its offset, in order."""
        for name, kind, begin in self.rows():
            yield TensorSpec(name, *self.kinds[kind]), self.start + begin

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yields name, kind and first byte in the data of every array, in order."""
        return zip(self._rows, self._kind_of, self._begins, strict=True)

    def __getitem__(self, name: str) -> TensorSpec:
        return TensorSpec(name, *self.kinds[self._kind_of[self._rows[name]]])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def items(self) -> ItemsView[str, TensorSpec]:
        return _Items(self)

    def values(self) -> ValuesView[TensorSpec]:
        return _Values(self)


class _Items(ItemsView[str, TensorSpec]):
    """Specs with their names, without looking each name up."""

    _mapping: ArrayTable

    def __iter__(self) -> Iterator[tuple[str, TensorSpec]]:
        kinds = self._mapping.kinds
        return ((name, TensorSpec(name, *kinds[kind])) for name, kind, _ in self._mapping.rows())


class _Values(ValuesView[TensorSpec]):
    _mapping: ArrayTable

    def __iter__(self) -> Iterator[TensorSpec]:
        return (spec for _, spec in self._mapping.items())


class _Offsets(Mapping[str, int]):
    """The offsets of a table, by name."""

    __slots__ = ("_table",)

    def __init__(self, table: ArrayTable) -> None:
        self._table = table

    def __getitem__(self, name: str) -> int:
        return self._table.offset(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)
