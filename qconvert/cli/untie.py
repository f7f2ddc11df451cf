"""Runs `qconvert untie`: a tied head is written out."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.options import examples, model_argument, writing_options
from qconvert.cli.run_conversion import Flags, write
from qconvert.plan.recipe import Recipe


@click.command("untie", epilog=examples("qconvert untie ./Qwen2.5-1.5B-Instruct"))
@model_argument()
@writing_options
def command(model: str, **flags: Any) -> None:
    """Write the head of a tied MODEL out as a table of its own."""
    values = Flags(**flags)
    write(model, values.request("untie", Recipe(tie=False)), "untied", values)
