"""Writes the `quantization_config` of a compressed-tensors checkpoint as loaders want it filled in.

Sources: compressed-tensors 0.20, `quantization/quant_config.py`, `quant_scheme.py`, `quant_args.py`; the
configs that llm-compressor 0.14 writes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

from qconvert.core.activations import NO_SCALES, ScalesBeside
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Quantized, identity
from qconvert.formats.layouts.scales_beside import FP8_CACHE, FP8_CACHE_SCHEME

NAME = "compressed-tensors"
PACKED = "pack-quantized"
INT = "int-quantized"
FLOAT = "float-quantized"
MXFP4 = "mxfp4-pack-quantized"
NVFP4 = "nvfp4-pack-quantized"
FORMATS = (PACKED, INT, FLOAT, MXFP4, NVFP4)
# The release whose field names and bit packing these modules follow.
LIBRARY_VERSION = "0.20.0"
_CLASS = "Linear"
# The number of a layer in the name of a module.
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def format_of(encoding: Quantized, loose: Container[AffineInt] = ()) -> str:
    """The library's name for the way an encoding is stored; `loose` integers have a byte for each code."""
    if isinstance(encoding, Codebook):
        return {DType.F8_E8M0: MXFP4, DType.F8_E4M3: NVFP4}.get(encoding.scale_dtype, FLOAT)
    return INT if encoding in loose else PACKED


def quantization_config(
    quantized: Mapping[str, Quantized],
    kept_linears: Iterable[str],
    loose: Container[AffineInt] = (),
    scales: ScalesBeside = NO_SCALES,
) -> Json:
    """The `quantization_config` of a checkpoint whose modules `quantized` have these encodings.

    `kept_linears` are the linear modules left in 16 bit; loaders need their names to ignore them.
    One encoding for every linear is written as the class name "Linear" and the names of heads; anything else
    as one group per encoding, with regular expressions that cover exactly its modules. Modules whose inputs
    have a stored scale are in groups of their own.
    """
    ignore = sorted(set(kept_linears))
    by_encoding: dict[tuple[Quantized, bool], list[str]] = {}
    kinds: dict[tuple[int, bool], Quantized] = {}
    beside: list[str] = []
    embeds = False
    for module, encoding in quantized.items():  # once, for the names of half a million are made as they come
        kinds[identity(encoding), bool(scales.inputs) and module in scales.inputs] = encoding
        embeds = embeds or "embed" in module
        if not _NUMBER.search(module):
            beside.append(module)
    distinct = {(encoding, static) for (_, static), encoding in kinds.items()}
    uniform = len(distinct) == 1 and not embeds
    if uniform:  # those are named that need it
        by_encoding[distinct.pop()] = beside
    else:
        for module, encoding in quantized.items():
            by_encoding.setdefault((encoding, module in scales.inputs), []).append(module)
    groups = {
        f"group_{i}": {
            "targets": [_CLASS, *patterns(_beside_layers(modules))] if uniform else patterns(modules),
            "format": format_of(encoding, loose),
            "input_activations": _activations(encoding, loose, static=static),
            "output_activations": None,
            "weights": _weights_args(encoding),
        }
        for i, ((encoding, static), modules) in enumerate(by_encoding.items())
    }
    formats = {format_of(encoding, loose) for encoding, _ in by_encoding}
    return {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "version": LIBRARY_VERSION,
        "global_compression_ratio": None,
        "kv_cache_scheme": _cache(scales),
        "ignore": patterns(ignore) if len(ignore) > 8 else ignore,
        "config_groups": groups,
    }


def _beside_layers(modules: Iterable[str]) -> list[str]:
    """Those that belong to no layer, such as a head: vLLM's is none of the class that stands for linears."""
    return [module for module in modules if not _NUMBER.search(module)]


def _weights_args(encoding: Quantized) -> Json:
    assert not isinstance(encoding, AffineMin), encoding
    symmetric = isinstance(encoding, Codebook) or encoding.symmetric
    args: Json = {
        "num_bits": encoding.bits,
        "type": "float" if isinstance(encoding, Codebook) else "int",
        "symmetric": symmetric,
        "strategy": "channel" if encoding.group_size is None else "group",
        "group_size": encoding.group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
        **({} if symmetric else {"zp_dtype": "torch.int8"}),
    }
    return args | (_float_args(encoding) if isinstance(encoding, Codebook) else {})


def _float_args(encoding: Codebook) -> Json:
    if encoding.group_rows is None:
        return {"strategy": "tensor", "group_size": None}
    if encoding.group_rows > 1:
        blocks = [encoding.group_rows, encoding.group_size]
        return {"strategy": "block", "group_size": None, "block_structure": blocks}
    if encoding.scale_dtype is DType.F8_E8M0:
        return {"scale_dtype": "torch.uint8"}
    if encoding.second == "divided":
        return {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return {}


def _cache(scales: ScalesBeside) -> Json | None:
    if scales.cache != FP8_CACHE:
        return None
    return {**FP8_CACHE_SCHEME, "strategy": "tensor", "symmetric": True}


def _activations(encoding: Quantized, loose: Container[AffineInt], *, static: bool = False) -> Json | None:
    """8-bit activations, scaled as they come, for the formats that loaders run in 8 bits; `static` ones by
    what is stored, for NVFP4 a scale of scales that are those of the numbers at hand.
    """
    kind = format_of(encoding, loose)
    if static and kind == NVFP4:
        own: Json = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": "local"}
        scale = {"scale_dtype": "torch.float8_e4m3fn"}
        return own | {"strategy": "tensor_group", "group_size": encoding.group_size} | scale
    if static and kind == FLOAT:
        return {
            "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor",
            "group_size": None,
        }  # fmt: skip
    if kind not in (INT, FLOAT):
        return None
    by_block = isinstance(encoding, Codebook) and encoding.group_rows not in (1, None)
    return {
        "num_bits": 8,
        "type": "float" if kind == FLOAT else "int",
        "symmetric": True,
        "dynamic": True,
        "strategy": "group" if by_block else "token",
        "group_size": encoding.group_size if by_block else None,
    }


def patterns(modules: Iterable[str]) -> list[str]:
    """Regular expressions (`re:` targets) that match exactly these modules.

    Modules that differ only in their first number share one pattern that lists the numbers.
    """
    gathered: dict[tuple[str, str], list[str]] = {}
    plain: list[str] = []
    for module in modules:
        match = _NUMBER.search(module)
        if match:
            before, after = module[: match.start(1)], module[match.end(1) :]
            gathered.setdefault((before, after), []).append(match[1])
        else:
            plain.append(f"re:^{re.escape(module)}$")
    numbered = [
        f"re:^{re.escape(before)}({'|'.join(numbers)}){re.escape(after)}$"
        for (before, after), numbers in gathered.items()
    ]
    return plain + numbered
