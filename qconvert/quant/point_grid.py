"""Describes every number that rows can store once their scales are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PointGrid:
    """The numbers that rows can store: column k of row r stores `levels_T[code] * step + shift` of its group.

    `levels_T` float32 [T <= 256], rising: the numbers of the codes 0..T-1. `steps_RG` and `shifts_RG` float32
    [R, G]; steps of 0 or below are possible. `size`: columns of a group; column k is in group k // size.
    """

    levels_T: np.ndarray
    steps_RG: np.ndarray
    shifts_RG: np.ndarray
    size: int
