"""Chooses the factors of the inputs whose channels are to be scaled, by what their readers lose (AWQ).

Every candidate is tried on some rows of every weight that reads the input: they are scaled, go through the
operations of their unit, codes and all, and are compared with what went in, column by column weighed by the
mean square of the scaled input. So an encoding, a group size, a search of scales count as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qconvert.calibrate.calibration import PlannedStatistics
from qconvert.convert.job import Job
from qconvert.convert.runner import moved_with_columns, read_slice
from qconvert.core.dtypes import DType
from qconvert.core.encodings import Unquantized
from qconvert.core.protocols import Rows
from qconvert.core.statistics import RowStatistics, StatisticsSource
from qconvert.core.values import DenseRows, stack_rows
from qconvert.models import Architecture
from qconvert.models.scale_pairs import ScalableInput
from qconvert.models.statistics_keys import input_key
from qconvert.plan.compile import compile_request
from qconvert.plan.passes.scale_inputs import statistics_key
from qconvert.plan.plan import Plan, RowSlice, Unit
from qconvert.plan.scales import ScaledInput, parameters_in, with_factors
from qconvert.quant.activation_scales import candidates, factors_of_norm
from qconvert.quant.dequantize import numbers

# Numbers of the readers of an input that candidates are tried on: 16 MB.
SAMPLE_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows of a weight as the source holds them, the unit that makes them, and how many each stands for."""

    rows_RI: np.ndarray
    unit: Unit
    share: float


def with_scales(job: Job, scratch: Path | None = None) -> Job:
    """A job whose inputs are scaled, those that gain by it; measures them where there is only a text yet.

    Activations of the text then lie in a file without a name in the folder `scratch`, by default that of
    temporary files.
    """
    compiled = job.compiled
    if isinstance(compiled.request.statistics, PlannedStatistics):
        request = replace(compiled.request, statistics=_measured(job, scratch))
        compiled = compile_request(request, compiled.binding, compiled.facts, compiled.layout)
    statistics, reader = compiled.request.statistics, job.source.checkpoint.reader
    assert statistics is not None
    architecture, jobs = compiled.architecture, job.options.jobs
    scaled = choose_factors(compiled.plan, compiled.scalable, architecture, statistics, reader, jobs)
    plan = with_factors(compiled.plan, architecture, [each for each in scaled if each.power])
    compiled = replace(compiled, plan=plan, scalable=(), scaled=tuple(scaled))
    return replace(job, compiled=compiled, container=job.container.of(compiled))


def _measured(job: Job, scratch: Path | None) -> StatisticsSource:
    from qconvert.calibrate.run import statistics_on

    calibration, source = job.calibration, job.source
    assert calibration is not None
    window = int(calibration.tokens_BT.shape[1])
    record = {"texts": [], "window": window, **calibration.text}
    return statistics_on(
        source.checkpoint,
        source.location.name,
        calibration.tokens_BT,
        record,
        max_memory=job.options.process_memory,
        folder=scratch,
    )


def choose_factors(
    plan: Plan,
    inputs: Sequence[ScalableInput],
    architecture: Architecture,
    statistics: StatisticsSource,
    reader: Rows,
    jobs: int,
) -> list[ScaledInput]:
    """The factors of least loss of every input, 1 where none lose less than no scaling.

    They do not depend on the number of threads; `jobs` inputs are worked on at a time, each with about 200
    MB.
    """
    readers, norms = _places(plan, architecture, inputs)

    def one(each: ScalableInput) -> ScaledInput:
        samples = list(_samples(readers[each.name], reader))
        return _chosen(each, samples, _mean_squares(each, statistics), norms.get(each.name), reader)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, inputs))


_Place = tuple[Unit, RowSlice]


def _places(
    plan: Plan, architecture: Architecture, inputs: Sequence[ScalableInput]
) -> tuple[dict[str, list[_Place]], dict[str, _Place]]:
    """Where the quantized readers of every input have their rows, and where its norm is, by its name."""
    reads = {reader.name: each.name for each in inputs for reader in each.readers}
    names = {each.name for each in inputs if each.by_norm}
    readers: dict[str, list[_Place]] = defaultdict(list)
    norms: dict[str, _Place] = {}
    for unit in plan.units:
        for whole in unit.inputs:
            for parameter, piece in parameters_in(whole, architecture):
                if unit.quantizes and parameter.name in reads and piece.zeros_like is None:
                    readers[reads[parameter.name]].append((unit, piece))
                elif parameter.name in names:
                    norms[parameter.name] = unit, piece
    return readers, norms


def _samples(places: Sequence[_Place], reader: Rows) -> Iterator[_Sample]:
    """Runs of rows of every weight, evenly spread over it, of `SAMPLE_WEIGHTS` numbers together."""
    total = sum(piece.rows * piece.tensor.width for _, piece in places)
    share = min(1.0, SAMPLE_WEIGHTS / total)
    for unit, piece in places:
        granule = max(op.granule for op in unit.ops if not op.moves_rows)
        runs = max(1, round(piece.rows * share / granule))
        step = max(1, piece.rows // granule // runs) * granule
        starts = range(0, piece.rows, step)
        blocks = [read_slice(reader, piece.within(a, min(a + granule, piece.rows))) for a in starts]
        rows = stack_rows(blocks)
        assert isinstance(rows, DenseRows)
        rows_RI = numbers(rows, DType.F32).rows_RI
        yield _Sample(rows_RI, unit, piece.rows / len(rows_RI))


def _mean_squares(each: ScalableInput, statistics: StatisticsSource) -> np.ndarray:
    """The mean square of every channel, float32 [I]: of all tokens, or of the means over experts."""
    key = statistics_key(each, statistics)
    assert key is not None
    if key.expert is None:
        return statistics.second_moments(key)
    keys = [key for key in map(input_key, each.readers) if key in statistics]
    squares_EI = np.stack([statistics.second_moments(key) for key in keys])
    return np.asarray(squares_EI.mean(axis=0), np.float32)


def _chosen(
    each: ScalableInput,
    samples: Sequence[_Sample],
    squares_I: np.ndarray,
    norm: _Place | None,
    reader: Rows,
) -> ScaledInput:
    none = ScaledInput(each, np.ones(each.channels, np.float32), 0.0, 1.0)
    if len(squares_I) != each.channels or not samples:
        return none
    plain, best = 0.0, none
    for power, asked_I in candidates(squares_I):
        factors_I = asked_I if norm is None else _as_stored(each, asked_I, norm, reader)
        loss = sum(sample.share * _loss(sample, factors_I, squares_I) for sample in samples)
        if power == 0:
            plain = loss
        elif loss < best.error * plain:
            best = ScaledInput(each, factors_I, power, loss / plain)
    return best


def _as_stored(each: ScalableInput, factors_I: np.ndarray, norm: _Place, reader: Rows) -> np.ndarray:
    unit, piece = norm
    value, encoding = read_slice(reader, piece), unit.output.encoding
    assert isinstance(value, DenseRows) and isinstance(encoding, Unquantized)
    weight_I = numbers(value, DType.F32).rows_RI[:, 0]
    return factors_of_norm(weight_I, factors_I, each.offset, encoding.dtype)


def _loss(sample: _Sample, factors_I: np.ndarray, squares_I: np.ndarray) -> float:
    """What the outputs of the sampled rows lose, summed: their squared error per token."""
    value = DenseRows(sample.rows_RI * factors_I, DType.F32)
    moments_I = moved_with_columns(squares_I / factors_I**2, sample.unit.ops)
    for op in sample.unit.ops:
        if op.moves_rows:
            continue
        if not op.quantizes:
            made, _ = op.apply(value)
            assert isinstance(made, DenseRows)
            value = made
            continue
        given = (RowStatistics(0, value.rows, moments_I),) if sample.unit.statistics else ()
        # The reduction of these rows is nearly that of all.
        encode = op.finalize(op.reduce(value)) if op.needs_reduction else op
        made, _ = encode.apply(value, given)
        break
    lost_RI = numbers(value, DType.F32).rows_RI - numbers(made, DType.F32).rows_RI
    return float(np.einsum("ri,ri,i->", lost_RI, lost_RI, moments_I, dtype=np.float64))
