"""A part of a layer, which may be computed in two: up to what its last linear reads, and from there on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from qconvert.runtime.linear import Linear


@dataclass(frozen=True, slots=True)
class Split:
    """Where a step is cut: `inner` gives what the linear `last` reads, [B, T, I]; `outer` goes on with it."""

    last: Linear
    inner: Callable[[Tensor], Tensor]
    outer: Callable[[Tensor, Tensor], Tensor]

    @property
    def width(self) -> int:
        """The columns of what the last linear reads."""
        return int(self.last.weight.shape[1])


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Takes and gives [B, T, D]; without a `split` it is computed in one."""

    whole: Callable[[Tensor], Tensor]
    split: Split | None = None

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return self.whole(x_BTD)

    def ends_with(self, roles: tuple[str, ...]) -> bool:
        """Whether it can be cut before the linear of these roles."""
        tap = None if self.split is None else self.split.last.tap
        return tap is not None and tap.key.roles == roles
