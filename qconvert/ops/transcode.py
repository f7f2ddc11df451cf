"""Moves existing codes to another quantization format, and reports the largest change of a weight.

One operation with a table: what each step makes of an encoding stands here, what it makes of rows in
`ops.transcode_rows`, under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, Unquantized
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import Value
from qconvert.ops.base import Finding, Op

Step = Literal[
    "zeros_to_mins",
    "mins_to_zeros",
    "offsets_to_mins",
    "zeros_to_floats",
    "offsets_to_zeros",
    "to_middles",
    "cast_scales",
    "split_groups",
    "from_int8_rows",
    "to_int8_rows",
    "repeat_tensor_scale",
    "divide_by_one",
    "round_divisor",
    "absorb_divisor",
    "divisor_to_factor",
    "factor_to_divisor",
    "widen_scales",
    "resolve_nested_scales",
    "to_ggml_blocks",
    "from_ggml_blocks",
    "take_factor",
    "invert",
]


@dataclass(frozen=True, slots=True)
class Transcode(Op):
    """One step of the table below, with the argument that the step takes."""

    step: Step
    argument: Any = None

    keeps_codes: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True

    def infer(self, encoding: Encoding) -> Encoding:
        return STEPS[self.step](encoding, self.argument)

    def apply(self, value: Value, statistics: Sequence[RowStatistics] = ()) -> tuple[Value, Finding]:
        from qconvert.ops.transcode_rows import ROWS

        return ROWS[self.step](value, self.argument)


def _zeros_to_mins(encoding: Any, width: int) -> AffineMin:
    return AffineMin(encoding.bits, encoding.group_size or width, encoding.scale_dtype)


def _mins_to_zeros(encoding: Any, width: int) -> Encoding:
    size = None if encoding.group_size == width else encoding.group_size
    return AffineInt(encoding.bits, size, symmetric=False, scale_dtype=encoding.scale_dtype)


STEPS: Mapping[Step, Callable[[Any, Any], Encoding]] = {
    # Integer zero points to minimums and back; the argument is the width of a row.
    "zeros_to_mins": _zeros_to_mins,
    "mins_to_zeros": _mins_to_zeros,
    "offsets_to_mins": lambda e, _: AffineMin(e.bits, e.group_size, e.scale_dtype),
    # Zero points in floating point: integers as they are, and what is stored in their place otherwise.
    "zeros_to_floats": lambda e, width: replace(_zeros_to_mins(e, width), offset="zero"),
    "offsets_to_zeros": lambda e, _: replace(e, offset="zero"),
    # Integer zero points or minimums to the weights in the middle of the codes, in bfloat16.
    "to_middles": lambda e, _: AffineMin(e.bits, e.group_size, DType.BF16, "middle"),
    # Scales rounded to another dtype (the argument), or repeated for groups of a smaller size.
    "cast_scales": lambda e, dtype: replace(e, scale_dtype=dtype, signless_zero=False),
    "split_groups": lambda e, size: replace(e, group_size=size),
    # bitsandbytes' int8 rows (absmax) and symmetric integers with one scale a row; the argument is the
    # dtype that the checkpoint computes in.
    "from_int8_rows": lambda e, _: AffineInt(8, None, symmetric=True, scale_dtype=DType.F32),
    "to_int8_rows": lambda e, decoded: Codebook("int8", None, DType.F32, decoded),
    # One scale of a whole tensor repeated for every block of the encoding in the argument.
    "repeat_tensor_scale": lambda e, encoding: encoding,
    # NVFP4's scales and the one number per tensor that divides them.
    "divide_by_one": lambda e, _: replace(e, second="divided"),
    "round_divisor": lambda e, _: e,
    "absorb_divisor": lambda e, _: replace(e, second=None),
    "divisor_to_factor": lambda e, _: replace(e, second="multiplied"),
    "factor_to_divisor": lambda e, _: replace(e, second="divided"),
    # Scales of codes of a table in a wider dtype (the argument), which holds them exactly.
    "widen_scales": lambda e, dtype: replace(e, scale_dtype=dtype),
    # Nested scales as the float32 numbers that they stand for, which values bring already.
    "resolve_nested_scales": lambda e, _: replace(e, second=None),
    # Integers, MXFP4 and NVFP4 as GGML blocks (the argument), and back.
    "to_ggml_blocks": lambda e, blocks: blocks,
    "from_ggml_blocks": lambda e, encoding: encoding,
    # The factor of an NVFP4 weight's scales as a vector of one number.
    "take_factor": lambda e, _: Unquantized(DType.F32),
    # A scale beside the weights as one over it.
    "invert": lambda e, _: e,
}
