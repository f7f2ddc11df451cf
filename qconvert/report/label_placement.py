"""Finds room for the labels of points: beside their points, apart from each other, inside the picture.

Where there is none close by, the label goes further out and gets a leader line. Lengths are in the units of
the picture; y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_DIRECTIONS = tuple(math.tau * i / 16 for i in (0, 8, 1, 15, 7, 9, 2, 14, 6, 10, 4, 12, 3, 13, 5, 11))
"""Angles in the order in which they are tried: right, left, then up and down."""
_STEP = 5.0
_GAP = 1.5
_BESIDE = 14.0
"""How far from its point a label may lie and still need no leader line."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its left and top, its width and height."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: Box, gap: float = 0.0) -> bool:
        """Whether the two are closer than `gap` in both directions."""
        return (
            self.x < other.x + other.width + gap
            and other.x < self.x + self.width + gap
            and self.y < other.y + other.height + gap
            and other.y < self.y + self.height + gap
        )

    def inside(self, other: Box) -> bool:
        """Whether all of it lies in the other."""
        return (
            other.x <= self.x
            and other.y <= self.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Its point that is nearest to (x, y)."""
        return min(max(x, self.x), self.x + self.width), min(max(y, self.y), self.y + self.height)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a label lies, and the line from it to its point if it lies apart: x, y of either end."""

    box: Box
    leader: tuple[float, float, float, float] | None


def place(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    room: Box,
    *,
    radius: float = 6.0,
    reach: float = 60.0,
    taken: Sequence[Box] = (),
) -> list[Placed] | None:
    """A place for the label (width, height) of every point; None if some label finds none.

    No label overlaps another, a point (a disc of `radius`) or what is `taken`; all lie in `room`, at most
    `reach` from their points. The most crowded points choose first.
    """
    discs = [Box(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in points]
    held = [*discs, *taken]
    found: dict[int, Placed] = {}
    for i in sorted(range(len(points)), key=lambda i: -_crowd(points, i)):
        placed = _first_free(points[i], sizes[i], room, held, radius, reach)
        if placed is None:
            return None
        held.append(placed.box)
        found[i] = placed
    return [found[i] for i in range(len(points))]


def _crowd(points: Sequence[tuple[float, float]], i: int) -> float:
    """How many others are near a point, the nearest counting most."""
    x, y = points[i]
    return sum(1 / (10 + math.hypot(x - u, y - v)) for u, v in points)


def _first_free(
    point: tuple[float, float],
    size: tuple[float, float],
    room: Box,
    held: Sequence[Box],
    radius: float,
    reach: float,
) -> Placed | None:
    x, y = point
    width, height = size
    distance = radius + _GAP + 1
    while distance <= reach:
        for angle in _DIRECTIONS:
            # The box touches the circle of that distance from outside, in that direction.
            across, down = math.cos(angle), -math.sin(angle)
            left = x + across * distance - (0 if across > 0.3 else width if across < -0.3 else width / 2)
            top = y + down * distance - (0 if down > 0.8 else height if down < -0.8 else height / 2)
            box = Box(left, top, width, height)
            if box.inside(room) and not any(box.overlaps(other, _GAP) for other in held):
                return Placed(box, _leader(box, x, y, radius))
        distance += _STEP
    return None


def _leader(box: Box, x: float, y: float, radius: float) -> tuple[float, float, float, float] | None:
    u, v = box.nearest(x, y)
    distance = math.hypot(u - x, v - y)
    if distance <= _BESIDE:
        return None
    return u, v, x + (u - x) * radius / distance, y + (v - y) * radius / distance
