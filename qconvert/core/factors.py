"""Defines what the rows and columns of a stored tensor are scaled by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Floats: TypeAlias = "np.ndarray"
"""A vector of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What the numbers of a tensor of R rows become as they are read: `(w * c + offset) / d - offset`.

    `columns` are the factors c of each column, float32 [I], for as many runs of consecutive rows (experts) of
    equal length; `divisors` are ranges of rows and their d, float32 each. None, and rows without, stand for
    ones.
    """

    columns: tuple[Floats | None, ...] = (None,)
    divisors: tuple[tuple[range, Floats], ...] = ()
    offset: float = 0.0
