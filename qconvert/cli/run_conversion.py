"""Carries out a writing command: open, compile, tell, execute, report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import click

from qconvert.cli.exit_codes import after_the_work, typed
from qconvert.cli.flags import Flags
from qconvert.cli.hub_source import fetched, tell_source
from qconvert.cli.progress import compile_kernels
from qconvert.cli.running import executed
from qconvert.cli.skipping import Tell, one_object, require_own_name, skipped

if TYPE_CHECKING:
    from qconvert.convert.job import Job, OpenedModel, Result
    from qconvert.core.dtypes import Json
    from qconvert.plan.request import Request


Ask = Callable[["OpenedModel"], "Request"]
"""Makes a request for an opened model."""


@runtime_checkable
class Explained(Protocol):
    """Makes a request for an opened model of one that leaves something open, and tells what it chose."""

    request: Request

    def __call__(self, source: OpenedModel) -> Request: ...

    def lines(self) -> list[str]:
        """What was chosen and why, for people; once it was called."""
        ...

    def to_json(self) -> Json:
        """The same as plain data."""
        ...


def write(
    model: str, ask: Request | Ask | Explained, suffix: str, flags: Flags, tell: Tell = one_object
) -> Path:
    """Carry out a writing command on one model, and print its result; under --json give it to `tell`.

    `ask` is the request, or what makes it of the opened model; `suffix` completes the derived name, the name
    of the dtype where it is empty. Returns the path of the output.
    """
    from qconvert.cli.conversion_report import advice, report_of
    from qconvert.convert.execute import open_model, prepare
    from qconvert.formats.io.local_file import require_free_disk

    with typed():
        flags.check(aims=isinstance(ask, Explained))
    _check_before_download(model, ask, flags)
    chooser = ask if isinstance(ask, Explained) else None
    known = chooser.request if chooser else None if callable(ask) else ask
    source = open_model(
        model,
        revision=flags.revision,
        declared=known.recipe.architecture if known else None,
        plan_only=flags.dry_run,
        network=flags.network(aims=chooser is not None),
    )
    started = time.perf_counter()
    request = ask(source) if callable(ask) else ask
    chosen_in = time.perf_counter() - started if chooser else 0.0
    job = prepare(
        source,
        request,
        flags.options,
        statistics=flags.statistics,
        calibration=flags.calibration(source, aims=chooser is not None),
        pre_tokenizer=flags.pre_tokenizer,
    )
    out = out_of(job, suffix, flags)
    require_own_name(out, flags.taken)
    how = {"dry_run": flags.dry_run, "as_json": flags.as_json, "quiet": flags.quiet}
    if flags.skip_existing and skipped(job, out, tell, **how):
        return out
    if not flags.dry_run:
        job.container.check_target(out)
        check_beside(out, flags)
    report = report_of(job, out)
    if not flags.as_json:
        for warning in report.warnings():
            click.echo(f"Warning: {warning}", err=True)
    chosen = chooser.lines() if chooser else []
    lines, extra = [*chosen, *report.lines()], {"target": chooser.to_json()} if chooser else {}
    if job.compiled.scalable:
        _tell_scaling(job, flags)
    elif job.calibration is not None and job.calibration.method != "awq":
        _tell_needs(job, flags)
    if flags.dry_run:
        assumed = source.checkpoint.assumed
        verdict = "dry run: nothing was written" + (f"; planned from {assumed} alone" if assumed else "")
        told = {"from": assumed} if assumed else {}
        print_found(lines, lambda: report.plan_json() | extra | told, verdict, report.path, flags, tell)
        return out
    held = sum(path.stat().st_blocks * 512 for path in job.container.partial(out) if path.is_file())
    require_free_disk(out, job.container.bytes_needed - held)
    tell_source(source, talks=flags.talks)
    compile_kernels(job.compiled.plan, talks=flags.talks)
    started = time.perf_counter()
    (result,) = executed([(job, out)], flags)
    seconds = chosen_in + time.perf_counter() - started
    write_beside(job, result, flags)
    with after_the_work():
        found = report.result_json(result, seconds) | extra | fetched(source)
        print_found(lines, lambda: found, report.verdict(result, seconds), report.path, flags, tell)
        for line in advice(job, result.path) if flags.talks else ():
            click.echo(line, err=True)
    return out


def out_of(job: Job, suffix: str, flags: Flags) -> Path:
    """The path of an output: the one that was named, or one that is derived, in the folder of the flags."""
    dtype = job.compiled.request.dtype
    return flags.out or flags.folder / job.container.default_out(suffix or (dtype.label if dtype else ""))


def check_beside(out: Path, flags: Flags) -> None:
    """Raise OutputExists for a file beside the output that is there already."""
    if flags.beside:
        from qconvert.convert.gguf_sidecars import check_sidecars

        check_sidecars(out, flags.beside, overwrite=flags.overwrite)


def write_beside(job: Job, result: Result, flags: Flags) -> None:
    """Write the card and the Modelfile that were asked for, of the file as it is read back."""
    if not flags.beside:
        return
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.convert.gguf_sidecars import CARD, card, modelfile, sidecar

    source = job.source
    for suffix in flags.beside:
        text = (
            card(result.path, open_checkpoint(result.path), source.checkpoint, source.location.name)
            if suffix == CARD
            else modelfile(result.path)
        )
        sidecar(result.path, suffix).write_text(text, encoding="utf-8")


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
    if flags.out is None or flags.dry_run or flags.skip_existing:
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
    path: Path,
    flags: Flags,
    tell: Tell,
) -> None:
    """The table on stdout and the verdict on stderr; or plain data for --json, or the path alone."""
    if flags.as_json:
        tell(described())
    elif flags.quiet:
        click.echo(str(path))
    else:
        click.echo("\n".join(lines))
        if verdict:
            click.echo(verdict, err=True)
