"""Declares a layout that nobody uses: `X.weight` is `X.codes` uint8 [N, K] and `X.steps` f32 [N, G]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.layout_traits import IntegerSchemes, LayoutTraits, LoaderLimit
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows
from qconvert.formats.layouts.base import PassThrough, RegisteredLayout
from qconvert.formats.layouts.config_checks import gathered
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode
from qconvert.quant.packed_codes import codes_of

TRAITS = LayoutTraits(
    "toy",
    integers=IntegerSchemes((4, 6), (64, 32), per_row=False, asymmetric=False),
    scale_dtype=DType.F32,
    packs="no",
    experts="apart",
    settings_file="toy.json",
    readers=("vllm",),
    loads="Nobody but qconvert reads",
    limits=(
        LoaderLimit(
            ("vllm",), "error", "{loader} is bored by {encoding}", "take int4", lambda form: form.bits == 6
        ),
    ),
)


class Toy(PassThrough[AffineInt, AffineIntRows]):
    """Stores a byte for each code."""

    traits = TRAITS

    def arrays(self, tensor: ModelTensor, encoding: AffineInt) -> tuple[TensorSpec, ...]:
        base, groups = tensor.name.removesuffix("weight"), encoding.groups(tensor.width)
        return (
            TensorSpec(f"{base}codes", DType.U8, tensor.shape),
            TensorSpec(f"{base}steps", DType.F32, (*tensor.shape[:-1], groups)),
        )

    def store(self, tensor: ModelTensor, start: int, value: AffineIntRows) -> Iterator[ArrayRows]:
        codes, steps = self.arrays(tensor, value.encoding)
        yield ArrayRows(codes.name, start, codes_of(value))
        yield ArrayRows(steps.name, start, value.scales_RG)

    def load(self, tensor: ModelTensor, encoding: AffineInt, source: Source, rows: range) -> AffineIntRows:
        codes, steps = (source.read(s.name, rows.start, rows.stop) for s in self.arrays(tensor, encoding))
        return AffineIntRows(codes, steps, None, encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return {"quantization_config": {"quant_method": "toy", "bits": next(iter(quantized.values())).bits}}


def open_toy(source: Source, config: Json) -> tuple[Toy, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the model."""
    return gathered(Toy(), source, _quantized(source, config["quantization_config"]["bits"]), ".codes")


def _quantized(source: Source, bits: int) -> Iterator[ModelTensor]:
    for name, codes in source.specs.items():
        if name.endswith(".codes"):
            base = name.removesuffix("codes")
            size = codes.shape[-1] // source.specs[f"{base}steps"].shape[-1]
            yield ModelTensor(f"{base}weight", codes.shape, AffineInt(bits, size, True, DType.F32))


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = to_integers(tensor, encoding)
    check_column_order(tensor, made, "toy")
    if made.bits not in (4, 6) or made.group_size not in (64, 32) or not made.symmetric:
        raise refused(tensor, "is not for toys")
    return (*ops, Transcode("cast_scales", DType.F32))


LAYOUTS = (RegisteredLayout(TRAITS, Toy, open_toy, _transcode),)
