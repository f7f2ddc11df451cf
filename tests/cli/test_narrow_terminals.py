"""What is printed in a narrow terminal: lines that fit, with every cell still under its heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.cli.printing import terminal_columns
from qconvert.report.page import to_terminal
from qconvert.report.tables import table
from tests.evaluate.test_perplexity import compared
from tests.support.commands import made, qconvert

HEAD = ("model", "size", "perplexity", "KL mean")
ROWS = (("a", "1 GB", "7.12 ± 0.03", "0.0123 ± 0.0005"), ("longer", "10 GB", "7.2 ± 0.1", "0.3 ± 0.1"))


def test_a_table_that_is_too_wide_is_cut_into_several() -> None:
    assert table(HEAD, ROWS, most=30) == [
        "model    size   perplexity",
        "a        1 GB  7.12 ± 0.03",
        "longer  10 GB    7.2 ± 0.1",
        "",
        "model           KL mean",
        "a       0.0123 ± 0.0005",
        "longer        0.3 ± 0.1",
    ]
    assert table(HEAD, ROWS, most=43) == table(HEAD, ROWS)
    assert table(HEAD, ROWS, most=42) != table(HEAD, ROWS)


def test_a_long_name_has_a_line_of_its_own() -> None:
    rows = [(name * 15, *cells) for name, *cells in ROWS]
    assert table(HEAD, rows, most=40)[:6] == [
        "model",
        "   size   perplexity          KL mean",
        "a" * 15,
        "   1 GB  7.12 ± 0.03  0.0123 ± 0.0005",
        "longer" * 15,
        "  10 GB    7.2 ± 0.1        0.3 ± 0.1",
    ]


CELLS = st.text("x1", min_size=1, max_size=18)


@given(
    st.integers(2, 9).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=2, max_size=5)
    )
)
def test_no_cell_is_lost_and_no_line_is_too_long(rows: list[list[str]]) -> None:
    head, *rest = rows
    lines = table(head, rest, most=40)
    assert max(map(len, lines)) <= 40
    words = " ".join(lines).split()
    assert all(
        words.count(cell) >= sum(row[1:].count(cell) for row in rows) for row in rows for cell in row[1:]
    )


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_of_a_report_is_longer_than_the_terminal(columns: int) -> None:
    page = compared(noise_floor=True).page()
    shown = to_terminal(page, columns=columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert set(to_terminal(page).split()) == set(shown.split())


def test_commands_ask_how_wide_the_terminal_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert terminal_columns() is None  # a pipe
    whole = qconvert("inspect", "embedded").out
    monkeypatch.setenv("COLUMNS", "50")
    assert terminal_columns() == 50
    tables = [
        qconvert("inspect", "embedded").out,
        qconvert("quantize", "embedded", "--bits", 4, "--dry-run").out,
    ]
    for shown in tables:
        rows = [line for line in shown.splitlines() if re.match(r"role|mlp|attn|norms|total", line)]
        assert len(rows) == 20 and max(map(len, rows)) <= 50
    monkeypatch.setenv("COLUMNS", "9")
    assert terminal_columns() == 40
    monkeypatch.setenv("COLUMNS", "200")
    assert qconvert("inspect", "embedded").out == whole


def test_one_file_of_a_report_names_all_three(tmp_path: Path) -> None:
    model = made("quantize", "embedded", "--bits", 8, "-o", tmp_path / "q")
    ran = qconvert("eval", "weights", "embedded", model, "-o", tmp_path / "v1.2.html", "-q")
    assert ran.code == 0
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v1.2.html", "v1.2.json", "v1.2.md"]
