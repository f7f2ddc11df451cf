"""Names the measured inputs that weigh the errors of new codes."""

from __future__ import annotations

from qconvert.core.statistics import StatisticsKey
from qconvert.errors import BadRecipe
from qconvert.models import Architecture
from qconvert.models.statistics_keys import input_keys, measured
from qconvert.plan.plan import Unit
from qconvert.plan.state import Compiled


def weigh_errors(state: Compiled) -> Compiled:
    """Every unit that chooses new codes with the keys of its inputs, where they were measured.

    Raises BadRecipe where there are statistics and nothing that they weigh.
    """
    statistics = state.request.statistics
    if statistics is None:
        return state

    def one(unit: Unit) -> Unit:
        keys = input_keys_of(unit.output.name, state.architecture) if unit.quantizes else ()
        return unit._replace(statistics=measured(keys, statistics))

    plan = state.plan.each(one)
    if not any(unit.quantizes for unit in plan.units):
        raise BadRecipe(
            "no weight gets new codes, whose errors statistics could weigh",
            "leave them out, or name a scheme for a 16-bit model",
        )
    if not any(unit.statistics for unit in plan.units):
        raise BadRecipe(
            "the statistics have none of the weights that are quantized", "give those of this model"
        )
    return state.with_plan(plan)


def input_keys_of(name: str, architecture: Architecture) -> tuple[StatisticsKey, ...]:
    """The keys of what the weight of this name, fused or not, is multiplied by."""
    entry, parameter = architecture.fused.get(name), architecture.parameter(name)
    return input_keys(entry.members if entry else [parameter] if parameter else [])
