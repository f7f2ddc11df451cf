"""Charts put numbers where they belong and stay well-formed whatever the labels are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.report.axes import Axis, fitted_axis, linear_axis, log_axis, pareto_front, power_text
from qconvert.report.heatmap import SCALE, heatmap, percent, strength
from qconvert.report.html_style import STYLE
from qconvert.report.svg import Curve, Mark, clipped, curves, scatter, tone

UNIT = Axis("unit", 0.0, 1.0, ((0.0, "0"), (1.0, "1")))
NASTY = '<b a="1">&\'x'


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag == "text"]


def test_a_wide_range_of_sizes_has_more_than_two_ticks() -> None:
    texts = [text for _, text in linear_axis("size on disk, MB", [680, 1790]).ticks]
    assert texts == ["750", "1000", "1250", "1500", "1750"]


def test_axes_place_numbers_and_hold_those_outside_at_their_ends() -> None:
    linear, log = Axis("", 10, 20, ()), Axis("", 0.001, 10, (), log=True)
    assert [linear.at(x) for x in (5, 10, 15, 20, 99)] == [0, 0, 0.5, 1, 1]
    assert [log.at(x) for x in (-1, 0, 0.001, 0.1, 10)] == pytest.approx([0, 0, 0, 0.5, 1])


@pytest.mark.parametrize("values", [[3.49, 3.7, 5.3], [100.0, 16000.0], [5.0], [-1.0, 1e-3], [0.0], [0.1, 9]])
def test_linear_ticks_are_round_and_inside(values: list[float]) -> None:
    axis = linear_axis("x", values)
    ticks = [tick for tick, _ in axis.ticks]
    assert axis.low < min(values) and axis.high > max(values)
    assert 3 <= len(ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in ticks)
    assert all(re.fullmatch(r"-?\d*\.?\d{0,6}(e[+-]\d+)?", text) for _, text in axis.ticks)


@settings(max_examples=200)
@given(st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=12))
def test_a_logarithmic_axis_fits_its_numbers_and_has_two_ticks_or_more(values: list[float]) -> None:
    axis = log_axis("y", values)
    places = [axis.at(value) for value in values]
    assert all(0 < place < 1 for place in places)
    assert 2 <= len(axis.ticks) <= 10
    assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)
    if max(values) > 100 * min(values):  # the numbers use most of it
        assert max(places) - min(places) > 0.7


def test_an_axis_is_logarithmic_where_the_numbers_are_far_apart() -> None:
    assert fitted_axis("x", [1.0, 6.0]).log and not fitted_axis("x", [1.0, 4.0]).log
    assert not fitted_axis("x", [0.0, 100.0]).log and fitted_axis("x", [0.0, 100.0], floor=1e-6).log
    assert log_axis("y", [0.0, 3e-4, 0.2], floor=1e-5).at(0.0) == 0


def test_powers_are_short() -> None:
    assert [power_text(x) for x in (1e-4, 5e-4, 0.01, 0.2, 1, 50, 1e4, 1.5e5)] == [
        "10⁻⁴", "5·10⁻⁴", "0.01", "0.2", "1", "50", "10⁴", "1.5·10⁵"]  # fmt: skip


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[int, int]]) -> None:
    """Against the definition, point by point."""
    unbeaten = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    front = [points[i] for i in pareto_front(points)]
    assert front == sorted(unbeaten)


def test_points_lie_at_their_numbers_and_those_beaten_are_hollow() -> None:
    marks = [Mark("low", 0.0, 0.2), Mark("high", 1.0, 1.0, 0.1), Mark("best", 0.5, 0.1)]
    root = ElementTree.fromstring(scatter("t", marks, UNIT, UNIT, front=True))
    points = [p for p in root.iter("path") if "mark" in p.get("class", "").split()]
    (ax, ay), (bx, by), _ = (re.findall(r"[\d.]+", p.get("transform", "")) for p in points)
    assert float(ax) < float(bx) and float(ay) > float(by)
    assert ["hollow" in p.get("class", "") for p in points] == [False, True, False]
    assert len([p for p in root.iter("path") if p.get("class") == "front"]) == 1
    assert len([p for p in root.iter("path") if "bar" in p.get("class", "").split()]) == 1


def test_thirty_series_can_be_told_apart() -> None:
    tones = [tone(i) for i in range(30)]
    assert len(set(tones)) == 30
    dashes = re.findall(r"\.line\.d\d \{ stroke-dasharray: ([^;]+);", STYLE)
    assert len(set(dashes)) == 5
    assert all(f".line.s{i}" in STYLE and f".mark.s{i}" in STYLE for i in range(6))


def test_long_labels_lose_their_middle() -> None:
    assert clipped("short", 100) == "short"
    assert clipped("Qwen2.5-1.5B-Instruct-int4-g128", 96) == "Qwen2…4-g128"


def test_curves_have_a_legend_below() -> None:
    lines = [Curve(f"model {i}", ((0.0, 0.1), (1.0, i / 8))) for i in range(8)]
    root = ElementTree.fromstring(curves("t", lines, UNIT, UNIT))
    legend = [float(t.get("y", 0)) for t in root.iter("text") if (t.text or "").startswith("model")]
    height = float(root.get("viewBox", "").split()[3])
    assert len(legend) == 8 and min(legend) > 280 and max(legend) < height


def test_cells_are_as_strong_as_their_numbers_on_one_scale() -> None:
    root = ElementTree.fromstring(heatmap("t", ["attn.q", "b"], [[0.1, None], [0.01, 1.0]], "layer"))
    cells = [cell for cell in root.iter("rect") if cell.find("title") is not None]
    found = {cell.findtext("title"): float(cell.get("fill-opacity", 0)) for cell in cells}
    assert found == {
        "attn.q, layer 0: 0.1": pytest.approx(0.683, abs=0.001),
        "attn.q, layer 1: 0.01": pytest.approx(0.367, abs=0.001),
        "b, layer 1: 1": 1.0,
    }
    alone = ElementTree.fromstring(heatmap("t", ["q"], [[0.1]], "layer"))  # the same colour in any picture
    assert next(c.get("fill-opacity") for c in alone.iter("rect")) == "0.683"
    said = texts(heatmap("t", ["attn.q"], [[0.1016]], "layer"))
    assert {"10.2", "attn", "q", "layer", "0"} <= set(said)
    assert strength(SCALE[0] / 9) == strength(SCALE[0]) and strength(9.0) == 1


def test_shares_are_short_and_keep_their_size() -> None:
    shares = (1e-6, 2e-5, 0.00101, 0.0071, 0.1016, 0.0999, 0.375, 0.9996, 3.0)
    assert [percent(x) for x in shares] == [
        "0.0001",
        "0.002",
        "0.10",
        "0.71",
        "10.2",
        "9.99",
        "37.5",
        "100",
        "300",
    ]
    assert percent(0.0) == "0.00"


@pytest.mark.parametrize("dark", [False, True])
def test_every_number_in_a_cell_can_be_read(dark: bool) -> None:
    """WCAG's contrast of text and ground, from the colours of the style sheet, is 4.5 at least."""
    light, night = STYLE.split("@media (prefers-color-scheme: dark) { :root {")[:2]
    panel, heat = (re.search(rf"--{n}: (#\w+)", night if dark else light)[1] for n in ("panel", "heat"))  # type: ignore[index]
    for i in range(121):
        value = 10 ** (-3.2 + 3.4 * i / 120)
        svg = ElementTree.fromstring(heatmap("t", ["q"], [[value]], "layer"))
        text = next(t for t in svg.iter("text") if "number" in t.get("class", ""))
        white = ("ondark" not in text.get("class", "")) if dark else ("onlight" in text.get("class", ""))
        share = strength(value)
        ground = [share * h + (1 - share) * p for h, p in zip(rgb(heat), rgb(panel), strict=True)]
        low, high = sorted((luminance(ground), 1.0 if white else 0.0))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (value, dark)


def rgb(colour: str) -> list[int]:
    full = colour if len(colour) == 7 else "#" + "".join(2 * c for c in colour[1:])
    return [int(full[i : i + 2], 16) for i in (1, 3, 5)]


def luminance(colour: list[float]) -> float:
    linear = [c / 255 / 12.92 if c <= 10.3 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_labels_cannot_break_out() -> None:
    for svg in (
        scatter(NASTY, [Mark(NASTY, 0.1, 0.1)], UNIT, UNIT),
        curves(NASTY, [Curve(NASTY, ((0.0, 0.0), (1.0, 1.0)))], UNIT, UNIT),
        heatmap(NASTY, [NASTY.replace(".", "")], [[1.0]], NASTY),
    ):
        assert NASTY in texts(svg) and ElementTree.fromstring(svg).get("aria-label") == NASTY
