"""Reads and writes the settings of ModelOpt: `quantization_config`, and the file that repeats them.

Sources: ModelOpt 0.47 (`export/convert_hf_config.py`, `quant_utils.py`: `process_layer_quant_config`), vLLM's
`quantization/modelopt.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qconvert.core.activations import ActivationScheme, ScalesBeside
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Quantized
from qconvert.formats.layouts.config_checks import base_of, settings_of
from qconvert.formats.layouts.scales_beside import FP8_CACHE, FP8_CACHE_SCHEME

NAME = "modelopt"
SETTINGS_FILE = "hf_quant_config.json"
# The release whose field names these modules follow.
_PRODUCER: Mapping[str, str] = {"name": NAME, "version": "0.47.0"}
MIXED = "MIXED_PRECISION"
FP8, FP8_ROWS, FP8_BLOCKS, MXFP8 = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"
NVFP4, NVFP4_WEIGHTS, INT4, MXFP4 = "NVFP4", "W4A16_NVFP4", "W4A16_AWQ", "W4A8_MXFP4_FP8"
# What both files call the same.
_REPEATED = ("group_size", "has_zero_point", "pre_quant_scale", "quantized_layers")
# Algorithms whose inputs have a stored scale.
STATIC = frozenset({FP8, NVFP4, "NVFP4_AWQ"})


def algorithm_of(encoding: Quantized, *, static: bool) -> str:
    """ModelOpt's name for weights of an encoding, with a scale of their inputs or without."""
    if not isinstance(encoding, Codebook):
        return INT4
    if encoding.is_nvfp4:
        return NVFP4 if static else NVFP4_WEIGHTS
    if encoding.bits == 4:
        return MXFP4
    if encoding.group_size is None:
        return FP8 if encoding.group_rows is None else FP8_ROWS
    return MXFP8 if encoding.scale_dtype is DType.F8_E8M0 else FP8_BLOCKS


def quantization_config(
    quantized: Mapping[str, Quantized], kept_linears: Iterable[str], scales: ScalesBeside
) -> Json:
    """The `quantization_config` of a checkpoint whose modules `quantized` have these encodings."""
    layers = {
        module: _layer(encoding, static=module in scales.inputs) for module, encoding in quantized.items()
    }
    kinds = list({str(layer): layer for layer in layers.values()}.values())
    made: Json = {}
    if len(kinds) == 1:
        made |= _groups([(kinds[0], ["Linear"])]) | kinds[0]
    else:
        named = [(kind, [module for module, layer in layers.items() if layer == kind]) for kind in kinds]
        made |= _groups(named) | {"quant_algo": MIXED, "quantized_layers": layers}
    made["ignore"] = sorted(set(kept_linears))
    if scales.cache:
        made["kv_cache_scheme"] = dict(FP8_CACHE_SCHEME) if scales.cache == FP8_CACHE else scales.cache
    return made | {"producer": dict(_PRODUCER), "quant_method": NAME}


def _layer(encoding: Quantized, *, static: bool) -> Json:
    algorithm = algorithm_of(encoding, static=static)
    if isinstance(encoding, AffineInt):
        return {
            "quant_algo": algorithm, "group_size": encoding.group_size, "has_zero_point": False,
            "pre_quant_scale": False,
        }  # fmt: skip
    grouped = encoding.bits == 4 or algorithm == MXFP8
    return {"quant_algo": algorithm} | ({"group_size": encoding.group_size} if grouped else {})


def _groups(kinds: Iterable[tuple[Json, list[str]]]) -> Json:
    """The part that says it again in the words of compressed-tensors, as ModelOpt writes it."""
    found = {f"group_{i}": _group(kind, targets) for i, (kind, targets) in enumerate(kinds)}
    return {"config_groups": found} if all(found.values()) else {}


def _group(kind: Json, targets: list[str]) -> Json:
    algorithm = kind["quant_algo"]
    if algorithm not in (FP8, NVFP4, NVFP4_WEIGHTS):
        return {}
    bits: Json = {"dynamic": False, "num_bits": 8 if algorithm == FP8 else 4, "type": "float"}
    bits |= {"group_size": kind["group_size"]} if algorithm != FP8 else {}
    inputs: Json = {} if algorithm == NVFP4_WEIGHTS else {"input_activations": bits}
    return {**inputs, "weights": bits, "targets": sorted(targets)}


def settings_file(settings: Json) -> Json:
    """What the file beside config.json holds of these settings."""
    cache = settings.get("kv_cache_scheme")
    said: Json = {
        "quant_algo": settings["quant_algo"],
        "kv_cache_quant_algo": FP8_CACHE if isinstance(cache, dict) else cache,
        "exclude_modules": settings["ignore"],
    }
    said |= {key: settings[key] for key in _REPEATED if key in settings}
    return {"producer": settings["producer"], "quantization": said}


def algorithm(settings: Json, module: str) -> str:
    """The algorithm that settings, of either file, name for a module; "" where they name none."""
    nested = settings.get("quantization")
    said = nested if isinstance(nested, dict) else settings
    found = str(said.get("quant_algo") or "").upper()
    layers = said.get("quantized_layers")
    if found != MIXED or not isinstance(layers, dict):
        return found
    while module and module not in layers:
        module = module.rpartition(".")[0]
    layer = layers.get(module)
    return str(layer.get("quant_algo") or "").upper() if isinstance(layer, dict) else ""


def activations(config: Json, tensor: ModelTensor) -> ActivationScheme | None:
    """How loaders quantize the inputs of the linear with this weight; None where they do not."""
    encoding = tensor.encoding
    if not isinstance(encoding, Codebook):
        return None
    named = algorithm(settings_of(config), base_of(tensor))
    if encoding.is_nvfp4:
        stored = ("input_scale",)
        local = ActivationScheme(4, True, "group", 16, scale_dtype=DType.F8_E4M3, stored=stored, inverse=True)
        return local if named in STATIC else None
    if encoding.bits == 4:
        return None
    if encoding.group_rows is None:
        return ActivationScheme(8, True, "tensor", dynamic=False, stored=("input_scale",))
    if encoding.group_size is None:
        return ActivationScheme(8, True, "token")
    exponents = DType.F8_E8M0 if encoding.scale_dtype is DType.F8_E8M0 else DType.F32
    return ActivationScheme(8, True, "group", encoding.group_size, scale_dtype=exponents)
