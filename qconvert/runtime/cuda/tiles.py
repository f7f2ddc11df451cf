"""Describes weights as the CUDA kernels see them: tiles of 128 by 128 codes, and sums of inputs.

Legend: M rows of x, K in features, G groups.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.storage import DenseWeight

TILE = 128
"""Rows, and columns, of a tile; also the columns that a kernel multiplies by in one step."""


class TiledGrid(Protocol):
    """A quantized weight in tiles; `packing.MmaInt4` says what the arrays hold."""

    @property
    def words(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def zeros(self) -> Tensor | None: ...
    @property
    def group(self) -> int | None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kind(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def sum_group(self) -> int | None: ...


def group_sums(x_MK: Tensor, group: int) -> Tensor:
    """Sums of every `group` consecutive columns, float32 [ceil(K / group), M], the last one partial.

    `group` is the weight's `sum_group`. Products with a zero want them: of
    `sum_k (q - z) x = sum_k q x - z sum_k x` the second sum is the same for every row of the weight,
    so whoever produces x computes it once.
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
