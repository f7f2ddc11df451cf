"""Draws a table of numbers as coloured cells, with the numbers in them: layers down, roles across.

All maps share one scale, fixed and logarithmic, so that the same colour is the same number in every picture
of every report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from qconvert.report.svg import LETTER, WIDTH, svg

SCALE = (1e-3, 1.0)
"""The numbers of the faintest and the fullest cell: relative errors of 0.1 % and 100 %."""
_FAINTEST = 0.05
_CELL = 19
_LEAST_WIDTH = 38
# Where white letters become readable on a light page, and black ones on a dark page: the WCAG contrast with
# the cell's colour is at least 4.5 on either side.
_LIGHT_ON_LIGHT_PAGE, _DARK_ON_DARK_PAGE = 0.75, 0.595


def strength(value: float) -> float:
    """How full a cell is, from `_FAINTEST` to 1, by the logarithm of its number."""
    low, high = (math.log10(end) for end in SCALE)
    share = (math.log10(max(value, SCALE[0])) - low) / (high - low)
    return _FAINTEST + (1 - _FAINTEST) * min(1.0, share)


def percent(value: float) -> str:
    """A share in per cent, in at most five letters: `10.2`, `0.71`, `0.002`."""
    shown = 100 * value
    digits = 0 if shown >= 99.95 else 1 if shown >= 9.995 else 2
    return f"{shown:.{digits}f}" if shown >= 0.0995 or not shown else f"{shown:.1g}"


def heatmap(title: str, columns: Sequence[str], values: Sequence[Sequence[float | None]], down: str) -> str:
    """Cells with shares in per cent; a row for every entry of `values`, a column for every label.

    `down` names what the rows count, from 0. Missing numbers leave a gap.
    """
    left = LETTER * max(len(down), 3) + 8
    wide = max((WIDTH - left - 2) / len(columns), _LEAST_WIDTH)
    heads = [label.split(".") for label in columns]
    top = 15.0 * max(map(len, heads)) + 4
    parts = [f'<text x="{left - 6:.1f}" y="{top - 6:.1f}" text-anchor="end">{escape(down)}</text>']
    for c, words in enumerate(heads):
        for w, word in enumerate(words):
            at, y = left + wide * (c + 0.5), top - 6 - 15 * (len(words) - 1 - w)
            parts.append(
                f'<text class="small" x="{at:.1f}" y="{y:.1f}" text-anchor="middle">{escape(word)}</text>'
            )
    for r, line in enumerate(values):
        y = top + _CELL * r
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 14:.1f}" text-anchor="end">{r}</text>')
        for c, value in enumerate(line):
            if value is not None:
                said = f"{columns[c]}, {down} {r}: {value:.4g}"
                parts.append(_cell(left + wide * c, y, wide, value, percent(value), said))
    foot = top + _CELL * len(values) + 10
    width = max(WIDTH, left + wide * len(columns) + 2)
    return svg(title, [*parts, *_scale(foot)], foot + 20, width)


def _cell(x: float, y: float, width: float, value: float, text: str, said: str = "") -> str:
    full = strength(value)
    box = f'x="{x:.2f}" y="{y:.1f}" width="{width - 1:.2f}" height="{_CELL - 1}"'
    title = f"<title>{escape(said)}</title>" if said else ""
    rect = f'<rect class="cell" {box} fill-opacity="{full:.3f}">{title}</rect>'
    tone = " ".join(
        name
        for name, limit in (("onlight", _LIGHT_ON_LIGHT_PAGE), ("ondark", _DARK_ON_DARK_PAGE))
        if full > limit
    )
    middle = f'x="{x + (width - 1) / 2:.1f}" y="{y + 13.5:.1f}" text-anchor="middle"'
    return f'{rect}<text class="number {tone}" {middle}>{text}</text>'


def _scale(y: float) -> Iterator[str]:
    """The legend, flush left: what the colours mean, the same in all pictures."""
    yield f'<text x="2" y="{y + 13:.1f}">relative RMS error, %</text>'
    start = 2 + LETTER * 22
    for i, value in enumerate((0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0)):
        wide = (WIDTH - start - 2) / 7
        yield _cell(start + wide * i, y, wide, value, percent(value))
