"""Stores the compressed-tensors layouts: integer and small-float weights of transformers and vLLM.

`pack-quantized`: a quantized `X.weight` of shape [N, K] is stored as `X.weight_packed` int32 [N,
ceil(K*b/32)] (a dense little-endian bit stream along K), `X.weight_scale` [N, G], `X.weight_zero_point`
int32 [ceil(N*b/32), G] (the same stream along N; asymmetric only) and `X.weight_shape` int64 [2]; the
stored codes and zero points are the unsigned ones. `int-quantized`: `X.weight` int8 [N, K], signed, with
scales and, asymmetric, zero points int8 [N, G]. `float-quantized`: `X.weight` F8_E4M3 with one scale per
tensor, row or block. `mxfp4-` and `nvfp4-pack-quantized`: `X.weight_packed` uint8 [N, K/2] with E8M0
scales of 32 columns, or E4M3 scales of 16 to be divided by `X.weight_global_scale`. Sources:
compressed-tensors 0.20, `compressors/`, and tensors written by llm-compressor 0.14.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from qconvert.core.activations import NO_SCALES, ScalesBeside, StoredScale
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized
from qconvert.core.layout_traits import (
    CodebookScheme,
    IntegerSchemes,
    LayoutTraits,
    LoaderLimit,
    RoundingRules,
    with_packages,
)
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import AffineIntRows, CodebookRows, Value
from qconvert.errors import BadRecipe
from qconvert.formats.layouts.base import PassThrough
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.compressed_tensors.activations import GLOBAL, SCALE
from qconvert.formats.layouts.compressed_tensors.config import INT, NAME, quantization_config
from qconvert.formats.layouts.scales_beside import cache_scale
from qconvert.quant.packed_codes import codes_of, from_words, words_of

if TYPE_CHECKING:
    import numpy as np

_WORD = 32
_FP8 = CodedArrays("weight", "weight_scale")
_FP4 = CodedArrays("weight_packed", "weight_scale", number="weight_global_scale")


class EightBits:
    """All integer encodings of 8 bits, as a container."""

    def __contains__(self, encoding: object) -> bool:
        return isinstance(encoding, AffineInt) and encoding.bits == 8


def _misread_by_mlx(encoding: Quantized) -> bool:
    if isinstance(encoding, Codebook):
        return encoding.bits != 4
    return not isinstance(encoding, AffineInt) or (
        (encoding.bits, encoding.group_size, encoding.symmetric) != (4, 32, True)
    )


_E4M3, _E2M1 = Codebook("e4m3", None, DType.BF16, DType.BF16), Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16)
TRAITS = LayoutTraits(
    NAME,
    integers=IntegerSchemes(),
    codebooks=(
        CodebookScheme("fp8-channel", _E4M3, scales_as_weights=True),
        CodebookScheme("fp8-tensor", replace(_E4M3, group_rows=None), scales_as_weights=True),
        CodebookScheme("fp8-block", replace(_E4M3, group_size=128, group_rows=128), scales_as_weights=True),
        CodebookScheme("mxfp4", _E2M1),
        CodebookScheme("nvfp4", replace(_E2M1, group_size=16, scale_dtype=DType.F8_E4M3, second="divided")),
    ),
    # compressed-tensors 0.20: `quantization/utils/` (helpers.py, mxfp_utils.py, fp4_utils.py).
    rounding=RoundingRules(rounds_scales=True, ceiling=False),
    embeddings="symmetric",
    readers=("vllm", "sglang", "transformers", "mlx"),
    ollama_decodes="e4m3",
    first_choice_of=("vllm", "sglang", "transformers"),
    marlin=True,
    packed_zero_points=True,
    loads="transformers (`from_pretrained`) and vLLM load",
    serve="vllm serve",
    limits=(
        LoaderLimit(
            ("sglang",),  # WNA16_SUPPORTED_BITS in its layers/quantization/compressed_tensors
            "error",
            "SGLang runs packed integers of 4 and 8 bits, and this is {encoding}",
            "quantize to 4 or 8 bits, or serve with vLLM",
            lambda e: isinstance(e, AffineInt) and e.bits not in (4, 8),
        ),
        LoaderLimit(
            ("sglang",),  # is_activation_quantization_format and get_linear_scheme, there
            "error",
            "SGLang has no scheme for {encoding} in {layout}",
            "`qconvert quantize --scheme NVFP4A16`, or serve with vLLM",
            lambda e: isinstance(e, Codebook) and e.is_mxfp4,
        ),
        LoaderLimit(
            ("sglang",),  # it takes them for AWQ's: [groups, rows / 8], in its order
            "error",
            "SGLang does not load packed zero points of experts",
            "a scheme without zero points, or serve with vLLM",
            lambda e: isinstance(e, AffineInt) and not e.symmetric,
            about="experts",
        ),
        LoaderLimit(
            ("transformers",),  # CompressedTensorsDequantize multiplies them by scales of rows
            "error",
            "transformers does not load experts in blocks of FP8 in {layout}",
            "--scheme fp8-channel, or serve with vLLM",
            lambda e: isinstance(e, Codebook) and e.table == "e4m3" and e.group_size is not None,
            about="experts",
        ),
        LoaderLimit(
            ("transformers",),  # it hands codes and scales of groups over, and not the scale of the tensor
            "error",
            "transformers leaves out the tensor's scale of experts in NVFP4, and computes other numbers",
            "--scheme mxfp4, or serve with vLLM",
            lambda e: isinstance(e, Codebook) and e.is_nvfp4,
            about="experts",
        ),
        LoaderLimit(
            ("transformers",),  # vLLM unpacks by itself
            "warning",
            "{bits}-bit codes run over words: readers before compressed-tensors 0.18 misread them",
            "4 or 8 bits are read by all",
            lambda e: isinstance(e, AffineInt) and e.bits in (3, 5, 6, 7),
        ),
        LoaderLimit(
            ("mlx",),
            "error",
            "mlx-lm reads packed integers as 4 bits in groups of 32, and this is {encoding}",
            "`qconvert convert --to mlx`",
            _misread_by_mlx,
        ),
        with_packages("transformers", "compressed-tensors"),
    ),
)
UNPACKED_TRAITS = replace(
    TRAITS,
    name=INT,
    integers=IntegerSchemes((8,), ()),
    codebooks=(),
    rounding=RoundingRules(),
    packs="no",
    embeddings="plain",
    readers=("vllm", "sglang", "transformers"),
    first_choice_of=(),
    marlin=False,
    packed_zero_points=False,
    limits=(
        LoaderLimit(
            ("vllm", "sglang"),
            "error",
            "{loader} multiplies int8 inputs by symmetric weights only, and this is {encoding}",
            "a scheme without zero points: int8-channel",
            lambda e: isinstance(e, AffineInt) and not e.symmetric,
        ),
        LoaderLimit(
            ("sglang",),  # get_moe_scheme: for NPUs alone
            "error",
            "SGLang has no kernel for experts with int8 weights and inputs on a GPU",
            "--scheme fp8-channel, or serve with vLLM",
            about="experts",
        ),
        LoaderLimit(
            ("transformers",),
            "error",
            "transformers does not load experts in {layout}",
            "convert --to compressed-tensors, or serve with vLLM",
            about="experts",
        ),
        with_packages("transformers", "compressed-tensors"),
    ),
)


class CompressedTensors(PassThrough[AffineInt | Codebook, AffineIntRows | CodebookRows]):
    """Stores integers packed into words, those of `loose` encodings a byte each; and small floats."""

    traits = TRAITS
    named_by = "tensor"

    def __init__(self, loose: Container[AffineInt] = frozenset()) -> None:
        self.loose = loose

    def arrays(self, tensor: ModelTensor, encoding: AffineInt | Codebook) -> tuple[TensorSpec, ...]:
        if isinstance(encoding, Codebook):
            return _coded(encoding).stored_arrays(tensor)
        *stack, rows, width = tensor.shape
        scales_shape = (*stack, rows, encoding.groups(width))
        if self.loose and encoding in self.loose:
            zeros = TensorSpec(f"{tensor.name}_zero_point", DType.I8, scales_shape)
            return (
                TensorSpec(tensor.name, DType.I8, tensor.shape),
                TensorSpec(f"{tensor.name}_scale", encoding.scale_dtype, scales_shape),
            ) + (() if encoding.symmetric else (zeros,))
        packed = TensorSpec(f"{tensor.name}_packed", DType.I32, (*stack, rows, words(width, encoding.bits)))
        scale = TensorSpec(f"{tensor.name}_scale", encoding.scale_dtype, scales_shape)
        shape = TensorSpec(f"{tensor.name}_shape", DType.I64, (len(tensor.shape),))
        if encoding.symmetric:
            return packed, scale, shape
        if stack and rows * encoding.bits % _WORD:
            raise BadRecipe(
                f"{tensor.name}: the zero points of {rows} rows fill no whole words of {_WORD} bits, so "
                "those of stacked experts would share words",
                "leave the experts apart",
            )
        zeros_shape = (*stack, words(rows, encoding.bits), encoding.groups(width))
        zeros = TensorSpec(f"{tensor.name}_zero_point", DType.I32, zeros_shape)
        return packed, scale, zeros, shape

    def rows(self, tensor: ModelTensor, encoding: AffineInt | Codebook) -> int:
        """Zero points of several rows share a word, and rows of a block their scales."""
        if isinstance(encoding, Codebook):
            return _coded(encoding).row_alignment(tensor)
        if encoding.symmetric or encoding in self.loose:
            return 1
        return _WORD // gcd(encoding.bits, _WORD)

    def as_stored(self, value: Value) -> Value:
        if not isinstance(value, AffineIntRows) or value.encoding in self.loose:
            return value
        fills_words = value.width * value.encoding.bits % _WORD == 0
        return value.with_arrays((words_of(value), *value.arrays[1:])) if fills_words else value

    def store(
        self, tensor: ModelTensor, start: int, value: AffineIntRows | CodebookRows
    ) -> Iterator[ArrayRows]:
        import numpy as np

        name = tensor.name
        if isinstance(value, CodebookRows):
            yield from _coded(value.encoding).encode(tensor, start, value)
            return
        bits = value.encoding.bits
        if value.encoding in self.loose:
            yield ArrayRows(name, start, _signed(codes_of(value), bits))
            yield ArrayRows(f"{name}_scale", start, value.scales_RG)
            if value.zeros_RG is not None:
                yield ArrayRows(f"{name}_zero_point", start, _signed(value.zeros_RG, bits))
            return
        yield ArrayRows(f"{name}_packed", start, words_of(value))
        yield ArrayRows(f"{name}_scale", start, value.scales_RG)
        if value.zeros_RG is not None:
            from qconvert.quant.simd.packing import pack_rows

            yield ArrayRows(f"{name}_zero_point", start * bits // _WORD, pack_rows(value.zeros_RG, bits))
        if start == 0:
            yield ArrayRows(f"{name}_shape", 0, np.array(tensor.shape, "<i8").reshape(-1, 1))

    def load(
        self, tensor: ModelTensor, encoding: AffineInt | Codebook, source: Source, rows: range
    ) -> AffineIntRows | CodebookRows:
        name, start, stop = tensor.name, rows.start, rows.stop
        if isinstance(encoding, Codebook):
            return _coded(encoding).decode(tensor, source, start, stop)
        if encoding in self.loose:
            codes, scales, *signed = (
                source.read(spec.name, start, stop) for spec in self.stored_arrays(tensor)
            )
            unsigned = _unsigned(signed[0], encoding.bits) if signed else None
            return AffineIntRows(_unsigned(codes, encoding.bits), scales, unsigned, encoding)
        codes = from_words(source.read(f"{name}_packed", start, stop), encoding.bits, tensor.width)
        scales = source.read(f"{name}_scale", start, stop)
        zeros = None if encoding.symmetric else self._zeros(tensor, source, start, stop)
        return AffineIntRows(codes, scales, zeros, encoding)

    def _zeros(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> np.ndarray:
        from qconvert.quant.simd.packing import unpack_rows

        assert isinstance(tensor.encoding, AffineInt)
        bits, aligned = tensor.encoding.bits, start - start % self.row_alignment(tensor)
        packed = source.read(f"{tensor.name}_zero_point", aligned * bits // _WORD, words(stop, bits))
        return unpack_rows(packed, bits, stop - aligned)[start - aligned :]

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        return self.settings_beside(quantized, kept, NO_SCALES)

    def settings_beside(
        self, quantized: Mapping[str, Quantized], kept: list[str], scales: ScalesBeside
    ) -> Json:
        return {"quantization_config": quantization_config(quantized, kept, self.loose, scales)}

    def scale_stored_as(self, name: str) -> StoredScale | None:
        """A linear's `input_scale`, or the inverse of NVFP4's, and the scales of an attention's cache."""
        module, _, kind = name.rpartition(".")
        if kind in (SCALE, GLOBAL):
            return StoredScale("inputs", module, inverse=kind == GLOBAL)
        return cache_scale(name)

    def place_of_scale(self, scale: StoredScale, weight: Quantized | None) -> TensorSpec | None:
        """Beside FP8 weights without blocks, and NVFP4 ones; those of a cache beside any."""
        if scale.of != "inputs":
            return TensorSpec(f"{scale.module}.{scale.of[0]}_scale", DType.F32, (1,))
        if not isinstance(weight, Codebook) or (weight.group_size is not None and not weight.is_nvfp4):
            return None
        return TensorSpec(f"{scale.module}.{GLOBAL if weight.is_nvfp4 else SCALE}", DType.F32, (1,))


def _coded(encoding: Codebook) -> CodedArrays:
    return _FP8 if encoding.bits == 8 else _FP4


def _signed(codes: np.ndarray, bits: int) -> np.ndarray:
    signed: np.ndarray = (codes - (1 << (bits - 1))).view("i1")
    return signed


def _unsigned(codes: np.ndarray, bits: int) -> np.ndarray:
    unsigned: np.ndarray = codes.view("u1") + (1 << (bits - 1))
    return unsigned


def words(count: int, bits: int) -> int:
    """The number of 32-bit words that hold `count` codes of `bits` bits."""
    return -(-count * bits // _WORD)
