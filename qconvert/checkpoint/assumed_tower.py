"""Derives the arrays of a vision tower from config.json, for a model whose weights are not here."""

from __future__ import annotations

from collections.abc import Collection

from qconvert.core.dtypes import Json
from qconvert.models import Architecture

_VISION = "vision_config"


def tower_shapes(architecture: Architecture, names: Collection[str] | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a tower's arrays by their names; of `names`, if an index has told them, those there.

    None where the model has no tower, or its config leaves the sizes to the class. Files have the names of
    the class, or these below `model.`.
    """
    tower = architecture.tower
    if tower is None:
        return {}
    found = {}
    for name, parameter in tower.stored.items():
        spellings = (name, f"model.{name}")
        if names is None:
            own = next((each for each in spellings if architecture.carries(each)), name)
        else:
            own = next((each for each in spellings if each in names), "")
        if own:
            found[own] = tower.stored_shapes.get(name, parameter.shape)
    return found


def untold_tower(architecture: Architecture, config: Json) -> list[str]:
    """What is to be said where a model has a tower whose sizes its config does not tell."""
    if architecture.tower is not None or not isinstance(config.get(_VISION), dict):
        return []
    return ["config.json does not tell the sizes of the vision tower: it is not counted here"]
