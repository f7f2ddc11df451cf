"""Reading for perplexity: random tokens in windows of 2048 through the code of `eval perplexity`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from evals.gpu.clock import wall_seconds
from evals.gpu.job import Job, attempt
from evals.gpu.models import BF16, INT4, INT8, Recipe, config_of, make_decoder, read_flops
from evals.gpu.rows import OURS, Note, Reading, Row
from qconvert.evaluate.lockstep import EvalModel, Track, run_lockstep
from qconvert.evaluate.protocols import protocol_named
from qconvert.runtime.model import Decoder

WIKITEXT_TOKENS = 299_078
"""Of the test set of wikitext-2, in Qwen's tokens."""
WHOLE_SECONDS = 15.0
"""A whole wikitext-2 is read where it takes no longer; else a part of it."""
SAMPLE_WINDOWS = 16
ORDER = (
    ("qwen3-8b", INT4),
    ("qwen2.5-7b", INT4),
    ("qwen3-8b", BF16),
    ("qwen2.5-7b", BF16),
    ("qwen3-8b", INT8),
    ("qwen2.5-7b", INT8),
)


def measure(job: Job) -> Iterator[Row]:
    """Every model and recipe that passed its check."""
    recipes = list(dict.fromkeys(recipe for _, recipe in ORDER))
    yield from job.unsound(["scores", *(f"reading {recipe.name}" for recipe in recipes)])
    for model, recipe in ORDER[:1] if job.dry else ORDER:
        if job.passed("scores") and job.passed(f"reading {recipe.name}"):
            yield from attempt(job, f"reading {model} {recipe.name}", partial(_read, job, model, recipe))


def _read(job: Job, model: str, recipe: Recipe) -> Iterator[Row]:
    decoder = make_decoder(config_of(model, tiny=job.dry), recipe, job.maker)
    window = 8 if job.dry else protocol_named("gptq2048").context
    sample = 2 if job.dry else SAMPLE_WINDOWS
    whole = 40 if job.dry else WIKITEXT_TOKENS

    def timed(tokens: int) -> Reading:
        ids_N = np.random.default_rng(0).integers(decoder.config.vocab, size=tokens)
        seconds = wall_seconds(lambda: read_losses(decoder, ids_N, window), job.device)
        done = tokens // window * window
        flops = read_flops(decoder.config, done, window)
        return Reading(model, OURS, recipe.name, done, seconds, flops, tokens == whole)

    timed(sample * window)  # compiles kernels, chooses those of cuBLAS, takes the memory
    sampled = timed(sample * window)
    yield sampled
    expected = sampled.seconds * whole / sampled.tokens
    if expected < min(WHOLE_SECONDS, job.left):
        yield timed(whole)
    else:
        yield Note(
            f"reading {model} {recipe.name}: wikitext-2 would take {expected:.1f} s of {job.left:.0f} left"
        )


def read_losses(decoder: Decoder, ids_N: np.ndarray, window: int) -> Track:
    """Losses of a text, as an evaluation of one model makes them: all of a window but the first."""
    track = Track(EvalModel("random", decoder, 0, 0.0))
    windows = protocol_named("gptq2048", window).windows(len(ids_N))
    run_lockstep([track], ids_N, windows, compared=False)
    return track
