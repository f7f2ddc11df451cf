"""The commands that move rows without changing a number, and the one that computes them back.

`fuse-qkv`, `fuse`, `unfuse`, `tie` and `untie` work on 16-bit and on quantized checkpoints alike,
exactly; `dequantize` turns a quantized checkpoint into plain numbers.
"""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.options import examples, model_argument, pad_option, writing_options
from qconvert.cli.run_conversion import Flags, write
from qconvert.plan.recipe import FUSIONS, SAME_INPUT, Recipe


@click.command("fuse-qkv", epilog=examples("qconvert fuse-qkv ./Qwen2.5-1.5B-Instruct"))
@model_argument()
@writing_options
def fuse_qkv(model: str, **flags: Any) -> None:
    """Stack the q, k and v projections of MODEL into one linear, exactly.

    Weights and biases, 16-bit or quantized: rows are stacked, no number changes, and
    `qconvert unfuse` restores the original bytes.
    """
    _write(model, "fuse-qkv", Recipe(fuse=("qkv",)), "fused-qkv", flags)


_only = click.option(
    "--only", type=click.Choice(list(FUSIONS)), help="Only these linears, or stacks of experts."
)


@click.command(
    "fuse",
    epilog=examples(
        "qconvert fuse ./Qwen2.5-1.5B-Instruct",
        "qconvert fuse ./Qwen2.5-1.5B-Instruct --only gate_up",
        "qconvert fuse ./Qwen3-30B-A3B --only experts",
    ),
)
@model_argument()
@_only
@pad_option
@writing_options
def fuse(model: str, only: str | None, pad_to_tp: int | None, **flags: Any) -> None:
    """Stack q, k, v and gate, up of MODEL into one linear each, exactly.

    With `--only experts`, the experts of every layer into the 3-D tensors gate_up_proj and down_proj
    that transformers 5 computes with, also where they are quantized.
    """
    recipe = Recipe(fuse=(only,) if only else SAME_INPUT, pad_to_tp=pad_to_tp)
    _write(model, "fuse", recipe, "stacked" if only == "experts" else "fused", flags)


@click.command(
    "unfuse",
    epilog=examples(
        "qconvert unfuse ./Qwen2.5-1.5B-Instruct-fused", "qconvert unfuse ./Qwen3.5-35B-A3B --only experts"
    ),
)
@model_argument()
@_only
@writing_options
def unfuse(model: str, only: str | None, **flags: Any) -> None:
    """Take fused linears and stacks of experts of MODEL apart: names, shapes, dtypes and bytes as before."""
    roles = FUSIONS[only] if only else tuple(role for roles in FUSIONS.values() for role in roles)
    _write(model, "unfuse", Recipe(), "unfused", flags, unfuse=roles)


@click.command("tie", epilog=examples("qconvert tie ./my-finetune"))
@model_argument()
@writing_options
def tie(model: str, **flags: Any) -> None:
    """Drop a head of MODEL that equals its embedding.

    Refuses, with the measured difference, when the two are not equal.
    """
    _write(model, "tie", Recipe(tie=True), "tied", flags)


@click.command("untie", epilog=examples("qconvert untie ./Qwen2.5-1.5B-Instruct"))
@model_argument()
@writing_options
def untie(model: str, **flags: Any) -> None:
    """Write the head of a tied MODEL out as a table of its own."""
    _write(model, "untie", Recipe(tie=False), "untied", flags)


@click.command(
    "dequantize", epilog=examples("qconvert dequantize ./Qwen2.5-1.5B-Instruct-int4-g128 --dtype bf16")
)
@model_argument()
@writing_options
def dequantize(model: str, **flags: Any) -> None:
    """Turn the quantized weights of MODEL back into plain numbers.

    Computes (code - zero) * scale in float32 and rounds once, to --dtype or the scales' own type.
    """
    _write(model, "dequantize", Recipe(), flags["dtype"] or "dequantized", flags, dequantize=True)


def _write(
    model: str, command: str, recipe: Recipe, suffix: str, values: dict[str, Any], **undo: Any
) -> None:
    flags = Flags(**values)
    write(model, flags.wish(command, recipe, **undo), suffix, flags)
