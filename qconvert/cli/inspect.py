"""Runs `qconvert inspect`: what a model is made of, from its config or its headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import tell_with_errors
from qconvert.cli.options import (
    examples,
    json_option,
    keep_going_option,
    models_argument,
    quiet_option,
    revision_option,
)
from qconvert.cli.passed_over import PassedOver
from qconvert.cli.printing import terminal_columns

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.core.dtypes import Json


@click.command(
    "inspect",
    epilog=examples("qconvert inspect Qwen/Qwen3-0.6B", "qconvert inspect ./model ./model-int4-g128"),
)
@models_argument()
@click.option("--metadata", "show_metadata", is_flag=True, help="List the keys of config.json, or of a GGUF.")
@click.option("--tensors", "list_tensors", is_flag=True, help="List every tensor with its role.")
@keep_going_option
@json_option
@quiet_option("only the tables")
@revision_option
def command(
    models: tuple[str, ...],
    show_metadata: bool,
    list_tensors: bool,
    keep_going: bool,
    as_json: bool,
    quiet: bool,
    revision: str | None,
) -> None:
    """Show the parameters of MODEL by role, its ties, fusions and quantization; or compare several MODELs.

    Reads config.json and headers only; a config.json alone is enough for parameters and bytes, also
    of a quantized model. A Hub id downloads no weights.

    \b
    FORM              how a weight is stored
    bf16, f16, f32    plain numbers
    int4-g128         codes of 4 bits times a scale for each 128 columns of a row
      -asym           minus a zero point, of each group too
      -channel        one scale for each whole row
      -actorder       groups of columns in GPTQ's activation order (g_idx)
    min4-g64          codes of 4 bits times a scale plus a minimum, each 64 columns (MLX)
    zero4-g64         the same minus a zero point that is no integer (HQQ; zero4-rows64: on axis 0)
    middle4-g64       the same plus the weight in the middle of the codes (torchao)
    nf4-g64, fp4-g64  bitsandbytes' tables of 16 numbers times a scale; -nested: scales are codes too
    e4m3, e5m2, e2m1  floats of 8 and 4 bits times scales: e4m3-channel, e4m3-tensor and blocks
                      e4m3-g128x128 (FP8), e2m1-g32 (MXFP4), e2m1-g16 (NVFP4; -divided, -multiplied:
                      by a second scale for all of the weight)
    q4_k, q8_0, ...   blocks of GGUF, by llama.cpp's names
    \b
    PRODUCTS          what loaders multiply in quantized linears
    W4A16             weights of 4 bits, inputs as they are
    W8A8              weights of 8 bits, inputs rounded to 8 bits in a way that config.json says
    """
    found: dict[str, Json] = {}
    told: list[Json] = []
    passed = PassedOver(models, keep_going, as_json)
    tell_with_errors("models", told)
    for model in models:
        with passed.one(model):
            found[model] = _opened(model, revision, list_tensors, show_metadata)
            told.append({"model": model, **found[model]})
    if as_json:
        several = len(models) > 1
        click.echo(
            json.dumps(passed.told("models", told) if several else {"schema": 1, "ok": True, **told[0]})
        )
    else:
        _print_all(found, several=len(models) > 1)
    passed.leave()


def _print_all(found: Mapping[str, Json], *, several: bool) -> None:
    for each in found.values():
        for warning in each["warnings"]:
            click.echo(f"Warning: {warning}", err=True)
    if several and found:
        from qconvert.report.side_by_side import side_by_side

        click.echo("\n".join(side_by_side(found, terminal_columns())))
    elif found:
        _print(*next(iter(found.items())))


def _opened(model: str, revision: str | None, list_tensors: bool, show_metadata: bool) -> Json:
    from qconvert.checkpoint.about import metadata
    from qconvert.checkpoint.assumed import without_weights
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.resolved import open_found

    resolved = resolve(model, revision=revision, weights=False)
    checkpoint = None if resolved.repo_id or resolved.adapter else without_weights(resolved.path)
    checkpoint = checkpoint or open_found(resolved, undecoded=True)
    keys = {"metadata": _plain(metadata(checkpoint))} if show_metadata else {}
    return {**describe(checkpoint, list_tensors=list_tensors), **keys}


def _plain(value: Any) -> Any:
    """A value of a file's metadata as JSON has it: long arrays as their length and first entries."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence):
        few = [_plain(each) for each in value[:8]]
        return few if len(value) <= 8 else {"length": len(value), "first": few}
    return value


def describe(checkpoint: Checkpoint, *, list_tensors: bool) -> Json:
    """Everything the command shows, as plain data; UnsupportedModel for an unknown architecture."""
    from qconvert.checkpoint.about import about
    from qconvert.models.parameter_table import census_of_config, table_of_tensors

    architecture = checkpoint.architecture
    binding = checkpoint.bind(allow_unknown=True) if checkpoint.tensors else None
    parameter_table = (
        table_of_tensors(checkpoint.tensors, binding, checkpoint.layout.traits)
        if binding
        else census_of_config(architecture)
    )
    return {
        "family": architecture.family.name,
        "layers": architecture.layers,
        "tied": architecture.tied,
        "has_head": architecture.table("lm_head") is not None,
        "stored_tied_head": binding.stored_tied_head if binding else None,
        "fusions": list(binding.fusions_found) if binding else [],
        "quantization": checkpoint.quantization,
        **({"adapter": checkpoint.adapter} if checkpoint.adapter else {}),
        "products": [str(product) for product in checkpoint.products],
        "unknown": [n for n in binding.unknown if not architecture.carries(n)] if binding else [],
        "ignored": list(binding.dropped) if binding else [],
        "warnings": [
            *checkpoint.warnings,
            *([architecture.family.guess] if architecture.family.guess else []),
        ],
        "from": checkpoint.assumed or ("headers" if binding else "config.json"),
        "about": about(checkpoint),
        **parameter_table.to_json(),
        **({"tensor_list": _tensor_list(checkpoint)} if list_tensors else {}),
    }


def _tensor_list(checkpoint: Checkpoint) -> list[Json]:
    architecture = checkpoint.architecture
    if not checkpoint.tensors:
        return [
            {"name": p.name, "role": p.role, "shape": list(p.shape), "form": None}
            for p in architecture.stored.values()
        ]
    entries = []
    for name, tensor in checkpoint.tensors.items():
        parameter = architecture.parameter(name)
        role = parameter.role if parameter else "unknown"
        entries.append(
            {"name": name, "role": role, "shape": list(tensor.shape), "form": tensor.encoding.label}
        )
    return entries


def _print(model: str, found: Json) -> None:
    from qconvert.errors import shown
    from qconvert.report.tables import found_lines, table

    click.echo("\n".join(found_lines(model, found, terminal_columns())))
    if "tensor_list" in found:
        rows = [
            [shown(t["name"]), t["role"], "x".join(map(str, t["shape"])), t["form"] or ""]
            for t in found["tensor_list"]
        ]
        click.echo("\n" + "\n".join(table(["tensor", "role", "shape", "form"], rows, left=4)))
    if "metadata" in found:
        rows = [[shown(key), shown(value)] for key, value in found["metadata"].items()]
        click.echo("\n" + "\n".join(table(["key", "value"], rows, left=2)))
