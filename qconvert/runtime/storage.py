"""How weights lie in memory, in forms that every device can read.

A quantized weight stays packed: two codes to a byte up to 4 bits, one above, beside its scales and
zeros as stored; every other form stays as it was read. `rows` says what they are worth: a block of
rows in the compute dtype, decoded on the fly and the caller's to forget.
Legend: O out features (rows), I in features, G groups, R rows asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qconvert.core.dtypes import DType
from qconvert.core.values import Value

_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}


def as_tensor(array: np.ndarray, dtype: DType) -> Tensor:
    """An array in its carrier type as a torch tensor of the type it stands for; no copy."""
    return torch.from_numpy(array).view(_TORCH[dtype])


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight in the compute dtype."""

    w_OI: Tensor
    kind: str = "dense"

    @property
    def shape(self) -> tuple[int, int]:
        return self.w_OI.shape[0], self.w_OI.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.w_OI.nbytes

    def rows(self, index: slice | Tensor) -> Tensor:
        """Rows of the weight, [R, I]."""
        return self.w_OI[index]


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A bfloat16 weight that is computed with in float32: the same numbers in half the memory."""

    w_OI: Tensor
    kind: str = "narrow"

    @property
    def shape(self) -> tuple[int, int]:
        return self.w_OI.shape[0], self.w_OI.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.w_OI.nbytes

    def rows(self, index: slice | Tensor) -> Tensor:
        """Rows of the weight, float32 [R, I]."""
        return self.w_OI[index].float()


@dataclass(frozen=True, slots=True)
class IntWeight:
    """A group-quantized weight, computed with as `dtype`.

    `codes_OB` uint8 [O, bytes]. Of kind `int4`, byte j holds column j in its low half and column
    `j + bytes` in its high half, so that unpacking is two contiguous copies; of kind `int8`, byte j
    is column j. Scales are as stored; zeros uint8 [O, G], or one number for a symmetric grid.
    """

    codes_OB: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | int
    width: int
    dtype: torch.dtype
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OB.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        zeros = 0 if isinstance(self.zeros_OG, int) else self.zeros_OG.nbytes
        return self.codes_OB.nbytes + self.scales_OG.nbytes + zeros

    def codes(self) -> Tensor:
        """All codes, uint8 [O, I]: unpacked, for another layout to be made of them."""
        if self.kind != "int4":
            return self.codes_OB
        return torch.cat((self.codes_OB & 15, self.codes_OB >> 4), dim=1)[:, : self.width]

    def rows(self, index: slice | Tensor) -> Tensor:
        """Dequantized rows, [R, I] in the compute dtype; float32 scratch of the same shape."""
        codes_RB, scales_RG = self.codes_OB[index], self.scales_OG[index].float()
        w_RI = torch.empty(codes_RB.shape[0], self.width, device=codes_RB.device)
        if self.kind == "int4":
            half = codes_RB.shape[1]
            w_RI[:, :half] = codes_RB & 15
            w_RI[:, half:] = (codes_RB >> 4)[:, : self.width - half]
        else:
            w_RI.copy_(codes_RB)
        w_RGS = w_RI.view(w_RI.shape[0], scales_RG.shape[1], -1)
        w_RGS -= self.zeros_OG if isinstance(self.zeros_OG, int) else self.zeros_OG[index][..., None]
        w_RGS *= scales_RG[..., None]
        return w_RI.to(self.dtype)


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """A weight in any other form, as it was read: GGML blocks, code tables, grids of another kind.

    The value stays in main memory; its rows are decoded there in float32 and moved to `device`.
    """

    value: Value
    width: int
    device: torch.device
    dtype: torch.dtype
    kind: str = "encoded"

    @property
    def shape(self) -> tuple[int, int]:
        return self.value.rows, self.width

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(array.nbytes for array in self.value.arrays)

    def rows(self, index: slice | Tensor) -> Tensor:
        """Decoded rows, [R, I] in the compute dtype; float32 scratch of the same shape."""
        from qconvert.quant.dequantize import numbers

        chosen = index if isinstance(index, slice) else index.cpu().numpy()
        arrays = tuple(np.ascontiguousarray(array[chosen]) for array in self.value.arrays)
        w_RI = numbers(self.value.with_arrays(arrays), DType.F32).rows_RI
        return torch.from_numpy(w_RI).to(self.device, self.dtype)


Readable = DenseWeight | NarrowWeight | IntWeight | EncodedWeight
"""Weights whose rows can be read on any device, by slice or by index."""
