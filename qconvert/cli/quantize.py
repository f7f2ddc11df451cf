"""Runs `qconvert quantize`: linears become integers of 2 to 8 bits, by groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from qconvert.cli import candidates, codebook_schemes
from qconvert.cli.calibration_options import calibration_options
from qconvert.cli.exit_codes import typed
from qconvert.cli.flags import Flags
from qconvert.cli.layout_choice import LayoutChoice
from qconvert.cli.many_outputs import Several
from qconvert.cli.options import (
    BitsType,
    examples,
    models_argument,
    pad_option,
    statistics_option,
    writing_options,
)
from qconvert.cli.several import write_each, write_several
from qconvert.cli.target import Aiming, Wanted, target_options
from qconvert.core.schemes import Scheme, parse_scheme
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.plan.recipe import FUSIONS, Recipe, Rule, load_recipe, parse_rule

# Integers that transformers and vLLM load; fewer bits load in fewer places.
TARGET_SCHEMES = "int4-g128,int4-g32,int8-g128"


def _refuse_type(context: click.Context, option: click.Parameter, value: str | None) -> None:
    """Raise BadRecipe for a type of GGUF files, which people look for here."""
    if value is not None:
        with typed():
            raise BadRecipe(
                f"--type {value}: GGUF types belong to to-gguf", f"`qconvert to-gguf MODEL --type {value}`"
            )


@click.command(
    "quantize",
    epilog=examples(
        "qconvert quantize Qwen/Qwen2.5-1.5B-Instruct --bits 4",
        "qconvert quantize ./model-a ./model-b --bits 4 --skip-existing -o quantized",
        "qconvert quantize ./model --bits 4,8 -o quantized --events progress.jsonl",
        "qconvert quantize ./model --bits 4 --rule mlp.down=int8 --rule attn.o=int8",
        "qconvert quantize ./model --scheme FP8_DYNAMIC --keep layers.0 --keep down_proj",
        "qconvert quantize Qwen/Qwen3-235B-A22B --bits 4 --connections 32 --patience 3600",
        "qconvert quantize Qwen/Qwen2.5-1.5B-Instruct --bits 4 --keep-source",
        "qconvert quantize Qwen/Qwen3-30B-A3B --bits 4 --push-to me/qwen3-int4 --private --drop-pushed",
        "qconvert quantize s3://bucket/models/qwen3 --bits 4 -o s3://bucket/models/qwen3-int4",
        "torchrun --nproc-per-node 4 -m qconvert quantize ./model --bits 4 --shard-size 1GB",
        "qconvert quantize ./model --bits 4 --shard-size 1GB --rank auto  # in a Slurm array",
    ),
)
@models_argument()
@click.option(
    "--bits",
    type=Several(BitsType()),
    metavar="N,...",
    help="Bits per weight of the linears; of several, an output each, from one reading.",
)
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128", "channel"]),
    show_default="128",
    help="Columns per scale.",
)
@click.option(
    "--sym/--asym",
    "symmetric",
    default=None,
    show_default="sym",
    help="Symmetric grid, or one with zero points.",
)
@click.option(
    "--scheme",
    metavar="SCHEME",
    shell_complete=candidates.schemes,
    help="All of these in one word: int4-g128, int8-asym-channel, or W4A16, W8A8, FP8_DYNAMIC, nf4.",
)
@click.option(
    "--scale-search/--min-max",
    "search",
    default=None,
    show_default="scale-search",
    help="Search scales of least squared error, or take each group's range.",
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="SELECTOR=SCHEME",
    shell_complete=candidates.rules,
    help="Give these weights another scheme; the last match wins.",
)
@click.option(
    "--keep",
    "keeps",
    multiple=True,
    metavar="SELECTOR",
    shell_complete=candidates.selectors,
    help="Leave these weights as they are.",
)
@click.option(
    "--type", expose_value=False, hidden=True, callback=_refuse_type, help="Refused: it is to-gguf's."
)
@click.option("--fuse", multiple=True, type=click.Choice(list(FUSIONS)), help="Stack these linears as well.")
@click.option("--tie/--untie", default=None, help="Drop a head equal to the embedding, or write it out.")
@click.option(
    "--allow-smaller-group",
    is_flag=True,
    help="Where the group size does not divide a row, take 128, 64 or 32.",
)
@click.option(
    "--layout",
    metavar="LAYOUT",
    type=LayoutChoice(registry.written),
    show_default=registry.DEFAULT,
    help=f"Layout of the output: {', '.join(registry.written())}; `convert --help` says what each holds. "
    "--method chooses the codes: gptq and awq are only names of layouts here.",
)
@target_options("schemes", TARGET_SCHEMES)
@statistics_option
@calibration_options
@pad_option
@click.option(
    "--recipe",
    "recipe_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read a YAML recipe first; options win over it.",
)
@writing_options
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Quantize the linears of MODEL to 2 to 8 bits, by groups.

    The output is in compressed-tensors' pack-quantized layout, which transformers and vLLM load as
    it is, unless --layout names another. Embeddings and head stay as they are unless a rule names them.

    \b
    SELECTOR  a role (mlp.down, attn.qkv), a group (attention, mlp, experts, router,
              embedding, head, vision), whole layers (layers.0, layers.0-3,23), either
              in layers (layers.0-3.mlp.down), a module's name as in the checkpoint
              (model.layers.0.mlp.down_proj, down_proj, *.down_proj), or re:REGEX
    SCHEME    int{2..8}[-asym][-g{N}|-channel], or keep; int4 means int4-g128;
              llm-compressor's W{2..8}A16 and W4A16_ASYM; for all linears W8A8,
              FP8_DYNAMIC, FP8_BLOCK, NVFP4A16, MXFP4A16, and bitsandbytes' nf4 and fp4
    """
    aiming = Wanted.taken_from(flags, TARGET_SCHEMES)
    asked = {key: flags.pop(key) for key in list(flags) if key not in Flags.__dataclass_fields__}
    with typed():
        aim = aiming.target
        asked["scheme"], asked["layout"] = codebook_schemes.named(asked["scheme"], asked["layout"])
        table = "" if aim is not None else codebook_schemes.codebook_of(asked)
        if not table:
            codebook_schemes.send_on(models, asked, flags["out"])
        if aim is not None:
            _check_choices(aim.labels, asked)
    if table:
        codebook_schemes.write(models, asked, table, Flags(**flags))
        return
    several = asked.pop("bits") or (None,)
    recipes = [build_recipe(bits=bits, **asked, chosen_later=aim is not None) for bits in several]
    recipe = recipes[0]
    values = Flags(**flags)
    with typed():
        if values.statistics and not recipe.search:
            raise BadRecipe("--calibration: --min-max does not weigh errors", "leave out one of the two")
    if aim is None:
        wanted = [(values.request("quantize", each), _suffix(each)) for each in recipes]
        write_several(models, "--bits", wanted, values)
    else:
        request = values.request("quantize", recipe)
        suffix = f"{aiming.suffix}-mixed"
        write_each(models, lambda model: Aiming(aiming, aim, request, values), suffix, values)


def _check_choices(labels: Sequence[str], asked: Mapping[str, Any]) -> None:
    """Raise BadRecipe for encodings that are no schemes, or a scheme that a target would not choose."""
    for label in labels:
        if parse_scheme(label) is None:
            raise BadRecipe(f"--schemes {label}: is not an integer scheme", "write for example int4-g128")
    given = [f"--{name.replace('_', '-')}" for name in ("bits", "group_size", "scheme") if asked[name]]
    given += ["--asym"] if asked["symmetric"] is not None else []
    given += ["--pad-to-tp"] if asked["pad_to_tp"] else []
    if given:
        raise BadRecipe(
            f"{given[0]}: given together with a target", "name what it chooses among with --schemes"
        )


def build_recipe(
    *,
    bits: int | None,
    group_size: str | None,
    symmetric: bool | None,
    scheme: str | None,
    search: bool | None,
    rules: tuple[str, ...],
    keeps: tuple[str, ...],
    fuse: tuple[str, ...],
    tie: bool | None,
    allow_smaller_group: bool,
    layout: str | None,
    pad_to_tp: int | None,
    recipe_file: Path | None,
    chosen_later: bool = False,
) -> Recipe:
    """The recipe that a file and the flags ask for together; flags win, their rules come last.

    Where schemes are `chosen_later`, for a target, the recipe need not have one.
    """
    recipe = load_recipe(recipe_file) if recipe_file else Recipe()
    with typed():
        if scheme and (bits or group_size or symmetric is not None):
            raise BadRecipe(
                "--scheme: given together with --bits, --group-size or --asym", "use one or the other"
            )
        if scheme:
            recipe = recipe.with_(scheme=parse_scheme(scheme))
        own_rules = (*(parse_rule(text) for text in rules), *(Rule(select, None) for select in keeps))
    # What is missing beside a file, or goes ill with it, can be put right in the file.
    with nullcontext() if recipe_file else typed():
        if bits or group_size or symmetric is not None:
            recipe = recipe.with_(scheme=_from_flags(recipe.scheme, bits, group_size, symmetric))
        recipe = recipe.with_(
            rules=recipe.rules + own_rules,
            fuse=tuple(dict.fromkeys(recipe.fuse + fuse)),
            tie=recipe.tie if tie is None else tie,
            search=recipe.search if search is None else search,
            allow_smaller_group=recipe.allow_smaller_group or allow_smaller_group,
            layout=layout or recipe.layout,
            pad_to_tp=pad_to_tp or recipe.pad_to_tp,
        )
        if not chosen_later:
            _check_schemes(recipe)
    return recipe


def _check_schemes(recipe: Recipe) -> None:
    schemes = [scheme for scheme in (recipe.scheme, *(rule.scheme for rule in recipe.rules)) if scheme]
    if not schemes:
        traits = registry.traits_of(recipe.layout)
        usual = "--bits 4, --scheme int8-g128 or --recipe FILE"
        own = f"--scheme {traits.codebooks[0].name}" if traits.default_codebook else usual
        raise BadRecipe("quantize: no scheme was asked for", f"add {own}")
    if recipe.layout != registry.DEFAULT:
        from qconvert.plan.passes.transcode import check_integers

        for scheme in schemes:
            check_integers(recipe.layout, scheme)


def _from_flags(base: Scheme | None, bits: int | None, group: str | None, symmetric: bool | None) -> Scheme:
    base = base or (Scheme(bits) if bits else None)
    if base is None:
        raise BadRecipe("quantize: a group size or --asym, but no --bits", "add --bits 4")
    size = base.group_size if group is None else (None if group == "channel" else int(group))
    return Scheme(bits or base.bits, size, base.symmetric if symmetric is None else symmetric)


def _suffix(recipe: Recipe) -> str:
    if recipe.scheme is None:
        return "quantized"
    mixed = "-mixed" if any(rule.scheme for rule in recipe.rules) else ""
    layout = "" if recipe.layout == registry.DEFAULT else f"-{recipe.layout}"
    return recipe.scheme.label + mixed + ("-fused" if recipe.fuse else "") + layout
