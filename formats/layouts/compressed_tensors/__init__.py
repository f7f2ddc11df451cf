"""Declares the compressed-tensors layouts, with integers packed into words or a byte for each code."""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized
from qconvert.formats.layouts.base import RegisteredLayout
from qconvert.formats.layouts.compressed_tensors.activations import activations
from qconvert.formats.layouts.compressed_tensors.arrays import (
    TRAITS,
    UNPACKED_TRAITS,
    CompressedTensors,
    EightBits,
)
from qconvert.formats.layouts.compressed_tensors.promised import promise
from qconvert.formats.layouts.compressed_tensors.reading import open_compressed_tensors
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode
from qconvert.ops.transcode import Step

# By what NVFP4's scales have in common.
_TO_DIVISOR: Mapping[str | None, Step] = {
    None: "divide_by_one",
    "divided": "round_divisor",
    "multiplied": "factor_to_divisor",
}


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.is_nvfp4:
        return (Transcode(_TO_DIVISOR[encoding.second]),)
    if isinstance(encoding, Codebook) and encoding.table in ("e4m3", "e2m1"):
        if encoding.bits == 8 and encoding.group_size is not None and encoding.group_rows == 1:
            raise refused(tensor, "has groups of columns, which compressed-tensors has for fewer bits only")
        if encoding.bits == 8 and encoding.scale_dtype is DType.F8_E8M0:
            return (Transcode("widen_scales", DType.F32),)
        if encoding.bits == 8 or (encoding.group_rows == 1 and encoding.group_size in (16, 32)):
            return ()
        raise refused(tensor, "has blocks that compressed-tensors does not")
    ops, made = to_integers(tensor, encoding)
    return (*ops, *_integers(tensor, made, TRAITS.name))


def _transcode_unpacked(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    ops, made = to_integers(tensor, encoding)
    if made.bits != 8 or made.group_size is not None:
        raise refused(tensor, "is not 8 bits with one scale per row, which int-quantized is")
    return (*ops, *_integers(tensor, made, UNPACKED_TRAITS.name))


def _integers(tensor: ModelTensor, made: AffineInt, layout: str) -> tuple[Op, ...]:
    check_column_order(tensor, made, layout)
    return (Transcode("cast_scales", made.scale_dtype),) if made.signless_zero else ()


LAYOUTS = (
    RegisteredLayout(
        TRAITS, CompressedTensors, open_compressed_tensors, _transcode, activations, promise=promise
    ),
    RegisteredLayout(
        UNPACKED_TRAITS, lambda: CompressedTensors(EightBits()), None, _transcode_unpacked, activations
    ),
)

__all__ = ["LAYOUTS", "CompressedTensors"]
