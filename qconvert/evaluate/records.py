"""Holds the measurements of a model and of a weight that reports and figures are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qconvert.check import compare
from qconvert.evaluate.paired_statistics import Divergence, Estimate


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model against the reference on the same tokens.

    `perplexity_ratio` is above 1 where the model is worse; `top1_agreement` the share of tokens on
    which both find the same token likeliest; `rms_delta_p` the root mean square change of the true
    token's probability.
    """

    perplexity_ratio: Estimate
    kl: Divergence
    top1_agreement: Estimate
    rms_delta_p: Estimate


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model's figures; `versus` is None for the reference, or where there is none.

    `bits_per_byte` is the mean loss in bits times the text's tokens per UTF-8 byte, comparable
    between tokenizers. `tokens_per_second` counts the layers only, without head and statistics.
    """

    label: str
    size_bytes: int
    bits_per_weight: float
    arithmetic: str
    perplexity: Estimate
    bits_per_byte: float
    tokens_per_second: float
    versus: Comparison | None


@dataclass(frozen=True, slots=True)
class WeightError:
    """One weight of A against B: sums of squares, the largest difference, and the same in B's steps."""

    name: str
    role: str
    layer: int | None
    sum_sq_diff: float
    sum_sq: float
    max_abs: float
    max_steps: float | None

    @property
    def relative_rms(self) -> float:
        """Root of summed squared difference over summed squares of A."""
        return relative_rms([self])


def relative_rms(errors: Iterable[WeightError]) -> float:
    """The relative RMS error of several weights taken as one."""
    errors = list(errors)
    return compare.relative_rms(sum(e.sum_sq_diff for e in errors), sum(e.sum_sq for e in errors))
