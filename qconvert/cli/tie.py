"""Runs `qconvert tie`: a head that equals the embedding is dropped."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, writing_options
from qconvert.cli.several import write_each
from qconvert.plan.recipe import Recipe


@click.command("tie", epilog=examples("qconvert tie ./my-finetune"))
@models_argument()
@writing_options
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Drop a head of MODEL that equals its embedding.

    Refuses, with the measured difference, when the two are not equal.
    """
    values = Flags(**flags)
    request = values.request("tie", Recipe(tie=True))
    write_each(models, lambda model: request, "tied", values)
