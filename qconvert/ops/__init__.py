"""Defines the steps of a unit: what each makes of an encoding, and of rows."""

from qconvert.ops.base import Certificate, Finding, Op, Order, OutputError
from qconvert.ops.encode import EncodeBlocks, EncodeTable, NestScales, Quantize
from qconvert.ops.numbers import (
    Cast,
    CastIntegers,
    ChangeNumbers,
    CheckFinite,
    Dequantize,
    Scale,
    ScaleSegments,
)
from qconvert.ops.rows import (
    CutRows,
    InterleaveHalves,
    InterleaveMembers,
    Multiply,
    PadColumns,
    PermuteColumns,
    PermuteRows,
    SwapGroups,
    TransposeBlocks,
    op_of,
)
from qconvert.ops.transcode import Transcode

__all__ = [
    "Cast",
    "CastIntegers",
    "Certificate",
    "ChangeNumbers",
    "CheckFinite",
    "CutRows",
    "Dequantize",
    "EncodeBlocks",
    "EncodeTable",
    "Finding",
    "InterleaveHalves",
    "InterleaveMembers",
    "Multiply",
    "NestScales",
    "Op",
    "Order",
    "OutputError",
    "PadColumns",
    "PermuteColumns",
    "PermuteRows",
    "Quantize",
    "Scale",
    "ScaleSegments",
    "SwapGroups",
    "Transcode",
    "TransposeBlocks",
    "op_of",
]
