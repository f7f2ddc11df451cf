"""The compressed-tensors layouts: how transformers and vLLM store integer and small-float weights.

`pack-quantized`: a quantized `X.weight` of shape [N, K] is spelled as `X.weight_packed` int32 [N,
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
from math import gcd

import numpy as np

from qconvert.codes import from_words
from qconvert.errors import BadRecipe
from qconvert.formats.layouts.coded import CodedArrays
from qconvert.formats.layouts.compressed_config import NAME, quantization_config
from qconvert.interfaces import Part, Source
from qconvert.tensors import (
    Codebook,
    Coded,
    Dense,
    DType,
    GroupInt,
    IntAffine,
    Json,
    Logical,
    Plain,
    Quantized,
    TensorSpec,
    Value,
)

_WORD = 32
_FP8 = CodedArrays("weight", "weight_scale")
_FP4 = CodedArrays("weight_packed", "weight_scale", divisor="weight_global_scale")


class EightBits:
    """All integer forms of 8 bits, as a container."""

    def __contains__(self, form: object) -> bool:
        return isinstance(form, GroupInt) and form.bits == 8


class CompressedTensors:
    """The layout as the runner sees it; plain tensors are spelled as themselves.

    Integers are packed, but those of the `loose` forms have a byte for each code.
    """

    name = NAME
    transposed = False

    def __init__(self, loose: Container[GroupInt] = frozenset()) -> None:
        self.loose = loose

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        form = tensor.form
        if isinstance(form, Plain):
            return (TensorSpec(tensor.name, form.dtype, tensor.shape),)
        if isinstance(form, Codebook):
            return _coded(form).parts(tensor)
        assert isinstance(form, GroupInt), form
        *stack, rows, width = tensor.shape
        scales_shape = (*stack, rows, form.groups(width))
        if form in self.loose:
            zeros = TensorSpec(f"{tensor.name}_zero_point", DType.I8, scales_shape)
            return (
                TensorSpec(tensor.name, DType.I8, tensor.shape),
                TensorSpec(f"{tensor.name}_scale", form.scale_dtype, scales_shape),
            ) + (() if form.symmetric else (zeros,))
        packed = TensorSpec(f"{tensor.name}_packed", DType.I32, (*stack, rows, words(width, form.bits)))
        scale = TensorSpec(f"{tensor.name}_scale", form.scale_dtype, scales_shape)
        shape = TensorSpec(f"{tensor.name}_shape", DType.I64, (len(tensor.shape),))
        if form.symmetric:
            return packed, scale, shape
        if stack and rows * form.bits % _WORD:
            raise BadRecipe(
                f"{tensor.name}: the zero points of {rows} rows fill no whole words of {_WORD} bits, so "
                "those of stacked experts would share words",
                "leave the experts apart",
            )
        zeros_shape = (*stack, words(rows, form.bits), form.groups(width))
        zeros = TensorSpec(f"{tensor.name}_zero_point", DType.I32, zeros_shape)
        return packed, scale, zeros, shape

    def row_alignment(self, tensor: Logical) -> int:
        """Zero points of several rows share a word; everything else is spelled row by row."""
        form = tensor.form
        if isinstance(form, Codebook):
            return _coded(form).row_alignment(tensor)
        if not isinstance(form, GroupInt) or form.symmetric or form in self.loose:
            return 1
        return _WORD // gcd(form.bits, _WORD)

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Spell rows [start, start + value.rows); `start` is a multiple of the row alignment."""
        name = tensor.name
        if isinstance(value, Dense):
            yield Part(name, start, value.rows_RI)
            return
        if isinstance(value, Coded):
            yield from _coded(value.form).encode(tensor, start, value)
            return
        assert isinstance(value, IntAffine)
        bits = value.form.bits
        if value.form in self.loose:
            yield Part(name, start, _signed(value.codes_RI, bits))
            yield Part(f"{name}_scale", start, value.scales_RG)
            if value.zeros_RG is not None:
                yield Part(f"{name}_zero_point", start, _signed(value.zeros_RG, bits))
            return
        yield Part(f"{name}_packed", start, value.words_RW)
        yield Part(f"{name}_scale", start, value.scales_RG)
        if value.zeros_RG is not None:
            from qconvert.quant.packing import pack_rows  # which loads numba

            yield Part(f"{name}_zero_point", start * bits // _WORD, pack_rows(value.zeros_RG, bits))
        if start == 0:
            yield Part(f"{name}_shape", 0, np.array(tensor.shape, "<i8").reshape(-1, 1))

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back as the value they spell."""
        name, form = tensor.name, tensor.form
        if isinstance(form, Plain):
            return Dense(source.read(name, start, stop), form.dtype)
        if isinstance(form, Codebook):
            return _coded(form).decode(tensor, source, start, stop)
        assert isinstance(form, GroupInt), form
        if form in self.loose:
            codes, scales, *signed = (source.read(spec.name, start, stop) for spec in self.parts(tensor))
            unsigned = _unsigned(signed[0], form.bits) if signed else None
            return IntAffine(_unsigned(codes, form.bits), scales, unsigned, form)
        codes = from_words(source.read(f"{name}_packed", start, stop), form.bits, tensor.width)
        scales = source.read(f"{name}_scale", start, stop)
        zeros = None if form.symmetric else self._zeros(tensor, source, start, stop)
        return IntAffine(codes, scales, zeros, form)

    def _zeros(self, tensor: Logical, source: Source, start: int, stop: int) -> np.ndarray:
        from qconvert.quant.packing import unpack_rows

        assert isinstance(tensor.form, GroupInt)
        bits, aligned = tensor.form.bits, start - start % self.row_alignment(tensor)
        packed = source.read(f"{tensor.name}_zero_point", aligned * bits // _WORD, words(stop, bits))
        return unpack_rows(packed, bits, stop - aligned)[start - aligned :]

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says about modules of these forms (see `quantization_config`)."""
        return {"quantization_config": quantization_config(quantized, kept, self.loose)}


def _coded(form: Codebook) -> CodedArrays:
    return _FP8 if form.bits == 8 else _FP4


def _signed(codes: np.ndarray, bits: int) -> np.ndarray:
    signed: np.ndarray = (codes - np.uint8(1 << (bits - 1))).view(np.int8)
    return signed


def _unsigned(codes: np.ndarray, bits: int) -> np.ndarray:
    unsigned: np.ndarray = codes.view(np.uint8) + np.uint8(1 << (bits - 1))
    return unsigned


def words(count: int, bits: int) -> int:
    """The number of 32-bit words that hold `count` codes of `bits` bits."""
    return -(-count * bits // _WORD)
