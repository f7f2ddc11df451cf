"""The layout of gpt-oss: stacks of experts in MXFP4.

A stack `X` is `X_blocks` uint8 [E, N, K/32, 16] (two codes to a byte, the first one low) and `X_scales`
uint8 [E, N, K/32], exponents of two with bias 127. The model computes with the stack as [E, K, N], which
is the logical tensor here: its rows run over inputs, so one scale serves 32 rows of one column. Rows of
gate and up alternate along N and stay so. Source: transformers 5.23 (`integrations/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.layouts.claims import check_claimed, check_parts, plain_rest, require
from qconvert.interfaces import Part, Source
from qconvert.tensors import Codebook, Coded, Dense, DType, Json, Logical, Plain, Quantized, TensorSpec, Value

NAME = "mxfp4"
BLOCK = 32


@dataclass(frozen=True, slots=True)
class MXFP4:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = True

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that spell a tensor, in the order they are written."""
        form = tensor.form
        if isinstance(form, Plain):
            return (TensorSpec(tensor.name, form.dtype, tensor.shape),)
        experts, inputs, outputs = tensor.shape
        blocks = (experts, outputs, inputs // BLOCK)
        return (
            TensorSpec(f"{tensor.name}_blocks", DType.U8, (*blocks, BLOCK // 2)),
            TensorSpec(f"{tensor.name}_scales", DType.U8, blocks),
        )

    def row_alignment(self, tensor: Logical) -> int:
        """An expert is written as a whole: its rows are spread over all of its blocks."""
        return 1 if isinstance(tensor.form, Plain) else tensor.shape[1]

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Spell the experts that rows [start, start + value.rows) make up."""
        from qconvert.quant.nibbles import pack_nibbles

        if isinstance(value, Dense):
            yield Part(tensor.name, start, value.rows_RI)
            return
        assert isinstance(value, Coded)
        _, inputs, outputs = tensor.shape
        codes_EKN = value.codes_RI.reshape(-1, inputs, outputs)
        codes_BC = np.ascontiguousarray(codes_EKN.swapaxes(1, 2)).reshape(-1, BLOCK)
        scales_EKN = value.scales_RG.reshape(-1, inputs, outputs)[:, ::BLOCK]
        scales_NK = np.ascontiguousarray(scales_EKN.swapaxes(1, 2)).reshape(-1, inputs // BLOCK)
        blocks = start // inputs * outputs
        yield Part(f"{tensor.name}_blocks", blocks * (inputs // BLOCK), pack_nibbles(codes_BC))
        yield Part(f"{tensor.name}_scales", blocks, scales_NK)

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back, from whole experts."""
        if isinstance(tensor.form, Plain):
            return Dense(source.read(tensor.name, start, stop), tensor.form.dtype)
        assert isinstance(tensor.form, Codebook)
        inputs = tensor.shape[1]
        first, last = start // inputs, -(-stop // inputs)
        experts = [_expert(tensor, source, expert) for expert in range(first, last)]
        rows = slice(start - first * inputs, stop - first * inputs)
        codes_RN = np.concatenate([codes_KN for codes_KN, _ in experts])[rows]
        scales_RN = np.concatenate([scales_KN for _, scales_KN in experts])[rows]
        return Coded(codes_RN, scales_RN, tensor.form)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """What config.json says: everything but the experts is as it is."""
        return {"quantization_config": {"quant_method": NAME, "modules_to_not_convert": sorted(kept)}}


def _expert(tensor: Logical, source: Source, expert: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one expert, each [inputs, outputs]."""
    from qconvert.quant.nibbles import unpack_nibbles

    _, inputs, outputs = tensor.shape
    rows = outputs * (inputs // BLOCK)
    bytes_BC = source.read(f"{tensor.name}_blocks", expert * rows, (expert + 1) * rows)
    codes_NK = unpack_nibbles(bytes_BC).reshape(outputs, inputs)
    scales_NB = source.read(f"{tensor.name}_scales", expert * outputs, (expert + 1) * outputs)
    return np.ascontiguousarray(codes_NK.T), np.repeat(scales_NB.T, BLOCK, axis=0)


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
        form = Codebook("e2m1", 1, DType.F8_E8M0, DType.BF16, group_rows=BLOCK)
        found[name] = check_parts(MXFP4(), Logical(name, (experts, blocks * BLOCK, outputs), form), source)
        used |= {array, scales.name}
    found = plain_rest(source, used, found)
    check_claimed(found, NAME, "_blocks")
    return MXFP4(), found
