"""Runs `qconvert fuse`: linears with one input are stacked into one, exactly."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, only_option, pad_option, writing_options
from qconvert.cli.several import write_each
from qconvert.plan.recipe import SAME_INPUT, Recipe


@click.command(
    "fuse",
    epilog=examples(
        "qconvert fuse ./Qwen2.5-1.5B-Instruct",
        "qconvert fuse ./Qwen2.5-1.5B-Instruct --only gate_up",
        "qconvert fuse ./Qwen3-30B-A3B --only experts",
    ),
)
@models_argument()
@only_option
@pad_option
@writing_options
def command(models: tuple[str, ...], only: str | None, pad_to_tp: int | None, **flags: Any) -> None:
    """Stack q, k, v and gate, up of MODEL into one linear each, exactly.

    With `--only experts`, the experts of every layer into the 3-D tensors gate_up_proj and down_proj
    that transformers 5 computes with, also where they are quantized.
    """
    recipe = Recipe(fuse=(only,) if only else SAME_INPUT, pad_to_tp=pad_to_tp)
    values = Flags(**flags)
    request = values.request("fuse", recipe)
    write_each(models, lambda model: request, "stacked" if only == "experts" else "fused", values)
