"""Runs `qconvert eval`: what a quantized model costs in quality."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import INTERRUPTED, typed
from qconvert.cli.options import device_option, examples, json_option, quiet_option, revision_option
from qconvert.cli.progress import counted
from qconvert.errors import BadRecipe, CheckFailed, QConvertError
from qconvert.evaluate.protocols import LEAST_CONTEXT, PROTOCOLS

if TYPE_CHECKING:
    from qconvert.evaluate.perplexity_report import PerplexityReport
    from qconvert.evaluate.weights_report import WeightReport


@click.group(
    "eval",
    epilog=examples(
        "qconvert eval perplexity embedded --text stdlib --chunks 2", "qconvert eval weights --help"
    ),
)
def command() -> None:
    """Measure what quantization costs in quality."""


@command.command(
    "perplexity",
    short_help="Perplexity and distance, with error bars.",
    epilog=examples("qconvert eval perplexity ./model-int4-g128 ./model-int8-g128 --reference ./model"),
)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--reference", metavar="MODEL", help="Compare every MODEL with this one, on the same tokens.")
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
@click.option("--noise-floor", is_flag=True, help="Also compare the reference with itself.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="STEM", help="Write STEM.json, .md and .html."
)
@click.option(
    "--fail-above",
    type=click.FloatRange(0),
    metavar="X",
    help="Exit with 3 when a perplexity ratio exceeds 1 + X.",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted evaluation of the same -o STEM.")
@json_option
@quiet_option("the report alone")
@revision_option
def perplexity(models: tuple[str, ...], **options: Any) -> None:
    """Measure perplexity, and the distance from a reference, with error bars.

    All models read the same tokens in lockstep, with the reference's tokenizer. Perplexities are
    comparable only under the same protocol, text and tokenizer, which the report states.
    """
    _check_options(options)
    fail_above, as_json = options.pop("fail_above"), options.pop("as_json")
    texts, out = options.pop("texts"), options.pop("out")
    stems = [out if out is None or len(texts) == 1 else _stem_of(out, text) for text in texts]
    for stem in stems:
        _check_target(stem)
    reports: list[PerplexityReport] = []
    for text, stem in zip(texts, stems, strict=True):
        reports.append(_report(models, text, stem, options))
        if reports[-1].partial:
            break
    worse = None
    if fail_above is not None and not reports[-1].partial:
        worse = next((found for report in reports if (found := _worse(report, fail_above))), None)
    show_reports(reports, as_json=as_json, failure=worse)
    if reports[-1].partial:
        click.echo("interrupted; the same command with --resume goes on", err=True)
        click.get_current_context().exit(INTERRUPTED)
    if worse is not None:
        if not as_json:
            raise worse
        click.get_current_context().exit(worse.exit_code)


def _stem_of(out: Path, text: str) -> Path:
    """The files of one of several texts: STEM-NAME."""
    return out.with_name(f"{out.name}-{Path(text).stem}")


def _report(
    models: tuple[str, ...], text: str, stem: Path | None, options: dict[str, Any]
) -> PerplexityReport:
    """Measure on one text, and write the report where it is wanted."""
    report = _measure(models, text=text, out=stem, **options)
    if stem is not None:
        if options["reference"] is not None and not report.partial:
            compared = (_compare(options["reference"], name, options["revision"]) for name in models)
            report = replace(report, weights=tuple(compared))
        _write(report, stem, quiet=options["quiet"])
    return report


def _check_options(options: dict[str, Any]) -> None:
    """Raise BadUsage for options that want another one."""
    with typed():
        given = {"--fail-above": options["fail_above"] is not None, "--noise-floor": options["noise_floor"]}
        lonely = next((name for name, value in given.items() if value), None)
        if lonely and options["reference"] is None:
            raise BadRecipe(f"{lonely}: there is no reference to compare with", "add --reference MODEL")
        if options["resume"] and options["out"] is None:
            raise BadRecipe("--resume: there is no STEM to go on with", "repeat the command with its -o STEM")
        names = [Path(text).stem for text in options["texts"]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise BadRecipe(f"--text {twice}: given twice", "name every text once; reports have their names")


@command.command(
    "weights",
    short_help="Errors of the weights, by role and layer.",
    epilog=examples("qconvert eval weights ./model ./model-int4-g128"),
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="STEM", help="Write STEM.json, .md and .html."
)
@json_option
@quiet_option("the report alone")
@revision_option
def weights(a: str, b: str, out: Path | None, as_json: bool, quiet: bool, revision: str | None) -> None:
    """Measure the errors of B's weights against A's, by role and layer.

    Needs no text and no decoder.
    """
    _check_target(out)
    report = _compare(a, b, revision)
    if not report.errors and not report.equal:
        raise BadRecipe(f"{a} and {b}: no weight of one is in the other", "compare two forms of one model")
    if out is not None:
        _write(report, out, quiet=quiet)
    show_report(report, as_json=as_json)


def _compare(a: str, b: str, revision: str | None) -> WeightReport:
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.evaluate.measure import label_of
    from qconvert.evaluate.weights_report import compare_weights

    checkpoints = [open_checkpoint(resolve(name, revision=revision).path) for name in (a, b)]
    return compare_weights(checkpoints[0], checkpoints[1], (label_of(a), label_of(b)))


def _write(report: PerplexityReport | WeightReport, stem: Path, *, quiet: bool) -> None:
    from qconvert.report.files import write_report

    for path in write_report(report, stem):
        if not quiet:
            click.echo(f"wrote {path}", err=True)


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
    noise_floor: bool,
    out: Path | None,
    resume: bool,
    quiet: bool,
    revision: str | None,
) -> PerplexityReport:
    import torch

    from qconvert.evaluate.measure import perplexity

    scores = None if out is None else _scores(out, resume=resume, quiet=quiet)
    with counted("chunk", talks=not quiet) as progress:
        return perplexity(
            names,
            reference=reference,
            text=text,
            protocol=protocol,
            context=context,
            device=device,
            dtype={"auto": None, "f32": torch.float32, "bf16": torch.bfloat16}[dtype],
            revision=revision,
            max_chunks=chunks,
            noise_floor=noise_floor,
            progress=progress,
            scores=scores,
            resume=resume,
        )


def _scores(out: Path, *, resume: bool, quiet: bool) -> Path:
    """Where an interrupted evaluation keeps its scores. Raises where it was finished already."""
    scores, record = (out.with_name(out.name + suffix) for suffix in (".partial.npz", ".json"))
    if resume and not scores.exists():
        if record.exists():
            raise QConvertError(
                f"{record}: already complete",
                "leave out --resume to measure again",
            )
        if not quiet:
            click.echo("note: nothing was measured yet, so it starts from the beginning", err=True)
    return scores


def show_report(
    report: PerplexityReport | WeightReport, *, as_json: bool, failure: CheckFailed | None = None
) -> None:
    """Print a report: one JSON object, with the error of a failed check, or the page as text."""
    show_reports([report], as_json=as_json, failure=failure)


def show_reports(
    reports: Sequence[PerplexityReport | WeightReport], *, as_json: bool, failure: CheckFailed | None = None
) -> None:
    """Print reports: pages as text one after the other, or one JSON object, which lists several.

    With the error of a failed check.
    """
    from qconvert.report.page import to_terminal

    if as_json:
        found = [report.to_json() for report in reports]
        record = {"schema": 1, **(found[0] if len(found) == 1 else {"reports": found})}
        if failure is not None:
            error = {"fact": failure.fact, "hint": failure.hint, "exit_code": failure.exit_code}
            record["error"] = error
        click.echo(json.dumps(record))
    else:
        click.echo("\n".join(to_terminal(report.page()) for report in reports), nl=False)


def _check_target(stem: Path | None) -> None:
    """Raise unless the report can be written, before anything is measured for it."""
    from qconvert.formats.io.local_file import require_writable
    from qconvert.report.files import SUFFIXES, report_path

    if stem is not None:
        for suffix in SUFFIXES:
            require_writable(report_path(stem, suffix))


def _worse(report: PerplexityReport, limit: float) -> CheckFailed | None:
    """What to say when a model's perplexity ratio to the reference exceeds 1 + limit."""
    for model in report.models:
        if model.versus is None:
            continue
        ratio = model.versus.perplexity_ratio.value
        if not ratio <= 1 + limit:
            return CheckFailed(
                f"{model.label}: perplexity is {ratio:.4f} times the reference's, more than {1 + limit:.4f}",
                "use more bits, a smaller group, or --rule for the sensitive roles",
            )
    return None
