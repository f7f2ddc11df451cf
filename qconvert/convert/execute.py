"""Opens a model, compiles a request for it, and carries it out: write, verify, rename into place."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from qconvert.calibrate.calibration import Calibration, PlannedStatistics
from qconvert.calibrate.memory_limit import resident
from qconvert.checkpoint.assumed import refuse_quantized, without_weights
from qconvert.checkpoint.facts import gather_facts
from qconvert.checkpoint.hub import ResolvedModel, resolve
from qconvert.checkpoint.network import Network
from qconvert.checkpoint.open import Checkpoint, require_weights
from qconvert.checkpoint.resolved import open_found
from qconvert.convert.blocks import at_hand
from qconvert.convert.containers.safetensors_folder import SafetensorsFolder
from qconvert.convert.job import Job, OpenedModel, Result, RunOptions
from qconvert.convert.outcome import BlockDone
from qconvert.convert.publish import Destination, Publication, file_by_file
from qconvert.convert.read_ahead import read_ahead
from qconvert.convert.resume import RunJournal
from qconvert.convert.run_memory import rows_bytes
from qconvert.convert.runner import (
    Granule,
    Made,
    RowsStatistics,
    rows_statistics,
    run,
    single_rows,
)
from qconvert.convert.stages import Stages
from qconvert.convert.writing import Listener, Opened, position_in, terms_of, writing
from qconvert.core.protocols import Layout
from qconvert.errors import BadRecipe
from qconvert.formats.huggingface.preprocessor import read_preprocessor
from qconvert.formats.io.planned_files import FileSink
from qconvert.formats.io.read_back import Progress
from qconvert.formats.layouts import registry
from qconvert.models.binding import bind_tower
from qconvert.models.declared import Declaration
from qconvert.plan.compile import compile_request
from qconvert.plan.plan import Plan
from qconvert.plan.request import GGUFTarget, Request

_AS_USUAL = RunOptions()


def open_model(
    model: str | Path,
    *,
    revision: str | None = None,
    declared: Declaration | None = None,
    plan_only: bool = False,
    network: Network | None = None,
) -> OpenedModel:
    """Find a model (a path, or `org/name[@revision]` on the Hub) and open it; only headers are read.

    `declared` is the architecture of a model that the catalogue lacks. Weights on the Hub are downloaded into
    its cache; with a `network`, those that are not there yet stay on the Hub, and what a job reads of them is
    fetched while it runs. With `plan_only`, a config.json without weights will do: what is planned for it
    cannot be run.
    """
    model = str(model)
    if plan_only and Path(model).exists():
        location = ResolvedModel(Path(model))
        assumed = without_weights(location.path, declared)
        if assumed is not None:
            refuse_quantized(assumed, location.name)
            return OpenedModel(location, assumed)
    resolved = resolve(model, revision=revision, network=network)
    return OpenedModel(resolved, open_found(resolved, declared))


def prepare(
    source: OpenedModel,
    request: Request,
    options: RunOptions = _AS_USUAL,
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
    require_weights(checkpoint, source.location.name)
    binding = checkpoint.bind(allow_unknown=request.allow_unknown)
    if isinstance(request.target, GGUFTarget) and request.target.tower:
        binding = bind_tower(binding, read_preprocessor(checkpoint.path))
    if statistics is not None:
        from qconvert.calibrate.statistics_file import open_statistics

        request = replace(request, statistics=open_statistics(statistics, checkpoint.architecture))
    if calibration is not None:
        from qconvert.convert.calibration_memory import fit

        if calibration.traits.together:  # others measure mean squares alone
            calibration = fit(checkpoint, calibration, request, options)
        request = replace(
            request,
            statistics=PlannedStatistics(calibration.record, tied=is_tied(checkpoint, request)),
            scale_inputs=calibration.traits.scales_inputs,
        )
    layout = _layout(source, request)
    facts = gather_facts(checkpoint, binding, request)
    compiled = compile_request(request, binding, facts, layout)
    if calibration is not None and calibration.traits.together:
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


def is_tied(checkpoint: Checkpoint, request: Request) -> bool:
    """Whether the embedding of the output is its head, too."""
    asked = request.recipe.tie
    return checkpoint.architecture.tied if asked is None else asked


def _layout(source: OpenedModel, request: Request) -> Layout:
    """The layout of the output: the one asked for, or the source's."""
    if isinstance(request.target, GGUFTarget):
        from qconvert.formats.layouts.gguf import GGUFLayout

        return GGUFLayout()
    if request.target is not None:
        layout = registry.writer(request.target.layout, source.checkpoint.config)
        return source.checkpoint.layout_for(layout)
    return source.checkpoint.writer


def execute(
    job: Job,
    out: str | Path,
    listen: Listener = lambda done: None,
    opened: Opened = lambda journal: None,
    verified: Progress = lambda done, total: None,
    destination: Destination | None = None,
) -> Result:
    """Write the output of a job to `out`; `listen` is called with every block that is done.

    Where an earlier run of the same job was killed, its blocks are reused, and reported first; `opened`
    is given the journal that says so, once the output is open; `verified` is told how many bytes of how many
    were read back. With a `destination`, each file is read back and sent there as soon as it is written.
    Raises what a run can refuse (`convert.run_errors`), NotTaken for what the destination does not take,
    CheckFailed when the disk holds other bytes than were written, OutputExists when the name is taken,
    OtherJob when another job has begun an output of that name.
    """
    out = Path(out)
    job, stages = with_all_scales(job, out), Stages()
    with writing(job, out, listen, stages, destination) as run:
        place = run.output.sink, run.output.path, run.journal
        with (
            stages.timed("convert"),
            run.recording(opened),
            closing(run_job(job, *place, run.publication)) as events,  # so that no thread outlives the sink
        ):
            for done in events:
                run.take(done)
        return run.finished(verified)


def with_all_scales(job: Job, out: Path) -> Job:
    """The job with the factors of its inputs, where some may be scaled; measured where there is a text."""
    if not job.compiled.scalable:
        return job
    from qconvert.calibrate.activation_file import scratch_folder
    from qconvert.convert.activation_scales import with_scales

    return with_scales(job, scratch_folder(out))


def run_job(
    job: Job, sink: FileSink, out: Path, journal: RunJournal, publication: Publication | None = None
) -> Generator[BlockDone, None, None]:
    """Make the blocks of a job that are not in the journal; yields what `runner.run` does.

    What else takes disk lies beside `out` while it runs.
    """
    request, options, checkpoint = job.compiled.request, job.options, job.source.checkpoint
    layout = job.container.layout
    fetching = read_ahead(job.source, rows_bytes(job, resident()) // 2)
    ahead = fetching or at_hand
    terms = terms_of(job, journal, fetches=fetching is not None)

    def run_plan(
        plan: Plan,
        statistics: RowsStatistics | None = None,
        made: Made | None = None,
        granule: Granule = single_rows,
        there: Collection[tuple[str, int]] = journal.there,
    ) -> Generator[BlockDone, None, None]:
        if made is not None:
            for unit in plan.units:
                for start, stop in journal.rows_of(unit):
                    made(unit, start, layout.decode(unit.output, sink, start, stop))
        reader = checkpoint.reader
        how = (position_in(checkpoint), statistics, made, granule, there, ahead)
        return run(plan, reader, layout, sink, terms, *how)

    if job.calibration is None or not job.calibration.traits.together:
        source, plan = request.statistics, job.compiled.plan
        statistics = partial(rows_statistics, source=source) if source else None
        if publication is None or not options.drop:
            return run_plan(plan, statistics)
        arrays = {u.output.name: [each.name for each in layout.stored_arrays(u.output)] for u in plan.units}
        run_all_but = partial(run_plan, plan, statistics, None, single_rows)
        return file_by_file(publication, arrays, journal.there, run_all_but)
    from qconvert.convert.calibrated import run_in_waves
    from qconvert.convert.calibration_memory import scratch_for

    scratch = scratch_for(job, out)
    return run_in_waves(job.compiled.plan, run_plan, checkpoint, job.calibration, scratch, journal)
