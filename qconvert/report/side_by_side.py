"""Arranges what `inspect` found of several models side by side."""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.dtypes import Json
from qconvert.report.tables import about_facts, size, table


def side_by_side(found: Mapping[str, Json]) -> list[str]:
    """A column for every model by its name, a row for every fact and for the form of every role."""
    columns = {model: _facts(each) for model, each in found.items()}
    names = list(dict.fromkeys(name for facts in columns.values() for name in facts))
    rows = [[name, *(facts.get(name, "") for facts in columns.values())] for name in names]
    return table(["", *columns], rows, left=1 + len(columns))


def _facts(found: Json) -> dict[str, str]:
    nbytes, parameters = found["bytes"], found["parameters"]
    return {
        "family": found["family"],
        "layers": str(found["layers"]),
        "parameters": f"{parameters:,}",
        "bytes": size(nbytes) if nbytes else "",
        "bits per weight": f"{8 * nbytes / parameters:.2f}" if nbytes else "",
        "head": ("tied to the embedding" if found["tied"] else "of its own") if found["has_head"] else "none",
        **about_facts(found),
        "quantization": found["quantization"] or "none",
        **{row["role"]: " ".join(row["forms"]) for row in found["rows"] if row["forms"]},
    }
