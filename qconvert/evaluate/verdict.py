"""Summarises an evaluation in sentences, for people who do not read tables."""

from __future__ import annotations

from collections.abc import Sequence

from qconvert.evaluate.records import Comparison, ModelResult, WeightError, relative_rms
from qconvert.evaluate.scales import KL, RMS_ERROR
from qconvert.report.tables import size

_MOST_SENTENCES = 3
"""Of so many models each has a sentence; more are taken together by how good they are."""
_MOST_NAMES = 2
"""So few tensors that differ, beside more that are equal, are named."""


def perplexity_verdict(models: Sequence[ModelResult], reference: str | None) -> tuple[str, ...]:
    """What models lose against a reference; without one, which reads the text best."""
    compared = [(model, model.versus) for model in models if model.versus is not None]
    if not compared:
        return (_alone(models, reference),) if models else ()
    if len(compared) <= _MOST_SENTENCES:
        return tuple(f"{model.label} {_loss(versus)}; {_meaning(versus)}." for model, versus in compared)
    lines = []
    for grade, (_, word) in enumerate(KL.steps):
        alike = [model for model, versus in compared if KL.grade(versus.kl.mean.value) == grade]
        if alike:
            labels = ", ".join(f"{model.label} ({size(model.size_bytes)})" for model in alike)
            lines.append(f"The loss is {word}: {labels}.")
    return tuple(lines)


def weights_verdict(a: str, b: str, errors: Sequence[WeightError], equal: int) -> tuple[str, ...]:
    """How far the weights of B are from those of A."""
    if not errors:
        return (f"{b} has the weights of {a}: all {equal} tensors are equal.",)
    error = relative_rms(errors)
    if len(errors) <= _MOST_NAMES < equal:
        names = " and ".join(each.name for each in errors)
        differ = "differs" if len(errors) == 1 else "differ"
        said = (
            f"Only {names} of {b} {differ} from {a}'s, by {100 * error:.3g} % (RMS): {RMS_ERROR.word(error)}"
        )
        return (f"{said}; the other {equal} tensors are equal.",)
    return (f"The weights of {b} differ from {a}'s by {100 * error:.3g} % (RMS): {RMS_ERROR.word(error)}.",)


def _loss(versus: Comparison) -> str:
    """`has a perplexity 2.8 % higher`, or that there is no difference to be seen."""
    ratio = versus.perplexity_ratio
    change, error = 100 * (ratio.value - 1), 200 * (ratio.se or 0.0)
    if abs(change) <= error or f"{abs(change):.2g}" == "0":
        return f"has the same perplexity within the error ({change:+.2g} % ± {error / 2:.1g} %)"
    return f"has a perplexity {abs(change):.2g} % {'higher' if change > 0 else 'lower'}"


def _meaning(versus: Comparison) -> str:
    mean = versus.kl.mean.value
    return f"KL {max(mean, 0.0):.2g}: {KL.word(mean)}"


def _alone(models: Sequence[ModelResult], reference: str | None) -> str:
    best = min(models, key=lambda model: model.perplexity.value)
    said = f"{best.label} has a perplexity of {best.perplexity.value:.4g}"
    others = f", the lowest of {len(models)} models" if len(models) > 1 else ""
    rest = "." if reference else "; without a reference, the cost of quantization is unknown."
    return f"{said}{others}{rest}"
