"""Runs `qconvert merge`: a LoRA adapter becomes a whole model."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, writing_options
from qconvert.cli.several import write_each
from qconvert.convert.job import OpenedModel
from qconvert.errors import QConvertError
from qconvert.plan.recipe import Recipe
from qconvert.plan.request import Request


@click.command(
    "merge",
    epilog=examples(
        "qconvert merge ./my-lora", "qconvert merge Qwen/Qwen2.5-1.5B-Instruct+./my-lora -o merged"
    ),
)
@models_argument()
@writing_options
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Merge the adapter MODEL (LoRA or DoRA, of PEFT or mlx-lm) into its base model.

    The base is the one that the adapter's config names; BASE+ADAPTER names another, such as the folder where
    it is. Sums are computed in float32 and rounded once, to --dtype or the base's own type. Other commands
    take adapters as they take models, and need no merged copy: qconvert to-gguf ./my-lora --type q4_k_m.
    """
    values = Flags(**flags)
    request = values.request("merge", Recipe())

    def ask(source: OpenedModel) -> Request:
        if not source.checkpoint.adapter:
            raise QConvertError(
                f"{source.location.name}: is a model, not an adapter", "name an adapter, or BASE+ADAPTER"
            )
        return request

    write_each(models, lambda model: ask, "merged", values)
