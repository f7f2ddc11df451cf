"""Charts put numbers where they belong and stay well-formed whatever the labels are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from qconvert.report.svg import Axis, Curve, Mark, curves, heatmap, linear_axis, log_axis, scatter

UNIT = Axis("unit", 0.0, 1.0, ((0.0, "0"), (1.0, "1")))
NASTY = '<b a="1">&\'x'


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag == "text"]


def test_axes_place_numbers_and_hold_those_outside_at_their_ends() -> None:
    linear, log = Axis("", 10, 20, ()), Axis("", 0.001, 10, (), log=True)
    assert [linear.at(x) for x in (5, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]
    assert [log.at(x) for x in (-1, 0, 0.001, 0.1, 10)] == pytest.approx([0, 0, 0, 0.5, 1])


@pytest.mark.parametrize("values", [[3.49, 3.7, 5.3], [100.0, 16000.0], [5.0], [-1.0, 1e-3], [0.0]])
def test_linear_ticks_are_round_and_inside(values: list[float]) -> None:
    axis = linear_axis("x", values)
    ticks = [tick for tick, _ in axis.ticks]
    assert axis.low < min(values) and axis.high > max(values)
    assert 2 <= len(ticks) <= 7 and all(axis.low <= tick <= axis.high for tick in ticks)
    assert all(re.fullmatch(r"-?\d*\.?\d{0,6}(e[+-]\d+)?", text) for _, text in axis.ticks)


def test_log_ticks_are_powers_of_ten() -> None:
    axis = log_axis("y", [0.0, 3e-4, 0.2], floor=1e-5)
    assert (axis.low, axis.high) == (1e-5, 1.0)
    assert [text for _, text in axis.ticks] == ["10⁻⁵", "10⁻⁴", "10⁻³", "0.01", "0.1", "1"]
    assert log_axis("y", [1.0]).high == 10


def test_points_lie_at_their_numbers_with_labels_apart() -> None:
    marks = [Mark("low", 0.0, 0.0), Mark("high", 1.0, 1.0, 0.1), Mark("near", 1.0, 0.99)]
    root = ElementTree.fromstring(scatter("t", marks, UNIT, UNIT))
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter("circle")]
    assert circles[0][0] < circles[1][0] and circles[0][1] > circles[1][1]
    spots = {t.text: float(t.get("y", 0)) for t in root.iter("text") if t.text in ("high", "near")}
    assert abs(spots["high"] - spots["near"]) >= 14
    assert len([p for p in root.iter("path") if "line" in p.get("class", "")]) == 1


def test_curves_have_a_legend_below() -> None:
    lines = [Curve(f"model {i}", ((0.0, 0.1), (1.0, i / 8))) for i in range(8)]
    root = ElementTree.fromstring(curves("t", lines, UNIT, UNIT))
    legend = [float(t.get("y", 0)) for t in root.iter("text") if (t.text or "").startswith("model")]
    height = float(root.get("viewBox", "").split()[3])
    assert len(legend) == 8 and min(legend) > 280 and max(legend) < height


def test_cells_are_as_strong_as_their_numbers() -> None:
    root = ElementTree.fromstring(heatmap("t", ["a", "b"], [[1.0, None], [2.0, 3.0]], "layer"))
    cells = [cell for cell in root.iter("rect") if cell.find("title") is not None]
    strengths = {cell.findtext("title"): float(cell.get("fill-opacity", 0)) for cell in cells}
    assert strengths == {"a, layer 0: 1": 0.12, "b, layer 0: 2": pytest.approx(0.56), "b, layer 1: 3": 1.0}


def test_many_layers_number_few_columns() -> None:
    said = texts(heatmap("t", ["r"], [[float(i) for i in range(94)]], "layer"))
    assert [text for text in said if text.isdecimal()][:10] == [str(10 * i) for i in range(10)]


def test_equal_numbers_are_all_full() -> None:
    root = ElementTree.fromstring(heatmap("t", ["r"], [[2.0, 2.0]], "layer"))
    assert {c.get("fill-opacity") for c in root.iter("rect") if c.find("title") is not None} == {"1.000"}


def test_labels_cannot_break_out() -> None:
    for svg in (
        scatter(NASTY, [Mark(NASTY, 0.1, 0.1)], UNIT, UNIT),
        curves(NASTY, [Curve(NASTY, ((0.0, 0.0), (1.0, 1.0)))], UNIT, UNIT),
        heatmap(NASTY, [NASTY], [[1.0]], NASTY),
    ):
        assert NASTY in texts(svg) and ElementTree.fromstring(svg).get("aria-label") == NASTY
