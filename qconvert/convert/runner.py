"""Runs a plan: reads row blocks, applies the units' operations, writes what the layout spells.

Units are cut into blocks of rows, so that the biggest tensor does not set the memory: blocks are
admitted while their estimated working memory fits the budget. Blocks are independent, every one
is written at its own place, so the bytes are the same for any number of threads.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Protocol, TypeVar

from qconvert.convert.run_errors import refuse_nonfinite, refuse_overflow, refuse_steps
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor, Unquantized
from qconvert.core.protocols import Layout, Reader, Sink
from qconvert.core.values import AffineIntRows, CodebookRows, DenseRows, Value
from qconvert.errors import BadRecipe
from qconvert.formats.io.local_file import octets
from qconvert.ops.rows import EncodeBlocks, Surveyed, zero_rows
from qconvert.plan.plan import Plan, RowSlice, Unit

if TYPE_CHECKING:
    import numpy as np

    from qconvert.quant.affine import QuantError

T = TypeVar("T")

# Working memory of one block: large enough to amortise a Python call, small enough to stay near
# the cache and to leave room for many blocks in a small budget.
BLOCK_BYTES = 16 << 20
# A transposed layout costs one read or write per stored row and block: fewer, larger blocks.
TRANSPOSED_BLOCK_BYTES = 128 << 20
# A code that is kept while its weight moves further than this is no longer the code of that weight.
MOST_STEPS = 0.1
# float32 or code scratch and packed output, per weight, beside the input itself.
SCRATCH_PER_WEIGHT = 6


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run may take, and what it lets pass. Nothing has a default: whoever runs a plan says it all.

    `max_memory` bounds the blocks in flight, in bytes (one block is always admitted); `checksums` are
    needed to verify what was written; `most_steps` is how far codes that are kept on another grid may
    move a weight.
    """

    jobs: int
    max_memory: int
    checksums: bool
    allow_nonfinite: bool
    most_steps: float


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows of one array, or the columns [column, column + width) of them, with their CRC-32 if one was
    asked for.
    """

    name: str
    start: int
    rows: int
    width: int
    crc32: int | None
    column: int = 0


@dataclass(frozen=True, slots=True)
class BlockDone:
    """One block of a unit is written; `last` marks the unit's last one to finish.

    `steps` is by how many steps of its grid a weight has moved at most on the way to another grid.
    """

    unit: Unit
    bytes_read: int
    parts: tuple[WrittenRows, ...]
    error: QuantError | None
    last: bool
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run, gathered from its events, by name: every part written of an array, and for
    outputs the error of quantizing and the most that kept codes moved a weight, in steps (0 is exact).
    """

    written: dict[str, list[WrittenRows]] = field(default_factory=lambda: defaultdict(list))
    errors: dict[str, QuantError] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, done: BlockDone) -> None:
        """Take in the event of one block."""
        name = done.unit.output.name
        for part in done.parts:
            self.written[part.name].append(part)
        if done.error is not None:
            self.errors[name] = self.errors[name] + done.error if name in self.errors else done.error
        self.steps[name] = max(self.steps[name], done.steps)


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
    terms: Terms,
    order: Callable[[Unit], object] | None = None,
) -> Generator[BlockDone, None, None]:
    """Make every tensor of the plan and write it to the sink; yields an event per block.

    `order` sorts the units, for sources that are faster in sequence. Raises CorruptCheckpoint naming the
    tensor that holds NaN or Inf, BadRecipe when a value does not fit the target dtype or codes would move
    too far. The caller commits or aborts the sink, and closes the generator first: no thread outlives it.
    """
    jobs, max_memory = terms.jobs, terms.max_memory
    units = sorted(plan.units, key=order) if order else list(plan.units)  # type: ignore[arg-type]
    transposed = reader.layout.transposed or layout.transposed
    block_bytes = TRANSPOSED_BLOCK_BYTES if transposed else BLOCK_BYTES
    limit = min(block_bytes, max(1, max_memory // (2 * jobs)))
    units = _settled(units, reader, layout, limit, jobs, max_memory)
    blocks = [block for unit in units for block in cut(unit, layout, limit)]
    left = {unit.output.name: 0 for unit in units}
    for block in blocks:
        left[block.unit.output.name] += 1

    def make(block: Block) -> BlockDone:
        return _make(block, reader, layout, sink, terms)

    for done in _bounded(blocks, make, jobs, max_memory):
        left[done.unit.output.name] -= 1
        yield replace(done, last=left[done.unit.output.name] == 0)


def _settled(
    units: list[Unit], reader: Reader, layout: Layout, limit: int, jobs: int, max_memory: int
) -> list[Unit]:
    """The units with their surveys done: those of them that need one are read once more for it."""
    surveyed = {unit.output.name: unit for unit in units if _open(unit) is not None}
    blocks = [block for unit in surveyed.values() for block in cut(unit, layout, limit)]
    seen: dict[str, dict[int, np.ndarray]] = {name: {} for name in surveyed}

    def look(block: Block) -> tuple[Block, np.ndarray]:
        unit = block.unit
        first, last = _rows_read(unit, block.start), _rows_read(unit, block.stop)
        value, _ = gather(unit.inputs, reader, first, last)
        for op in unit.ops:
            if isinstance(op, Surveyed) and op.open:
                return block, op.survey(value)
            value, _ = op.apply(value)
        raise AssertionError("a unit without an open survey")

    for block, found in _bounded(blocks, look, jobs, max_memory):
        seen[block.unit.output.name][block.start] = found
    by_kin: dict[str, list[np.ndarray]] = {}
    for name, unit in surveyed.items():
        by_kin.setdefault(_kin(unit), []).extend(seen[name][start] for start in sorted(seen[name]))
    return [_settle(unit, by_kin[_kin(unit)]) if _open(unit) is not None else unit for unit in units]


def _open(unit: Unit) -> Surveyed | None:
    return next((op for op in unit.ops if isinstance(op, Surveyed) and op.open), None)


def _kin(unit: Unit) -> str:
    """What names the units that are settled together: their family, or the unit alone."""
    op = _open(unit)
    assert op is not None
    return op.kin or unit.output.name


def _settle(unit: Unit, found: list[np.ndarray]) -> Unit:
    import numpy as np

    every = np.concatenate(found)
    ops = (op.settled(every) if isinstance(op, Surveyed) and op.open else op for op in unit.ops)
    return replace(unit, ops=tuple(ops))


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
    encoding = unit.inputs[0].tensor.encoding
    return encoding.dtype.nbytes if isinstance(encoding, Unquantized) else 1


def _bounded(
    blocks: Iterable[Block], make: Callable[[Block], T], jobs: int, max_memory: int
) -> Generator[T, None, None]:
    """Run `make` on every block with `jobs` threads, never admitting more than the budget at once."""
    waiting = iter(blocks)
    block = next(waiting, None)
    running: dict[Future[T], int] = {}
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


def _admits(running: dict[Future[T], int], cost: int, jobs: int, max_memory: int) -> bool:
    return not running or (len(running) < 2 * jobs and sum(running.values()) + cost <= max_memory)


def _make(block: Block, reader: Reader, layout: Layout, sink: Sink, terms: Terms) -> BlockDone:
    import numpy as np

    unit = block.unit
    if block.start == 0:
        _require_one_of_each(unit, reader)
    first, last = _rows_read(unit, block.start), _rows_read(unit, block.stop)
    value, nbytes = gather(unit.inputs, reader, first, last)
    error, steps = None, 0.0
    for op in unit.ops:
        placed = op.at(block.start) if isinstance(op, EncodeBlocks) else op
        width = value.rows_RI.shape[1] if isinstance(value, DenseRows) else unit.inputs[0].tensor.width
        value, finding = placed.apply(value)
        error = finding.error or error
        steps += finding.steps
        if not terms.allow_nonfinite:
            refuse_nonfinite(unit, first, finding, reader.layout, max(1, width))
        if finding.overflow:
            refuse_overflow(unit, value, finding.overflow)
    if steps > terms.most_steps:
        refuse_steps(unit, steps)
    parts = []
    for part in layout.encode(unit.output, block.start, value):
        rows = np.ascontiguousarray(part.rows)
        sink.write(part.name, part.start, rows, part.column)
        crc32 = zlib.crc32(octets(rows)) if terms.checksums else None
        parts.append(WrittenRows(part.name, part.start, len(rows), rows.shape[1], crc32, part.column))
    return BlockDone(unit, nbytes, tuple(parts), error, last=False, steps=steps)


def _rows_read(unit: Unit, row: int) -> int:
    """The row of the inputs at which the rows before `row` of the output end."""
    return row * unit.rows // unit.output.rows if unit.output.rows else 0


def gather(inputs: tuple[RowSlice, ...], reader: Reader, start: int, stop: int) -> tuple[Value, int]:
    """Rows [start, stop) of the stacked inputs, and the bytes that were read for them."""
    pieces, offset = [], 0
    for piece in inputs:
        first, last = max(start, offset), min(stop, offset + piece.rows)
        if first < last or start == stop:
            pieces.append(read_slice(reader, piece.within(first - offset, last - offset)))
        offset += piece.rows
    value = pieces[0] if len(pieces) == 1 else stack(pieces)
    return value, sum(piece.arrays[0].nbytes for piece in pieces)


class Rows(Protocol):
    """Whatever gives rows of logical tensors."""

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value: ...


def read_slice(reader: Rows, piece: RowSlice) -> Value:
    """The rows of a slice: read, or made as zeros."""
    import numpy as np

    if piece.zeros_like is not None:
        return zero_rows(reader.read(piece.tensor, piece.zeros_like, piece.zeros_like + 1), piece.rows)
    value = reader.read(piece.tensor, piece.start, piece.stop)
    if piece.step == 1:
        return value
    return value.with_arrays(tuple(np.ascontiguousarray(array[:: piece.step]) for array in value.arrays))


def stack(pieces: list[Value]) -> Value:
    """Values of one form stacked by rows; what a tensor has only once is the first one's."""
    import numpy as np

    first = pieces[0]
    columns = zip(*(piece.arrays for piece in pieces), strict=True)
    return first.with_arrays(tuple(np.concatenate(column) for column in columns))


def _require_one_of_each(unit: Unit, reader: Reader) -> None:
    """Raise BadRecipe if stacked inputs differ in what their output can have only once.

    Blocks of a large unit meet one input each, so all of them are asked before the first one.
    """
    encoding = unit.inputs[0].tensor.encoding
    shares = isinstance(encoding, Codebook) and (encoding.group_rows is None or encoding.second == "divided")
    if not shares and not (isinstance(encoding, AffineInt) and encoding.act_order):
        return
    first, *others = (piece for piece in unit.inputs if piece.zeros_like is None and piece.rows)
    one = reader.read(first.tensor, first.start, first.start + 1)
    for piece in others:
        if piece.tensor.name != first.tensor.name:
            other = reader.read(piece.tensor, piece.start, piece.start + 1)
            _require_same_constants(first.tensor.name, one, piece.tensor.name, other)


def _require_same_constants(name_a: str, a: Value, name_b: str, b: Value) -> None:
    import numpy as np

    from qconvert.ops.rows import scale_of_all

    if isinstance(a, AffineIntRows) and isinstance(b, AffineIntRows):
        orders = [piece.groups_I for piece in (a, b) if piece.groups_I is not None]
        if orders and not np.array_equal(orders[0], orders[-1]):
            raise BadRecipe(
                f"{name_b}: its activation order (g_idx) is not that of {name_a}, with which it is stacked",
                "leave them apart",
            )
    elif isinstance(a, CodebookRows) and isinstance(b, CodebookRows):
        for what, one, other in (
            ("global scale", a.divisor, b.divisor),
            ("scale", *map(scale_of_all, (a, b))),
        ):
            if one != other:
                raise BadRecipe(
                    f"{name_b}: has one {what} of {other:.6g}, but {name_a}, with which it is stacked, "
                    f"{one:.6g}; one tensor has one",
                    "leave them apart, or dequantize first",
                )
