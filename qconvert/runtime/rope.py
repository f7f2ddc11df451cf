"""Computes rotary position embeddings: the frequencies of every scaling, and the rotation itself.

Frequencies are float32, computed in the order of operations of transformers' `modeling_rope_utils`,
so that positions far out agree with it to rounding. Legend: T positions, E head dimensions,
R rotated dimensions, F = R / 2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qconvert.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of the positions at hand, float32 [T, R] each."""


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of rotated dimensions, float32 [F].

    Of a LongScaling float32 [2, F]: for texts within the original context, and for longer ones.
    """
    rotated = rope.rotated(head_dim)
    base_F = rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    match rope.scaling:
        case None:
            return 1.0 / base_F
        case LinearScaling(factor):
            return 1.0 / base_F / factor
        case ProportionalScaling(share, factor):
            turning = torch.arange(rotated // 2) < int(share * rotated // 2)
            return torch.where(turning, 1.0 / base_F / factor, 0.0)
        case Llama3Scaling() as scaling:
            plain_F = 1.0 / base_F
            turns_F = scaling.original_context * plain_F / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
            return (1 - kept_F) * plain_F / scaling.factor + kept_F * plain_F
        case YarnScaling():
            return _yarn(rope.scaling, base_F, rope.theta)
        case LongScaling(short=short, long=long):
            return 1.0 / (torch.tensor((short, long), dtype=torch.float32) * base_F)


def cos_sin(rope: Rope, frequencies_F: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """What `rotate` needs at positions [start, stop): float32 [stop - start, 2 F] each.

    Cosines, and sines whose first half is negative: the sign that the rotation gives them. LongRoPE's
    longer divisors count from the first call that goes beyond the original context, as in transformers.
    """
    scale = 1.0
    if isinstance(rope.scaling, LongScaling):
        frequencies_F = frequencies_F[int(stop > rope.scaling.original_context)]
    if isinstance(rope.scaling, YarnScaling | LongScaling):
        scale = rope.scaling.attention_factor
    positions_T = torch.arange(start, stop, dtype=torch.float32, device=frequencies_F.device)
    angles_TF = torch.outer(positions_T, frequencies_F)
    cos_TF, sin_TF = angles_TF.cos() * scale, angles_TF.sin() * scale
    return torch.cat((cos_TF, cos_TF), dim=-1), torch.cat((-sin_TF, sin_TF), dim=-1)


def rotate(x_BTHE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate each pair (i, i + R/2) of a head's first R dimensions by its angle; float32 inside."""
    rotated = cos_TR.shape[-1]
    if rotated < x_BTHE.shape[-1]:
        parts = rotate(x_BTHE[..., :rotated], cos_TR, sin_TR), x_BTHE[..., rotated:]
        return torch.cat(parts, dim=-1)
    other_BTHE = x_BTHE.roll(rotated // 2, dims=-1)
    return torch.addcmul(x_BTHE * cos_TR[:, None], other_BTHE, sin_TR[:, None]).to(x_BTHE.dtype)


def apart(x_BTHE: Tensor, rotated: int) -> Tensor:
    """Move the even ones of the first `rotated` dimensions before the odd ones.

    Neighbours become pairs (i, i + half). Queries and keys reordered alike have the same products.
    """
    pairs = x_BTHE[..., :rotated]
    return torch.cat((pairs[..., ::2], pairs[..., 1::2], x_BTHE[..., rotated:]), dim=-1)


def _yarn(scaling: YarnScaling, base_F: Tensor, theta: float) -> Tensor:
    head_dim = 2 * base_F.numel()

    def dimension(turns: float) -> float:
        """The dimension whose wave turns that often within the original context."""
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # as in transformers: a ramp of no width is a step
    ramp_F = ((torch.arange(base_F.numel(), dtype=torch.float32) - low) / width).clamp(0, 1)
    return ramp_F / (scaling.factor * base_F) + (1 - ramp_F) / base_F
