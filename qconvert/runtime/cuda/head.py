"""Computes losses, divergences and likeliest tokens from hidden states; logits never reach memory.

A program multiplies a block of tokens by one block of words after the other and adds each block of
float32 logits into a few numbers per token, for one model, or for a reference and a model at once.
Legend: N tokens, V words, D hidden, P parts of the vocabulary, B tokens and W words of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from qconvert.runtime.blockwise_scores import Scores
from qconvert.runtime.cuda.triton_language import INTERPRET

_TOKENS = 128
_MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states `h_ND` of one model and its head `w_VD`, both bf16."""

    h_ND: Tensor
    w_VD: Tensor


@dataclass(frozen=True, slots=True)
class Folded:
    """A model's softmax over each part of the vocabulary: [P, N] each.

    The largest logit (float32) and its word (int32), the sum of `e^(logit - largest)` (float64), and
    the logit of the true token (float32), 0 where it lies in another part.
    """

    max_PN: Tensor
    top_PN: Tensor
    sum_PN: Tensor
    target_PN: Tensor


def score_hidden_states(models: Sequence[HiddenStates], targets_N: Tensor) -> list[Scores]:
    """Scores from the logits `h w^T` in float32; the first model is the reference of the second, if any.

    One launch, and sums over parts in float64.
    """
    first, other = models[0], models[-1]
    paired = len(models) == 2
    vocab, tokens = len(first.w_VD), len(targets_N)
    words = 128 if paired else 256
    parts, blocks = _parts(tokens, -(-vocab // words), targets_N.device)
    kinds = (torch.float32, torch.int32, torch.float64, torch.float32)
    empty = partial(torch.empty, parts, tokens, device=targets_N.device)
    folded = [Folded(*(empty(dtype=kind) for kind in kinds)) for _ in models]
    cross_PN = empty(dtype=torch.float64)
    a, b = folded[0], folded[-1]
    _fold[(triton.cdiv(tokens, _TOKENS), parts)](
        first.h_ND, first.w_VD, other.h_ND, other.w_VD, targets_N,
        a.max_PN, a.top_PN, a.sum_PN, a.target_PN,
        b.max_PN, b.top_PN, b.sum_PN, b.target_PN, cross_PN,
        tokens, vocab, first.h_ND.shape[1], other.h_ND.shape[1], blocks,
        PAIRED=paired, BLOCK_N=_TOKENS, BLOCK_V=words, BLOCK_D=64, UPCAST=INTERPRET,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    scores = [_scores(each, None) for each in folded]
    if paired:
        weight_PN = (a.max_PN - a.max_PN.amax(0)).double().exp()
        cross_N = (weight_PN * cross_PN).sum(0) / (weight_PN * a.sum_PN).sum(0)
        scores[1] = _scores(b, cross_N - _logsumexp(a) + _logsumexp(b))
    return scores


def _parts(tokens: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """Parts of the vocabulary, and blocks of each: the fewest whose programs fill the device best."""
    processors = 2
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = -(-tokens // _TOKENS)

    def idle(parts: int) -> float:
        return -(rows * parts) % processors / (rows * parts)

    length = -(-blocks // min(range(1, min(_MOST_PARTS, blocks) + 1), key=idle))
    return -(-blocks // length), length


def _logsumexp(folded: Folded) -> Tensor:
    max_N = folded.max_PN.amax(0)
    sum_N = ((folded.max_PN - max_N).double().exp() * folded.sum_PN).sum(0)
    return max_N.double() + sum_N.log()


def _scores(folded: Folded, kl_N: Tensor | None) -> Scores:
    top_N = folded.top_PN.long().gather(0, folded.max_PN.argmax(0, keepdim=True))[0]
    return Scores(_logsumexp(folded) - folded.target_PN.double().sum(0), top_N, kl_N)


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    h, w, n, v, vocab, width,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`h w^T` for tokens n [BLOCK_N] and words v [BLOCK_V], float32."""
    d = tl.arange(0, BLOCK_D)
    h_at = n.to(tl.int64)[:, None] * width + d[None, :]
    w_at = tl.minimum(v, vocab - 1).to(tl.int64)[None, :] * width + d[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    for start in range(0, width, BLOCK_D):
        h_ND = tl.load(h + h_at + start, mask=(start + d < width)[None, :], other=0.0)
        w_DV = tl.load(w + w_at + start, mask=(start + d < width)[:, None], other=0.0)
        if UPCAST:
            sums += tl.dot(h_ND.to(tl.float32), w_DV.to(tl.float32), input_precision="ieee")
        else:
            sums = tl.dot(h_ND, w_DV, sums)
    # Finite, so that a weight of 0 makes 0 of it, and in place, which spares a second copy.
    return tl.where((v < vocab)[None, :], sums, -1e30)


@triton.jit
def _folded(logits, v, target, maximum, top, total, target_logit):  # type: ignore[no-untyped-def]
    """A softmax that has taken in a block of logits; also e^(logit - maximum) and the old sums' factor."""
    block_max, block_top = tl.max(logits, 1, return_indices=True)
    new = tl.maximum(maximum, block_max)
    fade = tl.exp(maximum - new)
    weight = tl.exp(logits - new[:, None])
    top = tl.where(block_max > maximum, block_top + tl.min(v, 0), top)
    total = total * fade.to(tl.float64) + tl.sum(weight, 1).to(tl.float64)
    target_logit += tl.sum(tl.where(v[None, :] == target[:, None], logits, 0.0), 1)
    return new, top, total, target_logit, weight, fade


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    h_a, w_a, h_b, w_b, targets,
    max_a, top_a, sum_a, target_a, max_b, top_b, sum_b, target_b, cross,
    tokens, vocab, width_a, width_b, blocks,
    PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * blocks * BLOCK_V
    last = tl.minimum(first + blocks * BLOCK_V, vocab)
    row = tl.minimum(n, tokens - 1)
    target = tl.load(targets + row).to(tl.int32)
    zeros = tl.zeros((BLOCK_N,), tl.float32)
    a_max, a_top, a_sum, a_target = zeros - float("inf"), zeros.to(tl.int32), zeros.to(tl.float64), zeros
    b_max, b_top, b_sum, b_target = a_max, a_top, a_sum, a_target
    crossed = zeros.to(tl.float64)
    for start in range(first, last, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        a = _logits(h_a, w_a, row, v, vocab, width_a, BLOCK_N, BLOCK_V, BLOCK_D, UPCAST)
        if PAIRED:  # before the folding, which then holds the two blocks and little else
            b = _logits(h_b, w_b, row, v, vocab, width_b, BLOCK_N, BLOCK_V, BLOCK_D, UPCAST)
        a_max, a_top, a_sum, a_target, weight, fade = _folded(a, v, target, a_max, a_top, a_sum, a_target)
        if PAIRED:
            crossed = crossed * fade.to(tl.float64) + tl.sum(weight * (a - b), 1).to(tl.float64)
            b_max, b_top, b_sum, b_target, weight, fade = _folded(b, v, target, b_max, b_top, b_sum, b_target)
    at, there = tl.program_id(1) * tokens + n, n < tokens
    tl.store(max_a + at, a_max, mask=there)
    tl.store(top_a + at, a_top, mask=there)
    tl.store(sum_a + at, a_sum, mask=there)
    tl.store(target_a + at, a_target, mask=there)
    if PAIRED:
        tl.store(max_b + at, b_max, mask=there)
        tl.store(top_b + at, b_top, mask=there)
        tl.store(sum_b + at, b_sum, mask=there)
        tl.store(target_b + at, b_target, mask=there)
        tl.store(cross + at, crossed, mask=there)
