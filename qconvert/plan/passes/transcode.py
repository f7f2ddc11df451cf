"""Brings every weight into the layout that is asked for."""

from __future__ import annotations

from qconvert.plan.passes.expert_stacks import relaid
from qconvert.plan.state import Compiled


def transcode(state: Compiled) -> Compiled:
    """Every tensor as the target layout has it, its codes kept wherever the formats map."""
    target = state.request.layout_target
    if target is None:
        return state
    absorbable = state.facts.absorbable_divisors
    return state.with_plan(
        relaid(state.plan, state.architecture, target, lambda tensor: tensor.name in absorbable)
    )
