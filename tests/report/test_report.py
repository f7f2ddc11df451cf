"""Pages as text: aligned for a terminal, piped for Markdown."""

from __future__ import annotations

import pytest

from qconvert.report.page import Grid, Page, number, to_markdown, to_terminal

PAGE = Page(
    "Title",
    (("protocol", "p"), ("text", "some words")),
    (Grid("Figures", ("model", "size"), (("a|b", "1 GB"), ("longer name", "10 GB"))),),
    ("mind this",),
)


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (13.0701, 0.0432, "13.070 ± 0.043"),
        (1.02099, 0.00087, "1.02099 ± 0.00087"),
        (98.7, 12.3, "99 ± 12"),
        (5.9052e-5, 4.0e-7, "5.905e-05 ± 4.0e-07"),
        (2e-8, 1e-6, "2e-08 ± 1.0e-06"),
        (13.0701, None, "13.070"),
        (13.0701, 0, "13.07"),
    ],
)
def test_numbers_show_two_digits_of_their_error(value: float, se: float | None, text: str) -> None:
    assert number(value, se) == text


def test_terminal() -> None:
    assert to_terminal(PAGE) == (
        "Title\n\nprotocol  p\ntext      some words\n\n"
        "Figures\nmodel         size\na|b           1 GB\nlonger name  10 GB\n\nNote: mind this\n"
    )


def test_markdown() -> None:
    assert to_markdown(PAGE) == (
        "# Title\n\n- protocol: p\n- text: some words\n\n## Figures\n\n"
        "| model | size |\n| --- | ---: |\n| a\\|b | 1 GB |\n| longer name | 10 GB |\n\n- mind this\n"
    )


def test_a_page_of_facts_alone() -> None:
    assert to_terminal(Page("T", (), (), ())) == "T\n"
