"""Reads the names, shapes and quantization_config of a compressed-tensors checkpoint as logical tensors.

Encodings are told from the arrays themselves and checked against what the config declares; a part that is
missing or a shape that fits no encoding is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import Source
from qconvert.errors import CorruptCheckpoint, NotDownloaded, UnsupportedModel, shown
from qconvert.formats.io.array_table import kinds_of
from qconvert.formats.layouts.compressed_tensors.activations import (
    GLOBAL,
    SCALE,
    ZERO,
    activations,
    group_of,
    groups_of,
    scheme_of,
)
from qconvert.formats.layouts.compressed_tensors.arrays import CompressedTensors, words
from qconvert.formats.layouts.compressed_tensors.config import FORMATS, NAME
from qconvert.formats.layouts.config_checks import APART, base_of, check_claimed, check_parts, part, require
from qconvert.formats.layouts.scales_beside import cache_scale

_SUFFIXES = ("_packed", "_global_scale", "_scale", "_zero_point", "_shape")
_MOST_BITS = 16
_AGAIN = "save it again with compressed-tensors, all weights packed and in their own order"


def open_compressed_tensors(source: Source, config: Json) -> tuple[CompressedTensors, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    Encodings are read from the arrays' shapes and cross-checked with `quantization_config`; a part
    that is missing or a shape that fits no scheme is a CorruptCheckpoint naming it.
    """
    quantization = config.get("quantization_config") or {}
    if quantization:
        check_format(quantization)
    declared = _declared_bits(quantization)
    loose: set[AffineInt] = set()
    specs = source.specs
    found: dict[str, ModelTensor] = {}
    plain = cache(Unquantized)
    parts = {
        name.removesuffix(each) for name in specs if name.endswith(_SUFFIXES) for each in ("", *_SUFFIXES)
    }
    for name, (dtype, shape) in kinds_of(specs):
        if name not in parts:  # nothing belongs to it, and it to nothing
            found[name] = ModelTensor(name, shape, plain(dtype))
            continue
        base = _base(name, source)
        if base in found or _is_of_inputs(name, source) or (quantization and cache_scale(name)):
            continue
        if base in specs and f"{base}_packed" not in specs and _is_unpacked(base, source):
            found[base] = _unpacked(base, source, quantization)
            encoding = found[base].encoding
            loose |= {encoding} if isinstance(encoding, AffineInt) else set()
        elif base == name and f"{base}_packed" not in specs:
            found[name] = ModelTensor(name, shape, plain(dtype))
        elif f"{base}_packed" in specs and specs[f"{base}_packed"].dtype is DType.U8:
            found[base] = _four_bit_floats(base, source)
        else:
            found[base] = _logical(base, source, quantization, declared)
    if quantization:
        check_claimed(found, NAME, "weight_packed")
    for name, tensor in found.items():
        if tensor.encoding in loose and name not in specs:
            raise UnsupportedModel(
                f"{name}: packed, while another {tensor.encoding.label} weight is not", _AGAIN
            )
    _check_inputs(config, found, source)
    return CompressedTensors(frozenset(loose)), found


def _is_of_inputs(name: str, source: Source) -> bool:
    """Whether an array is a stored number of how a linear's inputs are quantized."""
    module, _, kind = name.rpartition(".")
    weights = (f"{module}.weight", f"{module}.weight_packed")
    return kind in (SCALE, ZERO, GLOBAL) and any(weight in source.specs for weight in weights)


def _check_inputs(config: Json, found: Mapping[str, ModelTensor], source: Source) -> None:
    """Raise where a number is missing that the inputs of a linear are quantized with."""
    if not any(
        group.get("input_activations") for group in groups_of(config.get("quantization_config") or {})
    ):
        return
    for tensor in found.values():
        scheme = activations(config, tensor) if isinstance(tensor.encoding, Quantized) else None
        for kind in () if scheme is None else scheme.stored:
            why = f"its inputs are {scheme.label}" if scheme else ""
            if require(source, f"{base_of(tensor)}.{kind}", why).count != 1:
                raise CorruptCheckpoint(f"{base_of(tensor)}.{kind}: not one number, but {why}", APART)


def _base(name: str, source: Source) -> str:
    """The tensor that an array belongs to: a module's `weight`, or a parameter with packed rows or codes."""
    for suffix in _SUFFIXES:
        base = name[: -len(suffix)]
        if name.endswith(suffix) and (
            base.endswith("weight")
            or f"{base}_packed" in source.specs
            or (base in source.specs and _is_unpacked(base, source))
        ):
            return base
    return name


def _is_unpacked(base: str, source: Source) -> bool:
    return source.specs[base].dtype in (DType.I8, DType.F8_E4M3) and f"{base}_scale" in source.specs


def check_format(quantization: Mapping[str, object]) -> None:
    """Raise UnsupportedModel for what would change the numbers and is not read here."""
    groups = groups_of(quantization)
    formats = [quantization.get("format"), *(group.get("format") for group in groups)]
    other = [f for f in formats if f not in (None, *FORMATS, "mixed-precision")]
    if other:
        raise UnsupportedModel(
            f"config.json: compressed-tensors format {shown(other[0])!r} is not read here",
            f"formats read: {', '.join(FORMATS)}",
        )
    lost = {"transform_config": quantization.get("transform_config")}
    for group in groups:
        lost["output_activations"] = lost.get("output_activations") or group.get("output_activations")
        inputs = group.get("input_activations")
        if isinstance(inputs, dict):
            scheme_of(inputs)
        else:
            lost["input_activations"] = lost.get("input_activations") or inputs
    for key, value in lost.items():
        if value:
            raise UnsupportedModel(
                f"config.json: quantization_config has {key}, which qconvert would lose",
                f"save it again without {key}",
            )


def _declared_bits(quantization: Mapping[str, object]) -> set[int]:
    weights = [group.get("weights") for group in groups_of(quantization)]
    found = {w["num_bits"] for w in weights if isinstance(w, dict) and type(w.get("num_bits")) is int}
    for bits in found:
        if not 1 <= bits <= _MOST_BITS:
            raise CorruptCheckpoint(
                f"config.json: quantization_config: num_bits is {shown(bits)}, outside 1..{_MOST_BITS}",
                "correct quantization_config",
            )
    return found


def _blocks(groups: Iterable[Mapping[str, object]]) -> list[list[int]]:
    """The block structures that groups of the config declare, [rows, columns] each."""
    weights = [group.get("weights") for group in groups]
    blocks = [w.get("block_structure") for w in weights if isinstance(w, dict)]
    return [b for b in blocks if isinstance(b, list) and [type(n) for n in b] == [int, int] and min(b) > 0]


def _unpacked(base: str, source: Source, quantization: Mapping[str, object]) -> ModelTensor:
    """A weight with a byte for each code: int8, or F8_E4M3 with one scale per tensor, row or block."""
    weight, scale = source.specs[base], source.specs[f"{base}_scale"]
    if len(weight.shape) not in (2, 3):
        raise UnsupportedModel(
            f"{base}: {weight.dtype.label} {list(weight.shape)} is not read here",
            "save it again as 2-D linears, or 3-D stacks of experts",
        )
    encoding: AffineInt | Codebook
    if weight.dtype is DType.I8:
        symmetric = f"{base}_zero_point" not in source.specs
        encoding = _encoding(8, weight.shape, scale, symmetric=symmetric)
        return check_parts(
            CompressedTensors(frozenset({encoding})), ModelTensor(base, weight.shape, encoding), source
        )
    if not scale.dtype.is_float:
        raise CorruptCheckpoint(
            f"{scale.name}: scales of {weight.dtype.label} weights are floats, not {scale.dtype.label}", APART
        )
    tensor = ModelTensor(base, weight.shape, _floats(weight, scale, quantization))
    return check_parts(CompressedTensors(), tensor, source)


def _floats(weight: TensorSpec, scale: TensorSpec, quantization: Mapping[str, object]) -> Codebook:
    """FP8 by the shape of its scales; a single one is that of a block where the config has blocks for it."""

    def cut_by(block: list[int]) -> bool:
        sides = zip(weight.shape[-2:], block, strict=True)
        return scale.shape == (*weight.shape[:-2], *(-(-size // side) for size, side in sides))

    own = _blocks([group_of(quantization, weight.name.removesuffix(".weight"))])
    block = next(filter(cut_by, own), None)
    if block is None and scale.count == 1 and weight.shape[0] > 1:
        return Codebook("e4m3", None, scale.dtype, DType.BF16, group_rows=None)
    if block is None and scale.shape == (*weight.shape[:-1], 1):
        return Codebook("e4m3", None, scale.dtype, DType.BF16)
    declared = _blocks(groups_of(quantization))
    block = block or next(filter(cut_by, declared), None)
    if block is None:
        raise CorruptCheckpoint(
            f"{scale.name}: {list(scale.shape)} scales are neither one per tensor, row, nor block of "
            f"{weight.name} {list(weight.shape)} (block_structure {declared or None})",
            "correct quantization_config",
        )
    return Codebook("e4m3", block[1], scale.dtype, DType.BF16, group_rows=block[0])


def _four_bit_floats(base: str, source: Source) -> ModelTensor:
    packed = source.specs[f"{base}_packed"]
    scale = require(source, f"{base}_scale", f"{packed.name} is there")
    if base in source.specs:
        raise CorruptCheckpoint(f"{base}: stored both plain and as {packed.name}", "remove one of the two")
    if len(packed.shape) not in (2, 3):
        raise UnsupportedModel(
            f"{packed.name}: {list(packed.shape)} is not read here",
            "save it again as 2-D linears, or 3-D stacks of experts",
        )
    if scale.dtype is DType.U8:
        encoding = Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16)
    else:
        encoding = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided")
    tensor = ModelTensor(base, (*packed.shape[:-1], packed.shape[-1] * 2), encoding)
    return check_parts(CompressedTensors(), tensor, source)


def _logical(
    base: str, source: Source, quantization: Mapping[str, object], declared: set[int]
) -> ModelTensor:
    specs = source.specs
    for suffix in ("_packed", "_scale", "_shape"):
        if base + suffix not in specs:
            raise CorruptCheckpoint(f"{base}{suffix}: missing")
    if f"{base}_g_idx" in specs:
        raise UnsupportedModel(f"{base}_g_idx: columns in activation order are not read here", _AGAIN)
    if base in specs:
        raise CorruptCheckpoint(f"{base}: stored both plain and as {base}_packed", "remove one of the two")
    why = f"{base}_shape is there"
    packed = part(source, f"{base}_packed", why, dims=(2, 3), dtypes=(DType.I32,))
    scale = part(source, f"{base}_scale", why, dims=(2, 3))
    zeros = specs.get(base + "_zero_point")
    stored = part(source, f"{base}_shape", f"{packed.name} is there", dims=(1,), dtypes=(DType.I64,))
    if stored.count not in (2, 3):
        raise CorruptCheckpoint(
            f"{base}_shape: not two int64 numbers, nor three of a stack of experts", APART
        )
    shape = _stored_shape(base, source, packed, declared)
    bits = _bits(packed, shape, declared)
    encoding = _encoding(bits, shape, scale, symmetric=zeros is None)
    tensor = ModelTensor(base, shape, encoding)
    if encoding.group_size is None and _says_group_of(shape[-1], group_of(quantization, base_of(tensor))):
        tensor = replace(tensor, encoding=replace(encoding, group_size=shape[-1]))
    return check_parts(CompressedTensors(), tensor, source)


def _says_group_of(width: int, group: Mapping[str, object]) -> bool:
    """Whether the config has a group of so many columns for a module, and not a scale for every row."""
    weights = group.get("weights")
    return isinstance(weights, dict) and weights.get("group_size") == width


def _stored_shape(base: str, source: Source, packed: TensorSpec, declared: set[int]) -> tuple[int, ...]:
    """The shape of a weight or a stack of them; from the packed words where only headers are at hand."""
    try:
        stored = source.read(base + "_shape", 0, source.specs[base + "_shape"].count)
    except NotDownloaded:
        if len(declared) != 1 or len(packed.shape) not in (2, 3):
            raise
        return *packed.shape[:-1], packed.shape[-1] * 32 // next(iter(declared))
    return tuple(int(n) for n in stored.ravel())


def _bits(packed: TensorSpec, shape: tuple[int, ...], declared: set[int]) -> int:
    """The bits per code that fit the packed array and that the config, if it says any, declares."""
    *rows, width = shape
    fitting = {bits for bits in range(2, 9) if packed.shape == (*rows, words(width, bits))}
    if declared and fitting and not fitting & declared:
        raise CorruptCheckpoint(
            f"{packed.name}: holds {min(fitting)}-bit codes, config.json says num_bits {sorted(declared)}",
            "correct quantization_config",
        )
    agreed = fitting & declared or fitting
    if len(agreed) != 1:
        found = " or ".join(map(str, sorted(agreed))) or "no number of"
        raise CorruptCheckpoint(
            f"{packed.name}: {list(packed.shape)} holds {found} bits for each weight of {list(shape)}", APART
        )
    return agreed.pop()


def _encoding(bits: int, shape: tuple[int, ...], scale: TensorSpec, *, symmetric: bool) -> AffineInt:
    width = shape[-1]
    groups = scale.shape[-1] if len(scale.shape) in (2, 3) else 0
    if min(shape) < 1 or groups < 1 or width % groups or not scale.dtype.is_float:
        raise CorruptCheckpoint(
            f"{scale.name}: {scale.dtype.label} {list(scale.shape)} fits no {list(shape)} weight", APART
        )
    return AffineInt(bits, None if groups == 1 else width // groups, symmetric, scale.dtype)
