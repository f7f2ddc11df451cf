"""Guesses the linears of an undeclared model, and takes its tensors as they are.

The guess is made from names and shapes alone, and is printed wherever it is used: 2-D weights inside numbered
layers are linears unless a part of their name excludes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from qconvert.core.config_json import MAX_LAYERS
from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor
from qconvert.models.parameters import Dimensions, Family, ParameterKind, ParameterTemplate

NOT_LINEAR = ("norm", "ln", "embed", "position", "router", "gate", "bias", "conv", "head", "score")
# Patterns times layers, per tensor: a larger ratio is no stack of layers, and expanding it costs time.
_SPARSE = 8
_LAYER = re.compile(r"\.(\d{1,4})(?=\.)")
_LAYERS = "number of layers found"
# Words that exclude a linear: as the last word of a module, or (the long ones) anywhere.
_EXCLUDED = re.compile(r"(^|[._])(ln\d*|gate|head|bias|score)\.|norm|embed|position|router|conv")


def guessed_family(config: Json, tensors: Mapping[str, ModelTensor]) -> Family:
    """Returns a family of one model, whose templates are its tensors; `guess` states the assumption."""
    found = _gathered(tensors, _pattern)
    layers = 1 + max((layer for shapes in found.values() for layer in shapes if layer is not None), default=0)
    if len(found) * layers > _SPARSE * (len(tensors) + layers):
        found, layers = _gathered(tensors, lambda name: (_escaped(name), None)), 1
    slots = [_slot(pattern, shapes) for pattern, shapes in found.items()]
    linears = sum(slot.kind == "linear" for slot in slots)
    return Family(
        name=f"not in the catalogue ({config.get('model_type')})",
        model_types=(),
        classes=(),
        slots=(*(s for s in slots if not s.per_layer), *(s for s in slots if s.per_layer)),
        dimensions=_dimensions(found),
        named_by={},
        layers=(_LAYERS,),
        defaults={_LAYERS: layers},
        guess=f"model_type {config.get('model_type')!r} is not in the catalogue: {linears} kinds of 2-D "
        "weights in its layers are taken for linears, everything else is kept (names with "
        f"{', '.join(NOT_LINEAR)} are none)",
    )


Shapes = dict[int | None, tuple[int, ...]]


def _gathered(
    tensors: Mapping[str, ModelTensor], pattern_of: Callable[[str], tuple[str, int | None]]
) -> dict[str, Shapes]:
    found: dict[str, Shapes] = {}
    for name, tensor in tensors.items():
        pattern, layer = pattern_of(name)
        found.setdefault(pattern, {})[layer] = tensor.shape
    return found


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _pattern(name: str) -> tuple[str, int | None]:
    """Returns the name with its first number replaced by `{layer}`, and that number."""
    escaped = _escaped(name)
    match = _LAYER.search(escaped)
    if match is None or int(match[1]) >= MAX_LAYERS:
        return escaped, None
    return f"{escaped[: match.start()]}.{{layer}}{escaped[match.end() :]}", int(match[1])


def _slot(pattern: str, shapes: Shapes) -> ParameterTemplate:
    module, dot, last = pattern.rpartition(".")
    suffix = f".{last}" if dot and last == "weight" else ""
    module = module if suffix else pattern
    sizes = next(iter(shapes.values()))
    numbered = "{layer}" in pattern or _LAYER.search(pattern)
    inside = numbered and pattern.endswith(".weight") and all(len(s) == 2 for s in shapes.values())
    kind: ParameterKind = "linear" if inside and not _EXCLUDED.search(pattern.lower()) else "other"
    if pattern.endswith("bias"):
        kind = "bias"
    return ParameterTemplate(
        role=module.replace(".{layer}", ""),
        module=module,
        shape=tuple(f"{pattern} {axis}" for axis in range(len(sizes))),
        kind=kind,
        only_if=pattern,
        suffix=suffix,
    )


def _dimensions(found: Mapping[str, Shapes]) -> Callable[[Json, int], Dimensions]:
    def dimensions(config: Json, layer: int) -> Dimensions:
        sizes: dict[str, int] = {}
        for pattern, shapes in found.items():
            shape = shapes.get(layer) if "{layer}" in pattern else shapes.get(None)
            sizes[pattern] = int(shape is not None)
            sizes |= {f"{pattern} {axis}": size for axis, size in enumerate(shape or ())}
        return sizes

    return dimensions
