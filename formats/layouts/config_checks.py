"""Checks the arrays of a checkpoint against what its config claims about them.

Every reader makes the same checks: whether each array of a weight is there, has the shape that the encoding
needs, and agrees with the config. Errors name the array and the config's key.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from functools import cache
from typing import TypeVar

from qconvert.core.dtypes import FLOAT_DTYPES, DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, Encoding, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import Layout, Source
from qconvert.errors import BadRecipe, CorruptCheckpoint, shown
from qconvert.formats.io.array_table import Kind, kinds_of
from qconvert.formats.layouts.stored_arrays import StoredArrays

L = TypeVar("L", bound=Layout)
# Where config.json has the settings of most layouts.
SETTINGS_KEY = "quantization_config"
APART = "fetch all arrays of this weight again, from one source: these do not belong together"


def claim(settings: Mapping[str, object], key: str, kind: type, default: object = None) -> object:
    """The value under a key of quantization_config, checked for its type; `default` when absent."""
    value = settings.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise CorruptCheckpoint(
            f"config.json: quantization_config: {key} is {shown(value)}, not {kind.__name__}",
            "correct quantization_config",
        )
    return value


def contradiction(array: str, found: str, key: str, claimed: object) -> CorruptCheckpoint:
    """The error for an array that is not what quantization_config says."""
    return CorruptCheckpoint(
        f"{array}: {found}, but quantization_config says {key} {shown(claimed)}",
        "correct quantization_config, or fetch the weights again",
    )


def require(source: Source, name: str, why: str) -> TensorSpec:
    """The spec of an array that must be there."""
    spec = source.specs.get(name)
    if spec is None:
        raise CorruptCheckpoint(f"{name}: missing, but {why}")
    return spec


def part(
    source: Source, name: str, why: str, *, dims: tuple[int, ...], dtypes: Collection[DType] = FLOAT_DTYPES
) -> TensorSpec:
    """The spec of an array that a quantized weight is told from.

    It must be there, of one of these types, with one of these numbers of dimensions and none of them 0.
    `why` says in errors what it belongs to.
    """
    spec = require(source, name, why)
    if spec.dtype not in dtypes or len(spec.shape) not in dims or 0 in spec.shape:
        kinds = " or ".join(sorted(dtype.label for dtype in dtypes))
        numbers = " or ".join(map(str, dims))
        raise CorruptCheckpoint(
            f"{name}: {spec.dtype.label} {list(spec.shape)}, but {why}: it must be {kinds}, of "
            f"{numbers} dimension{'' if dims == (1,) else 's'}, none of them 0",
            APART,
        )
    return spec


def base_of(tensor: ModelTensor) -> str:
    """The name of a weight's module, which the names of its arrays begin with."""
    return tensor.name.removesuffix(".weight")


def listed(said: Sequence[object]) -> object:
    """A single claim as itself, several as a list."""
    return said[0] if len(said) == 1 else said


def group_size(scales: TensorSpec, width: int, said: Sequence[object]) -> int | None:
    """The columns that share a scale: what the config says, or None for a whole row of another size.

    A row that is one group of the size that all have stays one: loaders want one setting of linears that
    they stack, and some one of all.
    """
    groups = scales.shape[0]
    if width % groups:
        raise CorruptCheckpoint(
            f"{scales.name}: {scales.dtype.label} {list(scales.shape)} fits no {width} input columns", APART
        )
    size = width // groups
    if size not in (*said, width):
        raise contradiction(scales.name, f"groups of {size} columns", "group_size", listed(said))
    return size if size in said else None


def left_plain(modules: object) -> Callable[[ModelTensor], bool]:
    """Whether a list in config.json of what is left plain names a weight's module, or one that it is in.

    Names may be whole, some of their parts alone (`gate`), or have * for anything. Source: transformers 5.23,
    `quantizers/quantizers_utils.py` (should_convert_module). The list is read here, once for all weights: a
    model of 93,000 tensors has 120 names in it.
    """
    names = [n for n in modules if isinstance(n, str) and n] if isinstance(modules, list) else []
    whole, counts = frozenset(names), defaultdict[str, set[int]](set)
    for name in names:  # how many parts they have, by their first
        counts[name.split(".", 1)[0]].add(name.count(".") + 1)
    globs = [name.rstrip("*") for name in names if "*" in name]
    beginnings = tuple(name for name in globs if not {"*", "?"} & set(name))
    patterns = [
        re.compile(translate(name.replace("[", "[[]") + "*")) for name in globs if {"*", "?"} & set(name)
    ]

    def named(tensor: ModelTensor) -> bool:
        module = base_of(tensor)
        if module.startswith(beginnings) or any(pattern.match(module) for pattern in patterns):
            return True
        parts = module.split(".")
        return any(
            ".".join(parts[first : first + count]) in whole
            for first, part in enumerate(parts)
            for count in counts.get(part, ())
        )

    return named


def said_group(tensor: ModelTensor, said: object) -> int | None:
    """The group size that a config says, for a weight that is not here; None where a row has one scale."""
    if said is None or said == -1:
        return None
    if type(said) is not int or said < 1 or tensor.width % said:
        raise CorruptCheckpoint(
            f"config.json: group_size {shown(said)} does not divide the {tensor.width:,} columns of "
            f"{tensor.name}",
            "correct quantization_config, or give the whole model folder",
        )
    return said


def matrix_shape(tensor: ModelTensor, layout: str) -> tuple[int, int]:
    """The rows and columns of a quantized linear; BadRecipe for a stack of experts."""
    if len(tensor.shape) != 2:
        raise BadRecipe(
            f"{tensor.name}: a stack of {tensor.shape[0]} experts ({tensor.encoding.label}), but {layout} "
            "holds only quantized linears, one for each expert",
            "leave the experts apart (`qconvert unfuse --only experts`)",
        )
    return tensor.shape[0], tensor.shape[1]


def check_parts(layout: Layout, tensor: ModelTensor, source: Source) -> ModelTensor:
    """The tensor, once every array that stores it has the type and shape that its encoding needs."""
    for spec in layout.stored_arrays(tensor):
        _check_part(tensor, spec.name, (spec.dtype, spec.shape), source)
    return tensor


def _check_part(tensor: ModelTensor, name: str, kind: Kind, source: Source) -> None:
    found = source.specs.get(name)
    if found is not None and (found.dtype, found.shape) == kind:
        return
    needs = f"{tensor.encoding.label} of shape {list(tensor.shape)} needs"
    found = require(source, name, f"{needs} it")
    dtype, shape = kind
    raise CorruptCheckpoint(
        f"{name}: {found.dtype.label} {list(found.shape)}, but {needs} {dtype.label} {list(shape)}", APART
    )


def gathered(
    layout: L,
    source: Source,
    quantized: Iterable[ModelTensor],
    missing: str,
    method: str = "",
    beside: Iterable[str] = (),
) -> tuple[L, dict[str, ModelTensor]]:
    """The layout, and every tensor of a checkpoint: the quantized ones and, as they are, all other arrays.

    CorruptCheckpoint names an array of a quantized tensor that does not fit its encoding, or, where no
    tensor is quantized, what is `missing` of the layout (`method` is what the config says). Arrays `beside`
    the weights are no tensors of the model.
    """
    found: dict[str, ModelTensor] = {}
    used, arrays = set(beside), StoredArrays(layout)
    encodings: dict[Encoding, Encoding] = {}  # each once: of very many tensors, there are few
    for tensor in quantized:
        encoding = encodings.setdefault(tensor.encoding, tensor.encoding)
        found[tensor.name] = one = ModelTensor(tensor.name, tensor.shape, encoding)
        begin, parts = arrays.of(one)
        for end, kind in parts:
            _check_part(one, begin + end, kind, source)
            used.add(begin + end)
    found = plain_rest(source, used, found)
    check_claimed(found, method or layout.name, missing)
    return layout, found


def check_claimed(found: Mapping[str, ModelTensor], method: str, missing: str) -> None:
    """Raise if a config that claims a quantization has plain weights only."""
    if any(not isinstance(tensor.encoding, Unquantized) for tensor in found.values()):
        return
    linears = [name for name in found if name.endswith("_proj.weight")] or ["every weight"]
    named = next((name for name in linears if name.endswith(".q_proj.weight")), linears[0])
    raise CorruptCheckpoint(
        f"{named.removesuffix('.weight')}: no {missing}, but quantization_config says {method}",
        "remove quantization_config from config.json if the weights are plain",
    )


def plain_rest(
    source: Source, used: Collection[str], found: dict[str, ModelTensor]
) -> dict[str, ModelTensor]:
    """The quantized tensors and, as they are, all arrays that store none; twice is an error."""
    plain = cache(Unquantized)
    for name, (dtype, shape) in kinds_of(source.specs):
        if name in used:
            continue
        if name in found:
            raise CorruptCheckpoint(
                f"{name}: stored both plain and quantized ({found[name].encoding.label})",
                "remove one of the two",
            )
        found[name] = ModelTensor(name, shape, plain(dtype))
    return {name: found[name] for name in sorted(found)}


def dtype_of(config: Json) -> DType:
    """The type that config.json says the model computes in; bfloat16 when it says none known here."""
    names = {"float16": DType.F16, "float32": DType.F32}
    return names.get(str(config.get("dtype") or config.get("torch_dtype")), DType.BF16)


def settings_of(config: Json, key: str = SETTINGS_KEY) -> Json:
    """The quantization settings of a config.json, {} when there are none."""
    settings = config.get(key) or {}
    if not isinstance(settings, dict):
        raise CorruptCheckpoint(f"config.json: {key} is not an object")
    return settings


def most_common(settings: Iterable[Json]) -> Json:
    """The settings that most modules have, of several the first; each is looked at once, for very many."""
    counts = Counter(tuple(own.items()) for own in settings)
    ((usual, _),) = counts.most_common(1)
    return dict(usual)


def only_encoding(quantized: Mapping[str, Quantized], layout: str) -> Quantized:
    """The one encoding of all quantized modules; BadRecipe names two modules that differ.

    The type that loaders compute a weight in is no such setting: the weight says it of itself.
    """
    first, encoding = next(iter(quantized.items()))
    for module, other in quantized.items():
        if _setting(other) != _setting(encoding):
            raise BadRecipe(
                f"{module}: {other.label}, but {first} is {encoding.label}; {layout} has one setting for all",
                "quantize all of it again in one scheme, with --allow-requantize and --scheme, such as "
                "int4-g128; or write compressed-tensors, whose groups may differ",
            )
    return encoding


def _setting(encoding: Quantized) -> Quantized:
    return replace(encoding, decoded=DType.BF16) if isinstance(encoding, Codebook) else encoding
