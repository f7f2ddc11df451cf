"""Finds what loaders multiply in the linears of a model: weights of so many bits, inputs of so many."""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.activations import Products
from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor
from qconvert.formats.layouts import registry
from qconvert.models import Architecture


def products_of(
    config: Json, tensors: Mapping[str, ModelTensor], architecture: Architecture
) -> list[Products]:
    """The products of the quantized linears of a model with this config.json, by their widths."""
    parameters = architecture.parameters_in(tensors)
    embeddings = {p.name for p in parameters if p is not None and p.kind == "embedding"}
    return registry.products(config, (t for name, t in tensors.items() if name not in embeddings))
