"""Describes weights as the CUDA kernels see them: tiles of 128 by 128 codes, and sums of inputs.

Legend: M rows of x, K in features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.storage import DenseWeight

TILE = 128
"""Rows, and columns, of a tile; also the columns that a kernel multiplies by in one step."""


@dataclass(frozen=True, slots=True)
class TiledGrid:
    """A grid of up to 4 bits, or of 5 to 8, `(code - zero) * scale`, exactly as it is stored.

    `bits` are 4 or 8; `words` int32 [T, U, bits, 128, 4], by tile, block, row and word. `scales`
    [T, U, 64, J, 2] in the dtype they are stored in, by tile, pair of rows, group and row of the pair;
    `zeros` uint8 [T, U, 32, J, 4], or None for a symmetric grid, whose zero is 8 or 128 (codes of fewer
    bits are moved up). Where `group` is None, a row has one scale and one zero, and they are as for U = 1,
    J = 1.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int | None
    shape: tuple[int, int]
    bits: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kind(self) -> str:
        return f"int{self.bits}-mma"

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def sum_group(self) -> int | None:
        """The columns per sum that `group_sums` takes; None for symmetric bytes, which want none."""
        return None if self.bits == 8 and self.zeros is None else self.group or TILE


def group_sums(x_MK: Tensor, group: int) -> Tensor:
    """Sums of every `group` consecutive columns, float32 [ceil(K / group), M], the last one partial.

    `group` is the weight's `sum_group`. Products with a zero want them: of
    `sum_k (q - z) x = sum_k q x - z sum_k x` the second sum is the same for every row of the weight,
    so the producer of x computes it once.
    """
    return by_groups(x_MK.float(), group).sum(-1).T.contiguous()


def by_groups(x_MK: Tensor, group: int) -> Tensor:
    """Columns by groups, [M, G, group], the last one filled up with zeros."""
    padded = F.pad(x_MK, (0, -x_MK.shape[1] % group))
    return padded.view(len(padded), -1, group)


def sums_for(x_MK: Tensor, weight: TiledGrid | DenseWeight) -> Tensor | None:
    """The group sums that a product with this weight wants, or None."""
    group = None if isinstance(weight, DenseWeight) else weight.sum_group
    return None if group is None else group_sums(x_MK, group)
