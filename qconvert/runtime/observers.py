"""Shows observers what linears and norms read: how calibration collects statistics.

Every decoder has one list of observers for its linears and one for its norms, shared by all of them, so
that a product without observers costs one look at an empty list. Legend: N rows, I in features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from qconvert.core.statistics import InputKey

__all__ = ["InputKey", "Observer", "Observers", "Tap"]

Observer = Callable[[InputKey, Tensor], None]
"""Called with the rows that are about to be read, [N, I] in the compute dtype; must not change them.

Of an expert, these are the rows routed to it.
"""


@dataclass(frozen=True, slots=True)
class Tap:
    """Where observers see one input; `observers` is the decoder's list."""

    key: InputKey
    observers: list[Observer]

    def show(self, x: Tensor) -> None:
        """Call every observer with x, [..., I], as [N, I]."""
        for observe in self.observers:
            observe(self.key, x.detach().reshape(-1, x.shape[-1]))


@dataclass(frozen=True, slots=True)
class Observers:
    """The observers of a decoder: those of its linears, and those of its norms."""

    linears: list[Observer] = field(default_factory=list)
    norms: list[Observer] = field(default_factory=list)

    @property
    def present(self) -> bool:
        return bool(self.linears or self.norms)
