"""Chooses the codes of a linear together, so that the errors of its columns make up for one another.

Scales and zero points are chosen first, as without calibration; then codes are chosen column after column
with error feedback (GPTQ, arXiv 2210.17323), and reconsidered one by one. With gradients at the outputs,
rows make up for one another's errors too (YAQA, arXiv 2505.22988). Rows that get worse by this on tokens
held out of the statistics keep their plain codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Encoding
from qconvert.core.statistics import InputHessian, OutputHessian
from qconvert.core.values import DenseRows, GgmlRows, Value
from qconvert.ops.base import Finding, OutputError

if TYPE_CHECKING:
    import numpy as np

SWEEPS = 2
# Rows of a product: always as many, so that a row's sums do not depend on the block it is in.
PRODUCT_ROWS = 64


def is_rounded_together(encoding: Encoding) -> bool:
    """Whether codes of an encoding can be chosen one after another, or eight columns after eight."""
    from qconvert.quant.lattice_grid import has_lattice
    from qconvert.quant.point_grid import has_points

    return has_points(encoding) or has_lattice(encoding)


def round_together(
    value: DenseRows,
    given: InputHessian,
    outputs: OutputHessian | None,
    encode: Callable[[DenseRows], tuple[Value, Finding]],
) -> tuple[Value, Finding]:
    """Rows as `encode` stores them, but with codes chosen together.

    With `outputs`, whose blocks begin at the first row, blocks of rows are kept or not, else single rows.
    The finding is that of the plain codes, with the error of the output. Rows with NaN or Inf, and encodings
    of which `is_rounded_together` says no, keep their plain codes and have none.
    """
    import numpy as np

    from qconvert.quant.casts import cast

    plain, finding = encode(value)
    if finding.nonfinite >= 0 or isinstance(plain, DenseRows) or not is_rounded_together(plain.encoding):
        return plain, finding
    wide_RI = np.ascontiguousarray(cast(value, DType.F32)[0].rows_RI)
    made = _rounded(wide_RI, given, outputs, encode)
    energy_R = np.square(_product(wide_RI, given.held_NI.T), dtype=np.float64).mean(axis=1)
    plain_RN, made_RN = (_output_errors(wide_RI, _numbers(each), given) for each in (plain, made))
    plain_R, made_R = (np.square(e_RN, dtype=np.float64).mean(axis=1) for e_RN in (plain_RN, made_RN))
    if outputs is None:
        worse_R = _worse_rows(plain_R, made_R, getattr(plain.encoding, "group_rows", None) or 1)
    else:
        worse_R = _worse(plain_RN, made_RN, outputs)
    chosen = plain if worse_R.all() else _rows_where(worse_R, plain, made)
    error = OutputError(
        float(plain_R.sum()),
        float(np.where(worse_R, plain_R, made_R).sum()),
        float(energy_R.sum()),
        int(worse_R.sum()),
        len(worse_R),
    )
    return chosen, replace(finding, output_error=error)


def _worse(plain_RN: np.ndarray, made_RN: np.ndarray, outputs: OutputHessian) -> np.ndarray:
    """Which rows are to keep their plain codes, by the output errors of both: whole blocks.

    Rows of a block made up for one another's errors e. Each may well have more of them, so that what counts
    is e^T E[g g^T] e of all.
    """
    import numpy as np

    worse_R = np.empty(len(made_RN), bool)
    size = outputs.hessian_BRR.shape[1]
    for block, whole_RR in enumerate(outputs.hessian_BRR):
        rows = slice(block * size, (block + 1) * size)
        count = len(made_RN[rows])
        h_RR = whole_RR[:count, :count]
        plain, made = (
            float(np.sum((h_RR @ e_RN) * e_RN, dtype=np.float64)) for e_RN in (plain_RN[rows], made_RN[rows])
        )
        worse_R[rows] = not made < plain
    return worse_R


def _rounded(
    w_RI: np.ndarray,
    given: InputHessian,
    outputs: OutputHessian | None,
    encode: Callable[[DenseRows], tuple[Value, Finding]],
) -> Value:
    from qconvert.quant.feedback import round_with_feedback, sweep
    from qconvert.quant.lattice_grid import has_lattice
    from qconvert.quant.point_grid import point_grid, with_codes
    from qconvert.quant.two_sided import round_row_blocks

    if given.shift_II is not None:
        w_RI = _product(w_RI, given.shift_II)
    start, _ = encode(DenseRows(w_RI, DType.F32))
    if isinstance(start, GgmlRows) and has_lattice(start.encoding):
        return _rounded_cells(w_RI, given, start)
    grid = point_grid(start)
    if outputs is not None:
        both = (given.order_I, given.factor_II, outputs.order_BR, outputs.factor_BRR)
        return with_codes(start, round_row_blocks(w_RI, *both, grid))
    codes_RI = round_with_feedback(w_RI, given.order_I, given.factor_II, grid)
    codes_RI = sweep(w_RI, codes_RI, given.hessian_II, given.order_I, grid, SWEEPS)
    return with_codes(start, codes_RI)


def _rounded_cells(w_RI: np.ndarray, given: InputHessian, start: GgmlRows) -> Value:
    """Rows of a lattice's points, those of a row together: rows do not make up for one another."""
    from qconvert.quant.cell_feedback import round_cells, sweep_cells
    from qconvert.quant.lattice_grid import lattice_grid, with_lattice_codes

    assert given.eights is not None
    order_I, factor_II, costs_I = given.eights()
    grid = lattice_grid(start)
    codes = round_cells(w_RI, order_I, factor_II, costs_I, grid)
    codes = sweep_cells(w_RI, codes, given.hessian_II, order_I, grid, SWEEPS)
    return with_lattice_codes(start, codes)


def _worse_rows(plain_R: np.ndarray, made_R: np.ndarray, together: int) -> np.ndarray:
    """Whether rows lose more than with plain codes: bool [R], the same for all that share their scales."""
    import numpy as np

    starts = range(0, len(plain_R), together)
    won = (np.add.reduceat(each, starts) for each in (made_R, plain_R))
    worse_B = ~np.less(*won)
    return np.repeat(worse_B, together)[: len(plain_R)]


def _product(w_RI: np.ndarray, by_IO: np.ndarray) -> np.ndarray:
    """Rows times a matrix, float32 [R, O]; a row's sums do not depend on the rows beside it."""
    import numpy as np

    made_RO = np.empty((len(w_RI), by_IO.shape[1]), np.float32)
    chunk_RI = np.zeros((PRODUCT_ROWS, w_RI.shape[1]), np.float32)
    for start in range(0, len(w_RI), PRODUCT_ROWS):
        rows = w_RI[start : start + PRODUCT_ROWS]
        chunk_RI[: len(rows)] = rows
        made_RO[start : start + len(rows)] = (chunk_RI @ by_IO)[: len(rows)]
    return made_RO


def _output_errors(w_RI: np.ndarray, q_RI: np.ndarray, given: InputHessian) -> np.ndarray:
    """w x - q x~ of each row for the tokens held out, float32 [R, N]."""
    target_RN = _product(w_RI, given.held_NI.T)
    target_RN -= _product(q_RI, given.held_read_NI.T)
    return target_RN


def _numbers(value: Value) -> np.ndarray:
    from qconvert.quant.dequantize import numbers

    return numbers(value, DType.F32).rows_RI


def _rows_where(mask_R: np.ndarray, one: Value, other: Value) -> Value:
    """The rows of one value where the mask is set, those of another elsewhere."""
    import numpy as np

    pairs = zip(one.arrays, other.arrays, strict=True)
    return one.with_arrays(tuple(np.where(mask_R[:, None], a, b) for a, b in pairs))
