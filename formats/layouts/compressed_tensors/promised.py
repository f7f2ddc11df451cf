"""Determines the encodings of a compressed-tensors model from its `quantization_config`, without its arrays.

Source: compressed-tensors 0.20, `quantization/quant_args.py`, `quant_scheme.py`, `utils/match.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, Promise
from qconvert.formats.layouts.compressed_tensors.activations import LINEARS, group_finder, groups_of
from qconvert.formats.layouts.compressed_tensors.arrays import CompressedTensors, EightBits
from qconvert.formats.layouts.compressed_tensors.config import INT
from qconvert.formats.layouts.compressed_tensors.reading import check_format


def promise(config: Json) -> Promise:
    """What `config_groups` and `ignore` say of linears and the head; routers are assumed to be plain."""
    settings, decoded = checks.settings_of(config), checks.dtype_of(config)
    check_format(settings)
    formats = {group.get("format") or settings.get("format") for group in groups_of(settings)}
    layout = CompressedTensors(EightBits() if INT in formats else frozenset())

    find, find_named = group_finder(settings), group_finder(_named_alone(settings))

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> AffineInt | Codebook | None:
        if kind == "router":
            return None
        group = (find_named if kind == "embedding" else find)(checks.base_of(tensor))
        weights = group.get("weights")
        return _encoding(tensor, weights, decoded) if isinstance(weights, dict) else None

    return Promise(layout, encoding)


def _named_alone(settings: Json) -> Json:
    """The settings without the class of linears, which embeddings are not of."""
    groups = [dict(group) for group in groups_of(settings)]
    for group in groups:
        targets = group.get("targets")
        named = targets if isinstance(targets, list) else []
        group["targets"] = [target for target in named if target != LINEARS]
    return settings | {"config_groups": dict(enumerate(groups))}


def _encoding(tensor: ModelTensor, weights: Mapping[str, object], dtype: DType) -> AffineInt | Codebook:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size, block = weights.get("group_size"), weights.get("block_structure")
    if strategy is None:
        strategy = "tensor" if size in (None, -1) else "group"
    in_groups = strategy in ("group", "tensor_group")
    if kind == "int" and type(bits) is int and 2 <= bits <= 8 and (in_groups or strategy == "channel"):
        group = checks.said_group(tensor, size) if in_groups else None
        return AffineInt(bits, group, weights.get("symmetric", True) is not False, dtype)
    if kind == "float" and bits == 4 and in_groups and size in (16, 32):
        if size == 32:
            return Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16)
        return Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided")
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel"):
        return Codebook("e4m3", None, dtype, DType.BF16, group_rows=None if strategy == "tensor" else 1)
    if kind == "float" and bits == 8 and strategy == "block" and isinstance(block, list) and len(block) == 2:
        return Codebook("e4m3", block[1], dtype, DType.BF16, group_rows=block[0])
    raise UnsupportedModel(
        f"config.json: weights of {shown(bits)} bits, {shown(kind)} by {shown(strategy)}: see the headers",
        "give the whole model folder, or its name on the Hub",
    )
