"""Draws the pictures of an evaluation from its records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qconvert.evaluate.paired_statistics import CURVE_PERCENTILES
from qconvert.evaluate.records import Comparison, ModelResult, WeightError
from qconvert.report.axes import Axis, fitted_axis, log_axis
from qconvert.report.heatmap import heatmap
from qconvert.report.html import Figure
from qconvert.report.svg import Curve, Mark, curves, scatter

_LEAST_KL = 1e-6
"""Below this, a divergence is the rounding of its own computation."""
_LAST_PERCENTILE = 4.0
"""Where the maximum is drawn on the axis of percentiles, on which 99.9 % lies at 3."""
_PERCENTILE_TICKS = ((0.0, "0"), (50.0, "50"), (90.0, "90"), (99.0, "99"), (99.9, "99.9"), (100.0, "max"))
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3))


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


def errors_by_layer(errors: Sequence[WeightError]) -> tuple[list[str], list[list[float | None]]]:
    """The roles of weights in layers, and for every layer the relative RMS error of each, None where it has
    none; of the experts of a layer, the worst."""
    layered = [error for error in errors if error.layer is not None]
    roles = list(dict.fromkeys(short_role(error.role) for error in layered))
    layers = 1 + max((error.layer or 0 for error in layered), default=-1)
    values: list[list[float | None]] = [[None] * len(roles) for _ in range(layers)]
    for error in layered:
        line, column = values[error.layer or 0], roles.index(short_role(error.role))
        line[column] = max(error.relative_rms, line[column] or 0.0)
    return roles, values


def weight_figures(errors: Sequence[WeightError], a: str, b: str) -> list[Figure]:
    """Relative errors of the linears, by layer and role; nothing where no layer differs."""
    roles, values = errors_by_layer(errors)
    if not values:
        return []
    title = f"Errors of the weights of {b}"
    caption = f"Relative RMS error against {a} in per cent; the same colours in all such pictures."
    if any(short_role(error.role) != error.role for error in errors if error.layer is not None):
        caption += " Of the experts of a layer, the worst is shown."
    return [Figure(title, heatmap(title, roles, values, "layer"), caption)]


def short_role(role: str) -> str:
    """The role with all experts taken together: mlp.experts.17.up -> mlp.experts.up."""
    return ".".join(part for part in role.split(".") if not part.isdecimal())


def _size_against_divergence(models: Sequence[ModelResult], reference: str | None) -> Figure:
    unit, factor = _unit(models)
    marks = [
        Mark(model.label, model.size_bytes / factor, max(versus.kl.mean.value, _LEAST_KL), versus.kl.mean.se)
        for model in models
        if (versus := model.versus) is not None
    ]
    y = _axis_with_errors("mean KL, nats per token", marks, _LEAST_KL)
    x = fitted_axis(f"size on disk, {unit}", [mark.x for mark in marks])
    picture = scatter("Size against mean KL", marks, x, y, front=len(marks) > 1)
    caption = f"How far each model's predictions are from those of {reference}, ± 1 standard error; down and"
    caption += " to the left is better."
    if len(marks) > 1:
        caption += (
            " On the dashed line no other model here is both smaller and closer; hollow points are beaten."
        )
    return Figure("Size against quality", picture, caption)


def _size_against_perplexity(models: Sequence[ModelResult]) -> Figure:
    unit, factor = _unit(models)
    marks = [
        Mark(model.label, model.size_bytes / factor, model.perplexity.value, model.perplexity.se)
        for model in models
    ]
    x = fitted_axis(f"size on disk, {unit}", [mark.x for mark in marks])
    picture = scatter("Size against perplexity", marks, x, _axis_with_errors("perplexity", marks, 0.0))
    caption = (
        "Down and to the left is better. Without a reference, ± 1 standard error is the spread of the text."
    )
    return Figure("Size against quality", picture, caption)


def _unit(models: Sequence[ModelResult]) -> tuple[str, float]:
    """The unit of sizes, and its bytes: the largest that the smallest model fills."""
    least = min(model.size_bytes for model in models)
    return next(((name, factor) for name, factor in _UNITS if least >= factor), ("bytes", 1.0))


def _axis_with_errors(label: str, marks: Sequence[Mark], floor: float) -> Axis:
    """An axis that the error bars fit in, too, unless a bar reaches down to zero."""
    ends = [mark.y + sign * (mark.error or 0.0) for mark in marks for sign in (-1, 1)]
    shown = [end for end in ends if end > floor]
    return fitted_axis(label, [*(mark.y for mark in marks), *shown], floor)


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
