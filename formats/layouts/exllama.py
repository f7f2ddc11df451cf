"""Names the weights of EXL2 and EXL3, ExLlama's layouts, with their bits and bytes; their codes are not read.

EXL2: `X.q_weight` int32 [*, N], whose rows hold codes of several widths, with `X.q_invperm` or `X.q_perm`
[K], the order of the columns, and scales. EXL3: `X.trellis` int16 [K/16, N/16, 16*b], paths through a trellis
of b bits a weight, of numbers that were rotated, with the signs `X.suh` (or `su`) and `X.svh` (or `sv`).
Sources: exllamav2 0.3 (`ext.py`: make_q_matrix), exllamav3 (`modules/quant/exl3.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import ModelTensor, Quantized, Undecoded
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import Value
from qconvert.errors import UnsupportedModel
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout

_INSTEAD = "start from the 16-bit model that it was made of"
TRAITS = LayoutTraits("exl2", packs="no", experts="apart", instead=_INSTEAD)
TRAITS_3 = LayoutTraits("exl3", packs="no", experts="apart", instead=_INSTEAD)
# The arrays of a weight: the codes first.
_PARTS_2 = ("q_weight", "q_invperm", "q_perm", "q_scale", "q_scale_max", "q_groups", "q_group_map")
_PARTS_3 = ("trellis", "suh", "su", "svh", "sv", "mcg", "mul1", "scale")
_TILE = 16
# The rows and columns of a weight, by its module.
_ShapeOf = Callable[[str, Source], tuple[int, int]]


class Exllama(PassThrough[Quantized, Value]):
    """Stores arrays that have names here and no numbers."""

    def __init__(self, traits: LayoutTraits, parts: Mapping[str, tuple[TensorSpec, ...]]) -> None:
        self._traits, self._parts = traits, parts

    @property
    def traits(self) -> LayoutTraits:
        return self._traits

    def arrays(self, tensor: ModelTensor, encoding: Quantized) -> tuple[TensorSpec, ...]:
        return self._parts[tensor.name]

    def store(self, tensor: ModelTensor, start: int, value: Value) -> Iterable[ArrayRows]:
        raise self._refused(tensor.name)

    def load(self, tensor: ModelTensor, encoding: Quantized, source: Source, rows: range) -> Value:
        raise self._refused(tensor.name)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        raise self._refused("config.json")

    def _refused(self, name: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name}: {self.name} weights are not decoded here", _INSTEAD)


def open_exl2(source: Source, config: Json) -> tuple[Exllama, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the model."""
    return _opened(TRAITS, source, _PARTS_2, _shape_2)


def open_exl3(source: Source, config: Json) -> tuple[Exllama, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the model."""
    return _opened(TRAITS_3, source, _PARTS_3, _shape_3)


def _opened(
    traits: LayoutTraits, source: Source, parts: tuple[str, ...], shape_of: _ShapeOf
) -> tuple[Exllama, dict[str, ModelTensor]]:
    stored: dict[str, tuple[TensorSpec, ...]] = {}
    tensors = []
    for base in [name.removesuffix(f".{parts[0]}") for name in source.specs if name.endswith(f".{parts[0]}")]:
        found = tuple(source.specs[f"{base}.{p}"] for p in parts if f"{base}.{p}" in source.specs)
        shape = shape_of(base, source)
        stored[f"{base}.weight"] = found
        bits = found[0].nbytes * 8 / (shape[0] * shape[1])
        nbytes = sum(spec.nbytes for spec in found)
        tensors.append(ModelTensor(f"{base}.weight", shape, Undecoded(traits.name, bits, nbytes)))
    return checks.gathered(Exllama(traits, stored), source, tensors, parts[0])


def _shape_2(base: str, source: Source) -> tuple[int, int]:
    codes = checks.part(source, f"{base}.q_weight", "it holds codes of EXL2", dims=(2,), dtypes=(DType.I32,))
    orders = (f"{base}.q_invperm", f"{base}.q_perm")
    order = next((name for name in orders if name in source.specs), orders[0])
    spec = checks.part(source, order, f"{codes.name} is there", dims=(1,), dtypes=(DType.I16, DType.I32))
    return codes.shape[1], spec.count


def _shape_3(base: str, source: Source) -> tuple[int, int]:
    codes = checks.part(source, f"{base}.trellis", "it holds codes of EXL3", dims=(3,), dtypes=(DType.I16,))
    return codes.shape[1] * _TILE, codes.shape[0] * _TILE


LAYOUTS = (RegisteredLayout(TRAITS, reader=open_exl2), RegisteredLayout(TRAITS_3, reader=open_exl3))
