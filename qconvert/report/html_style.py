"""Holds the look of HTML reports: one sheet, light and dark, phone and desk."""

from __future__ import annotations

from qconvert.report.svg import COLOURS, DASHES

_DASHES = ("none", "7 4", "2 4", "9 3 2 3", "14 4")

# Series colours keep 3:1 against both backgrounds; the first six of Okabe and Ito's palette, darkened
# for light and lightened for dark. The heat's full colours make every number in a cell readable.
STYLE = """
:root { color-scheme: light dark;
  --ground: #fbfaf8; --panel: #fff; --ink: #1f2328; --soft: #59636e; --rule: #e4e1db; --heat: #8f2f10;
  --mark: #fbe3b0; --shade: #0003;
  --s0: #1f6fb2; --s1: #b85c00; --s2: #0b7a5b; --s3: #a8427d; --s4: #7a6a00; --s5: #5b50b5; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #15171a; --panel: #1d2024; --ink: #e6e4df; --soft: #a2a9b1; --rule: #343a40; --heat: #ff9466;
  --mark: #5a4310; --shade: #fff2;
  --s0: #6cb6f2; --s1: #f0a24f; --s2: #4cc9a0; --s3: #e58bbd; --s4: #d6c553; --s5: #a9a0f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 12px; overflow-wrap: anywhere; }
h2, summary { font-size: 1.02rem; font-weight: 600; margin: 0 0 10px; overflow-wrap: anywhere; }
summary { margin: 0; cursor: pointer; }
details[open] summary { margin-bottom: 10px; }
section, figure, details { background: var(--panel); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px; margin: 0 0 16px; min-width: 0; }
.verdict { font-size: 1.1rem; line-height: 1.4; margin: 0 0 18px; overflow-wrap: anywhere; }
.verdict p { margin: 0 0 6px; }
.scroll { overflow-x: auto;
  background: linear-gradient(to left, var(--panel) 50%, transparent) right / 48px 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 14px 100% no-repeat scroll; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 0 7px 14px; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
td { border-top: 1px solid var(--rule); }
.left { text-align: left; }
.left:first-child { padding-left: 0; position: sticky; left: 0; background: var(--panel); }
td.long { white-space: normal; overflow-wrap: break-word; min-width: 9em; max-width: 18em; }
.figures { display: grid; gap: 0 16px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figcaption { color: var(--soft); font-size: 0.88rem; margin-top: 8px; }
svg { display: block; width: 100%; max-width: 560px; height: auto; margin: 0 auto; }
details svg { margin: 0; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
svg text.small, svg text.number { font-size: 11px; }
@media (max-width: 480px) { svg text { font-size: 14px; }
  svg text.small, svg text.number { font-size: 12.5px; } }
.grid { stroke: var(--rule); fill: none; }
.line, .bar { fill: none; stroke-width: 2; stroke-linejoin: round; }
.bar { stroke-width: 1.5; }
.mark { stroke-width: 2; }
.hollow { fill: var(--panel) !important; fill-opacity: 0.4; }
.front { fill: none; stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 4 3; }
.leader { stroke: var(--soft); stroke-width: 1; }
svg text.name { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; stroke-linejoin: round; }
.cell { fill: var(--heat); }
svg text.number { fill: #000; }
svg text.number.onlight { fill: #fff; }
@media (prefers-color-scheme: dark) { svg text.number, svg text.number.onlight { fill: #fff; }
  svg text.number.ondark { fill: #000; } }
dl { display: grid; grid-template-columns: minmax(90px, max-content) 1fr; gap: 6px 18px; margin: 0;
  font-size: 0.92rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.note, .when { color: var(--soft); font-size: 0.92rem; margin: 0 0 12px; overflow-wrap: anywhere; }
.texts { display: grid; gap: 12px 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 260px), 1fr)); }
.texts h3 { font-size: 0.88rem; color: var(--soft); margin: 0 0 4px; overflow-wrap: anywhere; }
pre { font: 0.82rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0 0 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: var(--mark); color: inherit; }
""" + "\n".join(
    [
        *(f".mark.s{i} {{ fill: var(--s{i}); stroke: var(--s{i}); }}" for i in range(COLOURS)),
        *(f".line.s{i}, .bar.s{i} {{ stroke: var(--s{i}); }}" for i in range(COLOURS)),
        *(f".line.d{i} {{ stroke-dasharray: {_DASHES[i]}; }}" for i in range(DASHES)),
    ]
)
