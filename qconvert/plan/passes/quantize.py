"""Quantizes the weights that the recipe names."""

from __future__ import annotations

from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.schemes import fitting
from qconvert.errors import BadRecipe
from qconvert.ops import Cast, Quantize
from qconvert.plan.passes.fuse import unstack_experts
from qconvert.plan.plan import Unit
from qconvert.plan.selectors import decide, parameters_of
from qconvert.plan.state import Compiled


def quantize(state: Compiled) -> Compiled:
    """Linears in the recipe's scheme, everything else as its rules say.

    Scales are stored in the tensor's own dtype unless the layout wants another. Raises BadRecipe for a
    tensor that is quantized already, and for rules that the model or the loaders cannot honour.
    """
    recipe, target = state.request.recipe, state.request.layout_target
    if recipe.scheme is None and not recipe.rules:
        return state
    for tensor in (unit.output for unit in state.plan.units):
        if not isinstance(tensor.encoding, Unquantized):
            raise BadRecipe(
                f"{tensor.name}: already quantized ({tensor.encoding.label}); doing it again would "
                "lose twice",
                "start from the 16-bit model; where there is none, `qconvert convert --to LAYOUT "
                "--scheme SCHEME --allow-requantize` accepts the second loss",
            )
    plan, architecture = unstack_experts(state.plan, state.architecture), state.architecture
    schemes = decide(recipe, architecture, parameters_of(plan, architecture), tied=state.tied)
    scale_dtype = target.traits.scale_dtype if target else None
    made: dict[tuple[int, tuple[int, ...], DType], tuple[Quantize]] = {}  # by the identity of a scheme
    alike: dict[Quantize, tuple[Quantize]] = {}  # so that all shapes share an encoding

    def one(unit: Unit) -> Unit:
        scheme = schemes.get(unit.output.name)
        if scheme is None:
            return unit
        encoding = unit.output.encoding
        assert isinstance(encoding, Unquantized)
        if encoding.dtype is DType.F64:  # the quantizer's own arithmetic is float32
            unit, encoding = unit.then(Cast(DType.F32)), Unquantized(DType.F32)
        kind = id(scheme), unit.output.shape, scale_dtype or encoding.dtype
        ops = made.get(kind)
        if ops is None:
            op = Quantize(fitting(scheme, unit.output, kind[-1]), recipe.search)
            ops = made[kind] = alike.setdefault(op, (op,))
        if unit.ops:
            return unit.then(*ops)
        output = ModelTensor(unit.output.name, unit.output.shape, ops[0].encoding)
        return Unit(unit.read, ops, output, unit.statistics)  # which share their operations

    return state.with_plan(plan.each(one))
