"""Scores models from blocks of their logits: losses, likeliest tokens and divergences, per token.

The [tokens, vocabulary] matrix of a 150,000-word model is never held: each block of logits is
accumulated into a few numbers per token and dropped. All rows of the head count, padding rows too, as
in transformers and llama.cpp. Legend: N tokens, W words of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from qconvert.runtime.cpu.softmax_rows import CompiledSoftmax
from qconvert.runtime.running_softmax import RunningSoftmax

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
    softmax = CompiledSoftmax if targets_N.device.type == "cpu" else RunningSoftmax
    reference, *others = (softmax.start(targets_N) for _ in heads)
    for start in range(0, vocab, block):
        stop = min(start + block, vocab)
        a_NW = heads[0](start, stop)
        reference.fold(a_NW, start)
        for running, logits in zip(others, heads[1:], strict=True):
            running.fold_beside(logits(start, stop), start, a_NW, reference)
    return [_scores(reference, None), *(_scores(running, running.kl(reference)) for running in others)]


def _scores(seen: RunningSoftmax, kl_N: Tensor | None) -> Scores:
    return Scores(seen.logsumexp - seen.target_N, seen.top_N, kl_N)
