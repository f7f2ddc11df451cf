"""Names the numbers that lie beside quantized weights: scales of inputs, and of keys and values in a cache.

Sources: vLLM's `maybe_remap_kv_scale_name` (`model_loader/weight_utils.py`), the exporters of ModelOpt 0.47
(`export/quant_utils.py`) and llm-compressor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from qconvert.core.activations import StoredScale
from qconvert.core.dtypes import Json

FP8_CACHE = "FP8"
_CACHE = re.compile(r"(?P<module>.+?)(?:\.[kv]_proj)?\.(?P<which>[kv])_scale")
# How compressed-tensors, and ModelOpt in config.json, say that a cache holds E4M3 with a scale per tensor.
FP8_CACHE_SCHEME: Mapping[str, object] = {
    "dynamic": False,
    "num_bits": 8,
    "type": "float",
}


def cache_scale(name: str) -> StoredScale | None:
    """What `X.k_scale`, `X.k_proj.k_scale` and the same of values scale; None for other names."""
    match = _CACHE.fullmatch(name) if name.endswith("_scale") else None
    if match is None:
        return None
    return StoredScale("keys" if match["which"] == "k" else "values", match["module"])


def cache_format(settings: Json, *, has_scales: bool) -> str:
    """The format of the cache that quantization settings declare; FP8 for scales without a word of it."""
    said = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    nested = settings.get("quantization")
    if not said and isinstance(nested, dict):
        said = nested.get("kv_cache_quant_algo")
    if isinstance(said, str):
        return said.upper()
    if isinstance(said, dict):
        return FP8_CACHE if (said.get("type"), said.get("num_bits")) == ("float", 8) else "another format"
    return FP8_CACHE if has_scales else ""
