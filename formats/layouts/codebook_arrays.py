"""Stores a codebook weight as two or three arrays: codes, scales, and what divides these where there is one.

The layouts that store FP8, MXFP4 and NVFP4 weights differ in the names and in the type that carries
the codes, not in the bytes: 8-bit codes as they are, 4-bit codes two to a byte, the first one low.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    import numpy as np

FP8_DTYPES = {"e4m3": DType.F8_E4M3, "e5m2": DType.F8_E5M2}


@dataclass(frozen=True, slots=True)
class CodedArrays:
    """How one layout names the arrays of `X.weight`: suffixes after `X.`, and the carrier of 4-bit codes.

    `number` is the array of the one number that divides, or multiplies, all scales of a tensor.

    Scales are stored as [N, 1] where a whole row has one, as [1] for a whole tensor, else block by block;
    those of 8 bits as their own type or, with `bare_scales`, as bytes, E8M0 ones with `bare_exponents`.
    """

    codes: str
    scales: str
    words: DType = DType.U8
    number: str = ""
    bare_scales: bool = False
    bare_exponents: bool = True

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        """The arrays that store a tensor: codes, scales, and the divisor where there is one."""
        encoding = tensor.encoding
        assert isinstance(encoding, Codebook), encoding
        rows, width, stack = tensor.rows, tensor.width, tensor.shape[:-2]
        codes_name, scales_name, number_name = self.names(tensor.name)
        if stack and tensor.shape[-2] % (encoding.group_rows or 1):
            raise BadRecipe(
                f"{tensor.name}: its matrices of {tensor.shape[-2]} rows do not divide into blocks of "
                f"{encoding.group_rows} rows, so a stack of them would share blocks",
                "leave the experts apart",
            )
        dtype = FP8_DTYPES.get(encoding.table, self.words)
        code_bits = encoding.bits * width
        if code_bits % dtype.bits:
            raise BadRecipe(
                f"{tensor.name}: rows of {width} codes of {encoding.bits} bits do not fill {dtype.label}",
                "keep this weight plain, or use a scheme of 8 bits",
            )
        scales_shape: tuple[int, ...] = (1,)
        if encoding.group_rows is not None:
            each = rows if not stack else tensor.shape[-2]
            scales_shape = (*stack, encoding.scale_rows(each), encoding.groups(width))
        exponents = encoding.scale_dtype is DType.F8_E8M0
        bare = self.bare_exponents if exponents else self.bare_scales and encoding.scale_dtype.bits == 8
        scale_dtype = DType.U8 if bare else encoding.scale_dtype
        made = (
            TensorSpec(codes_name, dtype, (*tensor.shape[:-1], code_bits // dtype.bits)),
            TensorSpec(scales_name, scale_dtype, scales_shape),
        )
        return (*made, TensorSpec(number_name, DType.F32, (1,))) if encoding.has_tensor_number else made

    def names(self, tensor: str) -> tuple[str, str, str]:
        """The arrays of a tensor: those of a parameter that is no module's weight have its own name first."""
        if tensor.endswith("weight"):
            base = tensor.removesuffix("weight")
            return base + self.codes, base + self.scales, base + self.number
        ends = (self.codes, self.scales, self.number)
        codes, scales, number = (end.removeprefix("weight") for end in ends)
        return tensor + codes, tensor + scales, tensor + number

    def row_alignment(self, tensor: ModelTensor) -> int:
        assert isinstance(tensor.encoding, Codebook)
        return tensor.encoding.group_rows or 1

    def encode(self, tensor: ModelTensor, start: int, value: CodebookRows) -> Iterator[ArrayRows]:
        import numpy as np

        from qconvert.quant.nibbles import pack_nibbles

        encoding = value.encoding
        codes, scales, *number = self.stored_arrays(tensor)
        packed = (
            value.codes_RI if encoding.bits == 8 else pack_nibbles(value.codes_RI).view(codes.dtype.carrier)
        )
        yield ArrayRows(codes.name, start, packed)
        if encoding.group_rows is not None:
            yield ArrayRows(
                scales.name, start // encoding.group_rows, _shared(tensor, value, encoding.group_rows)
            )
        elif start == 0:
            yield ArrayRows(scales.name, 0, value.scales_RG[:1])
        if number and start == 0:
            one = value.divisor if value.factor is None else value.factor
            yield ArrayRows(number[0].name, 0, np.array([[one]], "<f4"))

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> CodebookRows:
        import numpy as np

        from qconvert.quant.nibbles import unpack_nibbles

        encoding = tensor.encoding
        assert isinstance(encoding, Codebook)
        codes, scales, *number = self.stored_arrays(tensor)
        stored = source.read(codes.name, start, stop)
        codes_RI = stored if encoding.bits == 8 else unpack_nibbles(stored.view(np.uint8))
        if encoding.group_rows is None:
            scales_RG = np.repeat(source.read(scales.name, 0, 1), stop - start, axis=0)
        else:
            per = encoding.group_rows
            read = source.read(scales.name, start // per, -(-stop // per))
            scales_RG = read[np.arange(start, stop) // per - start // per]
        one = float(source.read(number[0].name, 0, 1)[0, 0]) if number else None
        if encoding.second == "multiplied":
            return CodebookRows(codes_RI, scales_RG, encoding, factor=one)
        return CodebookRows(codes_RI, scales_RG, encoding, one)


def _shared(tensor: ModelTensor, value: CodebookRows, per: int) -> np.ndarray:
    """One row of scales for every `per` rows, which must agree."""
    import numpy as np

    shared_BG = value.scales_RG[::per]
    if not np.array_equal(np.repeat(shared_BG, per, axis=0)[: value.rows], value.scales_RG):
        raise BadRecipe(
            f"{tensor.name}: rows that would share a block of {per} have different scales",
            "leave its parts apart, or dequantize first",
        )
    return shared_BG
