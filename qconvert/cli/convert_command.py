"""`qconvert convert`: the same weights in another layout, codes kept wherever the grids map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from qconvert.cli.options import model_argument, pad_option, writing_options
from qconvert.cli.writing import Flags, write
from qconvert.recipe import LAYOUTS, Recipe
from qconvert.schemes import parse_scheme

# Spelled out, so that help needs no layout to be imported; a test holds them against the tables.
PLAIN = ("bf16", "f16", "f32")
TABLES = ("nf4", "fp4")


@click.command("convert", short_help="Another layout, codes kept.")
@model_argument()
@click.option(
    "--to", "layout", type=click.Choice(LAYOUTS + PLAIN), required=True, help="Layout of the output."
)
@click.option(
    "--scheme", metavar="SCHEME", help="Quantize so what is plain, or what --allow-requantize has to redo."
)
@click.option(
    "--allow-requantize", is_flag=True, help="Where codes cannot be kept, quantize the numbers again."
)
@pad_option
@writing_options
def command(
    model: str,
    layout: str,
    scheme: str | None,
    allow_requantize: bool,
    pad_to_tp: int | None,
    **values: Any,
) -> None:
    """Write the weights of MODEL in another layout.

    Codes are carried over wherever the two grids map. The certificate, on screen and in the manifest,
    says of every tensor whether it is exact, by how many quantization steps it has moved at most, or
    that it was quantized again.

    \b
    qconvert convert ./model-gptq --to compressed-tensors
    qconvert convert ./model-awq --to mlx
    qconvert convert ./model --to gptq --scheme int4-g128
    qconvert convert ./model --to bitsandbytes --scheme nf4
    qconvert convert ./model --to fp8
    """
    from qconvert.targets import Target

    flags = Flags(**values)
    if layout in PLAIN:
        plain = Flags(**{**values, "dtype": layout})
        write(model, plain.wish("convert", Recipe(pad_to_tp=pad_to_tp), dequantize=True), layout, plain)
        return
    if layout == "bitsandbytes" and scheme in TABLES:
        target = Target(layout, table=scheme, allow_requantize=allow_requantize)
    else:
        target = Target(layout, parse_scheme(scheme) if scheme else None, allow_requantize=allow_requantize)
    recipe = Recipe(layout=layout, pad_to_tp=pad_to_tp)
    if target.scheme and _is_plain(model, flags):
        recipe = recipe.with_(scheme=target.scheme)
    write(model, replace(flags.wish("convert", recipe), target=target), layout, flags)


def _is_plain(model: str, flags: Flags) -> bool:
    from qconvert.formats.checkpoint import open_checkpoint
    from qconvert.hub import resolve

    return open_checkpoint(resolve(model, revision=flags.revision).path).quantization is None
