"""Scores models from their hidden states: per-token losses and divergences, on the fastest path there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qconvert.core.activations import InputQuantization
from qconvert.runtime.blockwise_scores import Logits, Scores, score
from qconvert.runtime.cuda.triton_language import available
from qconvert.runtime.head import logit_blocks
from qconvert.runtime.linear import Table
from qconvert.runtime.storage import DenseWeight

__all__ = ["Outputs", "Scores", "score", "score_hidden"]


class Outputs(NamedTuple):
    """Hidden states [N, D] of a model, the head that makes logits of them, and what bounds the logits.

    With a `logit_cap`, a logit x is `cap tanh(x / cap)` (Gemma 2). `inputs` is what the head may round hidden
    states to for speed (`logit_blocks`).
    """

    h_ND: Tensor
    head: Table
    logit_cap: float | None = None
    inputs: InputQuantization | None = None

    def logits(self, start: int, stop: int) -> Tensor:
        """Logits of the vocabulary rows [start, stop): float32 [N, stop - start]."""
        return self.blocks()(start, stop)

    def blocks(self) -> Logits:
        """The same for one block after the other: what all need is computed once."""
        made, cap = logit_blocks(self.h_ND, self.head, self.inputs), self.logit_cap
        if cap is None:
            return made
        return lambda start, stop: made(start, stop).div_(cap).tanh_().mul_(cap)


def score_hidden(models: Sequence[Outputs | tuple[Tensor, Table]], targets_N: Tensor) -> list[Scores]:
    """Score models by their hidden states and heads, as `score` does by their logits.

    bf16 heads on a GPU that triton compiles for are multiplied by and accumulated in one kernel, a
    model beside the reference at a time; all others block by block. Either way the logits are
    products of the numbers as they are, summed in float32.
    """
    outputs = [Outputs(*model) for model in models]
    heads = [each.head.w_OI for each in outputs if isinstance(each.head, DenseWeight)]
    states = [each.h_ND for each in outputs if each.logit_cap is None]
    bf16 = all(x.dtype == torch.bfloat16 for x in (*heads, *states))
    held = bf16 and len(heads) == len(states) == len(outputs)
    if targets_N.device.type == "cuda" and held and available(targets_N.device):
        from qconvert.runtime.cuda.head import HiddenStates, score_hidden_states

        reference, *others = map(HiddenStates, states, heads)
        pairs = [score_hidden_states([reference, other], targets_N) for other in others]
        first = pairs[0][:1] if pairs else score_hidden_states([reference], targets_N)
        return [*first, *(b for _, b in pairs)]
    return score([each.blocks() for each in outputs], targets_N, outputs[0].head.shape[0])
