"""What the few-row kernels compute, in plain torch on any device: the specification they are tested by.

Legend: M rows of x, N out features, K in features, G groups, S splits of K.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.cuda.packing import TILE, MmaInt4, MmaInt8, MmaWeight, mma_codes
from qconvert.runtime.storage import DenseWeight

FewRowWeight = MmaWeight | DenseWeight
"""Weights that the few-row kernels multiply by: int4, int8, bfloat16."""


def group_sums(x_MK: Tensor, group: int) -> Tensor:
    """Sums of every `group` consecutive columns, float32 [ceil(K / group), M], the last one partial.

    `group` is the weight's `sum_group`. Products with a zero want them: of
    `sum_k (q - z) x = sum_k q x - z sum_k x` the second sum is the same for every row of the weight,
    so whoever produces x computes it once.
    """
    return _grouped(x_MK.float(), group).sum(-1).T.contiguous()


def _grouped(x_MK: Tensor, group: int) -> Tensor:
    """Columns by groups, [M, G, group], the last one filled up with zeros."""
    padded = F.pad(x_MK, (0, -x_MK.shape[1] % group))
    return padded.view(len(padded), -1, group)


def sums_for(x_MK: Tensor, weight: FewRowWeight) -> Tensor | None:
    """The group sums that a product with this weight wants, or None."""
    group = weight.sum_group if isinstance(weight, MmaInt4 | MmaInt8) else None
    return None if group is None else group_sums(x_MK, group)


def split_columns(width: int, splits: int) -> list[slice]:
    """The columns of each split: the tiles of `width`, spread as evenly as whole tiles allow."""
    steps = -(-width // TILE)
    bounds = [min(TILE * (s * steps // splits), width) for s in range(splits + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def multiply_partials(
    x_MK: Tensor, sums_GM: Tensor | None, weight: FewRowWeight, splits: int, out_SMN: Tensor | None = None
) -> Tensor:
    """`x W^T` as `splits` float32 summands [S, M, N], each over a part of the columns.

    The product is their sum in ascending order of S. For a quantized weight a summand is, over its groups g,
    `scale_g (sum_{k in g} q_k x_k - zero_g sums_g)`, in which scales are as stored and nothing is
    rounded to less than float32. `sums_GM` is `group_sums(x, weight.sum_group)`, None where that
    is. Written to `out_SMN` when given (contiguous, [S, M, N] float32).
    """
    if out_SMN is None:
        out_SMN = x_MK.new_empty(splits, len(x_MK), weight.shape[0], dtype=torch.float32)
    x_MK = x_MK.float()
    for out_MN, columns in zip(out_SMN, split_columns(x_MK.shape[1], splits), strict=True):
        if isinstance(weight, DenseWeight):
            torch.mm(x_MK[:, columns], weight.w_OI[:, columns].float().T, out=out_MN)
        else:
            out_MN.copy_(_product(x_MK, sums_GM, weight, columns))
    return out_SMN


def _product(x_MK: Tensor, sums_GM: Tensor | None, weight: MmaWeight, columns: slice) -> Tensor:
    group = weight.group or TILE
    codes_NK, scales_NG, zeros_NG = mma_codes(weight, slice(None))
    groups = slice(columns.start // group, -(-columns.stop // group))
    x_MGS, codes_NGS = _grouped(x_MK, group), _grouped(codes_NK.float(), group)
    products_NMG = torch.einsum("mgk,ngk->nmg", x_MGS[:, groups], codes_NGS[:, : x_MGS.shape[1]][:, groups])
    if isinstance(zeros_NG, Tensor):
        zeros_NG = zeros_NG.expand(-1, codes_NGS.shape[1])[:, None, groups]
    if sums_GM is None:  # of int8 codes about 128, which the kernel reads as signed numbers
        sums_GM = group_sums(x_MK, group)
    products_NMG -= zeros_NG * sums_GM[groups].T
    return torch.einsum("nmg,ng->mn", products_NMG, scales_NG.expand(-1, codes_NGS.shape[1])[:, groups])
