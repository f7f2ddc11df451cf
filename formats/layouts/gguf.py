"""How tensors are spelled in a GGUF file: one array each, plain or as the bytes of GGML blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qconvert.gguf_types import GGMLType, GGUFTensor
from qconvert.tensors import (
    BlockRows,
    Blocks,
    Dense,
    DType,
    Form,
    Json,
    Logical,
    Part,
    Plain,
    Quantized,
    Source,
    TensorSpec,
    Value,
)

NAME = "gguf"


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """The layout as the runner sees it; it has no state."""

    name: str = NAME
    transposed: bool = False

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The one array of a tensor, as `GGUFTensor.stored` describes it."""
        return (stored(tensor).stored,)

    def row_alignment(self, tensor: Logical) -> int:
        """Blocks never span rows."""
        return 1

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Rows [start, start + value.rows) as they are stored."""
        assert isinstance(value, Dense | BlockRows), value
        yield Part(tensor.name, start, value.rows_RI if isinstance(value, Dense) else value.bytes_RB)

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        rows = source.read(tensor.name, start, stop)
        if isinstance(tensor.form, Plain):
            return Dense(rows, tensor.form.dtype)
        assert isinstance(tensor.form, Blocks), tensor.form
        return BlockRows(rows, tensor.form)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing: a GGUF file has its own metadata, and no config.json beside it."""
        return {}


def form_of(type_: GGMLType) -> Form:
    """The form of a tensor of this element type."""
    if type_.block == 1:
        return Plain(type_.dtype)
    return Blocks(type_.name, type_.block, type_.block_bytes)


def type_of(form: Form) -> GGMLType:
    """The element type that stores a form, which must be a plain GGUF type or GGML blocks."""
    if isinstance(form, Blocks):
        return GGMLType[form.type]
    assert isinstance(form, Plain) and form.dtype is not DType.U8, form
    return GGMLType[form.dtype.code]


def stored(tensor: Logical) -> GGUFTensor:
    """The tensor record of a logical tensor."""
    return GGUFTensor(tensor.name, type_of(tensor.form), tensor.shape)
