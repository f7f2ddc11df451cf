"""Finds the weights of experts that an adapter changes by products of all experts of a layer.

Classes of transformers 5 hold the experts of a layer as two parameters, `gate_up_proj` [experts, 2 middle,
hidden] and `down_proj` [experts, hidden, middle]; files have a tensor for each matrix of each expert. PEFT
(`ParamWrapper.get_delta_weight`) calls both by the module that holds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from qconvert.checkpoint.open import Checkpoint
from qconvert.core.encodings import ModelTensor
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.huggingface.adapter import ELSEWHERE, OTHER_BASE, Adapter, LowRank, OfExperts

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROLE = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)")
_Experts = dict[str, list[ModelTensor]]


def products_of_experts(base: Checkpoint, adapter: Adapter) -> dict[str, LowRank]:
    """What is added to the weight of each expert, by the base's names; UnsupportedModel for other stacks."""
    if not adapter.experts:
        return {}
    layers = _experts_of(base)
    found: dict[str, LowRank] = {}
    for stack in adapter.experts:
        layer = _LAYER.search(f"{stack.module}.")
        experts = layers.get(int(layer[1])) if layer else None
        if experts is None or not _are_alike(experts):
            fact = f"{shown(stack.module)}: {base.path.name} has no matrices of single experts there"
            raise UnsupportedModel(fact, ELSEWHERE)
        found |= _products(stack, experts, adapter)
    return found


def _experts_of(base: Checkpoint) -> Mapping[int, _Experts]:
    """The matrices of experts by layer and role, in the order of the experts."""
    found: dict[int, dict[str, dict[int, ModelTensor]]] = {}
    for name, parameter in base.bind(allow_unknown=True).parameters.items():
        role = _ROLE.fullmatch(parameter.role)
        if role and parameter.layer is not None and parameter.param == "weight":
            roles = found.setdefault(parameter.layer, {})
            roles.setdefault(role[2], {})[int(role[1])] = base.tensors[name]
    return {
        layer: {role: [each[i] for i in sorted(each)] for role, each in roles.items()}
        for layer, roles in found.items()
    }


def _are_alike(experts: _Experts) -> bool:
    """Whether there are all three matrices of each expert, all of the same shapes."""
    if set(experts) != {"gate", "up", "down"}:
        return False
    shapes = [{each.shape for each in tensors} for tensors in experts.values()]
    counts = {len(tensors) for tensors in experts.values()}
    return len(counts) == 1 and all(len(each) == 1 and len(next(iter(each))) == 2 for each in shapes)


def _products(stack: OfExperts, experts: _Experts, adapter: Adapter) -> dict[str, LowRank]:
    count, middle = len(experts["gate"]), experts["gate"][0].rows
    ranks, width = adapter.spec(stack.right).shape
    made = (adapter.spec(stack.left).rows, width)
    parts = {"gate_up_proj": (("gate", 0), ("up", middle)), "down_proj": (("down", 0),)}
    whole = {
        "gate_up_proj": (2 * middle, experts["gate"][0].width),
        "down_proj": experts["down"][0].shape,
    }
    parameter = next((name for name, shape in whole.items() if shape == made), None)
    if parameter is None or ranks % count:
        shapes = " or ".join(str(list(shape)) for shape in whole.values())
        raise UnsupportedModel(
            f"{shown(stack.module)}: the adapter has {ranks} ranks for {count} experts of {list(made)}, "
            f"the base's are {shapes}",
            OTHER_BASE,
        )
    return {
        tensor.name: stack.of(parameter, expert, count, ranks // count, first_row)
        for role, first_row in parts[parameter]
        for expert, tensor in enumerate(experts[role])
    }
