"""Stores the layout of mlx-lm: `affine` integers of 2 to 8 bits, MXFP4, and NVFP4 without a global scale.

A quantized `X.weight` [N, K], or [E, N, K] for a stack of experts, is stored as `X.weight` uint32
[N, K*b/32] (a dense little-endian bit stream along K), `X.scales` and, for affine ones, `X.biases`
[N, G]. config.json has the settings under `quantization`, with one object per module where they differ, and
mirrors them in `quantization_config`. Sources: mlx 0.32 (`mlx/ops.cpp`: quantize, dequantize), mlx-lm 0.32
(`utils.py`, `models/switch_layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from qconvert.core.dtypes import FLOAT_DTYPES, DType, Json, TensorSpec
from qconvert.core.encodings import AffineMin, Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import CodebookScheme, IntegerSchemes, LayoutTraits, RoundingRules
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineMinRows, CodebookRows
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, PassThrough, Promise, RegisteredLayout
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.transcoding import check_column_order, refused, to_integers
from qconvert.ops import Op, Transcode
from qconvert.quant.packed_codes import from_words, words_of

NAME = "mlx"
KEY = "quantization"
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (128, 64, 32)
# Modes of 4-bit floats: columns per scale, and the type of the scales, stored as bytes.
_MODES = {"mxfp4": (32, DType.F8_E8M0), "nvfp4": (16, DType.F8_E4M3)}
_SCALES = FLOAT_DTYPES | {DType.U8}
_CODED = CodedArrays("weight", "scales", DType.U32, bare_scales=True)

TRAITS = LayoutTraits(
    NAME,
    integers=IntegerSchemes(BITS, GROUP_SIZES, per_row=False),
    codebooks=tuple(
        CodebookScheme(name, Codebook("e2m1", size, scales, DType.BF16))
        for name, (size, scales) in _MODES.items()
    ),
    # As `mx.quantize` of mlx 0.32 is observed to round.
    rounding=RoundingRules(halves="down", signed_zero=False, zero_exponent=127),
    embeddings="any",
    experts="apart",
    config_key=KEY,
    readers=("mlx",),
    first_choice_of=("mlx",),
    loads="mlx-lm loads",
    serve="mlx_lm.chat --model",
)


class MLX(PassThrough[AffineMin | Codebook, AffineMinRows | CodebookRows]):
    """Stores weights as mlx-lm's arrays; it has no state."""

    traits = TRAITS
    named_by = "module"

    def arrays(self, tensor: ModelTensor, encoding: AffineMin | Codebook) -> tuple[TensorSpec, ...]:
        if isinstance(encoding, Codebook):
            return _CODED.stored_arrays(tensor)
        *rows, width = tensor.shape
        base, shape = checks.base_of(tensor), (*rows, encoding.groups(width))
        return (
            TensorSpec(tensor.name, DType.U32, (*rows, width * encoding.bits // 32)),
            TensorSpec(f"{base}.scales", encoding.scale_dtype, shape),
            TensorSpec(f"{base}.biases", encoding.scale_dtype, shape),
        )

    def store(
        self, tensor: ModelTensor, start: int, value: AffineMinRows | CodebookRows
    ) -> Iterator[ArrayRows]:
        if isinstance(value, CodebookRows):
            yield from _CODED.encode(tensor, start, value)
            return
        base = checks.base_of(tensor)
        yield ArrayRows(tensor.name, start, words_of(value).view("<u4"))
        yield ArrayRows(f"{base}.scales", start, value.scales_RG)
        yield ArrayRows(f"{base}.biases", start, value.mins_RG)

    def load(
        self, tensor: ModelTensor, encoding: AffineMin | Codebook, source: Source, rows: range
    ) -> AffineMinRows | CodebookRows:
        start, stop = rows.start, rows.stop
        if isinstance(encoding, Codebook):
            return _CODED.decode(tensor, source, start, stop)
        base, words = checks.base_of(tensor), source.read(tensor.name, start, stop)
        return AffineMinRows(
            from_words(words.view("<i4"), encoding.bits, tensor.width),
            source.read(f"{base}.scales", start, stop),
            source.read(f"{base}.biases", start, stop),
            encoding,
        )

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        encodings = list(quantized.values())
        default = max(dict.fromkeys(encodings), key=encodings.count)
        settings = _setting(default)
        settings |= {module: _setting(other) for module, other in quantized.items() if other != default}
        settings |= {module: False for module in sorted(kept) if module != "lm_head"}
        return {KEY: settings, "quantization_config": settings}


def _setting(encoding: Quantized) -> Json:
    modes = (name for name, (size, _) in _MODES.items() if size == encoding.group_size)
    mode = "affine" if isinstance(encoding, AffineMin) else next(modes)
    return {"group_size": encoding.group_size, "bits": encoding.bits, "mode": mode}


def open_mlx(source: Source, config: Json) -> tuple[MLX, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name.

    CorruptCheckpoint names array and key where shapes and `quantization` disagree.
    """
    settings = checks.settings_of(config, KEY)
    bases = [
        name.removesuffix(".scales")
        for name in source.specs
        if name.endswith(".scales") and name.removesuffix(".scales") + ".weight" in source.specs
    ]
    tensors = (_logical(base, source, settings, checks.dtype_of(config)) for base in bases)
    return checks.gathered(
        MLX(), source, tensors, "scales", f"(quantization) bits {shown(settings.get('bits'))}"
    )


def _logical(base: str, source: Source, settings: Json, decoded: DType) -> ModelTensor:
    own = settings.get(base)
    weight, scales = source.specs[f"{base}.weight"], source.specs[f"{base}.scales"]
    encoding = _encoding(weight.name, {**settings, **own} if isinstance(own, dict) else settings, decoded)
    if isinstance(encoding, AffineMin):
        encoding = replace(encoding, scale_dtype=scales.dtype)
    elif encoding.is_nvfp4 and f"{base}.global_scale" in source.specs:
        raise UnsupportedModel(
            f"{base}.global_scale: one scale for a whole tensor is not read here",
            "mlx-lm quantizes without one unless asked for it",
        )
    checks.part(source, weight.name, "its scales are there", dims=(2, 3), dtypes=(DType.U32,))
    checks.part(source, scales.name, f"{weight.name} is there", dims=(len(weight.shape),), dtypes=_SCALES)
    bits, size = encoding.bits, encoding.group_size
    width = weight.shape[-1] * 32 // bits
    if scales.shape[-1] * (size or 0) != width:
        raise checks.contradiction(
            f"{weight.name}",
            f"{weight.shape[-1]} words and {scales.shape[-1]} scales a row",
            "bits, group_size",
            [bits, size],
        )
    return ModelTensor(weight.name, (*weight.shape[:-1], width), encoding)


def _encoding(name: str, said: Json, dtype: DType) -> AffineMin | Codebook:
    """The encoding that settings say of a weight, in a model of this type; UnsupportedModel for others."""
    mode, bits, size = said.get("mode", "affine"), said.get("bits"), said.get("group_size")
    modes = {"affine": None, **{name: (4, group) for name, (group, _) in _MODES.items()}}
    known = isinstance(mode, str) and mode in modes and modes[mode] in (None, (bits, size))
    if not known or type(bits) is not int or bits not in BITS or type(size) is not int or size < 1:
        raise UnsupportedModel(
            f"{name}: mode {shown(mode)} with bits {shown(bits)} and group_size {shown(size)} is not "
            "read here",
            "save it again as affine of 2, 3, 4, 5, 6 or 8 bits, mxfp4 or nvfp4, which are read",
        )
    if isinstance(mode, str) and mode in _MODES:
        return Codebook("e2m1", size, _MODES[mode][1], dtype)
    return AffineMin(bits, size, dtype)


def _transcode(tensor: ModelTensor, encoding: Quantized) -> tuple[Op, ...]:
    if isinstance(encoding, AffineMin) and encoding.group_size in GROUP_SIZES and encoding.bits in BITS:
        return () if encoding.offset == "min" else (Transcode("offsets_to_mins"),)
    if isinstance(encoding, AffineMin) and encoding.bits not in BITS:
        raise refused(tensor, f"has codes of {encoding.bits} bits (MLX's have 2, 3, 4, 5, 6 or 8)")
    if isinstance(encoding, AffineMin):
        raise refused(tensor, "has groups that MLX does not (32, 64 or 128 columns)")
    if isinstance(encoding, Codebook) and encoding.table != "int8":
        if encoding.is_mxfp4 or (encoding.is_nvfp4 and encoding.second is None):
            return ()
        if encoding.is_nvfp4:
            raise refused(
                tensor, "divides its scales by one number (weight_global_scale), which MLX does not have"
            )
        raise refused(tensor, "is not one of MLX's modes that are written here (affine, mxfp4, nvfp4)")
    ops, made = to_integers(tensor, encoding)
    check_column_order(tensor, made, NAME)
    if made.bits not in BITS or tensor.width * made.bits % 32:
        raise refused(tensor, f"in rows of {tensor.width} is not written by MLX (2, 3, 4, 5, 6, 8 bits)")
    columns = made.group_size or tensor.width
    size = next((size for size in GROUP_SIZES if columns % size == 0), None)
    if size is None:
        raise refused(tensor, f"has groups of {columns} columns, MLX's are of 32, 64 or 128")
    split = () if size == made.group_size else (Transcode("split_groups", size),)
    return (*ops, *split, Transcode("zeros_to_mins", tensor.width))


def _promise(config: Json) -> Promise:
    """Every matrix whose rows are whole groups, unless the settings say `false` of its module."""
    settings, decoded = checks.settings_of(config, KEY), checks.dtype_of(config)

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> Quantized | None:
        own = settings.get(checks.base_of(tensor))
        made = _encoding(tensor.name, {**settings, **own} if isinstance(own, dict) else settings, decoded)
        assert made.group_size is not None
        return None if own is False or tensor.width % made.group_size else made

    return Promise(MLX(), encoding)


LAYOUTS = (RegisteredLayout(TRAITS, MLX, open_mlx, _transcode, promise=_promise),)
