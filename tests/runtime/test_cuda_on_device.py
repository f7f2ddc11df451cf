"""The kernels on a real GPU against their references: numbers, every element written, the same bits again.

Skipped where torch finds no CUDA device. With TRITON_INTERPRET=1 the same tests run on a CPU at small
sizes, so that what is here is known to run before a device is there.
Legend: T tokens, V vocabulary, N tokens with a loss, M rows of x, K in features.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evals.random_models import (
    BF16,
    FORMS,
    INT4,
    INT4_HEAD8,
    INT8,
    QUANTIZED,
    Maker,
    Recipe,
    config_of,
    dense,
    make_decoder,
)
from qconvert.evaluate.lockstep import EvalModel, Track, run_lockstep
from qconvert.evaluate.protocols import protocol_named
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.layer import Layer, Mlp
from qconvert.runtime.linear import Linear
from qconvert.runtime.model import Decoder
from qconvert.runtime.norm import Norm
from qconvert.runtime.scoring import score_hidden
from qconvert.runtime.storage import DenseWeight

DRY = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if DRY else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DRY and os.environ.get("TRITON_INTERPRET") != "1", reason="torch finds no CUDA device"
    ),
]

SHAPES = [(128, 256)] if DRY else [(37888, 3584), (3584, 18944), (4608, 3584), (896, 896), (1152, 896)]
"""gate_up, down and qkv of Qwen2.5-7B, o and qkv of 0.5B: both ends of every side."""
ROWS_AND_SPLITS = [(3, 2)] if DRY else [(1, 1), (1, 4), (3, 2), (16, 8), (33, 1), (64, 4)]
TOKENS = 12 if DRY else 150
"""On a device, into a third block of the positions that attention reads at a time."""
FLOAT32_LIMIT = 1e-3
"""Sums in float32 of exact bfloat16 products come far under it, a wrong or missing element far above."""
ROUNDED_LIMIT = 5e-3
"""One rounding to bfloat16, 2^-9 of each element at most, and room for a sum of another order."""


def distance(result: Tensor, want: Tensor) -> float:
    """||result - want|| / ||want||, in float64; infinite where the result holds a NaN."""
    found = float((result.double() - want.double()).norm() / want.double().norm())
    return math.inf if math.isnan(found) else found


def stable(run: Callable[[], Tensor]) -> Tensor:
    """The result of a call that gives the same bits three times."""
    results = [run().clone() for _ in range(2 if DRY else 3)]
    assert all(torch.equal(result, results[0]) for result in results), "not the same bits again"
    return results[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, shape: tuple[int, int]) -> None:
    """Against float64, in outputs that are full of NaN before."""
    from qconvert.runtime.cuda.matmul import multiply_partials
    from qconvert.runtime.cuda.tiles import sums_for
    from tests.support.cuda_reference import multiply_partials as reference

    maker = Maker(DEVICE)
    (weight,) = maker.weights(form, *shape, copies=1)
    w_NK = dense(weight, torch.float64)
    for rows, splits in ROWS_AND_SPLITS:
        x_MK = maker.normal(rows, shape[1])
        sums, out = sums_for(x_MK, weight), torch.empty(splits, rows, shape[0], device=DEVICE)
        parts = stable(
            lambda x=x_MK, s=sums, o=out: multiply_partials(x, s, weight, len(o), o.fill_(math.nan))
        )
        assert distance(parts.double().sum(0), x_MK.double() @ w_NK.T) <= FLOAT32_LIMIT, (rows, splits)
        assert distance(parts, reference(x_MK, sums, weight, splits)) <= FLOAT32_LIMIT, (rows, splits)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", QUANTIZED)
def test_dequantizing(form: str, shape: tuple[int, int]) -> None:
    from qconvert.runtime.cuda.dequantize import dequantize

    (weight,) = Maker(DEVICE).weights(form, *shape, copies=1)
    assert not isinstance(weight, DenseWeight)
    out = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    result = stable(lambda: dequantize(weight, out_RK=out.fill_(math.nan)))
    assert distance(result, dense(weight, torch.float64)) <= ROUNDED_LIMIT


def test_scores() -> None:
    """Losses and divergences of two heads on hidden states near each other, against float64 logits."""
    count, width, vocab = (5, 128, 256) if DRY else (300, 3584, 152064)
    maker = Maker(DEVICE)
    h_ND, targets_N = maker.normal(count, width), torch.randint(vocab, (count,), device=DEVICE)
    first, other = (maker.normal(vocab, width, deviation=3 * width**-0.5) for _ in range(2))
    heads = [first, first + 0.1 * other]
    logs = [(h_ND.double() @ head.double().T).log_softmax(-1) for head in heads]

    def run() -> Tensor:
        scores = score_hidden([(h_ND, DenseWeight(head)) for head in heads], targets_N)[1]
        assert scores.kl_N is not None
        return torch.stack((scores.nll_N, scores.kl_N, scores.top_N.double()))

    nll_N, kl_N, top_N = stable(run)
    assert distance(nll_N, -logs[1].gather(1, targets_N[:, None])[:, 0]) <= FLOAT32_LIMIT
    assert distance(kl_N, (logs[0].exp() * (logs[0] - logs[1])).sum(-1)) <= FLOAT32_LIMIT
    assert int((top_N != logs[1].argmax(-1)).sum()) <= 1


def twin(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """The same weights, dequantized to `dtype`, in the decoder of plain torch that defines the numbers."""

    def vector(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype)

    def linear(part: Linear) -> Linear:
        return Linear(DenseWeight(dense(part.weight, dtype)), vector(part.bias_O))

    def norm(part: Norm) -> Norm:
        return Norm(part.weight.to(dtype), part.eps)

    def layer(part: Layer) -> Layer:
        assert isinstance(part.mlp, Mlp)
        a = part.attention
        attention = replace(
            a,
            qkv=[linear(x) for x in a.qkv],
            o=linear(a.o),
            q_norm=a.q_norm and norm(a.q_norm),
            k_norm=a.k_norm and norm(a.k_norm),
        )
        mlp = Mlp([linear(x) for x in part.mlp.gate_up], linear(part.mlp.down))
        return Layer(norm(part.attention_norm), attention, norm(part.mlp_norm), mlp)

    return replace(
        decoder,
        dtype=dtype,
        layout=Layout.REFERENCE,
        embed=DenseWeight(dense(decoder.embed, dtype)),
        layers=tuple(map(layer, decoder.layers)),
        norm=norm(decoder.norm),
        head=DenseWeight(dense(decoder.head, dtype)),
    )


_RECIPES = (INT4, BF16, INT4_HEAD8, INT8)
# Without a device, every recipe and every model twice, not every pair.
_PAIRS = [
    (recipe, model)
    for i, recipe in enumerate(_RECIPES)
    for j, model in enumerate(("qwen3-8b", "qwen2.5-1.5b"))
    if not DRY or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("recipe", "model"), _PAIRS, ids=[f"{each.name}-{model}" for each, model in _PAIRS])
def test_two_layers_read_and_step_as_the_decoder_that_defines_them(model: str, recipe: Recipe) -> None:
    """Logits read at once, losses of an evaluation, and a step for every token from a cache full of NaN.

    Rounding to bfloat16 along the way is allowed, and its size depends on the weights: the limit is what
    plain torch makes of them in bfloat16, and half as far again. Triton's interpreter truncates where a
    device rounds, which is twice as far on average.
    """
    from qconvert.runtime.cuda.decode_step import open_step, read

    decoder = make_decoder(config_of(model, tiny=DRY, layers=2), recipe, Maker(DEVICE))
    text_T = torch.randint(decoder.config.vocab, (TOKENS,), device=DEVICE)
    want_TV, near_TV = (
        each.logits(each.hidden(text_T[None]))[0]
        for each in (twin(decoder, torch.float32), twin(decoder, torch.bfloat16))
    )
    factor = 3.0 if DRY else 1.5

    got_TV = stable(lambda: decoder.logits(decoder.hidden(text_T[None]))[0])
    assert distance(got_TV, want_TV) <= factor * distance(near_TV, want_TV)

    losses = [_losses(x_TV, text_T) for x_TV in (want_TV, near_TV)]
    got_N = stable(lambda: _evaluated(decoder, text_T)).to(DEVICE)
    mean = losses[0].mean()  # most of a loss, and no test of what differs
    assert distance(got_N - mean, losses[0] - mean) <= factor * distance(losses[1] - mean, losses[0] - mean)

    steps = 4 if DRY else TOKENS
    cache = decoder.cache(1, steps)
    step = open_step(decoder, cache)

    def stepped() -> Tensor:
        cache.kv.fill_(math.nan)
        cache.length = 0
        return torch.stack([read(step, token_1)[0].clone() for token_1 in text_T[:steps, None]])

    got_TV = stable(stepped)
    assert distance(got_TV, want_TV[:steps]) <= factor * distance(near_TV[:steps], want_TV[:steps])


def _losses(logits_TV: Tensor, text_T: Tensor) -> Tensor:
    return -logits_TV[:-1].double().log_softmax(-1).gather(1, text_T[1:, None])[:, 0]


def _evaluated(decoder: Decoder, text_T: Tensor) -> Tensor:
    """Losses as an evaluation makes them: all of a window but the first."""
    track, ids_N = Track(EvalModel("random", decoder, 0, 0.0)), text_T.cpu().numpy()
    windows: Any = protocol_named("gptq2048", len(ids_N)).windows(len(ids_N))
    run_lockstep([track], ids_N, windows, compared=False)
    return torch.from_numpy(np.concatenate(track.nll))
