"""Options that say how codes are chosen: one by one, or together on a calibration text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from qconvert.calibrate.calibration import METHODS
from qconvert.cli.options import NearestChoice, TokensType
from qconvert.errors import BadUsage

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TOKENS = 32 << 10
"""Of calibration text, where none are asked for."""


_OPTIONS = (
    click.option(
        "--method",
        type=NearestChoice(list(METHODS), case_sensitive=False),
        default="nearest",
        show_default=True,
        help="How weights are rounded: to nearest (nearest, or rtn), so with scaled columns (awq), or "
        "together, on a text, row by row (feedback, or gptq) or over many rows (two-sided, or yaqa).",
    ),
    click.option(
        "--text",
        "texts",
        multiple=True,
        metavar="TEXT",
        show_default="the bundled text",
        help="Calibration text: default (bundled), a file, a folder or hub:DATASET; repeat to mix.",
    ),
    click.option(
        "--tokens",
        type=TokensType(),
        default=0,
        show_default="32k",
        help="Tokens of calibration text; activations are kept beside the output, or where TMPDIR points.",
    ),
    click.option(
        "--window",
        type=click.IntRange(16, 1 << 20),
        metavar="N",
        show_default="2048",
        help="Tokens per window; tokens see only their own window.",
    ),
    click.option(
        "--inputs",
        type=click.Choice(["quantized", "original"]),
        default="quantized",
        show_default=True,
        help="Inputs of a linear: from the layers quantized before it, or from the original ones.",
    ),
)


def calibration_options(command: F) -> F:
    """Add the options of calibrated quantization."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_idle(given: Mapping[str, object], *, aims: bool) -> None:
    """Raise BadUsage for the first option that has a value, although nothing reads the text."""
    idle = next((name for name, value in given.items() if value), None)
    if idle and not aims:
        raise BadUsage(f"{idle}: --method nearest reads no text", "add --method feedback, or leave it out")
