"""Runs a plan: reads blocks of rows, applies the units' operations, writes them as the layout stores them.

Units are cut into blocks of rows, so that the biggest tensor does not set the memory: blocks are
admitted while their estimated working memory fits the budget. Blocks are independent, every one
is written at its own place, so the bytes are the same for any number of threads.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from math import lcm
from time import perf_counter
from typing import TYPE_CHECKING

from qconvert.convert.batches import Batch, batches, make_batch
from qconvert.convert.blocks import Block, ReadAhead, at_hand, bounded
from qconvert.convert.outcome import BlockDone, WrittenRows
from qconvert.convert.run_errors import (
    refuse_code_error,
    refuse_nonfinite,
    refuse_overflow,
    require_same_constants,
)
from qconvert.convert.scaled_rows import scaled_moments, scaled_rows
from qconvert.core.encodings import Unquantized
from qconvert.core.factors import Factors
from qconvert.core.protocols import ArrayRows, Layout, Reader, Rows, Sink
from qconvert.core.statistics import RowStatistics, StatisticsSource
from qconvert.core.values import DenseRows, Value, stack_rows
from qconvert.formats.io.local_file import octets
from qconvert.ops import Finding, Op
from qconvert.plan.plan import Plan, RowSlice, Unit

if TYPE_CHECKING:
    import numpy as np

    from qconvert.ops import OutputError
    from qconvert.quant.affine import QuantError

Made = Callable[[Unit, int, Value], None]
"""Is shown what rows of a unit, from that number on, became; called from any thread."""
RowsStatistics = Callable[[Unit, int, int], tuple[RowStatistics, ...]]
"""Returns the statistics of rows [start, stop) of a unit's output, by runs of rows; thread-safe."""
Gathered = Callable[[], tuple[Value, int]]
"""Returns the rows that a block reads, and the bytes that were read for them."""
Granule = Callable[[Unit], int]
"""Returns how many rows of a unit are made together."""

# Working memory of one block: large enough to amortise a Python call, small enough to stay near
# the cache and to leave room for many blocks in a small budget.
BLOCK_BYTES = 16 << 20
# A transposed layout costs one read or write per stored row and block: fewer, larger blocks.
TRANSPOSED_BLOCK_BYTES = 64 << 20
# A code that is kept while its weight moves further than this is no longer the code of that weight.
MOST_CODE_ERROR = 0.1
# float32 or code scratch and packed output, per weight, beside the input itself.
SCRATCH_PER_WEIGHT = 6
# A number of a product that is added as rows are read: as it is stored, in float32, and in another order.
MERGED_PER_WEIGHT = 12


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run may take, and what it lets pass. Nothing has a default: the caller states everything.

    `max_memory` bounds the blocks in flight, in bytes (one block is always admitted), and `block_bytes` each
    of them; `checksums` are needed to verify what was written; `most_code_error` is how far codes that are
    kept in another quantization format may move a weight, in its steps.
    """

    jobs: int
    max_memory: int
    block_bytes: int
    checksums: bool
    allow_nonfinite: bool
    most_code_error: float

    def passes(self, found: Finding) -> bool:
        """Whether a tensor in which this was found may be written."""
        if found.overflow or found.code_error > self.most_code_error:
            return False
        return self.allow_nonfinite or (found.nonfinite < 0 and found.bad_row < 0)


def block_bytes(reader: Layout, writer: Layout, max_memory: int) -> int:
    """The working memory of one block, in bytes, whatever the number of threads.

    Sums of errors depend on where units are cut, so that this is the same for any memory but a tiny one.
    """
    transposed = reader.transposed or writer.transposed
    return min(TRANSPOSED_BLOCK_BYTES if transposed else BLOCK_BYTES, max(1, max_memory // 4))


def single_rows(unit: Unit) -> int:
    """The granule of units whose rows do not depend on each other."""
    return 1


def run(
    plan: Plan,
    reader: Reader,
    layout: Layout,
    sink: Sink,
    terms: Terms,
    order: Callable[[Block], tuple[int, int]] | None = None,
    statistics: RowsStatistics | None = None,
    made: Made | None = None,
    granule: Granule = single_rows,
    there: Collection[tuple[str, int]] = (),
    ahead: ReadAhead = at_hand,
) -> Generator[BlockDone, None, None]:
    """Make every tensor of the plan and write it to the sink; yields an event per block.

    `order` sorts the blocks, for sources that are faster in sequence; `statistics` are those of the inputs
    that units name; `made` is shown the rows of every block, from any thread; blocks of a unit are whole
    multiples of its `granule` rows. Blocks that are `there` already, by the name of the output and their
    first row, are left out. `ahead` fetches what blocks read before they do.
    Raises CorruptCheckpoint naming the tensor that holds NaN or Inf, BadRecipe when a value does not fit
    the target dtype or codes would move too far. The caller commits or aborts the sink, and closes the
    generator first: no thread outlives it.
    """
    blocks = ready_blocks(plan, reader, layout, terms, order, statistics, granule, there, ahead)
    left = Counter(block.unit.output.name for block in blocks)
    by_itself = made is not None or statistics is not None

    def one(block: Block) -> BlockDone:
        return _make(block, reader, layout, sink, terms, statistics, made)

    def make(block: Block) -> list[BlockDone]:
        if isinstance(block, Batch):
            return make_batch(
                block, reader, layout, sink, one, checksums=terms.checksums, passes=terms.passes
            )
        return [one(block)]

    work = blocks if by_itself else list(batches(blocks, terms.block_bytes))
    for several in bounded(work, make, terms.jobs, terms.max_memory, ahead):
        for done in several:
            left[done.unit.output.name] -= 1
            is_last = not left[done.unit.output.name]
            yield replace(done, last=True) if is_last and not done.last else done


def ready_blocks(
    plan: Plan,
    reader: Reader,
    layout: Layout,
    terms: Terms,
    order: Callable[[Block], tuple[int, int]] | None,
    statistics: RowsStatistics | None,
    granule: Granule,
    there: Collection[tuple[str, int]],
    ahead: ReadAhead,
) -> list[Block]:
    """The blocks that a run has to make, in its order, of units whose reductions are done (see `run`)."""
    limit = terms.block_bytes
    blocks = [
        block
        for block in _cut_all(plan.units, layout, limit, granule)
        if (block.unit.output.name, block.start) not in there
    ]
    if order:
        blocks.sort(key=order)
    if any(op.needs_reduction for block in blocks for op in block.unit.ops):
        final = _finalized(_needed(plan, blocks), reader, layout, limit, terms, statistics, ahead)
        blocks = [replace(block, unit=final[block.unit.output.name]) for block in blocks]
    return blocks


def _needed(plan: Plan, blocks: Iterable[Block]) -> list[Unit]:
    """The units that blocks are of, and those whose operations share a scale group with theirs."""
    names = {block.unit.output.name for block in blocks}
    groups = {
        op.shared_scale_group for unit in plan.units if unit.output.name in names for op in unit.ops
    } - {""}
    return [
        unit
        for unit in plan.units
        if unit.output.name in names or any(op.shared_scale_group in groups for op in unit.ops)
    ]


def _finalized(
    units: list[Unit],
    reader: Reader,
    layout: Layout,
    limit: int,
    terms: Terms,
    statistics: RowsStatistics | None,
    ahead: ReadAhead,
) -> dict[str, Unit]:
    """The units by name with their reductions done: those that need one are read once more for it.

    Units whose operations share a scale group are finalized together, the others each alone.
    """
    import numpy as np

    reductions = {unit.output.name: op for unit in units for op in unit.ops if op.needs_reduction}
    blocks = [block for unit in units if unit.output.name in reductions for block in cut(unit, layout, limit)]

    def look(block: Block) -> tuple[Block, np.ndarray]:
        unit = block.unit
        value, _ = gather(unit.inputs, reader, rows_read(unit, block.start), rows_read(unit, block.stop))
        given = statistics(unit, block.start, block.stop) if statistics is not None else ()
        for op in unit.ops:
            if op.needs_reduction:
                return block, op.reduce(value)
            value, _ = op.apply(value, given if op.quantizes else ())
        raise AssertionError("a unit without a reduction")

    seen: dict[str, dict[int, np.ndarray]] = {name: {} for name in reductions}
    for block, found in bounded(blocks, look, terms.jobs, terms.max_memory, ahead):
        seen[block.unit.output.name][block.start] = found
    groups: dict[str, list[np.ndarray]] = {}
    for name, op in reductions.items():
        group = groups.setdefault(op.shared_scale_group or name, [])
        group.extend(seen[name][start] for start in sorted(seen[name]))
    every = {group: np.concatenate(found) for group, found in groups.items()}

    def finalized(unit: Unit, op: Op) -> Op:
        return op.finalize(every[op.shared_scale_group or unit.output.name]) if op.needs_reduction else op

    return {
        unit.output.name: unit._replace(ops=tuple(finalized(unit, op) for op in unit.ops))
        if unit.output.name in reductions
        else unit
        for unit in units
    }


def cut(unit: Unit, layout: Layout, limit: int, granule: int = 1) -> list[Block]:
    """Blocks of a unit whose working memory stays near `limit` bytes, aligned as the layout needs.

    They are whole multiples of `granule` rows too.
    """
    output = unit.output
    if output.rows == 0:
        return [Block(unit, 0, 0, 0)]
    rows, per_row, always = _block_rows(unit, layout, limit, granule)
    starts = range(0, output.rows, rows)
    stops = [min(start + rows, output.rows) for start in starts]
    return [
        Block(unit, start, stop, always + per_row * (stop - start))
        for start, stop in zip(starts, stops, strict=True)
    ]


def _cut_all(units: Iterable[Unit], layout: Layout, limit: int, granule: Granule) -> Iterator[Block]:
    """The blocks of units: those that are like an earlier one are cut as that one was."""
    known: dict[tuple[object, ...], list[Block]] = {}
    for unit in units:
        together = granule(unit)
        alike = together, layout.row_alignment(unit.output), *unit.kind
        found = known.get(alike)
        if found is None:
            found = known[alike] = cut(unit, layout, limit, together)
            yield from found
        else:
            for each in found:
                yield Block(unit, each.start, each.stop, each.cost)


def block_cost(unit: Unit, layout: Layout, limit: int) -> int:
    """The working memory of the largest of the blocks that `cut` makes of a unit, in bytes."""
    rows, per_row, always = _block_rows(unit, layout, limit)
    return always + min(rows, unit.output.rows) * per_row


def _block_rows(unit: Unit, layout: Layout, limit: int, granule: int = 1) -> tuple[int, int, int]:
    """The rows of a unit's blocks, the working memory of each row, and that of a block beside its rows."""
    encoding = unit.source.encoding
    nbytes = encoding.dtype.nbytes if isinstance(encoding, Unquantized) else 1
    nbytes = max(nbytes, 4) if unit.is_scaled else nbytes
    per_row, always = max(1, unit.source.width * (nbytes + SCRATCH_PER_WEIGHT)), 0
    if rank := unit.source.adapter_rank:
        per_row += MERGED_PER_WEIGHT * (unit.source.width + rank)
        always = MERGED_PER_WEIGHT * unit.source.width * rank
    step = lcm(granule, layout.row_alignment(unit.output), *(op.granule for op in unit.ops))
    return max(step, limit // per_row // step * step), per_row, always


def _make(
    block: Block,
    reader: Reader,
    layout: Layout,
    sink: Sink,
    terms: Terms,
    statistics: RowsStatistics | None,
    made: Made | None,
) -> BlockDone:
    started = perf_counter()
    found = applied(block, rows_of(block, reader), reader, terms, statistics)
    if made is not None:
        made(block.unit, block.start, found.value)
    return written(block, found, layout, sink, terms, started)


def rows_of(block: Block, reader: Reader) -> Gathered:
    """Reads the rows that a block is made of."""
    first, last = rows_read(block.unit, block.start), rows_read(block.unit, block.stop)
    return lambda: gather(block.unit.inputs, reader, first, last)


@dataclass(frozen=True, slots=True)
class Applied:
    """What the operations of a unit made of the rows of a block, the bytes it read, and what that lost."""

    value: Value
    nbytes: int
    error: QuantError | None
    code_error: float
    output_error: OutputError | None


def applied(
    block: Block, gathered: Gathered, reader: Reader, terms: Terms, statistics: RowsStatistics | None
) -> Applied:
    """Apply a unit's operations to the rows that a block reads; raises what `run` does."""
    unit, first = block.unit, rows_read(block.unit, block.start)
    if block.start == 0 and len(unit.inputs) > 1:
        require_same_constants(unit, reader)
    value, nbytes = gathered()
    given = statistics(unit, block.start, block.stop) if statistics is not None else ()
    error, code_error, output_error = None, 0.0, None
    for op in unit.ops:
        width = value.width if isinstance(value, DenseRows) else unit.source.width
        value, finding = op.apply(value, given if op.quantizes else ())
        error, output_error = finding.error or error, finding.output_error or output_error
        code_error += finding.code_error
        if not terms.allow_nonfinite and (finding.nonfinite >= 0 or finding.bad_row >= 0):
            refuse_nonfinite(unit, first, finding, reader.layout, max(1, width))
        if finding.overflow:
            refuse_overflow(unit, value, finding.overflow)
    if code_error > terms.most_code_error:
        refuse_code_error(unit, code_error)
    return Applied(value, nbytes, error, code_error, output_error)


def written(
    block: Block, found: Applied, layout: Layout, sink: Sink, terms: Terms, started: float
) -> BlockDone:
    """Write what became of a block, on which a thread has worked since `started` (`perf_counter`)."""
    unit, rows = block.unit, block.stop - block.start
    encoded = layout.encode(unit.output, block.start, found.value)
    made = [_write(each, sink, terms) for each in encoded]
    parts = tuple(part for part, _ in made)
    took = perf_counter() - started, sum(nbytes for _, nbytes in made)
    lost = found.code_error, found.output_error
    return BlockDone(unit, block.start, rows, found.nbytes, parts, found.error, False, *lost, *took)


def _write(rows: ArrayRows, sink: Sink, terms: Terms) -> tuple[WrittenRows, int]:
    """Write rows of an array; what is said of them, and their bytes."""
    import numpy as np

    array = np.ascontiguousarray(rows.rows)
    sink.write(rows.name, rows.start, array, rows.column)
    crc32 = zlib.crc32(octets(array)) if terms.checksums else None
    part = WrittenRows(rows.name, rows.start, len(array), array.shape[1], crc32, rows.column)
    return part, array.nbytes


def rows_statistics(
    unit: Unit, start: int, stop: int, source: StatisticsSource | None
) -> tuple[RowStatistics, ...]:
    """The statistics of the inputs of rows [start, stop) of a unit's output, by runs of rows."""
    if source is None or not unit.statistics:
        return ()
    each = max(1, unit.output.rows // len(unit.statistics))
    return tuple(
        RowStatistics(
            max(i * each, start) - start,
            min((i + 1) * each, stop) - start,
            moved_with_columns(
                scaled_moments(source.second_moments(unit.statistics[i]), unit, i * each), unit.ops
            ),
            source.rounding(unit.statistics[i]),
        )
        for i in range(start // each, -(-stop // each))
    )


def moved_with_columns(moments_I: np.ndarray, ops: tuple[Op, ...]) -> np.ndarray:
    """What was measured of columns, where operations move them before codes are chosen, or append zeros."""
    import numpy as np

    for op in takewhile(lambda op: not op.quantizes, ops):
        if op.column_order:
            moments_I = moments_I[list(op.column_order)]
        if op.padded_width is not None:
            moments_I = np.pad(moments_I, (0, op.padded_width - len(moments_I)))
    return moments_I


def rows_read(unit: Unit, row: int) -> int:
    """The row of the inputs at which the rows before `row` of the output end."""
    return row * unit.rows // unit.output.rows if row and unit.output.rows else 0


def gather(inputs: tuple[RowSlice, ...], reader: Rows, start: int, stop: int) -> tuple[Value, int]:
    """Rows [start, stop) of the stacked inputs, and the bytes that were read for them."""
    pieces, offset = [], 0
    for piece in inputs:
        first, last = max(start, offset), min(stop, offset + piece.rows)
        if first < last or start == stop:
            pieces.append(read_slice(reader, piece.within(first - offset, last - offset)))
        offset += piece.rows
    return stack_rows(pieces), sum(piece.arrays[0].nbytes for piece in pieces)


def read_slice(reader: Rows, piece: RowSlice) -> Value:
    """The rows of a slice: read, or made as zeros."""
    import numpy as np

    if piece.zeros_like is not None:
        from qconvert.quant.zero_padding import zero_rows

        zeros = zero_rows(reader.read(piece.tensor, piece.zeros_like, piece.zeros_like + 1), piece.rows)
        return scaled_rows(zeros, piece._replace(factors=Factors())) if piece.factors is not None else zeros
    value = reader.read(piece.tensor, piece.start, piece.stop)
    if piece.step != 1:
        value = value.with_arrays(tuple(np.ascontiguousarray(array[:: piece.step]) for array in value.arrays))
    if piece.pieces > 1:
        assert isinstance(value, DenseRows), piece
        value = DenseRows(value.rows_RI.reshape(value.rows * piece.pieces, -1), value.dtype)
    return value if piece.factors is None else scaled_rows(value, piece)
