"""Every kernel against its reference on random data, before anything is timed.

Outputs are poisoned before each run, so that what was not written shows; three runs must give the same
bits. Errors are ||result - reference|| / ||reference||, the reference in float64 or, for what is not a
product, the torch function in float32 that defines the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from evals.gpu.comparing import distance, repeated
from evals.gpu.job import Job, attempt
from evals.gpu.model_checks import check_model
from evals.gpu.models import FORMS, QUANTIZED, RECIPES, dense
from evals.gpu.peer_kernels import KERNEL_PEERS, Peer
from evals.gpu.rows import Check, Note, Row
from qconvert.runtime.cuda.dequantize import dequantize
from qconvert.runtime.cuda.matmul import multiply_partials
from qconvert.runtime.cuda.packing import MmaInt4, MmaInt8
from qconvert.runtime.cuda.tiles import sums_for
from qconvert.runtime.linear import Table
from qconvert.runtime.scoring import score_hidden
from qconvert.runtime.storage import DenseWeight

FLOAT32_LIMIT = 1e-3
"""Sums in float32 of exact bfloat16 products come far under it, a wrong or missing element far above."""
ROUNDED_LIMIT = 5e-3
"""One rounding to bfloat16, 2^-9 of each element at most, and room for a sum of another order."""
SCORE_LIMIT = 1e-3
"""Logits are summed in float32; losses and divergences are differences of numbers of their size."""
SHAPES = ((37888, 3584), (3584, 18944), (4608, 3584), (896, 896), (1152, 896), (2048, 1536))
"""gate_up, down and qkv of Qwen2.5-7B, o and qkv of 0.5B, qkv of 1.5B: both ends of every side."""
DRY_SHAPES = ((128, 256),)
ROWS_AND_SPLITS = ((1, 1), (1, 4), (3, 2), (16, 8), (33, 1), (64, 4))


def measure(job: Job) -> Iterator[Row]:
    """Products, dequantizing, the kernels of peers, then whole models: what compiles longest comes last."""
    shapes = DRY_SHAPES if job.dry else SHAPES
    for encoding in FORMS:
        for shape in shapes:
            yield from attempt(job, f"product {encoding} {shape}", partial(_products, job, encoding, shape))
            if encoding in QUANTIZED:
                yield from attempt(
                    job, f"dequantize {encoding} {shape}", partial(_dequantized, job, encoding, shape)
                )
    yield from attempt(job, "scores", partial(_scores, job))
    for peer in KERNEL_PEERS:
        if peer.here():
            yield from attempt(job, peer.subject, partial(_peer, job, peer, shapes[-1]))
        else:
            yield Note(f"{peer.via}: not installed")
    for model in ("qwen3-8b",) if job.dry else ("qwen3-8b", "qwen2.5-1.5b"):
        for recipe in RECIPES:
            yield from attempt(job, f"{recipe.name} {model}", partial(check_model, job, model, recipe))


def _products(job: Job, encoding: str, shape: tuple[int, int]) -> Iterator[Row]:
    (weight,) = job.maker.weights(encoding, *shape, copies=1)
    w_NK = dense(weight, torch.float64)
    for rows, splits in ROWS_AND_SPLITS[2:3] if job.dry else ROWS_AND_SPLITS:
        x_MK = job.maker.normal(rows, shape[1])
        sums = sums_for(x_MK, weight)
        out = torch.empty(splits, rows, shape[0], device=job.device)

        def run(x_MK: Tensor = x_MK, sums: Tensor | None = sums, out: Tensor = out) -> Tensor:
            out.fill_(torch.nan)
            return multiply_partials(x_MK, sums, weight, len(out), out)

        parts, stable = repeated(job, run)
        error = distance(parts.double().sum(0), x_MK.double() @ w_NK.T)
        case = f"{shape[0]} x {shape[1]}, {rows} rows, {splits} splits"
        yield Check(f"product {encoding}", case, error, FLOAT32_LIMIT, stable)


def _dequantized(job: Job, encoding: str, shape: tuple[int, int]) -> Iterator[Row]:
    (weight,) = job.maker.weights(encoding, *shape, copies=1)
    assert isinstance(weight, MmaInt4 | MmaInt8)
    out = torch.empty(shape, dtype=torch.bfloat16, device=job.device)

    def run() -> Tensor:
        out.fill_(torch.nan)
        return dequantize(weight, out_RK=out)

    result, stable = repeated(job, run)
    error = distance(result, dense(weight, torch.float64))
    yield Check(f"dequantize {encoding}", f"{shape[0]} x {shape[1]}", error, ROUNDED_LIMIT, stable)


def _scores(job: Job) -> Iterator[Row]:
    """Losses and divergences of two heads on hidden states near each other, against float64 logits."""
    count, width, vocab = (5, 128, 256) if job.dry else (300, 3584, 152064)
    h_ND, targets_N = job.maker.normal(count, width), torch.randint(vocab, (count,), device=job.device)
    heads = [job.maker.normal(vocab, width, deviation=3 * width**-0.5) for _ in range(2)]
    heads[1] = heads[0] + 0.1 * heads[1]
    logs = [(h_ND.double() @ head.double().T).log_softmax(-1) for head in heads]
    nll_N = -logs[1].gather(1, targets_N[:, None])[:, 0]
    kl_N = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    models: list[tuple[Tensor, Table]] = [(h_ND, DenseWeight(head)) for head in heads]

    def run() -> Tensor:
        scores = score_hidden(models, targets_N)[1]
        assert scores.kl_N is not None
        return torch.stack((scores.nll_N, scores.kl_N, scores.top_N.double()))

    found, stable = repeated(job, run)
    case = f"{count} tokens, {vocab} x {width}"
    yield Check("scores", f"losses of {case}", distance(found[0], nll_N), SCORE_LIMIT, stable)
    yield Check("scores", f"divergences of {case}", distance(found[1], kl_N), SCORE_LIMIT, stable)
    wrong = float((found[2] != logs[1].argmax(-1)).double().mean())
    yield Check("scores", f"likeliest of {case}", wrong, 1 / count, stable)


def _peer(job: Job, peer: Peer, shape: tuple[int, int]) -> Iterator[Row]:
    call = peer.make(job.maker, shape)
    x_MK = job.maker.normal(1, shape[1])
    result, stable = repeated(job, lambda: call.multiply(x_MK))
    error = distance(result, x_MK.double() @ call.dense_NK().double().T)
    yield Check(peer.subject, f"{shape[0]} x {shape[1]}, 1 row", error, 2 * ROUNDED_LIMIT, stable)
