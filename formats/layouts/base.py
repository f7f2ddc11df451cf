"""Defines what a layout's file declares, and stores plain tensors for all of them.

A file of this folder declares one layout as its `LAYOUTS`: its traits, a class that stores tensors as named
arrays, a function that finds the tensors of a checkpoint, and the rule that brings any encoding into it. One
line of `registry` makes it known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

from qconvert.core.activations import ActivationScheme, ScalesBeside, StoredScale
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Quantized, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.protocols import ArrayRows, Layout, Source
from qconvert.core.values import DenseRows, Value
from qconvert.ops import Op

# Finds the layout of a checkpoint with this config.json, and its tensors by the names of the model.
Reader = Callable[[Source, Json], tuple[Layout, dict[str, ModelTensor]]]
# The operations that bring a quantized tensor into a layout with its codes kept; BadRecipe where none do.
Transcoder = Callable[[ModelTensor, Quantized], tuple[Op, ...]]
# How loaders quantize the inputs of the linear with this weight, by config.json.
Activations = Callable[[Json, ModelTensor], ActivationScheme | None]
# What a matrix of the model is: layouts leave some kinds of them plain.
MatrixKind = Literal["linear", "head", "embedding", "router"]


@dataclass(frozen=True, slots=True)
class Promise:
    """What a config.json says of weights that are not here: their layout, and the encoding of each matrix.

    `encoding` takes a matrix as a plain tensor, and is None where it is left plain; `note` says what the
    config leaves open.
    """

    layout: Layout
    encoding: Callable[[ModelTensor, MatrixKind], Quantized | None]
    note: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredLayout:
    """A layout as the registry knows it. Those without `writer` and `transcode` are only read; `reader` is
    asked where config.json names this layout as its quantization method, or has its `config_key`. Loaders of
    those without `activations` quantize weights alone. `settings_file` makes what the settings file holds of
    the settings in config.json, where that is not the same. `promise` tells encodings from a config.json
    alone; a config of those without one does not. `like` is the writer for a source in this very layout whose
    config.json says something of it that no weight shows.
    """

    traits: LayoutTraits
    writer: Callable[[], Layout] | None = None
    reader: Reader | None = None
    transcode: Transcoder | None = None
    activations: Activations | None = None
    settings_file: Callable[[Json], Json] | None = None
    promise: Callable[[Json], Promise] | None = None
    like: Callable[[Json], Layout] | None = None


E = TypeVar("E", bound=Quantized)
V = TypeVar("V", bound=Value)


class NoScalesBeside:
    """What layouts say that have no numbers of inputs or caches beside their weights."""

    __slots__ = ()

    @property
    def rewritten(self) -> Layout:
        """The layout in which a model that is in this one is written again: this, for most."""
        return cast(Layout, self)

    def fitted(self, encodings: Iterable[Quantized]) -> Layout:
        """The form of this layout that all these encodings can be written in: this, for most."""
        return cast(Layout, self)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """The entries of config.json for these modules, and linears that are left plain."""
        raise NotImplementedError

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        """The settings where numbers are stored beside the weights, for layouts that have places for them."""
        return self.settings(quantized, kept)

    def file_metadata(self, tensors: Iterable[ModelTensor], config: Json) -> Mapping[str, str]:
        """What the header of every file says of the tensors of a model: nothing, for most."""
        return {}

    def scale_stored_as(self, name: str) -> StoredScale | None:
        """What an array of this name scales; None for all others, and in layouts without such numbers."""
        return None

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        """The array of a scale beside weights like this one; None where the layout has no place for it."""
        return None

    def without_input_scale(self, weight: Quantized) -> Quantized | None:
        """The encoding that a weight gets whose inputs have no stored scale, though loaders want one."""
        return None


class PassThrough(NoScalesBeside, Generic[E, V]):
    """Stores plain tensors as arrays of their own name, and leaves quantized ones to a subclass.

    A subclass stores encodings `E` as values `V`; `transposed` and `named_by` as in `Layout`.
    """

    __slots__ = ()
    transposed = False
    named_by: Literal["tensor", "module"] | None = None

    @property
    def traits(self) -> LayoutTraits:
        """What is said of the layout for any model."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The layout's name in messages and manifests."""
        return self.traits.name

    @property
    def computed(self) -> Mapping[str, str]:
        """The tensors whose plain numbers are computed as they are read, and from what codes: none."""
        return {}

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        if isinstance(tensor.encoding, Unquantized):
            return (TensorSpec(tensor.name, tensor.encoding.dtype, tensor.shape),)
        return self.arrays(tensor, cast(E, tensor.encoding))

    def row_alignment(self, tensor: ModelTensor) -> int:
        return 1 if isinstance(tensor.encoding, Unquantized) else self.rows(tensor, cast(E, tensor.encoding))

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterable[ArrayRows]:
        """Rows [start, start + value.rows) as they are stored; `start` is a multiple of the row alignment."""
        if isinstance(value, DenseRows):
            return (ArrayRows(tensor.name, start, value.rows_RI),)
        return self.store(tensor, start, cast(V, value))

    def as_stored(self, value: Value) -> Value:
        """Rows of any tensors with their codes as they are stored, where that is the same for all of them."""
        return value

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        if isinstance(tensor.encoding, Unquantized):
            return DenseRows(source.read(tensor.name, start, stop), tensor.encoding.dtype)
        return self.load(tensor, cast(E, tensor.encoding), source, range(start, stop))

    def arrays(self, tensor: ModelTensor, encoding: E) -> tuple[TensorSpec, ...]:
        """The arrays of a quantized tensor, in the order they are written."""
        raise NotImplementedError

    def rows(self, tensor: ModelTensor, encoding: E) -> int:
        """How many rows of a quantized tensor are written together."""
        return 1

    def store(self, tensor: ModelTensor, start: int, value: V) -> Iterable[ArrayRows]:
        """Rows of a quantized tensor from `start` on, as they are stored."""
        raise NotImplementedError

    def load(self, tensor: ModelTensor, encoding: E, source: Source, rows: range) -> V:
        """Read these rows of a quantized tensor back."""
        raise NotImplementedError
