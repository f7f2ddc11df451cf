"""Formats plain-text tables for terminals and model cards: aligned columns, sizes in human units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qconvert.core.dtypes import Json
from qconvert.errors import shown
from qconvert.models.parameter_table import ParameterTable, Row


def count(number: int, thing: str) -> str:
    """A number of things in words: `1 file`, `1,024 files`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes in decimal units, three significant digits: `1.16 GB`, `523 KB`, `17 B`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            value = nbytes / factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{nbytes:.0f} B"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, most: int | None = None
) -> list[str]:
    """Lines of a table with a heading; the first `left` columns are flush left, the rest right.

    Where lines would be longer than `most`, the table is cut into several below each other, each with the
    first column; a first column of more than half of `most` gets lines of its own.
    """
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    columns = [f"{{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths)]
    if most is None or sum(widths) + 2 * (len(widths) - 1) <= most:
        form = "  ".join(columns)
        return [form.format(*row).rstrip() for row in [head, *rows]]
    between = "  " if widths[0] <= most // 2 else "\n  "
    room = most - (widths[0] if between == "  " else 0)
    lines = list[str]()
    for first, last in _parts(widths, room):
        form = columns[0] + between + "  ".join(columns[first:last])
        cut = (form.format(row[0], *row[first:last]) for row in [head, *rows])
        lines += [*([""] if lines else []), *(line.rstrip() for text in cut for line in text.split("\n"))]
    return lines


def _parts(widths: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Cuts the columns after the first into runs whose widths, with two letters before each, have room."""
    first, used = 1, 0
    for i in range(1, len(widths)):
        if i > first and used + widths[i] + 2 > room:
            yield first, i
            first, used = i, 0
        used += widths[i] + 2
    yield first, len(widths)


def parameter_table_lines(parameter_table: ParameterTable, most: int | None = None) -> list[str]:
    """The table by role, with its totals; columns of bytes only where the encodings are known."""
    stored = any(row.encodings for row in parameter_table.rows)
    head = ["role", "shape", "tensors", "parameters", *(["form", "bytes", "bpw"] if stored else [])]
    rows = []
    for row in parameter_table.rows:
        shapes = ", ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes[:2])
        more = f" +{len(row.shapes) - 2}" if len(row.shapes) > 2 else ""
        cells = [row.role, shapes + more, str(row.tensors), f"{row.parameters:,}"]
        if stored:
            bpw = row.bits_per_weight
            cells += [" ".join(row.encodings), size(row.nbytes), f"{bpw:.2f}" if bpw is not None else ""]
        rows.append(cells)
    total = ["total", "", str(parameter_table.tensors), f"{parameter_table.parameters:,}"]
    if stored:
        total += ["", size(parameter_table.nbytes), f"{parameter_table.bits_per_weight:.2f}"]
    return table(head, [*rows, total], left=2, most=most)


def about_facts(found: Json) -> dict[str, str]:
    """What `inspect` found out about the use of a model, in words; without what is not stated."""
    said = found["about"]
    facts = {
        "context": f"{said['context']:,}" if said["context"] else None,
        "vocabulary": f"{said['vocabulary']:,}" if said["vocabulary"] else None,
        "rope": said["rope"],
        "tokenizer": said["tokenizer"],
        "chat template": ("yes" if said["chat_template"] else "no") if said["tokenizer"] else None,
        "licence": said["licence"],
    }
    return {name: shown(value) for name, value in facts.items() if value}


def about_lines(found: Json) -> list[str]:
    """The same in one line, if there is anything to say."""
    facts = about_facts(found)
    return ["; ".join(f"{name} {value}" for name, value in facts.items())] if facts else []


def found_lines(model: str, found: Json, most: int | None = None) -> list[str]:
    """The findings of `inspect`: a heading, the table by role, and one line per peculiarity."""
    heads = "head tied to the embedding" if found["tied"] else "head of its own"
    heads = heads if found["has_head"] else "no head over the vocabulary"
    layers = count(found["layers"], "layer")
    lines = [f"{model}: {found['family']}; {layers}, {heads} (from {found['from']})", *about_lines(found), ""]
    rows = []
    for r in found["rows"]:
        shapes = tuple(tuple(shape) for shape in r["shapes"])
        rows.append(Row(r["role"], r["tensors"], r["parameters"], shapes, tuple(r["forms"]), r["bytes"]))
    lines += parameter_table_lines(ParameterTable(tuple(rows)), most)
    facts = {
        "adapter merged into it": found.get("adapter"),
        "quantization": found["quantization"],
        "products": ", ".join(found["products"]),
        "fused": ", ".join(found["fusions"]),
        "stored although tied": found["stored_tied_head"],
        "ignored buffers": ", ".join(found["ignored"][:3]),
        "unknown tensors": ", ".join(found["unknown"][:3]),
    }
    return [*lines, *(f"{key}: {value}" for key, value in facts.items() if value)]
