"""Reads how loaders of compressed-tensors quantize the inputs of a module, from `quantization_config`.

Sources: compressed-tensors 0.20, `quantization/quant_args.py`, `utils/match.py`, `quantization/lifecycle`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Literal

from qconvert.core.activations import ActivationScheme
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import ModelTensor
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts.config_checks import base_of, settings_of

SCALE, ZERO, GLOBAL = "input_scale", "input_zero_point", "input_global_scale"
_SHARED: dict[str, Literal["tensor", "token", "group"]] = {
    "None": "tensor",
    "tensor": "tensor",
    "token": "token",
    "group": "group",
    "tensor_group": "group",
}
_SCALES = {"None": DType.F32, "torch.uint8": DType.F8_E8M0, "torch.float8_e4m3fn": DType.F8_E4M3}
LINEARS = "Linear"
_MOST_REPETITIONS = 4
_KINDS = ((8, "int"), (4, "int"), (8, "float"), (4, "float"))


def activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """How the inputs of the linear with this weight are quantized; None where they are not."""
    settings, module = settings_of(config), base_of(tensor)
    if not any(group.get("input_activations") for group in _declared(settings)):
        return None
    args = group_of(settings, module).get("input_activations")
    return scheme_of(args) if isinstance(args, dict) else None


def group_of(settings: Mapping[str, object], module: str) -> Mapping[str, object]:
    """The one of `config_groups` that loaders take for a module; empty where there is none."""
    return group_finder(settings)(module)


def group_finder(settings: Mapping[str, object]) -> Callable[[str], Mapping[str, object]]:
    """What gives `group_of` for any module, with the settings looked through once."""
    is_ignored = _matcher(settings.get("ignore"))
    groups = [(_matcher(group.get("targets")), group) for group in groups_of(settings)]

    def found(module: str) -> Mapping[str, object]:
        if is_ignored(module):
            return {}
        return next((group for matches, group in groups if matches(module)), {})

    return found


def groups_of(settings: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The `config_groups`, those that match by name before those that match by class, as loaders look."""
    return sorted(_declared(settings), key=lambda group: LINEARS in _names(group.get("targets")))


def _declared(settings: Mapping[str, object]) -> list[Mapping[str, object]]:
    groups = settings.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _matcher(targets: object) -> Callable[[str], object]:
    """What tells whether a list of names, `re:` patterns and the class of all linears names a module.

    Patterns are compiled, and may be refused, for the first module that is looked for.
    """
    named = tuple(_names(targets))
    if LINEARS in named:
        return lambda module: True
    pattern = cache(lambda: _pattern(named))
    return lambda module: pattern().match(module)


def _names(targets: object) -> list[str]:
    return [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []


@lru_cache(maxsize=64)
def _pattern(targets: tuple[str, ...]) -> re.Pattern[str]:
    """What any of these names and patterns matches.

    A pattern of a file may take for ever; those that may not have few repetitions, and none of a group.
    """
    patterns = [target[3:] if target.startswith("re:") else re.escape(target) + "$" for target in targets]
    for pattern in patterns:
        if len(re.findall(r"(?<!\\)[*+?{]", pattern)) > _MOST_REPETITIONS or re.search(r"\)[*+{]", pattern):
            raise UnsupportedModel(
                f"config.json: the pattern {shown(pattern)} has too many repetitions to be tried here",
                "name modules with at most four of * + ? { in a pattern, none of them after a group",
            )
    try:
        return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")
    except (re.error, RecursionError, OverflowError):
        raise CorruptCheckpoint(
            f"config.json: quantization_config: {shown(list(targets))} are not regular expressions",
            "correct quantization_config",
        ) from None


def scheme_of(args: Mapping[str, object]) -> ActivationScheme:
    """The scheme that `input_activations` declare; UnsupportedModel for an unknown one."""
    bits, kind, dynamic = args.get("num_bits"), args.get("type", "int"), args.get("dynamic", False)
    shared, scales = _SHARED.get(str(args.get("strategy"))), _SCALES.get(str(args.get("scale_dtype")))
    size, symmetric = args.get("group_size"), args.get("symmetric", True) is True
    grouped = shared == "group"
    fits = dynamic in ((True, "local") if grouped else (True, False))
    fits &= type(size) is int and size > 0 if grouped else shared == "tensor" or dynamic is True
    if (
        shared is None
        or not fits
        or (bits, kind) not in _KINDS
        or scales is None
        or not (symmetric or kind == "int")
    ):
        said = {key: value for key, value in args.items() if value is not None}
        raise UnsupportedModel(
            f"config.json: input_activations {shown(said)} are not read here",
            "save it again with int8, FP8, NVFP4 or MXFP4 activations, dynamic or with a scale per tensor",
        )
    static = () if dynamic else (SCALE,) if symmetric else (SCALE, ZERO)
    assert isinstance(bits, int)
    return ActivationScheme(
        bits,
        kind == "float",
        shared,
        size if grouped and isinstance(size, int) else None,
        bool(dynamic),
        symmetric,
        scales,
        stored=(GLOBAL,) if dynamic == "local" else static,
    )
