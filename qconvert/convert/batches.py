"""Makes small tensors together: those that lie side by side in the source, of one kind in one call each.

A model of experts one by one has very many small tensors. To read, compute, encode and write each by itself
costs more than its numbers do; here that is done once for many. What is said of every tensor, its bytes
included, is what making it alone would say.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from qconvert.convert.blocks import Block
from qconvert.convert.outcome import BlockDone, WrittenRows
from qconvert.core.encodings import AffineInt, Codebook, Encoding
from qconvert.core.protocols import ArrayRows, Layout, Reader, Sink
from qconvert.core.values import Value
from qconvert.ops import Finding
from qconvert.ops.base import CLEAN
from qconvert.plan.plan import Unit

# Blocks of at most this share of the working memory of one are made together.
SMALL = 1 / 8


@dataclass(frozen=True, slots=True)
class Batch(Block):
    """Small blocks, each the whole of a unit, one after another in the source; as a block, the first one."""

    members: tuple[Block, ...]

    @property
    def alone(self) -> Sequence[Block]:
        return self.members


def batches(blocks: Iterable[Block], limit: int) -> Iterator[Block]:
    """The blocks, runs of small ones as batches of at most `limit` bytes of working memory."""
    run: list[Block] = []
    cost = 0
    known: dict[tuple[object, ...], bool] = {}
    for block in blocks:
        fits = block.cost <= limit * SMALL and block.stop - block.start == block.unit.output.rows > 0
        if fits:
            kind = block.unit.kind
            fits = known[kind] if kind in known else known.setdefault(kind, _is_alone(block.unit))
        if run and (not fits or cost + block.cost > limit):
            yield _batch(run, cost)
            run, cost = [], 0
        if fits:
            run.append(block)
            cost += block.cost
        else:
            yield block
    if run:
        yield _batch(run, cost)


def _is_alone(unit: Unit) -> bool:
    """Whether a unit is made of one whole tensor as it is stored, row by row."""
    first = unit.inputs[0]
    return (
        len(unit.inputs) == 1
        and first.step == 1
        and first.zeros_like is None
        and first.factors is None
        and first.stop - first.start == first.tensor.rows
        and not any(op.needs_reduction for op in unit.ops)
        and _is_of_rows(unit.source.encoding)
        and _is_of_rows(unit.output.encoding)
    )


def _is_of_rows(encoding: Encoding) -> bool:
    """Whether rows are all there is to a tensor: no order of columns, no number of all of it."""
    if isinstance(encoding, Codebook):
        return encoding.second is None
    return not (isinstance(encoding, AffineInt) and encoding.act_order)


def _batch(run: Sequence[Block], cost: int) -> Block:
    first = run[0]
    return first if len(run) == 1 else Batch(first.unit, 0, first.stop, cost, tuple(run))


def make_batch(
    batch: Batch,
    reader: Reader,
    layout: Layout,
    sink: Sink,
    alone: Callable[[Block], BlockDone],
    *,
    checksums: bool,
    passes: Callable[[Finding], bool],
) -> list[BlockDone]:
    """Make the tensors of a batch; where what is found in one does not pass, each `alone`, which says why."""
    started = perf_counter()
    made: list[_Made] = []
    kinds = _kinds(batch.members)
    values = reader.read_stacked([[block.unit.source for block in members] for members in kinds])
    for members, value in zip(kinds, values, strict=True):
        found = _of_one_kind(members, value, layout, passes)
        if found is None:
            return [alone(block) for block in batch.members]
        made += found
    sink.write_all(array for each in made for array in each.arrays)
    seconds = (perf_counter() - started) / len(made)
    return [each.event(seconds, checksums=checksums) for each in made]


@dataclass(frozen=True, slots=True)
class _Made:
    """What a tensor became: its arrays, the bytes that were read, and what was noticed."""

    block: Block
    arrays: tuple[ArrayRows, ...]
    nbytes: int
    finding: Finding

    def event(self, seconds: float, *, checksums: bool) -> BlockDone:
        parts = tuple(
            WrittenRows(
                name,
                start,
                rows.shape[0],
                rows.shape[1],
                zlib.crc32(rows.data) if checksums else None,
                column,
            )
            for name, start, rows, column in self.arrays
        )
        unit, found = self.block.unit, self.finding
        lost = found.error, True, found.code_error, None
        nbytes = sum(each.rows.nbytes for each in self.arrays)
        return BlockDone(unit, 0, self.block.stop, self.nbytes, parts, *lost, seconds, nbytes)


def _kinds(blocks: Sequence[Block]) -> list[list[Block]]:
    """The blocks by what they have in common but their names."""
    found: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        found.setdefault(block.unit.kind, []).append(block)
    return list(found.values())


def _of_one_kind(
    blocks: Sequence[Block], value: Value, layout: Layout, passes: Callable[[Finding], bool]
) -> list[_Made] | None:
    """The tensors of these blocks, of what was read for all; None where something in one does not pass."""
    unit, count = blocks[0].unit, len(blocks)
    nbytes = value.arrays[0].nbytes // count
    findings = [CLEAN] * count
    for op in unit.ops:
        value, found = op.apply_stacked(value, count)
        findings = [_both(before, after) for before, after in zip(findings, found, strict=True)]
    if not all(map(passes, findings)):
        return None
    value = layout.as_stored(value)
    each = unit.output.rows
    made = []
    for number, (block, finding) in enumerate(zip(blocks, findings, strict=True)):
        own = value.with_arrays(tuple(array[number * each : (number + 1) * each] for array in value.arrays))
        arrays = tuple(map(_contiguous, layout.encode(block.unit.output, 0, own)))
        made.append(_Made(block, arrays, nbytes, finding))
    return made


def _both(before: Finding, after: Finding) -> Finding:
    """What was noticed by two operations, one after the other."""
    if before == CLEAN:
        return after
    return Finding(
        max(before.nonfinite, after.nonfinite),
        before.overflow + after.overflow,
        after.error or before.error,
        max(before.bad_row, after.bad_row),
        before.code_error + after.code_error,
    )


def _contiguous(rows: ArrayRows) -> ArrayRows:
    if rows.rows.flags.c_contiguous:
        return rows
    return ArrayRows(rows.name, rows.start, np.ascontiguousarray(rows.rows), rows.column)
