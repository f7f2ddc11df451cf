"""The compressed-tensors layout `pack-quantized`: how transformers and vLLM store int2 to int8 weights.

A quantized `X.weight` of shape [N, K] is spelled as `X.weight_packed` int32 [N, ceil(K*b/32)] (a
dense little-endian bit stream along K), `X.weight_scale` [N, G], `X.weight_zero_point` int32
[ceil(N*b/32), G] (the same stream along N; asymmetric only) and `X.weight_shape` int64 [2]. The
stored codes and zero points are the unsigned ones. Sources: compressed-tensors 0.20,
`compressors/pack_quantized` and `quantization/quant_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import gcd

import numpy as np

from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.formats.files import shown
from qconvert.tensors import (
    Dense,
    DType,
    GroupInt,
    IntAffine,
    Json,
    Logical,
    Part,
    Plain,
    Source,
    TensorSpec,
    Value,
)

NAME = "compressed-tensors"
FORMAT = "pack-quantized"
# The release whose field names and bit packing this module follows.
LIBRARY_VERSION = "0.20.0"
_SUFFIXES = ("_packed", "_scale", "_zero_point", "_shape")
_WORD = 32


class CompressedTensors:
    """The layout as the runner sees it. It has no state; plain tensors are spelled as themselves."""

    name = NAME

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        form = tensor.form
        if isinstance(form, Plain):
            return (TensorSpec(tensor.name, form.dtype, tensor.shape),)
        assert isinstance(form, GroupInt), form
        rows, width = tensor.shape
        groups = form.groups(width)
        packed = TensorSpec(f"{tensor.name}_packed", DType.I32, (rows, words(width, form.bits)))
        scale = TensorSpec(f"{tensor.name}_scale", form.scale_dtype, (rows, groups))
        shape = TensorSpec(f"{tensor.name}_shape", DType.I64, (2,))
        if form.symmetric:
            return packed, scale, shape
        zeros = TensorSpec(f"{tensor.name}_zero_point", DType.I32, (words(rows, form.bits), groups))
        return packed, scale, zeros, shape

    def row_alignment(self, tensor: Logical) -> int:
        """Zero points of several rows share a word; everything else is spelled row by row."""
        form = tensor.form
        if not isinstance(form, GroupInt) or form.symmetric:
            return 1
        return _WORD // gcd(form.bits, _WORD)

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Spell rows [start, start + value.rows); `start` is a multiple of the row alignment."""
        from qconvert.quant.packing import pack_rows, pack_stream

        name = tensor.name
        if isinstance(value, Dense):
            yield Part(name, start, value.rows_RI)
            return
        assert isinstance(value, IntAffine)
        bits = value.form.bits
        yield Part(f"{name}_packed", start, pack_stream(value.codes_RI, bits))
        yield Part(f"{name}_scale", start, value.scales_RG)
        if value.zeros_RG is not None:
            yield Part(f"{name}_zero_point", start * bits // _WORD, pack_rows(value.zeros_RG, bits))
        if start == 0:
            yield Part(f"{name}_shape", 0, np.array(tensor.shape, "<i8").reshape(2, 1))

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back as the value they spell."""
        from qconvert.quant.packing import unpack_stream

        name, form = tensor.name, tensor.form
        if isinstance(form, Plain):
            return Dense(source.read(name, start, stop), form.dtype)
        assert isinstance(form, GroupInt), form
        packed = source.read(f"{name}_packed", start, stop)
        codes = unpack_stream(packed, form.bits, tensor.width)
        scales = source.read(f"{name}_scale", start, stop)
        zeros = None if form.symmetric else self._zeros(tensor, source, start, stop)
        return IntAffine(codes, scales, zeros, form)

    def _zeros(self, tensor: Logical, source: Source, start: int, stop: int) -> np.ndarray:
        from qconvert.quant.packing import unpack_rows

        assert isinstance(tensor.form, GroupInt)
        bits, aligned = tensor.form.bits, start - start % self.row_alignment(tensor)
        packed = source.read(f"{tensor.name}_zero_point", aligned * bits // _WORD, words(stop, bits))
        return unpack_rows(packed, bits, stop - aligned)[start - aligned :]


def words(count: int, bits: int) -> int:
    """The number of 32-bit words that hold `count` codes of `bits` bits."""
    return -(-count * bits // _WORD)


def bind(source: Source, config: Json) -> dict[str, Logical]:
    """The logical tensors of a checkpoint in this layout, by HF weight name.

    Forms are read from the arrays' shapes and cross-checked with `quantization_config`; a part
    that is missing or a shape that fits no scheme is a CorruptCheckpoint naming it.
    """
    quantization = config.get("quantization_config") or {}
    if quantization:
        _check_format(quantization)
    declared = _declared_bits(quantization)
    specs, found = source.specs, {}
    for name, spec in specs.items():
        base = next((name[: -len(s)] for s in _SUFFIXES if name.endswith("weight" + s)), None)
        if base is None:
            found[name] = Logical(name, spec.shape, Plain(spec.dtype))
        elif base not in found:
            found[base] = _logical(base, source, declared)
    if quantization and not any(isinstance(t.form, GroupInt) for t in found.values()):
        linear = next((n for n in found if n.endswith("_proj.weight")), "every weight")
        raise CorruptCheckpoint(
            f"{linear.removesuffix('.weight')}: no weight_packed, but quantization_config says {NAME}",
            "remove quantization_config from config.json if the weights are plain",
        )
    return found


def _check_format(quantization: Mapping[str, object]) -> None:
    """Raise UnsupportedModel for what would change the numbers and is not read here."""
    groups = _groups(quantization)
    formats = [quantization.get("format"), *(group.get("format") for group in groups)]
    other = [f for f in formats if f not in (None, FORMAT, "mixed-precision")]
    if other:
        raise UnsupportedModel(
            f"config.json: compressed-tensors format {shown(other[0])!r} is not read here",
            f"formats read: {FORMAT}",
        )
    parts = {"transform_config": quantization.get("transform_config")}
    parts |= {key: group.get(key) for key in ("input_activations", "output_activations") for group in groups}
    for key, value in parts.items():
        if value:
            raise UnsupportedModel(
                f"config.json: quantization_config has {key}, which qconvert would lose",
                "weight-only checkpoints are read",
            )


def _groups(quantization: Mapping[str, object]) -> list[Mapping[str, object]]:
    groups = quantization.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _declared_bits(quantization: Mapping[str, object]) -> set[int]:
    weights = [group.get("weights") for group in _groups(quantization)]
    return {w["num_bits"] for w in weights if isinstance(w, dict) and isinstance(w.get("num_bits"), int)}


def _logical(base: str, source: Source, declared: set[int]) -> Logical:
    specs = source.specs
    for suffix in ("_packed", "_scale", "_shape"):
        if base + suffix not in specs:
            raise CorruptCheckpoint(f"{base}{suffix}: missing", "the checkpoint is incomplete")
    if f"{base}_g_idx" in specs:
        raise UnsupportedModel(f"{base}_g_idx: columns in activation order are not read here")
    if base in specs:
        raise CorruptCheckpoint(f"{base}: stored both plain and as {base}_packed", "remove one of the two")
    packed, scale = specs[base + "_packed"], specs[base + "_scale"]
    zeros = specs.get(base + "_zero_point")
    if specs[base + "_shape"].count != 2 or specs[base + "_shape"].dtype is not DType.I64:
        raise CorruptCheckpoint(f"{base}_shape: not two int64 numbers", "only 2-D weights are read here")
    rows, width = (int(n) for n in source.read(base + "_shape", 0, 2).ravel())
    bits = _bits(packed, (rows, width), declared)
    form = _form(bits, (rows, width), scale, symmetric=zeros is None)
    tensor = Logical(base, (rows, width), form)
    for spec in CompressedTensors().parts(tensor):
        if specs[spec.name].shape != spec.shape or specs[spec.name].dtype is not spec.dtype:
            found = specs[spec.name]
            raise CorruptCheckpoint(
                f"{spec.name}: {found.dtype.label} {list(found.shape)}, but {form.label} of shape "
                f"[{rows}, {width}] needs {spec.dtype.label} {list(spec.shape)}",
                "the arrays of this weight do not belong together",
            )
    return tensor


def _bits(packed: TensorSpec, shape: tuple[int, int], declared: set[int]) -> int:
    """The bits per code that fit the packed array and that the config, if it says any, declares."""
    rows, width = shape
    fitting = {bits for bits in range(2, 9) if packed.shape == (rows, words(width, bits))}
    if declared and fitting and not fitting & declared:
        raise CorruptCheckpoint(
            f"{packed.name}: holds {min(fitting)}-bit codes, config.json says num_bits {sorted(declared)}",
            "correct quantization_config",
        )
    agreed = fitting & declared or fitting
    if len(agreed) != 1:
        found = " or ".join(map(str, sorted(agreed))) or "no number of"
        raise CorruptCheckpoint(
            f"{packed.name}: {list(packed.shape)} holds {found} bits for each weight of [{rows}, {width}]",
            "the arrays of this weight do not belong together",
        )
    return agreed.pop()


def _form(bits: int, shape: tuple[int, int], scale: TensorSpec, *, symmetric: bool) -> GroupInt:
    rows, width = shape
    groups = scale.shape[-1] if len(scale.shape) == 2 else 0
    if rows < 1 or width < 1 or groups < 1 or width % groups or not scale.dtype.is_float:
        raise CorruptCheckpoint(
            f"{scale.name}: {scale.dtype.label} {list(scale.shape)} fits no [{rows}, {width}] weight",
            "the arrays of this weight do not belong together",
        )
    return GroupInt(bits, None if groups == 1 else width // groups, symmetric, scale.dtype)


def quantization_config(quantized: Mapping[str, GroupInt], kept_linears: Iterable[str]) -> Json:
    """The `quantization_config` of a checkpoint whose modules `quantized` have these forms.

    `kept_linears` are the linear modules left in 16 bit; loaders need their names to ignore them.
    One form for every linear is written as the class name "Linear"; anything else as one group per
    form, with regular expressions that cover exactly its modules.
    """
    ignore = sorted(set(kept_linears))
    by_form: dict[GroupInt, list[str]] = {}
    for module, form in quantized.items():
        by_form.setdefault(form, []).append(module)
    uniform = len(by_form) == 1 and not any("embed" in module for module in quantized)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if uniform else patterns(modules),
            "format": FORMAT,
            "input_activations": None,
            "output_activations": None,
            "weights": _weights_args(form),
        }
        for i, (form, modules) in enumerate(by_form.items())
    }
    return {
        "quant_method": NAME,
        "format": FORMAT,
        "quantization_status": "compressed",
        "version": LIBRARY_VERSION,
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": _numbered(ignore) if len(ignore) > 8 else ignore,
        "config_groups": groups,
    }


def _weights_args(form: GroupInt) -> Json:
    return {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": form.symmetric,
        "strategy": "channel" if form.group_size is None else "group",
        "group_size": form.group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
        **({} if form.symmetric else {"zp_dtype": "torch.int8"}),
    }


def patterns(modules: Iterable[str]) -> list[str]:
    """Regular expressions (`re:` targets) that match exactly these modules, layers gathered."""
    return _numbered(list(modules))


def _numbered(modules: list[str]) -> list[str]:
    """Modules that differ only in their first number share one pattern that lists the numbers."""
    gathered: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for module in modules:
        match = re.search(r"(?<=\.)\d+(?=\.)", module)
        if match:
            gathered.setdefault((module[: match.start()], module[match.end() :]), []).append(match[0])
        else:
            plain.append(f"re:^{re.escape(module)}$")
    numbered = [
        f"re:^{re.escape(before)}({'|'.join(numbers)}){re.escape(after)}$"
        for (before, after), numbers in gathered.items()
    ]
    return plain + numbered
