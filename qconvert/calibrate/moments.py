"""Holds the sums over the inputs of linears, and adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.core.statistics import InputKey, StatisticsKey


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


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """Of `tokens` tokens: sums of squares of gradients of the log-probability of sampled text, in nats.

    `squares` float64: of a linear those to its outputs, [O]; of `embed` those to what a row adds, [D]; of
    `lm_head` p (1 - p) of every word, [V], in place of a square. Means over tokens are those of `Gradients`.
    """

    squares: Mapping[StatisticsKey, np.ndarray]
    tokens: int

    def __add__(self, other: GradientMoments) -> GradientMoments:
        both = dict(self.squares)
        for key, squares in other.squares.items():
            both[key] = both[key] + squares if key in both else squares
        return GradientMoments(both, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The moments of every input, once per input, and how often each token was read (int64 [V])."""

    inputs: Mapping[InputKey, InputMoments]
    token_counts_V: np.ndarray

    @property
    def by_linear(self) -> dict[StatisticsKey, InputMoments]:
        """The same moments by the linear that reads them."""
        return {
            StatisticsKey(role, key.layer, key.expert): moments
            for key, moments in self.inputs.items()
            for role in key.roles
        }

    @property
    def tokens(self) -> int:
        """The number of tokens that were read."""
        return int(self.token_counts_V.sum())

    @property
    def unrouted(self) -> list[tuple[int, int]]:
        """The experts that no token was routed to, by layer and number."""
        unseen = {(k.layer, k.expert) for k, m in self.inputs.items() if not m.count}
        return sorted((i, e) for i, e in unseen if i is not None and e is not None)

    def __add__(self, other: InputStatistics) -> InputStatistics:
        inputs = {key: moments + other.inputs[key] for key, moments in self.inputs.items()}
        return InputStatistics(inputs, self.token_counts_V + other.token_counts_V)
