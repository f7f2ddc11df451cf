"""Stores the layout of FBGEMM's FP8, as Llama 3.1 405B was published in it.

A quantized `X.weight` [N, K] is F8_E4M3 [N, K] and `X.weight_scale` f32 [N, 1]; inputs are scaled token by
token, as if none were beyond `activation_scale_ub`. Sources: transformers 5.23 (`integrations/fbgemm_fp8.py`,
`FbgemmFp8Config`), vLLM 0.32 (`quantization/fbgemm_fp8.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    PLAIN_HEAD,
    CodebookScheme,
    LayoutTraits,
    LoaderLimit,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import UnsupportedModel
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Op, Transcode

NAME = "fbgemm_fp8"
_CODED = CodedArrays("weight", "weight_scale")
_ROWS = Codebook("e4m3", None, DType.F32, DType.BF16)
_MOST = "activation_scale_ub"
_LARGEST_INPUT = 1200.0  # what FbgemmFp8Config says where nothing is asked for
_LARGEST_FLOAT32 = 3.4e38
_DEPRECATED = "--allow-deprecated-quantization"

TRAITS = LayoutTraits(
    NAME,
    codebooks=(CodebookScheme("fp8-channel", _ROWS),),
    default_codebook=True,
    packs="no",
    experts="apart",
    readers=("vllm", "transformers"),
    loads="vLLM, and transformers with fbgemm-gpu on a GPU, load",
    serve=f"vllm serve {_DEPRECATED}",
    limits=(
        LoaderLimit(
            ("vllm",),
            "needs",
            "vLLM calls {layout} deprecated, and reads it only if told so",
            f"vllm serve {_DEPRECATED}, or `qconvert convert --to compressed-tensors`",
            about="model",
            needs=_DEPRECATED,
        ),
        with_packages("transformers", "fbgemm-gpu", "accelerate"),
        PLAIN_HEAD,
    ),
    schemes="fp8 with a scale for each row",
)


class FBGEMM(PassThrough[Codebook, CodebookRows]):
    """Stores E4M3 weights with a scale for each row; inputs larger than `most` are cut to it."""

    traits = TRAITS

    def __init__(self, most: float = _LARGEST_INPUT) -> None:
        self.most = most

    def arrays(self, tensor: ModelTensor, encoding: Codebook) -> tuple[TensorSpec, ...]:
        checks.matrix_shape(tensor, NAME)
        return _CODED.stored_arrays(tensor)

    def store(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterable[ArrayRows]:
        return _CODED.encode(tensor, start, value)

    def load(self, tensor: ModelTensor, encoding: Codebook, source: Source, rows: range) -> CodebookRows:
        return _CODED.decode(tensor, source, rows.start, rows.stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        settings = {"quant_method": NAME, _MOST: self.most, "modules_to_not_convert": sorted(kept) or None}
        return {"quantization_config": settings}


def open_fbgemm(source: Source, config: Json) -> tuple[FBGEMM, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the 16-bit model."""
    return checks.gathered(_like(config), source, _quantized(source), "weight_scale")


def _like(config: Json) -> FBGEMM:
    """The layout with the bound of the inputs that a config.json says."""
    return FBGEMM(_most(config) or _LARGEST_INPUT)


def _most(config: Json) -> float | None:
    said = checks.settings_of(config).get(_MOST)
    if not isinstance(said, int | float) or isinstance(said, bool):
        return None
    return float(said) if 0 < said <= _LARGEST_FLOAT32 else None


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


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if not isinstance(encoding, Codebook) or encoding.table != "e4m3" or encoding.group_size is not None:
        raise refused(tensor, "is not FP8 with one scale for each row, which this layout holds")
    wider = () if encoding.scale_dtype is DType.F32 else (Transcode("widen_scales", DType.F32),)
    if encoding.group_rows is None:
        rows = Codebook("e4m3", None, encoding.scale_dtype, encoding.decoded)
        return (Transcode("repeat_tensor_scale", rows), *wider)
    return wider


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """FP8 too, a scale for each row."""
    return ActivationScheme(8, True, "token", most=_most(config))


LAYOUTS = (RegisteredLayout(TRAITS, FBGEMM, open_fbgemm, _transcode, _activations, like=_like),)
