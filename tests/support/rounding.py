"""Cases of rounding with a Hessian: weights, inputs that are correlated, grids of several kinds."""

from __future__ import annotations

import numpy as np

from qconvert.quant.point_grid import PointGrid

NF4 = np.array([-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1])
LEVELS = {
    "unsigned": np.arange(16),
    "signed": np.arange(-4, 4),
    "table": NF4,
    "long": np.sort(np.tan(np.linspace(-1.5, 1.5, 253))),
}


def rounding_case(rows, width, levels="signed", size=32, seed=0):
    """Weights, correlated inputs' Hessian, and a grid that clips a little."""
    rng = np.random.default_rng(seed)
    w_RI = rng.standard_normal((rows, width)).astype(np.float32)
    factors = rng.standard_normal((6, width))
    x = rng.standard_normal((4 * width, 6)) @ factors + 0.7 * rng.standard_normal((4 * width, width))
    x *= np.exp(0.7 * rng.standard_normal(width))
    h_II = (x.T @ x / len(x)).astype(np.float32)
    levels_T = LEVELS[levels].astype(np.float32)
    groups = -(-width // size)
    steps_RG = (4.4 / (levels_T[-1] - levels_T[0]) * rng.uniform(0.8, 1.3, (rows, groups))).astype(np.float32)
    shifts_RG = -steps_RG * (levels_T[0] + levels_T[-1]) / 2 + rng.uniform(-0.1, 0.1, (rows, groups))
    return w_RI, h_II, PointGrid(levels_T, steps_RG, shifts_RG.astype(np.float32), size)


def stored(grid, codes_RI):
    """The numbers that codes store."""
    groups = np.arange(codes_RI.shape[1]) // grid.size
    return grid.levels_T[codes_RI] * grid.steps_RG[:, groups] + grid.shifts_RG[:, groups]


def rows_of(grid, rows):
    return PointGrid(grid.levels_T, grid.steps_RG[rows], grid.shifts_RG[rows], grid.size)
