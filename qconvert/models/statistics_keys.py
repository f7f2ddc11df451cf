"""Names the input of a linear by the linear's role, layer and expert."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qconvert.core.statistics import StatisticsKey, StatisticsSource
from qconvert.models.architecture import Parameter

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def input_key(parameter: Parameter) -> StatisticsKey:
    """The key of what a weight is multiplied by."""
    expert = _EXPERT.search(parameter.role)
    return StatisticsKey(parameter.group, parameter.layer, int(expert[1]) if expert else None)


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
