"""Finds the one encoding of all weights, for layouts whose config has one setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook, Quantized
from qconvert.errors import BadRecipe


def only_form(quantized: Mapping[str, Quantized], layout: str) -> Quantized:
    """The one encoding of all quantized modules; BadRecipe names two modules that differ.

    The type that loaders compute a weight in is no such setting: the weight says it of itself.
    """
    first, encoding = next(iter(quantized.items()))
    for module, other in quantized.items():
        if _setting(other) != _setting(encoding):
            raise BadRecipe(
                f"{module}: {other.label}, but {first} is {encoding.label}; {layout} has one setting for all",
                "write compressed-tensors, whose groups may differ",
            )
    return encoding


def _setting(encoding: Quantized) -> Quantized:
    return replace(encoding, decoded=DType.BF16) if isinstance(encoding, Codebook) else encoding
