"""The safetensors layout of torchao's int8 weight-only tensors; read, not written.

A quantized `X.weight` [N, K] is `X._weight_qdata` int8 [N, K], `X._weight_scale` [N, 1] or [N, G] and
`X._weight_zero_point` int8, all zero. Source: torchao 0.18 (`Int8Tensor`), and tensors written by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows, DenseRows, Value
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.formats.layouts.config_checks import check_claimed, check_parts, plain_rest, require

NAME = "torchao"
_QDATA = "._weight_qdata"


@dataclass(frozen=True, slots=True)
class TorchAO:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = False

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor."""
        encoding = tensor.encoding
        if isinstance(encoding, Unquantized):
            return (TensorSpec(tensor.name, encoding.dtype, tensor.shape),)
        assert isinstance(encoding, AffineInt), encoding
        base, shape = tensor.name.removesuffix(".weight"), (tensor.rows, encoding.groups(tensor.width))
        return (
            TensorSpec(base + _QDATA, DType.I8, tensor.shape),
            TensorSpec(f"{base}._weight_scale", encoding.scale_dtype, shape),
            TensorSpec(f"{base}._weight_zero_point", DType.I8, shape),
        )

    def row_alignment(self, tensor: ModelTensor) -> int:
        """Rows are stored one by one."""
        return 1

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        """Rows of plain tensors; the class of a quantized one would have to be rebuilt by torchao."""
        if not isinstance(value, DenseRows):
            raise BadRecipe(
                f"{tensor.name}: torchao's layout is read, not written",
                "`qconvert convert --to` another layout",
            )
        yield ArrayRows(tensor.name, start, value.rows_RI)

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        encoding = tensor.encoding
        if isinstance(encoding, Unquantized):
            return DenseRows(source.read(tensor.name, start, stop), encoding.dtype)
        assert isinstance(encoding, AffineInt), encoding
        codes, scales, zeros = (source.read(spec.name, start, stop) for spec in self.stored_arrays(tensor))
        if zeros.any():
            raise UnsupportedModel(
                f"{self.stored_arrays(tensor)[2].name}: zero points other than 0 are not read here",
                "quantize it symmetrically, or dequantize it with torchao",
            )
        return AffineIntRows(codes.view(np.uint8) ^ np.uint8(0x80), scales, None, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing is written in this layout."""
        raise BadRecipe("torchao's layout is read, not written", "`qconvert convert --to` another layout")


def open_torchao(source: Source, config: Json) -> tuple[TorchAO, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name."""
    found: dict[str, ModelTensor] = {}
    used: set[str] = set()
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
        tensor = ModelTensor(f"{base}.weight", spec.shape, encoding)
        found[tensor.name] = check_parts(TorchAO(), tensor, source)
        used |= {each.name for each in TorchAO().stored_arrays(tensor)}
    found = plain_rest(source, used, found)
    check_claimed(found, NAME, "_weight_qdata")
    return TorchAO(), found
