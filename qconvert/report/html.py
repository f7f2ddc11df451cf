"""Writes a page of results as one HTML file: no scripts, nothing loaded, light and dark, phone and desk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qconvert.report.html_style import STYLE
from qconvert.report.page import Grid, Page, Sample


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, of `qconvert.report.svg`, with its heading and a sentence on how to read it."""

    title: str
    svg: str
    caption: str


_OPEN_PICTURES = 6
"""So many pictures are shown; the others are collapsed."""


_LONG = 16
"""Words of more letters than this take several lines of a cell, so that no two names look alike."""


def to_html(page: Page, figures: Sequence[Figure]) -> str:
    """The page and its pictures as a whole HTML document.

    The verdict comes first, then tables and remarks, pictures, samples, the glossary, how and of what files
    it was measured, and what is long and therefore collapsed.
    """
    pictures = "\n".join(map(_figure, figures[:_OPEN_PICTURES]))
    blocks = [
        _verdict(page.verdict),
        *(_section(grid.title, _table(grid)) for grid in page.grids),
        "\n".join(f'<p class="note">{escape(note)}</p>' for note in page.notes),
        f'<div class="figures">{pictures}</div>' if figures else "",
        *(_section(sample.title, _sample(sample)) for sample in page.samples),
        _section("Words", _list(page.glossary)) if page.glossary else "",
        _section("How it was measured", _list(page.facts)),
        *(_section(grid.title, _table(grid)) for grid in page.sources),
        *(_collapsed(figure.title, _drawn(figure)) for figure in figures[_OPEN_PICTURES:]),
        *(_collapsed(grid.title, _table(grid)) for grid in page.details),
    ]
    body = "\n".join(block for block in blocks if block)
    return _DOCUMENT.format(title=escape(page.title), style=STYLE, body=body)


def _verdict(lines: Sequence[str]) -> str:
    said = "\n".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<div class="verdict">{said}</div>' if lines else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _collapsed(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def _figure(figure: Figure) -> str:
    return f"<figure><h2>{escape(figure.title)}</h2>{_drawn(figure)}</figure>"


def _drawn(figure: Figure) -> str:
    return f"{figure.svg}<figcaption>{escape(figure.caption)}</figcaption>"


def _list(entries: Sequence[tuple[str, str]]) -> str:
    items = "\n".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in entries)
    return f"<dl>{items}</dl>"


def _table(grid: Grid) -> str:
    head = "".join(_cell("th", text, i < grid.left) for i, text in enumerate(grid.head))
    rows = "\n".join(
        "<tr>" + "".join(_cell("td", text, i < grid.left) for i, text in enumerate(row)) + "</tr>"
        for row in grid.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(tag: str, text: str, left: bool) -> str:
    kind = "left long" if len(text) > _LONG else "left"
    opening = f'{tag} class="{kind}"' if left else tag
    return f"<{opening}>{escape(text)}</{tag}>"


def _sample(sample: Sample) -> str:
    """The texts beside each other; what is not as in the first is marked."""
    texts = "\n".join(
        f"<div><h3>{escape(label)}</h3><pre>{escape(text[:same])}{_marked(text[same:])}</pre></div>"
        for label, text, same in sample.texts
    )
    return f'<pre class="prompt">{escape(sample.prompt)}</pre><div class="texts">{texts}</div>'


def _marked(text: str) -> str:
    return f"<mark>{escape(text)}</mark>" if text else ""


_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main>
<h1>{title}</h1>
{body}
</main></body>
</html>
"""
