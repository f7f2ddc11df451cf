"""The layout of gpt-oss: stacks of experts in MXFP4.

A stack `X` is `X_blocks` uint8 [E, N, K/32, 16] (two codes to a byte, the first one low) and `X_scales`
uint8 [E, N, K/32], exponents of two with bias 127. The logical tensor is [E, N, K], a row for each output;
transformers computes with the numbers as [E, K, N]. Rows of gate and up alternate along N and stay so.
Source: transformers 5.23 (`integrations/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, ModelTensor, Quantized, Unquantized
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.values import CodebookRows, DenseRows, Value
from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.layouts.config_checks import check_claimed, check_parts, plain_rest, require

NAME = "mxfp4"
BLOCK = 32


@dataclass(frozen=True, slots=True)
class MXFP4:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = False

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        encoding = tensor.encoding
        if isinstance(encoding, Unquantized):
            return (TensorSpec(tensor.name, encoding.dtype, tensor.shape),)
        if not _is_stack(tensor):
            raise BadRecipe(
                f"{tensor.name}: {encoding.label} {list(tensor.shape)}, but gpt-oss' layout holds stacks of "
                "experts in MXFP4 alone",
                "convert --to compressed-tensors",
            )
        blocks = (*tensor.shape[:-1], tensor.width // BLOCK)
        return (
            TensorSpec(f"{tensor.name}_blocks", DType.U8, (*blocks, BLOCK // 2)),
            TensorSpec(f"{tensor.name}_scales", DType.U8, blocks),
        )

    def row_alignment(self, tensor: ModelTensor) -> int:
        """Rows are spelled one by one."""
        return 1

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        """Spell rows [start, start + value.rows)."""
        from qconvert.quant.nibbles import pack_nibbles

        if isinstance(value, DenseRows):
            yield ArrayRows(tensor.name, start, value.rows_RI)
            return
        assert isinstance(value, CodebookRows)
        blocks = tensor.width // BLOCK
        packed = pack_nibbles(value.codes_RI).reshape(-1, BLOCK // 2)
        yield ArrayRows(f"{tensor.name}_blocks", start * blocks, packed)
        yield ArrayRows(f"{tensor.name}_scales", start, value.scales_RG)

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        from qconvert.quant.nibbles import unpack_nibbles

        if isinstance(tensor.encoding, Unquantized):
            return DenseRows(source.read(tensor.name, start, stop), tensor.encoding.dtype)
        assert isinstance(tensor.encoding, Codebook)
        blocks = tensor.width // BLOCK
        bytes_BC = source.read(f"{tensor.name}_blocks", start * blocks, stop * blocks)
        codes_RI = unpack_nibbles(bytes_BC).reshape(-1, tensor.width)
        return CodebookRows(codes_RI, source.read(f"{tensor.name}_scales", start, stop), tensor.encoding)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says: everything but the experts is as it is."""
        return {"quantization_config": {"quant_method": NAME, "modules_to_not_convert": sorted(kept)}}


def _is_stack(tensor: ModelTensor) -> bool:
    encoding = tensor.encoding
    if not isinstance(encoding, Codebook) or len(tensor.shape) != 3:
        return False
    return (encoding.table, encoding.group_size, encoding.scale_dtype) == ("e2m1", BLOCK, DType.F8_E8M0)


def open_mxfp4(source: Source, config: Json) -> tuple[MXFP4, dict[str, ModelTensor]]:
    """The layout of a checkpoint and its logical tensors, by the names of the 16-bit model."""
    found: dict[str, ModelTensor] = {}
    used: set[str] = set()
    for array, spec in source.specs.items():
        if not array.endswith("_blocks"):
            continue
        name = array.removesuffix("_blocks")
        scales = require(source, f"{name}_scales", f"{array} is there")
        if len(spec.shape) != 4:
            raise CorruptCheckpoint(f"{array}: {list(spec.shape)}, not [experts, outputs, blocks, 16]")
        experts, outputs, blocks, _ = spec.shape
        encoding = Codebook("e2m1", BLOCK, DType.F8_E8M0, DType.BF16)
        found[name] = check_parts(
            MXFP4(), ModelTensor(name, (experts, outputs, blocks * BLOCK), encoding), source
        )
        used |= {array, scales.name}
    found = plain_rest(source, used, found)
    check_claimed(found, NAME, "_blocks")
    return MXFP4(), found
