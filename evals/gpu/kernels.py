"""Matmul kernels over all shapes, splits and rows, beside their peers; and where dequantizing wins.

`products` times every shape of the Qwen models; `crossings` sweeps the rows of x.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from evals.gpu.ceilings import l2_bytes
from evals.gpu.clock import Call, time_calls
from evals.gpu.job import Job, attempt
from evals.gpu.models import FORMS, MODELS, QUANTIZED, config_of, linear_shapes, named_shapes
from evals.gpu.peer_kernels import KERNEL_PEERS, Peer, PeerCall
from evals.gpu.rows import OURS, Crossing, Product, Row
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cuda.dequantize import multiply_many
from qconvert.runtime.cuda.matmul import multiply, multiply_partials
from qconvert.runtime.cuda.reference import FewRowWeight
from qconvert.runtime.cuda.tiles import TILE, sums_for

SPLITS = (1, 2, 4, 8)
ROWS = (1, 16, 64, 4)
SWEEP = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
MOST_FEW = 256
"""Rows beyond which the few-row kernel, 64 at a time, has long lost."""
L2_MULTIPLE = 3
"""Weights in rotation are that many times the cache, so that none is still there when its turn comes."""

Shape = tuple[int, int]


def products(job: Job) -> Iterator[Row]:
    """One row of x first, over everything: what decoding is made of."""
    encodings = [encoding for encoding in FORMS if job.passed(f"product {encoding}")]
    yield from job.unsound(f"product {encoding}" for encoding in FORMS)
    shapes, loose = named_shapes(MODELS), set[str]()
    if job.dry:
        shapes = dict(list(named_shapes(MODELS, tiny=True).items())[-1:])
    for rows in ROWS[:1] if job.dry else ROWS:
        for shape, name in shapes.items():
            for encoding in encodings:
                yield from attempt(job, f"{encoding} {name}", partial(_ours, job, encoding, shape, rows))
            for peer in KERNEL_PEERS:
                what = f"{peer.via} {peer.encoding} {name}"
                yield from attempt(job, what, partial(_peer, job, peer, shape, rows, loose))


def _copies(job: Job, nbytes: float) -> int:
    return 1 + int(L2_MULTIPLE * l2_bytes(job.device) / nbytes)


def _ours(job: Job, encoding: str, shape: Shape, rows: int) -> Iterator[Row]:
    weights = _rotation(job, encoding, shape)
    x_MK = job.maker.normal(rows, shape[1])
    sums = sums_for(x_MK, weights[0])
    for splits in SPLITS:
        if splits > -(-shape[1] // TILE):
            return
        out = torch.empty(splits, rows, shape[0], device=job.device)
        calls: list[Call] = [partial(multiply_partials, x_MK, sums, w, splits, out) for w in weights]
        timing = time_calls(calls, job.device)
        yield Product(OURS, encoding, *shape, rows, splits, timing.seconds, weights[0].nbytes, timing.graphed)


def _rotation(job: Job, encoding: str, shape: Shape) -> list[FewRowWeight]:
    (one,) = job.maker.weights(encoding, *shape, copies=1)
    more = _copies(job, one.nbytes)
    del one
    return job.maker.weights(encoding, *shape, copies=more)


def _peer(job: Job, peer: Peer, shape: Shape, rows: int, loose: set[str]) -> Iterator[Row]:
    if not peer.here() or not job.passed(peer.subject):
        return
    made: list[PeerCall] = [peer.make(job.maker, shape)]
    while len(made) < _copies(job, made[0].nbytes):
        made.append(peer.make(job.maker, shape))
    x_MK = job.maker.normal(rows, shape[1])
    calls: list[Call] = [partial(each.multiply, x_MK) for each in made]
    graphed = peer.via not in loose
    try:
        timing = time_calls(calls, job.device, graphed=graphed)
    except RuntimeError:
        if not graphed:
            raise
        loose.add(peer.via)  # what cannot be captured is not tried again, but launched one by one
        timing = time_calls(calls, job.device, graphed=False)
    yield Product(peer.via, peer.encoding, *shape, rows, None, timing.seconds, made[0].nbytes, timing.graphed)


def crossings(job: Job) -> Iterator[Row]:
    """Both ways to multiply at every number of rows, on the shapes that take the most time."""
    encodings = [
        encoding
        for encoding in QUANTIZED
        if job.passed(f"product {encoding}") and job.passed(f"dequantize {encoding}")
    ]
    models = MODELS[:1] if job.dry else ("qwen2.5-7b", "qwen2.5-1.5b", "qwen3-8b")
    for model in models:
        found = linear_shapes(DecoderConfig.from_hf(config_of(model, tiny=job.dry)))
        for role in ("down",) if job.dry else ("gate_up", "down", "qkv", "o"):
            for encoding in encodings:
                what = f"crossing {encoding} {model} {role}"
                yield from attempt(job, what, partial(_crossing, job, encoding, found[role]))


def _crossing(job: Job, encoding: str, shape: Shape) -> Iterator[Row]:
    weights = _rotation(job, encoding, shape)
    for rows in SWEEP[:5:4] if job.dry else SWEEP:
        x_MK = job.maker.normal(rows, shape[1])
        many: list[Call] = [partial(multiply_many, x_MK, weight, None) for weight in weights]
        few: list[Call] = [partial(multiply, x_MK, weight, None) for weight in weights]
        few_seconds = time_calls(few, job.device, rounds=5).seconds if rows <= MOST_FEW else None
        many_seconds = time_calls(many, job.device, rounds=5).seconds
        yield Crossing(encoding, *shape, rows, few_seconds, many_seconds)
