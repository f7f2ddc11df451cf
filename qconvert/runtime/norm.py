"""Normalises activations: RMS norms and layer norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.cpu.row_passes import normalise_rows, passes_rows
from qconvert.runtime.observers import Tap


@dataclass(frozen=True, slots=True)
class Norm:
    """`x / rms(x) * weight` over the last dimension: float32 inside, rounded once.

    `centred` subtracts the mean first (a layer norm); without a weight nothing is multiplied. A weight of
    another dtype than x is multiplied by before rounding.
    """

    weight: Tensor | None
    eps: float
    centred: bool = False
    tap: Tap | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.tap is not None and self.tap.observers:
            self.tap.show(x)
        if self.is_plain and self.weight is not None and passes_rows(x, x.shape[-1]):
            return normalise_rows(x, self.weight, self.eps)
        if self.is_plain and self.weight is not None and self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        width = x.shape[-1:]
        y = x.float()
        y = F.layer_norm(y, width, eps=self.eps) if self.centred else F.rms_norm(y, width, eps=self.eps)
        return (y if self.weight is None else y * self.weight).to(x.dtype)

    @property
    def width(self) -> int | None:
        """The columns that it normalises together; None for any."""
        return None if self.weight is None else self.weight.shape[-1]

    @property
    def is_plain(self) -> bool:
        """Whether it is an RMS norm with one weight per column."""
        return not self.centred and self.weight is not None and self.weight.dim() == 1
