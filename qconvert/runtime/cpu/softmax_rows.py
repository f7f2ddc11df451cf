"""Adds blocks of logits to running softmaxes in one pass over memory.

A thread takes rows; of a row, as many words at a time as the first-level cache holds: their maximum first,
then their exponentials. Those of a sum are added in float32 by lane, 64 at most, and from there in float64.
Legend: N tokens, W words of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, first, splat
from qconvert.quant.simd.products import fused
from qconvert.runtime.cpu.exponential import MISSING, exp, highest_of
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import float_at, floats, put_float, routine, total
from qconvert.runtime.running_softmax import RunningSoftmax

_WORDS = 64 * LANES
"""Words of a row that are taken in together."""
_F = np.float32


@dataclass(slots=True)
class CompiledSoftmax(RunningSoftmax):
    """A running softmax on CPUs."""

    def fold(self, x_NW: Tensor, start: int) -> None:
        """Take in the logits of the words from `start` on, float32."""
        x_NW = _rows(x_NW)
        _fold(*_place(x_NW), start, *self._state())

    def fold_beside(self, x_NW: Tensor, start: int, a_NW: Tensor, reference: RunningSoftmax) -> None:
        """The same, beside the logits of a reference that has taken them in."""
        x_NW, a_NW = _rows(x_NW), _rows(a_NW)
        cross = self.cross_N.numpy(), self.cross_max_N.numpy(), reference.max_N.numpy()
        _fold_beside(*_place(x_NW), start, *self._state(), a_NW.data_ptr(), a_NW.stride(0), *cross)

    def _state(self) -> tuple[np.ndarray, ...]:
        fields = self.targets_N, self.max_N, self.sum_N, self.top_N, self.target_N
        return tuple(each.numpy() for each in fields)


def _rows(x_NW: Tensor) -> Tensor:
    """Logits whose rows are contiguous, though not one after the other."""
    return x_NW if x_NW.stride(1) == 1 else x_NW.contiguous()


def _place(x_NW: Tensor) -> tuple[int, int, int]:
    return x_NW.data_ptr(), x_NW.stride(0), x_NW.shape[1]


@routine
def _fold_share(x, step, width, start, target_N, max_N, sum_N, top_N, found_N, rank, size):  # type: ignore[no-untyped-def]
    """Take in a thread's rows."""
    count = max_N.size
    rest = np.empty(LANES, np.float32)
    for n in range(count * rank // size, count * (rank + 1) // size):
        _fold_row(x + 4 * step * n, width, start, n, target_N, max_N, sum_N, top_N, found_N, rest.ctypes.data)


@routine
def _fold_beside_share(  # type: ignore[no-untyped-def]
    x, step, width, start, target_N, max_N, sum_N, top_N, found_N,
    a, a_step, cross_N, cross_max_N, a_max_N, rank, size,
):  # fmt: skip
    """Take in a thread's rows, and what they add to the cross sums."""
    count = max_N.size
    rest, a_rest = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for n in range(count * rank // size, count * (rank + 1) // size):
        row, a_row = x + 4 * step * n, a + 4 * a_step * n
        _fold_row(row, width, start, n, target_N, max_N, sum_N, top_N, found_N, rest.ctypes.data)
        most = a_max_N[n]
        if most != cross_max_N[n]:
            cross_N[n] *= np.exp(np.float64(cross_max_N[n]) - np.float64(most))
            cross_max_N[n] = most
        for begin in range(0, width, _WORDS):
            words = min(_WORDS, width - begin)
            whole = words // LANES * LANES
            cross_N[n] += _cross(a_row + 4 * begin, row + 4 * begin, whole, most)
            if whole < words:
                _copy_rest(row + 4 * (begin + whole), words - whole, rest.ctypes.data)
                _copy_rest(a_row + 4 * (begin + whole), words - whole, a_rest.ctypes.data)
                cross_N[n] += _cross(a_rest.ctypes.data, rest.ctypes.data, LANES, most)


_fold, _fold_beside = SharedKernel(_fold_share), SharedKernel(_fold_beside_share)


@routine
def _fold_row(row, width, start, n, target_N, max_N, sum_N, top_N, found_N, rest):  # type: ignore[no-untyped-def]
    column = target_N[n] - start
    if 0 <= column < width:
        found_N[n] = float_at(row + 4 * column)
    for begin in range(0, width, _WORDS):
        words = min(_WORDS, width - begin)
        whole = words // LANES * LANES
        _fold_words(row + 4 * begin, whole, start + begin, n, max_N, sum_N, top_N)
        if whole < words:
            _copy_rest(row + 4 * (begin + whole), words - whole, rest)
            _fold_words(rest, LANES, start + begin + whole, n, max_N, sum_N, top_N)


@routine
def _copy_rest(row, count, rest):  # type: ignore[no-untyped-def]
    """The last words of a row, those after them missing."""
    for i in range(LANES):
        put_float(rest + 4 * i, float_at(row + 4 * i) if i < count else MISSING)


@routine
def _fold_words(x, words, start, n, max_N, sum_N, top_N):  # type: ignore[no-untyped-def]
    """Take in a whole number of lanes of a row."""
    top = highest_of(x, words, max_N[n])
    if top > max(max_N[n], MISSING):
        for i in range(0, words, LANES):
            place = first(floats(x + 4 * i) == top)
            if place < LANES:
                top_N[n] = start + i + place
                break
        sum_N[n] *= np.exp(np.float64(max_N[n]) - np.float64(top))
        max_N[n] = top
    sum_ = splat(_F(0))
    for i in range(0, words, LANES):
        sum_ = sum_ + exp(floats(x + 4 * i) - top)
    sum_N[n] += np.float64(total(sum_))


@routine
def _cross(a, x, words, most):  # type: ignore[no-untyped-def]
    """The sum of `e^(a - most) (a - x)` over a whole number of lanes."""
    sum_ = splat(_F(0))
    for i in range(0, words, LANES):
        value = floats(a + 4 * i)
        sum_ = fused(exp(value - most), value - floats(x + 4 * i), sum_)
    return np.float64(total(sum_))
