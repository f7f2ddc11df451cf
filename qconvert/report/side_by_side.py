"""Arranges what `inspect` found of several models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qconvert.core.dtypes import Json
from qconvert.report.tables import about_facts, size, table


def side_by_side(found: Mapping[str, Json], most: int | None = None) -> list[str]:
    """A column for every model by its name, a row for every fact, then for the form of every role.

    In a terminal of `most` columns, models that have no room stand below the others.
    """
    rows = [
        *_rows([_facts(each) for each in found.values()]),
        *_rows([_forms(each) for each in found.values()]),
    ]
    return table(["", *found], rows, left=1 + len(found), most=most)


def _rows(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "") for column in columns)] for name in names]


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
    }


def _forms(found: Json) -> dict[str, str]:
    return {row["role"]: " ".join(row["forms"]) for row in found["rows"] if row["forms"]}
