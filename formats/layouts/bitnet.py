"""Reads the layout of BitNet's ternary weights, as transformers' `BitLinear` and `AutoBitLinear` hold them.

A quantized `X.weight` [N, K] is `X.weight` uint8 [N/4, K], four rows to a byte: row `i * N/4 + j` is in bits
`2i` of row j, as 0, 1 or 2 for -1, 0 or 1. One number for the tensor, `X.weight_scale` [1], divides them
(`linear_class` bitlinear) or multiplies them (autobitlinear). Source: transformers 5.23
(`integrations/bitnet.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.layout_traits import LayoutTraits, with_packages
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows
from qconvert.errors import BadRecipe, CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout

if TYPE_CHECKING:
    import numpy as np

NAME = "bitnet"
_PER_BYTE = 4
_CLASSES = ("bitlinear", "autobitlinear")
_ANOTHER = "`qconvert convert --to` another layout"

TRAITS = LayoutTraits(
    NAME,
    packs="rows",
    experts="apart",
    readers=("transformers",),
    limits=(with_packages("transformers", "accelerate"),),
    instead="--to gptq --scheme int2-channel and --to mlx hold ternary weights too",
)


@dataclass(frozen=True, slots=True)
class BitNet(PassThrough[AffineInt, AffineIntRows]):
    """Reads ternary weights; `divides` says that the stored scale is to be divided by."""

    divides: bool
    scale_dtypes: tuple[tuple[str, DType], ...] = ()

    @property
    def traits(self) -> LayoutTraits:
        return TRAITS

    def arrays(self, tensor: ModelTensor, encoding: AffineInt) -> tuple[TensorSpec, ...]:
        scale = f"{tensor.name}_scale"
        return (
            TensorSpec(tensor.name, DType.U8, (tensor.shape[0] // _PER_BYTE, tensor.width)),
            TensorSpec(scale, dict(self.scale_dtypes).get(scale, DType.BF16), (1,)),
        )

    def store(self, tensor: ModelTensor, start: int, value: AffineIntRows) -> Iterable[ArrayRows]:
        """Raise BadRecipe: weights that were not trained to be ternary are worth nothing as that."""
        raise BadRecipe(f"{tensor.name}: bitnet's layout is read, not written", _ANOTHER)

    def load(self, tensor: ModelTensor, encoding: AffineInt, source: Source, rows: range) -> AffineIntRows:
        """Read rows back, as codes 1, 2 and 3 around a zero of 2; CorruptCheckpoint for a fourth code."""
        import numpy as np

        parts = [self._part(tensor, source, part) for part in _parts(tensor.rows // _PER_BYTE, rows)]
        stored_RI = np.concatenate(parts)
        if (stored_RI == _PER_BYTE - 1).any():
            raise CorruptCheckpoint(f"{tensor.name}: holds a code of 3, which is not a ternary weight")
        scale = source.read(f"{tensor.name}_scale", 0, 1)
        scale_11 = self._multiplier(scale, source.specs[f"{tensor.name}_scale"].dtype)
        return AffineIntRows(stored_RI + np.uint8(1), np.repeat(scale_11, len(stored_RI), 0), None, encoding)

    def _part(self, tensor: ModelTensor, source: Source, part: tuple[int, range]) -> np.ndarray:
        place, rows = part
        bytes_RI = source.read(tensor.name, rows.start, rows.stop)
        codes_RI: np.ndarray = bytes_RI >> 2 * place & 3
        return codes_RI

    def _multiplier(self, scale: np.ndarray, dtype: DType) -> np.ndarray:
        import numpy as np

        from qconvert.quant.codebook import wide

        number_11 = wide(scale.reshape(1, 1), dtype)
        with np.errstate(divide="ignore"):  # what is infinite is left for the caller to find
            return np.float32(1) / number_11 if self.divides else number_11

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing is written in this layout."""
        raise BadRecipe("bitnet's layout is read, not written", _ANOTHER)


def _parts(per_place: int, rows: range) -> Iterator[tuple[int, range]]:
    """The places in a byte that hold these rows, and the stored rows for each."""
    for place in range(_PER_BYTE):
        first = place * per_place
        start, stop = max(rows.start, first), min(rows.stop, first + per_place)
        if start < stop:
            yield place, range(start - first, stop - first)


def open_bitnet(source: Source, config: Json) -> tuple[BitNet, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    UnsupportedModel where linears normalize their inputs, or are quantized as they are used.
    """
    settings = checks.settings_of(config)
    kind, mode = settings.get("linear_class") or _CLASSES[0], settings.get("quantization_mode") or "offline"
    if kind not in _CLASSES or mode != "offline":
        raise UnsupportedModel(
            f"config.json: bitnet with linear_class {shown(kind)} and quantization_mode {shown(mode)} is not "
            "read here",
            "online models store plain weights: remove quantization_config to convert those",
        )
    if settings.get("use_rms_norm"):
        raise UnsupportedModel(
            "config.json: bitnet with use_rms_norm normalizes the inputs of every linear, which no other "
            "layout says",
            "models without it are read",
        )
    quantized = list(_quantized(source))
    dtypes = tuple((f"{t.name}_scale", source.specs[f"{t.name}_scale"].dtype) for t in quantized)
    return checks.gathered(BitNet(kind == _CLASSES[0], dtypes), source, quantized, "weight_scale")


def _quantized(source: Source) -> Iterator[ModelTensor]:
    for name, spec in source.specs.items():
        if spec.dtype is not DType.U8 or not name.endswith(".weight"):
            continue
        checks.part(source, name, "it holds ternary weights", dims=(2,), dtypes=(DType.U8,))
        checks.part(source, f"{name}_scale", f"{name} is ternary", dims=(1,))
        shape = (spec.shape[0] * _PER_BYTE, spec.shape[1])
        yield ModelTensor(name, shape, AffineInt(2, None, True, DType.F32))


def _activations(config: Json, tensor: ModelTensor) -> ActivationScheme:
    """Integers of 8 bits, with a scale for each token."""
    return ActivationScheme(8, False, "token")


LAYOUTS = (RegisteredLayout(TRAITS, reader=open_bitnet, activations=_activations),)
