"""Refuses tensors that an output cannot hold, and looks for NaN and Inf in what is not quantized."""

from __future__ import annotations

from qconvert.core.dtypes import DType
from qconvert.core.encodings import GgmlBlocks, Unquantized
from qconvert.errors import BadRecipe, UnsupportedModel
from qconvert.models.families.vision import BOUNDS
from qconvert.ops import CheckFinite
from qconvert.plan.plan import Unit
from qconvert.plan.state import Compiled


def refuse_unscaled_weights(state: Compiled) -> Compiled:
    """Raise UnsupportedModel for a weight of integers or 8-bit floats that nothing scales.

    A table of numbers, such as that from tokens to experts in DeepSeek-V4, has whole ones.
    """
    encodings = {id(tensor.encoding): tensor.encoding for tensor in state.binding.tensors.values()}
    if not any(isinstance(e, Unquantized) and not e.dtype.is_float for e in encodings.values()):
        return state
    for name, parameter in state.binding.parameters.items():
        encoding = state.binding.tensors[name].encoding
        if isinstance(encoding, Unquantized) and not encoding.dtype.is_float:
            if parameter.kind == "other" and encoding.dtype in (DType.I32, DType.I64):
                continue
            raise UnsupportedModel(
                f"{name}: stored as {encoding.dtype.label} without scales or a quantization_config",
                "qconvert reads 16-, 32- and 64-bit float weights and compressed-tensors integers",
            )
    return state


def refuse_ggml_blocks(state: Compiled) -> Compiled:
    """Raise BadRecipe for GGML blocks: safetensors files do not hold them."""
    outputs = (unit.output for unit in state.plan.units)
    kept = next((tensor for tensor in outputs if isinstance(tensor.encoding, GgmlBlocks)), None)
    if kept is not None:
        raise BadRecipe(
            f"{kept.name}: {kept.encoding.label} blocks, which safetensors files do not hold",
            "`qconvert from-gguf` computes the numbers they stand for",
        )
    return state


def check_finite(state: Compiled) -> Compiled:
    """Look for NaN and Inf in everything that is not quantized (quantizing looks by itself).

    Where the rows that come out are not those of the source, they are looked at before. The bound of a
    clipped linear is infinite where nothing is clipped.
    """

    look, bound = CheckFinite(), CheckFinite(infinite=True)  # shared, so that units alike are known by them

    def one(unit: Unit) -> Unit:
        if unit.quantizes and unit.keeps_rows:
            return unit
        clips = not unit.source.shape and unit.source.name.endswith(BOUNDS)
        return unit._replace(ops=(bound if clips else look, *unit.ops))

    return state if state.request.allow_nonfinite else state.with_plan(state.plan.each(one))
