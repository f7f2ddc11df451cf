"""Loads models by name as decoders, and measures what quantizing them costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qconvert.checkpoint.by_role import AS_LOADED, Activations, CheckpointWeights
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import Checkpoint
from qconvert.checkpoint.resolved import open_found
from qconvert.errors import BadRecipe
from qconvert.evaluate.corpora import WIKITEXT, load_text
from qconvert.evaluate.in_turn import Within
from qconvert.evaluate.lockstep import EvalModel
from qconvert.evaluate.models import open_model
from qconvert.evaluate.origins import labels_of, origin_of
from qconvert.evaluate.perplexity import run
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from qconvert.evaluate.provenance import now
from qconvert.evaluate.samples import continuations
from qconvert.evaluate.saved_reference import SavedReference, is_saved_reference
from qconvert.evaluate.weights_report import WeightReport, compare_weights
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import find_device
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.run_info import versions

STDLIB = "stdlib"
"""The name of the text that needs no download: held-out modules of Python's own library."""


def load_runtime(
    checkpoint: Checkpoint, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """The decoder of an opened checkpoint, its weights as they are stored, computing in `dtype`.

    Inputs of linears are rounded as loaders do.
    Raises UnsupportedModel for a family that is not run here, QConvertError for a device that is absent.
    """
    config, weights = DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint)
    return load_decoder(config, weights, device=find_device(device), dtype=dtype, inputs=weights.inputs)


def perplexity(
    models: str | Sequence[str],
    *,
    reference: str | None = None,
    text: str | Path = WIKITEXT,
    protocol: str = "gptq2048",
    context: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    activations: Activations = AS_LOADED,
    revision: str | None = None,
    samples: bool = False,
    within: Within | None = None,
    warn: Callable[[str], None] = lambda line: None,
    **how: Any,
) -> PerplexityReport:
    """Perplexity of models, and with a reference KL divergence and top-1 agreement, on the same tokens.

    Models are paths or Hub names, or one of these; the reference may be a file that `save_reference` wrote.
    `activations` rounds the inputs of linears as loaders do ("as-loaded"), or not ("exact"). `text` is a
    UTF-8 file, `wikitext2` or `stdlib`; with `samples` the models continue two prompts from it; `how` is as
    in `evaluate.perplexity.run` (`max_chunks`, `noise_floor`, `progress`, `scores`, `resume`,
    `save_reference`, `share`). `within` a memory, layers are read in turn, on the CPU. `warn` is told, before
    the work starts, of windows that are longer than the models are made for. Raises BadRecipe for a memory
    too small, and for a model whose tokenizer cuts the text into other tokens than the reference's.
    """
    if within is not None:
        _check_within(device, samples=samples)
    models = [models] if isinstance(models, str) else models
    with text_named(str(text)) as source:  # before any model, so that what is wrong with it shows at once
        words = load_text(source, protocol_named(protocol, context).wikitext)
    saved = SavedReference(Path(reference)) if reference and is_saved_reference(Path(reference)) else None
    runs = [*([reference] if reference and saved is None else []), *models]
    loaded: list[tuple[EvalModel, Path]] = []
    for name, label in zip(runs, labels_of(runs), strict=True):
        found = resolve(name, revision=revision)
        how_read: dict[str, Any] = {"device": device, "dtype": dtype, "activations": activations}
        how_read["in_turn"] = within is not None
        model = open_model(open_found(found), label, **how_read, name=name, commit=found.commit)
        loaded.append((model, found.path))
    first = 1 if reference and saved is None else 0
    positions = min(model.decoder.config.max_positions for model, _ in loaded)
    window = protocol_named(protocol, context).context
    if positions < window:
        warn(
            f"windows of {window:,} tokens are longer than the {positions:,} positions of the model; "
            f"--context {positions} stays within them"
        )
    report = run(
        [model for model, _ in loaded[first:]],
        reference=saved or (loaded[0][0] if first else None),
        tokenizer=loaded[0][1],
        text=words,
        protocol=protocol,
        context=context,
        within=within,
        **how,
    )
    if samples and not report.partial:
        places = [result.label for result in report.models]
        order = sorted((model for model, _ in loaded), key=lambda model: places.index(model.label))
        made = continuations(order, loaded[0][1], words.text)
        report = replace(report, samples=made)
    return report


def _check_within(device: str, *, samples: bool) -> None:
    """Raise BadRecipe for what is not done while layers are read in turn."""
    if device != "cpu":
        raise BadRecipe(f"--max-memory: is not held on {device}", "leave it out, or use --device cpu")
    if samples:
        raise BadRecipe(
            "--max-memory: --samples would read the whole model for every token", "leave out one of the two"
        )


def weights(
    a: str,
    b: str,
    *,
    labels: tuple[str, str] | None = None,
    revision: str | None = None,
    progress: Callable[[float, int], None] = lambda done, total: None,
) -> WeightReport:
    """The errors of B's weights against A's, both paths or Hub names.

    `progress` is told how many weights of how many are compared.
    """
    found = [resolve(name, revision=revision) for name in (a, b)]
    checkpoints = [open_found(each) for each in found]
    first, second = labels or labels_of((a, b))
    report = compare_weights(checkpoints[0], checkpoints[1], (first, second), progress)
    origins = (
        origin_of(checkpoint, name, each.commit)
        for checkpoint, name, each in zip(checkpoints, (a, b), found, strict=True)
    )
    return replace(report, date=now(), environment=versions(), origins=tuple(origins))


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
