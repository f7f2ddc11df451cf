"""Keeps, for some tokens of a text, what linears read and the gradients to what they gave.

In a layer they are the same tokens for all linears.

Legend: N rows of an input, I in features, O out features.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.sensitivity import RowSamples
from qconvert.core.statistics import StatisticsKey
from qconvert.runtime.observers import InputKey

FEWEST_ROWS = 16
"""An expert that has fewer sampled rows has none: their mean would say little."""

_Place = tuple[str, int | None]
"""Role and expert."""


@dataclass(slots=True)
class RowSampler:
    """Takes one of `every` rows of each input of a layer, and the gradients of the same rows.

    Of every run of `every` rows one is drawn, by a generator that starts from the number of the batch: so a
    token is taken at all inputs that see all tokens, and no position of a window more often than another.
    """

    every: int
    inputs: dict[_Place, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[_Place, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _drawn: dict[_Place, Tensor] = field(default_factory=dict)

    def take(self, key: InputKey, x_NI: Tensor) -> Tensor:
        """Keep some rows of an input; their numbers, int64."""
        roles = [(role, key.expert) for role in key.roles]
        rows_S = self._draw(len(x_NI), len(self.inputs[roles[0]]))
        picked_SI = x_NI[rows_S].float().cpu()
        for place in roles:
            self.inputs[place].append(picked_SI)
            self._drawn[place] = rows_S
        return rows_S

    def __call__(self, key: StatisticsKey, g_NO: Tensor) -> None:
        """Keep the same rows of the gradients to what a linear gave."""
        place = (key.role, key.expert)
        self.gradients[place].append(g_NO[self._drawn[place]].float().cpu())

    def _draw(self, count: int, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        first_S = torch.arange(0, count, self.every)
        drawn_S = first_S + torch.randint(self.every, (len(first_S),), generator=generator)
        return drawn_S[drawn_S < count]

    def samples(self, layer: int, tokens: int) -> dict[StatisticsKey, RowSamples]:
        """What was taken, of a text of that many tokens."""
        found: dict[StatisticsKey, RowSamples] = {}
        joined: dict[int, np.ndarray] = {}
        for place, gradients in self.gradients.items():
            inputs = self.inputs[place]
            if sum(map(len, inputs)) < FEWEST_ROWS:
                continue
            at = id(inputs[0])  # linears of one input share its rows
            if at not in joined:
                joined[at] = torch.cat(inputs).numpy()
            g_NO = torch.cat(gradients).numpy()
            role, expert = place
            found[StatisticsKey(role, layer, expert)] = RowSamples(joined[at], g_NO, self.every / tokens)
        return found

    def inputs_of(self, role: str) -> Tensor | None:
        """The rows that were taken of a role's input, those of all experts one after the other."""
        taken = [each for (own, _), parts in self.inputs.items() if own == role for each in parts]
        return torch.cat(taken) if taken else None
