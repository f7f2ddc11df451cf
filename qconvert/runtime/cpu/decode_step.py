"""Runs the decode step of a dense decoder on the CPU: fills the kernel arguments and calls the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qconvert.core.activations import INT8_GROUPS, InputQuantization
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime.cpu.kernel_args import LAYER, MODEL, THREAD
from qconvert.runtime.cpu.packed_weights import PackedGrid
from qconvert.runtime.cpu.step_kernel import step
from qconvert.runtime.rope import cos_sin
from qconvert.runtime.storage import DenseWeight

if TYPE_CHECKING:
    from qconvert.runtime.cache import Cache
    from qconvert.runtime.layer import Layer
    from qconvert.runtime.linear import Linear
    from qconvert.runtime.model import Decoder
    from qconvert.runtime.norm import Norm


_READABLE = PackedGrid | DenseWeight
"""What the kernels multiply by."""


class CpuStep:
    """Reads one token of one sequence: `step(token, cache)` gives the logits, float32 [V].

    Threads are as many as torch uses at the time of the first step of a cache.
    """

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self._decoder = decoder
        self._alive: list[object] = []
        self._layers = np.concatenate([self._layer(layer) for layer in decoder.layers])
        self._model = np.zeros(1, MODEL)
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        width = max(layer.plain_mlp.down.weight.shape[1] for layer in decoder.layers)
        sizes = {
            "x": config.hidden,
            "qkv": (heads + 2 * kv_heads) * head_dim,
            "mixed": heads * head_dim,
            "inner": width,
            "logits": config.vocab,
        }
        self._buffers = {name: _zeros(size) for name, size in sizes.items()}
        for name, buffer in self._buffers.items():
            self._model[name] = buffer.ctypes.data
        for name, size in (
            ("hidden", config.hidden),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("mlp_width", width),
            ("eps", config.norm_eps),
            ("final_norm", self._vector(decoder.norm)),
            ("bf16_cache", decoder.dtype == torch.bfloat16),
        ):
            self._model[name] = size
        self._model["head"] = self._described(decoder.head, None, decoder.head_inputs)
        self._arrived = np.zeros(1, np.int64)
        self._cache: Tensor | None = None

    def __call__(self, token: int, cache: Cache) -> Tensor:
        """Logits of what follows the token; the cache then holds it."""
        decoder, position = self._decoder, cache.length
        if self._cache is not cache.kv:
            self._adopt(cache.kv)
        angles = cos_sin(decoder.config.rope, decoder.frequencies_F, position, position + 1)
        for name, vector in zip(("cos", "sin"), angles, strict=True):
            self._model[name] = vector.data_ptr()
        self._model["position"] = position
        row = decoder.embed.rows(torch.tensor([token])).float()
        self._buffers["x"][:] = row[0].numpy()
        self._arrived[0] = 0
        step(self._model, self._layers, self._threads, threads=len(self._threads))
        cache.length += 1
        return torch.from_numpy(self._buffers["logits"].copy())

    def _adopt(self, kv: Tensor) -> None:
        """Point the kernel arguments at a cache, and make threads and their buffers for it."""
        config, room = self._decoder.config, kv.shape[-2]
        for i, layer in enumerate(self._layers):
            layer["keys"], layer["values"] = kv[i, 0].data_ptr(), kv[i, 1].data_ptr()
        self._model["room"], self._model["arrived"] = room, self._arrived.ctypes.data
        self._threads = np.zeros(torch.get_num_threads(), THREAD)
        sizes = {
            "normal": config.hidden,
            "gates": 2 * int(self._model["mlp_width"][0]),
            "head": config.head_dim,
            "rotated": config.head_dim,
            "scores": -(-room // LANES) * LANES,
        }
        self._own = [_zeros(len(self._threads), size) for size in sizes.values()]
        for name, buffers in zip(sizes, self._own, strict=True):
            self._threads[name] = [buffer.ctypes.data for buffer in buffers]
        self._cache = kv

    def _layer(self, layer: Layer) -> np.ndarray:
        record = np.zeros(1, LAYER)
        attention, mlp = layer.plain_attention, layer.plain_mlp
        norms = {
            "attention_norm": layer.attention_norm,
            "mlp_norm": layer.mlp_norm,
            "q_norm": attention.q_norm,
            "k_norm": attention.k_norm,
        }
        for name, norm in norms.items():
            record[name] = 0 if norm is None else self._vector(norm)
        heads, kv_heads, width = attention.heads, attention.kv_heads, mlp.down.weight.shape[1]
        shares = [n * attention.head_dim for n in (heads, kv_heads, kv_heads)]
        linears = {
            **dict(zip("qkv", _apart(attention.qkv, shares), strict=True)),
            **dict(zip(("gate", "up"), _apart(mlp.gate_up, [width, width]), strict=True)),
            "o": attention.o,
            "down": mlp.down,
        }
        for name, linear in linears.items():
            bias = None if linear.bias_O is None else linear.bias_O.float().contiguous()
            record[name] = self._described(linear.weight, bias, linear.inputs)
        record["window"] = attention.window or 0
        return record

    def _described(
        self, weight: object, bias_O: Tensor | None, inputs: InputQuantization | None
    ) -> np.ndarray:
        assert isinstance(weight, _READABLE)
        self._alive += [weight, bias_O]
        return weight.kernel_args(bias_O, bytes_=inputs == INT8_GROUPS)

    def _vector(self, norm: Norm) -> int:
        assert norm.weight is not None
        vector = norm.weight.float().contiguous()
        self._alive.append(vector)
        return vector.data_ptr()


def _zeros(*shape: int) -> np.ndarray:
    """Numbers float32 that begin at a cache line, as torch allocates, and so does each row."""
    *rows, size = shape
    made: np.ndarray = torch.zeros(*rows, -(-size // LANES) * LANES).numpy()[..., :size]
    return made


def _apart(linears: Sequence[Linear], rows: Sequence[int]) -> Sequence[Linear]:
    """Linears of so many rows, out of the one that they are stacked in, if they are; no copy."""
    if len(linears) == len(rows):
        return linears
    whole, parts = linears[0], []
    for start, stop in pairwise(accumulate(rows, initial=0)):
        assert isinstance(whole.weight, _READABLE)
        bias_O = None if whole.bias_O is None else whole.bias_O[start:stop]
        parts.append(replace(whole, weight=whole.weight.part(slice(start, stop)), bias_O=bias_O))
    return parts


def cpu_step(decoder: Decoder) -> CpuStep | None:
    """The step of a decoder whose every layer and head the kernels can read; None for others.

    They read dense layers in packed, bfloat16 or float32 form, of widths that fill registers.
    """
    if not decoder.is_plain:
        return None
    weights: list[object] = [decoder.head]
    config = decoder.config
    for layer in decoder.layers:
        parts: list[Linear] = [*layer.plain_attention.qkv, *layer.plain_mlp.gate_up]
        weights += [part.weight for part in (*parts, layer.plain_attention.o, layer.plain_mlp.down)]
    widths = [
        config.hidden,
        config.head_dim,
        *(w.shape[1] for w in weights if isinstance(w, _READABLE)),
    ]
    readable = all(isinstance(weight, _READABLE) for weight in weights)
    if decoder.device.type != "cpu" or not readable or any(width % LANES for width in widths):
        return None
    return CpuStep(decoder)
