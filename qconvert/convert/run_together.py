"""Runs several plans of one source together: what more than one of them reads is read once.

Every plan keeps its own blocks, so that its output is that of a run of its own. Blocks of different plans
that read the same rows are made one after another by one thread, from one reading; where their units are the
same (the Q6_K tensors of two mixtures), from one result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from qconvert.convert.blocks import Block, ReadAhead, at_hand, bounded
from qconvert.convert.outcome import BlockDone
from qconvert.convert.runner import (
    Applied,
    Terms,
    applied,
    ready_blocks,
    rows_of,
    rows_read,
    rows_statistics,
    single_rows,
    written,
)
from qconvert.core.protocols import Layout, Reader, Sink
from qconvert.core.statistics import StatisticsSource
from qconvert.plan.plan import Plan, Unit


@dataclass(frozen=True, slots=True)
class Part:
    """One of the plans that run together: how and where it is written, and the blocks that are `there`.

    `terms` are its own; threads and memory are those of the first plan.
    """

    plan: Plan
    layout: Layout
    sink: Sink
    terms: Terms
    statistics: StatisticsSource | None = None
    there: Collection[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Joint(Block):
    """Blocks that read the same rows, each with the number of its plan; as a block, the first of them."""

    members: tuple[tuple[int, Block], ...]


def run_together(
    parts: Sequence[Part],
    reader: Reader,
    order: Callable[[Block], tuple[int, int]],
    ahead: ReadAhead = at_hand,
) -> Generator[tuple[int, BlockDone], None, None]:
    """Make every tensor of the plans, and yield an event per block with the number of its plan.

    `order` is where a block's rows begin in the source. Raises what `runner.run` does; the caller commits or
    aborts the sinks, and closes the generator first.
    """
    statistics = [
        partial(rows_statistics, source=part.statistics) if part.statistics else None for part in parts
    ]
    blocks = [
        ready_blocks(part.plan, reader, part.layout, part.terms, order, given, single_rows, part.there, ahead)
        for part, given in zip(parts, statistics, strict=True)
    ]
    left = [Counter(block.unit.output.name for block in own) for own in blocks]

    def make(joint: Block) -> list[tuple[int, BlockDone]]:
        assert isinstance(joint, Joint)
        made: list[tuple[int, BlockDone]] = []
        results: list[tuple[int, Unit, Applied]] = []
        started = perf_counter()
        rows = rows_of(joint, reader)()
        for number, block in joint.members:
            part, same = parts[number], _same(number, block.unit, results, parts)
            found = same or applied(block, lambda: rows, reader, part.terms, statistics[number])
            results.append((number, block.unit, found))
            made.append((number, written(block, found, part.layout, part.sink, part.terms, started)))
            started = perf_counter()
        return made

    terms = parts[0].terms
    for done in bounded(joined(blocks, order), make, terms.jobs, terms.max_memory, ahead):
        for number, each in done:
            name = each.unit.output.name
            left[number][name] -= 1
            yield number, replace(each, last=left[number][name] == 0)


def joined(blocks: Sequence[Sequence[Block]], order: Callable[[Block], tuple[int, int]]) -> list[Joint]:
    """The blocks of all plans in the order of the source, those that read the same rows as one.

    It needs the working memory of the largest: they run one after another.
    """
    found: dict[object, list[tuple[int, Block]]] = {}
    for number, own in enumerate(blocks):
        for block in own:
            unit = block.unit
            read = unit.inputs, rows_read(unit, block.start), rows_read(unit, block.stop)
            found.setdefault(read, []).append((number, block))
    joints = []
    for members in found.values():
        first = members[0][1]
        cost = max(block.cost for _, block in members)
        joints.append(Joint(first.unit, first.start, first.stop, cost, tuple(members)))
    return sorted(joints, key=order)


def _same(
    number: int, unit: Unit, results: Sequence[tuple[int, Unit, Applied]], parts: Sequence[Part]
) -> Applied | None:
    """What an earlier plan made of the same rows by the same unit, under the same terms and statistics."""
    part = parts[number]
    for other, earlier, found in results:
        terms, source = parts[other].terms, parts[other].statistics
        if unit == earlier and part.terms == terms and (part.statistics is source or not unit.statistics):
            return found
    return None
