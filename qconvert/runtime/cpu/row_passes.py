"""Computes what reading does between products: SwiGLU, RMS norms and rotations, each in one pass.

Rows are bfloat16, numbers inside float32, rounded once at the end (torch rounds `silu(gate) * up` twice);
threads take rows. (Of float32 rows, torch's SwiGLU is as fast.) Legend: N rows, W columns, B batch,
T positions, H heads, E head dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, splat
from qconvert.quant.simd.products import fused
from qconvert.runtime.cpu.exponential import exp
from qconvert.runtime.cpu.packed_weights import MOST_INTEGER_ROWS
from qconvert.runtime.cpu.shared_kernels import SharedKernel
from qconvert.runtime.cpu.simd import floats, load_bf16, routine, store_bf16, total

_F = np.float32


def passes_rows(x: Tensor, columns: int) -> bool:
    """Whether the passes compute this, in parts of so many columns: many rows on a CPU, without gradients."""
    many = x.numel() > MOST_INTEGER_ROWS * x.shape[-1]
    known = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return known and many and columns % LANES == 0 and not (torch.is_grad_enabled() and x.requires_grad)


def swiglu_rows(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, all [..., W]. Check `passes_rows` first."""
    gate_NW, up_NW = _rows(gate), _rows(up)
    made_NW = torch.empty(gate_NW.shape, dtype=torch.bfloat16)
    count, width = made_NW.shape
    steps = gate_NW.stride(0), up_NW.stride(0)
    _swiglu(gate_NW.data_ptr(), up_NW.data_ptr(), made_NW.data_ptr(), *steps, count, width)
    return made_NW.view(gate.shape)


def normalise_rows(x: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, [..., W]. Check `passes_rows` first."""
    x_NW, weight_W = _rows(x), weight_W.float().contiguous()
    made_NW = torch.empty(x_NW.shape, dtype=torch.bfloat16)
    count, width = x_NW.shape
    places = x_NW.data_ptr(), weight_W.data_ptr(), made_NW.data_ptr()
    _normalise(*places, x_NW.stride(0), count, width, eps)
    return made_NW.view(x.shape)


def rotates_whole(x_BTHE: Tensor, cos_TR: Tensor) -> bool:
    """Whether heads are rotated as a whole, and their halves fill registers, as `rotate_rows` needs."""
    width = x_BTHE.shape[-1]
    return cos_TR.shape[-1] == width and width % (2 * LANES) == 0


def rotate_rows(x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """What `rope.rotate` gives of whole heads. Check `passes_rows` and `rotates_whole` first."""
    batch, length, heads, width = x_BTHE.shape
    x_NW = _rows(x_BTHE.flatten(-2))
    made_NW = torch.empty(x_NW.shape, dtype=torch.bfloat16)
    cos_TE, sin_TE = cos_TE.contiguous(), sin_TE.contiguous()
    places = x_NW.data_ptr(), cos_TE.data_ptr(), sin_TE.data_ptr(), made_NW.data_ptr()
    _rotate(*places, x_NW.stride(0), batch * length, length, heads, width)
    return made_NW.view(x_BTHE.shape)


def _rows(x: Tensor) -> Tensor:
    """[N, W], each row contiguous."""
    x_NW = x.reshape(-1, x.shape[-1])
    return x_NW if x_NW.stride(1) == 1 else x_NW.contiguous()


@routine
def _swiglu_share(gates, ups, out, gate_step, up_step, count, width, rank, size):  # type: ignore[no-untyped-def]
    for row in range(count * rank // size, count * (rank + 1) // size):
        for i in range(0, width, LANES):
            gate = load_bf16(gates + 2 * (row * gate_step + i))
            swish = gate / (exp(-gate) + _F(1))
            store_bf16(out + 2 * (row * width + i), swish * load_bf16(ups + 2 * (row * up_step + i)))


@routine
def _normalise_share(x, weight, out, step, count, width, eps, rank, size):  # type: ignore[no-untyped-def]
    for row in range(count * rank // size, count * (rank + 1) // size):
        squares = splat(_F(0))
        for i in range(0, width, LANES):
            value = load_bf16(x + 2 * (row * step + i))
            squares = fused(value, value, squares)
        scale = splat(_F(1) / np.sqrt(total(squares) / _F(width) + _F(eps)))
        for i in range(0, width, LANES):
            value = load_bf16(x + 2 * (row * step + i)) * scale * floats(weight + 4 * i)
            store_bf16(out + 2 * (row * width + i), value)


@routine
def _rotate_share(x, cos, sin, out, step, count, length, heads, width, rank, size):  # type: ignore[no-untyped-def]
    half = width // 2
    for row in range(count * rank // size, count * (rank + 1) // size):
        turn = 4 * width * (row % length)
        for i in range(0, half, LANES):
            low, high = turn + 4 * i, turn + 4 * (i + half)
            low_cos, low_sin = floats(cos + low), floats(sin + low)
            high_cos, high_sin = floats(cos + high), floats(sin + high)
            for head in range(0, heads * width, width):
                here, at = x + 2 * (row * step + head + i), out + 2 * (row * heads * width + head + i)
                a, b = load_bf16(here), load_bf16(here + 2 * half)
                store_bf16(at, fused(b, low_sin, a * low_cos))
                store_bf16(at + 2 * half, fused(a, high_sin, b * high_cos))


_swiglu, _normalise, _rotate = map(SharedKernel, (_swiglu_share, _normalise_share, _rotate_share))
