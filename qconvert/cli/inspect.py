"""Runs `qconvert inspect`: what a model is made of, from its config or its headers alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from qconvert.cli.options import examples, json_option, model_argument, quiet_option, revision_option

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.core.dtypes import Json


@click.command(
    "inspect", epilog=examples("qconvert inspect Qwen/Qwen3-0.6B", "qconvert inspect ./model/config.json")
)
@model_argument()
@click.option("--tensors", "list_tensors", is_flag=True, help="List every tensor with its role.")
@json_option
@quiet_option("the tables alone")
@revision_option
def command(model: str, list_tensors: bool, as_json: bool, quiet: bool, revision: str | None) -> None:
    """Show the parameters of MODEL by role, its ties, fusions and quantization.

    Reads config.json and headers only; a bare config.json is enough for the counts, and a Hub id
    downloads no weights.

    \b
    FORM              how a weight is stored
    bf16, f16, f32    plain numbers
    int4-g128         codes of 4 bits times a scale for each 128 columns of a row
      -asym           minus a zero point, of each group too
      -channel        one scale for each whole row
      -actorder       groups of columns in GPTQ's activation order (g_idx)
    min4-g64          codes of 4 bits times a scale plus a minimum, each 64 columns (MLX)
    nf4-g64, fp4-g64  bitsandbytes' tables of 16 numbers times a scale; -nested: scales are codes too
    e4m3, e5m2, e2m1  floats of 8 and 4 bits times scales: e4m3-channel, e4m3-tensor and blocks
                      e4m3-g128x128 (FP8), e2m1-g32 (MXFP4), e2m1-g16-divided (NVFP4)
    q4_k, q8_0, ...   blocks of GGUF, by llama.cpp's names
    """
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint

    resolved = resolve(model, revision=revision, weights=False)
    found = describe(open_checkpoint(resolved.path, headers=resolved.headers), list_tensors=list_tensors)
    if as_json:
        click.echo(json.dumps({"schema": 1, "model": model, **found}))
        return
    for warning in found["warnings"]:
        click.echo(f"Warning: {warning}", err=True)
    _print(model, found)


def describe(checkpoint: Checkpoint, *, list_tensors: bool) -> Json:
    """Everything the command shows, as plain data; UnsupportedModel for an unknown architecture."""
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
        "stored_tied_head": binding.stored_tied_head if binding else None,
        "fusions": list(binding.fusions_found) if binding else [],
        "quantization": checkpoint.quantization,
        "unknown": [n for n in binding.unknown if not architecture.carries(n)] if binding else [],
        "ignored": list(binding.dropped) if binding else [],
        "warnings": [
            *checkpoint.files.warnings,
            *([architecture.family.guess] if architecture.family.guess else []),
        ],
        "from": "headers" if binding else "config.json",
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

    click.echo("\n".join(found_lines(model, found)))
    if "tensor_list" in found:
        rows = [
            [shown(t["name"]), t["role"], "x".join(map(str, t["shape"])), t["form"] or ""]
            for t in found["tensor_list"]
        ]
        click.echo("\n" + "\n".join(table(["tensor", "role", "shape", "form"], rows, left=4)))
