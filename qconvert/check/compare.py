"""Holds two checkpoints against each other, tensor by tensor, whatever their layouts.

Fused linears are compared with the parts they stack, quantized weights by the numbers they decode
to. Works in bounded blocks of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

from qconvert.check.scaled import ScaledReader
from qconvert.checkpoint.facts import column_groups, numbers_of
from qconvert.convert.runner import read_slice
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.factors import Factors
from qconvert.core.protocols import Reader
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows, Value
from qconvert.ops import Order
from qconvert.plan.passes.activation_order import orders_of, undo
from qconvert.plan.passes.fuse import rows_of_part, rows_of_parts
from qconvert.plan.plan import RowSlice, copy_of, rows_within, whole
from qconvert.quant.casts import Difference, cast, compare
from qconvert.quant.dequantize import column_scales, numbers

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint

BLOCK_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor of A stands to its counterpart in B.

    `status` is "equal", "differs", "shape", "only in A" or "only in B". `max_steps` is the largest
    difference in units of B's quantization scale, None when B's tensor has none of its own (plain numbers,
    and GGML blocks with scales of scales); `quantized` tells whether B's numbers are coded, `encoding` what
    as; `rounded` that B's plain numbers are A's, rounded to B's type; `scaled` that A's numbers were scaled
    as B's are before they were compared.
    """

    name: str
    role: str
    status: str
    difference: Difference | None = None
    max_steps: float | None = None
    note: str = ""
    quantized: bool = False
    encoding: str = ""
    rounded: bool = False
    scaled: bool = False

    @property
    def relative_rms(self) -> float:
        """Root of summed squared difference over summed squares of A (see `relative_rms`)."""
        d = self.difference
        return 0.0 if d is None else relative_rms(d.sum_sq_diff, d.sum_sq_a)


def relative_rms(sum_sq_diff: float, sum_sq_a: float) -> float:
    """The root of one sum over the other: 0 where nothing differs, infinite where something differs from
    numbers that are all 0.
    """
    if not sum_sq_diff:
        return 0.0
    return sqrt(sum_sq_diff / sum_sq_a) if sum_sq_a else inf


def compare_checkpoints(
    a: Checkpoint, b: Checkpoint, reordered: Collection[str] = (), scaled: Mapping[str, Factors] | None = None
) -> Iterator[TensorDifference]:
    """Every tensor of A in order, then those that only B has.

    `reordered` are tensors of B whose rows or columns lie as they do after A's activation order is undone;
    `scaled` are what tensors of A are multiplied by to be those of B.
    """
    used: set[str] = set()
    orders: dict[str, tuple[Order, Order]] = {}
    if reordered:
        plan, _, _ = undo(copy_of(a.bind(allow_unknown=True)), a.architecture, column_groups(a))
        orders = {u.output.name: orders_of(u) for u in plan.units if u.output.name in reordered}
    scaled = scaled or {}
    reader_a = _Reordered(ScaledReader(a.reader, scaled), orders)
    for name, tensor in a.tensors.items():
        if name in a.ignored:
            continue
        role = a.role(name)
        pairs = _pairs(a, b, tensor)
        used.update(piece.tensor.name for pair in pairs for piece in pair.b)
        if not pairs:
            yield TensorDifference(name, role, "only in A")
        elif any(pair.rows_b < pair.rows_a or pair.width_b < pair.width_a for pair in pairs):
            others = dict.fromkeys(piece.tensor for pair in pairs for piece in pair.b)
            shapes = ", ".join(str(list(other.shape)) for other in others)
            yield TensorDifference(name, role, "shape", note=f"{list(tensor.shape)} and {shapes}")
        else:
            found = _compare_pairs(reader_a, tensor, b.reader, pairs, role)
            names = (piece.tensor.name for pair in pairs for piece in pair.b)
            found = _computed(found, [b.computed[n] for n in names if n in b.computed])
            yield replace(found, scaled=name in scaled)
    for name, tensor in b.tensors.items():
        if name in used or name in b.ignored:
            continue
        shared = locate(a, name)  # the head of a tied A is its embedding
        if len(shared) == 1 and shared[0].tensor.shape == tensor.shape:
            pair = _Pair([whole(shared[0].tensor)], [whole(tensor)])
            found = _compare_pairs(a.reader, shared[0].tensor, b.reader, [pair], b.role(name))
            yield replace(found, name=name)
        else:
            yield TensorDifference(name, b.role(name), "only in B")


@dataclass(slots=True)
class _Reordered:
    """A reader that gives the numbers of some tensors in other orders; one of them is kept whole."""

    reader: ScaledReader
    orders: Mapping[str, tuple[Order, Order]]
    kept: tuple[str, DenseRows | None] = ("", None)

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        """Rows [start, stop) in the new order."""
        rows, columns = self.orders.get(tensor.name, ((), ()))
        if not rows:
            value = self.reader.read(tensor, start, stop)
            return _chosen(numbers_of(value), columns=columns) if columns else value
        if self.kept[0] != tensor.name:
            self.kept = tensor.name, numbers_of(self.reader.read(tensor, 0, tensor.rows))
        assert self.kept[1] is not None
        return _chosen(self.kept[1], rows[start:stop], columns)


def _chosen(dense: DenseRows, rows: Order = (), columns: Order = ()) -> DenseRows:
    array_RI = dense.rows_RI[list(rows)] if rows else dense.rows_RI
    return DenseRows(np.ascontiguousarray(array_RI[:, list(columns)] if columns else array_RI), dense.dtype)


@dataclass(frozen=True, slots=True)
class _Pair:
    """The rows of one part of a tensor in A, and those in B, which may go on with rows of zeros."""

    a: list[RowSlice]
    b: list[RowSlice]

    @property
    def rows_a(self) -> int:
        return sum(piece.rows for piece in self.a)

    @property
    def rows_b(self) -> int:
        return sum(piece.rows for piece in self.b)

    @property
    def width_a(self) -> int:
        return self.a[0].tensor.width

    @property
    def width_b(self) -> int:
        return self.b[0].tensor.width


def _pairs(a: Checkpoint, b: Checkpoint, tensor: ModelTensor) -> list[_Pair]:
    """A tensor of A beside its rows in B: as a whole, or part by part where one of the two is fused.

    Empty where B lacks any of it.
    """
    other = b.tensors.get(tensor.name)
    entry = a.architecture.fused.get(tensor.name)
    if entry is None or (other is not None and other.shape == tensor.shape):
        found = locate(b, tensor.name)
        return [_Pair([whole(tensor)], found)] if found else []
    parts = rows_of_parts([whole(tensor)], entry)
    pairs = [_Pair(rows, locate(b, part.name)) for rows, part in zip(parts, entry.members, strict=True)]
    return pairs if all(pair.b for pair in pairs) else []


def locate(checkpoint: Checkpoint, name: str) -> list[RowSlice]:
    """The rows that hold the tensor of this name: its own, those inside a fused one, or none.

    The head of a tied checkpoint is its embedding.
    """
    tensors = checkpoint.tensors
    if name in tensors:
        return [whole(tensors[name])]
    for fused, part in checkpoint.architecture.wholes.get(name, ()):
        if fused.whole.name in tensors:
            return rows_of_part(tensors[fused.whole.name], fused, part)
    parameter = checkpoint.architecture.parameters.get(name)
    if parameter is not None and parameter.role == "lm_head" and checkpoint.architecture.tied:
        embed = next(p for p in checkpoint.architecture.parameters.values() if p.role == "embed")
        return locate(checkpoint, embed.name)
    return []


def _compare_pairs(
    reader_a: Reader | _Reordered, tensor: ModelTensor, reader_b: Reader, pairs: list[_Pair], role: str
) -> TensorDifference:
    total, steps, zeros, rounded = None, None, True, True
    for pair in pairs:
        for block_a, block_b in _blocks(reader_a, pair.a, reader_b, pair.b, pair.rows_a):
            numbers_a, numbers_b = numbers_of(block_a), numbers_of(block_b)
            inside, zeros = _inside(numbers_b, pair.width_a, zeros)
            found = compare(numbers_a, inside)
            total = found if total is None else total + found
            rounded = rounded and _is_rounded(block_a, numbers_a, block_b, inside)
            if isinstance(block_b, AffineIntRows | AffineMinRows | CodebookRows):
                steps = max(steps or 0.0, _steps(numbers_a, block_b))
        for more in rows_within(pair.b, pair.rows_a, pair.rows_b):
            for _, block in _blocks(reader_b, [more], reader_b, [more], more.rows):
                zeros = _inside(numbers_of(block), 0, zeros)[1]
    if not zeros:
        return TensorDifference(tensor.name, role, "shape", note="B continues with numbers that are not 0")
    equal = total is None or total.equal_count == total.count
    status = "equal" if equal else "differs"
    encodings = [piece.tensor.encoding for pair in pairs for piece in pair.b]
    quantized = any(not isinstance(encoding, Unquantized) for encoding in encodings)
    label, note = encodings[0].label, _growth(pairs)
    return TensorDifference(tensor.name, role, status, total, steps, note, quantized, label, rounded)


# What adding one, or a logarithm, loses of float32's numbers.
_ROUNDING = 1e-5


def _computed(found: TensorDifference, sources: list[str]) -> TensorDifference:
    """The difference of a tensor whose numbers in B were computed from these forms on reading."""
    codes = [encoding for encoding in sources if encoding]
    if codes:
        return replace(found, quantized=True, encoding=codes[0])
    return replace(found, rounded=found.rounded or (bool(sources) and found.relative_rms < _ROUNDING))


def _is_rounded(block_a: Value, a: DenseRows, block_b: Value, b: DenseRows) -> bool:
    """Whether plain numbers of B are those of A in B's type: from A's own, or once from its codes."""
    if not isinstance(block_b, DenseRows) or not a.dtype.is_float or not b.dtype.is_float:
        return False
    return np.array_equal(cast(a, b.dtype)[0].rows_RI, b.rows_RI) or (
        not isinstance(block_a, DenseRows) and np.array_equal(numbers(block_a, b.dtype).rows_RI, b.rows_RI)
    )


def _inside(dense: DenseRows, width: int, zeros: bool) -> tuple[DenseRows, bool]:
    """The first `width` columns, and whether there was nothing but zeros in the others."""
    rows_RI = dense.rows_RI
    if rows_RI.shape[1] == width:
        return dense, zeros
    outside_RI = cast(DenseRows(rows_RI[:, width:], dense.dtype), DType.F32)[0].rows_RI
    return DenseRows(np.ascontiguousarray(rows_RI[:, :width]), dense.dtype), zeros and not outside_RI.any()


def _growth(pairs: list[_Pair]) -> str:
    rows = sum(pair.rows_b - pair.rows_a for pair in pairs)
    columns = max(pair.width_b - pair.width_a for pair in pairs)
    grown = [f"{n} {what}" for n, what in ((rows, "rows"), (columns, "columns")) if n]
    return f"(and {' and '.join(grown)} of zeros)" if grown else ""


def _blocks(
    reader_a: Reader | _Reordered, a: list[RowSlice], reader_b: Reader, b: list[RowSlice], rows: int
) -> Iterable[tuple[Value, Value]]:
    """The first `rows` rows of both, a block of each at a time."""
    step = max(1, BLOCK_WEIGHTS // max(1, a[0].tensor.width))
    ends = {0, rows, *range(0, rows, step)}
    for pieces in (a, b):
        ends |= {min(end, rows) for end in accumulate(piece.rows for piece in pieces)}
    for start, stop in pairwise(sorted(ends)):
        (of_a,), (of_b,) = rows_within(a, start, stop), rows_within(b, start, stop)
        yield read_slice(reader_a, of_a), read_slice(reader_b, of_b)


def _steps(a: DenseRows, b: AffineIntRows | AffineMinRows | CodebookRows) -> float:
    """The largest |a - b| in units of b's scales, in the columns of a; b decoded in float32."""
    wide_a = cast(a, DType.F32)[0].rows_RI
    gaps_RI = np.abs(wide_a - numbers(b, DType.F32).rows_RI[:, : wide_a.shape[1]])
    scales_RI = np.broadcast_to(np.abs(column_scales(b)), (b.rows, b.width))[:, : wide_a.shape[1]]
    ratios = np.divide(gaps_RI, scales_RI, out=np.zeros_like(gaps_RI), where=scales_RI > 0)
    return float(ratios.max(initial=0.0))
