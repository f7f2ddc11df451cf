"""Chooses the codes of a linear together, so that the errors of its columns compensate one another.

Scales and zero points are chosen first, as without calibration; then codes are chosen column after column
with error feedback (GPTQ, arXiv 2210.17323), and reconsidered one by one. With gradients at the outputs,
rows compensate one another's errors too (YAQA, arXiv 2505.22988). Rows that get worse by this on tokens
held out of the statistics keep their plain codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Encoding
from qconvert.core.statistics import InputHessian, OutputHessian, Rounding
from qconvert.core.values import DenseRows, GgmlRows, Value
from qconvert.ops.base import Finding, OutputError

if TYPE_CHECKING:
    import numpy as np

    from qconvert.quant.point_grid import PointGrid

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
    given: Rounding,
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
    lost = _Lost.measured(wide_RI, _numbers(plain), _numbers(made), given, outputs)
    plain_R, made_R, energy_R = lost.plain_R, lost.made_R, lost.energy_R
    if outputs is None:
        worse_R = _worse_rows(plain_R, made_R, getattr(plain.encoding, "group_rows", None) or 1)
    else:
        worse_R = lost.worse_R
    chosen = plain if worse_R.all() else _rows_where(worse_R, plain, made)
    error = OutputError(
        float(plain_R.sum()),
        float(np.where(worse_R, plain_R, made_R).sum()),
        float(energy_R.sum()),
        int(worse_R.sum()),
        len(worse_R),
    )
    return chosen, replace(finding, output_error=error)


class _Lost(NamedTuple):
    """Mean squares over the tokens held out: of the outputs' errors with plain codes and with those chosen
    together, and of the outputs; `worse_R` are the rows of blocks that lose by it. All [R].
    """

    plain_R: np.ndarray
    made_R: np.ndarray
    energy_R: np.ndarray
    worse_R: np.ndarray

    @staticmethod
    def measured(
        w_RI: np.ndarray,
        plain_RI: np.ndarray,
        made_RI: np.ndarray,
        given: Rounding,
        outputs: OutputHessian | None,
    ) -> _Lost:
        """Measure rows a block at a time: the errors of all rows for all tokens would be a large matrix."""
        import numpy as np

        size = PRODUCT_ROWS if outputs is None else outputs.hessian_BRR.shape[1]
        count = len(w_RI)
        lost = _Lost(np.empty(count), np.empty(count), np.empty(count), np.zeros(count, bool))
        for block, start in enumerate(range(0, len(w_RI), size)):
            rows = slice(start, start + size)
            target_RN = _product(w_RI[rows], given.held_NI.T)
            lost.energy_R[rows] = np.square(target_RN, dtype=np.float64).mean(axis=1)
            plain_RN = target_RN - _product(plain_RI[rows], given.held_read_NI.T)
            made_RN = target_RN - _product(made_RI[rows], given.held_read_NI.T)
            lost.plain_R[rows] = np.square(plain_RN, dtype=np.float64).mean(axis=1)
            lost.made_R[rows] = np.square(made_RN, dtype=np.float64).mean(axis=1)
            if outputs is not None:
                lost.worse_R[rows] = _worse(plain_RN, made_RN, outputs.hessian_BRR[block])
        return lost


def _worse(plain_RN: np.ndarray, made_RN: np.ndarray, hessian_RR: np.ndarray) -> bool:
    """Whether a block of rows is to keep its plain codes, by the output errors of both.

    Rows of a block made up for one another's errors e. Each may well have more of them, so that what counts
    is e^T E[g g^T] e of all.
    """
    import numpy as np

    h_RR = hessian_RR[: len(made_RN), : len(made_RN)]
    plain, made = (float(np.sum((h_RR @ e_RN) * e_RN, dtype=np.float64)) for e_RN in (plain_RN, made_RN))
    return not made < plain


def _rounded(
    w_RI: np.ndarray,
    given: Rounding,
    outputs: OutputHessian | None,
    encode: Callable[[DenseRows], tuple[Value, Finding]],
) -> Value:
    import numpy as np

    from qconvert.quant.lattice_grid import has_lattice
    from qconvert.quant.point_grid import grid_of_columns, point_grid, with_codes

    w_RI = _shifted(w_RI, given)
    start, _ = encode(DenseRows(w_RI, DType.F32))
    if isinstance(start, GgmlRows) and has_lattice(start.encoding):
        cells = [
            _cells(w_RI[:, columns], part, _columns_of(start, columns)) for columns, part in _parts(given)
        ]
        return start.with_arrays((np.concatenate(cells, axis=1),))
    grid = point_grid(start)
    codes = [
        _codes(w_RI[:, columns], part, outputs, grid_of_columns(grid, columns))
        for columns, part in _parts(given)
    ]
    return with_codes(start, codes[0] if len(codes) == 1 else np.concatenate(codes, axis=1))


def _parts(given: Rounding) -> Iterator[tuple[slice, InputHessian]]:
    """The columns whose errors compensate one another, and their statistics."""
    first = 0
    for part in given.blocks:
        yield slice(first, first + len(part.order_I)), part
        first += len(part.order_I)


def _columns_of(rows: GgmlRows, columns: slice) -> GgmlRows:
    """Columns of rows of GGML blocks, blocks whole."""
    import numpy as np

    size, nbytes = rows.encoding.block, rows.encoding.block_bytes
    part = slice(columns.start // size * nbytes, -(-columns.stop // size) * nbytes)
    return GgmlRows(np.ascontiguousarray(rows.bytes_RB[:, part]), rows.encoding)


def _shifted(w_RI: np.ndarray, given: Rounding) -> np.ndarray:
    """The weights that give for quantized inputs what they gave for the original ones."""
    shift = given.blocks[0].shift
    if shift is None:
        return w_RI
    w_RB = w_RI if shift.basis_IB is None else _product(w_RI, shift.basis_IB)
    shifted_RI = _product(w_RB, shift.solved_BI)
    shifted_RI += w_RI
    return shifted_RI


def _codes(
    w_RI: np.ndarray, given: InputHessian, outputs: OutputHessian | None, grid: PointGrid
) -> np.ndarray:
    """The codes of columns whose errors compensate one another, uint8 [R, I]."""
    from qconvert.quant.feedback import round_with_feedback, sweep
    from qconvert.quant.two_sided import round_row_blocks

    if outputs is not None:
        both = (given.order_I, given.factor_II, outputs.order_BR, outputs.factor_BRR)
        return round_row_blocks(w_RI, *both, grid)
    codes_RI = round_with_feedback(w_RI, given.order_I, given.factor_II, grid)
    return sweep(w_RI, codes_RI, given.hessian_II, given.order_I, grid, SWEEPS)


def _cells(w_RI: np.ndarray, given: InputHessian, start: GgmlRows) -> np.ndarray:
    """Rows of a lattice's points, those of a row together, as stored: rows do not compensate one another."""
    import numpy as np

    from qconvert.quant.cell_feedback import round_cells, sweep_cells
    from qconvert.quant.lattice_grid import lattice_grid, with_lattice_codes

    assert given.eights is not None
    order_I, factor_II, costs_I = given.eights()
    grid, w_RI = lattice_grid(start), np.ascontiguousarray(w_RI)
    codes = round_cells(w_RI, order_I, factor_II, costs_I, grid)
    codes = sweep_cells(w_RI, codes, given.hessian_II, order_I, grid, SWEEPS)
    stored: np.ndarray = with_lattice_codes(start, codes).bytes_RB
    return stored


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


def _numbers(value: Value) -> np.ndarray:
    from qconvert.quant.dequantize import numbers

    return numbers(value, DType.F32).rows_RI


def _rows_where(mask_R: np.ndarray, one: Value, other: Value) -> Value:
    """The rows of one value where the mask is set, those of another elsewhere."""
    import numpy as np

    pairs = zip(one.arrays, other.arrays, strict=True)
    return one.with_arrays(tuple(np.where(mask_R[:, None], a, b) for a, b in pairs))
