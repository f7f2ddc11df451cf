"""Finds how calibration fits a memory: what costs time alone first, then what costs accuracy, least first.

In this order: smaller batches, down to one window, of the MLP down to 256 tokens; blocks of fewer rows;
weights that are read whenever they are needed; then for inputs that are too wide the Hessian factored in
float32, no target shift, and diagonal blocks of fewer and fewer columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.calibrate.memory import (
    BACKWARD_TOKENS,
    BLOCK_BYTES,
    BLOCKS,
    Needs,
    Work,
    collecting,
    layer_hessians,
    layer_samples,
    needs,
    weighing,
)
from qconvert.calibrate.memory_limit import MemoryLimit
from qconvert.calibrate.savings import BATCH_TOKENS, WHOLE, HessianForm, Savings

_FEWEST_TOKENS = 256
_FEWEST_COLUMNS = 256
_FEWEST_BLOCK_BYTES = 1 << 20
_SHORT_WINDOW = 512
_HESSIAN_COPIES = 4


def fitted(work: Work, limit: MemoryLimit) -> tuple[Savings, Needs]:
    """The least savings with which a run keeps within a limit, and what it takes then.

    Where even all savings leave it larger: raises BadRecipe for a strict limit, else returns all of them.
    """

    def fits(savings: Savings) -> bool:
        return needs(work, savings).memory <= limit.room

    savings = Savings()
    if not fits(savings):
        savings = _least(work)
        _check(needs(work, savings).memory, work, limit)
        for width in work.widths:
            savings = next(filter(fits, _kept(savings, width, _forms(work, width))), savings)
        for choices in (_held, _rows, _batches, _backward):
            savings = next(filter(fits, choices(savings)), savings)
    return savings, needs(work, savings)


def fitted_collection(work: Work, tokens: int, limit: MemoryLimit) -> tuple[int, bool]:
    """How mean squares are measured within a limit: tokens of a batch, and whether weights are not held.

    At most `tokens` tokens, down to those of one window. Raises BadRecipe where that is too much for a strict
    limit.
    """
    choices = [(each, streamed) for streamed in (False, True) for each in fewer(tokens, work.window)]
    for each, streamed in choices:
        if collecting(work, each, streamed=streamed) <= limit.room:
            return each, streamed
    each, streamed = choices[-1]
    _check(collecting(work, each, streamed=streamed), work, limit)
    return each, streamed


def fitted_weighing(work: Work, limit: MemoryLimit, hessians: int = 0) -> tuple[Savings, int]:
    """How encodings are weighed within a limit, and the bytes that the Hessians of a layer may take.

    These are `hessians` at most, samples of rows included; beside them are their means, factors, and one in
    float64: four times as much. Smaller batches come first, then weights that are not held, then fewer
    Hessians. Raises BadRecipe where even none is too much for a strict limit.
    """
    wanted = min(layer_hessians(work) + layer_samples(work), hessians)
    savings, room = Savings(), 0
    for streamed in (False, True):
        for each in fewer(BACKWARD_TOKENS, work.window):
            savings = Savings(backward_tokens=each if each != BACKWARD_TOKENS else None, streamed=streamed)
            room = (limit.room - weighing(work, savings)) // _HESSIAN_COPIES
            if room >= wanted:
                return savings, hessians
    _check(weighing(work, savings), work, limit)
    return savings, max(0, room)


def fewer(tokens: int, window: int) -> list[int]:
    """Tokens of a batch: so many, half as many, and so on down to those of a window."""
    found = [tokens]
    while found[-1] > window:
        found.append(max(window, found[-1] // 2))
    return found


def _least(work: Work) -> Savings:
    forms = {width: _forms(work, width)[-1] for width in work.widths}
    backward = min(BACKWARD_TOKENS, work.window) if work.calibration.traits.over_rows else None
    return Savings(_FEWEST_TOKENS, backward, True, forms, BLOCKS * _FEWEST_BLOCK_BYTES)


def _forms(work: Work, width: int) -> list[HessianForm]:
    """How the Hessian of an input may be kept, what costs the least accuracy first."""
    shifts = work.calibration.shift and work.experts(width) == 1
    forms = [WHOLE, HessianForm(True), *([HessianForm(True, False)] if shifts else [])]
    columns = _FEWEST_COLUMNS
    blocks = []
    while columns < width:
        blocks.append(HessianForm(True, False, columns))
        columns *= 2
    return [*forms, *reversed(blocks)]


def _kept(savings: Savings, width: int, forms: list[HessianForm]) -> Iterator[Savings]:
    others = {each: form for each, form in savings.forms.items() if each != width}
    for form in forms:
        yield replace(savings, forms=others if form == WHOLE else {**others, width: form})


def _held(savings: Savings) -> Iterator[Savings]:
    yield replace(savings, streamed=False)


def _rows(savings: Savings) -> Iterator[Savings]:
    yield replace(savings, rows_bytes=None)
    size = BLOCK_BYTES // 2
    while size > _FEWEST_BLOCK_BYTES:
        yield replace(savings, rows_bytes=BLOCKS * size)
        size //= 2


def _batches(savings: Savings) -> Iterator[Savings]:
    tokens = BATCH_TOKENS
    while tokens > _FEWEST_TOKENS:
        yield replace(savings, batch_tokens=tokens)
        tokens //= 2


def _backward(savings: Savings) -> Iterator[Savings]:
    tokens = BACKWARD_TOKENS
    yield replace(savings, backward_tokens=None)
    while savings.backward_tokens is not None and tokens > savings.backward_tokens:
        yield replace(savings, backward_tokens=tokens)
        tokens //= 2


def _check(needed: int, work: Work, limit: MemoryLimit) -> None:
    """Raise BadRecipe where a run needs more than a strict limit allows."""
    shorter = f", or --window {work.window // 2} for shorter windows" if work.window > _SHORT_WINDOW else ""
    limit.check(needed, "calibrating", shorter)
