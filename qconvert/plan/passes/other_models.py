"""Leaves out tensors that are not of the language model."""

from __future__ import annotations

from collections import Counter

from qconvert.errors import UnsupportedModel
from qconvert.plan.passes.tie import without
from qconvert.plan.state import Compiled


def leave_out_other_models(state: Compiled) -> Compiled:
    """The plan of the language model alone: a vision tower has a file of its own in llama.cpp.

    Raises UnsupportedModel for a tensor that belongs to no known part.
    """
    binding = state.binding
    parts = {name: binding.architecture.carries(name) for name in binding.unknown}
    strange = next((name for name, what in parts.items() if what is None), None)
    if strange is not None:
        raise UnsupportedModel(f"{strange}: GGUF has no name for it", "remove the tensor")
    why = "left out; the GGUF holds the language model"
    counts = Counter(what for what in parts.values() if what is not None)
    warnings = (f"{what}: {n} tensor{'s are' if n > 1 else ' is'} {why}" for what, n in counts.items())
    return state.with_plan(without(state.plan, *parts)).warn(*warnings)
