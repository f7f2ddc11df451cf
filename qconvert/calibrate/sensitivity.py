"""Prices changes of weights in nats: what a linear's inputs and gradients say of an error in its rows.

A small change D of a weight moves the model's output by KL = 1/2 vec(D)^T F vec(D), F the Fisher information:
the mean square of what D does to the log-probability of words that the model itself draws. Where inputs x and
gradients g of the same tokens were kept, that is summed as it is, without the products between tokens,

    cost(D) = 1/2 E[(g . D x)^2]                 nats per token

so that errors of rows that go together, as those of few bits do, count together. Elsewhere F of one linear is
taken as diag(E[g_o^2]) x E[x x^T] (a Kronecker product, as in K-FAC, arXiv 1503.05671):

    cost(D) = 1/2 sum_o E[g_o^2] D_o H D_o^T     nats per token

Legend: N rows of an input, I in features, O out features, R rows of a weight, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from qconvert.calibrate.moments import GradientMoments, InputMoments, InputStatistics
from qconvert.core.dtypes import Json
from qconvert.core.statistics import EMBED, HEAD, InputHessian, StatisticsKey
from qconvert.quant.hessian import NotPositiveDefinite, eights_when_asked, factor

if TYPE_CHECKING:
    from qconvert.calibrate.gradients import TableGradients

# Samples whose products with an error's rows are held together.
_SAMPLES_AT_ONCE = 1024
# Rows that seem to compensate one another's errors by more than this are assumed to do so by chance.
_LEAST_TOGETHER = 0.25


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
class RowSamples:
    """Of one linear, some rows that it was given and the gradients to what it gave, float32.

    `weight` is what a row counts in a mean over the tokens of the text, an expert's too: a share of tokens.
    """

    x_NI: np.ndarray
    g_NO: np.ndarray
    weight: float

    def changes(self, delta_RI: np.ndarray, row_R: np.ndarray) -> tuple[np.ndarray, float]:
        """How errors in rows `row_R` move the log-probability of each sample, float64 [N], in nats.

        Also the sum of the squares of what each row of the weight does by itself.
        """
        moved_N, apart = np.empty(len(self.x_NI)), 0.0
        for first in range(0, len(moved_N), _SAMPLES_AT_ONCE):
            part = slice(first, first + _SAMPLES_AT_ONCE)
            by_row_NR = (self.x_NI[part] @ delta_RI.T) * self.g_NO[part, row_R]
            moved_N[part] = by_row_NR.sum(axis=1, dtype=np.float64)
            apart += float(np.square(by_row_NR).sum(dtype=np.float64))
        return moved_N, apart


@dataclass(frozen=True, slots=True)
class Change:
    """What errors of weights do to the output of a model; those of several weights add up.

    `moved` is by how much they move the log-probability of each sampled row, float64 [N], and the weight of a
    row, by expert (None where all tokens are seen). `alone` is what the rows of weights cost each by itself;
    `surplus` by how much the squares of `moved` are too large because some rows stand for others; `unsampled`
    what is priced without samples. All three are nats per token.
    """

    moved: Mapping[int | None, tuple[np.ndarray, float]] = field(default_factory=dict)
    alone: float = 0.0
    surplus: float = 0.0
    unsampled: float = 0.0

    def __add__(self, other: Change) -> Change:
        moved = dict(self.moved)
        for expert, (moved_N, weight) in other.moved.items():
            moved[expert] = (moved[expert][0] + moved_N if expert in moved else moved_N), weight
        sums = (self.alone + other.alone, self.surplus + other.surplus, self.unsampled + other.unsampled)
        return Change(moved, *sums)

    @property
    def cost(self) -> float:
        """Nats per token."""
        squares = sum(weight * float(moved_N @ moved_N) / 2 for moved_N, weight in self.moved.values())
        return max(squares - self.surplus, _LEAST_TOGETHER * self.alone) + self.unsampled


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Of one layer's linears, or of the tables (layer None): samples, E[g_o^2] of every output, and inputs.

    `outputs` float32 [O] by role and expert; `inputs` by role alone: experts share one, that of all rows
    routed to any of them. The "outputs" of the embedding are its rows, E[g^2] how often each is looked up,
    and its "input" the gradients' squares, so that one formula prices all. `samples` are of linears alone,
    and an expert with few rows has none.
    """

    layer: int | None
    outputs: Mapping[StatisticsKey, np.ndarray]
    inputs: Mapping[str, SecondMoments]
    samples: Mapping[StatisticsKey, RowSamples] = field(default_factory=dict)

    def cost(self, delta_RI: np.ndarray, squares_R: np.ndarray, role: str) -> float:
        """What changing rows of a role by `delta_RI` costs in nats per token; `squares_R` E[g_o^2]."""
        return float(self.inputs[role].row_errors(delta_RI) @ squares_R.astype(np.float64)) / 2

    def change(
        self,
        key: StatisticsKey,
        delta_RI: np.ndarray,
        row_R: np.ndarray,
        squares_R: np.ndarray,
        share: float = 1.0,
    ) -> Change:
        """What errors in rows `row_R` of a linear do; each row stands for `share` rows."""
        samples = self.samples.get(key)
        if samples is None:
            return Change(unsampled=share * self.cost(delta_RI, squares_R, key.role))
        moved_N, apart = samples.changes(delta_RI, row_R)
        alone = share * samples.weight * apart / 2
        # Of share rows for each that is here, share (share - 1) products of two are not of a row with itself.
        return Change({key.expert: (share * moved_N, samples.weight)}, alone, (share - 1) * alone)


@dataclass(slots=True)
class TextStatistics:
    """Statistics of the inputs of all linears, which are known once their layer was followed.

    Whoever plans with it is told that every linear will have mean squares; the embedding, which is looked up,
    has none, unless it is the head, too (`tied`). With a `damping`, what error feedback needs is there as
    well, while its layer is the last that came. `record` says of which text they are.
    """

    record: Json = field(default_factory=dict)
    damping: float | None = None
    tied: bool = False
    moments: dict[tuple[str, int | None], np.ndarray] = field(default_factory=dict)
    hessians: dict[tuple[str, int | None], InputHessian] = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        outside = (HEAD, EMBED) if self.tied else (HEAD,)
        return isinstance(key, StatisticsKey) and (key.layer is not None or key in outside)

    def second_moments(self, key: StatisticsKey) -> np.ndarray:
        """The mean square of every input column, float32 [I]; experts of a layer share theirs."""
        return self.moments[self._place(key)]

    def rounding(self, key: StatisticsKey) -> InputHessian | None:
        """What choosing codes together needs, that of all experts for an expert."""
        return self.hessians.get(self._place(key))

    def _place(self, key: StatisticsKey) -> tuple[str, int | None]:
        """Where the input is kept: a tied embedding reads as the head does."""
        return (HEAD if key == EMBED else key).role, key.layer

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


def stored_sensitivities(gradients: GradientMoments, statistics: InputStatistics) -> Iterator[Sensitivity]:
    """The same from sums that were stored: Hessians are their diagonals, experts share their mean.

    An expert that no token was routed to has no gradients. Layer by layer, then the tables.
    """
    found, inputs = gradients.squares, statistics.by_linear
    means = {key: _float32(squares / gradients.tokens) for key, squares in found.items() if squares.any()}
    for layer in sorted({key.layer for key in found if key.layer is not None}):
        outputs = {key: squares_O for key, squares_O in means.items() if key.layer == layer}
        moments: dict[str, InputMoments] = {}
        for key in (key for key in inputs if key.layer == layer):
            moments[key.role] = moments[key.role] + inputs[key] if key.role in moments else inputs[key]
        squares = {role: SecondMoments(each.mean_squares_I) for role, each in moments.items()}
        yield Sensitivity(layer, outputs, squares)
    read = {"embed": SecondMoments(means[EMBED]), "lm_head": SecondMoments(inputs[HEAD].mean_squares_I)}
    yield Sensitivity(None, {EMBED: word_frequencies(statistics.token_counts_V), HEAD: means[HEAD]}, read)


def _float32(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float32)


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
