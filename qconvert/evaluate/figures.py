"""Draws the pictures of an evaluation from its records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qconvert.evaluate.paired_statistics import CURVE_PERCENTILES
from qconvert.evaluate.records import Comparison, ModelResult, WeightError
from qconvert.report.html import Figure
from qconvert.report.svg import Axis, Curve, Mark, curves, heatmap, linear_axis, log_axis, scatter

_LEAST_KL = 1e-6
"""Below this, a divergence is the rounding of its own computation."""
_LAST_PERCENTILE = 4.0
"""Where the maximum is drawn on the axis of percentiles, on which 99.9 % lies at 3."""
_PERCENTILE_TICKS = ((0.0, "0"), (50.0, "50"), (90.0, "90"), (99.0, "99"), (99.9, "99.9"), (100.0, "max"))


def perplexity_figures(
    models: Sequence[ModelResult], reference: str | None, noise_floor: Comparison | None
) -> list[Figure]:
    """Size against quality, and with a reference the divergences of the tokens."""
    compared = [(model.label, model.versus) for model in models if model.versus is not None]
    if not compared:
        return [_size_against_perplexity(models)]
    if noise_floor is not None and noise_floor.kl.max > _LEAST_KL:
        compared.append((f"{reference}, again", noise_floor))
    return [_size_against_divergence(models, reference), _distribution(compared)]


def weight_figures(errors: Sequence[WeightError], a: str, b: str) -> list[Figure]:
    """Relative errors of the linears, by role and layer; nothing where no layer differs."""
    layered = [error for error in errors if error.layer is not None]
    if not layered:
        return []
    layers = 1 + max(error.layer or 0 for error in layered)
    rows: dict[str, list[float | None]] = {}
    for error in layered:
        line = rows.setdefault(_short(error.role), [None] * layers)
        line[error.layer or 0] = max(error.relative_rms, line[error.layer or 0] or 0.0)
    title = f"Errors of the weights of {b}"
    caption = f"Relative RMS error against {a} by role and layer."
    if any(_short(error.role) != error.role for error in layered):
        caption += " Of the experts of a layer, the worst is shown."
    return [Figure(title, heatmap(title, list(rows), list(rows.values()), "layer"), caption)]


def _short(role: str) -> str:
    """The role with all experts taken together: mlp.experts.17.up -> mlp.experts.up."""
    return ".".join(part for part in role.split(".") if not part.isdecimal())


def _size_against_divergence(models: Sequence[ModelResult], reference: str | None) -> Figure:
    marks = [
        Mark(model.label, model.size_bytes / 1e6, versus.kl.mean.value, versus.kl.mean.se)
        for model in models
        if (versus := model.versus) is not None
    ]
    y = log_axis("mean KL, nats", [mark.y for mark in marks], _LEAST_KL)
    return _against_size("mean KL", marks, y, f"KL divergence of {reference} from each model, ± 1 SE.")


def _size_against_perplexity(models: Sequence[ModelResult]) -> Figure:
    marks = [
        Mark(model.label, model.size_bytes / 1e6, model.perplexity.value, model.perplexity.se)
        for model in models
    ]
    ends = [mark.y + sign * (mark.error or 0.0) for mark in marks for sign in (-1, 1)]
    caption = "Without a reference, ± 1 SE is the spread of the text."
    return _against_size("perplexity", marks, linear_axis("perplexity", ends), caption)


def _against_size(what: str, marks: Sequence[Mark], y: Axis, caption: str) -> Figure:
    x = linear_axis("MB on disk", [mark.x for mark in marks], from_zero=True)
    picture = scatter(f"Size against {what}", marks, x, y)
    return Figure("Size against quality", picture, f"Down and to the left is better. {caption}")


def _distribution(compared: list[tuple[str, Comparison]]) -> Figure:
    rarities = [_rarity(percent) for percent in CURVE_PERCENTILES]
    lines = [Curve(label, tuple(zip(rarities, versus.kl.curve, strict=True))) for label, versus in compared]
    ticks = tuple((_rarity(percent), text) for percent, text in _PERCENTILE_TICKS)
    x = Axis("percentile of tokens", 0.0, _LAST_PERCENTILE, ticks)
    y = log_axis("KL, nats", [kl for line in lines for _, kl in line.points], _LEAST_KL)
    caption = "How much each token's distribution moved: the tail to the right is what users notice."
    return Figure("Divergence of the tokens", curves("KL by percentile", lines, x, y), caption)


def _rarity(percent: float) -> float:
    """Every decade of rarer tokens takes the same room: 90 % at 1, 99 % at 2, 99.9 % at 3."""
    return _LAST_PERCENTILE if percent >= 100 else -math.log10(1 - percent / 100)
