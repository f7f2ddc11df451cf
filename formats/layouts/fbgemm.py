"""Reads the layout of FBGEMM's FP8, as Llama 3.1 405B was published in it.

A quantized `X.weight` [N, K] is F8_E4M3 [N, K] and `X.weight_scale` f32 [N, 1]; inputs are scaled token by
token, by at most `activation_scale_ub`. Sources: transformers 5.23 (`integrations/fbgemm_fp8.py`,
`FbgemmFp8Config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import LayoutTraits, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.codebook_arrays import CodedArrays

NAME = "fbgemm_fp8"
_CODED = CodedArrays("weight", "weight_scale")
_INSTEAD = "--to compressed-tensors holds the same codes and scales"

TRAITS = LayoutTraits(
    NAME,
    packs="no",
    experts="apart",
    readers=("vllm", "transformers"),
    limits=(with_packages("transformers", "fbgemm-gpu", "accelerate"),),
    instead=_INSTEAD,
)


class FBGEMM(PassThrough[Codebook, CodebookRows]):
    """Reads E4M3 weights with a scale for each row; it has no state."""

    traits = TRAITS

    def arrays(self, tensor: ModelTensor, encoding: Codebook) -> tuple[TensorSpec, ...]:
        return _CODED.stored_arrays(tensor)

    def store(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterable[ArrayRows]:
        """Raise BadRecipe: this layout is read, and compressed-tensors has the same."""
        raise BadRecipe(f"{tensor.name}: FBGEMM's layout is read, not written", _INSTEAD)

    def load(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        return _CODED.decode(tensor, source, rows.start, rows.stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing is written in this layout."""
        raise BadRecipe("FBGEMM's layout is read, not written", _INSTEAD)


def open_fbgemm(source: Source, config: Json) -> tuple[FBGEMM, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the 16-bit model."""
    return checks.gathered(FBGEMM(), source, _quantized(source), "weight_scale")


def _quantized(source: Source) -> Iterator[ModelTensor]:
    for name, spec in source.specs.items():
        if spec.dtype is not DType.F8_E4M3:
            continue
        scales = checks.part(source, f"{name}_scale", f"{name} is {spec.dtype.label}", dims=(2, 3))
        if len(spec.shape) != 2:
            raise UnsupportedModel(
                f"{name}: {spec.dtype.label} {list(spec.shape)} is not read here",
                "start from the 16-bit model, or from one whose experts are apart",
            )
        yield ModelTensor(name, spec.shape, Codebook("e4m3", None, scales.dtype, DType.BF16))


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """FP8 too, a scale for each row; that none exceeds `activation_scale_ub` is left out."""
    return ActivationScheme(8, True, "token")


LAYOUTS = (RegisteredLayout(TRAITS, reader=open_fbgemm, activations=_activations),)
