"""Draws charts as inline SVG: points, curves, a heat map. Text goes in, one `<svg>` comes out.

A chart is 400 units wide, about a phone's width, so its letters are never scaled down there. Colours
are CSS classes (`s0` to `s5` for series, `line`, `grid`, `cell`), which the page defines for light
and dark. Every mark carries a `<title>`, which browsers show and screen readers read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 400, 280
SERIES = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 18, 14, 44
_LETTER = 8.0
"""About the width of a letter at the 12 to 13.5 units that pages give them."""
_LINE = 14
_CELL = 22
_FAINTEST = 0.12
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


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled point, with the half-width of its error bar where there is one."""

    label: str
    x: float
    y: float
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """A labelled line through points."""

    label: str
    points: tuple[tuple[float, float], ...]


def linear_axis(label: str, values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """An axis around the numbers with three to seven round ticks."""
    low, high = 0.0 if from_zero else min(values), max(values)
    room = (high - low or abs(high) or 1.0) * 0.12
    low, high = low if from_zero else low - room, high + room
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4)
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(label, low, high, tuple((tick, f"{tick:.10g}") for tick in ticks))


def log_axis(label: str, values: Sequence[float], floor: float = 1e-9) -> Axis:
    """A logarithmic axis of whole decades around the numbers; those below `floor` lie at its end."""
    kept = [max(value, floor) for value in values]
    first, last = math.floor(math.log10(min(kept))), math.ceil(math.log10(max(kept)))
    last = max(last, first + 1)
    step = max(1, (last - first) // 5)
    ticks = []
    for power in range(first, last + 1, step):
        far = f"10{str(power).translate(_SUPERSCRIPTS)}"
        ticks.append((10.0**power, f"{10.0**power:g}" if -2 <= power <= 2 else far))
    return Axis(label, 10.0**first, 10.0**last, tuple(ticks), log=True)


def scatter(title: str, marks: Sequence[Mark], x: Axis, y: Axis) -> str:
    """Points with error bars and their labels beside them."""
    parts = list(_frame(x, y))
    spots = [(_x(x, mark.x), _y(y, mark.y)) for mark in marks]
    heights = [height for _, height in spots]
    for upper, lower in pairwise(sorted(range(len(heights)), key=heights.__getitem__)):
        heights[lower] = max(heights[lower], heights[upper] + _LINE)  # no two labels share a line
    for i, (mark, (cx, cy), height) in enumerate(zip(marks, spots, heights, strict=True)):
        tone = f"s{i % SERIES}"
        if mark.error is not None:
            ends = (_y(y, max(mark.y - mark.error, y.low)), _y(y, mark.y + mark.error))
            parts.append(f'<path class="line {tone}" d="M{cx:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>')
        parts.append(f'<circle class="{tone}" cx="{cx:.1f}" cy="{cy:.1f}" r="5"/>')
        right = cx + 10 + _LETTER * len(mark.label) < WIDTH
        side = f'x="{cx + 9:.1f}"' if right else f'x="{cx - 9:.1f}" text-anchor="end"'
        parts.append(f'<text {side} y="{height + 4:.1f}">{escape(mark.label)}</text>')
    return _svg(title, parts)


def curves(title: str, lines: Sequence[Curve], x: Axis, y: Axis) -> str:
    """Lines, told apart by colour and by a legend below in the order given."""
    parts = list(_frame(x, y))
    for i, line in enumerate(lines):
        path = "L".join(f"{_x(x, px):.1f} {_y(y, py):.1f}" for px, py in line.points)
        name = f"<title>{escape(line.label)}</title>"
        parts.append(f'<path class="line s{i % SERIES}" d="M{path}">{name}</path>')
        top = HEIGHT + 14 + (_LINE + 4) * i
        parts.append(f'<path class="line s{i % SERIES}" d="M{_LEFT} {top - 4}h18"/>')
        parts.append(f'<text x="{_LEFT + 25}" y="{top}">{escape(line.label)}</text>')
    return _svg(title, parts, HEIGHT + 4 + (_LINE + 4) * len(lines))


def heatmap(title: str, rows: Sequence[str], values: Sequence[Sequence[float | None]], across: str) -> str:
    """Cells from faint for the smallest number to full for the largest; a row of them for every label.

    `across` names what the columns count, from 0. Missing numbers leave a gap.
    """
    known = [value for line in values for value in line if value is not None]
    low, high, columns = min(known), max(known), max(map(len, values))
    left = 10 + _LETTER * max(map(len, rows))  # room for the longest label
    wide = (WIDTH - left - 2) / columns
    parts = []
    for r, (label, line) in enumerate(zip(rows, values, strict=True)):
        top = _CELL * r
        parts.append(f'<text x="{left - 6:.1f}" y="{top + 15}" text-anchor="end">{escape(label)}</text>')
        for c, value in enumerate(line):
            if value is None:
                continue
            parameter = f'x="{left + wide * c:.2f}" y="{top}" width="{wide * 0.97:.2f}" height="{_CELL - 1}"'
            said = f"<title>{escape(f'{label}, {across} {c}: {value:.4g}')}</title>"
            strength = _FAINTEST + (1 - _FAINTEST) * ((value - low) / (high - low) if high > low else 1)
            parts.append(f'<rect class="cell" {parameter} fill-opacity="{strength:.3f}">{said}</rect>')
    foot = _CELL * len(rows) + 14
    step = next(step for step in (1, 2, 5, 10, 20, 50, columns) if columns / step <= 13 or step == columns)
    middles = ((c, left + wide * (c + 0.5)) for c in range(0, columns, step))
    parts += [f'<text x="{at:.1f}" y="{foot}" text-anchor="middle">{c}</text>' for c, at in middles]
    parts += _scale(f"{low:.3g}", f"{high:.3g}", foot + 12)
    parts.append(f'<text x="{left:.1f}" y="{foot + 23}">{escape(across)}</text>')
    return _svg(title, parts, foot + 30)


def _scale(low: str, high: str, y: float) -> Iterator[str]:
    """The legend of a heat map, flush right: five strengths between the smallest and largest number."""
    start = WIDTH - 2 - _LETTER * len(high) - 5 * 22
    yield f'<text x="{start - 6:.1f}" y="{y + 11}" text-anchor="end">{low}</text>'
    for i in range(5):
        strength = _FAINTEST + (1 - _FAINTEST) * i / 4
        parameter = f'x="{start + 22 * i:.1f}" y="{y}" width="22" height="13"'
        yield f'<rect class="cell" {parameter} fill-opacity="{strength:.3f}"/>'
    yield f'<text x="{WIDTH - 2}" y="{y + 11}" text-anchor="end">{high}</text>'


def _frame(x: Axis, y: Axis) -> Iterator[str]:
    """Grid lines, tick texts and the labels of both axes."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    for value, text in y.ticks:
        at = _y(y, value)
        yield f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>'
        yield f'<text x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    for value, text in x.ticks:
        at = _x(x, value)
        yield f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
    middle = (_TOP + bottom) / 2
    turned = f'transform="translate(13 {middle}) rotate(-90)"'
    yield f'<text {turned} text-anchor="middle">{escape(y.label)}</text>'


def _svg(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    body = "\n".join(parts)
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">\n{body}\n</svg>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.at(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.at(value) * (HEIGHT - _TOP - _BOTTOM)
