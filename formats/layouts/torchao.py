"""Reads the safetensors layout of torchao's int8 weight-only tensors.

A quantized `X.weight` [N, K] is `X._weight_qdata` int8 [N, K], `X._weight_scale` [N, 1] or [N, G] and
`X._weight_zero_point` int8, all zero. Source: torchao 0.18 (`Int8Tensor`), and tensors written by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.layout_traits import LayoutTraits, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.config_checks import gathered, require

NAME = "torchao"
_QDATA = "._weight_qdata"

TRAITS = LayoutTraits(
    NAME,
    packs="no",
    readers=("vllm", "sglang", "transformers"),
    limits=(with_packages("transformers", "torchao"),),
    instead="--to int-quantized holds the same integers; torchao.quantize_ makes its own from --to bf16",
)


class TorchAO(PassThrough[AffineInt, AffineIntRows]):
    """Reads weights from torchao's arrays; it has no state."""

    traits = TRAITS

    def arrays(self, tensor: ModelTensor, encoding: AffineInt) -> tuple[TensorSpec, ...]:
        base, shape = tensor.name.removesuffix(".weight"), (tensor.rows, encoding.groups(tensor.width))
        return (
            TensorSpec(base + _QDATA, DType.I8, tensor.shape),
            TensorSpec(f"{base}._weight_scale", encoding.scale_dtype, shape),
            TensorSpec(f"{base}._weight_zero_point", DType.I8, shape),
        )

    def store(self, tensor: ModelTensor, start: int, value: AffineIntRows) -> Iterable[ArrayRows]:
        """Raise BadRecipe: the class of a quantized weight would have to be rebuilt by torchao."""
        raise BadRecipe(
            f"{tensor.name}: torchao's layout is read, not written", "`qconvert convert --to` another layout"
        )

    def load(self, tensor: ModelTensor, encoding: AffineInt, source: Source, rows: range) -> AffineIntRows:
        specs = self.arrays(tensor, encoding)
        codes, scales, zeros = (source.read(spec.name, rows.start, rows.stop) for spec in specs)
        if zeros.any():
            raise UnsupportedModel(
                f"{specs[2].name}: zero points other than 0 are not read here",
                "quantize it symmetrically, or dequantize it with torchao",
            )
        return AffineIntRows(codes.view("u1") ^ 0x80, scales, None, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing is written in this layout."""
        raise BadRecipe("torchao's layout is read, not written", "`qconvert convert --to` another layout")


def open_torchao(source: Source, config: Json) -> tuple[TorchAO, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the model."""
    return gathered(TorchAO(), source, _quantized(source), "_weight_qdata")


def _quantized(source: Source) -> Iterator[ModelTensor]:
    for array, spec in source.specs.items():
        if not array.endswith(_QDATA):
            continue
        base = array.removesuffix(_QDATA)
        scales = require(source, f"{base}._weight_scale", f"{array} is there")
        groups = scales.shape[-1] if len(scales.shape) == 2 else 0
        whole = len(spec.shape) == 2 and 0 not in spec.shape and groups and spec.shape[1] % groups == 0
        if spec.dtype is not DType.I8 or not whole:
            raise UnsupportedModel(
                f"{array}: {spec.dtype.label} {list(spec.shape)} is not read here; of torchao's, int8 "
                "ones are, with a scale for each row or group of columns",
                "start from the 16-bit model, or let torchao dequantize this one and save that",
            )
        encoding = AffineInt(8, None if groups == 1 else spec.shape[1] // groups, True, scales.dtype)
        yield ModelTensor(f"{base}.weight", spec.shape, encoding)


LAYOUTS = (RegisteredLayout(TRAITS, reader=open_torchao),)
