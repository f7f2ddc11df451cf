"""A part of a layer, which may be computed in two: up to what its last linear reads, and from there on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qconvert.runtime.linear import Linear

LayerStep = Callable[[Tensor], Tensor]
"""From [B, T, D] to [B, T, D]."""


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step that is cut: `inner` gives what the linear `last` reads, [B, T, I]; `outer` goes on with it."""

    last: Linear
    inner: Callable[[Tensor], Tensor]
    outer: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return self.outer(x_BTD, self.inner(x_BTD))

    @property
    def width(self) -> int:
        """The columns of what the last linear reads."""
        return int(self.last.weight.shape[1])

    def ends_with(self, roles: tuple[str, ...]) -> bool:
        """Whether its last linear has these roles."""
        return self.last.tap is not None and self.last.tap.key.roles == roles
