"""Loads models by name as decoders, and measures what quantizing them costs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import Checkpoint
from qconvert.evaluate.corpora import WIKITEXT, load_text
from qconvert.evaluate.lockstep import EvalModel
from qconvert.evaluate.models import open_model
from qconvert.evaluate.perplexity import run
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import find_device
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder

STDLIB = "stdlib"
"""The name of the text that needs no download: held-out modules of Python's own library."""


def load_runtime(
    checkpoint: Checkpoint, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The decoder of an opened checkpoint, its weights as they are stored, computing in `dtype`.

    Raises UnsupportedModel for a family that is not run here, QConvertError for a device that is absent.
    """
    config, weights = DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint)
    return load_decoder(config, weights, device=find_device(device), dtype=dtype)


def perplexity(
    models: Sequence[str],
    *,
    reference: str | None = None,
    text: str | Path = WIKITEXT,
    protocol: str = "gptq2048",
    context: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    **how: Any,
) -> PerplexityReport:
    """Perplexity of models, and with a reference KL divergence and top-1 agreement, on the same tokens.

    Models are paths or Hub names. `text` is a UTF-8 file, `wikitext2` or `stdlib`; `how` is as in
    `evaluate.perplexity.run` (`max_chunks`, `noise_floor`, `progress`, `scores`, `resume`). Raises
    BadRecipe for a model whose tokenizer cuts the text into other tokens than the reference's.
    """
    with text_named(str(text)) as source:  # before any model, so that what is wrong with it shows at once
        words = load_text(source, protocol_named(protocol, context).wikitext)

    def load(name: str) -> tuple[EvalModel, Path]:
        path = resolve(name, revision=revision).path
        return open_model(path, label_of(name), device=device, dtype=dtype), path

    base, loaded = load(reference) if reference else None, [load(name) for name in models]
    return run(
        [model for model, _ in loaded],
        reference=base[0] if base else None,
        tokenizer=(base or loaded[0])[1],
        text=words,
        protocol=protocol,
        context=context,
        **how,
    )


def label_of(name: str) -> str:
    """What to call a model in a report: the last part of its name."""
    return name.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def text_named(text: str) -> Iterator[str | Path]:
    """A file with the held-out text when `text` is `stdlib`; otherwise `text` itself."""
    if text != STDLIB:
        yield text
        return
    from qconvert.demo.corpus import demo_text

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "python-stdlib-held-out.txt"
        path.write_text(demo_text("held-out").text, encoding="utf-8")
        yield path
