"""Runs `qconvert to-gguf`: a GGUF file of any llama.cpp type, in one step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import candidates
from qconvert.cli.calibration_options import calibration_options
from qconvert.cli.exit_codes import typed
from qconvert.cli.flags import Flags
from qconvert.cli.launchers import rank_option
from qconvert.cli.many_outputs import Several
from qconvert.cli.options import (
    SIZE,
    dry_run_option,
    events_option,
    examples,
    hub_options,
    jobs_option,
    json_option,
    keep_going_option,
    memory_option,
    models_argument,
    nonfinite_option,
    pushing_options,
    restart_option,
    skip_option,
    statistics_option,
    url_of,
    verify_existing_option,
    verify_option,
    written_option,
)
from qconvert.cli.several import write_each, write_several
from qconvert.cli.target import Aiming, Wanted, target_options
from qconvert.errors import BadRecipe
from qconvert.plan.recipe import Recipe

if TYPE_CHECKING:
    from qconvert.core.ggml_types import GGMLType
    from qconvert.plan.request import GGUFTarget

# What llama.cpp runs fast everywhere, from 2.6 to 8.5 bits.
TARGET_TYPES = "q2_k,q3_k,q4_k,q5_k,q6_k,q8_0"
UNTIL_CHOSEN = "F32"
TOWER_TYPES = ("f16", "bf16", "f32", "q8_0")


@click.command(
    "to-gguf",
    epilog=examples(
        "qconvert to-gguf Qwen/Qwen2.5-1.5B-Instruct --type q4_k_m",
        "qconvert to-gguf ./model --type q4_k_m,q6_k,q8_0 -o ggufs",
        "qconvert to-gguf Qwen/Qwen3-30B-A3B --type q6_k --keep-source --revision main",
        "qconvert to-gguf Qwen/Qwen3-30B-A3B --type q4_k_m --push-to me/Qwen3-30B-A3B-GGUF",
        "qconvert to-gguf Qwen/Qwen3-VL-4B-Instruct --mmproj",
        "torchrun --nproc-per-node 4 -m qconvert to-gguf ./model --type q8_0 --split-max-size 1GB",
    ),
)
@models_argument("[MODEL]...", required=False)
@click.option(
    "--type",
    "file_type",
    type=Several(click.STRING),
    metavar="TYPE,...",
    shell_complete=candidates.file_types,
    help="Type of the file: q4_k_m, q8_0, ...; of several, a file each, from one reading; "
    "`list` shows all, `keep` copies existing codes.",
)
@click.option(
    "--tensor-type",
    "tensor_types",
    multiple=True,
    metavar="PATTERN=TYPE",
    shell_complete=candidates.element_types,
    help="Another type for tensors whose GGUF names the regular expression is found in.",
)
@click.option(
    "--token-embedding-type",
    metavar="TYPE",
    shell_complete=candidates.element_types,
    help="Another type for the embedding.",
)
@click.option(
    "--output-tensor-type",
    metavar="TYPE",
    shell_complete=candidates.element_types,
    help="Another type for the head.",
)
@click.option(
    "--mmproj",
    is_flag=True,
    help="Write the vision tower and its projector instead: mmproj-NAME-F16.gguf, for llama.cpp's --mmproj.",
)
@click.option("--pure", is_flag=True, help="Use the base type for all tensors, without a mixture.")
@click.option(
    "--fallback/--no-fallback",
    default=True,
    show_default=True,
    help="Where blocks do not divide a row, use a bigger type, or stop.",
)
@target_options("types", TARGET_TYPES)
@statistics_option
@calibration_options
@click.option(
    "--allow-requantize", is_flag=True, help="Quantize weights that are quantized already; this loses twice."
)
@click.option("--split-max-size", "shard_size", type=SIZE, help="Write numbered parts of at most this size.")
@click.option(
    "--pre-tokenizer",
    metavar="NAME",
    help="llama.cpp's name of the pre-tokenizer, where it is not recognised.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    show_default="by GGUF's convention",
    help="Output file; of several models, the folder of their files.",
)
@click.option("--card", is_flag=True, help="Write a model card beside it, NAME.md.")
@click.option("--modelfile", is_flag=True, help="Write a Modelfile for Ollama beside it, NAME.Modelfile.")
@click.option(
    "--manifest",
    is_flag=True,
    help="Write a manifest beside it, NAME.qconvert.json: `verify` holds the file against its hashes.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output file.")
@skip_option
@verify_existing_option
@keep_going_option
@restart_option
@dry_run_option
@json_option
@written_option
@events_option
@verify_option
@jobs_option
@rank_option
@memory_option
@hub_options
@pushing_options
@nonfinite_option
def command(
    models: tuple[str, ...],
    file_type: tuple[str, ...] | None,
    tensor_types: tuple[str, ...],
    token_embedding_type: str | None,
    output_tensor_type: str | None,
    mmproj: bool,
    pure: bool,
    fallback: bool,
    allow_requantize: bool,
    card: bool,
    modelfile: bool,
    manifest: bool,
    **values: Any,
) -> None:
    """Write MODEL as a GGUF file for llama.cpp, Ollama and programs built on them.

    Straight from the shards: no 16-bit GGUF in between. Every tensor's bytes equal those of
    llama.cpp's own converter followed by llama-quantize. A model that its graphs would compute
    otherwise is refused.
    """
    from qconvert.plan.gguf.file_types import FILE_TYPES
    from qconvert.plan.request import GGUFTarget

    if file_type is not None and file_type[0].lower() == "list":
        _print_types(as_json=values["as_json"])
        return
    if not models:
        raise click.UsageError("Missing argument 'MODEL'.")
    wanted = Wanted.taken_from(values, TARGET_TYPES)
    if mmproj:
        file_type = tuple(map(_tower_type, file_type or ("f16",)))
    with typed():
        aim = wanted.target
        if aim is None and file_type is None:
            likely = next((word.lower() for word in models if word.upper() in FILE_TYPES), "q4_k_m")
            hint = f"add --type {likely}, or --target-size 4.8bpw"
            raise BadRecipe("to-gguf: no type was asked for", hint)
        if aim is not None and file_type is not None:
            raise BadRecipe("--type: given together with a target", "name what it chooses among with --types")
        for label in aim.labels if aim else ():
            _written(label)
        named = tuple(dict.fromkeys(map(str.lower, file_type or (UNTIL_CHOSEN,))))
        alone = len(models) == len(named) == 1
        check_out(values["out"] if alone else None, values["pre_tokenizer"])
        kinds = [checked_file_type(name) for name in named]
        target = GGUFTarget(
            kinds[0],
            tensor_types=tuple(map(_override, tensor_types)),
            token_embedding_type=_written(token_embedding_type) if token_embedding_type else None,
            output_tensor_type=_written(output_tensor_type) if output_tensor_type else None,
            pure=pure,
            tower=mmproj,
            fallback=fallback,
            allow_requantize=allow_requantize,
        )
    flags = Flags(**values, beside=_beside(card=card, modelfile=modelfile, manifest=manifest))
    if aim is None:
        write_ggufs(models, [replace(target, file_type=kind) for kind in kinds], flags)
    else:
        request = flags.request("to-gguf", Recipe(), target=target)
        write_each(models, lambda model: Aiming(wanted, aim, request, flags), wanted.suffix, flags)


def _tower_type(file_type: str) -> str:
    """The type of a tower's file; BadRecipe for one that llama.cpp does not make of towers."""
    if file_type.lower() not in TOWER_TYPES:
        raise BadRecipe(
            f"--mmproj --type {file_type}: llama.cpp makes no such file of a vision tower",
            f"--type {', '.join(TOWER_TYPES)}; without it, f16",
        )
    return file_type


def _beside(*, card: bool, modelfile: bool, manifest: bool) -> tuple[str, ...]:
    """The suffixes of the files to write beside the GGUF."""
    from qconvert.convert.gguf_sidecars import CARD, MANIFEST, MODELFILE

    asked = {CARD: card, MODELFILE: modelfile, MANIFEST: manifest}
    return tuple(suffix for suffix, wanted in asked.items() if wanted)


def write_ggufs(models: Sequence[str], targets: Sequence[GGUFTarget], flags: Flags) -> None:
    """Write models as the GGUF files that are asked for, and print the results."""
    wanted = [(flags.request("to-gguf", Recipe(), target=target), "") for target in targets]
    write_several(models, "--type", wanted, flags)


def check_out(out: Path | None, pre_tokenizer: str | None) -> None:
    """Raise BadRecipe for a name that is not a GGUF file's, or a pre-tokenizer that llama.cpp lacks."""
    from qconvert.formats.tokenizers.pretokenizers import known_pre_tokenizer

    if out and out.suffix != ".gguf":
        name = url_of(out) or out
        raise BadRecipe(f"{name}: does not end in .gguf", f"write -o {name}.gguf")
    if pre_tokenizer is not None:
        known_pre_tokenizer(pre_tokenizer)


def checked_file_type(file_type: str) -> str:
    """The file type; BadRecipe for one that does not exist."""
    from qconvert.plan.gguf.file_types import find_file_type
    from qconvert.plan.request import KEEP

    if file_type != KEEP:
        find_file_type(file_type)
    return file_type


def _override(text: str) -> tuple[str, GGMLType]:
    """Read `PATTERN=TYPE` as given to --tensor-type."""
    from qconvert.plan.gguf.mixture import pattern_of

    pattern, equals, type_ = text.rpartition("=")
    if not equals or not pattern:
        raise BadRecipe(f"--tensor-type {text!r}: no '='", "write PATTERN=TYPE, for example ffn_down=q6_k")
    pattern_of(pattern)
    return pattern, _written(type_)


def _written(text: str) -> GGMLType:
    """The element type of this name; BadRecipe for one that no weight is written in."""
    from qconvert.core.ggml_types import parse_ggml_type

    return parse_ggml_type(text)


def _print_types(*, as_json: bool) -> None:
    from qconvert.plan.gguf.file_types import FILE_TYPES
    from qconvert.report.tables import table

    types = FILE_TYPES.values()
    if as_json:
        plain = [
            {"type": t.name.lower(), "base": t.base.label, "base_bits_per_weight": t.base.bits_per_weight}
            for t in types
        ]
        click.echo(json.dumps({"schema": 1, "ok": True, "types": plain}))
        return
    rows = [[t.name.lower(), t.base.label, f"{t.base.bits_per_weight:.2f}"] for t in types]
    click.echo("\n".join(table(["type", "base", "bpw of base"], rows, left=2)))
