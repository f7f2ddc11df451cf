"""Runs `qconvert from-gguf`: a GGUF model becomes a Hugging Face folder with config and tokenizer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.flags import Flags
from qconvert.cli.options import examples, models_argument, writing_options
from qconvert.cli.several import write_each
from qconvert.errors import UnsupportedModel
from qconvert.plan.recipe import Recipe

if TYPE_CHECKING:
    from qconvert.convert.job import OpenedModel
    from qconvert.plan.request import Request

_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@click.command("from-gguf", epilog=examples("qconvert from-gguf Qwen3-0.6B-Q8_0.gguf -o ./Qwen3-0.6B"))
@models_argument("FILE...")
@writing_options
def command(models: tuple[str, ...], **values: Any) -> None:
    """Write the GGUF model FILE as a Hugging Face folder: safetensors, config.json, tokenizer.json.

    Numbers are those that the file's blocks stand for, rounded once to --dtype: by default the 16-bit
    type of the file, bf16 where all of it is quantized, f32 where nothing is. Any part of a split file
    stands for all of them. Families that share a graph of llama.cpp come back as the first of it: Mistral
    as Llama, mT5 as T5.
    """
    flags = Flags(**values)

    def ask(source: OpenedModel, file: str) -> Request:
        from qconvert.checkpoint.gguf_model import GGUFModel

        checkpoint = source.checkpoint
        if not isinstance(checkpoint.files, GGUFModel):
            raise UnsupportedModel(f"{file}: not a GGUF file", "name the .gguf file itself")
        dtype = flags.dtype or _DTYPES[checkpoint.config["torch_dtype"]]
        quantized = checkpoint.quantization is not None
        return replace(flags, dtype=dtype).request("from-gguf", Recipe(), dequantize=quantized)

    write_each(models, lambda file: partial(ask, file=file), "", flags)
