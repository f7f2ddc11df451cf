"""Stores tensors in a GGUF file: one array each, plain or as the bytes of GGML blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.encodings import Codebook, Encoding, GgmlBlocks, ModelTensor, Quantized, Unquantized
from qconvert.core.ggml_types import GGMLType, GGUFTensor
from qconvert.core.layout_traits import LayoutTraits
from qconvert.core.protocols import ArrayRows, Source
from qconvert.core.row_transforms import RowTransform
from qconvert.core.values import CodebookRows, DenseRows, GgmlRows, Value
from qconvert.formats.layouts.base import NoScalesBeside
from qconvert.ops import op_of

if TYPE_CHECKING:
    import numpy as np

NAME = "gguf"
_TRAITS = LayoutTraits(NAME)
# Steps that move whole rows, whatever they are stored as, and those that move numbers.
_MOVES_ROWS = ("interleave_halves",)
_MOVES_NUMBERS = (*_MOVES_ROWS, "transpose", "swap_groups")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of a tensor of the model that lie in one array of the file.

    `rows` are their numbers in the tensor. Before its `step` the array had rows of `width` numbers, of
    which the one at `start` is the first of these. `encoding` is what the array holds, of which every
    number is to be multiplied by `factor`.
    """

    rows: range
    array: TensorSpec
    encoding: Encoding
    start: int
    width: int
    step: RowTransform | None = None
    factor: float = 1.0

    @property
    def encoding_back(self) -> Encoding:
        """The encoding of the rows when the step is undone."""
        if self.step is not None and self.step.change == "int32":
            return Unquantized(DType.I64)
        plain = isinstance(self.encoding, Unquantized)
        keeps = _MOVES_NUMBERS if plain else _MOVES_ROWS
        if self.step is not None and self.step.change not in keeps:
            return Unquantized(DType.F32)
        return self.encoding if self.factor == 1 or plain else _DIVIDED


Home = tuple[Stretch, ...]
# NVFP4 with a factor for the whole tensor beside it, which other formats have as a divisor.
_DIVIDED = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided")


def form_of(home: Home) -> Encoding:
    """The encoding of a tensor with this home: that of all its rows, or float32 where they differ."""
    encodings = {(stretch.encoding_back, stretch.factor) for stretch in home}
    return encodings.pop()[0] if len(encodings) == 1 else Unquantized(DType.F32)


@dataclass(frozen=True, slots=True)
class GGUFLayout(NoScalesBeside):
    """Tensors as arrays of their own name, except those that `homes` says are elsewhere."""

    homes: Mapping[str, Home] = field(default_factory=dict)
    name: str = NAME
    traits: LayoutTraits = _TRAITS
    transposed: bool = False
    named_by: None = None

    @property
    def computed(self) -> dict[str, str]:
        """The tensors whose plain numbers are computed as they are read, and from what.

        The labels of their blocks; "" for numbers that the file has in another place of a formula.
        """
        found = {}
        for name, home in self.homes.items():
            if isinstance(form_of(home), Unquantized):
                blocks = {s.encoding.label for s in home if not isinstance(s.encoding, Unquantized)}
                if blocks or any(s.step is not None and s.step.change not in _MOVES_NUMBERS for s in home):
                    found[name] = ", ".join(sorted(blocks))
        return found

    def stored_arrays(self, tensor: ModelTensor) -> tuple[TensorSpec, ...]:
        home = self.homes.get(tensor.name)
        if home is None:
            return (stored(tensor).stored,)
        return tuple({stretch.array.name: stretch.array for stretch in home}.values())

    def row_alignment(self, tensor: ModelTensor) -> int:
        """Blocks never span rows."""
        return 1

    def encode(self, tensor: ModelTensor, start: int, value: Value) -> Iterator[ArrayRows]:
        assert isinstance(value, DenseRows | GgmlRows), value
        yield ArrayRows(tensor.name, start, value.rows_RI if isinstance(value, DenseRows) else value.bytes_RB)

    def as_stored(self, value: Value) -> Value:
        return value

    def decode(self, tensor: ModelTensor, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back, in the model's order and as its numbers."""
        home = self.homes.get(tensor.name)
        if home is None:
            return _value(source.read(stored(tensor).name, start, stop), tensor.encoding)
        found: list[tuple[range, np.ndarray]] = []
        for stretch in home:
            # Which of its rows lie in [start, stop): the first of them, and the one behind the last.
            own = stretch.rows
            first = min(len(own), max(0, -((own.start - start) // own.step)))
            last = max(first, min(len(own), -((own.start - stop) // own.step)))
            if first < last or (start == stop and not found):
                rows = _read(stretch, tensor.encoding, source, first, last)
                found.append((stretch.rows[first:last], rows))
        return _value(_in_order(found, start, stop), tensor.encoding, home[0].factor)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing: a GGUF file has its own metadata, and no config.json beside it."""
        return {}


def _value(rows: np.ndarray, encoding: Encoding, factor: float = 1.0) -> Value:
    if isinstance(encoding, Unquantized):
        return DenseRows(rows, encoding.dtype)
    if isinstance(encoding, Codebook):
        from qconvert.quant.ggml.to_codes import grid_of_blocks

        blocks = GGMLType.NVFP4.encoding
        assert isinstance(blocks, GgmlBlocks)
        codes = grid_of_blocks(GgmlRows(rows, blocks))
        assert isinstance(codes, CodebookRows)
        return replace(codes, encoding=encoding, divisor=1 / factor)
    assert isinstance(encoding, GgmlBlocks), encoding
    return GgmlRows(rows, encoding)


def _in_order(found: list[tuple[range, np.ndarray]], start: int, stop: int) -> np.ndarray:
    """The rows of all stretches where they belong in [start, stop)."""
    import numpy as np

    if len(found) == 1:
        return found[0][1]
    first = found[0][1]
    made = np.empty((stop - start, first.shape[1]), first.dtype)
    for rows, values in found:
        made[rows.start - start : rows.stop - start : rows.step] = values
    return made


def _read(stretch: Stretch, want: Encoding, source: Source, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of a stretch as the tensor has them; whole blocks of its step are read for them."""
    step = stretch.step
    per = step.rows if step else 1
    begin, end = (stretch.start + first) // per, -(-(stretch.start + last) // per)
    transposed = step is not None and step.change == "transpose"
    each, width = (stretch.width, per) if transposed else (per, stretch.width)
    spec = stretch.array
    if spec.width != width and isinstance(stretch.encoding, Unquantized):  # a vector that stands for a matrix
        stored_rows = source.read(spec.name, 0, spec.rows).reshape(-1, width)[begin * each : end * each]
    else:
        stored_rows = source.read(spec.name, begin * each, end * each)
    rows = _undone(_value(stored_rows, stretch.encoding), stretch, want)
    return rows[stretch.start + first - begin * per : stretch.start + last - begin * per]


def _undone(value: Value, stretch: Stretch, want: Encoding) -> np.ndarray:
    """The rows in the model's order and as its numbers, in the encoding requested."""
    from qconvert.quant.casts import cast
    from qconvert.quant.dequantize import numbers

    undo = op_of(stretch.step, stretch.width).inverse() if stretch.step else None
    if isinstance(want, Unquantized) and not isinstance(value, DenseRows):
        value = numbers(value, DType.F32)
    if isinstance(value, DenseRows) and stretch.factor != 1:
        value = DenseRows(value.rows_RI * value.rows_RI.dtype.type(stretch.factor), value.dtype)
    if undo is not None:
        value, _ = undo.apply(value)
    if isinstance(want, Unquantized) and isinstance(value, DenseRows):
        value, _ = cast(value, want.dtype)
    return value.arrays[0]


def type_of(encoding: Encoding) -> GGMLType:
    """The element type that stores an encoding, which must be a plain GGUF type or GGML blocks."""
    if isinstance(encoding, GgmlBlocks):
        return GGMLType[encoding.type]
    assert isinstance(encoding, Unquantized) and encoding.dtype is not DType.U8, encoding
    return GGMLType[encoding.dtype.code]


def stored(tensor: ModelTensor) -> GGUFTensor:
    """The tensor record of a logical tensor."""
    return GGUFTensor(tensor.name, type_of(tensor.encoding), tensor.shape)


def llama3_scaling(theta: float, factor: float, factors_F: np.ndarray) -> Json | None:
    """How config.json writes the rotary scaling whose result is `rope_freqs.weight`, float32 [F].

    None for factors that no parameters of Llama 3's scaling give.
    """
    from qconvert.quant.llama3_rope import llama3_parameters

    found = llama3_parameters(theta, factor, factors_F)
    if found is None:
        return None
    low, high, context = found
    return {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": context}
