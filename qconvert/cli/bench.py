"""Runs `qconvert bench`: how fast the decoder reads and generates with a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from qconvert.cli.exit_codes import one_of, tell_with_errors
from qconvert.cli.options import (
    device_option,
    examples,
    jobs_option,
    json_option,
    models_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.printing import terminal_columns
from qconvert.errors import BadUsage

if TYPE_CHECKING:
    from qconvert.core.dtypes import Json
    from qconvert.evaluate.speed import ModelSpeed, Rate


@click.command(
    "bench", epilog=examples("qconvert bench ./model ./model-int4-g128", "qconvert bench m.gguf -p 0 -n 64")
)
@models_argument()
@click.option(
    "-p",
    "--prompt",
    type=click.IntRange(0, 1 << 20),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens of the prompt to read; 0 leaves reading out.",
)
@click.option(
    "-n",
    "--generate",
    type=click.IntRange(0, 1 << 20),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens to generate; 0 leaves generating out.",
)
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    metavar="N",
    help="How many times to repeat everything.",
)
@jobs_option
@device_option
@json_option
@quiet_option("only the table")
@revision_option
def command(
    models: tuple[str, ...],
    prompt: int,
    generate: int,
    rounds: int,
    jobs: int | None,
    device: str,
    as_json: bool,
    quiet: bool,
    revision: str | None,
) -> None:
    """Time the built-in decoder: reading a prompt, and generating, in tokens per second.

    Each MODEL runs in a process of its own, and all of its rounds follow a warm-up that is not timed. The
    prompt is random tokens. This is the speed of qconvert's decoder; the program that you serve with has
    another.
    """
    from qconvert.evaluate.speed import SpeedTest, measure
    from qconvert.report.tables import count, size, table

    if not prompt and not generate:
        raise BadUsage("bench: neither a prompt nor generated tokens", "leave out -p 0 or -n 0")
    test = SpeedTest(prompt, generate, rounds, device, jobs)
    found = []
    told: list[Json] = []
    tell_with_errors("models", told)
    for model in models:
        with one_of(models, model):
            found.append(measure(model, test, revision))
        told.append(found[-1].to_json())
        if not (as_json or quiet) and len(models) > 1:
            click.echo(f"measured {model}", err=True)
    if as_json:
        asked = {"prompt": prompt, "generate": generate, "rounds": rounds}
        click.echo(json.dumps({"schema": 1, "ok": True, **asked, "models": told}))
        return
    head = ["model", "weights", f"prompt {prompt}, tokens/s", f"generate {generate}, tokens/s", "peak memory"]
    rows = [[each.model, size(each.weight_bytes), *_rates(each), size(each.peak_bytes)] for each in found]
    click.echo("\n".join(table(head, rows, most=terminal_columns())))
    if not quiet:
        last = found[-1]
        click.echo(f"{count(rounds, 'round')} on {last.device}; torch {last.versions['torch']}", err=True)


def _rates(speed: ModelSpeed) -> tuple[str, str]:
    return _shown(speed.prompt), _shown(speed.generated)


def _shown(rate: Rate | None) -> str:
    """The mean of the rounds and their deviation, which a single round has none of."""
    if rate is None:
        return ""
    spread = f" ± {rate.deviation:.1f}" if len(rate.rounds) > 1 else ""
    return f"{rate.mean:,.1f}{spread}"
