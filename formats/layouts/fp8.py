"""The layout of block-scaled FP8 checkpoints, as published for DeepSeek-V3 and Qwen3.

A quantized `X.weight` [N, K] is `X.weight` F8_E4M3 [N, K] and `X.weight_scale_inv` [ceil(N/128),
ceil(K/128)], f32 or bf16, which is multiplied by, whatever its name says. A stack of experts is a
parameter `X` [E, N, K] with `X_scale_inv`, as transformers' `FP8Experts` holds it. Sources: transformers 5.23
(`integrations/finegrained_fp8.py`), config.json of Qwen3-8B-FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows, DenseRows, Value
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.layouts.codebook_arrays import CodedArrays
from qconvert.formats.layouts.config_checks import (
    check_claimed,
    check_parts,
    dtype_of,
    plain_rest,
    require,
    settings_of,
)
from qconvert.formats.layouts.single_setting import only_form

NAME = "fp8"
BLOCK = 128
_CODED = CodedArrays("weight", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class FP8:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = False

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        encoding = tensor.encoding
        if isinstance(encoding, Unquantized):
            return (TensorSpec(tensor.name, encoding.dtype, tensor.shape),)
        return _CODED.stored_arrays(tensor)

    def row_alignment(self, tensor: ModelTensor) -> int:
        """The rows of a block share its scales."""
        return 1 if isinstance(tensor.encoding, Unquantized) else _CODED.row_alignment(tensor)

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        """Spell rows [start, start + value.rows); `start` is a multiple of the row alignment."""
        if isinstance(value, DenseRows):
            yield ArrayRows(tensor.name, start, value.rows_RI)
        else:
            assert isinstance(value, CodebookRows)
            yield from _CODED.encode(tensor, start, value)

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        if isinstance(tensor.encoding, Unquantized):
            return DenseRows(source.read(tensor.name, start, stop), tensor.encoding.dtype)
        return _CODED.decode(tensor, source, start, stop)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says about modules of these forms, of which all linears have one."""
        encoding = only_form(quantized, NAME)
        settings = {
            "quant_method": NAME,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, encoding.group_size],
            "modules_to_not_convert": sorted(kept) or None,
        }
        return {"quantization_config": settings}


def open_fp8(source: Source, config: Json) -> tuple[FP8, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by HF weight name."""
    settings = settings_of(config)
    block = settings.get("weight_block_size")
    square = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not square or settings.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedModel(
            f"config.json: fp8 with fmt {shown(settings.get('fmt'))} and weight_block_size {shown(block)} is "
            "not read here",
            "save it again as e4m3 in blocks such as [128, 128], which are read",
        )
    assert isinstance(block, list)
    decoded = dtype_of(config)
    found: dict[str, ModelTensor] = {}
    used: set[str] = set()
    for name, spec in source.specs.items():
        if spec.dtype is not DType.F8_E4M3:
            continue
        scales = require(source, f"{name}_scale_inv", f"{name} is {spec.dtype.label}")
        if len(spec.shape) not in (2, 3) or not scales.dtype.is_float:
            raise CorruptCheckpoint(
                f"{scales.name}: {scales.dtype.label} scales of {list(spec.shape)} weights"
            )
        encoding = Codebook("e4m3", block[1], scales.dtype, decoded, group_rows=block[0])
        found[name] = check_parts(FP8(), ModelTensor(name, spec.shape, encoding), source)
        used |= {name, scales.name}
    found = plain_rest(source, used, found)
    check_claimed(found, NAME, "weight_scale_inv")
    return FP8(), found
