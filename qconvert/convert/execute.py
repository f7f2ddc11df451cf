"""Opens a model, compiles a request for it, and carries it out: write, verify, rename into place."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from zlib import crc32

from qconvert.calibrate.calibration import Calibration, PlannedStatistics
from qconvert.checkpoint.facts import gather_facts
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.convert.containers import OpenOutput
from qconvert.convert.containers.safetensors_folder import SafetensorsFolder
from qconvert.convert.job import Job, OpenedModel, Result, RunOptions
from qconvert.convert.runner import (
    MOST_CODE_ERROR,
    BlockDone,
    Granule,
    Made,
    Outcome,
    RowsStatistics,
    Terms,
    WrittenRows,
    rows_statistics,
    run,
    single_rows,
)
from qconvert.core.protocols import Layout
from qconvert.errors import BadRecipe, QConvertError
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.read_back import Hashes
from qconvert.formats.layouts import registry
from qconvert.models.declared import Declaration
from qconvert.plan.compile import compile_request
from qconvert.plan.plan import Plan, Unit
from qconvert.plan.request import GGUFTarget, Request

Listener = Callable[[BlockDone], None]


def open_model(
    model: str, *, revision: str | None = None, declared: Declaration | None = None
) -> OpenedModel:
    """Find a model (a path, or `org/name[@revision]` on the Hub) and open it; only headers are read.

    `declared` is the architecture of a model that the catalogue lacks.
    """
    resolved = resolve(model, revision=revision)
    return OpenedModel(resolved, open_checkpoint(resolved.path, declared=declared))


def prepare(
    source: OpenedModel,
    request: Request,
    options: RunOptions,
    *,
    statistics: Path | None = None,
    calibration: Calibration | None = None,
    pre_tokenizer: str | None = None,
) -> Job:
    """Compile a request for an opened model.

    `statistics` is a file or folder of statistics that weigh the errors of new codes (`open_statistics`);
    with a `calibration`, codes are chosen together; `pre_tokenizer` is llama.cpp's name of a GGUF's
    pre-tokenizer. Raises BadRecipe for a request that contradicts the model, UnsupportedModel for a model
    that the output cannot hold.
    """
    checkpoint = source.checkpoint
    if not checkpoint.files.has_weights:
        raise QConvertError(
            f"{source.location.name}: no weights beside the config.json", "give the whole model folder"
        )
    binding = checkpoint.bind(allow_unknown=request.allow_unknown)
    if statistics is not None:
        from qconvert.calibrate.statistics_file import open_statistics

        request = replace(request, statistics=open_statistics(statistics, checkpoint.architecture))
    if calibration is not None:
        request = replace(
            request, statistics=PlannedStatistics(calibration.record, tied=_tied(checkpoint, request))
        )
    layout = _layout(source, request)
    facts = gather_facts(checkpoint, binding, request)
    compiled = compile_request(request, binding, facts, layout)
    if calibration is not None:
        _refuse_idle(compiled.plan, calibration)
    if not compiled.is_gguf:
        return Job(source, compiled, SafetensorsFolder(source, compiled, options), options, calibration)
    from qconvert.convert.containers.gguf_file import GGUFFileContainer

    container = GGUFFileContainer(source, compiled, options, pre_tokenizer)
    container.check()
    return Job(source, compiled, container, options, calibration)


def _refuse_idle(plan: Plan, calibration: Calibration) -> None:
    """Raise BadRecipe where no weight's codes would be chosen together."""
    from qconvert.convert.calibrated import chosen_together

    if not any(map(chosen_together, plan.units)):
        raise BadRecipe(
            f"--method {calibration.method}: no weight gets new codes that could be chosen together",
            "leave it out, or name an encoding of integers, 4-bit floats or a GGUF type from IQ1 to Q8_0",
        )


def _tied(checkpoint: Checkpoint, request: Request) -> bool:
    """Whether the embedding of the output is its head, too."""
    asked = request.recipe.tie
    return checkpoint.architecture.tied if asked is None else asked


def _layout(source: OpenedModel, request: Request) -> Layout:
    """The layout of the output: the one asked for, or the source's."""
    if isinstance(request.target, GGUFTarget):
        from qconvert.formats.layouts.gguf import GGUFLayout

        return GGUFLayout()
    if request.target is not None:
        return source.checkpoint.layout_for(registry.writer(request.target.layout))
    return source.checkpoint.writer


def execute(job: Job, out: Path, listen: Listener = lambda done: None) -> Result:
    """Write the output of a job to `out`; `listen` hears of every block that is done.

    Raises what a run can refuse (`convert.run_errors`), CheckFailed when the disk holds other bytes than
    were written, OutputExists when the name is taken.
    """
    with job.container.create(out) as output:
        outcome = Outcome()
        for name, values in job.container.constants.items():
            rows = values.reshape(len(values), -1)
            output.sink.write(name, 0, rows)
            outcome.written[name].append(WrittenRows(name, 0, len(rows), rows.shape[1], crc32(octets(rows))))
        with closing(_run(job, output)) as events:  # closed first, so that no thread outlives the sink
            for done in events:
                outcome.add(done)
                listen(done)
        output.sink.commit()
        verify, jobs = job.options.verify, job.options.jobs
        hashes = output.verify(outcome.written, jobs) if verify else Hashes({}, {})
        record = output.finish(outcome, hashes)
    return Result(output.path, record, outcome, hashes)


def _run(job: Job, output: OpenOutput) -> Generator[BlockDone, None, None]:
    request, options, checkpoint = job.compiled.request, job.options, job.source.checkpoint
    terms = Terms(
        options.jobs,
        options.max_memory,
        checksums=options.verify,
        allow_nonfinite=request.allow_nonfinite,
        most_code_error=inf if request.allow_requantize else MOST_CODE_ERROR,
    )

    def position(unit: Unit) -> tuple[int, int]:
        """Where a unit's first array lies in the source files, so that reading goes forward."""
        first = checkpoint.layout.stored_arrays(unit.source)[0]
        return checkpoint.files.source_offset(first.name)

    def run_plan(
        plan: Plan,
        statistics: RowsStatistics | None = None,
        made: Made | None = None,
        granule: Granule = single_rows,
    ) -> Generator[BlockDone, None, None]:
        sink, layout = output.sink, job.container.layout
        return run(plan, checkpoint.reader, layout, sink, terms, position, statistics, made, granule)

    if job.calibration is None:
        source = request.statistics
        return run_plan(job.compiled.plan, partial(rows_statistics, source=source) if source else None)
    from qconvert.convert.calibrated import run_in_waves

    return run_in_waves(job.compiled.plan, run_plan, checkpoint, job.calibration, output.path.parent)
