"""Fetches the weights of a decoder by role, checks their shapes, and puts them on the device."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from qconvert.core.values import Value
from qconvert.errors import CorruptCheckpoint
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cpu.weight_memory import Allocate, one_by_one
from qconvert.runtime.device_layout import Layout, place_table, place_vector, place_weight, stack
from qconvert.runtime.linear import Linear, Table, Weight
from qconvert.runtime.norm import Norm
from qconvert.runtime.observers import InputKey, Observers, Tap
from qconvert.runtime.storage import StreamedWeight
from qconvert.runtime.weight_source import Inputs, StreamedWeights, Weights

_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")


class Streaming(Enum):
    """Which weights are read whenever they are needed, and not held."""

    NOTHING = "nothing"
    TABLES = "tables"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """The weights of a model, fetched whenever they are asked for; `load_decoder` explains the fields."""

    config: DecoderConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype
    layout: Layout
    inputs: Inputs
    streaming: Streaming = Streaming.NOTHING
    allocate: Allocate = one_by_one
    observers: Observers = field(default_factory=Observers)

    def stacked(self, fused: str, i: int, roles: Sequence[str]) -> tuple[Linear, ...]:
        """The fused projection when the model has it, or when the layout is for speed; else its parts."""
        tap = self.tap(roles, i)
        if self.streaming is Streaming.EVERYTHING:
            return self.stacked_streams(fused, i, roles, tap)
        value = self.find(fused, i, roles)
        if value is not None:
            return (Linear(self.place(value), self.bias(fused, i, roles), tap, self.inputs(fused, i)),)
        values = [self.value(role, i) for role in roles]
        biases = [self.bias(role, i) for role in roles]
        inputs = [self.inputs(role, i) for role in roles]
        whole = stack(values) if self.layout is Layout.AUTO and len(set(inputs)) == 1 else None
        present = [bias for bias in biases if bias is not None]
        if whole is None or len(present) not in (0, len(biases)):
            taps = (tap, *(None for _ in roles[1:]))
            parts = zip(map(self.place, values), biases, taps, inputs, strict=True)
            return tuple(Linear(*part) for part in parts)
        return (Linear(self.place(whole), torch.cat(present) if present else None, tap, inputs[0]),)

    def stacked_streams(self, fused: str, i: int, roles: Sequence[str], tap: Tap) -> tuple[Linear, ...]:
        """The fused projection when the model has it, else its parts; none of them held."""
        whole = self.stream(fused, i, roles)
        if whole is not None:
            return (Linear(whole, self.bias(fused, i, roles), tap, self.inputs(fused, i)),)
        return tuple(self.tapped(role, i, tap if role == roles[0] else None) for role in roles)

    def linear(self, role: str, i: int) -> Linear:
        return self.tapped(role, i, self.tap([role], i))

    def tapped(self, role: str, i: int, tap: Tap | None) -> Linear:
        return Linear(self.weight(role, i), self.bias(role, i), tap, self.inputs(role, i))

    def weight(self, role: str, i: int) -> Weight:
        if self.streaming is not Streaming.EVERYTHING:
            return self.place(self.value(role, i))
        streamed = self.stream(role, i)
        if streamed is None:
            raise missing_weight(role, i, "weight")
        return streamed

    def table(self, role: str) -> Table | None:
        """A weight outside the layers, embedding or head; None when the model has none of its own."""
        if self.streaming is not Streaming.NOTHING:
            return self.stream(role, None)
        value = self.find(role, None)
        if value is None:
            return None
        return place_table(value, self.device, self.dtype, self.layout, self.allocate)

    def stream(self, role: str, i: int | None, members: Sequence[str] = ()) -> StreamedWeight | None:
        """A weight, or the fused one of all members, that is read whenever it is needed."""
        assert isinstance(self.weights, StreamedWeights)
        rows = self.weights.rows(role, i)
        if rows is None:
            return None
        self.check_shape(role, i, rows.shape, members)
        place = partial(place_table, device=self.device, dtype=self.dtype, layout=self.layout)
        return StreamedWeight(rows, self.device, self.dtype, place)

    def tap(self, roles: Sequence[str], i: int) -> Tap:
        expert = _EXPERT.search(roles[0])
        groups = tuple(_EXPERT.sub("", role) for role in roles)
        return Tap(InputKey(groups, i, int(expert[1]) if expert else None), self.observers.linears)

    def place(self, value: Value) -> Weight:
        return place_weight(value, self.device, self.dtype, self.layout, self.allocate)

    def value(self, role: str, i: int | None) -> Value:
        value = self.find(role, i)
        if value is None:
            raise missing_weight(role, i, "weight")
        return value

    def find(self, role: str, i: int | None, members: Sequence[str] = ()) -> Value | None:
        """A weight, or the fused one of all members, of the shape that the architecture has."""
        value = self.weights.get(role, i)
        if value is not None:
            self.check_shape(role, i, (value.rows, value.width), members)
        return value

    def check_shape(self, role: str, i: int | None, found: tuple[int, ...], members: Sequence[str]) -> None:
        """Raise CorruptCheckpoint unless a weight, or the fused one of all members, has its shape."""
        shapes = [self.config.shapes[each, i, "weight"] for each in members or (role,)]
        _check_shape(role, i, found, (sum(rows for rows, _ in shapes), shapes[0][1]))

    def bias(self, role: str, i: int, members: Sequence[str] = ()) -> Tensor | None:
        shapes = [self.config.shapes.get((each, i, "bias")) for each in members or (role,)]
        if None in shapes:
            return None
        value = self.weights.get(role, i, "bias")
        if value is None:
            raise missing_weight(role, i, "bias")
        return self.vector(role, i, value, (sum(shape[0] for shape in shapes if shape),))

    def norm(
        self,
        role: str,
        i: int | None,
        *,
        scale: float = 1.0,
        weightless: bool = False,
        offset: float | None = None,
    ) -> Norm | None:
        """A norm with its weight, plus the model's offset, times `scale`; None where there is none."""
        graph, weight = self.config.graph, None
        offset = self.config.norm_offset if offset is None else offset
        if self.config.has(role, i):
            changed = offset or scale != 1
            # What is added to or multiplied into a weight stays in float32: it would not fit bf16.
            weight = self.parameter(role, i, torch.float32 if changed else self.dtype)
            weight = (weight + offset) * scale if changed else weight
        elif not weightless and role != "final_norm":
            return None
        tap = Tap(InputKey((role,), i), self.observers.norms)
        return Norm(weight, self.config.norm_eps, graph.layer_norm, tap)

    def parameter(self, role: str, i: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """A weight that is no matrix, in the shape that the architecture has."""
        value = self.weights.get(role, i)
        if value is None:
            raise missing_weight(role, i, "weight")
        return self.vector(role, i, value, dtype=dtype)

    def vector(
        self,
        role: str,
        i: int | None,
        value: Value,
        wanted: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A parameter that is no matrix, in the shape that the architecture has."""
        wanted = wanted or self.config.shapes[role, i, "weight"]
        vector = place_vector(value, self.device, dtype or self.dtype)
        if vector.numel() != math.prod(wanted):
            _check_shape(role, i, tuple(vector.shape), wanted)
        return vector.view(wanted)


def _place(role: str, layer: int | None) -> str:
    return role if layer is None else f"layer {layer}: {role}"


def missing_weight(role: str, layer: int | None, kind: str) -> CorruptCheckpoint:
    """The error of a weight that should be there."""
    return CorruptCheckpoint(
        f"{_place(role, layer)}: the checkpoint has no {kind}", "check that all of its shards are there"
    )


def _check_shape(role: str, layer: int | None, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CorruptCheckpoint(
            f"{_place(role, layer)}: shape {list(found)}, but config.json implies {list(wanted)}",
            "use the weights and the config.json of one model",
        )
