"""Chooses the experts of a token, and what they weigh.

Legend: N rows (tokens), X experts, S experts of a token, G groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qconvert.runtime.config import Experts


def route(logits_NX: Tensor, experts: Experts, correction_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights float32 and numbers int64 of the experts of each row, [N, S]; logits are the router's, float32.

    Scores are a softmax over all experts, or sigmoids. The largest are taken, those of DeepSeek-V3 with a
    correction added that only chooses (arXiv 2408.15664); with groups, of those groups alone whose best
    scores are the largest: the best one, or the best two together beside a correction.
    """
    scores_NX = logits_NX.sigmoid() if experts.sigmoid else logits_NX.softmax(-1)
    ranked_NX = scores_NX if correction_X is None else scores_NX + correction_X
    if experts.kept_groups < experts.groups:
        ranked_NX = _of_best_groups(ranked_NX, experts)
    chosen_NS = ranked_NX.topk(experts.per_token).indices
    weight_NS = scores_NX.gather(1, chosen_NS)
    if experts.normalise:
        weight_NS = weight_NS / weight_NS.sum(-1, keepdim=True)
    return (weight_NS if experts.scale == 1 else weight_NS * experts.scale), chosen_NS


def _of_best_groups(ranked_NX: Tensor, experts: Experts) -> Tensor:
    """The same, with minus infinity for experts of other groups."""
    ranked_NGX = ranked_NX.view(len(ranked_NX), experts.groups, -1)
    best = 2 if experts.sigmoid else 1
    of_group_NG = ranked_NGX.topk(best).values.sum(-1)
    kept_NK = of_group_NG.topk(experts.kept_groups).indices
    left_out_NG = torch.ones_like(of_group_NG, dtype=torch.bool).scatter_(1, kept_NK, False)
    return ranked_NGX.masked_fill(left_out_NG[..., None], -torch.inf).view_as(ranked_NX)
