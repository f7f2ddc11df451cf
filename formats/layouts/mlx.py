"""The layout of mlx-lm: `affine` grids of 2 to 8 bits, MXFP4, and NVFP4 without a scale for the whole.

A quantized `X.weight` [N, K], or [E, N, K] for a stack of experts, is spelled `X.weight` uint32
[N, K*b/32] (a dense little-endian bit stream along K), `X.scales` and, for affine grids, `X.biases`
[N, G]. config.json has the settings under `quantization`, with one object per module where they differ, and
mirrors them in `quantization_config`. Sources: mlx 0.32 (`mlx/ops.cpp`: quantize, dequantize), mlx-lm 0.32
(`utils.py`, `models/switch_layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.core.dtypes import FLOAT_DTYPES, DType, Json, TensorSpec
from qconvert.core.encodings import AffineMin, Codebook, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineMinRows, CodebookRows, DenseRows, Value
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.config_checks import (
    check_claimed,
    check_parts,
    contradiction,
    dtype_of,
    part,
    plain_rest,
    settings_of,
)
from qconvert.quant.packed_codes import from_words, words_of

NAME = "mlx"
KEY = "quantization"
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# Modes of 4-bit floats: columns per scale, and the type of the scales, stored as bytes.
_MODES = {"mxfp4": (32, DType.F8_E8M0), "nvfp4": (16, DType.F8_E4M3)}
_SCALES = FLOAT_DTYPES | {DType.U8}
_CODED = CodedArrays("weight", "scales", DType.U32, bare_scales=True)


@dataclass(frozen=True, slots=True)
class MLX:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = False

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        encoding = tensor.encoding
        if isinstance(encoding, Unquantized):
            return (TensorSpec(tensor.name, encoding.dtype, tensor.shape),)
        if isinstance(encoding, Codebook):
            return _CODED.stored_arrays(tensor)
        assert isinstance(encoding, AffineMin), encoding
        *rows, width = tensor.shape
        base, shape = _base(tensor.name), (*rows, encoding.groups(width))
        return (
            TensorSpec(tensor.name, DType.U32, (*rows, width * encoding.bits // 32)),
            TensorSpec(f"{base}.scales", encoding.scale_dtype, shape),
            TensorSpec(f"{base}.biases", encoding.scale_dtype, shape),
        )

    def row_alignment(self, tensor: ModelTensor) -> int:
        """Rows are spelled one by one."""
        return 1

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        """Spell rows [start, start + value.rows)."""
        if isinstance(value, DenseRows):
            yield ArrayRows(tensor.name, start, value.rows_RI)
        elif isinstance(value, CodebookRows):
            yield from _CODED.encode(tensor, start, value)
        else:
            assert isinstance(value, AffineMinRows)
            base = _base(tensor.name)
            yield ArrayRows(tensor.name, start, words_of(value).view("<u4"))
            yield ArrayRows(f"{base}.scales", start, value.scales_RG)
            yield ArrayRows(f"{base}.biases", start, value.mins_RG)

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        encoding = tensor.encoding
        if isinstance(encoding, Unquantized):
            return DenseRows(source.read(tensor.name, start, stop), encoding.dtype)
        if isinstance(encoding, Codebook):
            return _CODED.decode(tensor, source, start, stop)
        assert isinstance(encoding, AffineMin), encoding
        base, words = _base(tensor.name), source.read(tensor.name, start, stop)
        return AffineMinRows(
            from_words(words.view("<i4"), encoding.bits, tensor.width),
            source.read(f"{base}.scales", start, stop),
            source.read(f"{base}.biases", start, stop),
            encoding,
        )

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says about modules of these forms: the commonest first, then each other."""
        encodings = list(quantized.values())
        default = max(dict.fromkeys(encodings), key=encodings.count)
        settings = _setting(default)
        settings |= {
            module: _setting(encoding) for module, encoding in quantized.items() if encoding != default
        }
        settings |= {module: False for module in sorted(kept) if module != "lm_head"}
        return {KEY: settings, "quantization_config": settings}


def _base(name: str) -> str:
    return name.removesuffix(".weight")


def _setting(encoding: Quantized) -> Json:
    modes = (name for name, (size, _) in _MODES.items() if size == encoding.group_size)
    mode = "affine" if isinstance(encoding, AffineMin) else next(modes)
    return {"group_size": encoding.group_size, "bits": encoding.bits, "mode": mode}


def open_mlx(source: Source, config: Json) -> tuple[MLX, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names array and key where shapes and `quantization` disagree.
    """
    settings = settings_of(config, KEY)
    bases = [
        name.removesuffix(".scales")
        for name in source.specs
        if name.endswith(".scales") and name.removesuffix(".scales") + ".weight" in source.specs
    ]
    decoded = dtype_of(config)
    found = {f"{base}.weight": _logical(base, source, settings, decoded) for base in bases}
    used = {f"{base}.{part}" for base in bases for part in ("weight", "scales", "biases")}
    found = plain_rest(source, used, found)
    check_claimed(found, "(quantization) bits " + shown(settings.get("bits")), "scales")
    return MLX(), found


def _logical(base: str, source: Source, settings: Json, decoded: DType) -> ModelTensor:
    own = settings.get(base)
    said = {**settings, **own} if isinstance(own, dict) else settings
    mode, bits, size = said.get("mode", "affine"), said.get("bits"), said.get("group_size")
    weight, scales = source.specs[f"{base}.weight"], source.specs[f"{base}.scales"]
    modes = {"affine": None, **{name: (4, group) for name, (group, _) in _MODES.items()}}
    known = isinstance(mode, str) and mode in modes and modes[mode] in (None, (bits, size))
    if not known or type(bits) is not int or bits not in BITS or type(size) is not int or size < 1:
        raise UnsupportedModel(
            f"{weight.name}: mode {shown(mode)} with bits {shown(bits)} and group_size {shown(size)} is not "
            "read here",
            "save it again as affine of 2, 3, 4, 5, 6 or 8 bits, mxfp4 or nvfp4, which are read",
        )
    if mode == "nvfp4" and f"{base}.global_scale" in source.specs:
        raise UnsupportedModel(
            f"{base}.global_scale: one scale for a whole tensor is not read here",
            "mlx-lm quantizes without one unless asked for it",
        )
    part(source, weight.name, "its scales are there", dims=(2, 3), dtypes=(DType.U32,))
    part(source, scales.name, f"{weight.name} is there", dims=(len(weight.shape),), dtypes=_SCALES)
    width = weight.shape[-1] * 32 // bits
    if scales.shape[-1] * size != width:
        raise contradiction(
            f"{weight.name}",
            f"{weight.shape[-1]} words and {scales.shape[-1]} scales a row",
            "bits, group_size",
            [bits, size],
        )
    if mode in _MODES:
        encoding: Quantized = Codebook("e2m1", size, _MODES[mode][1], decoded)
    else:
        encoding = AffineMin(bits, size, scales.dtype)
    return check_parts(MLX(), ModelTensor(weight.name, (*weight.shape[:-1], width), encoding), source)
