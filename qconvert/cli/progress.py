"""Shows on stderr how far a run is: a note about compiling, a bar, or lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.printing import bare, escaped

if TYPE_CHECKING:
    from qconvert.convert.outcome import BlockDone
    from qconvert.convert.time_left import Work
    from qconvert.convert.writing import Listener
    from qconvert.plan.plan import Plan

COMPILING = "compiling kernels; later runs load them from a cache"
NO_CACHE = (
    "compiling kernels on every run: their cache cannot be written; set NUMBA_CACHE_DIR to a folder that can"
)


def compile_kernels(plan: Plan, *, talks: bool) -> None:
    """Load the number kernels before the work, and say so where that means compiling them."""
    from qconvert.convert.precompile import warm

    with compiling_explained(talks=talks):
        warm(plan)


@contextmanager
def compiling_explained(*, talks: bool) -> Iterator[None]:
    """Around a first call of kernels: says once that one is compiled, and whether that will be so again."""
    from qconvert.core.compiling import heard

    said: set[str] = set()

    def say(cached: bool) -> None:
        line = COMPILING if cached else NO_CACHE
        if talks and line not in said:
            said.add(line)
            click.echo(line, err=True)

    with heard(say):
        yield


Count = Callable[[float, int], None]
"""Is told how much is done of how much."""


@contextmanager
def counted(
    unit: str, *, talks: bool, units: str | None = None, also: Count = lambda done, total: None
) -> Iterator[Count]:
    """A bar that is told how much is done of how much; lines without a terminal; nothing under --quiet.

    `units` is the plural that lines name, `unit` and an s without it; `also` is told the same.
    """
    with _shown(unit, units or f"{unit}s", talks=talks) as show:

        def tell(done: float, total: int) -> None:
            show(done, total)
            also(done, total)

        yield tell


@contextmanager
def _shown(unit: str, units: str, *, talks: bool) -> Iterator[Count]:
    if not talks:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        yield Lines(units).tell
        return
    from tqdm import tqdm

    with tqdm(unit=unit, file=bare(sys.stderr), leave=False, dynamic_ncols=True) as bar:

        def tell(done: float, total: int) -> None:
            bar.total = total
            bar.n = done
            bar.update(0)

        yield tell


@contextmanager
def layers_passed(
    tokens: int, *, talks: bool, also: Count = lambda done, total: None
) -> Iterator[Callable[[int, int], None]]:
    """A bar over the passes of a text of so many tokens through layers, in tenths as its batches pass.

    It is told how many tokens are done of how many, each counted once for every pass through a layer: a
    backward run passes through most layers twice. `also` is told the passes.
    """
    with counted("pass", talks=talks, units="passes through layers", also=also) as tell:

        def passed(done: int, total: int) -> None:
            tell(round(done / tokens, 1), total // tokens)

        yield passed


@dataclass(frozen=True, slots=True)
class Bars:
    """What a conversion tells of its blocks, and then of how many bytes of how many were read back."""

    listen: Listener
    verified: Callable[[int, int], None]


@contextmanager
def progress(work: Work, *, talks: bool) -> Iterator[Bars]:
    """A bar over the bytes that are read, then one over those that are verified, with the time until the end.

    Lines without a terminal; nothing under --quiet. The work is told of all events first.
    """
    if not talks:
        yield Bars(work.add, work.verify)
        return
    if not sys.stderr.isatty():
        reading, verifying = Lines("bytes"), Lines("bytes to verify")

        def count(done: BlockDone) -> None:
            work.add(done)
            reading.tell(work.read, work.to_read, work.left)

        def check(done: int, total: int) -> None:
            work.verify(done, total)
            verifying.tell(done, total, work.left)

        yield Bars(count, check)
        return
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        """Shows the time until the end of all stages, where tqdm knows its own."""

        @property
        def format_dict(self) -> dict[str, Any]:
            left = work.left()
            return {**super().format_dict, "left": "?" if left is None else duration(left)}

    with Bar(
        total=work.to_read,
        unit="B",
        unit_scale=True,
        file=bare(sys.stderr),
        leave=False,
        dynamic_ncols=True,
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {left} left, {rate_fmt}{postfix}]",
    ) as bar:

        def listen(done: BlockDone) -> None:
            work.add(done)
            bar.set_postfix_str(
                shortened(escaped(done.unit.output.name), (bar.ncols or 80) - _BAR), refresh=False
            )
            bar.update(done.bytes_read)

        def verified(done: int, total: int) -> None:
            work.verify(done, total)
            if bar.desc != _VERIFYING:
                bar.set_postfix_str("", refresh=False)
                bar.set_description_str(_VERIFYING, refresh=False)
                bar.reset(total)
            bar.update(done - bar.n)

        yield Bars(listen, verified)


_VERIFYING = "verifying"
# Columns that a bar, its numbers, its rate and its time take.
_BAR = 70


def shortened(name: str, columns: int) -> str:
    """The end of a name, which tells tensors apart, in so many columns; nothing where there is no room."""
    if len(name) <= columns:
        return name
    return f"...{name[3 - columns :]}" if columns > 8 else ""


class Lines:
    """Reports progress where there is no terminal: a line on stderr every 30 seconds."""

    EVERY = 30.0

    def __init__(self, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit, self._clock = unit, clock
        self._start = self._told = clock()

    def tell(self, done: float, total: int, estimate: Callable[[], float | None] = lambda: None) -> None:
        """Take note of the work that is done, of `total`; prints nothing when the work ends.

        `estimate` are the seconds that are left; else they follow from what was done.
        """
        now = self._clock()
        if now - self._told < self.EVERY or not 0 < done < total:
            return
        self._told = now
        known = estimate()
        left = (now - self._start) * (total - done) / done if known is None else known
        line = f"{100 * done / total:.0f} % of {total:,} {self._unit}, about {duration(left)} left"
        click.echo(line, err=True)


def duration(seconds: float) -> str:
    """A time in words: `40 s`, `12 min`, `3 h 20 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
