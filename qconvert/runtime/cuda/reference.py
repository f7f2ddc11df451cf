"""Computes what the few-row kernels compute, in plain torch on any device: the specification of their tests.

Legend: M rows of x, N out features, K in features, G groups, S splits of K.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from qconvert.runtime.cuda.packing import MmaWeight, mma_codes
from qconvert.runtime.cuda.tiles import TILE, by_groups, group_sums
from qconvert.runtime.storage import DenseWeight

FewRowWeight = MmaWeight | DenseWeight
"""Weights that the few-row kernels multiply by: int4, int8, bf16."""


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
    x_MGS, codes_NGS = by_groups(x_MK, group), by_groups(codes_NK.float(), group)
    products_NMG = torch.einsum("mgk,ngk->nmg", x_MGS[:, groups], codes_NGS[:, : x_MGS.shape[1]][:, groups])
    if isinstance(zeros_NG, Tensor):
        zeros_NG = zeros_NG.expand(-1, codes_NGS.shape[1])[:, None, groups]
    if sums_GM is None:  # of int8 codes about 128, which the kernel reads as signed numbers
        sums_GM = group_sums(x_MK, group)
    products_NMG -= zeros_NG * sums_GM[groups].T
    return torch.einsum("nmg,ng->mn", products_NMG, scales_NG.expand(-1, codes_NGS.shape[1])[:, groups])
