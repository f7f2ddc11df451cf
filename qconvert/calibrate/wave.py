"""The statistics that one wave of calibrated quantization has for the linears that read its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qconvert.core.dtypes import Json
from qconvert.core.statistics import Rounding, StatisticsKey


@dataclass(slots=True)
class Wave:
    """The linears that read one kind of input in a layer, and the statistics of these inputs.

    Of an input whose Hessian could not be factored there are second moments only; of one that is finished,
    nothing.
    """

    layer: int | None
    keys: frozenset[StatisticsKey]
    hessians: dict[StatisticsKey, Rounding] = field(default_factory=dict)
    moments: dict[StatisticsKey, np.ndarray] = field(default_factory=dict)
    record: Json = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        return key in self.moments

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]."""
        return self.moments[key]

    def rounding(self, key: StatisticsKey) -> Rounding | None:
        """The Hessian of an input."""
        return self.hessians.get(key)

    def forget(self) -> None:
        """Release the Hessians, which are large, even if the wave is still referenced."""
        self.hessians.clear()
