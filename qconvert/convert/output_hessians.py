"""Provides units with Hessians of their rows, from gradients: rows then compensate one another's errors.

Before any weight is quantized, E[g g^T] of every R consecutive outputs of every linear is measured
(`calibrate.output_moments`). What a unit writes side by side may come from several linears, or in another
order: entries are gathered by written rows, those of rows that were not summed together are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from qconvert.calibrate.output_moments import StoredBlocks
from qconvert.convert.runner import RowsStatistics
from qconvert.convert.written_rows import WrittenRows, written_rows
from qconvert.core.statistics import OutputHessian, RowStatistics, StatisticsKey
from qconvert.models import Architecture
from qconvert.models.statistics_keys import input_key
from qconvert.plan.plan import Unit
from qconvert.quant.hessian import mean_square
from qconvert.quant.two_sided import factor_row_blocks


class OutputHessians:
    """E[g g^T] within blocks of consecutive outputs of every linear, by the key of its weight.

    `blocks` float32 [B, R, R], as `OutputGradients.blocks_BRR` is; `rows` consecutive written rows make up
    for one another; `damping` is what `quant.hessian.factor` takes.
    """

    def __init__(
        self,
        blocks: Mapping[StatisticsKey, np.ndarray | StoredBlocks],
        architecture: Architecture,
        rows: int,
        damping: float,
    ) -> None:
        self._blocks, self._architecture = blocks, architecture
        self._rows, self._damping = rows, damping

    def granule(self, unit: Unit) -> int:
        """The rows of a unit that are made together: whole blocks, or whole experts of a stack."""
        return self._rows if len(unit.statistics) < 2 else unit.output.rows // len(unit.statistics)

    def added_to(self, statistics: RowsStatistics) -> RowsStatistics:
        """The same statistics, with output Hessians where rows are rounded together.

        Rows without gradients, as those of an expert that no token was routed to, get none.
        """

        def given(unit: Unit, start: int, stop: int) -> tuple[RowStatistics, ...]:
            return tuple(
                replace(each, outputs=self._of(unit, start + each.first, start + each.last))
                if each.rounding is not None
                else each
                for each in statistics(unit, start, stop)
            )

        return given

    def _of(self, unit: Unit, start: int, stop: int) -> OutputHessian | None:
        """Of rows [start, stop) of a unit that read one input."""
        rows = written_rows(unit, self._architecture, start, stop)
        found = [self._blocks.get(input_key(parameter)) for parameter in rows.parameters]
        if all(found[parameter] is None for parameter in np.unique(rows.parameter_R[rows.parameter_R >= 0])):
            return None
        # Of one size however the unit is cut: sums of a factor depend on it.
        size = min(self._rows, unit.output.rows // max(1, len(unit.statistics)))
        h_BRR = np.zeros((-(-(stop - start) // size), size, size), np.float32)
        damped_BRR = np.zeros_like(h_BRR)
        for block, first in enumerate(range(0, stop - start, size)):
            own = slice(first, first + size)
            part = WrittenRows(rows.parameters, rows.parameter_R[own], rows.row_R[own])
            _gather_block(part, found, h_BRR[block], damped_BRR[block], self._damping)
        return OutputHessian(*factor_row_blocks(h_BRR, self._damping), damped_BRR)


def _gather_block(
    rows: WrittenRows,
    found: list[np.ndarray | StoredBlocks | None],
    h_RR: np.ndarray,
    damped_RR: np.ndarray,
    damping: float,
) -> None:
    """Fill in the moments of rows, all 0 before: of every two that were summed together.

    In `h_RR` rows of each sum are brought to a mean square of 1: one damping does for all of them, and
    whatever several linears side by side weigh, their rows do not depend on each other. `damped_RR` holds
    the moments as they were found, with that damping.
    """
    for number, blocks_BRR in enumerate(found):
        if blocks_BRR is None:
            continue
        size = blocks_BRR.shape[1]
        places = np.flatnonzero(rows.parameter_R == number)
        for block in np.unique(rows.row_R[places] // size):
            at = places[rows.row_R[places] // size == block]
            inside = rows.row_R[at] % size
            part_RR = blocks_BRR[block][np.ix_(inside, inside)]
            mean = np.float32(mean_square(part_RR))
            h_RR[np.ix_(at, at)] = part_RR / mean
            damped_RR[np.ix_(at, at)] = part_RR
            damped_RR[at, at] += np.float32(damping) * mean
