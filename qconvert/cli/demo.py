"""Runs `qconvert demo`: the main job, end to end, on the embedded model."""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import click

from qconvert.cli.eval_output import command_line, show_report
from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, json_option, quiet_option
from qconvert.cli.run_conversion import write
from qconvert.core.schemes import Scheme
from qconvert.plan.recipe import SAME_INPUT, Recipe

OUTPUTS = {
    "int8-g128": Recipe(scheme=Scheme(8)),
    "int4-g128-fused": Recipe(scheme=Scheme(4), fuse=SAME_INPUT),
}


@click.command("demo", epilog=examples("qconvert demo --chunks 2"))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("qconvert-demo"),
    show_default=True,
    help="Folder for the outputs and the report; an earlier demo in it is replaced.",
)
@click.option(
    "--chunks",
    type=click.IntRange(2),
    metavar="N",
    default=12,
    show_default=True,
    help="Windows to evaluate.",
)
@json_option
@quiet_option("only the report")
def command(out: Path, chunks: int, as_json: bool, quiet: bool) -> None:
    """Quantize, fuse, verify and evaluate the embedded model.

    A small Qwen3 that comes with qconvert, trained on Python's standard library, is quantized to
    int8 and to int4 with fused linears; both are re-read, verified, and measured against bf16 on
    held-out text from your own Python installation. Nothing is downloaded.
    """
    from qconvert.checkpoint.hub import EMBEDDED
    from qconvert.demo.corpus import demo_text
    from qconvert.evaluate.measure import STDLIB, perplexity, weights
    from qconvert.report.files import write_report

    started = time.perf_counter()
    corpus = demo_text("held-out")
    talks = not (as_json or quiet)
    if talks:
        click.echo(
            f"held-out text: standard library of Python {corpus.python_version}, sha256 {corpus.sha256}"
        )
    for name, recipe in OUTPUTS.items():
        if talks:
            click.echo(f"\n$ qconvert quantize embedded {_spelled(recipe)}")
        flags = Flags(out=out / name, overwrite=True, quiet=not talks)
        with redirect_stdout(sys.stdout if talks else StringIO()):
            write(EMBEDDED, flags.request("quantize", recipe), name, flags)
    report = perplexity(
        [str(out / name) for name in OUTPUTS],
        reference=EMBEDDED,
        text=STDLIB,
        max_chunks=chunks,
        noise_floor=True,
    )
    errors = (weights(EMBEDDED, str(out / name), labels=(EMBEDDED, name)) for name in OUTPUTS)
    report = replace(report, command=command_line(), weights=tuple(errors))
    write_report(report, out / "report")
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": True, "out": str(out), "report": report.to_json()}))
        return
    if talks:
        click.echo()
    show_report(report, as_json=False)
    if talks:
        seconds = time.perf_counter() - started
        click.echo(f"\nreport: {out / 'report.html'}, .md and .json, {seconds:.1f} s in all", err=True)
        click.echo(f"{out}/ holds the two models and the report; delete it when you are done", err=True)
        installed = Path(sys.argv[0])
        called = "qconvert" if shutil.which("qconvert") else str(installed)
        if called != "qconvert" and (activate := installed.with_name("activate")).is_file():
            click.echo(f"`source {activate}` puts qconvert on the PATH of this shell; without it:", err=True)
        click.echo(f"next: {called} quantize MODEL --bits 4, where MODEL is a folder or org/name", err=True)


def _spelled(recipe: Recipe) -> str:
    assert recipe.scheme is not None
    return f"--scheme {recipe.scheme.label}" + "".join(f" --fuse {name}" for name in recipe.fuse)
