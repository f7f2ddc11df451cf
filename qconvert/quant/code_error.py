"""How far have weights moved, in the only measure that all grids share: their own steps?"""

from __future__ import annotations

import numpy as np


def most_steps(moved: np.ndarray, scales: np.ndarray) -> float:
    """The largest |moved| / |scale|; infinite where something moves over a scale of 0."""
    moved, scales = np.abs(moved.astype(np.float64)), np.abs(scales.astype(np.float64))
    ratios = np.divide(moved, scales, out=np.where(moved > 0, np.inf, 0.0), where=scales > 0)
    return float(ratios.max(initial=0.0))
