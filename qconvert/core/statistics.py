"""Names the statistics of a linear's inputs, and the source that gives them.

Statistics are keyed by what a linear is in the model (role, layer, expert), never by the name that a
container gives its weight, so that one file of statistics serves every output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qconvert.core.dtypes import Json

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class StatisticsKey:
    """The input of one linear: the role of its weight ("mlp.down"), its layer, its expert."""

    role: str
    layer: int | None = None
    expert: int | None = None


class StatisticsSource(Protocol):
    """Statistics of a model's activations."""

    def __contains__(self, key: object) -> bool: ...

    @property
    def record(self) -> Json:
        """Where they come from, as plain data for the manifest: file, dataset, chunks."""
        ...

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]."""
        ...


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Statistics of the inputs of rows [first, last) of a block of rows.

    `second_moments_I` float32 [I]: the mean square of every input column.
    """

    first: int
    last: int
    second_moments_I: np.ndarray
