"""Sums outer products of a linear's inputs over the tokens of a text, and makes its Hessian of them.

Legend: N rows (tokens), I columns of the linear.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qconvert.core.statistics import InputHessian
from qconvert.quant.hessian import factor, target_shift

# Rows held out of a Hessian; a relative error of sqrt(2 / 2048) = 3 % in what is decided with them.
MOST_HELD = 2048


class InputSums:
    """What is summed of one input: x~^T x~ and (x - x~)^T x~ over the tokens that its Hessian is made of.

    With `pairs`, every row x~ that the quantized layers make comes with the row x of the same token that
    the original ones made.
    """

    def __init__(self, width: int, device: torch.device, *, pairs: bool) -> None:
        self.squares_II = torch.zeros(width, width, device=device)
        self.moved_II = torch.zeros(width, width, device=device) if pairs else None
        self.count = 0
        self.held: list[tuple[Tensor, Tensor]] = []

    def add(self, read_NI: Tensor, original_NI: Tensor | None) -> None:
        """Take in rows, float32 [N, I]."""
        self.squares_II.addmm_(read_NI.T, read_NI)
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
        moments: np.ndarray = self.squares_II.diagonal().div(max(1, self.count)).cpu().numpy()
        return moments

    def hessian(self, damping: float) -> tuple[InputHessian, float]:
        """The Hessian with its factor and target shift, and how much of the shift is applied, 0 to 1.

        Raises what `quant.hessian.factor` raises. The share of the shift is the one of least error on the
        rows held out, for weights whose rows point anywhere. The sums are used up.
        """
        width, count = len(self.squares_II), max(1, self.count)
        hessian_II = self.squares_II.div_(count).cpu().numpy()
        empty = torch.empty(0, width)
        held_NI, held_read_NI = (
            torch.cat([pair[i] for pair in self.held] or [empty]).numpy() for i in (0, 1)
        )
        order_I, factor_II, used_damping = factor(hessian_II, damping)
        shift_II, share = None, 0.0
        if self.moved_II is not None:
            moved_II = self.moved_II.div_(count).cpu().numpy()
            shift_II = target_shift(hessian_II, moved_II, used_damping, 1.0)
            share = _share(shift_II, held_NI, held_read_NI)
            shift_II *= np.float32(share)
            shift_II[np.diag_indices(width)] += np.float32(1 - share)
        return InputHessian(hessian_II, order_I, factor_II, shift_II, held_NI, held_read_NI), share


def _share(shift_II: np.ndarray, held_NI: np.ndarray, held_read_NI: np.ndarray) -> float:
    """The least-squares share s of P = S - 1 in x = (1 + s P) x~, between 0 and 1."""
    moved_NI = held_read_NI @ shift_II.T - held_read_NI
    cost = float((moved_NI.astype(np.float64) ** 2).sum())
    gain = float((moved_NI.astype(np.float64) * (held_NI - held_read_NI)).sum())
    return min(1.0, max(0.0, gain / cost)) if cost > 0 else 0.0
