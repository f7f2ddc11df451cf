"""Chooses the axes of charts: ends that fit the numbers, and ticks with their texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROOM = 0.08
"""Part of an axis left free beyond the outermost numbers."""
_LOG_ABOVE = 5.0
"""Numbers whose largest is so many times the smallest are shown on a logarithmic axis."""
_FACTORS = ((0.8, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)), (2.2, (1.0, 2.0, 5.0)), (math.inf, (1.0,)))
"""Ticks within a decade, for logarithmic axes shorter than so many decades."""
_STEPS, _MOST_TICKS = (1, 2, 2.5, 5, 10, 20), 6
"""Between ticks of linear axes, times a power of ten; and so many ticks at most."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of numbers in some direction: its label, its ends, and the ticks with their texts."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a number, 0 at the low end and 1 at the high end; others lie at the nearer end."""
        scaled = math.log10 if self.log else float
        low, high, value = (scaled(x) for x in (self.low, self.high, max(value, self.low)))
        return min(1.0, (value - low) / (high - low))


def fitted_axis(label: str, values: Sequence[float], floor: float = 0.0) -> Axis:
    """The axis that shows these numbers best: logarithmic where they are positive and far apart.

    Numbers below a positive `floor` lie at the end of a logarithmic axis.
    """
    least, most = max(min(values), floor), max(values)
    if least > 0 and most >= _LOG_ABOVE * least:
        return log_axis(label, values, floor)
    return linear_axis(label, values)


def linear_axis(label: str, values: Sequence[float]) -> Axis:
    """An axis around the numbers with three to six round ticks."""
    low, high = min(values), max(values)
    room = (high - low) * _ROOM or abs(high) * 0.1 or 1.0
    bottom = low - room
    low, high = (0.0 if bottom < 0 < low else bottom), high + room
    power = 10.0 ** math.floor(math.log10((high - low) / 7))
    choices = ([step * i for i in _within(low, high, step)] for step in (power * f for f in _STEPS))
    ticks = next(ticks for ticks in choices if len(ticks) <= _MOST_TICKS)
    return Axis(label, low, high, tuple((tick, f"{tick:.10g}") for tick in ticks))


def _within(low: float, high: float, step: float) -> range:
    """The multiples of a step that lie between two numbers."""
    return range(math.ceil(low / step), math.floor(high / step) + 1)


def log_axis(label: str, values: Sequence[float], floor: float = 1e-9) -> Axis:
    """A logarithmic axis around the numbers, 2.5-fold at least; those below `floor` lie at its end.

    Ticks are powers of ten, and round multiples of them where the axis has few decades.
    """
    kept = [math.log10(max(value, floor)) for value in values]
    low, high = min(kept), max(kept)
    room = max((high - low) * _ROOM, 0.2)
    low, high = low - room, high + room
    decades = range(math.floor(low), math.ceil(high) + 1)
    step = max(1, -(-len(decades) // 9))
    factors = next(found for span, found in _FACTORS if high - low < span)
    numbers = [factor * 10.0**power for power in decades[::step] for factor in factors]
    ticks = [(x, power_text(x)) for x in numbers if low <= math.log10(x) <= high]
    return Axis(label, 10.0**low, 10.0**high, tuple(ticks), log=True)


def power_text(value: float) -> str:
    """A round number in few letters: `0.02`, `5·10⁻³`, `10⁴`."""
    power = math.floor(math.log10(value) + 1e-9)
    if -2 <= power <= 3:
        return f"{value:.6g}"
    factor, far = f"{value / 10.0**power:.3g}", f"10{str(power).translate(_SUPERSCRIPTS)}"
    return far if factor == "1" else f"{factor}·{far}"


def pareto_front(points: Iterable[tuple[float, float]]) -> list[int]:
    """The points that no other beats in both numbers, smaller being better; from left to right.

    Of equal points, the first counts.
    """
    listed = list(points)
    front: list[int] = []
    for i in sorted(range(len(listed)), key=lambda i: (*listed[i], i)):
        if not front or listed[i][1] < listed[front[-1]][1]:
            front.append(i)
    return front
