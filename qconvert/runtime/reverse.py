"""Follows gradients back through a layer: to what its linears give, and to what it reads.

Products keep their kernels and their weights the form they are stored in: autograd is told what a product's
gradient is, and holds neither a float copy of a weight nor, as weights are not trained, its input.
Legend: N rows, I in features, O out features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qconvert.core.statistics import StatisticsKey
from qconvert.runtime.beside import CarryingLayer
from qconvert.runtime.delta_net import DeltaNet
from qconvert.runtime.dense_and_sparse import DenseAndSparse
from qconvert.runtime.latent_attention import LatentAttention
from qconvert.runtime.layer import Attention, Block, Layer, Mixer, Mlp, SparseMlp
from qconvert.runtime.linear import Linear, Weight
from qconvert.runtime.shared_keys import SharingAttention
from qconvert.runtime.storage import SCRATCH_BYTES

GradientObserver = Callable[[StatisticsKey, Tensor], None]
"""Called with the gradient of a linear's outputs, [N, O]; must not change it.

The key is that of an unfused linear, whose rows these are. Of an expert, N are the rows routed to it.
"""


def differentiable(layer: Layer, observer: GradientObserver) -> Layer:
    """The same layer, through which autograd goes, and which shows the gradients of all its linears."""
    traced = replace(
        layer, attention=_traced_mixer(layer.attention, observer), mlp=_traced_block(layer.mlp, observer)
    )
    if not isinstance(traced, CarryingLayer) or traced.own_input is None:
        return traced
    own = traced.own_input
    gate, out = (_traced_one(linear, observer) for linear in (own.gate, own.out))
    return replace(traced, own_input=replace(own, gate=gate, out=out))


def _traced_block(block: Block, observer: GradientObserver) -> Block:
    match block:
        case Mlp():
            return _traced_mlp(block, observer)
        case SparseMlp():
            return _traced_sparse(block, observer)
        case DenseAndSparse():
            dense, sparse = _traced_mlp(block.dense, observer), _traced_sparse(block.sparse, observer)
            return replace(block, dense=dense, sparse=sparse)
    raise TypeError(f"{block} has no gradients")


def _traced_mixer(mixer: Mixer, observer: GradientObserver) -> Mixer:
    match mixer:
        case Attention():
            qkv = _traced(mixer.qkv, mixer.widths, observer)
            return replace(mixer, qkv=qkv, o=_traced_one(mixer.o, observer))
        case SharingAttention():
            reading = _traced(mixer.reading, mixer.widths, observer)
            return replace(mixer, reading=reading, o=_traced_one(mixer.o, observer))
        case LatentAttention():
            return _traced_latent(mixer, observer)
        case DeltaNet():
            widths = [linear.weight.shape[0] for linear in mixer.reading]
            reading = _traced(mixer.reading, widths, observer)
            return replace(mixer, reading=reading, o=_traced_one(mixer.o, observer))
    raise TypeError(f"{mixer} has no gradients")


def _traced_latent(attention: LatentAttention, observer: GradientObserver) -> LatentAttention:
    reading = (attention.q[0], attention.kv_a)
    q, kv_a = _traced(reading, [linear.weight.shape[0] for linear in reading], observer)
    return replace(
        attention,
        q=(q, *(_traced_one(linear, observer) for linear in attention.q[1:])),
        kv_a=kv_a,
        kv_b=_traced_one(attention.kv_b, observer),
        o=_traced_one(attention.o, observer),
    )


def _traced_mlp(mlp: Mlp, observer: GradientObserver) -> Mlp:
    width = mlp.down.weight.shape[1]
    gate_up = _traced(mlp.gate_up, (width, width), observer)
    return replace(mlp, gate_up=gate_up, down=_traced_one(mlp.down, observer))


def _traced_sparse(mlp: SparseMlp, observer: GradientObserver) -> SparseMlp:
    return replace(
        mlp,
        router=_traced_one(mlp.router, observer),
        experts=tuple(_traced_mlp(expert, observer) for expert in mlp.experts),
        shared=_traced_mlp(mlp.shared, observer) if mlp.shared else None,
        shared_gate=_traced_one(mlp.shared_gate, observer) if mlp.shared_gate else None,
    )


def _traced_one(linear: Linear, observer: GradientObserver) -> Linear:
    return _traced((linear,), (linear.weight.shape[0],), observer)[0]


def _traced(parts: Sequence[Linear], widths: Sequence[int], observer: GradientObserver) -> tuple[Linear, ...]:
    """Linears of one input, stored apart or stacked; `widths` are the rows of each role."""
    tap = parts[0].tap
    assert tap is not None, "linears are loaded with the names of their inputs"
    keys = [StatisticsKey(role, tap.key.layer, tap.key.expert) for role in tap.key.roles]
    named = list(zip(keys, widths, strict=True))
    shares = [named] if len(parts) == 1 else [[one] for one in named]
    return tuple(
        TracedLinear(part.weight, part.bias_O, part.tap, show=_split(share, observer))
        for part, share in zip(parts, shares, strict=True)
    )


def _split(
    members: Sequence[tuple[StatisticsKey, int]], observer: GradientObserver
) -> Callable[[Tensor], None]:
    """What shows the observer the gradients of stacked linears one by one, each of that many rows."""

    def show(g_NO: Tensor) -> None:
        parts = g_NO.split_with_sizes([rows for _, rows in members], dim=-1)
        for (key, _), part_NO in zip(members, parts, strict=True):
            observer(key, part_NO)

    return show


@dataclass(frozen=True, slots=True)
class TracedLinear(Linear):
    """A linear that autograd goes through; `show` is called with the gradient of its outputs, [N, O]."""

    show: Callable[[Tensor], None] = field(kw_only=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] in the dtype of x."""
        if self.tap is not None and self.tap.observers:
            self.tap.show(x)
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """`x W^T + b` by the weight's own kernels; backwards `g W`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: TracedLinear) -> Tensor:
        ctx.linear = linear
        return linear.weight.multiply(x.detach(), linear.bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (g,) = gradients
        g_NO = g.reshape(-1, g.shape[-1])
        ctx.linear.show(g_NO)
        return multiply_transposed(g_NO, ctx.linear.weight).view(*g.shape[:-1], -1), None


def multiply_transposed(g_NO: Tensor, weight: Weight) -> Tensor:
    """`g W`, [N, I] in the dtype of g, a bounded block of decoded rows at a time."""
    out, width = weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width))
    y_NI = g_NO.new_zeros(len(g_NO), width)
    for start in range(0, out, rows):
        block = slice(start, min(start + rows, out))
        y_NI.addmm_(g_NO[:, block], weight.rows(block).to(g_NO.dtype))
    return y_NI
