"""Declares what the folders ask of one another: a source of arrays, a sink for them, a layout between.

Formats implement these, the runner uses them; neither knows the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from qconvert.core.activations import ScalesBeside, StoredScale
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Quantized, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.values import DenseRows, Value, stack_rows

if TYPE_CHECKING:
    import numpy as np


class Source(Protocol):
    """A checkpoint that can be read: specs of every array, and their rows on demand.

    `read` returns rows [start, stop) of one array as a new contiguous `[rows, width]` numpy array
    in its carrier type, or only the columns [first, last) of them; it may be called from any thread.
    Without weights (headers of a model that was not downloaded) there is nothing to read.
    """

    @property
    def has_weights(self) -> bool: ...

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def read(
        self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None
    ) -> np.ndarray: ...


@runtime_checkable
class StackedSource(Protocol):
    """A source that reads whole arrays, those of one element type and shape one below the other, by kind.

    That costs less than to read them one by one.
    """

    def read_stacked(self, kinds: Sequence[Sequence[str]]) -> list[np.ndarray]: ...


class Sink(Protocol):
    """Files being written: rows of any array in any order from any thread, then all or nothing.

    `rows` may be narrower than the array: they then lie in its columns from `column` on. `write_all` writes
    rows of many arrays, contiguous ones, and costs less.
    """

    def write(self, name: str, start: int, rows: np.ndarray, column: int = 0) -> None: ...

    def write_all(self, arrays: Iterable[ArrayRows]) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


class Layout(Protocol):
    """How a tensor of the model is stored as named arrays in one on-disk format, and read back.

    `row_alignment` is the number of rows that `encode` must be given together (the last call for
    a tensor may hold fewer), for formats that pack several rows into one word; `as_stored` gives rows of
    many tensors its form of codes, so that they need not be packed tensor by tensor. `transposed` layouts
    keep the weights of a row apart in the file: they are read and written in larger blocks. In those that are
    `named_by` the "tensor" or its "module", arrays of tensors of one shape and encoding differ in names
    alone, which begin with its name.
    `settings` are the entries of config.json for quantized modules, by their encodings, and linears left
    plain; `traits` is what is said of the layout for any model; `computed` are tensors whose plain numbers
    are computed as they are read, and of what, if it is codes; `rewritten` is the layout in which what was
    read of this one is written where no other is asked for; `fitted` is the form of it that all these
    encodings can be written in, for layouts whose form follows from them.

    Numbers beside the weights: `scale_stored_as` says what an array of this name scales, None for all others;
    `place_of_scale` where the layout stores a scale (of the inputs of a linear with such a weight, or of a
    cache in a model that has quantized ones), None where it has no place for it; `settings_beside` are the
    settings of a model with such scales; `file_metadata` is what the header of every file says of the tensors
    of a model with this config.json. Loaders that want a scale of inputs for a weight take the encoding
    `without_input_scale` where there is none, which holds the same numbers; None where they do without.
    """

    @property
    def name(self) -> str: ...

    @property
    def traits(self) -> LayoutTraits: ...

    @property
    def transposed(self) -> bool: ...

    @property
    def named_by(self) -> Literal["tensor", "module"] | None: ...

    @property
    def computed(self) -> Mapping[str, str]: ...

    @property
    def rewritten(self) -> Layout: ...

    def fitted(self, encodings: Iterable[Quantized]) -> Layout: ...

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]: ...

    def row_alignment(self, tensor: ModelTensor) -> int: ...

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterable[ArrayRows]: ...

    def as_stored(self, value: Value) -> Value: ...

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value: ...

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json: ...

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json: ...

    def file_metadata(self, tensors: Iterable[ModelTensor], config: Json) -> Mapping[str, str]: ...

    def scale_stored_as(self, name: str) -> StoredScale | None: ...

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None: ...

    def without_input_scale(self, weight: Quantized) -> Quantized | None: ...


class Rows(Protocol):
    """Whatever gives rows of logical tensors."""

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """A source seen through its layout: rows of logical tensors."""

    source: Source
    layout: Layout

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        return self.layout.decode(tensor, self.source, start, stop)

    def read_stacked(self, kinds: Sequence[Sequence[ModelTensor]]) -> list[Value]:
        """Whole tensors, those of one kind (shape and encoding) one below the other."""
        source, stacked = self.source, dict[int, Value]()
        if isinstance(source, StackedSource):
            plain = {i: kind[0].encoding for i, kind in enumerate(kinds) if self._is_stored(kind[0])}
            arrays = source.read_stacked([[each.name for each in kinds[i]] for i in plain])
            for (i, encoding), array in zip(plain.items(), arrays, strict=True):
                assert isinstance(encoding, Unquantized)
                stacked[i] = DenseRows(array, encoding.dtype)
        return [
            stacked[i] if i in stacked else stack_rows([self.read(each, 0, each.rows) for each in kind])
            for i, kind in enumerate(kinds)
        ]

    def _is_stored(self, tensor: ModelTensor) -> bool:
        """Whether a tensor, and those alike, are one array each, of its name, which is read as it is."""
        if self.layout.named_by is None or not isinstance(tensor.encoding, Unquantized):
            return False
        whole = TensorSpec(tensor.name, tensor.encoding.dtype, tensor.shape)
        return self.layout.stored_arrays(tensor) == (whole,)


class ArrayRows(NamedTuple):
    """Rows of one named array, or some columns of them: the place of its upper left corner, and they."""

    name: str
    start: int
    rows: np.ndarray
    column: int = 0


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What lies beside the weights: files to copy, files left behind, and files to make, text by name.

    `code` are those of the copied that are the model's own Python, which nothing here runs; `missing` the
    ones that a config names and the folder lacks.
    """

    copied: tuple[Path, ...]
    skipped: tuple[Path, ...]
    made: Mapping[str, str] = field(default_factory=dict)
    code: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
