"""Lays out one page of results as terminal text and as Markdown.

A page holds finished words and figures as cells; the reports that fill a page know what its cells mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qconvert.report.tables import table


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: its heading, rows of as many cells, and how many columns are flush left."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


@dataclass(frozen=True, slots=True)
class Page:
    """A title, labelled facts on the conditions of the results, tables, and remarks."""

    title: str
    facts: tuple[tuple[str, str], ...]
    grids: tuple[Grid, ...]
    notes: tuple[str, ...]


def number(value: float, se: float | None = None, digits: int = 5) -> str:
    """A number to two digits of its standard error, `13.070 ± 0.043`; without one, to `digits`."""
    if not se:
        return f"{value:.{digits}g}"
    last = math.floor(math.log10(se)) - 1
    if 0 < abs(value) < 1e-3:
        return f"{value:.{max(0, math.floor(math.log10(abs(value))) - last)}e} ± {se:.1e}"
    return f"{value:.{max(0, -last)}f} ± {se:.{max(0, -last)}f}"


def to_terminal(page: Page) -> str:
    """The page as plain text in aligned columns."""
    width = max((len(label) for label, _ in page.facts), default=0)
    blocks = [[page.title], [f"{label:<{width}}  {value}" for label, value in page.facts]]
    blocks += [[grid.title, *table(grid.head, grid.rows, grid.left)] for grid in page.grids]
    blocks += [[f"Note: {note}" for note in page.notes]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def to_markdown(page: Page) -> str:
    """The page as Markdown: facts as a list, tables as pipe tables."""
    blocks = [[f"# {page.title}"], [f"- {label}: {value}" for label, value in page.facts]]
    for grid in page.grids:
        rule = ["---" if i < grid.left else "---:" for i in range(len(grid.head))]
        blocks += [[f"## {grid.title}"], [_pipes(row) for row in (grid.head, rule, *grid.rows)]]
    blocks += [[f"- {note}" for note in page.notes]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
