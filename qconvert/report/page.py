"""Formats one page of results as terminal text and as Markdown.

A page holds finished words and figures as cells; what its cells mean is up to the reports that fill it.
The terminal shows a page without its `details` and `samples`, which are long.
"""

from __future__ import annotations

import math
import re
import textwrap
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
class Sample:
    """Texts side by side: what they continue, and the label of each with the text.

    `same` counts the letters at the beginning of a text that are also those of the first.
    """

    title: str
    prompt: str
    texts: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A title, labelled facts on the conditions of the results, tables, and remarks.

    `verdict` says the result in sentences, `glossary` what words of the tables mean and which numbers are
    good; `details` are tables for those who look closer, `sources` say what files the results are of.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    grids: tuple[Grid, ...]
    notes: tuple[str, ...]
    verdict: tuple[str, ...] = ()
    glossary: tuple[tuple[str, str], ...] = ()
    details: tuple[Grid, ...] = ()
    samples: tuple[Sample, ...] = ()
    sources: tuple[Grid, ...] = ()


def number(value: float, se: float | None = None, digits: int = 5) -> str:
    """A number to two digits of its standard error, `13.070 ± 0.043`; without one, to `digits` (`1.0000`)."""
    if not se:
        every = "#" if se is None and value else ""  # zeros at the end too: what is below each other aligns
        return f"{value:{every}.{digits}g}".removesuffix(".")
    last = math.floor(math.log10(se)) - 1
    if 0 < abs(value) < 1e-3:
        return f"{value:.{max(0, math.floor(math.log10(abs(value))) - last)}e} ± {se:.1e}"
    return f"{value:.{max(0, -last)}f} ± {se:.{max(0, -last)}f}"


def to_terminal(page: Page, *, glossary: bool = True, columns: int | None = None) -> str:
    """The page as plain text in aligned columns; `glossary` says whether its glossary is shown.

    In a terminal of so many `columns`, lines are no longer; else tables and facts have the lines they need.
    """
    prose = min(columns or _COLUMNS, _COLUMNS)
    verdict = [line for sentence in page.verdict for line in _filled(sentence, prose)]
    blocks = [[page.title], verdict, _aligned(page.facts, columns)]
    blocks += [
        [grid.title, *table(grid.head, grid.rows, grid.left, columns)]
        for grid in (*page.grids, *page.sources)
    ]
    notes = [f"Note: {note}" for note in page.notes]
    blocks += [[line for note in notes for line in (_filled(note, columns) if columns else [note])]]
    if glossary and page.glossary:
        entries = (f"{word}: {meaning}" for word, meaning in page.glossary)
        blocks += [["Words", *(line for entry in entries for line in _filled(entry, prose, "  "))]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def to_markdown(page: Page) -> str:
    """The page as Markdown: facts and glossary as lists, tables as pipe tables."""
    blocks = [[f"# {page.title}"], [f"**{_text(line)}**  " for line in page.verdict]]
    blocks += [[f"- {label}: {value}" for label, value in page.facts]]
    for grid in (*page.grids, *page.sources, *page.details):
        rule = ["---" if i < grid.left else "---:" for i in range(len(grid.head))]
        blocks += [[f"## {grid.title}"], [_pipes(row) for row in (grid.head, rule, *grid.rows)]]
    for sample in page.samples:
        blocks += [[f"## {sample.title}"], [_quoted("prompt", sample.prompt)]]
        blocks += [[_quoted(label, text)] for label, text, _ in sample.texts]
    blocks += [[f"- {note}" for note in page.notes]]
    if page.glossary:
        blocks += [["## Words"], [f"- **{word}**: {meaning}" for word, meaning in page.glossary]]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


_COLUMNS = 100


def _aligned(facts: Sequence[tuple[str, str]], columns: int | None) -> list[str]:
    width = max((len(label) for label, _ in facts), default=0) + 2
    lines = (f"{label:<{width}}{value}" for label, value in facts)
    return [part for line in lines for part in (_filled(line, columns, " " * width) if columns else [line])]


def _filled(text: str, columns: int, indent: str = "") -> list[str]:
    """The text in lines of at most so many letters, the later ones indented; names are never broken."""
    return textwrap.wrap(
        text,
        columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _quoted(label: str, text: str) -> str:
    """A text as it is, in a fence that it cannot close."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{_text(label)}:\n\n{fence}text\n{text}\n{fence}"


def _text(line: str) -> str:
    """Words that Markdown is to show as they are."""
    return re.sub(r"([\\*_`<])", r"\\\1", line)


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
