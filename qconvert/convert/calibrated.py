"""Runs a plan whose codes are chosen together: wave after wave, each before its statistics are measured.

waves of `calibrate.waves`  ->  the units that read the wave's input  ->  runner  ->  files
             ^                                                               |
             +----  layers read their weights as quantized  <----------------+
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.layer_by_layer import layer_by_layer
from qconvert.calibrate.output_moments import output_moments
from qconvert.calibrate.row_file import RowFile, row_file
from qconvert.calibrate.waves import waves
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.outcome import BlockDone
from qconvert.convert.output_hessians import OutputHessians
from qconvert.convert.resume import RunJournal
from qconvert.convert.runner import Granule, Made, RowsStatistics, gather, rows_statistics
from qconvert.convert.written_rows import stored_rows
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import ModelTensor
from qconvert.core.protocols import Rows
from qconvert.core.statistics import Rounding, RowStatistics, StatisticsKey
from qconvert.core.values import DenseRows, Value
from qconvert.ops import EncodeBlocks, EncodeTable, Quantize
from qconvert.ops.calibrated import PRODUCT_ROWS, is_rounded_together
from qconvert.plan.plan import Plan, Unit
from qconvert.quant.dequantize import numbers
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import Streaming
from qconvert.runtime.model import Decoder

# Rows of a linear that the damping of its Hessian is chosen with.
_SAMPLE_ROWS = 64


class RunPlan(Protocol):
    """Runs the units of a plan with these statistics, and shows what their blocks became (`runner.run`)."""

    def __call__(
        self,
        plan: Plan,
        statistics: RowsStatistics | None = None,
        made: Made | None = None,
        granule: Granule = ...,
    ) -> Generator[BlockDone, None, None]: ...


def run_in_waves(
    plan: Plan,
    run_plan: RunPlan,
    checkpoint: Checkpoint,
    calibration: Calibration,
    scratch: Path,
    journal: RunJournal,
) -> Generator[BlockDone, None, None]:
    """Make every tensor of the plan; yields what `runner.run` does, linears in the order of the layers.

    Activations lie in files without a name in the folder `scratch`. Nothing is measured of layers that the
    journal has whole: the output has their codes, from which later layers are computed. Raises
    UnsupportedModel for a family that does not run here, and what `runner.run` raises.
    """
    savings = calibration.savings
    replaced = ReplacedRows(checkpoint.reader, scratch, holds=not savings.streamed)
    calibrated = {unit.output.name: unit for unit in plan.units if unit.statistics and keeps_rows(unit)}
    others = [unit._replace(statistics=()) for unit in plan.units if unit.output.name not in calibrated]
    embeddings = [unit for unit in others if is_followed(unit)]
    # First, since what the quantized embedding gives is what the first layer reads.
    yield from run_plan(Plan(tuple(embeddings)), made=replaced.keep)
    yield from run_plan(Plan(tuple(unit for unit in others if not is_followed(unit))))
    wanted = {key for unit in calibrated.values() for key in unit.statistics}
    open_keys = {key for unit in calibrated.values() if not journal.has(unit) for key in unit.statistics}
    if not open_keys:
        return
    streaming = Streaming.EVERYTHING if savings.streamed else Streaming.TABLES
    original, current = (
        partial(_decoder, checkpoint, rows, streaming) for rows in (checkpoint.reader, replaced)
    )
    outputs = None
    if calibration.traits.over_rows:
        kept = Streaming.EVERYTHING if savings.streamed else Streaming.NOTHING
        decoder, damping = _decoder(checkpoint, checkpoint.reader, kept), calibration.output_damping
        moments = output_moments(decoder, calibration, scratch)
        del decoder
        outputs = OutputHessians(moments, checkpoint.architecture, calibration.output_rows, damping)

    def loss(key: StatisticsKey, hessian: Rounding) -> float:
        reading = next(unit for unit in calibrated.values() if key in unit.statistics)
        return _loss(reading, key, hessian, checkpoint.reader)

    layer = None
    walked = waves(
        original, current, calibration, wanted, scratch, loss, wanted - open_keys, _Dampings(journal)
    )
    for wave in walked:
        if wave.layer != layer:
            layer = wave.layer
            replaced.forget()
        units = [unit for unit in calibrated.values() if all(key in wave.keys for key in unit.statistics)]
        statistics = partial(rows_statistics, source=wave)
        if outputs is None:
            yield from run_plan(Plan(tuple(units)), statistics, replaced.keep, lambda unit: PRODUCT_ROWS)
        else:
            given = outputs.added_to(statistics)
            yield from run_plan(Plan(tuple(units)), given, replaced.keep, outputs.granule)
        wave.forget()


def torch_record() -> Json:
    """What says whether torch gives the same numbers again: its version, and its number of threads."""
    return {"version": torch.__version__, "threads": torch.get_num_threads()}


class _Dampings(dict[tuple[str, ...], float]):
    """The dampings that were chosen, by roles, which a run that goes on does not choose again."""

    _NOTE = "damping "

    def __init__(self, journal: RunJournal) -> None:
        notes = journal.notes.items()
        super().__init__(
            {
                tuple(name.removeprefix(self._NOTE).split("+")): value
                for name, value in notes
                if name.startswith(self._NOTE)
            }
        )
        self._journal = journal

    def __setitem__(self, roles: tuple[str, ...], damping: float) -> None:
        super().__setitem__(roles, damping)
        self._journal.note(self._NOTE + "+".join(roles), damping)


def is_followed(unit: Unit) -> bool:
    """Whether the decoder can read what a unit's new codes are worth."""
    return unit.quantizes and keeps_rows(unit)


def _decoder(checkpoint: Checkpoint, rows: Rows, streaming: Streaming) -> Decoder:
    return layer_by_layer(checkpoint, rows, layout=Layout.AUTO, streaming=streaming)


def _loss(unit: Unit, key: StatisticsKey, hessian: Rounding, reader: Rows) -> float:
    """What the outputs of some rows of a linear lose on tokens held out, if its codes are chosen so."""
    each = unit.rows // len(unit.statistics)
    first = unit.statistics.index(key) * each
    value, _ = gather(unit.inputs, reader, first, first + min(each, _SAMPLE_ROWS))
    moments_I = hessian.second_moments_I
    for op in unit.ops:
        if op.moves_rows or op.needs_reduction:
            continue
        given = (RowStatistics(0, value.rows, moments_I, hessian),) if op.quantizes else ()
        value, finding = op.apply(value, given)
        if op.quantizes:
            return finding.output_error.made if finding.output_error else inf
    return inf


def chosen_together(unit: Unit) -> bool:
    """Whether a unit's codes are chosen on a text."""
    encodings = [op.encoding for op in unit.ops if isinstance(op, Quantize | EncodeBlocks | EncodeTable)]
    return bool(unit.statistics) and keeps_rows(unit) and all(map(is_rounded_together, encodings))


def keeps_rows(unit: Unit) -> bool:
    """Whether every row of the output is one that was read, rounded, and its columns are in their order."""
    return all(op.keeps_rows or op.moves_rows for op in unit.ops)


class ReplacedRows:
    """Reads the rows of a source, but those that were quantized as the numbers they became.

    Those of layers are held, unless `holds` is off; others, and those of embeddings, lie in files without a
    name in the folder `scratch`. Without such a folder all are held.
    """

    def __init__(self, reader: Rows, scratch: Path | None = None, *, holds: bool = True) -> None:
        self._reader, self._scratch, self._holds = reader, scratch, holds
        self._rows: dict[str, np.ndarray] = {}
        self._files: dict[str, RowFile] = {}
        self._lock = threading.Lock()

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        """Rows [start, stop) of a source tensor."""
        rows_RI, file = self._rows.get(tensor.name), self._files.get(tensor.name)
        if rows_RI is not None:
            return DenseRows(rows_RI[start:stop], DType.F32)
        if file is None or not (made_R := file.made_O[start:stop]).any():
            return self._reader.read(tensor, start, stop)
        made_RI = file.read(start, stop)
        if not made_R.all():
            source_RI = numbers(self._reader.read(tensor, start, stop), DType.F32).rows_RI
            made_RI[~made_R] = source_RI[~made_R]
        return DenseRows(made_RI, DType.F32)

    def keep(self, unit: Unit, start: int, value: Value) -> None:
        """Let the source rows of a unit's rows from `start` on be read as `value`."""
        made_RI, rows = numbers(value, DType.F32).rows_RI, stored_rows(unit, start, start + value.rows)
        table = not unit.statistics or any(key.layer is None for key in unit.statistics)
        held = self._scratch is None or (self._holds and not table)
        for number, tensor in enumerate(rows.tensors):
            own_R = rows.tensor_R == number
            if own_R.any() and held:
                self._of(tensor)[rows.row_R[own_R]] = made_RI[own_R]
            elif own_R.any():
                self._file_of(tensor).write(rows.row_R[own_R], made_RI[own_R])

    def forget(self) -> None:
        """Read everything from the source again."""
        self._rows.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _of(self, tensor: ModelTensor) -> np.ndarray:
        with self._lock:
            if tensor.name not in self._rows:
                # Units may make a tensor's rows one after the other, or not all of them.
                source = self._reader.read(tensor, 0, tensor.rows)
                # Torch's memory begins at whole cache lines: sums of products depend on that.
                rows_RI: np.ndarray = torch.empty(tensor.rows, tensor.width).numpy()
                rows_RI[:] = numbers(source, DType.F32).rows_RI
                self._rows[tensor.name] = rows_RI
            return self._rows[tensor.name]

    def _file_of(self, tensor: ModelTensor) -> RowFile:
        assert self._scratch is not None
        with self._lock:
            if tensor.name not in self._files:
                self._files[tensor.name] = row_file(self._scratch, tensor.rows, tensor.width)
            return self._files[tensor.name]
