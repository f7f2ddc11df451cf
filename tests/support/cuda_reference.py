"""What the CUDA kernels compute, in plain torch on any device: the specification of their tests.

Legend: M rows of x, N out features, K in features, G groups, S splits of K; the rest as in the kernels'
modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.blockwise_scores import Scores, score
from qconvert.runtime.cuda.activation import Parts, Rows
from qconvert.runtime.cuda.attention import BLOCK_POSITIONS, HeadNorms, HeadShape, Place, Softmaxes
from qconvert.runtime.cuda.head import HiddenStates
from qconvert.runtime.cuda.packing import FewRowWeight, MmaWeight, mma_codes
from qconvert.runtime.cuda.tiles import TILE, by_groups, group_sums
from qconvert.runtime.rope import rotate
from qconvert.runtime.storage import DenseWeight


def whole(parts: Parts) -> Tensor:
    """The output of a matmul, float32 [M, N], its parts added in ascending order."""
    total_MN = parts.parts_SMN[0].clone()
    for part_MN in parts.parts_SMN[1:]:
        total_MN += part_MN
    return total_MN if parts.bias_N is None else total_MN + parts.bias_N.float()


def fill_rows(out: Rows, x_MK: Tensor) -> None:
    """The reference of what every kernel stores: x rounded to bfloat16, and the sums of that."""
    out.x_MK.copy_(x_MK)
    if out.sums_GM is not None:
        x_MK = F.pad(out.x_MK.float(), (0, len(out.sums_GM) * out.group - x_MK.shape[1]))
        out.sums_GM.copy_(x_MK.view(len(x_MK), -1, out.group).sum(-1).T)


def add_norm_reference(
    added: Parts | None, residual_MD: Tensor, weight_D: Tensor, eps: float, out: Rows
) -> None:
    """`residual += added` in place; `out = residual / sqrt(mean(residual^2) + eps) * weight`.

    All in float32 but for `out`, which is rounded and carries its group sums.
    """
    if added is not None:
        residual_MD += whole(added)
    scale_M1 = (residual_MD.square().mean(-1, keepdim=True) + eps).rsqrt()
    fill_rows(out, residual_MD * scale_M1 * weight_D.float())


def swiglu_reference(gate_up: Parts, out: Rows) -> None:
    """`out = silu(gate) * up`, where the rows of gate and up lie side by side; float32, rounded once."""
    gate_MI, up_MI = whole(gate_up).chunk(2, dim=-1)
    fill_rows(out, F.silu(gate_MI) * up_MI)


def bounds(position: int, window: int | None, stretches: int) -> list[tuple[int, int]]:
    """The positions [start, stop) of every stretch: together, those before `position` that it sees."""
    first = max(0, position - window + 1) if window is not None else 0
    blocks = -(-(position - first) // BLOCK_POSITIONS)
    length = -(-blocks // stretches) * BLOCK_POSITIONS
    starts = [min(first + p * length, position) for p in range(stretches)]
    return [(start, min(start + length, position)) for start in starts]


def attend_reference(
    qkv: Parts, norms: HeadNorms | None, shape: HeadShape, place: Place, cache_2MKTE: Tensor, out: Softmaxes
) -> None:
    """Heads from `qkv`, normalised and rotated; key and value into the cache; a softmax per stretch.

    Query, key and value are rounded to bfloat16 once, after their rotation; `score = q . k / sqrt(E)
    log2(e)`. Writes the cache at the position.
    """
    position, shared = int(place.position_1), shape.shared
    rows = out.max_MHP.shape[0]
    heads_MHE = whole(qkv).view(rows, -1, shape.head_dim)
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = torch.split_with_sizes(heads_MHE, counts, dim=1)
    if norms is not None:
        q, k = _norm(q, norms.q_E, norms.eps), _norm(k, norms.k_E, norms.eps)
    turn = place.cos_TE[position, None], place.sin_TE[position, None]
    q, k = rotate(q[:, None], *turn)[:, 0].bfloat16().float(), rotate(k[:, None], *turn)[:, 0]
    cache_2MKTE[0, :, :, position] = k
    cache_2MKTE[1, :, :, position] = v
    keys_MHTE, values_MHTE = (x.float().repeat_interleave(shared, 1) for x in cache_2MKTE)
    score_MHT = (keys_MHTE @ q[..., None])[..., 0] * (math.log2(math.e) / math.sqrt(shape.head_dim))
    for p, (start, stop) in enumerate(bounds(position, shape.window, out.max_MHP.shape[2])):
        seen = [*range(start, stop), *([position] if p == 0 else [])]
        out.max_MHP[:, :, p] = -torch.inf
        if seen:
            out.max_MHP[:, :, p] = score_MHT[:, :, seen].amax(-1)
            weight_MHT = torch.exp2(score_MHT[:, :, seen] - out.max_MHP[:, :, p, None])
            out.sum_MHP[:, :, p] = weight_MHT.sum(-1)
            out.value_MHPE[:, :, p] = (weight_MHT[..., None, :] @ values_MHTE[:, :, seen])[..., 0, :]


def _norm(x_MHE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return x_MHE * (x_MHE.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_E.float()


def combine_reference(softmaxes: Softmaxes, out: Rows) -> None:
    """`out = sum_p 2^(max_p - max) value_p / sum_p 2^(max_p - max) sum_p`, heads side by side, rounded."""
    weight_MHP = torch.exp2(softmaxes.max_MHP - softmaxes.max_MHP.amax(-1, keepdim=True))
    there_MHP = weight_MHP > 0
    sum_MH = torch.where(there_MHP, weight_MHP * softmaxes.sum_MHP, 0).sum(-1)
    value_MHPE = torch.where(there_MHP[..., None], weight_MHP[..., None] * softmaxes.value_MHPE, 0)
    fill_rows(out, (value_MHPE.sum(-2) / sum_MH[..., None]).flatten(1))


def score_reference(models: Sequence[HiddenStates], targets_N: Tensor) -> list[Scores]:
    """Scores from the logits `h w^T` in float32; the first model is the reference of the second."""
    heads = [lambda start, stop, m=model: m.h_ND.float() @ m.w_VD[start:stop].float().T for model in models]
    return score(heads, targets_N, len(models[0].w_VD))


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
