"""Shows what a user sees while a plan runs: a note about compiling, and a bar over bytes, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from qconvert.convert.execute import Listener
    from qconvert.plan.plan import Plan

COMPILING = "compiling kernels: first use on this machine, cached afterwards"


def compile_kernels(plan: Plan, *, talks: bool) -> None:
    """Load the number kernels before the work, and say so where that means compiling them."""
    from qconvert.convert.precompile import warm

    with explained_if_slow(talks=talks):
        warm(plan)


@contextmanager
def explained_if_slow(*, talks: bool) -> Iterator[None]:
    """Around a first call of kernels: says what the wait is for, if there is one.

    The first use on a machine compiles (seconds); afterwards they come from a cache (milliseconds).
    """
    from threading import Timer

    timer = Timer(0.7, lambda: click.echo(COMPILING, err=True) if talks else None)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def counted(unit: str, *, talks: bool, scaled: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A bar that is told how much is done of how much, when somebody is watching; else None.

    `scaled` numbers are written like 1.2M.
    """
    if not talks or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit=unit, unit_scale=scaled, file=sys.stderr, leave=False) as bar:

        def tell(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield tell


@contextmanager
def progress(plan: Plan, *, talks: bool) -> Iterator[Listener]:
    """A bar over the bytes that the plan reads, when somebody is watching."""
    if not talks or not sys.stderr.isatty():
        yield lambda done: None
        return
    from tqdm import tqdm

    from qconvert.models.parameter_table import form_bytes

    total = sum(
        form_bytes(piece.tensor.encoding, (piece.rows, piece.tensor.width))
        for unit in plan.units
        for piece in unit.inputs
    )
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:

        def listen(done: Any) -> None:
            bar.set_postfix_str(done.unit.output.name, refresh=False)
            bar.update(done.bytes_read)

        yield listen
