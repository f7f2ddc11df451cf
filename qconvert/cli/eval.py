"""Runs `qconvert eval`: what a quantized model costs in quality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import candidates
from qconvert.cli.eval_output import (
    Limits,
    check_target,
    command_line,
    report_option,
    show_reports,
    write,
)
from qconvert.cli.eval_ranks import check_divided, report_with_others
from qconvert.cli.eval_weights import compared, weights
from qconvert.cli.events import stage_to
from qconvert.cli.exit_codes import typed
from qconvert.cli.launchers import rank_option
from qconvert.cli.options import (
    MEMORY,
    ShareType,
    activations_option,
    device_option,
    events_option,
    examples,
    jobs_option,
    json_option,
    models_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.progress import counted
from qconvert.cli.ranks import own_file
from qconvert.cli.signals import exit_code
from qconvert.core.ranks import is_divided
from qconvert.errors import BadRecipe, BadUsage
from qconvert.evaluate.protocols import LEAST_CONTEXT, PROTOCOLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qconvert.checkpoint.by_role import Activations
    from qconvert.core.dtypes import Json
    from qconvert.evaluate.in_turn import Within
    from qconvert.evaluate.perplexity_report import PerplexityReport
    from qconvert.evaluate.ranks import Share
    from qconvert.evaluate.weights_report import WeightReport


class _Measures(click.Group):
    """The group of `eval`, which says what to type where a model stands in place of a measure."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            raise BadUsage(
                f"eval {args[0]}: not a measure",
                "`qconvert eval perplexity MODEL --reference ORIGINAL`, or `qconvert eval weights A B`",
            ) from None


@click.group(
    "eval",
    cls=_Measures,
    epilog=examples(
        "qconvert eval perplexity embedded --text stdlib --chunks 2", "qconvert eval weights --help"
    ),
)
def command() -> None:
    """Measure what quantization costs in quality."""


@command.command(
    "perplexity",
    short_help="Perplexity and distance, with error bars.",
    epilog=examples(
        "qconvert eval perplexity ./model-int4-g128 ./model-int8-g128 --reference ./model",
        "qconvert eval perplexity ./model-70b-int4 --reference ./model-70b --max-memory 8GB",
        "torchrun --nproc-per-node 4 -m qconvert eval perplexity ./model-int4 -j 4 -o report",
    ),
)
@models_argument()
@click.option(
    "--reference",
    metavar="MODEL|FILE",
    shell_complete=candidates.models,
    help="Compare every MODEL with this one, on the same tokens; or with what --save-reference kept of one.",
)
@click.option(
    "--save-reference",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep what the reference (or the only MODEL) says of the text, for later comparisons without it:"
    " 2 bytes per word of the vocabulary and token scored, 0.3 MB a token for 150,000 words.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=("wikitext2",),
    show_default="wikitext2",
    metavar="FILE|wikitext2|stdlib",
    help="Text to measure on, in UTF-8; stdlib is held-out text for the embedded model. Repeat for several.",
)
@click.option(
    "--protocol",
    type=click.Choice(list(PROTOCOLS)),
    default=next(iter(PROTOCOLS)),
    show_default=True,
    help="How the text is cut, and which of its tokens count.",
)
@click.option(
    "--context",
    type=click.IntRange(LEAST_CONTEXT, 1 << 20),
    metavar="N",
    show_default="the protocol's",
    help="Tokens per window.",
)
@click.option(
    "--chunks", type=click.IntRange(1), metavar="N", show_default="all", help="Stop after this many windows."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "f32", "bf16"]),
    default="auto",
    show_default=True,
    help="Arithmetic; auto is f32 on a CPU and bf16 on a GPU.",
)
@device_option
@jobs_option
@rank_option
@click.option(
    "--max-memory",
    type=MEMORY,
    metavar="SIZE",
    show_default="whole models are held",
    help="Memory of the process, such as 4GB: layers are read in turn, each for many windows.",
)
@activations_option("as-loaded")
@click.option("--noise-floor", is_flag=True, help="Also compare the reference with itself.")
@report_option
@click.option(
    "--fail-above",
    type=ShareType(),
    metavar="X",
    help="Exit with 3 when a perplexity ratio exceeds 1 + X; X is 0.05 or 5%.",
)
@click.option(
    "--fail-above-kl",
    type=click.FloatRange(0),
    metavar="X",
    help="Exit with 3 when a mean KL divergence exceeds X nats per token.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue an interrupted evaluation of the same -o STEM; print one that is complete.",
)
@click.option(
    "--samples",
    is_flag=True,
    help="Also let every model continue two prompts from the text by 48 tokens, in the written report.",
)
@json_option
@quiet_option("only the report")
@events_option
@revision_option
def perplexity(models: tuple[str, ...], jobs: int | None, **options: Any) -> None:
    """Measure perplexity, and the distance from a reference, with error bars.

    All models read the same tokens in lockstep, with the reference's tokenizer. Perplexities are
    comparable only under the same protocol, text and tokenizer, which the report states.
    """
    from qconvert.runtime.run_info import use_threads

    _check_options(options | {"models": models})
    use_threads(jobs)
    limits, as_json = Limits.taken_from(options), options.pop("as_json")
    options["quiet"] |= as_json
    texts, out = options.pop("texts"), options.pop("out")
    stems = [out if out is None or len(texts) == 1 else _stem_of(out, text) for text in texts]
    for stem in stems:
        check_target(stem)
    reports: list[PerplexityReport] = []
    for text, stem in zip(texts, stems, strict=True):
        report = _report(models, text, stem, options)
        if report is None:
            return
        reports.append(report)
        if report.partial:
            break
    failure = None
    if not reports[-1].partial:
        failure = next((found for report in reports if (found := limits.exceeded(report))), None)
    show_reports(reports, as_json=as_json, failure=failure)
    if reports[-1].partial:
        click.echo("interrupted; the same command with --resume continues", err=True)
        click.get_current_context().exit(exit_code())
    if failure is not None:
        if not as_json:
            raise failure
        click.get_current_context().exit(failure.exit_code)


def _stem_of(out: Path, text: str) -> Path:
    """The files of one of several texts: STEM-NAME."""
    return out.with_name(f"{out.name}-{Path(text).stem}")


def _report(
    models: tuple[str, ...], text: str, stem: Path | None, options: dict[str, Any]
) -> PerplexityReport | None:
    """Measure on one text, and write the report if a path is given; or read back one that is complete.

    None where that is for another process to tell.
    """
    options, request = dict(options), _request(models, text, options)
    rank = options.pop("rank")
    if stem is not None and is_divided(rank):
        options["quiet"] |= rank.number > 0
        options["events"] = own_file(options["events"], rank)
        return report_with_others(
            stem,
            rank,
            finished=lambda: _finished(stem, request, options["quiet"]),
            measured=lambda share: _measure(models, text=text, out=stem, share=share, **options),
            written=lambda report: _written(report, request, stem, options),
        )
    if stem is not None and options["resume"] and (found := _finished(stem, request, options["quiet"])):
        return found
    report = _measure(models, text=text, out=stem, **options)
    return _written(report, request, stem, options)


def _written(
    report: PerplexityReport, request: Json, stem: Path | None, options: dict[str, Any]
) -> PerplexityReport:
    """A report with what was asked for, and where it is written with the errors of the weights."""
    report = replace(report, command=command_line(), request=request)
    if stem is not None:
        if report.reference is not None and report.saved_reference is None and not report.partial:
            report = replace(report, weights=tuple(_compared(report, options)))
        write(report, stem, quiet=options["quiet"])
    return report


def _request(models: tuple[str, ...], text: str, options: dict[str, Any]) -> Json:
    """What was asked for and decides the figures, as plain data."""
    names = (
        "reference",
        "protocol",
        "context",
        "chunks",
        "dtype",
        "device",
        "noise_floor",
        "revision",
        "samples",
        "activations",
    )
    return {"models": list(models), "text": text, **{name: options[name] for name in names}}


def _finished(stem: Path, request: Json, quiet: bool) -> PerplexityReport | None:
    """The report of an evaluation that is complete already; None where there is something to measure."""
    from qconvert.evaluate.finished import finished_report

    scores, record = (stem.with_name(stem.name + suffix) for suffix in (".partial.npz", ".json"))
    if scores.exists():
        return None
    report = finished_report(record, request) if record.exists() else None
    if not quiet:
        nothing = "note: nothing was measured yet, so it starts from the beginning"
        click.echo(nothing if report is None else f"note: {record}: already complete", err=True)
    return report


def _compared(report: PerplexityReport, options: dict[str, Any]) -> Iterator[WeightReport]:
    """The errors of the weights of every model, in the order of the report."""
    reference, *others = report.models
    for model in others:
        if reference.origin is not None and model.origin is not None:
            names, labels = (reference.origin.name, model.origin.name), (reference.label, model.label)
            yield compared(names, options["events"], labels=labels, revision=options["revision"], quiet=True)


def _check_options(options: dict[str, Any]) -> None:
    """Raise BadUsage for options that want another one."""
    with typed():
        given = {
            "--fail-above": options["fail_above"] is not None,
            "--fail-above-kl": options["fail_above_kl"] is not None,
            "--noise-floor": options["noise_floor"],
        }
        lonely = next((name for name, value in given.items() if value), None)
        if lonely and options["reference"] is None:
            raise BadRecipe(f"{lonely}: there is no reference to compare with", "add --reference MODEL")
        if options["resume"] and options["out"] is None:
            raise BadRecipe("--resume: there is no STEM to continue", "repeat the command with its -o STEM")
        _check_saving(options)
        check_divided(options)
        names = [Path(text).stem for text in options["texts"]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise BadRecipe(f"--text {twice}: given twice", "name every text once; reports have their names")


def _check_saving(options: dict[str, Any]) -> None:
    """Raise BadRecipe for a --save-reference that could not be kept."""
    if options["save_reference"] is None:
        return
    if len(options["texts"]) > 1:
        raise BadRecipe("--save-reference: covers one text", "give one --text at a time")
    if options["resume"]:
        raise BadRecipe("--save-reference: needs a whole run", "leave out --resume")
    if options["reference"] is None and len(options["models"]) > 1:
        raise BadRecipe("--save-reference: which model is the reference?", "name it with --reference MODEL")


command.add_command(weights)


def _measure(
    names: tuple[str, ...],
    *,
    reference: str | None,
    text: str,
    protocol: str,
    context: int | None,
    chunks: int | None,
    dtype: str,
    device: str,
    activations: Activations,
    noise_floor: bool,
    out: Path | None,
    resume: bool,
    quiet: bool,
    revision: str | None,
    save_reference: Path | None,
    samples: bool,
    max_memory: int | None,
    events: Path | None,
    share: Share | None = None,
) -> PerplexityReport:
    import torch

    from qconvert.evaluate.measure import perplexity

    scores = None if out is None or share is not None else out.with_name(out.name + ".partial.npz")
    within = None if max_memory is None else _within(max_memory, out, talks=not quiet)
    with (
        stage_to(events, "evaluate", names, "window") as lines,
        counted("chunk", talks=not quiet, also=lines.tell) as progress,
    ):
        report = perplexity(
            names,
            reference=reference,
            text=text,
            protocol=protocol,
            context=context,
            device=device,
            dtype={"auto": None, "f32": torch.float32, "bf16": torch.bfloat16}[dtype],
            activations=activations,
            revision=revision,
            max_chunks=chunks,
            noise_floor=noise_floor,
            progress=progress,
            scores=scores,
            resume=resume,
            save_reference=save_reference,
            samples=samples,
            within=within,
            warn=lambda line: click.echo(f"Warning: {line}", err=True),
            share=share,
        )
        if report.partial:
            lines.end(ok=False, stopped=exit_code())
    return report


def _within(nbytes: int, out: Path | None, *, talks: bool) -> Within:
    """A memory to keep within; hidden states lie beside the report, or in the folder of temporary files."""
    from tempfile import gettempdir

    from qconvert.calibrate.activation_file import scratch_folder
    from qconvert.evaluate.in_turn import Within

    scratch = Path(gettempdir()) if out is None else scratch_folder(out)
    return Within(nbytes, scratch, lambda line: click.echo(line, err=True) if talks else None)
