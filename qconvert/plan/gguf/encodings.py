"""How each tensor gets the GGUF type chosen for it: copied, cast, encoded, or with its codes kept.

A weight that is quantized already loses twice when it is quantized again, so that happens only on
request. Where its grid is one of GGUF's own, its codes go over as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qconvert.core.dtypes import DType
from qconvert.core.encodings import (
    AffineInt,
    AffineMin,
    Codebook,
    Encoding,
    GgmlBlocks,
    ModelTensor,
    Unquantized,
)
from qconvert.core.ggml_types import GGMLType
from qconvert.errors import BadRecipe
from qconvert.ops.rows import Cast, Dequantize, EncodeBlocks, Op
from qconvert.ops.transcode import FromInt8Rows, IntoBlocks
from qconvert.plan.plan import Pass, Plan, Unit

_BLOCK = 32


def give_types(
    types: Mapping[str, GGMLType],
    importance: Mapping[str, Sequence[float]],
    *,
    allow_requantize: bool,
) -> Pass:
    """Give every output the type chosen for it. Raises BadRecipe naming a tensor that would have to be
    quantized a second time, unless `allow_requantize`.
    """

    def one(unit: Unit) -> Unit:
        type_ = types[unit.output.name]
        have, want = unit.output.encoding, type_.encoding
        if have == want:
            return unit
        if isinstance(want, Unquantized):
            return unit.then(Cast(want.dtype) if isinstance(have, Unquantized) else Dequantize(want.dtype))
        assert isinstance(want, GgmlBlocks)
        if any(isinstance(op, Dequantize) for op in unit.ops) and not allow_requantize:
            raise _loses_twice(unit.inputs[0].tensor, type_)
        if not isinstance(have, Unquantized):
            if type_.name in keeping(unit.output):
                rows = isinstance(have, Codebook) and have.table == "int8"
                return (unit.then(FromInt8Rows()) if rows else unit).then(IntoBlocks(want))
            if not allow_requantize:
                raise _loses_twice(unit.output, type_)
            unit = unit.then(Dequantize(DType.F32))
        return unit.then(_encode(unit.output, want, importance))

    return lambda plan: replace(plan, units=tuple(one(unit) for unit in plan.units))


def _encode(tensor: ModelTensor, want: GgmlBlocks, importance: Mapping[str, Sequence[float]]) -> Op:
    rows_each = tensor.shape[-2] if len(tensor.shape) > 2 else None
    return EncodeBlocks(want, importance.get(tensor.name), rows_each)


def keeping(tensor: ModelTensor) -> tuple[str, ...]:
    """The names of the types whose blocks hold the codes of a tensor as they are."""
    encoding = tensor.encoding
    if isinstance(encoding, Codebook):
        kind = _codebook_type(encoding)
        return (kind.name,) if kind and tensor.width % kind.block == 0 else ()
    if not isinstance(encoding, AffineInt | AffineMin) or (encoding.group_size or tensor.width) % _BLOCK:
        return ()
    if isinstance(encoding, AffineMin):
        return ("Q4_1",) if encoding.bits <= 4 else ()
    if encoding.act_order:
        return ()
    signed = encoding.symmetric or encoding.bits < 8
    return (
        *(["Q4_0"] if encoding.symmetric and encoding.bits <= 4 else []),
        *(["Q4_1"] if encoding.bits <= 4 else []),
        *(["Q8_0"] if signed else []),
    )


def _codebook_type(encoding: Codebook) -> GGMLType | None:
    if encoding.is_mxfp4:
        return GGMLType.MXFP4
    if encoding.is_nvfp4:
        return GGMLType.NVFP4
    return GGMLType.Q8_0 if encoding.table == "int8" else None


def is_mxfp4(encoding: Encoding) -> bool:
    """Whether a weight is stored in the microscaling format that GGML has, too."""
    return isinstance(encoding, Codebook) and encoding.is_mxfp4


def own_types(
    plan: Plan, always: Mapping[str, GGMLType], *, allow_requantize: bool
) -> tuple[str, dict[str, GGMLType]]:
    """The types that keep every tensor as it is, and the name of the file type that most weights make.

    `always` are types that llama.cpp insists on. Raises BadRecipe naming a tensor whose codes no type
    holds; with `allow_requantize` it becomes Q8_0.
    """
    types: dict[str, GGMLType] = {}
    weights: Counter[GGMLType] = Counter()
    for name, tensor in plan.outputs.items():
        found = always.get(name) or _own_type(tensor)
        if found is None and not allow_requantize:
            raise _no_blocks(tensor)
        types[name] = found or GGMLType.Q8_0
        if name not in always:
            weights[types[name]] += tensor.count
    quantized = {type_: count for type_, count in weights.items() if type_.is_quantized} or weights
    usual = max(quantized, key=quantized.__getitem__).name
    return "MXFP4_MOE" if usual == "MXFP4" else usual, types


def _no_blocks(tensor: ModelTensor) -> BadRecipe:
    again = "--scheme TYPE --allow-requantize computes the numbers and quantizes them again"
    if isinstance(tensor.encoding, AffineInt) and tensor.encoding.act_order:
        return BadRecipe(
            f"{tensor.name}: its columns are in activation order (g_idx), which gguf cannot hold",
            f"--undo-act-order folds what can be folded; {again}",
        )
    return BadRecipe(f"{tensor.name}: {tensor.encoding.label} is no grid of GGUF's blocks", again)


def _own_type(tensor: ModelTensor) -> GGMLType | None:
    encoding = tensor.encoding
    if isinstance(encoding, GgmlBlocks):
        return GGMLType[encoding.type]
    if isinstance(encoding, Unquantized):
        return GGMLType.F32 if encoding.dtype is DType.F64 else GGMLType[encoding.dtype.code]
    kept = keeping(tensor)
    return GGMLType[kept[0]] if kept else None


def _loses_twice(tensor: ModelTensor, type_: GGMLType) -> BadRecipe:
    kept = keeping(tensor)
    keeps = f"{kept[0].lower()} would keep its codes (--type, --tensor-type); " if kept else ""
    return BadRecipe(
        f"{tensor.name}: already quantized ({tensor.encoding.label}); as {type_.label} it loses twice",
        f"{keeps}--allow-requantize quantizes its numbers again",
    )
