"""Computes one token through a dense decoder and its head, as one call that several threads enter.

Float32 throughout; only the cache has the decoder's dtype. Each thread computes its share of the
rows of every product and its share of the heads, and what is cheaper to compute twice than to wait
for (norms, the keys that its heads need). The mathematics is `model.py`'s. Arguments named `x`,
`keys`, ... are byte addresses; records are those of `kernel_args.py`.
"""

from __future__ import annotations

import numpy as np

from qconvert.quant.simd.lanes import LANES, splat
from qconvert.quant.simd.products import fused
from qconvert.runtime.cpu.exponential import MISSING, exp, highest_of
from qconvert.runtime.cpu.kernels import multiply_rows
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import (
    float_at,
    floats,
    load_bf16,
    put_float,
    routine,
    store_bf16,
    store_f32,
    total,
)
from qconvert.runtime.cpu.thread_barrier import wait_for_all

_F = np.float32
"""The score of a key that is not there."""


@routine
def step_share(models, layers, threads, rank, size):  # type: ignore[no-untyped-def]
    """Read the token whose embedding lies in the buffer `x`; its logits come to `logits`.

    There is one record of the model, one of each layer, and at least one for each thread.
    """
    model, own = models[0], threads[rank]
    for i in range(len(layers)):
        layer = layers[i]
        _norm(model.x, layer.attention_norm, model.eps, model.hidden, own.normal)
        _attention(model, layer, own, rank, size)
        _norm(model.x, layer.mlp_norm, model.eps, model.hidden, own.normal)
        _mlp(model, layer, own, rank, size)
    _norm(model.x, model.final_norm, model.eps, model.hidden, own.normal)
    start, stop = _share(model.head.rows, rank, size)
    multiply_rows(model.head, own.normal, model.logits, start, stop)


step = SharedKernel(step_share)


@routine
def multiply_share(linears, xs, ys, rows, rank, size):  # type: ignore[no-untyped-def]
    """`y = W x + bias` for several vectors, float32 and contiguous: a thread's share of the rows."""
    linear = linears[0]
    start, stop = _share(linear.rows, rank, size)
    for row in range(rows):
        multiply_rows(linear, xs + 4 * linear.width * row, ys + 4 * linear.rows * row, start, stop)


multiply = SharedKernel(multiply_share)


@routine
def _share(count, rank, size):  # type: ignore[no-untyped-def]
    return count * rank // size, count * (rank + 1) // size


@routine
def _norm(x, weight, eps, width, out):  # type: ignore[no-untyped-def]
    """`x / rms(x) * weight`."""
    squares = splat(_F(0))
    for i in range(0, width, LANES):
        value = floats(x + 4 * i)
        squares = fused(value, value, squares)
    scale = splat(_F(1) / np.sqrt(total(squares) / _F(width) + eps))
    for i in range(0, width, LANES):
        store_f32(out + 4 * i, floats(x + 4 * i) * scale * floats(weight + 4 * i))


@routine
def _add(x, y, start, stop):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        put_float(x + 4 * i, float_at(x + 4 * i) + float_at(y + 4 * i))


@routine
def _attention(model, layer, own, rank, size):  # type: ignore[no-untyped-def]
    y, q_rows, kv_rows = model.qkv, layer.q.rows, layer.k.rows
    start, stop = _share(q_rows, rank, size)
    multiply_rows(layer.q, own.normal, y, start, stop)
    start, stop = _share(kv_rows, rank, size)
    multiply_rows(layer.k, own.normal, y + 4 * q_rows, start, stop)
    multiply_rows(layer.v, own.normal, y + 4 * (q_rows + kv_rows), start, stop)
    wait_for_all(model.arrived, size)
    start, stop = _share(model.heads, rank, size)
    if start < stop:
        _heads(model, layer, own, start, stop)
    wait_for_all(model.arrived, size)
    start, stop = _share(layer.o.rows, rank, size)
    multiply_rows(layer.o, model.mixed, own.normal, start, stop)
    _add(model.x, own.normal, start, stop)
    wait_for_all(model.arrived, size)


@routine
def _heads(model, layer, own, start, stop):  # type: ignore[no-untyped-def]
    """Attention of some heads. Threads that share a key head store the same key, bit for bit."""
    element = 2 if model.bf16_cache else 4
    width, each = 4 * model.head_dim, model.heads // model.kv_heads
    stride = element * model.room * model.head_dim
    here = element * model.position * model.head_dim
    for head in range(start // each, (stop - 1) // each + 1):
        key = model.qkv + width * (model.heads + head)
        value = key + width * model.kv_heads
        _rotated(model, own, key, layer.k_norm)
        _keep(own.rotated, model.head_dim, layer.keys + stride * head + here, model.bf16_cache)
        _keep(value, model.head_dim, layer.values + stride * head + here, model.bf16_cache)
    first = max(0, model.position + 1 - layer.window) if layer.window else 0
    for head in range(start, stop):
        _rotated(model, own, model.qkv + width * head, layer.q_norm)
        skipped = stride * (head // each) + element * first * model.head_dim
        keys, values = layer.keys + skipped, layer.values + skipped
        _mix(model, own, keys, values, model.position + 1 - first, model.mixed + width * head)


@routine
def _rotated(model, own, head, norm):  # type: ignore[no-untyped-def]
    """A head of a query or key, normalised where the model does that, then rotated, to `own.rotated`."""
    width, half, source = model.head_dim, model.head_dim // 2, head
    if norm:
        _norm(head, norm, model.eps, width, own.head)
        source = own.head
    for i in range(width):
        other = float_at(source + 4 * (i + half if i < half else i - half))
        here = float_at(source + 4 * i) * float_at(model.cos + 4 * i)
        put_float(own.rotated + 4 * i, here + other * float_at(model.sin + 4 * i))


@routine
def _keep(source, width, target, bf16_cache):  # type: ignore[no-untyped-def]
    for i in range(0, width, LANES):
        if bf16_cache:
            store_bf16(target + 2 * i, floats(source + 4 * i))
        else:
            store_f32(target + 4 * i, floats(source + 4 * i))


@routine
def _kept(source, i, bf16_cache):  # type: ignore[no-untyped-def]
    if bf16_cache:
        return load_bf16(source + 2 * i)
    return floats(source + 4 * i)


@routine
def _mix(model, own, keys, values, seen, out):  # type: ignore[no-untyped-def]
    """The values weighted by the softmax of `own.rotated` times keys, both [seen, head_dim]."""
    width, bf16_cache, scores = model.head_dim, model.bf16_cache, own.scores
    scale = _F(1) / np.sqrt(_F(width))
    for t in range(seen):
        dot = splat(_F(0))
        for i in range(0, width, LANES):
            dot = fused(_kept(keys, t * width + i, bf16_cache), floats(own.rotated + 4 * i), dot)
        put_float(scores + 4 * t, total(dot) * scale)
    count = (seen + LANES - 1) // LANES * LANES
    for t in range(seen, count):
        put_float(scores + 4 * t, MISSING)
    inverse = _softmax(scores, count)
    for i in range(0, width, LANES):
        mixed = splat(_F(0))
        for t in range(seen):
            weight = splat(float_at(scores + 4 * t))
            mixed = fused(_kept(values, t * width + i, bf16_cache), weight, mixed)
        store_f32(out + 4 * i, mixed * inverse)


@routine
def _softmax(scores, count):  # type: ignore[no-untyped-def]
    """Scores become exponentials; returns one over their sum."""
    most, sum_ = splat(highest_of(scores, count, MISSING)), splat(_F(0))
    for i in range(0, count, LANES):
        weight = exp(floats(scores + 4 * i) - most)
        store_f32(scores + 4 * i, weight)
        sum_ = sum_ + weight
    return _F(1) / total(sum_)


@routine
def _mlp(model, layer, own, rank, size):  # type: ignore[no-untyped-def]
    width, y = model.mlp_width, own.gates
    start, stop = _share(width // LANES, rank, size)
    start, stop = start * LANES, stop * LANES
    multiply_rows(layer.gate, own.normal, y, start, stop)
    multiply_rows(layer.up, own.normal, y + 4 * width, start, stop)
    for i in range(start, stop, LANES):
        gate = floats(y + 4 * i)
        swish = gate / (exp(-gate) + _F(1))
        store_f32(model.inner + 4 * i, swish * floats(y + 4 * (width + i)))
    wait_for_all(model.arrived, size)
    start, stop = _share(layer.down.rows, rank, size)
    multiply_rows(layer.down, model.inner, own.normal, start, stop)
    _add(model.x, own.normal, start, stop)
    wait_for_all(model.arrived, size)
