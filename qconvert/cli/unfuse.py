"""Runs `qconvert unfuse`: fused linears and stacks of experts are taken apart, exactly."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, only_option, writing_options
from qconvert.cli.several import write_each
from qconvert.plan.recipe import FUSIONS, Recipe


@click.command(
    "unfuse",
    epilog=examples(
        "qconvert unfuse ./Qwen2.5-1.5B-Instruct-fused", "qconvert unfuse ./Qwen3.5-35B-A3B --only experts"
    ),
)
@models_argument()
@only_option
@writing_options
def command(models: tuple[str, ...], only: str | None, **flags: Any) -> None:
    """Take fused linears and stacks of experts of MODEL apart: names, shapes, dtypes and bytes as before."""
    roles = FUSIONS[only] if only else tuple(role for roles in FUSIONS.values() for role in roles)
    values = Flags(**flags)
    request = values.request("unfuse", Recipe(), unfuse=roles)
    write_each(models, lambda model: request, "unfused", values)
