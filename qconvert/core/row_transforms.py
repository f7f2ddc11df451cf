"""Names the transforms of a tensor's rows between a model and a GGUF file; `ops` implements them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransformKind = Literal[
    "interleave_halves",
    "plus_one",
    "unit_rows",
    "minus_exp",
    "transpose",
    "scale",
    "swap_groups",
    "int32",
    "multiply",
]


@dataclass(frozen=True, slots=True)
class RowTransform:
    """One transform of a tensor's rows on the way into a GGUF file.

    It applies to `rows` rows at a time: those of one head, of one transposed block, or of each of two tensors
    that are multiplied. `factor` and `groups`
    come from the model's GGUF declaration, and so do `segments`: numbers of rows, which are all of a matrix,
    each with a factor of its own.
    """

    change: TransformKind
    rows: int = 1
    factor: float = 1.0
    groups: tuple[int, int] = (1, 1)
    segments: tuple[tuple[int, float], ...] = ()
