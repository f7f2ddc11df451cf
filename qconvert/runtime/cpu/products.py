"""Multiplies few rows of input by weights, and decodes rows of packed weights, with the CPU kernels.

Legend: O out features (rows), I in features, N rows of the input, R rows asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qconvert.quant.simd.lanes import LANES, kernel, splat
from qconvert.runtime.cpu.coded_dots import (
    byte_floats,
    e4m3_floats,
    e5m2_floats,
    int6_floats,
    named_floats,
    nibble_floats,
    rounded_to,
)
from qconvert.runtime.cpu.group_scales import mins_at, scales_at, zeros_at
from qconvert.runtime.cpu.simd import BLOCK, PART, routine, store_bf16, store_f32
from qconvert.runtime.cpu.step_kernel import multiply
from qconvert.runtime.cpu.thread_barrier import ThreadTeam

_INT4, _TABLE4, _INT6, _INT8, _E4M3, _E5M2 = range(6)
_LEAST_SHARED = 1 << 18
"""Numbers from which on decoding is shared by threads: a tenth of a millisecond."""
KINDS = ("int4", "table4", "int6", "int8", "e4m3", "e5m2")
"""Of codes, as kernels count them."""


class Multipliable(Protocol):
    """A weight that the kernels multiply by: its shape, and its fields of `kernel_args.LINEAR`."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def kernel_args(self, bias_O: Tensor | None = None, *, bytes_: bool = False) -> np.ndarray: ...


def multiply_few(
    x: Tensor, weight: Multipliable, bias_O: Tensor | None = None, *, bytes_: bool = False
) -> Tensor:
    """`x W^T + bias`, [..., O] in the dtype of x, computed in float32: every row of x reads the weight once.

    Of a dense weight the width must be a multiple of 16. With `bytes_`, x may be rounded to 8 bits.
    """
    x_NI = x.reshape(-1, x.shape[-1]).float().contiguous()
    y_NO = torch.empty(len(x_NI), weight.shape[0])
    bias_O = None if bias_O is None else bias_O.float().contiguous()
    args, team = weight.kernel_args(bias_O, bytes_=bytes_), ThreadTeam(torch.get_num_threads())
    team.run(lambda rank: multiply(args, x_NI.data_ptr(), y_NO.data_ptr(), len(x_NI), rank, team.size))
    return y_NO.to(x.dtype).view(*x.shape[:-1], -1)


def decode_rows(args: np.ndarray, kind: str, rows_R: Tensor, out_RI: Tensor) -> None:
    """Write rows of a packed weight to `out_RI`, float32 or bf16 [R, I], by its kernel arguments.

    In float32, then rounded once: the same numbers as those of the reference layout.
    """
    as_bf16, decoder = out_RI.dtype == torch.bfloat16, _decoder(kind)
    count, row_bytes, rows = len(rows_R), out_RI.shape[1] * out_RI.element_size(), rows_R.numpy()
    team = ThreadTeam(torch.get_num_threads() if out_RI.numel() >= _LEAST_SHARED else 1)

    def decode(rank: int) -> None:
        start, stop = count * rank // team.size, count * (rank + 1) // team.size
        decoder(args, rows[start:stop], out_RI.data_ptr() + start * row_bytes, as_bf16)

    team.run(decode)


@lru_cache
def _decoder(name: str) -> Any:
    """The kernel that decodes codes of a kind: 1.8 times as fast as one of all kinds, for int4."""
    kind = KINDS.index(name)

    def decode(linears, rows, out, as_bf16):  # type: ignore[no-untyped-def]
        linear = linears[0]
        width, group, mins, factor = linear.width, linear.group, linear.mins, linear.factor
        blocks, groups = (width + BLOCK - 1) // BLOCK, (width + group - 1) // group
        own = np.empty((3, LANES), np.float32)
        for r in range(len(rows)):
            row = rows[r]
            for g in range(groups):
                if g % LANES == 0:
                    i = row * groups + g
                    store_f32(own[0].ctypes.data, scales_at(linear, i))
                    store_f32(own[1].ctypes.data, zeros_at(linear, i))
                    if mins:
                        store_f32(own[2].ctypes.data, mins_at(linear, i))
                scale, zero, least = own[0, g % LANES], own[1, g % LANES], own[2, g % LANES]
                for column in range(g * group, min((g + 1) * group, width), LANES):
                    worth = (codes_at(linear, kind, row * blocks * BLOCK + column) - zero) * scale
                    if kind == _INT8:
                        worth = worth * factor
                    if mins:
                        worth = _rounded(linear, _rounded(linear, worth) + least)
                    if as_bf16:
                        store_bf16(out + 2 * (r * width + column), worth)
                    else:
                        store_f32(out + 4 * (r * width + column), worth)

    decode.__name__ = decode.__qualname__ = f"decode_{name}"  # the name under which its code is cached
    return kernel(decode)


@routine
def _rounded(linear, worth):  # type: ignore[no-untyped-def]
    if linear.rounded_bits:
        return rounded_to(worth, linear.rounded_bits, splat(linear.least))
    return worth


@routine
def codes_at(linear, kind, at):  # type: ignore[no-untyped-def]
    """What the codes of 16 columns stand for, before zeros and scales; `at` counts columns of blocks."""
    if kind in (_INT4, _TABLE4):
        block, part = at // BLOCK * (BLOCK // 2), at % BLOCK // PART
        nibbles = nibble_floats(linear.codes + block, part, at % PART)
        return named_floats(linear.table, nibbles) if kind == _TABLE4 else nibbles
    if kind == _INT6:
        block, part = at // BLOCK * (BLOCK * 3 // 4), at % BLOCK // PART
        return int6_floats(linear.codes + block, part, at % PART)
    if kind == _INT8:
        return byte_floats(linear.codes + at)
    if kind == _E4M3:
        return e4m3_floats(linear.codes + at) * linear.unit
    return e5m2_floats(linear.codes + at)
