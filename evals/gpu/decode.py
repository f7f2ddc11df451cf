"""Generating at batch 1, end to end: true shapes, random weights, one captured step per token."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from evals.gpu.clock import wall_seconds
from evals.gpu.job import Job, attempt
from evals.gpu.models import (
    BF16,
    INT4,
    INT4_HEAD8,
    INT8,
    RECIPES,
    Recipe,
    config_of,
    kv_bytes,
    make_decoder,
    weight_bytes,
)
from evals.gpu.rows import OURS, Decoding, Row
from qconvert.runtime.cuda.decode_step import Step, open_step, read_greedily

CONTEXTS = (0, 2048)
ORDER = (
    ("qwen2.5-1.5b", INT4),
    ("qwen2.5-7b", INT4),
    ("qwen2.5-7b", BF16),
    ("qwen2.5-1.5b", BF16),
    ("qwen2.5-1.5b", INT4_HEAD8),
    ("qwen2.5-7b", INT4_HEAD8),
    ("qwen3-8b", INT4),
    ("qwen3-8b", BF16),
    ("qwen2.5-0.5b", INT4),
    ("qwen2.5-0.5b", BF16),
    ("qwen3-8b", INT4_HEAD8),
    ("qwen2.5-0.5b", INT4_HEAD8),
    ("qwen2.5-1.5b", INT8),
    ("qwen2.5-7b", INT8),
    ("qwen3-8b", INT8),
    ("qwen2.5-0.5b", INT8),
)
"""What has a target comes first: a budget cuts off the end."""
TOKENS, ROUNDS = 64, 5
LAYER_LAUNCHES = 9
"""norm, qkv, attend, combine, o, norm, gate_up, swiglu, down."""
OTHER_LAUNCHES = 6
"""Embedding row and its conversion, last norm, head, position, argmax."""


def measure(job: Job) -> Iterator[Row]:
    """Tokens per second of every model in every recipe that passed its check."""
    yield from job.unsound(f"step {recipe.name}" for recipe in RECIPES)
    for model, recipe in ORDER[:1] if job.dry else ORDER:
        if job.passed(f"step {recipe.name}"):
            yield from attempt(job, f"{model} {recipe.name}", partial(_decode, job, model, recipe))


def _decode(job: Job, model: str, recipe: Recipe) -> Iterator[Row]:
    tokens, rounds = (2, 1) if job.dry else (TOKENS, ROUNDS)
    contexts = (0, 5) if job.dry else CONTEXTS
    decoder = make_decoder(config_of(model, tiny=job.dry), recipe, job.maker)
    cache = decoder.cache(1, max(contexts) + tokens)
    cache.kv.normal_()
    step = open_step(decoder, cache, greedy=True)
    for context in contexts:
        seconds = [_round(job, step, context, tokens, seed) for seed in range(rounds + 1)][1:]
        yield Decoding(
            model,
            OURS,
            recipe.name,
            context,
            statistics.median(seconds),
            weight_bytes(decoder),
            kv_bytes(decoder.config, context + tokens // 2),
            LAYER_LAUNCHES * decoder.config.layers + OTHER_LAUNCHES,
        )


def _round(job: Job, step: Step, context: int, tokens: int, seed: int) -> float:
    """Seconds per token of generating from another first token after `context` tokens."""
    step.cache.length = context
    token_1 = torch.tensor([1000 + seed], device=job.device) % step.decoder.config.vocab
    return wall_seconds(lambda: read_greedily(step, token_1, tokens), job.device) / tokens
