"""Prices changes of weights in nats: what a linear's inputs and gradients say of an error in its rows.

A small change D of a weight moves the model's output by KL = 1/2 vec(D)^T F vec(D), F the Fisher information.
With F of one linear taken as diag(E[g_o^2]) x E[x x^T] (a Kronecker product, as in K-FAC, arXiv 1503.05671):

    cost(D) = 1/2 sum_o E[g_o^2] D_o H D_o^T     nats per token

Legend: N rows of an input, I in features, O out features, R rows of a weight, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from qconvert.core.dtypes import Json
from qconvert.core.statistics import InputHessian, StatisticsKey, StatisticsSource
from qconvert.quant.hessian import NotPositiveDefinite, eights_when_asked, factor

if TYPE_CHECKING:
    from qconvert.calibrate.gradients import Gradients, TableGradients

EMBED, HEAD = StatisticsKey("embed"), StatisticsKey("lm_head")


@dataclass(frozen=True, slots=True)
class SecondMoments:
    """Of one input: E[x^2], float32 [I], and where it was kept H = E[x x^T], float32 [I, I].

    `held_NI` float32: rows that are in none of them. Where there are some, errors are measured on them, as
    those of codes that were chosen for H are not the errors on other tokens.
    """

    second_moments_I: np.ndarray
    hessian_II: np.ndarray | None = None
    held_NI: np.ndarray | None = None

    def row_errors(self, delta_RI: np.ndarray) -> np.ndarray:
        """D_o H D_o^T of every row, float64 [R]: the mean square by which a row's product changes."""
        if self.hessian_II is None:
            squares_R: np.ndarray = np.square(delta_RI) @ self.second_moments_I
        elif self.held_NI is not None:
            squares_R = np.square(delta_RI @ self.held_NI.T).mean(axis=1, dtype=np.float64)
        else:
            squares_R = np.einsum("ri,ri->r", delta_RI @ self.hessian_II, delta_RI)
        return np.maximum(squares_R.astype(np.float64), 0)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Of one layer's linears, or of the tables (layer None): E[g_o^2] of every output and their inputs.

    `outputs` float32 [O] by role and expert; `inputs` by role alone: experts share one, that of all rows
    routed to any of them. The "outputs" of the embedding are its rows, E[g^2] how often each is looked up,
    and its "input" the gradients' squares, so that one formula prices all.
    """

    layer: int | None
    outputs: Mapping[StatisticsKey, np.ndarray]
    inputs: Mapping[str, SecondMoments]

    def cost(self, delta_RI: np.ndarray, squares_R: np.ndarray, role: str) -> float:
        """What changing rows of a role by `delta_RI` costs in nats per token; `squares_R` E[g_o^2]."""
        return float(self.inputs[role].row_errors(delta_RI) @ squares_R.astype(np.float64)) / 2


@dataclass(slots=True)
class TextStatistics:
    """Statistics of the inputs of all linears, which are known once their layer was followed.

    Whoever plans with it is told that every linear will have mean squares; the embedding, which is looked up,
    has none. With a `damping`, what error feedback needs is there as well, while its layer is the last that
    came. `record` says of which text they are.
    """

    record: Json = field(default_factory=dict)
    damping: float | None = None
    moments: dict[tuple[str, int | None], np.ndarray] = field(default_factory=dict)
    hessians: dict[tuple[str, int | None], InputHessian] = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, StatisticsKey) and (key.layer is not None or key == HEAD)

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]; experts of a layer share theirs."""
        return self.moments[key.role, key.layer]

    def rounding(self, key: StatisticsKey) -> InputHessian | None:
        """What choosing codes together needs, that of all experts for an expert."""
        return self.hessians.get((key.role, key.layer))

    def keeping(self, found: Iterable[Sensitivity]) -> Iterator[Sensitivity]:
        """The same sensitivities, their moments kept, and Hessians until the next one comes."""
        for each in found:
            self.moments |= {(role, each.layer): m.second_moments_I for role, m in each.inputs.items()}
            self.hessians = {}
            if self.damping is not None:
                by_input = {id(m): _factored(m, self.damping) for m in each.inputs.values()}
                made = {(role, each.layer): by_input[id(m)] for role, m in each.inputs.items()}
                self.hessians = {key: hessian for key, hessian in made.items() if hessian is not None}
            yield each
        self.hessians = {}


def _factored(moments: SecondMoments, damping: float) -> InputHessian | None:
    """The Hessian of an input with its factor; None where it was not kept, or has none."""
    if moments.hessian_II is None or moments.held_NI is None:
        return None
    try:
        order_I, factor_II, used_damping = factor(moments.hessian_II, damping)
    except NotPositiveDefinite:
        return None
    held_NI = moments.held_NI
    eights = eights_when_asked(moments.hessian_II, used_damping)
    return InputHessian(moments.hessian_II, order_I, factor_II, None, held_NI, held_NI, eights)


def stored_sensitivities(
    gradients: Gradients, statistics: StatisticsSource, layers: int
) -> Iterator[Sensitivity]:
    """The same from statistics that were stored: Hessians are their diagonals, experts share their mean."""
    for layer in range(layers):
        found = {key: each for key, each in gradients.linears.items() if key.layer == layer}
        inputs: dict[str, SecondMoments] = {}
        for role in {key.role for key in found}:
            measured = [
                (key, each.rows) for key, each in found.items() if key.role == role and key in statistics
            ]
            if measured:
                total = sum(rows for _, rows in measured)
                sums_I = sum(rows * statistics.second_moments(key) for key, rows in measured)
                inputs[role] = SecondMoments(np.asarray(sums_I / total, np.float32))
        yield Sensitivity(layer, {key: each.squares_O for key, each in found.items()}, inputs)
    yield sensitivity_of_tables(gradients.tables, SecondMoments(gradients.tables.head_inputs_D))


def sensitivity_of_tables(tables: TableGradients, head_input: SecondMoments) -> Sensitivity:
    """That of embedding and head."""
    frequencies_V = word_frequencies(tables.counts_V)
    inputs = {"embed": SecondMoments(tables.embedding_D), "lm_head": head_input}
    return Sensitivity(None, {EMBED: frequencies_V, HEAD: tables.head_V}, inputs)


def word_frequencies(counts_V: np.ndarray) -> np.ndarray:
    """How often each word is expected in other texts, float32 [V].

    As many words are expected to be new as were there once (Good, "The population frequencies of species",
    1953); they are spread evenly.
    """
    new = max(1, int((counts_V == 1).sum()))
    frequencies_V: np.ndarray = (counts_V + new / len(counts_V)) / (counts_V.sum() + new)
    return frequencies_V.astype(np.float32)
