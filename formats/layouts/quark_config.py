"""Writes the settings of AMD Quark: how weights and inputs of every linear are quantized, in its own words.

Sources: amd-quark 0.13 (`torch/quantization/config/config.py`: QConfig.to_dict, and what it wrote), vLLM 0.32
(`quantization/quark/quark.py`: which of them it runs).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qconvert.core.dtypes import Json
from qconvert.core.encodings import AffineInt, Codebook, Quantized

INPUT_SCALE = "input_scale"
_VERSION = "0.13"
_OBSERVERS = {
    "per_tensor": "PerTensorMinMaxObserver",
    "per_channel": "PerChannelMinMaxObserver",
    "per_group": "PerGroupMinMaxObserver",
}


def quantization_config(
    quantized: Mapping[str, Quantized], kept: Collection[str], static: Collection[str]
) -> Json:
    """The `quantization_config` of a model whose modules `quantized` have these encodings.

    `kept` are linears that stay plain, `static` modules whose inputs have a stored scale. What most modules
    have is said once, of the others one by one.
    """
    forms = {module: _form(encoding, module in static) for module, encoding in quantized.items()}
    texts = [str(form) for form in forms.values()]
    most = max(forms.values(), key=lambda form: texts.count(str(form)))
    return {
        "algo_config": None,
        "exclude": sorted(kept),
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": most,
        "kv_cache_post_rope": False,
        "kv_cache_quant_config": {},
        "layer_quant_config": {module: form for module, form in forms.items() if form != most},
        "layer_type_quant_config": {},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "softmax_quant_spec": None,
        "version": _VERSION,
    }


def _form(encoding: Quantized, static: bool) -> Json:
    """What is said of a linear: its weight, and its inputs, whose scales are stored if `static`."""
    weight, inputs = _weight(encoding), None
    if encoding.bits == 8:
        inputs = _spec(weight["dtype"], "per_tensor") if static else None
        inputs = inputs or _spec(weight["dtype"], "per_channel", ch_axis=1, is_dynamic=True)
    return {
        "bias": None,
        "input_tensors": inputs,
        "output_tensors": None,
        "target_device": None,
        "weight": weight,
    }


def _weight(encoding: Quantized) -> Json:
    if isinstance(encoding, AffineInt) and encoding.bits == 4:
        kind = "int4" if encoding.symmetric else "uint4"
        return _spec(
            kind, "per_group", ch_axis=1, group_size=encoding.group_size, symmetric=encoding.symmetric
        )
    if isinstance(encoding, AffineInt):
        return _spec("int8", "per_channel", ch_axis=0)
    assert isinstance(encoding, Codebook)
    if encoding.is_mxfp4:
        own: dict[str, Any] = {"observer_cls": "PerBlockMXObserver", "symmetric": None}
        own |= {"scale_format": "e8m0", "scale_calculation_mode": "even"}
        return _spec("fp4", "per_group", ch_axis=-1, group_size=encoding.group_size, **own)
    return (
        _spec("fp8_e4m3", "per_tensor")
        if encoding.group_rows is None
        else _spec("fp8_e4m3", "per_channel", ch_axis=0)
    )


def _spec(dtype: str, qscheme: str, **own: Any) -> Json:
    """What is said of a tensor (`QTensorConfig`)."""
    made = {
        "block_size": None,
        "ch_axis": None,
        "dtype": dtype,
        "enable_buffer_reuse": False,
        "group_size": None,
        "is_dynamic": False,
        "is_scale_quant": False,
        "max_input_numel": 4194304,
        "mx_element_dtype": None,
        "observer_cls": _OBSERVERS[qscheme],
        "qscheme": qscheme,
        "round_method": "half_even",
        "scale_calculation_mode": None,
        "scale_format": None,
        "scale_type": None if (qscheme, dtype) == ("per_tensor", "fp8_e4m3") else "float",
        "symmetric": True,
        "zero_point_type": "int32",
    }
    return made | own
