"""Holds two checkpoints against each other, tensor by tensor, whatever their layouts.

Fused linears are compared with the parts they stack, quantized weights by the numbers they decode
to. Works in bounded blocks of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from qconvert.interfaces import Reader
from qconvert.plan import RowSlice, rows_within, whole
from qconvert.quant.casts import Difference, cast, compare
from qconvert.quant.grids import column_scales, numbers
from qconvert.tensors import BlockRows, Coded, Dense, DType, IntAffine, Logical, MinAffine, Plain, Value

if TYPE_CHECKING:
    from qconvert.architecture import FusedPlace
    from qconvert.formats.checkpoint import Checkpoint

BLOCK_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How one tensor of A stands to its counterpart in B.

    `status` is "equal", "differs", "shape", "only in A" or "only in B". `max_steps` is the largest
    difference in units of B's quantization scale, None when B's tensor has none of its own (plain
    numbers, and GGML blocks with scales of scales); `quantized` tells whether B's numbers are coded.
    """

    name: str
    role: str
    status: str
    difference: Difference | None = None
    max_steps: float | None = None
    note: str = ""
    quantized: bool = False

    @property
    def relative_rms(self) -> float:
        """Root of summed squared difference over summed squares of A."""
        d = self.difference
        return sqrt(d.sum_sq_diff / d.sum_sq_a) if d is not None and d.sum_sq_a else 0.0


def compare_checkpoints(a: Checkpoint, b: Checkpoint) -> Iterator[TensorDifference]:
    """Every tensor of A in order, then those that only B has."""
    used: set[str] = set()
    for name, tensor in a.tensors.items():
        if name in a.ignored:
            continue
        role = a.role(name)
        pieces = locate(b, name) or _parts_of(a, b, name)
        used.update(piece.tensor.name for piece in pieces)
        if not pieces:
            yield TensorDifference(name, role, "only in A")
        elif sum(piece.rows for piece in pieces) != tensor.rows or pieces[0].tensor.width != tensor.width:
            shapes = f"{list(tensor.shape)} and {[list(piece.tensor.shape) for piece in pieces]}"
            yield TensorDifference(name, role, "shape", note=shapes)
        else:
            yield _compare_pieces(a.reader, tensor, b.reader, pieces, role)
    for name, tensor in b.tensors.items():
        if name in used or name in b.ignored:
            continue
        shared = locate(a, name)  # the head of a tied A is its embedding
        if len(shared) == 1 and shared[0].tensor.shape == tensor.shape:
            found = _compare_pieces(a.reader, shared[0].tensor, b.reader, [whole(tensor)], b.role(name))
            yield replace(found, name=name)
        else:
            yield TensorDifference(name, b.role(name), "only in B")


def locate(checkpoint: Checkpoint, name: str) -> list[RowSlice]:
    """The rows that hold the tensor of this name: its own, those inside a fused one, or none.

    The head of a tied checkpoint is its embedding.
    """
    tensors = checkpoint.tensors
    if name in tensors:
        return [whole(tensors[name])]
    for fused in checkpoint.architecture.fused.values():
        own = next((i for i, part in enumerate(fused.parts) if part.name == name), None)
        if own is not None and fused.whole.name in tensors:
            return _rows_of_part(tensors[fused.whole.name], fused, own)
    place = checkpoint.architecture.places.get(name)
    if place is not None and place.role == "lm_head" and checkpoint.architecture.tied:
        embed = next(p for p in checkpoint.architecture.places.values() if p.role == "embed")
        return locate(checkpoint, embed.name)
    return []


def _rows_of_part(stacked: Logical, fused: FusedPlace, part: int) -> list[RowSlice]:
    """The rows of a fused tensor that hold one of its parts, in the order of the part's rows."""
    found, start = [], 0
    for run in fused.runs:
        stop = start + run.stop - run.start
        if run.part == part:
            found.append(RowSlice(stacked, start, stop))
        start = stop
    return found


def _parts_of(a: Checkpoint, b: Checkpoint, name: str) -> list[RowSlice]:
    """B's separate linears for a tensor that is fused in A, in the order of A's rows."""
    fused = a.architecture.fused.get(name)
    if fused is None:
        return []
    found = [locate(b, part.name) for part in fused.parts]
    if not all(found):
        return []
    return [piece for run in fused.runs for piece in rows_within(found[run.part], run.start, run.stop)]


def _compare_pieces(
    reader_a: Reader, tensor: Logical, reader_b: Reader, pieces: list[RowSlice], role: str
) -> TensorDifference:
    total, steps, row = None, None, 0
    for piece in pieces:
        rows_a = RowSlice(tensor, row, row + piece.rows)
        for block_a, block_b in _blocks(reader_a, rows_a, reader_b, piece):
            found = compare(_numbers(block_a), _numbers(block_b))
            total = found if total is None else total + found
            if isinstance(block_b, IntAffine | MinAffine | Coded):
                steps = max(steps or 0.0, _steps(block_a, block_b))
        row += piece.rows
    equal = total is None or total.equal_count == total.count
    status = "equal" if equal else "differs"
    quantized = any(not isinstance(piece.tensor.form, Plain) for piece in pieces)
    return TensorDifference(tensor.name, role, status, total, steps, quantized=quantized)


def _blocks(reader_a: Reader, a: RowSlice, reader_b: Reader, b: RowSlice) -> Iterable[tuple[Value, Value]]:
    step = max(1, BLOCK_WEIGHTS // max(1, a.tensor.width))
    for offset in range(0, a.rows, step):
        count = min(step, a.rows - offset)
        yield (
            reader_a.read(a.tensor, a.start + offset, a.start + offset + count),
            reader_b.read(b.tensor, b.start + offset, b.start + offset + count),
        )


def _numbers(value: Value) -> Dense:
    """The numbers a value stands for: a grid's in its own dtype, GGML blocks' in float32."""
    match value:
        case Dense():
            return value
        case BlockRows():
            return numbers(value, DType.F32)
        case _:
            return numbers(value, value.form.decoded)


def _steps(a: Value, b: IntAffine | MinAffine | Coded) -> float:
    """The largest |a - b| in units of b's scales; b decoded in float32."""
    wide_a = cast(_numbers(a), DType.F32)[0].rows_RI
    gaps_RI = np.abs(wide_a - numbers(b, DType.F32).rows_RI)
    scales_RI = np.broadcast_to(np.abs(column_scales(b)), gaps_RI.shape)
    ratios = np.divide(gaps_RI, scales_RI, out=np.zeros_like(gaps_RI), where=scales_RI > 0)
    return float(ratios.max(initial=0.0))


def difference(reader_a: Reader, a: Logical, reader_b: Reader, b: Logical) -> Difference:
    """The difference of two tensors of equal shape, in bounded blocks."""
    result = _compare_pieces(reader_a, a, reader_b, [whole(b)], "")
    return result.difference or Difference(0.0, 0.0, 0.0, 0, 0)
