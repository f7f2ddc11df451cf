"""Runs `qconvert fuse-qkv`: q, k and v are stacked into one linear, exactly."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, writing_options
from qconvert.cli.several import write_each
from qconvert.plan.recipe import Recipe


@click.command("fuse-qkv", epilog=examples("qconvert fuse-qkv ./Qwen2.5-1.5B-Instruct"))
@models_argument()
@writing_options
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Stack the q, k and v projections of MODEL into one linear, exactly.

    Weights and biases, 16-bit or quantized: rows are stacked, no number changes, and
    `qconvert unfuse` restores the original bytes.
    """
    values = Flags(**flags)
    request = values.request("fuse-qkv", Recipe(fuse=("qkv",)))
    write_each(models, lambda model: request, "fused-qkv", values)
