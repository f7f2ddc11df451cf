"""Scores models from blocks of their logits: losses, likeliest tokens and divergences, per token.

The [tokens, vocabulary] matrix of a 150,000-word model is never held: each block of logits is
accumulated into a few numbers per token and dropped. All rows of the head count, padding rows too, as
in transformers and llama.cpp. Legend: N tokens, W words of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[int, int], Tensor]
"""Logits of the vocabulary rows [start, stop): float32 [N, stop - start]."""

BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Logits per block: what stays in a CPU's cache, and what fills a GPU."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What one model says of N tokens, float64 [N] but for `top_N`.

    `nll_N` is minus the log-probability of the true token in nats, `top_N` the likeliest token
    (int64), `kl_N` the divergence KL(reference || model) in nats, None for the reference itself.
    Rounding may leave a `kl_N` of zero a little below it.
    """

    nll_N: Tensor
    top_N: Tensor
    kl_N: Tensor | None


def score(heads: Sequence[Logits], targets_N: Tensor, vocab: int, block: int | None = None) -> list[Scores]:
    """Score models on the same tokens; the first is the reference of the others' divergences.

    With reference logits a, model logits b, and m, S the running maximum and sum of e^(a - m), one
    more sum U of e^(a - m) (a - b) gives KL = U / S - logsumexp(a) + logsumexp(b). `block` is the
    number of words per block; by default as many as BLOCK_ELEMENTS holds.
    """
    elements = BLOCK_ELEMENTS.get(targets_N.device.type, BLOCK_ELEMENTS["cpu"])
    block = block or max(1, elements // max(1, targets_N.numel()))
    reference, *others = (_Running.start(targets_N) for _ in heads)
    cross = [torch.zeros_like(reference.sum_N) for _ in others]
    for start in range(0, vocab, block):
        stop = min(start + block, vocab)
        a_NW = heads[0](start, stop)
        weight_NW, rescale_N = reference.fold(a_NW, start)
        for j, (running, logits) in enumerate(zip(others, heads[1:], strict=True)):
            b_NW = logits(start, stop)
            running.fold(b_NW, start)
            cross[j] = cross[j] * rescale_N + torch.sub(a_NW, b_NW).mul_(weight_NW).sum(-1)
    return [reference.scores(None)] + [
        running.scores(u / reference.sum_N - reference.logsumexp + running.logsumexp)
        for running, u in zip(others, cross, strict=True)
    ]


@dataclass(slots=True)
class _Running:
    """A softmax seen up to some block: maximum, sum of exponentials, likeliest and true token."""

    targets_N: Tensor
    max_N: Tensor
    sum_N: Tensor
    top_N: Tensor
    target_N: Tensor

    @staticmethod
    def start(targets_N: Tensor) -> _Running:
        zeros_N = torch.zeros(targets_N.shape, device=targets_N.device)
        return _Running(
            targets_N, zeros_N - torch.inf, zeros_N.double(), torch.zeros_like(targets_N), zeros_N.clone()
        )

    @property
    def logsumexp(self) -> Tensor:
        return self.max_N.double() + self.sum_N.log()

    def fold(self, x_NW: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Take in a block; returns e^(x - m) and what sums over earlier blocks must be multiplied by."""
        block_max_N, block_top_N = x_NW.max(-1)
        max_N = torch.maximum(self.max_N, block_max_N)
        rescale_N = (self.max_N - max_N).exp().double()
        weight_NW = (x_NW - max_N[:, None]).exp_()
        self.sum_N = self.sum_N * rescale_N + weight_NW.sum(-1)
        self.top_N = torch.where(block_max_N > self.max_N, start + block_top_N, self.top_N)
        self.max_N = max_N
        column_N = self.targets_N - start
        width = x_NW.shape[1]
        found_N = x_NW.gather(1, column_N.clamp(0, width - 1)[:, None])[:, 0]
        self.target_N = torch.where((column_N >= 0) & (column_N < width), found_N, self.target_N)
        return weight_NW, rescale_N

    def scores(self, kl_N: Tensor | None) -> Scores:
        return Scores(self.logsumexp - self.target_N, self.top_N, kl_N)
