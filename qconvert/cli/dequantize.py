"""Runs `qconvert dequantize`: quantized weights become plain numbers again."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, writing_options
from qconvert.cli.several import write_each
from qconvert.plan.recipe import Recipe


@click.command(
    "dequantize", epilog=examples("qconvert dequantize ./Qwen2.5-1.5B-Instruct-int4-g128 --dtype bf16")
)
@models_argument()
@writing_options
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Turn the quantized weights of MODEL back into plain numbers.

    Computes (code - zero) * scale in float32 and rounds once, to --dtype or the scales' own type.
    """
    values = Flags(**flags)
    request = values.request("dequantize", Recipe(), dequantize=True)
    write_each(models, lambda model: request, flags["dtype"] or "dequantized", values)
