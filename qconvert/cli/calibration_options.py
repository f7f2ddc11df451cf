"""Options that say how codes are chosen: one by one, or together on a calibration text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pathlib import Path

    from qconvert.calibrate.calibration import Calibration

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_TOKENS = "32k"
DEFAULT_WINDOW = 2048


class TokensType(click.ParamType):  # type: ignore[type-arg]  # no generic class before click 8.4
    """A number of tokens written like 65536, 64k or 1M (1k is 1024)."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_tokens(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_tokens(text: str) -> int:
    """A number of tokens written like 65536, 64k or 1M; ValueError for another text."""
    factor = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or not int(digits):
        raise ValueError(f"{text!r} is no number of tokens; write 65536, 64k or 1M")
    return int(digits) * factor


TOKENS = TokensType()

_OPTIONS = (
    click.option(
        "--method",
        type=click.Choice(["nearest", "feedback", "gptq", "two-sided", "yaqa"]),
        default="nearest",
        show_default=True,
        help="Choose every code by itself, those of a row together on a text (feedback, or gptq), "
        "or those of many rows (two-sided, or yaqa).",
    ),
    click.option(
        "--text",
        "texts",
        multiple=True,
        metavar="TEXT",
        show_default="default",
        help="Calibration text: default (bundled), a file, a folder or hub:DATASET; repeat to mix.",
    ),
    click.option(
        "--tokens", type=TOKENS, metavar="N", show_default=DEFAULT_TOKENS, help="Tokens of calibration text."
    ),
    click.option(
        "--window",
        type=click.IntRange(16, 1 << 20),
        metavar="N",
        show_default=str(DEFAULT_WINDOW),
        help="Tokens that see one another.",
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


def calibration_of(
    model: Path, method: str, texts: tuple[str, ...], tokens: int | None, window: int | None, inputs: str
) -> Calibration | None:
    """What the options ask for, of the model in this folder or file; None where codes are chosen one by one.

    Raises BadRecipe for options that need a method, and what `calibrate.text.calibration_windows` raises.
    """
    from qconvert.calibrate.calibration import METHODS, Calibration
    from qconvert.calibrate.text import calibration_windows

    if METHODS[method] == "nearest":
        return None
    read = calibration_windows(
        model, texts or ("default",), tokens or parse_tokens(DEFAULT_TOKENS), window or DEFAULT_WINDOW
    )
    return Calibration(read.tokens_BT, read.record, METHODS[method], shift=inputs == "quantized")
