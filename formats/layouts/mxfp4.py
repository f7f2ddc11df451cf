"""The layout of gpt-oss: stacks of experts in MXFP4.

A stack `X` is `X_blocks` uint8 [E, N, K/32, 16] (two codes to a byte, the first one low) and `X_scales`
uint8 [E, N, K/32], exponents of two with bias 127. The logical tensor is [E, N, K], a row for each output;
transformers computes with the numbers as [E, K, N]. Rows of gate and up alternate along N and stay so.
Source: transformers 5.23 (`integrations/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.layouts.claims import check_claimed, check_parts, plain_rest, require
from qconvert.interfaces import Part, Source
from qconvert.tensors import Codebook, Coded, Dense, DType, Json, Logical, Plain, Quantized, TensorSpec, Value

NAME = "mxfp4"
BLOCK = 32


@dataclass(frozen=True, slots=True)
class MXFP4:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = False

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        form = tensor.form
        if isinstance(form, Plain):
            return (TensorSpec(tensor.name, form.dtype, tensor.shape),)
        if not _is_stack(tensor):
            raise BadRecipe(
                f"{tensor.name}: {form.label} {list(tensor.shape)}, but gpt-oss' layout holds stacks of "
                "experts in MXFP4 alone",
                "convert --to compressed-tensors",
            )
        blocks = (*tensor.shape[:-1], tensor.width // BLOCK)
        return (
            TensorSpec(f"{tensor.name}_blocks", DType.U8, (*blocks, BLOCK // 2)),
            TensorSpec(f"{tensor.name}_scales", DType.U8, blocks),
        )

    def row_alignment(self, tensor: Logical) -> int:
        """Rows are spelled one by one."""
        return 1

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Spell rows [start, start + value.rows)."""
        from qconvert.quant.nibbles import pack_nibbles

        if isinstance(value, Dense):
            yield Part(tensor.name, start, value.rows_RI)
            return
        assert isinstance(value, Coded)
        blocks = tensor.width // BLOCK
        packed = pack_nibbles(value.codes_RI).reshape(-1, BLOCK // 2)
        yield Part(f"{tensor.name}_blocks", start * blocks, packed)
        yield Part(f"{tensor.name}_scales", start, value.scales_RG)

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        from qconvert.quant.nibbles import unpack_nibbles

        if isinstance(tensor.form, Plain):
            return Dense(source.read(tensor.name, start, stop), tensor.form.dtype)
        assert isinstance(tensor.form, Codebook)
        blocks = tensor.width // BLOCK
        bytes_BC = source.read(f"{tensor.name}_blocks", start * blocks, stop * blocks)
        codes_RI = unpack_nibbles(bytes_BC).reshape(-1, tensor.width)
        return Coded(codes_RI, source.read(f"{tensor.name}_scales", start, stop), tensor.form)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says: everything but the experts is as it is."""
        return {"quantization_config": {"quant_method": NAME, "modules_to_not_convert": sorted(kept)}}


def _is_stack(tensor: Logical) -> bool:
    form = tensor.form
    if not isinstance(form, Codebook) or len(tensor.shape) != 3:
        return False
    return (form.table, form.group_size, form.scale_dtype) == ("e2m1", BLOCK, DType.F8_E8M0)


def open_mxfp4(source: Source, config: Json) -> tuple[MXFP4, dict[str, Logical]]:
    """The layout of a checkpoint and its logical tensors, by the names of the 16-bit model."""
    found: dict[str, Logical] = {}
    used: set[str] = set()
    for array, spec in source.specs.items():
        if not array.endswith("_blocks"):
            continue
        name = array.removesuffix("_blocks")
        scales = require(source, f"{name}_scales", f"{array} is there")
        if len(spec.shape) != 4:
            raise CorruptCheckpoint(f"{array}: {list(spec.shape)}, not [experts, outputs, blocks, 16]")
        experts, outputs, blocks, _ = spec.shape
        form = Codebook("e2m1", BLOCK, DType.F8_E8M0, DType.BF16)
        found[name] = check_parts(MXFP4(), Logical(name, (experts, outputs, blocks * BLOCK), form), source)
        used |= {array, scales.name}
    found = plain_rest(source, used, found)
    check_claimed(found, NAME, "_blocks")
    return MXFP4(), found
