"""Reads the weights of a model as a plan makes them: before anything is written, or as they were written.

So the loss of a plan can be measured: the decoder reads a layer, and gets what the layer's units make of it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from qconvert.convert.calibrated import ReplacedRows, keeps_rows
from qconvert.convert.job import Job
from qconvert.convert.runner import cut, gather, rows_read, rows_statistics
from qconvert.core.encodings import ModelTensor
from qconvert.core.protocols import Source
from qconvert.core.values import Value
from qconvert.plan.plan import Unit

_BLOCK_BYTES = 1 << 24


class PlannedRows:
    """Rows of a model's source tensors, float32 where the plan of a job quantizes them, else as they are.

    Codes are those that were `written`, in an output of the job that has all its blocks; without one, the
    nearest ones, weighed by the statistics of the job. What units make of a tensor is kept until rows of
    another one are asked for, which they did not make; of an embedding or a head, in a file without a name in
    the folder `scratch` if one is given.
    """

    def __init__(self, job: Job, scratch: Path | None = None, written: Source | None = None) -> None:
        self._job, self._rows = job, ReplacedRows(job.source.checkpoint.reader, scratch)
        self._written = written
        self._made: set[str] = set()
        self._units: dict[str, list[Unit]] = defaultdict(list)
        for unit in job.compiled.plan.units:
            if unit.quantizes and keeps_rows(unit):
                for name in {piece.tensor.name for piece in unit.inputs}:
                    self._units[name].append(unit)

    def read(self, tensor: ModelTensor, start: int, stop: int) -> Value:
        """Rows [start, stop) of a source tensor."""
        units = self._units.get(tensor.name, [])
        if not {unit.output.name for unit in units} <= self._made:
            self._rows.forget()
            self._made = {unit.output.name for unit in units}
            for unit in units:
                for block in cut(unit, self._job.container.layout, _BLOCK_BYTES):
                    self._rows.keep(unit, block.start, self._value(unit, block.start, block.stop))
        return self._rows.read(tensor, start, stop)

    def _value(self, unit: Unit, start: int, stop: int) -> Value:
        """Rows [start, stop) of what a unit makes."""
        if self._written is not None:
            return self._job.container.layout.decode(unit.output, self._written, start, stop)
        reader, source = self._job.source.checkpoint.reader, self._job.compiled.request.statistics
        value, _ = gather(unit.inputs, reader, rows_read(unit, start), rows_read(unit, stop))
        given = rows_statistics(unit, start, stop, source) if source is not None else ()
        for op in unit.ops:
            value, _ = op.apply(value, given if op.quantizes else ())
        return value
