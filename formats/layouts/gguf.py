"""How tensors are spelled in a GGUF file: one array each, plain or as the bytes of GGML blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qconvert.gguf_types import GGMLType, GGUFTensor
from qconvert.interfaces import Part, Source
from qconvert.tensors import (
    BlockRows,
    Blocks,
    Dense,
    DType,
    Form,
    Json,
    Logical,
    Plain,
    Quantized,
    TensorSpec,
    Value,
)

if TYPE_CHECKING:
    import numpy as np

NAME = "gguf"


@dataclass(frozen=True, slots=True)
class Home:
    """Where a tensor's rows are: in which array, from which row on.

    `head_dim` is the size of the heads whose rows are interleaved there (`quant.heads`), None where
    they are in the model's order.
    """

    array: TensorSpec
    start: int = 0
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """Tensors as arrays of their own name, except those that `homes` says are elsewhere."""

    homes: Mapping[str, Home] = field(default_factory=dict)
    name: str = NAME
    transposed: bool = False

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The one array that holds a tensor, possibly among others."""
        home = self.homes.get(tensor.name)
        return (stored(tensor).stored if home is None else home.array,)

    def row_alignment(self, tensor: Logical) -> int:
        """Blocks never span rows."""
        return 1

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Rows [start, start + value.rows) as they are stored."""
        assert isinstance(value, Dense | BlockRows), value
        yield Part(tensor.name, start, value.rows_RI if isinstance(value, Dense) else value.bytes_RB)

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back."""
        home = self.homes.get(tensor.name) or Home(stored(tensor).stored)
        rows = _in_order(home, source, start, stop) if home.head_dim else _rows(home, source, start, stop)
        if isinstance(tensor.form, Plain):
            return Dense(rows, tensor.form.dtype)
        assert isinstance(tensor.form, Blocks), tensor.form
        return BlockRows(rows, tensor.form)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing: a GGUF file has its own metadata, and no config.json beside it."""
        return {}


def _rows(home: Home, source: Source, start: int, stop: int) -> np.ndarray:
    spec = source.specs[home.array.name]
    if spec.width != home.array.width:  # a vector that stands for a matrix of one row
        return source.read(spec.name, 0, spec.rows).reshape(1, -1)[start:stop]
    return source.read(spec.name, home.start + start, home.start + stop)


def _in_order(home: Home, source: Source, start: int, stop: int) -> np.ndarray:
    """Rows of interleaved heads in the model's order; whole heads are read for them."""
    from qconvert.quant.heads import part_halves

    assert home.head_dim is not None
    first, last = start // home.head_dim * home.head_dim, -(-stop // home.head_dim) * home.head_dim
    return part_halves(_rows(home, source, first, last), home.head_dim)[start - first : stop - first]


def type_of(form: Form) -> GGMLType:
    """The element type that stores a form, which must be a plain GGUF type or GGML blocks."""
    if isinstance(form, Blocks):
        return GGMLType[form.type]
    assert isinstance(form, Plain) and form.dtype is not DType.U8, form
    return GGMLType[form.dtype.code]


def stored(tensor: Logical) -> GGUFTensor:
    """The tensor record of a logical tensor."""
    return GGUFTensor(tensor.name, type_of(tensor.form), tensor.shape)


def llama3_scaling(theta: float, factor: float, factors_F: np.ndarray) -> Json | None:
    """How config.json spells the rotary scaling whose result is `rope_freqs.weight`, float32 [F].

    None for factors that no parameters of Llama 3's scaling give.
    """
    from qconvert.quant.rope import llama3_parameters

    found = llama3_parameters(theta, factor, factors_F)
    if found is None:
        return None
    low, high, context = found
    return {
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
