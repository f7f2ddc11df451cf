"""For formats whose config has one setting for all weights: the form that all of them have."""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.errors import BadRecipe
from qconvert.tensors import Quantized


def only_form(quantized: Mapping[str, Quantized], layout: str) -> Quantized:
    """The one form of all quantized modules; BadRecipe names two modules that differ."""
    first, form = next(iter(quantized.items()))
    for module, other in quantized.items():
        if other != form:
            raise BadRecipe(
                f"{module}: {other.label}, but {first} is {form.label}; {layout} has one setting for all",
                "write compressed-tensors, whose groups may differ",
            )
    return form
