"""Sums outer products of a linear's inputs over the tokens of a text, and makes its Hessian of them.

Legend: N rows (tokens), I columns of the linear.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qconvert.core.statistics import InputHessian
from qconvert.quant.hessian import eights_when_asked, factor, target_shift

# Rows held out of a Hessian; a relative error of sqrt(2 / 2048) = 3 % in what is decided with them.
MOST_HELD = 2048
# Columns of a block of a Hessian; what lies below the diagonal is not computed.
_BLOCK = 512
# An expert's Hessian counts as much as that of all experts together after I / 2 rows.
_POOL_SHARE = 0.5
# Held rows below which an expert is judged by those of all experts.
_FEWEST_HELD = 64


class InputSums:
    """What is summed of one input: x~^T x~ and (x - x~)^T x~ over the tokens that its Hessian is made of.

    With `pairs`, every row x~ that the quantized layers make comes with the row x of the same token that
    the original ones made.
    """

    def __init__(self, width: int, device: torch.device, *, pairs: bool) -> None:
        self.squares_II = torch.zeros(width, width, device=device)
        self.moved_II = torch.zeros(width, width, device=device) if pairs else None
        self.count = 0
        self.divided = False
        self.held: list[tuple[Tensor, Tensor]] = []

    def add(self, read_NI: Tensor, original_NI: Tensor | None) -> None:
        """Take in rows, float32 [N, I]."""
        for start in range(0, len(self.squares_II), _BLOCK):  # the upper triangle, by blocks
            part = slice(start, start + _BLOCK)
            self.squares_II[part, start:].addmm_(read_NI[:, part].T, read_NI[:, start:])
        if self.moved_II is not None and original_NI is not None:
            # Of the difference, which is small: products of x would lose it in their rounding.
            self.moved_II.addmm_((original_NI - read_NI).T, read_NI)
        self.count += len(read_NI)

    def hold(self, read_NI: Tensor, original_NI: Tensor | None) -> None:
        """Keep rows for `InputHessian.held_NI`, as many as there is room for."""
        room = MOST_HELD - sum(len(rows) for rows, _ in self.held)
        read_NI = read_NI[:room].cpu()
        self.held.append((read_NI if original_NI is None else original_NI[:room].cpu(), read_NI))

    @property
    def moments_I(self) -> np.ndarray:
        """The mean square of every column, float32 [I]."""
        sums_I = self.squares_II.diagonal()
        moments: np.ndarray = (sums_I if self.divided else sums_I / max(1, self.count)).cpu().numpy()
        return moments

    def _divide(self) -> None:
        """Make means of the sums, in place, and the whole matrix of a triangle."""
        if self.divided:
            return
        self.divided = True
        _symmetric(self.squares_II.div_(max(1, self.count)))
        if self.moved_II is not None:
            self.moved_II.div_(max(1, self.count))

    def hessian(self, damping: float) -> InputHessian:
        """The Hessian with its factor and target shift.

        Raises what `quant.hessian.factor` raises. Of the shift a share is applied, the one of least error on
        the rows held out, for weights whose rows point anywhere. Nothing can be added to the sums afterwards.
        """
        width = len(self.squares_II)
        self._divide()
        hessian_II = self.squares_II.cpu().numpy()
        empty = torch.empty(0, width)
        held_NI, held_read_NI = (
            torch.cat([pair[i] for pair in self.held] or [empty]).numpy() for i in (0, 1)
        )
        order_I, factor_II, used_damping = factor(hessian_II, damping)
        shift_II = None
        if self.moved_II is not None:
            moved_II = self.moved_II.cpu().numpy()
            shift_II = target_shift(hessian_II, moved_II, used_damping, 1.0)
            share = _share(shift_II, held_NI, held_read_NI)
            shift_II *= np.float32(share)
            shift_II[np.diag_indices(width)] += np.float32(1 - share)
        eights = eights_when_asked(hessian_II, used_damping)
        return InputHessian(hessian_II, order_I, factor_II, shift_II, held_NI, held_read_NI, eights)


def _share(shift_II: np.ndarray, held_NI: np.ndarray, held_read_NI: np.ndarray) -> float:
    """The least-squares share s of P = S - 1 in x = (1 + s P) x~, between 0 and 1."""
    moved_NI = held_read_NI @ shift_II.T - held_read_NI
    cost = float((moved_NI.astype(np.float64) ** 2).sum())
    gain = float((moved_NI.astype(np.float64) * (held_NI - held_read_NI)).sum())
    return min(1.0, max(0.0, gain / cost)) if cost > 0 else 0.0


def _symmetric(upper_II: Tensor) -> Tensor:
    """The matrix whose upper triangle is given, in place."""
    width = len(upper_II)
    for start in range(0, width, _BLOCK):
        rows = slice(start, start + _BLOCK)
        corner = upper_II[rows, rows].triu()
        upper_II[rows, rows] = corner + corner.triu(1).T
        upper_II[start + _BLOCK :, rows] = upper_II[rows, start + _BLOCK :].T
    return upper_II


@dataclass(frozen=True, slots=True)
class PooledSums:
    """The sums of all experts of a layer together."""

    sums: InputSums

    def shrunk(self, own: InputSums | None) -> InputSums:
        """The sums of an expert, drawn towards those of all: the more, the fewer rows it was given.

        H = (n H_own + k H_all) / (n + k) with k half the width; one that no row was routed to has H_all.
        """
        pool, width = self.sums, len(self.sums.squares_II)
        made = InputSums(width, pool.squares_II.device, pairs=False)
        weight = max(1.0, _POOL_SHARE * width)
        made.squares_II += pool.squares_II * (weight / max(1, pool.count))
        made.count = round(weight)
        made.held = pool.held
        if own is not None:
            made.squares_II += own.squares_II
            made.count += own.count
            made.held = own.held if sum(len(rows) for rows, _ in own.held) >= _FEWEST_HELD else pool.held
        return made


def pooled(experts: Iterable[InputSums]) -> PooledSums:
    """The sums of some experts together; of each, as many held rows as there is room for."""
    listed = list(experts)
    total = InputSums(len(listed[0].squares_II), listed[0].squares_II.device, pairs=False)
    for each in listed:
        total.squares_II += each.squares_II
        total.count += each.count
        for original_NI, read_NI in each.held:
            few = max(1, MOST_HELD // len(listed))
            total.hold(read_NI[:few], original_NI[:few])
    return PooledSums(total)
