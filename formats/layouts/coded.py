"""One codebook weight as two or three arrays: codes, scales, and for scales of two levels the upper one.

The layouts that store FP8, MXFP4 and NVFP4 weights differ in the names and in the type that carries
the codes, not in the bytes: 8-bit codes as they are, 4-bit codes two to a byte, the first one low.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qconvert.errors import BadRecipe
from qconvert.interfaces import Part, Source
from qconvert.tensors import Codebook, Coded, DType, Logical, TensorSpec

FP8_DTYPES = {"e4m3": DType.F8_E4M3, "e5m2": DType.F8_E5M2}


@dataclass(frozen=True, slots=True)
class CodedArrays:
    """How one layout names the arrays of `X.weight`: suffixes after `X.`, and the carrier of 4-bit codes.

    Scales are stored as [N, 1] where a whole row has one, as [1] for a whole tensor, else block by block;
    those of 8 bits as their own type or, with `bare_scales`, as bytes (which E8M0 ones always are).
    """

    codes: str
    scales: str
    words: DType = DType.U8
    divisor: str = ""
    bare_scales: bool = False

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor: codes, scales, and the divisor where there is one."""
        form = tensor.form
        assert isinstance(form, Codebook), form
        rows, width, stack = tensor.rows, tensor.width, tensor.shape[:-2]
        codes_name, scales_name, divisor_name = self.names(tensor.name)
        if stack and tensor.shape[-2] % (form.group_rows or 1):
            raise BadRecipe(
                f"{tensor.name}: its matrices of {tensor.shape[-2]} rows are no whole blocks of "
                f"{form.group_rows} rows, so a stack of them would share blocks",
                "leave the experts apart",
            )
        dtype = FP8_DTYPES.get(form.table, self.words)
        code_bits = form.bits * width
        if code_bits % dtype.bits:
            raise BadRecipe(
                f"{tensor.name}: rows of {width} codes of {form.bits} bits do not fill {dtype.label}",
                "keep this weight plain, or take a scheme of 8 bits",
            )
        scales_shape: tuple[int, ...] = (1,)
        if form.group_rows is not None:
            each = rows if not stack else tensor.shape[-2]
            scales_shape = (*stack, form.scale_rows(each), form.groups(width))
        bare = form.scale_dtype is DType.F8_E8M0 or (self.bare_scales and form.scale_dtype.bits == 8)
        scale_dtype = DType.U8 if bare else form.scale_dtype
        made = (
            TensorSpec(codes_name, dtype, (*tensor.shape[:-1], code_bits // dtype.bits)),
            TensorSpec(scales_name, scale_dtype, scales_shape),
        )
        return (*made, TensorSpec(divisor_name, DType.F32, (1,))) if form.second == "divided" else made

    def names(self, tensor: str) -> tuple[str, str, str]:
        """The arrays of a tensor: those of a parameter that is no module's weight have its own name first."""
        if tensor.endswith("weight"):
            base = tensor.removesuffix("weight")
            return base + self.codes, base + self.scales, base + self.divisor
        ends = (self.codes, self.scales, self.divisor)
        codes, scales, divisor = (end.removeprefix("weight") for end in ends)
        return tensor + codes, tensor + scales, tensor + divisor

    def row_alignment(self, tensor: Logical) -> int:
        """Rows that share their scales are written together."""
        assert isinstance(tensor.form, Codebook)
        return tensor.form.group_rows or 1

    def encode(self, tensor: Logical, start: int, value: Coded) -> Iterator[Part]:
        """Spell rows [start, start + value.rows); `start` is a multiple of the row alignment."""
        from qconvert.quant.nibbles import pack_nibbles

        form = value.form
        codes, scales, *divisor = self.parts(tensor)
        packed = value.codes_RI if form.bits == 8 else pack_nibbles(value.codes_RI).view(codes.dtype.carrier)
        yield Part(codes.name, start, packed)
        if form.group_rows is not None:
            yield Part(scales.name, start // form.group_rows, _shared(tensor, value, form.group_rows))
        elif start == 0:
            yield Part(scales.name, 0, value.scales_RG[:1])
        if divisor and start == 0:
            yield Part(divisor[0].name, 0, np.array([[value.divisor]], "<f4"))

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Coded:
        """Read rows [start, stop) back, their scales one row for each."""
        from qconvert.quant.nibbles import unpack_nibbles

        form = tensor.form
        assert isinstance(form, Codebook)
        codes, scales, *divisor = self.parts(tensor)
        stored = source.read(codes.name, start, stop)
        codes_RI = stored if form.bits == 8 else unpack_nibbles(stored.view(np.uint8))
        if form.group_rows is None:
            scales_RG = np.repeat(source.read(scales.name, 0, 1), stop - start, axis=0)
        else:
            per = form.group_rows
            read = source.read(scales.name, start // per, -(-stop // per))
            scales_RG = read[np.arange(start, stop) // per - start // per]
        number = float(source.read(divisor[0].name, 0, 1)[0, 0]) if divisor else None
        return Coded(codes_RI, scales_RG, form, number)


def _shared(tensor: Logical, value: Coded, per: int) -> np.ndarray:
    """One row of scales for every `per` rows, which must agree."""
    shared_BG = value.scales_RG[::per]
    if not np.array_equal(np.repeat(shared_BG, per, axis=0)[: value.rows], value.scales_RG):
        raise BadRecipe(
            f"{tensor.name}: rows that would share a block of {per} have different scales",
            "leave its parts apart, or dequantize first",
        )
    return shared_BG
