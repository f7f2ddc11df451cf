"""Turns quantized weights into plain numbers, and nested scales into float32."""

from __future__ import annotations

from qconvert.core.encodings import Codebook, Encoding, Unquantized
from qconvert.errors import BadRecipe
from qconvert.ops import Dequantize, Op, Transcode
from qconvert.plan.state import Compiled


def resolve_nested_scales(state: Compiled) -> Compiled:
    """Scales that are quantized themselves become float32 numbers, exactly."""

    def choose(encoding: Encoding) -> Op | None:
        nested = isinstance(encoding, Codebook) and encoding.second == "nested"
        return Transcode("resolve_nested_scales") if nested else None

    return state.with_plan(state.plan.where(choose))


def dequantize(state: Compiled) -> Compiled:
    """Every quantized tensor in the asked dtype, or in the type it is computed to.

    Raises BadRecipe where nothing is quantized (`convert --to bf16` accepts that).
    """
    request = state.request
    if not request.dequantize:
        return state
    if request.command != "convert" and all(
        isinstance(tensor.encoding, Unquantized) for tensor in state.outputs.values()
    ):
        raise BadRecipe("no quantized tensors in this checkpoint", "`qconvert inspect` shows what it holds")

    def choose(encoding: Encoding) -> Op | None:
        if isinstance(encoding, Unquantized):
            return None
        return Dequantize(request.dtype or encoding.decoded)

    return state.with_plan(state.plan.where(choose))
