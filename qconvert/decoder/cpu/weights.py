"""Weights in the layout of the CPU kernels: made at load, never saved, the codes held in it alone.

Legend: O out features (rows), I in features, G groups, B bytes or words of a row, N rows of the
input, R rows asked for. Rows are padded to whole blocks of 128 columns. Of 8 bits, byte i of a row is
column i. Of 4 bits, a block is sixteen words:

    bits of word l      0-3   4-7   8-11  12-15   16-19 ...
    column of block     2l    32+2l 64+2l 96+2l   2l+1  ...

so that one mask takes 32 neighbours out of a block, as pairs of 16-bit numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qconvert.decoder.cpu.records import BRAIN, FLOAT, INT4, INT8, LINEAR
from qconvert.decoder.cpu.words import BLOCK, PART
from qconvert.decoder.storage import DenseWeight, NarrowWeight, as_tensor
from qconvert.tensors import DType, IntAffine


@dataclass(frozen=True, slots=True)
class PackedGrid:
    """A grid of up to 8 bits, worth `scale * (code - zero)`, computed with as `dtype`.

    `codes_OB` int32 [O, words] of kind `int4-cpu`, else int8 [O, bytes]; scales bfloat16 or float32;
    `zeros_OG` int8, or None where the number `zero` is that of all groups.
    """

    codes_OB: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    zero: int
    width: int
    dtype: torch.dtype
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OB.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        zeros = 0 if self.zeros_OG is None else self.zeros_OG.nbytes
        return self.codes_OB.nbytes + self.scales_OG.nbytes + zeros

    def part(self, index: slice) -> PackedGrid:
        """Some of the rows as a weight of their own; no copy."""
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG[index]
        return replace(
            self, codes_OB=self.codes_OB[index], scales_OG=self.scales_OG[index], zeros_OG=zeros_OG
        )

    def rows(self, index: slice | Tensor) -> Tensor:
        """Dequantized rows, [R, I] in the compute dtype, rounded once."""
        from qconvert.decoder.cpu.decode import decode_rows

        return decode_rows(self, index)


Multipliable = PackedGrid | DenseWeight | NarrowWeight
"""What the kernels multiply by."""


def pack_grid(value: IntAffine, dtype: torch.dtype) -> PackedGrid | None:
    """The grid in the layout of the kernels; None for groups that are no multiple of 32 columns."""
    form, (out, width) = value.form, value.codes_RI.shape
    if width // form.groups(width) % PART:
        return None
    packs, middle = form.bits <= 4, 1 << (form.bits - 1)
    padded = (width + BLOCK - 1) // BLOCK * BLOCK
    codes_OI = np.zeros((out, padded), np.uint8)
    codes_OI[:, :width] = value.codes_RI
    # Bytes are signed: a symmetric grid then has its zero at 0, any other at a stored one less 128.
    shift = 0 if packs else middle if value.zeros_RG is None else 128
    scales_OG = as_tensor(value.scales_RG, value.form.scale_dtype)
    zeros_OG = None
    if value.zeros_RG is not None:
        zeros_OG = torch.from_numpy((value.zeros_RG.astype(np.int16) - shift).astype(np.int8))
    return PackedGrid(
        codes_OB=_words(codes_OI) if packs else torch.from_numpy(codes_OI - np.uint8(shift)).view(torch.int8),
        scales_OG=scales_OG if form.scale_dtype is DType.BF16 else scales_OG.float(),
        zeros_OG=zeros_OG,
        zero=middle - shift if zeros_OG is None else 0,
        width=width,
        dtype=dtype,
        kind="int4-cpu" if packs else "int8-cpu",
    )


def _words(codes_OI: np.ndarray) -> Tensor:
    """Codes of 4 bits as words, in the order of the module's table."""
    out, width = codes_OI.shape
    pairs = codes_OI.reshape(out, width // BLOCK, 4, 16, 2)
    words = np.zeros((out, width // BLOCK, 16, 4), np.uint8)  # the bytes of each word
    for half in (0, 1):
        for byte in (0, 1):
            low, high = pairs[:, :, 2 * byte, :, half], pairs[:, :, 2 * byte + 1, :, half]
            words[..., 2 * half + byte] = low | high << 4
    return torch.from_numpy(words.reshape(out, width // 2).view("<i4"))


def describe(weight: Multipliable, bias_O: Tensor | None = None) -> np.ndarray:
    """The record of a linear; the caller keeps weight and bias (float32, contiguous) alive."""
    record = np.zeros(1, LINEAR)
    record["rows"], record["width"] = weight.shape
    record["bias"] = 0 if bias_O is None else bias_O.data_ptr()
    if isinstance(weight, DenseWeight | NarrowWeight):
        record["kind"] = BRAIN if weight.w_OI.dtype == torch.bfloat16 else FLOAT
        record["codes"] = weight.w_OI.data_ptr()
        return record
    record["kind"] = INT4 if weight.codes_OB.dtype == torch.int32 else INT8
    record["codes"], record["scales"] = weight.codes_OB.data_ptr(), weight.scales_OG.data_ptr()
    record["brain_scales"] = weight.scales_OG.dtype == torch.bfloat16
    record["zeros"] = 0 if weight.zeros_OG is None else weight.zeros_OG.data_ptr()
    record["zero"] = weight.zero
    record["group"] = weight.width // weight.scales_OG.shape[1]
    return record
