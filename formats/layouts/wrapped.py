"""Passes on what a layout that reads or stores some tensors otherwise leaves to the layout inside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from qconvert.core.activations import ScalesBeside, StoredScale
from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Quantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.protocols import ArrayRows, Layout, Source
from qconvert.core.values import Value

W = TypeVar("W", bound="Wrapped")


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A layout that does what the one `inside` does (see `core.protocols.Layout`)."""

    inside: Layout

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def traits(self) -> LayoutTraits:
        return self.inside.traits

    @property
    def transposed(self) -> bool:
        return self.inside.transposed

    @property
    def named_by(self) -> Literal["tensor", "module"] | None:
        return None

    @property
    def computed(self) -> Mapping[str, str]:
        return self.inside.computed

    @property
    def rewritten(self) -> Layout:
        return replace(self, inside=self.inside.rewritten)

    def fitted(self, encodings: Iterable[Quantized]) -> Layout:
        return replace(self, inside=self.inside.fitted(encodings))

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        return self.inside.stored_arrays(tensor)

    def row_alignment(self, tensor: ModelTensor) -> int:
        return self.inside.row_alignment(tensor)

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterable[ArrayRows]:
        return self.inside.encode(tensor, start, value)

    def as_stored(self, value: Value) -> Value:
        return self.inside.as_stored(value)

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        return self.inside.decode(tensor, source, start, stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return self.inside.settings(quantized, kept)

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        return self.inside.settings_beside(quantized, kept, scales)

    def file_metadata(self, tensors: Iterable[ModelTensor], config: Json) -> Mapping[str, str]:
        return self.inside.file_metadata(tensors, config)

    def scale_stored_as(self, name: str) -> StoredScale | None:
        return self.inside.scale_stored_as(name)

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        return self.inside.place_of_scale(scale, weight)

    def without_input_scale(self, weight: Quantized) -> Quantized | None:
        return self.inside.without_input_scale(weight)
