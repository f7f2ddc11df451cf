"""Runs a plan: reads row blocks, applies the units' operations, writes what the layout spells.

Units are cut into blocks of rows, so that the biggest tensor does not set the memory: blocks are
admitted while their estimated working memory fits the budget. Blocks are independent, every one
is written at its own place, so the bytes are the same for any number of threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from qconvert.errors import BadRecipe, CorruptCheckpoint
from qconvert.formats.files import octets
from qconvert.ops import Finding
from qconvert.plan import Plan, RowSlice, Unit
from qconvert.tensors import BlockRows, Dense, IntAffine, Layout, Plain, Reader, Sink, Value

if TYPE_CHECKING:
    from qconvert.quant.affine import QuantError

# Working memory of one block: large enough to amortise a Python call, small enough to stay near
# the cache and to leave room for many blocks in a small budget.
BLOCK_BYTES = 16 << 20
# float32 or code scratch and packed output, per weight, beside the input itself.
SCRATCH_PER_WEIGHT = 6


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A run of rows of one array as it was handed to the sink, with its CRC-32."""

    name: str
    start: int
    rows: int
    crc32: int


@dataclass(frozen=True, slots=True)
class BlockDone:
    """One block of a unit is written; `last` marks the unit's last one to finish."""

    unit: Unit
    bytes_read: int
    parts: tuple[WrittenPart, ...]
    error: QuantError | None
    last: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of a unit's output, and the working memory they need in bytes."""

    unit: Unit
    start: int
    stop: int
    cost: int


def run(
    plan: Plan,
    reader: Reader,
    layout: Layout,
    sink: Sink,
    *,
    jobs: int,
    max_memory: int,
    allow_nonfinite: bool = False,
    order: Callable[[Unit], object] | None = None,
) -> Generator[BlockDone, None, None]:
    """Make every tensor of the plan and write it to the sink; yields an event per block.

    `max_memory` bounds the blocks in flight, in bytes (one block is always admitted); `order` sorts
    the units, for sources that are faster in sequence. Raises CorruptCheckpoint naming the tensor
    that holds NaN or Inf, BadRecipe when a value does not fit the target dtype. The caller commits
    or aborts the sink, and closes the generator first: no thread outlives it.
    """
    units = sorted(plan.units, key=order) if order else list(plan.units)  # type: ignore[arg-type]
    limit = min(BLOCK_BYTES, max(1, max_memory // (2 * jobs)))
    blocks = [block for unit in units for block in cut(unit, layout, limit)]
    left = {unit.output.name: 0 for unit in units}
    for block in blocks:
        left[block.unit.output.name] += 1

    def make(block: Block) -> BlockDone:
        return _make(block, reader, layout, sink, allow_nonfinite=allow_nonfinite)

    for done in _bounded(blocks, make, jobs, max_memory):
        left[done.unit.output.name] -= 1
        yield BlockDone(done.unit, done.bytes_read, done.parts, done.error, left[done.unit.output.name] == 0)


def cut(unit: Unit, layout: Layout, limit: int) -> list[Block]:
    """Blocks of a unit whose working memory stays near `limit` bytes, aligned as the layout asks."""
    output = unit.output
    if output.rows == 0:
        return [Block(unit, 0, 0, 0)]
    per_row = max(1, sum(s.tensor.width for s in unit.inputs[:1]) * (_input_bytes(unit) + SCRATCH_PER_WEIGHT))
    step = lcm(layout.row_alignment(output), *(op.granule for op in unit.ops))
    rows = max(step, limit // per_row // step * step)
    return [
        Block(unit, start, min(start + rows, output.rows), per_row * (min(start + rows, output.rows) - start))
        for start in range(0, output.rows, rows)
    ]


def _input_bytes(unit: Unit) -> int:
    form = unit.inputs[0].tensor.form
    return form.dtype.nbytes if isinstance(form, Plain) else 1


def _bounded(
    blocks: Iterable[Block], make: Callable[[Block], BlockDone], jobs: int, max_memory: int
) -> Generator[BlockDone, None, None]:
    """Run `make` on every block with `jobs` threads, never admitting more than the budget at once."""
    waiting = iter(blocks)
    block = next(waiting, None)
    running: dict[Future[BlockDone], int] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while block is not None or running:
                while block is not None and _admits(running, block.cost, jobs, max_memory):
                    running[pool.submit(make, block)] = block.cost
                    block = next(waiting, None)
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    del running[future]
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _admits(running: dict[Future[BlockDone], int], cost: int, jobs: int, max_memory: int) -> bool:
    return not running or (len(running) < 2 * jobs and sum(running.values()) + cost <= max_memory)


def _make(block: Block, reader: Reader, layout: Layout, sink: Sink, *, allow_nonfinite: bool) -> BlockDone:
    unit = block.unit
    value, nbytes = gather(unit.inputs, reader, block.start, block.stop)
    error = None
    for op in unit.ops:
        value, finding = op.apply(value)
        error = finding.error or error
        _refuse(unit, block.start, finding, allow_nonfinite)
    parts = []
    for part in layout.encode(unit.output, block.start, value):
        sink.write(part.name, part.start, part.rows)
        parts.append(WrittenPart(part.name, part.start, len(part.rows), zlib.crc32(octets(part.rows))))
    return BlockDone(unit, nbytes, tuple(parts), error, last=False)


def gather(inputs: tuple[RowSlice, ...], reader: Reader, start: int, stop: int) -> tuple[Value, int]:
    """Rows [start, stop) of the stacked inputs, and the bytes that were read for them."""
    pieces, offset = [], 0
    for piece in inputs:
        first, last = max(start, offset), min(stop, offset + piece.rows)
        if first < last or start == stop:
            shift = piece.start - offset
            pieces.append(reader.read(piece.tensor, first + shift, last + shift))
        offset += piece.rows
    value = pieces[0] if len(pieces) == 1 else stack(pieces)
    return value, sum(_nbytes(piece) for piece in pieces)


def stack(pieces: list[Value]) -> Value:
    """Values of one form stacked by rows."""
    import numpy as np

    first = pieces[0]
    if isinstance(first, Dense):
        dense = [p.rows_RI for p in pieces if isinstance(p, Dense)]
        return Dense(np.concatenate(dense), first.dtype)
    if isinstance(first, BlockRows):
        blocks = [p.bytes_RB for p in pieces if isinstance(p, BlockRows)]
        return BlockRows(np.concatenate(blocks), first.form)
    affine = [p for p in pieces if isinstance(p, IntAffine)]
    zeros = [p.zeros_RG for p in affine if p.zeros_RG is not None]
    return IntAffine(
        np.concatenate([p.codes_RI for p in affine]),
        np.concatenate([p.scales_RG for p in affine]),
        np.concatenate(zeros) if zeros else None,
        first.form,
    )


def _nbytes(value: Value) -> int:
    """Bytes of a value's main array, as it is in memory."""
    match value:
        case Dense():
            return value.rows_RI.nbytes
        case BlockRows():
            return value.bytes_RB.nbytes
        case IntAffine():
            return value.codes_RI.nbytes


def _refuse(unit: Unit, start: int, finding: Finding, allow_nonfinite: bool) -> None:
    if finding.nonfinite >= 0 and not allow_nonfinite:
        name, row, width = _input_at(unit, start, finding.nonfinite)
        column = finding.nonfinite % width
        raise CorruptCheckpoint(
            f"{name}: NaN or Inf at row {row}, column {column} (flat index {row * width + column})",
            "the checkpoint is damaged; --allow-nonfinite converts it all the same",
        )
    if finding.overflow:
        raise BadRecipe(
            f"{unit.inputs[0].tensor.name}: {finding.overflow} values do not fit "
            f"{unit.output.form.label}, whose largest number they exceed",
            "use a wider type, for example --dtype bf16",
        )


def _input_at(unit: Unit, start: int, flat: int) -> tuple[str, int, int]:
    """The source tensor, its row and its width for an element counted from row `start` of the unit."""
    width = max(1, unit.inputs[0].tensor.width)
    row = start + flat // width
    for piece in unit.inputs:
        if row < piece.rows:
            return piece.tensor.name, row + piece.start, width
        row -= piece.rows
    raise AssertionError("an element outside the unit")
