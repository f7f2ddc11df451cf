"""Runs `qconvert untie`: a tied head is written out."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, writing_options
from qconvert.cli.several import write_each
from qconvert.plan.recipe import Recipe


@click.command("untie", epilog=examples("qconvert untie ./Qwen2.5-1.5B-Instruct"))
@models_argument()
@writing_options
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Write the head of a tied MODEL out as a table of its own."""
    values = Flags(**flags)
    request = values.request("untie", Recipe(tie=False))
    write_each(models, lambda model: request, "untied", values)
