"""Describes how torchao rebuilds its classes: the metadata of files, and the settings in config.json.

Sources: torchao 0.18 (`prototype/safetensors`, `core/config.py`), transformers 5.23
(`integrations/torchao.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import AffineMin, Codebook, ModelTensor, Quantized
from qconvert.formats.layouts.config_checks import matrix_shape

_TORCH = {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}
_ROWS = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_CHANNEL = {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
_GROUPS = {"_type": "PerGroup", "_version": 1}
_TENSOR = {"_type": "PerTensor", "_version": 1, "_data": {}}


def file_metadata(tensors: Iterable[ModelTensor], computed: DType) -> dict[str, str]:
    """The class of every tensor, as its readers want it in the header of each file.

    A class has the attributes that rebuild it from its arrays; `computed` is the type it multiplies in.
    """
    made = {tensor.name: json.dumps(_class(tensor, computed)) for tensor in tensors}
    return {**made, "tensor_names": json.dumps(list(made))}


def _class(tensor: ModelTensor, computed: DType) -> Json:
    encoding = tensor.encoding
    if not isinstance(encoding, Quantized):
        return {"_type": "Tensor"}
    rows, width = matrix_shape(tensor, "torchao")
    if isinstance(encoding, Codebook):
        block = [rows if encoding.group_rows is None else encoding.group_rows, encoding.group_size or width]
        attributes = {
            "block_size": block,
            "mm_config": None,
            "act_quant_kwargs": None,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
            "dtype": _dtype(_TORCH[computed]),
        }
        return _made("Float8Tensor", attributes, "qdata", "scale")
    block = [1, encoding.group_size or width]
    if isinstance(encoding, AffineMin):
        attributes = {"activation_dtype": _dtype("bfloat16"), "block_size": block, "shape": [rows, width]}
        return _made("Int4Tensor", attributes, "qdata", "scale", "zero_point")
    attributes = {
        "target_dtype": _dtype(f"int{encoding.bits}"),
        "block_size": block,
        "dtype": _dtype(_TORCH[computed]),
        "activation_quantization": None,
    }
    return _made("IntxUnpackedToInt8Tensor", attributes, "qdata", "scale", "zero_point")


def _made(name: str, attributes: Json, *arrays: str) -> Json:
    return {"_type": name, "_data": attributes, "_tensor_data_names": list(arrays)}


def _dtype(name: str) -> Json:
    return {"_type": "torch.dtype", "_data": name}


def quantization_config(quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
    """The settings of these modules: one for all, or one for each where they differ."""
    said = {encoding: _config(encoding) for encoding in quantized.values()}
    configs = {module: said[encoding] for module, encoding in quantized.items()}
    first = next(iter(configs.values()))
    if any(config != first for config in configs.values()):
        most = Counter(quantized.values()).most_common(1)[0][0]
        configs["_default"] = said[most]  # of what vLLM stacks: it looks the stack's name up
        each = {"fqn_to_config": configs, "module_fqn_to_config": configs}
        first = {"_type": "FqnToConfig", "_version": 1, "_data": each}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": first},
        "modules_to_not_convert": sorted(kept) or None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _config(encoding: Quantized) -> Json:
    """What makes a class of this encoding from numbers, weights alone."""
    if isinstance(encoding, AffineMin):
        data: Json = {
            "group_size": encoding.group_size,
            "set_inductor_config": True,
            "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"},
        }
        return {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}
    if isinstance(encoding, Codebook):
        data = {
            "weight_dtype": _dtype("float8_e4m3fn"),
            "set_inductor_config": True,
            "granularity": _TENSOR if encoding.group_rows is None else _ROWS,
        }
        return {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": data}
    size = encoding.group_size
    data = {
        "weight_dtype": _dtype(f"int{encoding.bits}"),
        "granularity": _CHANNEL if size is None else {**_GROUPS, "_data": {"group_size": size}},
        "mapping_type": {
            "_type": "MappingType",
            "_data": "SYMMETRIC" if encoding.symmetric else "ASYMMETRIC",
        },
        "scale_dtype": None,
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        "intx_choose_qparams_algorithm": {"_type": "IntxChooseQParamsAlgorithm", "_data": "AFFINE"},
    }
    return {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": data}
