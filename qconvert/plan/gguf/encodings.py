"""Gives each tensor the GGUF type chosen for it: copied, cast, encoded, or with its codes kept.

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
from qconvert.models.gguf.names import FACTOR
from qconvert.models.statistics_keys import measured
from qconvert.ops import Cast, Dequantize, EncodeBlocks, Transcode
from qconvert.plan.gguf.mixture import needs_imatrix
from qconvert.plan.plan import Unit
from qconvert.plan.state import Compiled, GGUFPlan

_BLOCK = 32


_AGAIN = "`to-gguf --type TYPE --allow-requantize` computes the numbers and quantizes them again"
# Architectures whose graphs multiply by the factors of weights, by llama.cpp's logits; qwen2's are NaN.
_WITH_FACTORS = frozenset({"llama", "qwen3"})


def encode_blocks(state: Compiled) -> Compiled:
    """Every output in the type chosen for it.

    Raises BadRecipe naming a tensor that would have to be quantized a second time, unless that is allowed.
    """
    choices = _gguf(state).choices
    return state.with_plan(
        state.plan.each(lambda unit: _encoded(unit, choices[unit.output.name].type, state))
    )


def _gguf(state: Compiled) -> GGUFPlan:
    assert state.gguf is not None, "types are chosen before"
    return state.gguf


def _encoded(unit: Unit, type_: GGMLType, state: Compiled) -> Unit:
    have, want, again = unit.output.encoding, type_.encoding, state.request.allow_requantize
    keys, unit = unit.statistics, unit._replace(statistics=())
    if have == want:
        return unit
    if isinstance(want, Unquantized):
        return unit.then(Cast(want.dtype) if isinstance(have, Unquantized) else Dequantize(want.dtype))
    assert isinstance(want, GgmlBlocks)
    if unit.certificate() == "dequantized" and not again:
        raise _loses_twice(unit.source, type_)
    if not isinstance(have, Unquantized):
        if type_.name in keeping(unit.output):
            rows = isinstance(have, Codebook) and have.table == "int8"
            unit = unit.then(Transcode("from_int8_rows")) if rows else unit
            return unit.then(Transcode("to_ggml_blocks", want))
        if not again:
            raise _loses_twice(unit.output, type_)
        unit = unit.then(Dequantize(DType.F32))
    unit, statistics = unit.then(EncodeBlocks(want)), state.request.statistics
    if statistics is None:
        return unit
    found = measured(keys, statistics)
    if not found and needs_imatrix(unit.output.name, type_, _gguf(state).file_type):
        raise BadRecipe(
            f"{unit.output.name}: {type_.label} needs importances, and the importance matrix has none for it",
            "give one measured on this model, or another type with --tensor-type PATTERN=TYPE",
        )
    return unit._replace(statistics=found)


def carry_nvfp4_factors(state: Compiled) -> Compiled:
    """One tensor more for every NVFP4 weight whose scales have one divisor, its inverse, or one factor.

    Raises BadRecipe for a graph that is not known to multiply by it.
    """
    units: list[Unit] = []
    for unit in state.plan.units:
        units.append(unit)
        source, output = unit.source.encoding, unit.output
        carried = isinstance(output.encoding, GgmlBlocks) and output.encoding.type == "NVFP4"
        if not (carried and isinstance(source, Codebook) and source.has_tensor_number):
            continue
        if _gguf(state).facts.model.arch not in _WITH_FACTORS:
            raise BadRecipe(
                f"{unit.source.name}: {source.label}, and llama.cpp's {_gguf(state).facts.model.arch} is not "
                "known to multiply by the number that all of its scales have in common",
                _AGAIN,
            )
        name = f"{output.name.rsplit('.', 1)[0]}.{FACTOR}"
        first = (unit.inputs[0].within(0, 1),)
        factor = ModelTensor(name, (1,), Unquantized(DType.F32))
        units.append(Unit(first, (Transcode("take_factor"),), factor))
    return state.with_plan(replace(state.plan, units=tuple(units)))


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
    outputs: Mapping[str, ModelTensor], always: Mapping[str, GGMLType], *, allow_requantize: bool
) -> tuple[str, dict[str, GGMLType]]:
    """The types that keep every tensor as it is, and the name of the file type that most weights make.

    `always` are types that llama.cpp insists on. Raises BadRecipe naming a tensor whose codes no type
    holds; with `allow_requantize` it becomes Q8_0.
    """
    types: dict[str, GGMLType] = {}
    weights: Counter[GGMLType] = Counter()
    for name, tensor in outputs.items():
        found = always.get(name) or _own_type(tensor)
        if found is None and not allow_requantize:
            raise _no_blocks(tensor, [t for n, t in outputs.items() if n not in always])
        types[name] = found or GGMLType.Q8_0
        if name not in always:
            weights[types[name]] += tensor.count
    quantized = {type_: count for type_, count in weights.items() if type_.is_quantized} or weights
    usual = max(quantized, key=quantized.__getitem__).name
    return "MXFP4_MOE" if usual == "MXFP4" else usual, types


def _no_blocks(first: ModelTensor, weights: Sequence[ModelTensor]) -> BadRecipe:
    """The error about the first of the weights whose codes no type holds, and what can be typed."""
    if isinstance(first.encoding, AffineInt) and first.encoding.act_order:
        return BadRecipe(
            f"{first.name}: its columns are in activation order (g_idx), which gguf cannot hold",
            f"`convert --to gguf --undo-act-order` folds what can be folded; {_AGAIN}",
        )
    own = [_own_type(tensor) for tensor in weights]
    kept = Counter(type_.label for type_ in own if type_ is not None and type_.is_quantized)
    rest = ", ".join(f"the {count} of {label}" for label, count in kept.items())
    some = f"{own.count(None)} of {len(own)} weights"
    return BadRecipe(
        f"{first.name}: {first.encoding.label} is not a type of GGUF ({some} are so)",
        f"add --allow-requantize: these become {GGMLType.Q8_0.label}"
        + (f", {rest} keep their codes" if rest else f"; {_AGAIN}"),
    )


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
