"""Sums outer products of a linear's inputs over the tokens of a text, and makes its Hessian of them.

Legend: N rows (tokens), I columns of the linear, B columns of a basis of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from qconvert.calibrate.savings import WHOLE, HessianForm
from qconvert.core.statistics import BlockedHessian, InputHessian, Rounding, TargetShift
from qconvert.quant.hessian import eights_when_asked, factor, factor_and_shift
from qconvert.runtime.cuda.packing import MmaWeight
from qconvert.runtime.linear import Weight

# Rows held out of a Hessian; a relative error of sqrt(2 / 2048) = 3 % in what is decided with them.
MOST_HELD = 2048
# Columns of a block of a Hessian; what lies below the diagonal is not computed.
_BLOCK = 512
# Held rows that are looked at together.
_SHARE_ROWS = 256
# Columns from which threads share a factorization; below, they wait for each other longer than they compute.
_SHARED = 1024
# An expert's Hessian counts as much as that of all experts together after I / 2 rows.
_POOL_SHARE = 0.5
# Held rows below which an expert is judged by those of all experts.
_FEWEST_HELD = 64


class InputSums:
    """What is summed of one input: x~^T x~ and (x - x~)^T x~ over the tokens that its Hessian is made of.

    With `pairs`, every row x~ that the quantized layers make comes with the row x of the same token that
    the original ones made. The `form` says what of the Hessian is kept: `squares` has a matrix for every
    block of columns; `moved_BI` is there with pairs, where the form has a target shift: of x - x~ itself, or
    of what a `basis_IB` of the linear's rows has of it.
    """

    def __init__(
        self,
        width: int,
        device: torch.device,
        *,
        pairs: bool,
        form: HessianForm = WHOLE,
        basis_IB: Tensor | None = None,
    ) -> None:
        self.form, self.columns = form, form.blocks(width)
        sizes = [part.stop - part.start for part in self.columns]
        self.squares = [torch.zeros(size, size, device=device) for size in sizes]
        shifts = pairs and form.shift and form.columns is None
        self.basis_IB = basis_IB if shifts else None
        rows = width if self.basis_IB is None else self.basis_IB.shape[1]
        self.moved_BI = torch.zeros(rows, width, device=device) if shifts else None
        self.count = 0
        self.divided = False
        self.held: list[tuple[Tensor, Tensor]] = []

    @property
    def width(self) -> int:
        """The columns of the input."""
        return sum(map(len, self.squares))

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return self.squares[0].device

    def add(self, read_NI: Tensor, original_NI: Tensor | None) -> None:
        """Take in rows, float32 [N, I]."""
        for columns, squares_CC in zip(self.columns, self.squares, strict=True):
            read_NC = read_NI[:, columns]
            for start in range(0, len(squares_CC), _BLOCK):  # the upper triangle, by blocks
                part = slice(start, start + _BLOCK)
                squares_CC[part, start:].addmm_(read_NC[:, part].T, read_NC[:, start:])
        if self.moved_BI is not None and original_NI is not None:
            # Of the difference, which is small: products of x would lose it in their rounding.
            moved_NB = original_NI - read_NI
            if self.basis_IB is not None:
                moved_NB = moved_NB @ self.basis_IB
            self.moved_BI.addmm_(moved_NB.T, read_NI)
        self.count += len(read_NI)

    def hold(self, read_NI: Tensor, original_NI: Tensor | None) -> None:
        """Keep rows for `InputHessian.held_NI`, as many as there is room for."""
        room = MOST_HELD - sum(len(rows) for rows, _ in self.held)
        if room <= 0:
            return
        read_NI = read_NI[:room].cpu().clone()  # not a view, which would keep the whole batch
        self.held.append((read_NI if original_NI is None else original_NI[:room].cpu().clone(), read_NI))

    def take(self, other: InputSums, weight: float = 1.0) -> None:
        """Add `weight` times the sums of squares of another input of this form."""
        for own_CC, other_CC in zip(self.squares, other.squares, strict=True):
            own_CC.add_(other_CC if weight == 1.0 else other_CC * weight)

    @property
    def moments_I(self) -> np.ndarray:
        """The mean square of every column, float32 [I]."""
        sums_I = torch.cat([squares_CC.diagonal() for squares_CC in self.squares])
        moments: np.ndarray = (sums_I if self.divided else sums_I / max(1, self.count)).cpu().numpy()
        return moments

    def _divide(self) -> None:
        """Make means of the sums, in place, and the whole matrix of a triangle."""
        if self.divided:
            return
        self.divided = True
        for squares_CC in self.squares:
            _symmetric(squares_CC.div_(max(1, self.count)))
        if self.moved_BI is not None:
            self.moved_BI.div_(max(1, self.count))

    def _held_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """x and x~ of the rows held out, each together; kept so."""
        if len(self.held) != 1:
            empty = torch.empty(0, self.width)
            alike = all(original_NI is read_NI for original_NI, read_NI in self.held)
            read_NI = torch.cat([read_NI for _, read_NI in self.held] or [empty])
            original_NI = read_NI if alike else torch.cat([original_NI for original_NI, _ in self.held])
            self.held = [(original_NI, read_NI)]
        original_NI, read_NI = self.held[0]
        return original_NI.numpy(), read_NI.numpy()

    def hessian(self, damping: float, *, last: bool = True) -> Rounding:
        """The Hessian with its factor and target shift.

        Raises what `quant.hessian.factor` raises. Of the shift a share is applied, the one of least error on
        the rows held out, for weights whose rows point anywhere. Nothing can be added to the sums afterwards;
        after the `last` call they are used up.
        """
        self._divide()
        if self.width < _SHARED:
            return self._factored(damping, last=last)
        with threadpool_limits(torch.get_num_threads(), user_api="blas"):
            return self._factored(damping, last=last)

    def _factored(self, damping: float, *, last: bool) -> Rounding:
        held_NI, held_read_NI = self._held_rows()
        dtype = np.float32 if self.form.single else np.float64
        if self.moved_BI is not None:
            moved_BI = self.moved_BI if last else self.moved_BI.clone()
            hessian_II, solved_BI = self.squares[0].cpu().numpy(), moved_BI.cpu().numpy()
            order_I, factor_II, used = factor_and_shift(hessian_II, solved_BI, damping, dtype=dtype)
            shift = TargetShift(solved_BI, None if self.basis_IB is None else self.basis_IB.cpu().numpy())
            solved_BI *= np.float32(_share(shift, held_NI, held_read_NI))
            eights = eights_when_asked(hessian_II, used, dtype)
            return InputHessian(hessian_II, order_I, factor_II, shift, held_NI, held_read_NI, eights)
        blocks = []
        for columns, squares_CC in zip(self.columns, self.squares, strict=True):
            hessian_CC = squares_CC.cpu().numpy()
            order_C, factor_CC, used = factor(hessian_CC, damping, dtype=dtype)
            held, eights = (
                (held_NI[:, columns], held_read_NI[:, columns]),
                eights_when_asked(hessian_CC, used, dtype),
            )
            blocks.append(InputHessian(hessian_CC, order_C, factor_CC, None, *held, eights))
        return blocks[0] if len(blocks) == 1 else BlockedHessian(tuple(blocks), held_NI, held_read_NI)


def row_basis(weight: Weight) -> Tensor | None:
    """Orthonormal columns that span the rows of a weight, float32 [I, B]; None where they are too many.

    B rows of I numbers make the shift's sums B/I as large, for another product with the basis, and its QR
    factorization takes the memory of three such matrices.
    """
    rows, width = weight.shape
    if rows * 3 > width or isinstance(weight, MmaWeight):
        return None
    basis_IB: Tensor = torch.linalg.qr(weight.rows(slice(0, rows)).float().T).Q.contiguous()
    return basis_IB


def _share(shift: TargetShift, held_NI: np.ndarray, held_read_NI: np.ndarray) -> float:
    """The least-squares share s of P in x = (1 + s P) x~, or in what the basis has of it, between 0 and 1."""
    cost = gain = 0.0
    for start in range(0, len(held_NI), _SHARE_ROWS):
        rows = slice(start, start + _SHARE_ROWS)
        moved_NB = (held_read_NI[rows] @ shift.solved_BI.T).astype(np.float64)
        wanted_NB = held_NI[rows] - held_read_NI[rows]
        if shift.basis_IB is not None:
            wanted_NB = wanted_NB @ shift.basis_IB
        cost += float((moved_NB**2).sum())
        gain += float((moved_NB * wanted_NB).sum())
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
        pool = self.sums
        made = InputSums(pool.width, pool.device, pairs=False, form=pool.form)
        weight = max(1.0, _POOL_SHARE * pool.width)
        made.take(pool, weight / max(1, pool.count))
        made.count = round(weight)
        made.held = pool.held
        if own is not None:
            made.take(own)
            made.count += own.count
            made.held = own.held if sum(len(rows) for rows, _ in own.held) >= _FEWEST_HELD else pool.held
        return made


def pooled(experts: Iterable[InputSums]) -> PooledSums:
    """The sums of some experts together; of each, as many held rows as there is room for."""
    listed = list(experts)
    total = InputSums(listed[0].width, listed[0].device, pairs=False, form=listed[0].form)
    for each in listed:
        total.take(each)
        total.count += each.count
        for original_NI, read_NI in each.held:
            few = max(1, MOST_HELD // len(listed))
            total.hold(read_NI[:few], original_NI[:few])
    return PooledSums(total)
