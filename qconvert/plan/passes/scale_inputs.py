"""Finds the inputs whose channels are to be scaled (AWQ) for the sake of the weights that read them.

The factors themselves depend on numbers and are chosen before the plan is carried out.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.encodings import Unquantized
from qconvert.core.statistics import StatisticsKey, StatisticsSource
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.models.scale_pairs import ScalableInput, scalable_inputs
from qconvert.models.statistics_keys import input_key
from qconvert.plan.scales import parameters_in
from qconvert.plan.state import Compiled

_OTHER = "--method nearest weighs errors by the same statistics, and scales nothing"


def find_scalable_inputs(state: Compiled) -> Compiled:
    """The inputs that new codes gain from, where scaling was asked for.

    Raises UnsupportedModel for a family whose inputs cannot be scaled, BadRecipe where no statistics, or no
    new codes, make a difference.
    """
    if not state.request.scale_inputs:
        return state
    statistics, architecture = state.request.statistics, state.architecture
    assert statistics is not None, "asked for beside statistics, or a text that they are measured on"
    inputs = scalable_inputs(architecture)
    if not inputs:
        raise UnsupportedModel(
            f"--method awq: {architecture.family.name} has no inputs whose channels can be scaled", _OTHER
        )
    undeclared = [name for name in state.binding.unknown if architecture.carries(name) is None]
    if undeclared:
        raise UnsupportedModel(
            f"{undeclared[0]}: not a tensor of {architecture.family.name}; it may read what would be scaled",
            _OTHER,
        )
    quantized = {
        parameter.name
        for unit in state.plan.units
        if unit.quantizes
        for piece in unit.inputs
        for parameter, _ in parameters_in(piece, architecture)
    }
    chosen = [each for each in inputs if any(reader.name in quantized for reader in each.readers)]
    if not chosen:
        raise BadRecipe(
            "--method awq: no weight that gets new codes reads an input that can be scaled", _OTHER
        )
    _refuse_codes(state, chosen)
    measured = tuple(each for each in chosen if statistics_key(each, statistics) is not None)
    if not measured:
        raise BadRecipe(
            "--method awq: the statistics have none of the inputs that could be scaled",
            "give those of this model",
        )
    return replace(state, scalable=measured)


def statistics_key(each: ScalableInput, statistics: StatisticsSource) -> StatisticsKey | None:
    """The key under which an input was measured: that of a reader of all tokens, before an expert's."""
    keys = sorted((input_key(reader) for reader in each.readers), key=lambda key: key.expert is not None)
    return next((key for key in keys if key in statistics), None)


def _refuse_codes(state: Compiled, inputs: list[ScalableInput]) -> None:
    """Raise BadRecipe for a weight that is quantized already: its codes are of other numbers."""
    involved = {parameter.name for each in inputs for parameter in (*each.sources, *each.readers)}
    for unit in state.plan.units:
        for piece in unit.inputs:
            names = {parameter.name for parameter, _ in parameters_in(piece, state.architecture)}
            encoding = piece.tensor.encoding
            if names & involved and not isinstance(encoding, Unquantized):
                raise BadRecipe(
                    f"{piece.tensor.name}: already quantized ({encoding.label}); its numbers would be scaled",
                    "start from the 16-bit model, or run `qconvert dequantize` first",
                )
