"""Declares how the decoder reads weights: by role, never by tensor name. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qconvert.core.activations import InputQuantization
from qconvert.core.values import Value

Inputs = Callable[[str, int | None], InputQuantization | None]
"""How the inputs of the linear of a role in a layer are quantized before the product; None: they are not."""


def exact_inputs(role: str, layer: int | None) -> InputQuantization | None:
    """Multiply the inputs of every linear as they are."""
    return None


class Weights(Protocol):
    """The weights of a model, whole tensors by role.

    Roles without a layer: `embed`, `lm_head`, `final_norm`. Roles of a layer: `attn.norm`, `attn.q`,
    `attn.k`, `attn.v` or `attn.qkv` (rows of q, k, v stacked), `attn.o`, `attn.q_norm`, `attn.k_norm`,
    `mlp.norm`, `mlp.gate` and `mlp.up` or `mlp.gate_up` (stacked), `mlp.down`, `attn.post_norm`,
    `mlp.post_norm`, `attn.sinks`; in a sparse layer `mlp.router`, `mlp.experts.<n>.gate`, `.up`,
    `.gate_up`, `.down`, `mlp.shared.gate`, `.up`, `.gate_up`, `.down`, `mlp.shared_gate`.
    """

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        """All rows of a weight (`[out, in]`; a norm or sinks `[width, 1]`) or, for kind `bias`, `[out, 1]`.

        None when the model has no such tensor.
        """
        ...


class RowSource(Protocol):
    """A weight `[out, in]` whose rows are read whenever they are asked for."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self, start: int, stop: int) -> Value:
        """Rows [start, stop)."""
        ...


@dataclass(frozen=True, slots=True)
class HeldRows:
    """A weight that was read already, as a source of its rows."""

    value: Value

    @property
    def shape(self) -> tuple[int, int]:
        return self.value.rows, self.value.width

    def read(self, start: int, stop: int) -> Value:
        """Rows [start, stop); no copy."""
        return self.value.with_arrays(tuple(array[start:stop] for array in self.value.arrays))


@runtime_checkable
class StreamedWeights(Weights, Protocol):
    """Weights that can be had without being held, too."""

    def rows(self, role: str, layer: int | None = None) -> RowSource | None:
        """The rows of a weight, by the same names; None when the model has no such tensor."""
        ...
