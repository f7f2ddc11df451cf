"""How tensors are spelled in a GGUF file: one array each, plain or as the bytes of GGML blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qconvert.architecture.gguf.tensors import Step
from qconvert.gguf.types import GGMLType, GGUFTensor
from qconvert.interfaces import Part, Source
from qconvert.tensors import (
    BlockRows,
    Blocks,
    Codebook,
    Coded,
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
# Steps that move whole rows, whatever they are stored as, and those that move numbers.
_MOVES_ROWS = ("interleave_halves",)
_MOVES_NUMBERS = (*_MOVES_ROWS, "transpose", "swap_groups")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of a tensor of the model that lie in one array of the file.

    `rows` are their numbers in the tensor. Before its `step` the array had rows of `width` numbers, of
    which the one at `start` is the first of these. `form` is what the array holds, of which every
    number is to be multiplied by `factor`.
    """

    rows: range
    array: TensorSpec
    form: Form
    start: int
    width: int
    step: Step | None = None
    factor: float = 1.0

    @property
    def form_back(self) -> Form:
        """The form of the rows when the step is undone."""
        plain = isinstance(self.form, Plain)
        keeps = _MOVES_NUMBERS if plain else _MOVES_ROWS
        if self.step is not None and self.step.change not in keeps:
            return Plain(DType.F32)
        return self.form if self.factor == 1 or plain else _DIVIDED


Home = tuple[Stretch, ...]
# NVFP4 with a factor for the whole tensor beside it, which other formats have as a divisor.
_DIVIDED = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided")


def form_of(home: Home) -> Form:
    """The form of a tensor with this home: that of all its rows, or float32 where they differ."""
    forms = {(stretch.form_back, stretch.factor) for stretch in home}
    return forms.pop()[0] if len(forms) == 1 else Plain(DType.F32)


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """Tensors as arrays of their own name, except those that `homes` says are elsewhere."""

    homes: Mapping[str, Home] = field(default_factory=dict)
    name: str = NAME
    transposed: bool = False

    @property
    def computed(self) -> dict[str, str]:
        """The tensors whose plain numbers are computed as they are read, and from what.

        The labels of their blocks; "" for numbers that the file has in another place of a formula.
        """
        found = {}
        for name, home in self.homes.items():
            if isinstance(form_of(home), Plain):
                blocks = {s.form.label for s in home if not isinstance(s.form, Plain)}
                if blocks or any(s.step is not None and s.step.change not in _MOVES_NUMBERS for s in home):
                    found[name] = ", ".join(sorted(blocks))
        return found

    def parts(self, tensor: Logical) -> tuple[TensorSpec, ...]:
        """The arrays that hold a tensor, possibly among others."""
        home = self.homes.get(tensor.name)
        if home is None:
            return (stored(tensor).stored,)
        return tuple({stretch.array.name: stretch.array for stretch in home}.values())

    def row_alignment(self, tensor: Logical) -> int:
        """Blocks never span rows."""
        return 1

    def encode(self, tensor: Logical, start: int, value: Value) -> Iterator[Part]:
        """Rows [start, start + value.rows) as they are stored."""
        assert isinstance(value, Dense | BlockRows), value
        yield Part(tensor.name, start, value.rows_RI if isinstance(value, Dense) else value.bytes_RB)

    def decode(self, tensor: Logical, source: Source, start: int, stop: int) -> Value:
        """Read rows [start, stop) back, in the model's order and as its numbers."""
        home = self.homes.get(tensor.name)
        if home is None:
            return _value(source.read(stored(tensor).name, start, stop), tensor.form)
        found: list[tuple[range, np.ndarray]] = []
        for stretch in home:
            first, last = _within(stretch.rows, start, stop)
            if first < last or (start == stop and not found):
                rows = _read(stretch, tensor.form, source, first, last)
                found.append((stretch.rows[first:last], rows))
        return _value(_in_order(found, start, stop), tensor.form, home[0].factor)

    def settings(self, quantized: Mapping[str, Quantized], kept: list[str]) -> Json:
        """Nothing: a GGUF file has its own metadata, and no config.json beside it."""
        return {}


def _value(rows: np.ndarray, form: Form, factor: float = 1.0) -> Value:
    if isinstance(form, Plain):
        return Dense(rows, form.dtype)
    if isinstance(form, Codebook):
        from qconvert.quant.ggml.grids import grid_of_blocks

        blocks = GGMLType.NVFP4.form
        assert isinstance(blocks, Blocks)
        grid = grid_of_blocks(BlockRows(rows, blocks))
        assert isinstance(grid, Coded)
        return replace(grid, form=form, divisor=1 / factor)
    assert isinstance(form, Blocks), form
    return BlockRows(rows, form)


def _within(rows: range, start: int, stop: int) -> tuple[int, int]:
    """Which of these rows lie in [start, stop): the first of them, and the one behind the last."""
    first = min(len(rows), max(0, -((rows.start - start) // rows.step)))
    return first, max(first, min(len(rows), -((rows.start - stop) // rows.step)))


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


def _read(stretch: Stretch, want: Form, source: Source, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of a stretch as the tensor has them; whole blocks of its step are read for them."""
    step = stretch.step
    per = step.rows if step else 1
    begin, end = (stretch.start + first) // per, -(-(stretch.start + last) // per)
    turned = step is not None and step.change == "transpose"
    each, width = (stretch.width, per) if turned else (per, stretch.width)
    value = _value(_rows(stretch, source, begin * each, end * each, width), stretch.form)
    rows = _undone(value, stretch, want)
    return rows[stretch.start + first - begin * per : stretch.start + last - begin * per]


def _rows(stretch: Stretch, source: Source, start: int, stop: int, width: int) -> np.ndarray:
    spec = stretch.array
    if spec.width != width and isinstance(stretch.form, Plain):  # a vector that stands for a matrix
        return source.read(spec.name, 0, spec.rows).reshape(-1, width)[start:stop]
    return source.read(spec.name, start, stop)


def _undone(value: Value, stretch: Stretch, want: Form) -> np.ndarray:
    """The rows in the model's order and as its numbers, in the form that is wanted."""
    from qconvert.quant.casts import cast
    from qconvert.quant.grids import numbers
    from qconvert.quant.heads import part_halves

    step = stretch.step
    if not isinstance(want, Plain):
        (rows,) = value.arrays
        return part_halves(rows, step.rows) if step else rows
    dense = value if isinstance(value, Dense) else numbers(value, DType.F32)
    if stretch.factor != 1:
        dense = Dense(dense.rows_RI * dense.rows_RI.dtype.type(stretch.factor), dense.dtype)
    return cast(_restored(dense, step, stretch.width) if step else dense, want.dtype)[0].rows_RI


def _restored(dense: Dense, step: Step, width: int) -> Dense:
    """The numbers before a step, which had rows of `width`."""
    from qconvert.quant import changes
    from qconvert.quant.heads import part_halves

    if step.change == "interleave_halves":
        return Dense(part_halves(dense.rows_RI, step.rows), dense.dtype)
    if step.change == "transpose":
        return Dense(changes.transposed(dense.rows_RI, width), dense.dtype)
    if step.change == "swap_groups":
        outer, inner = step.groups
        return Dense(changes.swapped(dense.rows_RI, inner, outer), dense.dtype)
    if step.change == "scale":
        return changes.unscaled(dense, step.factor)
    return changes.restored(dense, step.change)


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
