"""Draws charts as inline SVG: points and curves. Text goes in, one `<svg>` comes out.

A chart is 400 units wide, about a phone's width, so its letters are never scaled down there. Colours are CSS
classes (`s0` to `s5` for series, `d0` to `d4` for the dashes of their lines, `grid`, `front`), which the page
defines for light and dark. Every mark carries a `<title>`, which browsers show and screen readers read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from qconvert.report.axes import Axis, pareto_front
from qconvert.report.label_placement import Box, Placed, place

WIDTH, HEIGHT = 400, 280
COLOURS, DASHES = 6, 5
LETTER = 8.0
"""About the width of a letter at the 12 to 14 units that pages give them."""
LINE = 18
"""Height of a line of a legend."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 14, 46
_LETTER_HEIGHT = 14
_RADIUS = 5.0
_MOST_NAMES = 6
"""So many points are labelled with their names; more, with numbers that a legend explains."""
# A circle, a square, a triangle up, a diamond, a triangle down, around (0, 0).
_SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "M-4.5 -4.5h9v9h-9z",
    "M0 -6L5.6 4.4H-5.6z",
    "M0 -6L6 0L0 6L-6 0z",
    "M0 6L5.6 -4.4H-5.6z",
)


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


def scatter(title: str, marks: Sequence[Mark], x: Axis, y: Axis, *, front: bool = False) -> str:
    """Points with error bars and labels beside them: their names, or numbers explained by a legend below.

    With a `front`, a line joins the points that no other beats in both numbers (smaller being better), and
    the others are hollow.
    """
    spots = [(_x(x, mark.x), _y(y, mark.y)) for mark in marks]
    best = pareto_front((mark.x, mark.y) for mark in marks) if front else list(range(len(marks)))
    parts = list(_frame(x, y))
    if front and len(marks) > 1:
        parts.append(_front_line([spots[i] for i in best]))
    for i, (mark, spot) in enumerate(zip(marks, spots, strict=True)):
        parts.append(_point(i, mark, spot, y, hollow=i not in best))
    line = _segments([spots[i] for i in best]) if front else []
    placed, names = _labels(marks, spots, line)
    parts += [line for label, name in zip(placed, names, strict=True) for line in _label(label, name)]
    if names == [mark.label for mark in marks]:
        return svg(title, parts)
    keys = [f'<path class="mark {tone(i)}" d="{_shape(i)}"/>' for i in range(len(marks))]
    listed = [f"{name}  {mark.label}" for name, mark in zip(names, marks, strict=True)]
    return svg(title, [*parts, *_legend(keys, listed)], HEIGHT + 4 + LINE * len(marks))


def curves(title: str, lines: Sequence[Curve], x: Axis, y: Axis) -> str:
    """Lines, told apart by colour and dashes and by a legend below in the order given."""
    parts = list(_frame(x, y))
    for i, line in enumerate(lines):
        path = "L".join(f"{_x(x, px):.1f} {_y(y, py):.1f}" for px, py in line.points)
        name = f"<title>{escape(line.label)}</title>"
        parts.append(f'<path class="line {tone(i)}" d="M{path}">{name}</path>')
    keys = [f'<path class="line {tone(i)}" d="M-22 0h34"/>' for i in range(len(lines))]
    parts += _legend(keys, [line.label for line in lines])
    return svg(title, parts, HEIGHT + 4 + LINE * len(lines))


def tone(i: int) -> str:
    """The classes of the i-th series: its colour and its dashes; after 30 they come again."""
    return f"s{i % COLOURS} d{i // COLOURS % DASHES}"


def svg(title: str, parts: Sequence[str], height: float = HEIGHT, width: float = WIDTH) -> str:
    """A whole picture of that size."""
    body = "\n".join(parts)
    name = escape(title, quote=True)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{name}">\n{body}\n</svg>'


def clipped(text: str, units: float) -> str:
    """The text, its middle left out where it would be wider than so many units."""
    most = int(units / LETTER)
    if len(text) <= most:
        return text
    return f"{text[: (most - 1) // 2]}…{text[len(text) - most // 2 :]}"


def _point(i: int, mark: Mark, spot: tuple[float, float], y: Axis, *, hollow: bool) -> str:
    (cx, cy), bar = spot, ""
    said = f"<title>{escape(f'{mark.label}: {mark.x:.4g}, {mark.y:.4g}')}</title>"
    if mark.error is not None:
        low, high = _y(y, mark.y - mark.error), _y(y, mark.y + mark.error)
        caps = f"M{cx - 4:.1f} {low:.1f}h8M{cx - 4:.1f} {high:.1f}h8"
        bar = f'<path class="bar {tone(i)}" d="M{cx:.1f} {low:.1f}V{high:.1f}{caps}"/>'
    kind = "mark hollow" if hollow else "mark"
    shape = f'<path class="{kind} {tone(i)}" transform="translate({cx:.1f} {cy:.1f})" d="{_shape(i)}">'
    return f"{bar}{shape}{said}</path>"


def _shape(i: int) -> str:
    return _SHAPES[i // COLOURS % len(_SHAPES)]


def _front_line(spots: Sequence[tuple[float, float]]) -> str:
    """Steps down through the points of the front, on to the right edge of the picture."""
    (x, y), *rest = spots
    steps = "".join(f"H{u:.1f}V{v:.1f}" for u, v in rest)
    return f'<path class="front" d="M{x:.1f} {_TOP}V{y:.1f}{steps}H{WIDTH - _RIGHT}"/>'


def _segments(spots: Sequence[tuple[float, float]]) -> list[Box]:
    """What the front's line covers: down to the first point, right and down to each, and to the right."""
    (x, y), boxes = spots[0], []
    boxes.append(Box(x, _TOP, 0, y - _TOP))
    for u, v in spots[1:]:
        boxes += [Box(x, y, u - x, 0), Box(u, y, 0, v - y)]
        x, y = u, v
    return [*boxes, Box(x, y, WIDTH - _RIGHT - x, 0)]


def _labels(
    marks: Sequence[Mark], spots: Sequence[tuple[float, float]], taken: Sequence[Box]
) -> tuple[list[Placed], list[str]]:
    """Where the labels go, and their texts: the names where these find room, else numbers from 1."""
    room = Box(_LEFT + 1, 1, WIDTH - _LEFT - 2, HEIGHT - _BOTTOM - 2)
    names = [mark.label for mark in marks]
    whole = [_size(name) for name in names]
    if len(marks) <= _MOST_NAMES and (found := place(spots, whole, room, reach=45, taken=taken)):
        return found, names
    names = [str(i + 1) for i in range(len(marks))]
    sizes = [_size(name) for name in names]
    found = place(spots, sizes, room, taken=taken) or place(spots, sizes, room, radius=2, reach=2 * WIDTH)
    # A picture can be fuller than full; then numbers lie on their points.
    return found or [Placed(Box(u, v - 7, 9, 14), None) for u, v in spots], names


def _size(text: str) -> tuple[float, float]:
    return LETTER * len(text) + 1, _LETTER_HEIGHT


def _label(placed: Placed, text: str) -> Iterator[str]:
    box = placed.box
    if placed.leader is not None:
        u, v, x, y = placed.leader
        yield f'<path class="leader" d="M{u:.1f} {v:.1f}L{x:.1f} {y:.1f}"/>'
    middle = f'x="{box.x + box.width / 2:.1f}" y="{box.y + box.height - 3:.1f}"'
    yield f'<text class="name" {middle} text-anchor="middle">{escape(text)}</text>'


def _legend(keys: Sequence[str], labels: Sequence[str]) -> Iterator[str]:
    """Lines below the chart, each with its key: a drawing around (0, 0)."""
    for i, (key, label) in enumerate(zip(keys, labels, strict=True)):
        top = HEIGHT + 12 + LINE * i
        yield f'<g transform="translate(30 {top - 4})">{key}</g>'
        shown = escape(clipped(label, WIDTH - 52))
        yield f'<text x="50" y="{top}">{shown}<title>{escape(label)}</title></text>'


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
        yield f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{text}</text>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
    middle = (_TOP + bottom) / 2
    turned = f'transform="translate(15 {middle}) rotate(-90)"'
    yield f'<text {turned} text-anchor="middle">{escape(y.label)}</text>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.at(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.at(value) * (HEIGHT - _TOP - _BOTTOM)
