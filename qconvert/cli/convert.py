"""Runs `qconvert convert`: the same weights in another layout, codes kept wherever the two can store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import candidates, codebook_schemes
from qconvert.cli.calibration_options import calibration_options
from qconvert.cli.exit_codes import typed
from qconvert.cli.flags import Flags
from qconvert.cli.layout_choice import LayoutChoice
from qconvert.cli.options import (
    examples,
    models_argument,
    pad_option,
    statistics_option,
    writing_options,
)
from qconvert.cli.several import write_each
from qconvert.core.scheme_names import named_scheme
from qconvert.core.schemes import Scheme, parse_scheme
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.plan.recipe import Recipe

if TYPE_CHECKING:
    from qconvert.convert.job import OpenedModel
    from qconvert.plan.request import Request

PLAIN = ("bf16", "f16", "f32")
GGUF = "gguf"


class _WithLayouts(click.Command):
    """A command whose help ends with the table of layouts, made when it is asked for."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        rows = [(traits.name, traits.described) for traits in map(registry.traits_of, registry.written())]
        rows.append((GGUF, "a type of to-gguf; without one all is kept as it is"))
        rows.append((", ".join(PLAIN), "none: plain numbers"))
        with formatter.section("Layouts, and the SCHEME for what is plain or has to be quantized again"):
            formatter.write_dl(rows)


@click.command(
    "convert",
    cls=_WithLayouts,
    epilog=examples(
        "qconvert convert ./model-gptq --to compressed-tensors",
        "qconvert convert ./model-awq --to mlx",
        "qconvert convert ./model --to gptq --scheme int4-g128",
        "qconvert convert ./model --to bitsandbytes --scheme nf4",
        "qconvert convert ./model --to compressed-tensors --scheme fp8-channel",
        "qconvert convert ./model-gptq --to gguf -o model.gguf",
    ),
)
@models_argument()
@click.option(
    "--to",
    "layout",
    metavar="LAYOUT",
    type=LayoutChoice(lambda: (*registry.written(), GGUF, *PLAIN, *registry.read_only())),
    required=True,
    help="Layout of the output.",
)
@click.option(
    "--scheme",
    metavar="SCHEME",
    shell_complete=candidates.schemes,
    help="Scheme for weights not yet quantized, and with --allow-requantize for all others, too.",
)
@click.option(
    "--allow-requantize", is_flag=True, help="Where codes cannot be kept, quantize the numbers again."
)
@click.option(
    "--undo-act-order", is_flag=True, help="Fold GPTQ's g_idx into the weights before, where that is exact."
)
@statistics_option
@pad_option
@calibration_options
@writing_options
def command(
    models: tuple[str, ...],
    layout: str,
    scheme: str | None,
    allow_requantize: bool,
    undo_act_order: bool,
    pad_to_tp: int | None,
    **values: Any,
) -> None:
    """Write the weights of MODEL in another layout.

    Codes are carried over wherever both layouts store them. The certificate, on screen and in the manifest,
    says of every tensor whether it is exact, by how many quantization steps it has moved at most, or
    that it was quantized again. New codes are those that the layout's own tool would choose, so one
    scheme can give other codes in another layout (mxfp4 of MLX and of compressed-tensors).
    """
    flags = Flags(**values)
    own = {"--scheme": scheme, "--allow-requantize": allow_requantize, "--undo-act-order": undo_act_order}
    allowed = {"allow_requantize": allow_requantize, "undo_act_order": undo_act_order}
    if layout in registry.read_only():
        with typed():
            raise BadRecipe(
                f"--to {layout}: {layout}'s layout can be read, but not written",
                registry.traits_of(layout).instead,
            )
    if layout in PLAIN:
        with typed():
            _refuse(layout, {**own, "--calibration": flags.statistics, "--dtype": flags.dtype})
        plain = replace(flags, dtype=layout)
        request = plain.request("convert", Recipe(pad_to_tp=pad_to_tp), dequantize=True)
        write_each(models, lambda model: request, layout, plain)
    elif layout == GGUF:
        _to_gguf(models, scheme, flags, pad_to_tp, allowed)
    else:
        _to_layout(models, layout, scheme, flags, pad_to_tp, allowed)


def _to_layout(
    models: Sequence[str],
    layout: str,
    scheme: str | None,
    flags: Flags,
    pad_to_tp: int | None,
    allowed: dict[str, bool],
) -> None:
    """Write a layout of safetensors; what is plain is quantized by the recipe, as `quantize` does it."""
    from qconvert.plan.passes.transcode import Target

    with typed():
        table, integers = _parse(layout, scheme)
    target, recipe = Target(layout, integers, table, **allowed), Recipe(layout=layout, pad_to_tp=pad_to_tp)
    with typed():
        if flags.statistics and target.codebook and not target.codebook.codebook.group_rows:
            raise BadRecipe(
                f"--calibration: {target.codebook.name} has one scale for all, which is not searched",
                f"leave it out; {layout} holds {target.traits.described}",
            )

    def ask(source: OpenedModel) -> Request:
        quantizes = integers and source.checkpoint.quantization is None
        scheme_of_all = recipe.with_(scheme=integers) if quantizes else recipe
        return flags.request("convert", scheme_of_all, target=target)

    write_each(models, lambda model: ask, codebook_schemes.suffix(layout, table, integers), flags)


def _to_gguf(
    models: Sequence[str], scheme: str | None, flags: Flags, pad_to_tp: int | None, allowed: dict[str, bool]
) -> None:
    """Write a GGUF file as `to-gguf` does: of a type, or with everything kept as it is."""
    from qconvert.cli.to_gguf import check_out, checked_file_type, write_ggufs
    from qconvert.plan.request import KEEP, GGUFTarget

    with typed():
        _refuse(
            GGUF,
            {
                "--dtype": flags.dtype,
                "--pad-to-tp": pad_to_tp,
                "--allow-unknown": flags.allow_unknown,
                "--hash-sources": flags.hash_sources,
            },
        )
        check_out(flags.out if len(models) == 1 else None, None)
        target = GGUFTarget(
            checked_file_type(scheme or KEEP),
            allow_requantize=allowed["allow_requantize"],
            undo_act_order=allowed["undo_act_order"],
        )
    write_ggufs(models, [target], replace(flags, shard_size=None))


def _refuse(layout: str, given: dict[str, object]) -> None:
    """Raise BadRecipe for the first option that says nothing about this layout."""
    other = next((name for name, value in given.items() if value), None)
    if other:
        raise BadRecipe(f"{other}: is not for --to {layout}", "leave it out")


def _parse(layout: str, scheme: str | None) -> tuple[str, Scheme | None]:
    """The codebook scheme or the integers that a name stands for, either of which the layout has."""
    from qconvert.plan.passes.transcode import check_integers, codebook_named, layouts_with

    if scheme and named_scheme(scheme) and not layouts_with(scheme):
        scheme, _ = codebook_schemes.named(scheme, layout, "--to")
    table = codebook_named(layout, scheme) if scheme else ""
    integers = parse_scheme(scheme) if scheme and not table else None
    if integers:
        check_integers(layout, integers)
    return table, integers
