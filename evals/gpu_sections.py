"""Measures the kernels, decoding and reading of the decoder on a GPU, and its peers: a function a section."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from evals.bench import MICRO, TERA, Bench
from evals.peer_gpu import KERNEL_PEERS, Peer, PeerModel
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
    kv_bytes,
    linear_shapes,
    make_decoder,
    named_shapes,
    read_flops,
    weight_bytes,
)
from qconvert.evaluate.lockstep import EvalModel, Track, run_lockstep
from qconvert.evaluate.protocols import protocol_named
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cuda.decode_step import open_step, read_greedily
from qconvert.runtime.cuda.dequantize import multiply_many
from qconvert.runtime.cuda.matmul import multiply, multiply_partials
from qconvert.runtime.cuda.packing import FewRowWeight, MmaWeight
from qconvert.runtime.cuda.tiles import sums_for

OURS = "qconvert"
MODELS = ("qwen2.5-7b", "qwen2.5-1.5b", "qwen3-8b")
ROWS, SPLITS = (1, 16, 64), (1, 2, 4, 8)
SWEEP = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
CONTEXTS, TOKENS, ROUNDS = (0, 2048), 64, 5
WINDOW, WINDOWS = 2048, 16
WIKITEXT_TOKENS = 299_078
"""Of the test set of wikitext-2, in Qwen's tokens."""
PRODUCT_LIMIT, PEER_LIMIT = 1e-3, 1e-2
"""||result - definition|| / ||definition||: sums in float32 of exact products, and results in bfloat16."""
LAYER_LAUNCHES, OTHER_LAUNCHES = 9, 6
"""Kernels of a step: norm, qkv, attend, combine, o, norm, gate_up, swiglu, down in each layer; embedding row
and its conversion, last norm, head, position, argmax."""


def kernels(bench: Bench) -> None:
    """Every linear shape by form, rows of x and splits, beside the matmuls of other libraries."""
    shapes = named_shapes(MODELS[:1] if bench.dry else MODELS, tiny=bench.dry)
    for rows in ROWS[:1] if bench.dry else ROWS:
        for shape, name in list(shapes.items())[: 2 if bench.dry else None]:
            for form in FORMS:
                bench.attempt(f"{form} {name}", partial(_product, bench, name, form, shape, rows))
            for peer in KERNEL_PEERS:
                if peer.here():
                    bench.attempt(
                        f"{peer.via} {name}", partial(_peer_product, bench, name, peer, shape, rows)
                    )


def _rotation(bench: Bench, form: str, shape: tuple[int, int]) -> list[FewRowWeight]:
    (one,) = Maker(bench.device).weights(form, *shape, copies=1)
    return Maker(bench.device).weights(form, *shape, copies=bench.copies(one.nbytes))


def _product(bench: Bench, name: str, form: str, shape: tuple[int, int], rows: int) -> None:
    weights, x_MK = _rotation(bench, form, shape), Maker(bench.device).normal(rows, shape[1])
    sums = sums_for(x_MK, weights[0])
    want = x_MK.double() @ dense(weights[0], torch.float64).T
    for splits in (s for s in SPLITS if s <= -(-shape[1] // 128)):
        out = torch.full((splits, rows, shape[0]), math.nan, device=bench.device)
        error = _distance(multiply_partials(x_MK, sums, weights[0], splits, out).double().sum(0), want)
        calls = [partial(multiply_partials, x_MK, sums, weight, splits, out) for weight in weights]
        seconds = bench.seconds(calls) if error <= PRODUCT_LIMIT else None
        what = {"product": name, "via": f"{OURS} {form}", "shape": f"{shape[0]} x {shape[1]}"}
        _add_product(bench, {**what, "rows": rows, "splits": splits}, error, seconds, weights[0].nbytes)


def _peer_product(bench: Bench, name: str, peer: Peer, shape: tuple[int, int], rows: int) -> None:
    maker = Maker(bench.device)
    made = [peer.make(maker, shape)]
    made += [peer.make(maker, shape) for _ in range(bench.copies(made[0].nbytes) - 1)]
    x_MK = maker.normal(rows, shape[1])
    error = _distance(made[0].multiply(x_MK), x_MK.double() @ made[0].dense_NK().double().T)
    calls = [partial(each.multiply, x_MK) for each in made]
    seconds = None
    if error <= PEER_LIMIT:
        try:
            seconds = bench.seconds(calls)
        except RuntimeError:  # cannot be captured in a graph
            seconds = bench.seconds(calls, graphed=False)
    what = {"product": name, "via": f"{peer.via} {peer.encoding}", "shape": f"{shape[0]} x {shape[1]}"}
    _add_product(bench, {**what, "rows": rows, "splits": None}, error, seconds, made[0].nbytes)


def _add_product(
    bench: Bench, what: dict[str, object], error: float, seconds: float | None, nbytes: int
) -> None:
    us = "WRONG" if seconds is None else seconds / MICRO
    of_copy = nbytes / seconds / bench.ceilings["copy"] if seconds else None
    bench.add(**what, error=error, us=us, of_copy=of_copy)


def crossings(bench: Bench) -> None:
    """The few-row kernel against dequantizing and multiplying, by rows of x."""
    for model in MODELS[:1] if bench.dry else MODELS:
        shapes = linear_shapes(DecoderConfig.from_hf(config_of(model, tiny=bench.dry)))
        for role in ("gate_up", "down", "qkv", "o"):
            for form in QUANTIZED:
                what = f"{model} {role}"
                bench.attempt(f"{form} {what}", partial(_crossing, bench, what, form, shapes[role]))


def _crossing(bench: Bench, what: str, form: str, shape: tuple[int, int]) -> None:
    weights = [w for w in _rotation(bench, form, shape) if isinstance(w, MmaWeight)]
    for rows in SWEEP[:5:4] if bench.dry else SWEEP:
        x_MK = Maker(bench.device).normal(rows, shape[1])
        error = _distance(multiply(x_MK, weights[0], None), multiply_many(x_MK, weights[0], None))
        few, many = (
            bench.seconds([partial(way, x_MK, weight, None) for weight in weights]) / MICRO
            for way in (multiply, multiply_many)
        )
        ahead = "kernel" if few <= many else "dequantize"
        record = {"product": what, "form": form, "rows": rows, "apart": error}
        bench.add(**record, kernel_us=few, dequantize_us=many, ahead=ahead)


def decode(bench: Bench) -> None:
    """Generate at batch 1, one captured step per token, against bytes / copy and a launch per kernel."""
    for recipe in (INT4, BF16, INT4_HEAD8, INT8):
        for model in MODELS[1:2] if bench.dry else (*MODELS, "qwen2.5-0.5b"):
            bench.attempt(f"{model} {recipe.name}", partial(_decode, bench, model, recipe))


def _decode(bench: Bench, model: str, recipe: Recipe) -> None:
    tokens, contexts, rounds = (2, (0, 5), 1) if bench.dry else (TOKENS, CONTEXTS, 1 + ROUNDS)
    decoder = make_decoder(config_of(model, tiny=bench.dry), recipe, Maker(bench.device))
    cache = decoder.cache(1, max(contexts) + tokens)
    cache.kv.normal_()
    step = open_step(decoder, cache, greedy=True)

    def generate(context: int, seed: int) -> float:
        cache.length = context
        token_1 = torch.tensor([1000 + seed], device=bench.device) % decoder.config.vocab
        return bench.wall(lambda: read_greedily(step, token_1, tokens)) / tokens

    launches = LAYER_LAUNCHES * decoder.config.layers + OTHER_LAUNCHES
    for context in contexts:
        seconds = statistics.median([generate(context, seed) for seed in range(rounds)][-ROUNDS:])
        nbytes = weight_bytes(decoder) + kv_bytes(decoder.config, context + tokens // 2)
        _add_decoding(bench, model, f"{OURS} {recipe.name}", context, seconds, nbytes, launches)


def _add_decoding(
    bench: Bench, model: str, via: str, context: int, seconds: float, nbytes: int, launches: int
) -> None:
    floor = nbytes / bench.ceilings["copy"] + launches * bench.ceilings["launch"]
    bench.add(
        model=model,
        via=via,
        context=context,
        tokens_per_s=1 / seconds,
        us=seconds / MICRO,
        MB_per_token=nbytes / 1e6,
        launches=launches or None,
        floor_us=floor / MICRO,
        of_floor=floor / seconds,
    )


def reading(bench: Bench) -> None:
    """Read random tokens in windows of 2048 to their losses, through the code of `eval perplexity`."""
    for recipe in (INT4, BF16, INT8):
        for model in MODELS[:1] if bench.dry else ("qwen3-8b", "qwen2.5-7b"):
            bench.attempt(f"{model} {recipe.name}", partial(_read, bench, model, recipe))


def _read(bench: Bench, model: str, recipe: Recipe) -> None:
    window, windows = (8, 2) if bench.dry else (WINDOW, WINDOWS)
    decoder = make_decoder(config_of(model, tiny=bench.dry), recipe, Maker(bench.device))
    ids_N = np.random.default_rng(0).integers(decoder.config.vocab, size=window * windows)
    places = protocol_named("gptq2048", window).windows(len(ids_N))

    def read() -> None:
        track = Track(EvalModel("random", decoder, 0, 0.0))
        run_lockstep([track], ids_N, places, compared=False)

    # The first compiles kernels and takes the memory.
    seconds = min(bench.wall(read) for _ in range(1 if bench.dry else 3))
    _add_reading(bench, model, f"{OURS} {recipe.name}", seconds, len(ids_N), window)


def _add_reading(bench: Bench, model: str, via: str, seconds: float, tokens: int, window: int) -> None:
    rate = read_flops(DecoderConfig.from_hf(config_of(model, tiny=bench.dry)), tokens, window) / seconds
    bench.add(
        model=model,
        via=via,
        tokens_per_s=tokens / seconds,
        TFLOPs=rate / TERA,
        of_matmul=rate / bench.ceilings["matmul"],
        wikitext2_s=seconds * WIKITEXT_TOKENS / tokens,
    )


def peers(bench: Bench) -> None:
    """Models of transformers, in bfloat16 and in bitsandbytes' NF4: decoding and reading."""
    for form, package in (("bf16", "transformers"), ("nf4", "bitsandbytes")):
        if find_spec("transformers") is None or find_spec(package) is None:
            bench.add(note=f"{package}: not installed")
            continue
        for model in MODELS[1:2] if bench.dry else MODELS:
            bench.attempt(f"{package} {model}", partial(_peer_model, bench, model, form))


def _peer_model(bench: Bench, model: str, form: str) -> None:
    tokens, contexts, window = (2, (0, 5), 8) if bench.dry else (TOKENS // 2, CONTEXTS, WINDOW)
    rounds = 1 if bench.dry else 4
    config = config_of(model, tiny=bench.dry)
    peer = PeerModel(config, max(contexts) + tokens, bench.device, nf4=form == "nf4")
    steps: dict[str, Callable[[], object]] = {"eager": peer.step}
    if bench.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            peer.step()
        steps["CUDA graph"] = graph.replay

    def generate(step: Callable[[], object], context: int) -> float:
        peer.restart(context)
        return bench.wall(lambda: [step() for _ in range(tokens)]) / tokens

    for context in contexts:
        nbytes = peer.nbytes + kv_bytes(DecoderConfig.from_hf(config), context + tokens // 2)
        for way, step in steps.items():
            seconds = statistics.median([generate(step, context) for _ in range(rounds)][-3:])
            _add_decoding(bench, model, f"transformers {form}, {way}", context, seconds, nbytes, 0)
    if form == "bf16":
        ids_BT = torch.randint(config["vocab_size"], (2, window), device=bench.device)
        seconds = min(bench.wall(lambda: peer.read(ids_BT)) for _ in range(min(rounds, 3)))
        _add_reading(bench, model, "transformers bf16", seconds, ids_BT.numel(), window)


def _distance(result: Tensor, want: Tensor) -> float:
    """||result - want|| / ||want||, in float64; NaN where the result holds one."""
    return float((result.double() - want.double()).norm() / want.double().norm())
