"""Samples what a model would say next, and takes the gradient of its log-probability to the hidden states.

With y drawn from the model's own p, E[g g^T] of such gradients g is the Fisher information, which is the
curvature of KL(p || quantized). No [tokens, vocabulary] matrix is held. Legend: N tokens, D hidden width,
V vocabulary, W words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qconvert.runtime.blockwise_scores import BLOCK_ELEMENTS, score
from qconvert.runtime.scoring import Outputs


@dataclass(frozen=True, slots=True)
class SampledGradient:
    """What was sampled for N tokens, and what follows from it.

    `words_N` int64: the words that were drawn. `g_ND` float32: the gradient of log p(word) to the hidden
    state that the head reads, in nats. `curvature_V` float64: the sum over tokens of p (1 - p), the expected
    square of the gradient to each word's product, before a cap of the logits (Gemma 2).
    """

    words_N: Tensor
    g_ND: Tensor
    curvature_V: Tensor


def sample_gradient(outputs: Outputs, uniform_N: Tensor) -> SampledGradient:
    """Draw a word for each token by inverting its distribution at `uniform_N`, float64 [N] in [0, 1)."""
    vocab = outputs.head.shape[0]
    h_ND, count = outputs.h_ND.float(), len(outputs.h_ND)
    first_N = torch.zeros(count, dtype=torch.int64, device=h_ND.device)
    scores = score([outputs.logits], first_N, vocab)[0]
    logsumexp_N = scores.nll_N + outputs.logits(0, 1)[:, 0].double()
    words_N, below_N = first_N, torch.zeros_like(logsumexp_N)
    logsumexp_N1 = logsumexp_N.float()[:, None]
    g_ND, curvature_V = torch.zeros_like(h_ND), torch.zeros(vocab, dtype=torch.float64, device=h_ND.device)
    elements = BLOCK_ELEMENTS.get(h_ND.device.type, BLOCK_ELEMENTS["cpu"])
    width = max(1, elements // max(1, count))
    for start in range(0, vocab, width):
        block = slice(start, min(start + width, vocab))
        z_NW = outputs.logits(block.start, block.stop)
        p_NW = (z_NW - logsumexp_N1).exp()
        reached_NW = p_NW.cumsum(1, dtype=torch.float64).add_(below_N[:, None])
        words_N = words_N + (reached_NW <= uniform_N[:, None]).sum(1)
        below_N = reached_NW[:, -1]
        slope_NW = _slope(z_NW, outputs.logit_cap)
        curvature_V[block] = (p_NW * (1 - p_NW) * slope_NW**2).sum(0)
        g_ND.sub_((p_NW * slope_NW) @ outputs.head.rows(block).float())
    # Where the sum of all p rounds to less than the number drawn, the likeliest word stands in.
    words_N = torch.where(words_N < vocab, words_N, scores.top_N)
    rows_ND = outputs.head.rows(words_N).float()
    z_N = (h_ND * rows_ND).sum(1)
    if outputs.logit_cap is not None:
        z_N = outputs.logit_cap * torch.tanh(z_N / outputs.logit_cap)
    return SampledGradient(words_N, g_ND + rows_ND * _slope(z_N, outputs.logit_cap)[..., None], curvature_V)


def _slope(z: Tensor, cap: float | None) -> Tensor:
    """The derivative of capped logits z to what they were before the cap."""
    return torch.ones_like(z) if cap is None else 1 - (z / cap) ** 2
