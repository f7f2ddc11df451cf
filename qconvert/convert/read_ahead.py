"""Estimates which bytes of a source each block of a plan reads, so that they can be fetched before it runs.

A wrong estimate only costs time and bytes: a block that reads more requests
it by itself, and one that reads less has fetched it in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from qconvert.checkpoint.network import Network
from qconvert.checkpoint.open import Checkpoint
from qconvert.checkpoint.remote_bytes import RemoteBytes
from qconvert.checkpoint.windows import Range, Windows
from qconvert.convert.blocks import Block, ReadAhead
from qconvert.convert.runner import rows_read
from qconvert.core.dtypes import TensorSpec
from qconvert.formats.huggingface.folder import HFCheckpoint
from qconvert.plan.plan import RowSlice

if TYPE_CHECKING:
    from qconvert.convert.job import OpenedModel

T = TypeVar("T")
# Smaller arrays are read whole where a part of them is needed: scales of all rows, orders of columns.
_WHOLE_BYTES = 256 << 10


def read_ahead(source: OpenedModel, budget: int) -> ReadAhead | None:
    """What fetches for a run from this source within so many bytes; None where all is on this disk."""
    files, network = source.checkpoint.files, source.location.network
    if network is None or not isinstance(files, HFCheckpoint):
        return None
    sources = [shard.source if isinstance(shard.source, RemoteBytes) else None for shard in files.shards]
    return _Ahead(source.checkpoint, sources, budget, network) if any(sources) else None


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Fetches for the blocks of one run after another (`block_pool.ReadAhead`)."""

    checkpoint: Checkpoint
    sources: Sequence[RemoteBytes | None]
    budget: int
    network: Network

    @contextmanager
    def __call__(self, blocks: Sequence[Block]) -> Generator[_Fetching, None, None]:
        needs = {id(b): tuple(part for own in b.alone for part in self._needed(own)) for b in blocks}
        ordered = sorted(blocks, key=lambda block: _first(needs[id(block)]))
        with Windows(
            self.sources, [needs[id(block)] for block in ordered], self.budget, self.network
        ) as held:
            yield _Fetching(ordered, held, {id(block): number for number, block in enumerate(ordered)})

    def _needed(self, block: Block) -> Iterator[Range]:
        """The bytes on servers that a block reads."""
        unit, passed = block.unit, 0
        first, stop = rows_read(unit, block.start), rows_read(unit, block.stop)
        for piece in unit.inputs:
            begin, end = max(first, passed), min(stop, passed + piece.rows)
            if begin < end:
                yield from self._of_piece(piece, begin - passed, end - passed)
            passed += piece.rows

    def _of_piece(self, piece: RowSlice, begin: int, end: int) -> Iterator[Range]:
        tensor, layout = piece.tensor, self.checkpoint.layout
        if piece.zeros_like is not None:
            rows = piece.zeros_like, piece.zeros_like + 1
        else:
            part = piece.within(begin, end)
            rows = part.start, part.stop
        for array in layout.stored_arrays(tensor):
            found = self.checkpoint.files.specs.get(array.name)
            if found is None:
                continue
            file, offset = self.checkpoint.files.source_offset(array.name)
            source = self.sources[file]
            if source is None:
                continue
            first, last = _rows_of(found, tensor.rows, rows, whole=layout.transposed)
            each = found.width * found.dtype.nbytes
            start = max(offset + first * each, source.at_hand)
            if start < offset + last * each:
                yield Range(file, start, offset + last * each)


def _rows_of(array: TensorSpec, of: int, rows: tuple[int, int], *, whole: bool) -> tuple[int, int]:
    """The rows of a stored array that rows [first, stop) of its tensor, of so many, are in."""
    if whole or not of or array.nbytes <= _WHOLE_BYTES:
        return 0, array.rows
    return rows[0] * array.rows // of, -(-rows[1] * array.rows // of)


def _first(ranges: Sequence[Range]) -> tuple[int, int]:
    """Where what a block reads begins; what reads nothing comes first."""
    return min(((part.file, part.begin) for part in ranges), default=(-1, 0))


@dataclass(frozen=True, slots=True)
class _Fetching:
    """Blocks in the order in which their bytes come, and what holds them (`block_pool.Fetching`)."""

    blocks: Sequence[Block]
    windows: Windows
    numbers: dict[int, int]

    def made(self, make: Callable[[Block], T], block: Block) -> T:
        with self.windows.block(self.numbers[id(block)]):
            return make(block)

    def abort(self) -> None:
        self.windows.abort()
