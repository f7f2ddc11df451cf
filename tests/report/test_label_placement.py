"""Labels stay at their points: no label covers another, a point, or leaves the picture, for any points."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.report.axes import fitted_axis
from qconvert.report.label_placement import Box, place
from qconvert.report.svg import HEIGHT, LETTER, WIDTH, Mark, scatter

ROOM = Box(60, 1, 330, 230)
coordinates = st.tuples(st.floats(70, 380), st.floats(12, 220))


def check_apart(points: list[tuple[float, float]], boxes: list[Box], radius: float) -> None:
    for i, box in enumerate(boxes):
        assert box.inside(ROOM)
        assert not any(box.overlaps(other) for other in boxes[:i])
        for x, y in points:
            u, v = box.nearest(x, y)
            assert math.hypot(u - x, v - y) >= radius - 1e-6


@settings(max_examples=150, deadline=None)
@given(points=st.lists(coordinates, min_size=1, max_size=12), data=st.data())
def test_numbers_of_twelve_points_always_find_room(
    points: list[tuple[float, float]], data: st.DataObject
) -> None:
    if data.draw(st.booleans()):  # all of them nearly in one place
        x, y = points[0]
        points = [(x + 0.01 * i, y) for i in range(len(points))]
    sizes = [(LETTER * len(str(i + 1)), 14.0) for i in range(len(points))]
    placed = place(points, sizes, ROOM, radius=2, reach=800)
    assert placed is not None
    check_apart(points, [each.box for each in placed], 2)
    for (x, y), each in zip(points, placed, strict=True):
        u, v = each.box.nearest(x, y)
        if each.leader is None:
            assert math.hypot(u - x, v - y) <= 14
        else:  # from the label's edge to the point's
            assert each.leader[:2] == (u, v)
            assert math.hypot(each.leader[2] - x, each.leader[3] - y) == pytest.approx(2)


def test_a_label_that_fits_nowhere_is_told() -> None:
    assert place([(100, 100)], [(400, 14)], ROOM) is None
    everywhere = [Box(60, 1, 330, 230)]
    assert place([(100, 100)], [(8, 14)], ROOM, taken=everywhere) is None


NAMES = [
    ("int8-g128", 1630, 1e-4), ("Q8_0.gguf", 1650, 9e-5), ("Q6_K.gguf", 1270, 6e-4), ("Q5_K_M", 1130, 2e-3),
    ("int4-asym", 1020, 0.009), ("Qwen2.5-1.5B-Instruct-Q4_K_M.gguf", 990, 0.0095), ("Q4_0.gguf", 930, 0.031),
    ("int4-g128", 900, 0.035), ("int4-g128-feedback", 900, 0.014), ("int3-g64", 750, 0.12),
    ("3.5bpw-mixed", 780, 0.03), ("int2-g64", 600, 1.1),
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("alike", [False, True])
def test_labels_of_a_chart_are_at_their_points(count: int, alike: bool) -> None:
    """By the coordinates in the picture: apart, inside, next to the point or joined to it by a line."""
    named = [(name, 900.0, 0.03) if alike else (name, size, kl) for name, size, kl in NAMES[:count]]
    marks = [Mark(name, size, kl, kl / 20) for name, size, kl in named]
    x, y = (
        fitted_axis("", [value for value in values]) for values in zip(*(m[1:] for m in named), strict=True)
    )
    root = ElementTree.fromstring(scatter("t", marks, x, y, front=True))
    moved = (
        p.get("transform", "")
        for p in root.iter("path")
        if "mark" in p.get("class", "") and p.get("transform")
    )
    points = [tuple(map(float, re.findall(r"[\d.]+", text))) for text in moved]
    boxes, said = [], []
    for text in root.iter("text"):
        if text.get("class") == "name":
            said.append(text.text or "")
            width = LETTER * len(said[-1])
            boxes.append(Box(float(text.get("x", 0)) - width / 2, float(text.get("y", 0)) - 11, width, 14))
    assert len(points) == len(boxes) == count
    assert said == [m.label for m in marks] or said == [str(i + 1) for i in range(count)]
    room = Box(0, 0, WIDTH, HEIGHT - 40)
    leaders = [p.get("d", "") for p in root.iter("path") if p.get("class") == "leader"]
    ends = [tuple(map(float, re.findall(r"[\d.]+", d))) for d in leaders]
    for i, (box, (px, py)) in enumerate(zip(boxes, points, strict=True)):
        assert box.inside(room)
        assert not any(box.overlaps(other) for other in boxes[:i])
        u, v = box.nearest(px, py)
        near = math.hypot(u - px, v - py)
        assert near <= 15 or any(
            math.hypot(e[2] - px, e[3] - py) < 7 and box.overlaps(Box(*e[:2], 0, 0), 2) for e in ends
        )
    if said[0] == "1" and count > 1:  # numbers are explained
        legend = [t.text or "" for t in root.iter("text")]
        assert all(any(entry.startswith(f"{i + 1}  ") for entry in legend) for i in range(count))
