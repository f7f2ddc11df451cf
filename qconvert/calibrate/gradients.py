"""Sums what gradients say of every linear: how much the model's output depends on each of its rows.

Legend: N rows, O out features, R rows of a block, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qconvert.calibrate.moments import GradientMoments
from qconvert.core.statistics import EMBED, HEAD, StatisticsKey


@dataclass(frozen=True, slots=True)
class OutputGradients:
    """Of one linear with outputs y and gradients g = d log p(sampled text) / dy, in nats.

    `squares_O` float32 [O]: E[g_o^2], the diagonal of the Fisher information of its outputs. `rows`: the
    rows that it was given. `blocks_BRR` float32 [ceil(O / R), R, R]: E[g g^T] within each R consecutive
    outputs, zero beyond the last; None where they were not asked for.

    All means are over the tokens of the text, all positions of all windows, an expert's too: the sum over
    the rows routed to it, divided by all tokens. A change D of its weight then costs, in nats per token of
    the text, 1/2 sum_o E[g_o^2] D_o H D_o^T with H = E[x x^T] over the rows that the linear was given, as
    `StatisticsSource` and `InputHessian` have it.
    """

    squares_O: np.ndarray
    rows: int
    blocks_BRR: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Of the tables at both ends of a model.

    `counts_V` int64: how often each word is in the text. `embedding_D` float32: E[g_d^2] of the gradient to
    a row of the embedding as it is stored, before a factor (Gemma). `head_V` float32: E[p_v (1 - p_v)], the
    expected square of the gradient to the product of row v (times that of the cap's derivative, where logits
    are capped). `head_inputs_D` float32: the mean squares of what the head reads.
    """

    counts_V: np.ndarray
    embedding_D: np.ndarray
    head_V: np.ndarray
    head_inputs_D: np.ndarray


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one backward pass over `tokens` tokens found, words sampled by `seed`."""

    tokens: int
    seed: int
    linears: Mapping[StatisticsKey, OutputGradients]
    tables: TableGradients

    @property
    def moments(self) -> GradientMoments:
        """The squares as sums, which add up."""
        found = {key: each.squares_O for key, each in self.linears.items()}
        found |= {EMBED: self.tables.embedding_D, HEAD: self.tables.head_V}
        sums = {key: squares.astype(np.float64) * self.tokens for key, squares in found.items()}
        return GradientMoments(sums, self.tokens)


@dataclass(slots=True)
class GradientSums:
    """Sums over the gradients that linears show (`runtime.reverse.GradientObserver`).

    `block_rows` consecutive outputs have their products summed too; None for squares alone.
    """

    block_rows: int | None = None
    squares: dict[StatisticsKey, Tensor] = field(default_factory=dict)
    rows: dict[StatisticsKey, int] = field(default_factory=dict)
    blocks: dict[StatisticsKey, Tensor] = field(default_factory=dict)

    def __call__(self, key: StatisticsKey, g_NO: Tensor) -> None:
        """Take in the gradients of one batch."""
        g_NO = g_NO.float()
        found_O = g_NO.square().sum(0).double()
        self.squares[key] = self.squares[key].add_(found_O) if key in self.squares else found_O
        self.rows[key] = self.rows.get(key, 0) + len(g_NO)
        if self.block_rows is not None:
            found_BRR = _products(g_NO, min(self.block_rows, g_NO.shape[1]))
            self.blocks[key] = self.blocks[key].add_(found_BRR) if key in self.blocks else found_BRR

    def means(self, tokens: int) -> Iterator[tuple[StatisticsKey, OutputGradients]]:
        """The sums as means over that many tokens, linear by linear; products are used up."""
        for key, squares_O in self.squares.items():
            blocks_BRR = self.blocks.pop(key, None)
            yield (
                key,
                OutputGradients(
                    _numpy(squares_O / tokens),
                    self.rows[key],
                    None if blocks_BRR is None else _numpy(blocks_BRR.div_(tokens)),
                ),
            )


def _products(g_NO: Tensor, size: int) -> Tensor:
    """The sum of g g^T within each `size` consecutive columns, the last ones filled up with zeros."""
    count, out = g_NO.shape
    g_NO = torch.nn.functional.pad(g_NO, (0, -out % size))
    g_BNR = g_NO.view(count, -1, size).transpose(0, 1)
    return g_BNR.transpose(1, 2) @ g_BNR


def _numpy(x: Tensor) -> np.ndarray:
    array: np.ndarray = x.float().cpu().numpy()
    return array
