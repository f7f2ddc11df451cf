"""Names what happens to the rows of a tensor between a model and a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The operations of these names are in `ops`.
TransformKind = Literal[
    "interleave_halves", "plus_one", "unit_rows", "minus_exp", "transpose", "scale", "swap_groups"
]


@dataclass(frozen=True, slots=True)
class RowTransform:
    """One change of the rows of a tensor on the way into a GGUF file.

    `rows` of them are taken at once: the rows of one head, or of one transposed block. `factor` and
    `groups` are those of the model's declaration.
    """

    change: TransformKind
    rows: int = 1
    factor: float = 1.0
    groups: tuple[int, int] = (1, 1)
