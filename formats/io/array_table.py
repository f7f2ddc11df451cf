"""Holds the names, kinds and places of very many arrays as columns.

A model of experts one by one has half a million arrays, of some twenty kinds: an element type and a shape are
held once, and of an array only its name, the number of its kind and its offset.
"""

from __future__ import annotations

from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from operator import add
from typing import NamedTuple, Protocol, runtime_checkable

from qconvert.core.dtypes import DType, TensorSpec

Kind = tuple[DType, tuple[int, ...]]
"""What arrays have in common: an element type and a shape."""
Parts = tuple[tuple[str, Kind], ...]
"""Arrays whose names begin alike: how each name ends, and its kind."""


class Form(NamedTuple):
    """What arrays of one kind share: numpy's name of their type, rows, width, bytes of an element, of all."""

    carrier: str
    rows: int
    width: int
    item_bytes: int
    nbytes: int


@runtime_checkable
class HasKinds(Protocol):
    """Specs of arrays whose names and kinds are there without a spec for each."""

    def located_kinds(self) -> Iterator[tuple[str, Kind]]: ...


def kinds_of(specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Kind]]:
    """Name and kind of every array, in the order of `specs.items()`."""
    if isinstance(specs, HasKinds):
        return specs.located_kinds()
    return ((name, (spec.dtype, spec.shape)) for name, spec in specs.items())


class ArrayTable(Mapping[str, TensorSpec]):
    """The arrays of one file: their specs by name, in order, and their offsets.

    `add` every array once; specs are made when they are asked for. The data of the file begins at `start`.
    A kind may have a suffix, that of the names of its arrays: these are then held by what comes before, which
    arrays of one tensor share. Whoever never looks a name up spares the memory of a dictionary.
    """

    __slots__ = (
        "_begins", "_forms", "_kind_of", "_names", "_nbytes", "_numbers", "_rows", "_suffixes", "kinds",
        "start",
    )  # fmt: skip

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.kinds: list[Kind] = []
        self._forms: list[Form] = []
        self._suffixes: list[str] = []
        self._numbers: dict[tuple[Kind, str], int] = {}
        self._names: list[str] = []
        self._rows: dict[str, int] | None = None
        self._nbytes: int | None = None
        self._kind_of, self._begins = array("I"), array("q")

    def kind(self, kind: Kind, suffix: str = "") -> int:
        """Returns the number of a kind of arrays, a new one for the first of it."""
        number = self._numbers.get((kind, suffix))
        if number is None:
            number = self._numbers[kind, suffix] = len(self.kinds)
            dtype, shape = kind
            self.kinds.append(kind)
            self._suffixes.append(suffix)
            spec = TensorSpec("", dtype, shape)
            self._forms.append(Form(dtype.carrier, spec.rows, spec.width, dtype.nbytes, spec.nbytes))
        return number

    def add(self, name: str, kind: int, begin: int) -> None:
        """Appends an array of a kind, whose suffix follows the name, from byte `begin` of the data on."""
        self._names.append(name)
        self._kind_of.append(kind)
        self._begins.append(begin)
        self._rows = self._nbytes = None

    def extend(self, names: Iterable[str], kinds: Iterable[int], begins: Iterable[int]) -> None:
        """Appends arrays by name, number of their kind and first byte, of each as many."""
        self._names.extend(names)
        self._kind_of.extend(kinds)
        self._begins.extend(begins)
        self._rows = self._nbytes = None

    @property
    def characters(self) -> int:
        """How many characters all names have together."""
        ends = [len(suffix) for suffix in self._suffixes]
        return sum(map(len, self._names)) + sum(map(ends.__getitem__, self._kind_of))

    @property
    def begins(self) -> Sequence[int]:
        """The first byte of every array in the data, in order."""
        return self._begins

    @property
    def kind_numbers(self) -> Sequence[int]:
        """The number of the kind of every array, in order."""
        return self._kind_of

    @property
    def rows_by_name(self) -> Mapping[str, int]:
        """The position of every array in the table, made when it is first asked for."""
        if self._rows is None:
            self._rows = dict(zip(self, range(len(self)), strict=True))
        return self._rows

    def row(self, name: str) -> int:
        """Returns the position of an array in the table."""
        return self.rows_by_name[name]

    def place(self, name: str) -> tuple[int, Form, int]:
        """Returns the position of an array in the table, how its rows are held, and where they begin."""
        row = self.rows_by_name[name]
        return row, self._forms[self._kind_of[row]], self.start + self._begins[row]

    @property
    def offsets(self) -> Mapping[str, int]:
        """The offset of every array by name."""
        return _Offsets(self)

    def offset(self, name: str) -> int:
        """Returns where in the file the bytes of an array begin."""
        return self.start + self._begins[self.rows_by_name[name]]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        if self._nbytes is None:
            sizes = [form.nbytes for form in self._forms]
            self._nbytes = sum(map(sizes.__getitem__, self._kind_of))
        return self._nbytes

    def located_kinds(self) -> Iterator[tuple[str, Kind]]:
        """Yields name and kind of every array, in order."""
        return zip(self, map(self.kinds.__getitem__, self._kind_of), strict=True)

    def places(self) -> Iterator[tuple[str, Form, int]]:
        """Yields of every array its name, how its rows are held, and where they begin, in order."""
        forms, offsets = map(self._forms.__getitem__, self._kind_of), map(self.start.__add__, self._begins)
        return zip(self, forms, offsets, strict=True)

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yields name, kind and first byte in the data of every array, in order."""
        return zip(self, self._kind_of, self._begins, strict=True)

    def __getitem__(self, name: str) -> TensorSpec:
        return TensorSpec(name, *self.kinds[self._kind_of[self.rows_by_name[name]]])

    def __contains__(self, name: object) -> bool:
        return name in self.rows_by_name

    def __iter__(self) -> Iterator[str]:
        if self._rows is not None:
            return iter(self._rows)
        if not any(self._suffixes):
            return iter(self._names)
        return map(add, self._names, map(self._suffixes.__getitem__, self._kind_of))

    def __len__(self) -> int:
        return len(self._kind_of)

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
