"""The words an architecture is declared in: slots, dimensions, fusions, families.

A *slot* is one kind of tensor in the model's printed structure; its shape is written in named
dimensions, which the family computes from config.json (per layer, so that layer-wise scaled models
need no special case). Bits and bytes never appear here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from qconvert.tensors import Json

SlotKind = Literal["linear", "embedding", "norm", "router", "other"]
Dimensions = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """One row of a family's table: a module that owns a weight and perhaps a bias.

    `module` is the HF module name; `{layer}` and `{expert}` in it are counted out. `shape` names
    the dimensions of the weight as stored. `bias` is True, False or the config flag that decides.
    Only a `linear` slot is quantized unless a rule asks for more. `only_if` names a dimension that
    must be non-zero (per layer) for the slot to exist there.
    """

    role: str
    module: str
    shape: tuple[str, ...]
    kind: SlotKind = "linear"
    bias: bool | str = False
    only_if: str | None = None

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.module

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.module


@dataclass(frozen=True, slots=True)
class Fusion:
    """Linears that read the same input and may be stored as one: rows stacked in this order."""

    role: str
    module: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Everything the catalogue says about models built alike.

    `model_types` are the config.json `model_type` values; `classes` the class names seen in
    `architectures`. `dimensions(config, layer)` returns every dimension named in `slots`, and
    `named_by` says which config keys a dimension comes from, for error messages. `ignored` are
    regular expressions of stored buffers that carry no information (they are dropped).
    `native_fused` tells whether the family's own class computes with the fused linears.
    """

    name: str
    model_types: tuple[str, ...]
    classes: tuple[str, ...]
    slots: tuple[Slot, ...]
    dimensions: Callable[[Json, int], Dimensions]
    named_by: Mapping[str, str]
    fusions: tuple[Fusion, ...] = ()
    ignored: tuple[str, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    native_fused: bool = False

    def slot(self, role: str) -> Slot:
        """The slot of this role, which must be declared."""
        return next(slot for slot in self.slots if slot.role == role)
