"""Writes a page of results as one HTML file: no scripts, nothing loaded, light and dark, phone and desk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qconvert.report.page import Grid, Page


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, of `qconvert.report.svg`, with its heading and a sentence on how to read it."""

    title: str
    svg: str
    caption: str


def to_html(page: Page, figures: Sequence[Figure]) -> str:
    """The page and its pictures as a whole HTML document."""
    pictures = "\n".join(
        f"<figure><h2>{escape(figure.title)}</h2>{figure.svg}"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
        for figure in figures
    )
    facts = "\n".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in page.facts)
    blocks = [
        *(_grid(grid) for grid in page.grids),
        f'<div class="figures">{pictures}</div>' if figures else "",
        f"<section><h2>How it was measured</h2><dl>{facts}</dl></section>",
        "\n".join(f'<p class="note">{escape(note)}</p>' for note in page.notes),
    ]
    body = "\n".join(block for block in blocks if block)
    return _DOCUMENT.format(title=escape(page.title), style=_STYLE, body=body)


def _grid(grid: Grid) -> str:
    head = "".join(_cell("th", text, i < grid.left) for i, text in enumerate(grid.head))
    rows = "\n".join(
        "<tr>" + "".join(_cell("td", text, i < grid.left) for i, text in enumerate(row)) + "</tr>"
        for row in grid.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section><h2>{escape(grid.title)}</h2><div class="scroll" tabindex="0">{table}</div></section>'


def _cell(tag: str, text: str, left: bool) -> str:
    opening = f'{tag} class="left"' if left else tag
    return f"<{opening}>{escape(text)}</{tag}>"


# Series colours keep 3:1 against both backgrounds; the first six of Okabe and Ito's palette, darkened
# for light and lightened for dark.
_STYLE = """
:root { color-scheme: light dark;
  --ground: #fbfaf8; --panel: #fff; --ink: #1f2328; --soft: #59636e; --rule: #e4e1db; --heat: #b2411d;
  --s0: #1f6fb2; --s1: #b85c00; --s2: #0b7a5b; --s3: #a8427d; --s4: #7a6a00; --s5: #5b50b5; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #15171a; --panel: #1d2024; --ink: #e6e4df; --soft: #a2a9b1; --rule: #343a40; --heat: #ff9466;
  --s0: #6cb6f2; --s1: #f0a24f; --s2: #4cc9a0; --s3: #e58bbd; --s4: #d6c553; --s5: #a9a0f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 20px; overflow-wrap: anywhere; }
h2 { font-size: 1.02rem; margin: 0 0 10px; }
section, figure { background: var(--panel); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px; margin: 0 0 16px; min-width: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 0 7px 18px; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td { border-top: 1px solid var(--rule); }
.left { text-align: left; padding-left: 0; position: sticky; left: 0; background: var(--panel); }
.figures { display: grid; gap: 0 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figcaption { color: var(--soft); font-size: 0.88rem; margin-top: 8px; }
svg { display: block; width: 100%; max-width: 560px; height: auto; margin: 0 auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
@media (max-width: 480px) { svg text { font-size: 13.5px; } }
.grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.cell { fill: var(--heat); }
dl { display: grid; grid-template-columns: minmax(90px, max-content) 1fr; gap: 6px 18px; margin: 0;
  font-size: 0.92rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: 0.92rem; margin: 0 0 8px; }
""" + "\n".join(
    f"circle.s{i} {{ fill: var(--s{i}); }} .line.s{i} {{ stroke: var(--s{i}); }}" for i in range(6)
)

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
