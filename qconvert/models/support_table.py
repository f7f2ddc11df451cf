"""Renders the table of supported models in docs/reference/models.md, one row per declaration."""

from __future__ import annotations

from qconvert.models.families import FAMILIES
from qconvert.models.gguf.declaration import GGUFModel, NoGraph
from qconvert.models.gguf.families import MODELS
from qconvert.models.parameters import Family


def markdown() -> str:
    """Returns the table as Markdown lines, without a final newline."""
    lines = [
        "| family | `model_type` | GGUF | its class stores fused | `fuse` can make | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        types = ", ".join(f"`{name}`" for name in family.model_types)
        native, possible = _modules(family, native=True), _modules(family, native=False)
        lines.append(f"| {family.name} | {types} | {_gguf(family)} | {native} | {possible} | {family.note} |")
    return "\n".join(lines)


def _gguf(family: Family) -> str:
    found = [MODELS.get(name) for name in family.model_types]
    names = dict.fromkeys(f"`{model.arch}`" for model in found if isinstance(model, GGUFModel))
    reasons = dict.fromkeys(model for model in found if isinstance(model, NoGraph))
    return ", ".join(names) or "; ".join(f"none: {reason}" for reason in reasons) or "none"


def _modules(family: Family, *, native: bool) -> str:
    """Returns the last names of the fused modules, those of stacks of experts with the one before."""
    shown = (f for f in family.fusions if f.native is native)
    names = (".".join(f.module.rsplit(".", 2 if f.per_expert else 1)[1:]) for f in shown)
    return ", ".join(f"`{name}`" for name in names)
