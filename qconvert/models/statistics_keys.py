"""Names the input of a linear by the linear's role, layer and expert."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qconvert.core.statistics import InputKey, StatisticsKey, StatisticsSource
from qconvert.models.architecture import Architecture
from qconvert.models.expanded import Parameter

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def input_key(parameter: Parameter) -> StatisticsKey:
    """The key of what a weight is multiplied by."""
    expert = _EXPERT.search(parameter.role)
    return StatisticsKey(parameter.group, parameter.layer, int(expert[1]) if expert else None)


_TOGETHER = (("q", "k", "v"), ("gate", "up"))


def inputs_of(architecture: Architecture) -> dict[str, InputKey]:
    """What every weight that is multiplied by an input reads, by the name of the parameter.

    Those are linears, routers and the head. Queries, keys and values have one input, and gate and up have
    one, as where they are fused; queries to another model's keys and values do not.
    """
    weights = [
        parameter
        for parameter in architecture.parameters.values()
        if parameter.param == "weight" and parameter.kind in ("linear", "router")
    ]
    present = {(parameter.layer, parameter.group) for parameter in weights}

    def key_of(parameter: Parameter) -> InputKey:
        prefix, dot, last = parameter.group.rpartition(".")
        together = next((names for names in _TOGETHER if last in names), (last,))
        if prefix.endswith("cross"):
            together = (last,)
        roles = (f"{prefix}{dot}{name}" for name in together)
        shared = tuple(role for role in roles if (parameter.layer, role) in present)
        return InputKey(shared, parameter.layer, input_key(parameter).expert)

    return {parameter.name: key_of(parameter) for parameter in weights}


def input_keys(members: Iterable[Parameter]) -> tuple[StatisticsKey, ...]:
    """The keys of a tensor made of these weights: one for each expert, else that of the first.

    Linears that are fused share one input.
    """
    listed = list(members)
    if not listed or listed[0].param != "weight":
        return ()
    keys = tuple(dict.fromkeys(map(input_key, listed)))
    return keys if keys[0].expert is not None else keys[:1]


def measured(keys: tuple[StatisticsKey, ...], source: StatisticsSource) -> tuple[StatisticsKey, ...]:
    """The keys if the source has statistics for every one of them, else none."""
    return keys if all(key in source for key in keys) else ()
