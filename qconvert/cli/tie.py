"""Runs `qconvert tie`: a head that equals the embedding is dropped."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.options import examples, model_argument, writing_options
from qconvert.cli.run_conversion import Flags, write
from qconvert.plan.recipe import Recipe


@click.command("tie", epilog=examples("qconvert tie ./my-finetune"))
@model_argument()
@writing_options
def command(model: str, **flags: Any) -> None:
    """Drop a head of MODEL that equals its embedding.

    Refuses, with the measured difference, when the two are not equal.
    """
    values = Flags(**flags)
    write(model, values.request("tie", Recipe(tie=True)), "tied", values)
