"""Estimates how long a conversion still takes, from its plans and from what it took so far.

What a weight costs depends on what becomes of it, so that an embedding that is copied first says little of
the layers that are quantized after it. Kinds of work are therefore counted apart: one that was met costs what
it has cost so far, one that was not its price below, in the proportion in which the others kept to theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from qconvert.convert.outcome import BlockDone
from qconvert.core.encodings import identity
from qconvert.formats.io.planned_files import FilePlan
from qconvert.formats.io.read_back import bytes_to_verify
from qconvert.models.parameter_table import form_bytes
from qconvert.plan.plan import Plan, Unit

# Prices, in nanoseconds of one thread (measured on x86-64 with AVX2): of a weight that is copied or cast, of
# one that gets new codes, and of a byte that is read back.
_COPIED, _CODED, _VERIFIED = 2.0, 7.0, 1.8
# The part of what is verified after which what it took counts for more than what was expected.
_TRUSTED = 0.05
# A kind of work with one in so many of the weights made says something of the machine; norms do not.
_LARGE = 20


@dataclass(slots=True)
class _Kind:
    """Work of one kind: weights still to be made, those made, and the seconds these took."""

    price: float
    left: int = 0
    done: int = 0
    seconds: float = 0.0


class _Rows(NamedTuple):
    """What is counted of a block's rows; one unit that has them is held, so that identities stay."""

    unit: Unit
    kind: _Kind
    weights: int
    nbytes: int


class Work:
    """How much of a conversion is done, in bytes, and how long the rest takes; is told of events."""

    def __init__(
        self,
        plans: Iterable[Plan],
        files: Iterable[FilePlan] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`files` are those that are written and will be verified; none where nothing is verified."""
        self.to_read = self.to_write = self.read = self.written = self.verified = 0
        self.to_verify = bytes_to_verify(files)
        self._clock = clock
        self._began: float | None = None
        self._verifying: float | None = None
        self._expected = 0.0
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._alike: dict[tuple[int, ...], _Rows] = {}
        for unit, count in chain.from_iterable(plan.kinds for plan in plans):
            self._kind(unit).left += count * unit.output.rows * unit.source.width
            self.to_read += count * sum(
                form_bytes(piece.tensor.encoding, (piece.stored_rows, piece.tensor.width))
                for piece in unit.inputs
            )
            self.to_write += count * _written(unit, unit.output.rows)

    def add(self, done: BlockDone) -> None:
        """Take the event of a block; one that an earlier run has made says nothing of the time."""
        rows = self._rows(done)
        weights, kind = rows.weights, rows.kind
        self.read += done.bytes_read
        self.written += rows.nbytes
        kind.left -= weights
        if done.seconds:
            if self._began is None:
                self._began = self._clock() - done.seconds
            kind.done += weights
            kind.seconds += done.seconds

    def verify(self, done: int, total: int) -> None:
        """Take note of how much was read back."""
        if self._verifying is None:
            self._expected = self._to_verify_seconds()
            self._verifying = self._clock()
        self.verified, self.to_verify = done, total

    def left(self) -> float | None:
        """The seconds that are left; None before anything is known."""
        if self._verifying is not None:
            share = self.verified / self.to_verify if self.to_verify else 1.0
            took = (self._clock() - self._verifying) / share if share else 0.0
            trust = share / (share + _TRUSTED)
            return (1 - share) * (trust * took + (1 - trust) * (self._expected or took))
        if self._began is None:
            return None
        kinds = self._kinds.values()
        dearer, threads = self._pace()
        rest = sum(k.left * (k.seconds / k.done if k.done else k.price * dearer) for k in kinds)
        return rest / threads + self._to_verify_seconds()

    def _pace(self) -> tuple[float, float]:
        """How much dearer work has been than its price, in seconds a nanosecond; how many threads worked."""
        kinds = self._kinds.values()
        busy, price = sum(k.seconds for k in kinds), sum(k.done * k.price for k in kinds)
        elapsed = self._clock() - self._began if self._began is not None else 0.0
        return busy / max(price, 1.0), max(busy / max(elapsed, 1e-9), 1e-9)

    def _to_verify_seconds(self) -> float:
        """The seconds that verifying everything will take; 0 before anything is known.

        Codes that are chosen on a text cost a hundred times their price, and most of the time between them is
        the text's, so that the kind that kept to its price best says how dear reading back is.
        """
        if self._began is None:
            return 0.0
        made = sum(kind.done for kind in self._kinds.values())
        large = [kind for kind in self._kinds.values() if kind.done * _LARGE >= made and kind.done]
        dearer = min((kind.seconds / (kind.done * kind.price) for kind in large), default=0.0)
        return self.to_verify * _VERIFIED * dearer / max(self._pace()[1], 1.0)

    def _rows(self, done: BlockDone) -> _Rows:
        """What is counted of a block, looked up where one like it was counted before."""
        unit = done.unit
        source, output = unit.source, unit.output
        alike = identity(source.encoding), identity(output.encoding), done.rows, source.width, output.width
        found = self._alike.get(alike)
        if found is None:
            weights, nbytes = done.rows * source.width, _written(unit, done.rows)
            found = self._alike[alike] = _Rows(unit, self._kind(unit), weights, nbytes)
        return found

    def _kind(self, unit: Unit) -> _Kind:
        name = unit.source.encoding.label, unit.output.encoding.label
        if name not in self._kinds:
            self._kinds[name] = _Kind(_CODED if unit.quantizes else _COPIED)
        return self._kinds[name]


def _written(unit: Unit, rows: int) -> int:
    return form_bytes(unit.output.encoding, (rows, unit.output.width))
