"""Arranges the importance of columns for kernels that weigh errors: by groups, padded to whole lanes."""

from __future__ import annotations

import numpy as np

from qconvert.quant.simd.lanes import LANES


def by_groups(weights_I: np.ndarray | None, groups: int, size: int) -> np.ndarray:
    """Returns importances as kernels read them, float32 [groups, group size padded to whole lanes].

    `weights_I` holds finite numbers of at least 0, one for each column, None for equal ones; the last group
    may have fewer columns. Each group is scaled to mean 1, so that no sum overflows; a group without a
    positive one gets ones.
    """
    importance_GP = np.zeros((groups, size + -size % LANES), np.float32)
    if weights_I is None:
        importance_GP[:, :size] = 1
        return importance_GP
    padded = np.zeros(groups * size)
    padded[: len(weights_I)] = weights_I
    weights_GS = padded.reshape(groups, size)
    means_G1 = weights_GS.mean(axis=1, keepdims=True)
    ones_GS = np.ones_like(weights_GS)
    importance_GP[:, :size] = np.divide(weights_GS, means_G1, out=ones_GS, where=means_G1 > 0)
    return importance_GP
