"""Writes several outputs of one model, which is read once: `--bits 4,8`, `--type q4_k_m,q6_k`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from qconvert.cli.exit_codes import after_the_work
from qconvert.cli.flags import Flags
from qconvert.cli.hub_source import fetched, tell_source
from qconvert.cli.progress import compile_kernels
from qconvert.cli.run_conversion import check_beside, open_source, out_of, print_found, write_beside
from qconvert.cli.running import executed
from qconvert.cli.skipping import Tell, is_complete, require_own_name, tell_skipped
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.cli.conversion_report import ConversionReport
    from qconvert.convert.job import Job, OpenedModel
    from qconvert.plan.request import Request

T = TypeVar("T")
Wanted = tuple["Request", str]
"""What is asked for, and what completes the derived name of its output (see `run_conversion.write`)."""


class Several(click.ParamType, Generic[T]):  # type: ignore[type-arg]  # no generic class before click 8.4
    """Values of another type, separated by commas; each counts once."""

    name = "list"

    def __init__(self, each: click.ParamType) -> None:  # type: ignore[type-arg]
        self.each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[T, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        return tuple(dict.fromkeys(self.each.convert(word, param, ctx) for word in words))


def check_several(option: str, flags: Flags) -> None:
    """Raise BadRecipe for options that do not go with several outputs of a model."""
    if flags.method_traits.measures:
        raise BadRecipe(
            f"--method {flags.method}: is measured on the layers before, which differ between outputs",
            f"run the command once for each value of {option}",
        )
    if flags.shared or not flags.stays:
        given = "several processes" if flags.shared else "--push-to or an object storage"
        raise BadRecipe(f"{option}: several values, and {given}", "run the command once for each value")
    if flags.out is not None and (flags.out.suffix == ".gguf" or flags.out.is_file()):
        raise BadRecipe(f"{flags.out}: one file, and {option} asks for several", "name a folder with -o")


def plan_outputs(model: str, wanted: Sequence[Wanted], flags: Flags) -> list[Path]:
    """The paths of several outputs of one model; raises where one cannot be written, or may not be."""
    source = open_source(model, wanted[0][0], flags)
    planned = list(_planned(source, wanted, flags))
    _to_write(planned, flags)
    return [out for _, out in planned]


def write_outputs(model: str, wanted: Sequence[Wanted], flags: Flags, tell: Tell) -> list[Path]:
    """Write several outputs of one model, and print their results; under --json give each to `tell`.

    They have derived names, in the folder of `flags`. Returns their paths.
    """
    from qconvert.cli.conversion_report import report_of

    source = open_source(model, wanted[0][0], flags)
    planned = list(_planned(source, wanted, flags))
    jobs = _to_write(planned, flags)
    for job, out in planned:
        if (job, out) not in jobs:
            tell_skipped(job, out, flags, tell)
    reports = [report_of(job, out) for job, out in jobs]
    if not flags.as_json:
        for warning in dict.fromkeys(text for report in reports for text in report.warnings()):
            click.echo(f"Warning: {warning}", err=True)
    if flags.dry_run:
        _tell_plans(source, reports, flags, tell)
    elif jobs:
        _write(source, jobs, reports, flags, tell)
    return [out for _, out in planned]


def _tell_plans(source: OpenedModel, reports: Sequence[ConversionReport], flags: Flags, tell: Tell) -> None:
    assumed = source.checkpoint.assumed
    verdict = "dry run: nothing was written" + (f"; planned from {assumed} only" if assumed else "")
    for report in reports:
        described = report.plan_json() | ({"from": assumed} if assumed else {})
        last = verdict if report is reports[-1] else ""
        print_found(report.lines(), described.copy, last, str(report.path), flags, tell)


def _write(
    source: OpenedModel,
    jobs: Sequence[tuple[Job, Path]],
    reports: Sequence[ConversionReport],
    flags: Flags,
    tell: Tell,
) -> None:
    from qconvert.cli.conversion_report import advice

    tell_source(source, talks=flags.talks)
    for job, _ in jobs:
        compile_kernels(job.compiled.plan, talks=flags.talks)
    started = time.perf_counter()
    results = executed(jobs, flags)
    seconds = time.perf_counter() - started
    for (job, out), result in zip(jobs, results, strict=True):
        write_beside(job, out, result, flags)
    with after_the_work():
        for report, result in zip(reports, results, strict=True):
            found = report.result_json(result, seconds) | fetched(source)
            verdict, path = report.verdict(result, seconds), str(report.path)
            print_found(report.lines(), found.copy, verdict, path, flags, tell)
        lines = (
            [line for job, out in jobs for line in advice(job, str(out), flags.beside)] if flags.talks else []
        )
        for line in dict.fromkeys(lines):
            click.echo(line, err=True)


def _planned(source: OpenedModel, wanted: Sequence[Wanted], flags: Flags) -> Iterator[tuple[Job, Path]]:
    """The jobs, with the paths of their outputs; statistics are read once."""
    from qconvert.convert.execute import prepare

    taken, statistics = list(flags.taken), flags.statistics
    read: dict[str, Any] = {}
    for request, suffix in wanted:
        job = prepare(
            source,
            replace(request, **read),
            flags.options,
            statistics=None if read else statistics,
            pre_tokenizer=flags.pre_tokenizer,
        )
        read = {"statistics": job.compiled.request.statistics} if statistics else {}
        out = out_of(job, suffix, flags)
        require_own_name(out, taken)
        taken.append(out)
        yield job, out


def _to_write(planned: Sequence[tuple[Job, Path]], flags: Flags) -> list[tuple[Job, Path]]:
    """The outputs that are not left out because they are there.

    That is asked for, or a run was killed while outputs got their names: the same command goes on then.
    """
    from qconvert.convert.run_memory import require_memory

    begun = [any(path.exists() for path in job.container.partial(out)) for job, out in planned]
    leaves = flags.skips or (any(begun) and not flags.overwrite)
    own_flags = replace(flags, skip_existing=leaves)
    jobs = [
        (job, out)
        for (job, out), own in zip(planned, begun, strict=True)
        if own or not is_complete(job, out, own_flags)
    ]
    if jobs:
        require_memory([job for job, _ in jobs])
    for job, out in () if flags.dry_run else jobs:
        job.container.check_target(out)
        check_beside(out, flags)
    return jobs
