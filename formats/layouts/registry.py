"""Finds every layout by name: one line for each, and the file that declares it is imported when it is needed.

The order of names is that of help texts, hints and the documentation's table.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

from qconvert.core.activations import ActivationScheme, Products
from qconvert.core.dtypes import Json
from qconvert.core.encodings import ModelTensor, Quantized, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.protocols import Layout, Source
from qconvert.core.schemes import Scheme
from qconvert.errors import BadRecipe, UnsupportedModel, shown
from qconvert.formats.layouts.base import Activations, Promise, RegisteredLayout
from qconvert.formats.layouts.config_checks import SETTINGS_KEY, settings_of

_HERE = "qconvert.formats.layouts"
# The layouts that are written, and the modules whose `LAYOUTS` declare them. The first one is the default.
WRITTEN = {
    "compressed-tensors": f"{_HERE}.compressed_tensors",
    "int-quantized": f"{_HERE}.compressed_tensors",
    "gptq": f"{_HERE}.gptq",
    "gptq_v2": f"{_HERE}.gptq",
    "awq": f"{_HERE}.awq",
    "mlx": f"{_HERE}.mlx",
    "bitsandbytes": f"{_HERE}.bitsandbytes",
    "fp8": f"{_HERE}.fp8",
    "mxfp4": f"{_HERE}.mxfp4",
    "modelopt": f"{_HERE}.modelopt",
    "auto-round": f"{_HERE}.auto_round",
    "hqq": f"{_HERE}.hqq",
    "quark": f"{_HERE}.quark",
    "fbgemm_fp8": f"{_HERE}.fbgemm",
    "torchao": f"{_HERE}.torchao",
}
# Those that are only read.
READ_ONLY = {
    "bitnet": f"{_HERE}.bitnet",
    "exl2": f"{_HERE}.exllama",
    "exl3": f"{_HERE}.exllama",
}
# Other names that tools give a method.
_ALIASES = {"intel/auto-round": "auto-round"}
DEFAULT = next(iter(WRITTEN))


def written() -> tuple[str, ...]:
    """The names of the layouts that can be written; imports none of them."""
    return tuple(WRITTEN)


def check_written(name: str) -> None:
    """Raise BadRecipe for a name that is none of `written`, with the nearest of them."""
    if name not in WRITTEN:
        near = get_close_matches(str(name), WRITTEN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(WRITTEN)}"
        raise BadRecipe(f"layout {name!r}: not one that is written", hint)


def read_only() -> tuple[str, ...]:
    """The names of the layouts that are only read; imports none of them."""
    return tuple(READ_ONLY)


def find(name: str) -> RegisteredLayout:
    """The layout of this name, which must be one of `written` or `read_only`."""
    module = import_module(WRITTEN.get(name) or READ_ONLY[name])
    layouts: tuple[RegisteredLayout, ...] = module.LAYOUTS
    return next(layout for layout in layouts if layout.traits.name == name)


def traits_of(name: str) -> LayoutTraits:
    """The traits of the layout of this name; of other names, such as a container's, those of none."""
    return find(name).traits if name in WRITTEN or name in READ_ONLY else LayoutTraits(name)


def all_traits() -> tuple[LayoutTraits, ...]:
    """The traits of every layout, in the order of the registry."""
    return tuple(traits_of(name) for name in (*WRITTEN, *READ_ONLY))


def with_codebook(scheme: str) -> tuple[str, ...]:
    """The names of the layouts that have a codebook scheme of this name."""
    return tuple(traits.name for traits in all_traits() if traits.codebook(scheme))


def with_integers(scheme: Scheme) -> tuple[str, ...]:
    """The names of the layouts that can be written with these integers."""
    found = (traits_of(name) for name in WRITTEN)
    return tuple(each.name for each in found if each.integers and each.integers.accepts(scheme))


def claimed_method(config: Json) -> str | None:
    """The quantization method that config.json names, known here or not; None where it has no settings.

    Settings without a method are those of the layout that has a key of its own for them, or in them.
    """
    settings = settings_of(config)
    if "quant_method" in settings:
        method = shown(settings["quant_method"] or "unnamed")
        return _ALIASES.get(method, method)
    keyed = (traits for traits in all_traits() if traits.config_key != SETTINGS_KEY)
    own = next((traits.name for traits in keyed if settings_of(config, traits.config_key)), None)
    apart = (t.name for t in all_traits() if any(key in settings for key in t.settings_keys))
    return own or next(apart, "unnamed" if settings else None)


def claimed_by(config: Json) -> RegisteredLayout | None:
    """The layout that quantizes the model of a config.json; None where it has no settings.

    Raises UnsupportedModel for a quantization method that no layout here reads.
    """
    method = claimed_method(config)
    if method is None:
        return None
    layout = find(method) if method in WRITTEN or method in READ_ONLY else None
    if layout is None or layout.reader is None:
        readable = [traits for traits in all_traits() if find(traits.name).reader]
        names = [traits.name for traits in sorted(readable, key=lambda own: own.config_key != SETTINGS_KEY)]
        raise UnsupportedModel(
            f"config.json: quantization method {method!r} is not read here",
            f"read: plain safetensors, {', '.join(names)}",
        )
    return layout


def stored_as(config: Json, name: str) -> str:
    """The layout as it is called when it is written: one method may have several formats, and so traits."""
    form = settings_of(config).get("format")
    return form if isinstance(form, str) and form in WRITTEN else name


def read(source: Source, config: Json) -> tuple[Layout, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its tensors, by the names of the model.

    Plain weights are read as those of any layout. Raises CorruptCheckpoint where arrays contradict config.
    """
    reader = (claimed_by(config) or find(DEFAULT)).reader
    assert reader is not None
    return reader(source, config)


def promise(config: Json) -> Promise | None:
    """What a config.json says of quantized weights that are not here; None where their headers alone tell."""
    layout = claimed_by(config)
    return layout.promise(config) if layout is not None and layout.promise is not None else None


def activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """How loaders of a model with this config.json quantize the inputs of the linear with this weight.

    None where they do not.
    """
    if isinstance(tensor.encoding, Unquantized):
        return None
    read = _activations_of(config)
    return read(config, tensor) if read is not None else None


def activations_of(
    config: Json, quantized: Iterable[ModelTensor]
) -> list[tuple[ModelTensor, ActivationScheme]]:
    """How loaders of a model with this config.json quantize the inputs of these linears, where they do."""
    tensors = list(quantized)
    read = _activations_of(config) if tensors else None
    found = ((tensor, read(config, tensor)) for tensor in tensors) if read is not None else ()
    return [(tensor, scheme) for tensor, scheme in found if scheme is not None]


def _activations_of(config: Json) -> Activations | None:
    layout = claimed_by(config)
    return layout.activations if layout is not None else None


def products(config: Json, linears: Iterable[ModelTensor]) -> list[Products]:
    """What loaders of a model with this config.json multiply in its quantized linears, by their widths."""
    found: dict[str, set[str]] = {}
    quantized = [tensor for tensor in linears if isinstance(tensor.encoding, Quantized)]
    read = _activations_of(config) if quantized else None
    for tensor in quantized:
        assert isinstance(tensor.encoding, Quantized)
        scheme = read(config, tensor) if read is not None else None
        widths = f"W{tensor.encoding.bits}A{scheme.bits if scheme else 16}"
        found.setdefault(widths, set()).update([scheme.label] if scheme else [])
    return [Products(widths, tuple(sorted(found[widths]))) for widths in sorted(found)]


def writer(name: str, config: Json | None = None) -> Layout:
    """The layout of this name, which must be one of `written`, for a new output.

    Of a model with this config.json, if that is in the same layout, with what it says beside the weights.
    """
    layout = find(name)
    if layout.like is not None and config and claimed_method(config) == name:
        return layout.like(config)
    assert layout.writer is not None, name
    return layout.writer()
