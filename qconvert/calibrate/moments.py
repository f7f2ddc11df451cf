"""Holds the sums that are known of one input of a linear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class InputMoments:
    """Of `count` rows of an input: the sum of squares and the sum of every column, float64 [I]."""

    squares_I: np.ndarray
    sums_I: np.ndarray
    count: int

    @property
    def mean_squares_I(self) -> np.ndarray:
        """The mean square of every column, float32 [I]; ones where no row was seen, as llama.cpp has it."""
        if not self.count:
            return np.ones(len(self.squares_I), np.float32)
        return np.asarray(self.squares_I / self.count, np.float32)

    def __add__(self, other: InputMoments) -> InputMoments:
        return InputMoments(
            self.squares_I + other.squares_I, self.sums_I + other.sums_I, self.count + other.count
        )
