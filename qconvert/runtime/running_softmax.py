"""Holds the state of a softmax over the vocabulary after some blocks of logits, for many tokens at once.

Legend: N tokens, W words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RunningSoftmax:
    """A softmax seen up to some block: maximum, sum of exponentials, likeliest and true token.

    With the logits a of a reference whose maximum so far is m, `cross_N` sums e^(a - m) (a - x);
    `cross_max_N` is the m that it was last computed with.
    """

    targets_N: Tensor
    max_N: Tensor
    sum_N: Tensor
    top_N: Tensor
    target_N: Tensor
    cross_N: Tensor
    cross_max_N: Tensor

    @classmethod
    def start(cls, targets_N: Tensor) -> RunningSoftmax:
        """Before the first block; targets are the true tokens, int64."""
        zeros_N = torch.zeros(targets_N.shape, device=targets_N.device)
        none_N, top_N = zeros_N - torch.inf, torch.zeros_like(targets_N)
        return cls(
            targets_N, none_N, zeros_N.double(), top_N, zeros_N.clone(), zeros_N.double(), none_N.clone()
        )

    @property
    def logsumexp(self) -> Tensor:
        """Of all logits so far, float64 [N]."""
        return self.max_N.double() + self.sum_N.log()

    def kl(self, reference: RunningSoftmax) -> Tensor:
        """KL(reference || this) in nats, float64 [N], after `fold_beside` of all blocks."""
        return self.cross_N / reference.sum_N - reference.logsumexp + self.logsumexp

    def fold(self, x_NW: Tensor, start: int) -> None:
        """Take in the logits of the words from `start` on, float32."""
        block_max_N, block_top_N = x_NW.max(-1)
        max_N = torch.maximum(self.max_N, block_max_N)
        rescale_N = (self.max_N - max_N).exp().double()
        self.sum_N = self.sum_N * rescale_N + (x_NW - max_N[:, None]).exp_().sum(-1)
        self.top_N = torch.where(block_max_N > self.max_N, start + block_top_N, self.top_N)
        self.max_N = max_N
        column_N = self.targets_N - start
        width = x_NW.shape[1]
        found_N = x_NW.gather(1, column_N.clamp(0, width - 1)[:, None])[:, 0]
        self.target_N = torch.where((column_N >= 0) & (column_N < width), found_N, self.target_N)

    def fold_beside(self, x_NW: Tensor, start: int, a_NW: Tensor, reference: RunningSoftmax) -> None:
        """The same, beside the logits of a reference that has taken them in."""
        self.fold(x_NW, start)
        rescale_N = (self.cross_max_N - reference.max_N).exp().double()
        weight_NW = (a_NW - reference.max_N[:, None]).exp_()
        self.cross_N = self.cross_N * rescale_N + torch.sub(a_NW, x_NW).mul_(weight_NW).sum(-1)
        self.cross_max_N = reference.max_N
