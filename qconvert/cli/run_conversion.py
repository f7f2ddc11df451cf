"""Carries out a writing command: open, compile, tell, execute, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import click

from qconvert.cli.exit_codes import after_the_work, typed
from qconvert.cli.flags import Flags
from qconvert.cli.hub_source import fetched, tell_download, tell_source
from qconvert.cli.options import url_of
from qconvert.cli.progress import compile_kernels
from qconvert.cli.ranks import carried_out, rank_to_be
from qconvert.cli.running import executed
from qconvert.cli.sending import (
    after_sending,
    check_sending,
    destination_of,
    sent_before,
    tell_complete,
    tell_sent_before,
    told_of,
)
from qconvert.cli.skipping import (
    Tell,
    is_complete,
    one_object,
    require_own_name,
    write_texts_beside,
)

if TYPE_CHECKING:
    from qconvert.cli.conversion_report import ConversionReport
    from qconvert.convert.job import Job, OpenedModel, Result
    from qconvert.convert.publish import Destination
    from qconvert.core.dtypes import Json
    from qconvert.core.ranks import Rank
    from qconvert.plan.request import Request


Ask = Callable[["OpenedModel"], "Request"]
"""Makes a request for an opened model."""


@runtime_checkable
class Explained(Protocol):
    """Makes a request for an opened model of one that leaves something open, and tells what it chose."""

    request: Request

    def __call__(self, source: OpenedModel) -> Request: ...

    def settled(self, job: Job, out: Path, destination: Destination | None) -> AbstractContextManager[Job]:
        """The job that is to be written to `out`, which may take as long as writing others to choose from."""
        ...

    def lines(self) -> list[str]:
        """What was chosen and why, for people; once it was called."""
        ...

    def to_json(self) -> Json:
        """The same as plain data."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """An output that can be written to `out`; whether it is here already, and complete; where it is sent.

    `rank` is the one as which it is made, where it is made by several processes.
    """

    job: Job
    out: Path
    complete: bool
    destination: Destination | None
    rank: Rank | None


def open_source(model: str, ask: Request | Ask | Explained, flags: Flags) -> OpenedModel:
    """Open the model of a writing command."""
    from qconvert.convert.execute import open_model

    with typed():
        flags.check(aims=isinstance(ask, Explained))
        check_sending(flags)
    _check_before_download(model, ask, flags)
    chooser = ask if isinstance(ask, Explained) else None
    known = chooser.request if chooser else None if callable(ask) else ask
    if (aims := chooser is not None) or flags.method_traits.measures:
        what = "a target" if aims else f"--method {flags.method}"
        tell_download(model, what, talks=flags.talks and not flags.dry_run)
    return open_model(
        model,
        revision=flags.revision,
        declared=known.recipe.architecture if known else None,
        plan_only=flags.dry_run,
        network=flags.network(aims=chooser is not None),
    )


def plan_output(source: OpenedModel, ask: Request | Ask | Explained, suffix: str, flags: Flags) -> Planned:
    """Compile what is asked for of a model; raise where the output cannot be written, or may not be."""
    from qconvert.convert.execute import prepare
    from qconvert.convert.run_memory import require_memory

    request = ask(source) if callable(ask) else ask
    calibration = flags.calibration(source, aims=isinstance(ask, Explained))
    job = prepare(
        source,
        request,
        flags.options,
        statistics=flags.statistics,
        calibration=calibration,
        pre_tokenizer=flags.pre_tokenizer,
    )
    out = out_of(job, suffix, flags)
    require_own_name(out, flags.taken)
    destination = destination_of(flags, out)
    out = out if url_of(out) is None else Path(out.name)
    there = destination is not None and destination.files is not None
    looks = not flags.shared and (flags.keeps or there) and (destination is None or not flags.dry_run)
    complete = looks and is_complete(job, out, flags, destination)
    if not (complete or isinstance(ask, Explained)):  # a choice is measured within this memory
        require_memory([job])
    rank = None if complete or flags.dry_run else rank_to_be(job, out, flags)
    if not (complete or flags.dry_run or rank):
        job.container.check_target(out)
        check_beside(out, flags)
    return Planned(job, out, complete, destination, rank)


def write(
    model: str, ask: Request | Ask | Explained, suffix: str, flags: Flags, tell: Tell = one_object
) -> Path:
    """Carry out a writing command on one model, and print its result; under --json give it to `tell`.

    `ask` is the request, or what makes it of the opened model; `suffix` completes the derived name, the name
    of the dtype where it is empty. Returns the path of the output.
    """
    from qconvert.cli.conversion_report import report_of

    chooser = ask if isinstance(ask, Explained) else None
    source = open_source(model, ask, flags)
    started = time.perf_counter()
    planned = plan_output(source, ask, suffix, flags)
    chosen_in = time.perf_counter() - started if chooser else 0.0
    job, out = planned.job, planned.out
    if planned.complete:
        tell_complete(job, out, planned.destination, flags, tell)
        return out
    report = report_of(job, out)
    if flags.speaks and not flags.as_json:
        for warning in report.warnings():
            click.echo(f"Warning: {warning}", err=True)
    if job.compiled.scalable:
        _tell_scaling(job, flags)
    elif job.calibration is not None and job.calibration.traits.together:
        _tell_needs(job, flags)
    if flags.dry_run:
        assumed = source.checkpoint.assumed
        verdict = "dry run: nothing was written" + (f"; planned from {assumed} only" if assumed else "")
        told = {"from": assumed} if assumed else {}
        path = str(report.path)
        if flags.speaks:
            lines, extra = _explained(chooser, report)
            print_found(lines, lambda: report.plan_json() | extra | told, verdict, path, flags, tell)
        return out
    tell_source(source, talks=flags.talks)
    compile_kernels(job.compiled.plan, talks=flags.talks)
    started = time.perf_counter()
    with chooser.settled(job, out, planned.destination) if chooser else nullcontext(job) as best:
        chosen_in += time.perf_counter() - started
        _write(replace(planned, job=best), chooser, chosen_in, flags, tell)
    return out


def _explained(chooser: Explained | None, report: ConversionReport) -> tuple[list[str], Json]:
    """What is told of a job, and of why it was chosen: for people, and what --json has besides."""
    chosen = chooser.lines() if chooser else []
    return [*chosen, *report.lines()], {"target": chooser.to_json()} if chooser else {}


def _write(planned: Planned, chooser: Explained | None, chosen_in: float, flags: Flags, tell: Tell) -> None:
    """Carry out a job, and tell of it; `chosen_in` are the seconds that went before."""
    from qconvert.cli.conversion_report import report_of

    job, out, rank = planned.job, planned.out, planned.rank
    sent = sent_before(job, out, planned.destination, flags) if rank is None or flags.skips else None
    if sent and (rank is None or "version" in sent):  # what several have sent, they find for themselves
        if flags.speaks:
            tell_sent_before(job, out, sent, flags, tell)
        return
    report = report_of(job, out)
    lines, extra = _explained(chooser, report)
    started = time.perf_counter()
    result: Result | None
    if rank is None:
        (result,) = executed([(job, out)], flags, planned.destination)
    else:
        result = carried_out(job, out, rank, flags, planned.destination)
    if result is None:  # another process has named the output, and tells of it
        return
    seconds = chosen_in + time.perf_counter() - started
    write_beside(job, out, result, flags, planned.destination)
    _tell_done(job, result, report, lines, extra, seconds, flags, tell)


def _tell_done(
    job: Job,
    result: Result,
    report: ConversionReport,
    lines: list[str],
    extra: Json,
    seconds: float,
    flags: Flags,
    tell: Tell,
) -> None:
    """Print what came of a job, where it is, and what to do next."""
    from qconvert.cli.conversion_report import advice

    with after_the_work():
        found = report.result_json(result, seconds) | extra | fetched(job.source) | told_of(result, flags)
        path = str(report.path) if flags.keeps else result.sent["url"]
        print_found(lines, lambda: found, report.verdict(result, seconds), path, flags, tell)
        for line in after_sending(result, flags):
            click.echo(line, err=True)
        silent = flags.quiet or flags.as_json
        sent = result.sent.get("to")
        for line in () if silent else advice(job, sent or str(result.path), () if sent else flags.beside):
            click.echo(line, err=True)


def out_of(job: Job, suffix: str, flags: Flags) -> Path:
    """The path of an output: the one that was named, or one that is derived, in the folder of the flags."""
    dtype = job.compiled.request.dtype
    return flags.out or flags.folder / job.container.default_out(suffix or (dtype.label if dtype else ""))


def check_beside(out: Path, flags: Flags) -> None:
    """Raise OutputExists for a file beside the output that is there already."""
    if flags.beside:
        from qconvert.convert.gguf_sidecars import check_sidecars

        check_sidecars(out, flags.beside, overwrite=flags.overwrite)


def write_beside(
    job: Job, out: Path, result: Result, flags: Flags, destination: Destination | None = None
) -> None:
    """Write what was asked for beside a GGUF: a card of it as it is read back, a Modelfile, a manifest.

    A manifest that is there already is of an earlier file of this name, and is written again.
    """
    if not job.compiled.is_gguf:
        return
    from tempfile import TemporaryDirectory

    from qconvert.convert import gguf_sidecars

    target = gguf_sidecars.sidecar(result.path, gguf_sidecars.MANIFEST)
    if destination is None or destination.files is None:
        write_texts_beside(job, result.path, flags)
        if target.exists() or gguf_sidecars.MANIFEST in flags.beside:
            _write_manifest(target, job, out, result)
    elif gguf_sidecars.MANIFEST in flags.beside or destination.files.manifest(result.path.name):
        with TemporaryDirectory(prefix="qconvert-") as folder:
            made = Path(folder) / target.name
            _write_manifest(made, job, out, result)
            destination.put(made.name, made, "")


def _write_manifest(target: Path, job: Job, out: Path, result: Result) -> None:
    from qconvert.convert.manifest import manifest, write_manifest

    sizes = {file.name: file.size for file in job.container.files(out)}
    record = manifest(job.source, job.compiled, result.outcome, result.hashes, sizes, job.options)
    write_manifest(target, record, job.compiled, result.outcome, result.hashes)


def _tell_scaling(job: Job, flags: Flags) -> None:
    """One line on the inputs that may be scaled, and on what they are measured."""
    inputs, calibration = len(job.compiled.scalable), job.calibration
    measured = f", measured on {calibration.tokens_BT.size:,} tokens of text" if calibration else ""
    if flags.talks:
        click.echo(f"{inputs} inputs whose channels may be scaled{measured}", err=True)


def _tell_needs(job: Job, flags: Flags) -> None:
    """What calibration will take, and what it does to take no more; a warning where it is still too much."""
    from qconvert.calibrate.memory_limit import available_memory
    from qconvert.convert.calibration_memory import needed
    from qconvert.report.tables import size

    assert job.calibration is not None
    found, saved = needed(job), job.calibration.savings.sentence
    tokens = f"{job.calibration.tokens_BT.size:,} tokens of text"
    told = f"calibrating on {tokens} takes about {size(found.memory)} of memory"
    asked, available = flags.max_memory, available_memory()
    if asked is None and available is not None and found.memory > available:
        click.echo(f"Warning: {told}, {size(available)} is available", err=True)
    if flags.talks:
        click.echo(f"{told} and {size(found.disk)} of disk", err=True)
    if flags.talks and saved:
        within = "the memory that is available" if asked is None else f"--max-memory {size(asked)}"
        click.echo(f"to keep within {within}: {saved}", err=True)


def _check_before_download(model: str, ask: Request | Ask | Explained, flags: Flags) -> None:
    names_later = flags.dry_run or flags.skips or not flags.keeps
    if flags.out is None or names_later or flags.shared:
        return
    from qconvert.formats.gguf import writer
    from qconvert.formats.io import output_folder

    local = [path for path in (Path(model),) if path.exists()]
    known = ask.request if isinstance(ask, Explained) else ask
    to_file = not callable(known) and known.is_gguf
    check = writer.check_target if to_file else output_folder.check_target
    check(flags.out, overwrite=flags.overwrite, sources=local)


def print_found(
    lines: list[str],
    described: Callable[[], dict[str, Any]],
    verdict: str,
    path: str,
    flags: Flags,
    tell: Tell,
) -> None:
    """The table on stdout and the verdict on stderr; or plain data for --json, or the path alone."""
    if flags.as_json:
        tell(described())
    elif flags.quiet:
        click.echo(path)
    else:
        click.echo("\n".join(lines))
        if verdict:
            click.echo(verdict, err=True)
