"""Factors second moments of a linear's inputs, and moves weights to where quantized inputs want them.

H = E[x x^T] is the Hessian of a linear's squared output error: an error delta in a row of weights costs
delta H delta^T. It is damped (H + lambda I, lambda a fraction of its mean diagonal) before anything is solved
with it, so that directions that the calibration text hardly visits are not moved for its noise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from qconvert.quant.row_products import row_products

_ATTEMPTS = 4
_BLOCK = 256  # columns that are factored at once
_ROWS = 512  # rows that are solved for at once


class NotPositiveDefinite(ValueError):
    """A Hessian is not finite, or has no factor even with a thousand times the damping."""


def factor(
    h_II: np.ndarray, damping: float = 0.01, *, dtype: type[np.floating] = np.float64
) -> tuple[np.ndarray, np.ndarray, float]:
    """Factors a Hessian for `feedback`: H + lambda I = M D M^T, M unit upper triangular.

    `h_II`: float32 or float64 [I, I], symmetric. lambda is `damping` times the `mean_square`, ten times more
    after each of up to three failures. An input that was always 0 gets the mean on the diagonal and 0
    elsewhere: it is rounded to the nearest and changes no other column. Working memory is 8 I^2 bytes beside
    4 I^2 for M, and none with `dtype` float32: M is made in place of what is factored.

    Returns the order of the columns int64 [I], those of the largest second moment first (act-order: the
    earlier a column, the more others can still compensate it); M float32 [I, I], rows and columns in that
    order; and the damping used. Raises `NotPositiveDefinite`.
    """
    order_I = column_order(h_II)
    upper_II, used = _factored(h_II, order_I, damping, dtype)
    return order_I, _unit_columns(upper_II), used


def factor_eights(
    h_II: np.ndarray, damping: float = 0.01, *, dtype: type[np.floating] = np.float64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors a Hessian as `factor` does, for codes of eight consecutive columns at a time.

    `h_II` float32 [I, I], I a multiple of 8. Returns the order of the columns int64 [I], eights whole, those
    of the largest sum of second moments first; M float32 [I, I] in that order; and D float32 [I], what the
    errors of each column cost that those before it did not compensate. Raises `NotPositiveDefinite`.
    """
    sums_E = column_moments(h_II).reshape(-1, 8).sum(axis=1, dtype=np.float64)
    eights_E = np.argsort(-sums_E, kind="stable").astype(np.int64)
    order_I = (eights_E[:, None] * 8 + np.arange(8)).reshape(-1)
    upper_II, _ = _factored(h_II, order_I, damping, dtype)
    costs_I = np.square(upper_II.diagonal()).astype(np.float32)
    return order_I, _unit_columns(upper_II), costs_I


def eights_when_asked(
    h_II: np.ndarray, damping: float, dtype: type[np.floating] = np.float64
) -> Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`factor_eights` of a Hessian, computed by the first thread that needs it, and kept."""
    made: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    lock = threading.Lock()

    def eights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        with lock:
            if not made:
                made.append(factor_eights(h_II, damping, dtype=dtype))
        return made[0]

    return eights


def factor_and_shift(
    h_II: np.ndarray,
    mismatch_BI: np.ndarray,
    damping: float = 0.01,
    *,
    dtype: type[np.floating] = np.float64,
) -> tuple[np.ndarray, np.ndarray, float]:
    """What `factor` returns, the Hessian factored once for it and for the shift.

    `mismatch_BI` float32 becomes what `target_shift` returns for it with alpha 1 and the damping used.
    Working memory is 8 I^2 bytes beside 4 I^2 for M, and none with `dtype` float32.
    """
    order_I = column_order(h_II)
    upper_II, used = _factored(h_II, order_I, damping, dtype)
    if dtype is np.float32:
        _shift_in_place(h_II, order_I, upper_II, mismatch_BI, 1.0)
        return order_I, _unit_columns(upper_II), used
    unit_II = _unit_columns(upper_II)
    _shift_in_place(h_II, order_I, _narrowed(upper_II), mismatch_BI, 1.0)
    return order_I, unit_II, used


def _factored(
    h_II: np.ndarray, order_I: np.ndarray, damping: float, dtype: type[np.floating]
) -> tuple[np.ndarray, float]:
    """U of H + lambda I = U U^T in an order of the columns, and the damping used."""
    for attempt in range(_ATTEMPTS):
        used = damping * 10.0**attempt
        upper_II = _damped(h_II, order_I, used, dtype)
        try:
            _factor_in_place(upper_II)
        except np.linalg.LinAlgError:
            del upper_II  # before the next one is made
            continue
        return upper_II, used
    raise NotPositiveDefinite(f"no Cholesky factor with damping {damping} to {used}")


def column_order(h_II: np.ndarray) -> np.ndarray:
    """The columns by their second moment, the largest first, equal ones as they come: int64 [I].

    Raises `NotPositiveDefinite` where a second moment is negative or not finite.
    """
    return np.argsort(-column_moments(h_II), kind="stable").astype(np.int64)


def column_moments(h_II: np.ndarray) -> np.ndarray:
    """The second moment of every column [I]; raises `NotPositiveDefinite` where it cannot be one."""
    diagonal_I = h_II.diagonal()
    if not np.isfinite(diagonal_I).all() or (diagonal_I < 0).any():
        raise NotPositiveDefinite("a mean square is negative or not finite")
    return diagonal_I


def mean_square(h_II: np.ndarray) -> float:
    """The mean of the diagonal over the inputs that were not always 0; 1 if all were."""
    diagonal_I = h_II.diagonal()
    live = diagonal_I > 0
    return float(diagonal_I[live].mean(dtype=np.float64)) if live.any() else 1.0


def _damped(h_II: np.ndarray, order_I: np.ndarray, damping: float, dtype: type[np.floating]) -> np.ndarray:
    """A copy of H + lambda I in the given order, always-0 inputs apart."""
    diagonal_I, mean = h_II.diagonal().astype(np.float64), mean_square(h_II)
    damped_II = np.empty(h_II.shape, dtype)
    for row, column in enumerate(order_I):
        damped_II[row] = h_II[column][order_I]
        if not np.isfinite(damped_II[row]).all():
            raise NotPositiveDefinite(f"row {column} is not finite")
    dead_I = diagonal_I[order_I] == 0
    damped_II[dead_I] = 0
    damped_II[:, dead_I] = 0
    diagonal_I[diagonal_I == 0] = mean
    np.fill_diagonal(damped_II, diagonal_I[order_I] + damping * mean)
    return damped_II


def _factor_in_place(a_II: np.ndarray) -> None:
    """Makes the upper triangle of A the upper triangular U of A = U U^T; the lower one is left undefined.

    The last columns are first: a Cholesky factor of reversed rows and columns. From a block of columns the
    products of those behind are subtracted; then its corner is factored, and the rows above are solved for.
    """
    for block in reversed(_blocks(len(a_II))):
        start, stop = block.start, block.stop
        a_II[:stop, block] -= a_II[:stop, stop:] @ a_II[block, stop:].T
        corner = np.linalg.cholesky(a_II[block, block][::-1, ::-1])[::-1, ::-1]
        a_II[block, block] = corner
        a_II[:start, block] = a_II[:start, block] @ np.linalg.inv(corner).T


def _blocks(width: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, width)) for start in range(0, width, _BLOCK)]


def _unit_columns(upper_II: np.ndarray) -> np.ndarray:
    """M of U = M sqrt(D) in float32; in place of a U in float32."""
    diagonal_I = upper_II.diagonal().copy()
    in_place = upper_II.dtype == np.float32
    unit_II: np.ndarray = upper_II if in_place else np.zeros(upper_II.shape, np.float32)
    for row in range(len(upper_II)):
        unit_II[row, row:] = upper_II[row, row:] / diagonal_I[row:]
        unit_II[row, :row] = 0
    return unit_II


def _narrowed(a_II: np.ndarray) -> np.ndarray:
    """A matrix of float64 in float32, in the first half of its own memory."""
    narrow_II: np.ndarray = a_II.reshape(-1).view(np.float32)[: a_II.size].reshape(a_II.shape)
    for row in range(len(a_II)):  # what is written was read before
        narrow_II[row] = a_II[row].astype(np.float32)
    return narrow_II


def target_shift(
    h_II: np.ndarray, mismatch_BI: np.ndarray, damping: float = 0.01, alpha: float = 1.0
) -> np.ndarray:
    """What is added to weights so that quantized inputs x~ give what the inputs x gave: P of W' = W + W P.

    min E|W x - W' x~|^2 has W' = W G H^-1 with H = E[x~ x~^T], G = E[x x~^T] (GPTAQ, arXiv 2504.02692, and
    Qronos, arXiv 2505.11695, reach the same target column by column). Damped on both sides and blended:
    P = alpha (G - H) (H + lambda I)^-1. `mismatch_BI` float32 or float64 is G - H, [I, I], or
    E[(x - x~) x~^T]: small numbers, better summed than subtracted. Of a basis Q of the weights' rows, it is
    Q^T (G - H), [B, I], and what is returned Q^T P. Returns float32, 0 for inputs that were always 0. Raises
    `NotPositiveDefinite`; more damping is tried as in `factor`.
    """
    order_I = column_order(h_II)
    upper_II, _ = _factored(h_II, order_I, damping, np.float64)
    shift_BI = mismatch_BI.astype(np.float32)
    _shift_in_place(h_II, order_I, _narrowed(upper_II), shift_BI, alpha)
    return shift_BI


def _shift_in_place(
    h_II: np.ndarray, order_I: np.ndarray, upper_II: np.ndarray, shift_BI: np.ndarray, alpha: float
) -> None:
    """Makes P of G - H, given U of H + lambda I = U U^T in the order of its columns.

    P is a correction: solved in float32, it is 2e-6 off where the Hessian's condition is 1e5.
    """
    inverses = [np.linalg.inv(np.triu(upper_II[block, block])) for block in _blocks(len(upper_II))]
    for start in range(0, len(shift_BI), _ROWS):
        rows = slice(start, start + _ROWS)
        solved_RI = shift_BI[rows][:, order_I]
        _solve_in_place(upper_II, inverses, solved_RI)
        shift_BI[rows, order_I] = np.float32(alpha) * solved_RI
    shift_BI *= h_II.diagonal() > 0


def _solve_in_place(upper_II: np.ndarray, inverses: list[np.ndarray], x_RI: np.ndarray) -> None:
    """Makes X what solves X' U U^T = X: first for U^T from the last columns, then for U from the first."""
    blocks = list(zip(_blocks(len(upper_II)), inverses, strict=True))
    for block, inverse in reversed(blocks):
        behind = x_RI[:, block.stop :] @ upper_II[block, block.stop :].T
        x_RI[:, block] = (x_RI[:, block] - behind) @ inverse.T
    for block, inverse in blocks:
        before = x_RI[:, : block.start] @ upper_II[: block.start, block]
        x_RI[:, block] = (x_RI[:, block] - before) @ inverse


def row_errors(w_RI: np.ndarray, q_RI: np.ndarray, h_II: np.ndarray) -> np.ndarray:
    """What rounding rows of weights costs, delta H delta^T with delta = w - q: float64 [R].

    `w_RI` and `q_RI` (the numbers that codes store) float32 [R, I]; `h_II` float32 [I, I], in their order.
    """
    delta_RI = np.subtract(w_RI, q_RI, dtype=np.float32)
    return row_products(delta_RI, h_II, delta_RI)
