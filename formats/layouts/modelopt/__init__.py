"""Declares the layout of NVIDIA's ModelOpt (Model Optimizer) and the rule that brings encodings into it."""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook, ModelTensor, Quantized
from qconvert.formats.layouts.base import RegisteredLayout
from qconvert.formats.layouts.modelopt.arrays import BLOCK, TRAITS, ModelOpt
from qconvert.formats.layouts.modelopt.config import activations, settings_file
from qconvert.formats.layouts.modelopt.promised import promise
from qconvert.formats.layouts.modelopt.reading import open_modelopt
from qconvert.formats.layouts.transcoding import refused
from qconvert.ops import Op, Transcode
from qconvert.ops.transcode import Step


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, Codebook) and encoding.is_nvfp4:
        if encoding.second == "multiplied":
            return ()
        step: Step = "divisor_to_factor"
        return (Transcode(step),)
    if isinstance(encoding, Codebook) and encoding.table == "e4m3" and _has_blocks(tensor, encoding):
        own = encoding.scale_dtype in (DType.F32, _exponents(encoding))
        return () if own else (Transcode("widen_scales", DType.F32),)
    raise refused(tensor, "is neither NVFP4 nor FP8 per tensor, row or block of 128 by 128")


def _has_blocks(tensor: ModelTensor, encoding: Codebook) -> bool:
    """Whether FP8 weights have scales as ModelOpt has them: its loaders want whole blocks."""
    if encoding.group_size is None:
        return encoding.group_rows in (1, None)
    if replace(encoding, scale_dtype=DType.F32).label == f"e4m3-g{BLOCK}x{BLOCK}":
        return tensor.rows % BLOCK == 0 and tensor.width % BLOCK == 0
    return _exponents(encoding) is not None


def _exponents(encoding: Codebook) -> DType | None:
    """E8M0 for MXFP8: groups of 32 E4M3 codes under a power of two."""
    blocks = (encoding.group_size, encoding.group_rows, encoding.scale_dtype)
    return DType.F8_E8M0 if blocks == (32, 1, DType.F8_E8M0) else None


LAYOUTS = (
    RegisteredLayout(
        TRAITS, ModelOpt, open_modelopt, _transcode, activations, settings_file=settings_file, promise=promise
    ),
)

__all__ = ["LAYOUTS", "ModelOpt"]
