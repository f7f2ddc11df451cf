"""Defines what the linter's rules look at, and what they say about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qconvert.core.activations import Products
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Quantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.formats.layouts import registry
from qconvert.models import Architecture, Parameter

ERROR, NEEDS, WARNING, NOTE = "error", "needs", "warning", "note"
# The subject of notes on what a loader multiplies, which hold of models that it loads.
COMPUTED = "linears"
# Loaders that stack q, k, v and gate, up into one matrix with one scheme.
FUSING = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a loader trips over (error), may trip over (warning), or that is worth knowing.

    Of severity "needs", it trips over it unless it has what is named: a package, or an argument.
    """

    severity: str
    subject: str
    fact: str
    hint: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint and who is to load it: on `tp` ranks, computing in `dtype`.

    `tokens` is the number of tokens the tokenizer knows, None when that is not known; `unknown` are
    tensors that the architecture does not declare; `products` what config.json makes loaders multiply;
    `device` is "cuda" or "cpu"; `code` are the model's own Python files, `missing_code` those that a config
    names and the folder lacks; `file` is the name of the folder, or of the GGUF file; `own_traits` is what is
    said of this checkpoint's form of the layout, where that has several; `scale_of` reads the scale of a
    tensor that has one, where weights are there.
    """

    tensors: Mapping[str, ModelTensor]
    architecture: Architecture
    layout: str
    loader: str
    tp: int = 1
    dtype: DType | None = None
    tokens: int | None = None
    unknown: tuple[str, ...] = ()
    products: tuple[Products, ...] = ()
    device: str = "cuda"
    code: tuple[str, ...] = ()
    missing_code: tuple[str, ...] = ()
    file: str = "model"
    own_traits: LayoutTraits | None = None
    scale_of: Callable[[ModelTensor], float] | None = None

    @property
    def traits(self) -> LayoutTraits:
        """What is said of the checkpoint's layout for any model."""
        return self.own_traits or registry.traits_of(self.layout)

    @property
    def weights(self) -> Iterator[tuple[Parameter, ModelTensor]]:
        """The weights of linears and embeddings, with their places."""
        for name, tensor in self.tensors.items():
            parameter = self.architecture.parameter(name)
            if (
                parameter is not None
                and parameter.param == "weight"
                and parameter.kind in ("linear", "embedding")
            ):
                yield parameter, tensor

    @property
    def quantized(self) -> list[tuple[Parameter, ModelTensor, Quantized]]:
        """Those that are quantized, with their encodings."""
        return [
            (parameter, t, t.encoding) for parameter, t in self.weights if isinstance(t.encoding, Quantized)
        ]
