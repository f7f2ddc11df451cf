"""The one table that says which kernel multiplies by a weight.

The reference dequantizes a bounded block of rows, multiplies, and forgets it. Its arithmetic is the
definition of what a checkpoint's weights are worth: `scale * (code - zero)` in float32, rounded
once to the compute dtype. Legend: O out features (rows), I in features, N rows of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.runtime.cpu.packed_weights import PackedGrid
from qconvert.runtime.cpu.products import multiply_few
from qconvert.runtime.cuda.packing import MmaInt4, MmaInt8
from qconvert.runtime.observers import Tap
from qconvert.runtime.storage import DenseWeight, NarrowWeight, Readable

SCRATCH_BYTES = 32 << 20
"""The size of the float32 block that dequantizing may hold."""

Table = Readable | PackedGrid
"""Weights whose rows can be read, one by one or in blocks."""
Weight = Table | MmaInt4 | MmaInt8


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`; observers see x first. Of linears that share an input, one has the tap of all."""

    weight: Weight
    bias_O: Tensor | None = None
    tap: Tap | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] in the dtype of x."""
        if self.tap is not None and self.tap.observers:
            self.tap.show(x)
        return self.backend(x.device.type, x.numel() // x.shape[-1]).multiply(x, self)

    def backend(self, device: str, rows: int) -> Backend:
        """The kernel that multiplies by this weight on a device of that type."""
        return next(backend for backend in BACKENDS if backend.runs(device, self.weight.kind, rows))


def _multiply_dense(x: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, DenseWeight)
    return F.linear(x, linear.weight.w_OI, linear.bias_O)


def _multiply_decoded(x: Tensor, linear: Linear) -> Tensor:
    """The reference for every kind that decodes rows: one bounded block of them after the other."""
    weight, x_NI = linear.weight, x.reshape(-1, x.shape[-1])
    out, width = weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width))
    y_NO = x.new_empty(len(x_NI), out)
    for start in range(0, out, rows):
        block = slice(start, start + rows)
        if linear.bias_O is None:
            torch.mm(x_NI, weight.rows(block).T, out=y_NO[:, block])
        else:
            torch.addmm(linear.bias_O[block], x_NI, weight.rows(block).T, out=y_NO[:, block])
    return y_NO.view(*x.shape[:-1], out)


def _multiply_few(x: Tensor, linear: Linear) -> Tensor:
    """Row by row of the input, for the few rows where that is faster than decoding."""
    assert isinstance(linear.weight, PackedGrid | NarrowWeight)
    y_NO = multiply_few(x.reshape(-1, x.shape[-1]), linear.weight, linear.bias_O)
    return y_NO.to(x.dtype).view(*x.shape[:-1], -1)


def _multiply_tensor_core(x: Tensor, linear: Linear) -> Tensor:
    from qconvert.runtime.cuda.matmul import multiply

    return multiply(x, linear)


def _multiply_dequantized(x: Tensor, linear: Linear) -> Tensor:
    from qconvert.runtime.cuda.dequantize import multiply_many

    return multiply_many(x, linear)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel, and when it is the one to use: device type, kind of weight, most rows of x.

    `packed` ones multiply by codes, all others by numbers rounded to the compute dtype.
    """

    name: str
    device: str
    kind: str
    most_rows: float
    multiply: Callable[[Tensor, Linear], Tensor]
    packed: bool = False

    def runs(self, device: str, kind: str, rows: int) -> bool:
        return self.device in (device, "any") and self.kind == kind and rows <= self.most_rows


# Thresholds of the CPU: the last number of rows at which its kernels are not behind decoding + torch's
# float32 matmul (whose bfloat16 one is faster where the processor has bfloat16), one core of an AMD EPYC
# without AVX-512, milliseconds of processor time at rows 1 / 4 / 8 / 16 / 32:
#   int4 g128,  9728 x 896   integers 0.46 / 1.9 / 3.7 / 7.2 / 14.2   decoded 5.7 / 8.2 / 9.6 / 11.6 / 14.9
#   int4 g128,  896 x 4864   integers 0.20 / 0.7 / 1.5 / 3.0 /  5.8   decoded 2.3 / 3.1 / 3.8 /  4.7 /  6.3
#   int8 g128,  9728 x 896   integers 0.39 / 1.6 / 3.2 / 6.3 / 12.1   decoded 6.2 / 8.3 / 9.3 / 10.3 / 15.2
#   bfloat16,   9728 x 896   floats   0.69 / 2.0 / 4.4                decoded 5.9 / 8.0 / 8.8
# Of the other kinds, nibbles of a table and codes of 6 bits take 1.4 to 1.6 times as long a row as int4 g128
# and 8-bit floats 2.4 times, where decoding takes as long as int4's (27 against 25 ms for 9728 x 1024).
# At 512 rows, decoding int4 and multiplying takes 123 ms, torch's matmul alone 124.
BACKENDS: tuple[Backend, ...] = (
    Backend("torch", "any", "dense", math.inf, _multiply_dense),
    # Computed for an H200 (4.3 TB/s, 790 TFLOP/s), not measured: at 64 rows, dequantizing takes 0.59 ps of
    # a weight and the product of what it gives 0.47; the kernel 0.16 at full rate, so it wins if it
    # reaches 15 % of that. Wider ones are not built. These layouts are made only where the kernels run.
    Backend("tensor core", "any", "int4-mma", 64, _multiply_tensor_core, packed=True),
    Backend("dequantized", "any", "int4-mma", math.inf, _multiply_dequantized),
    Backend("tensor core", "any", "int8-mma", 64, _multiply_tensor_core, packed=True),
    Backend("dequantized", "any", "int8-mma", math.inf, _multiply_dequantized),
    Backend("integer rows", "cpu", "int4-cpu", 16, _multiply_few, packed=True),
    Backend("integer rows", "cpu", "int8-cpu", 16, _multiply_few, packed=True),
    Backend("integer rows", "cpu", "int6-cpu", 16, _multiply_few, packed=True),
    Backend("integer rows", "cpu", "table4-cpu", 16, _multiply_few, packed=True),
    Backend("float rows", "cpu", "e4m3-cpu", 8, _multiply_few),
    Backend("float rows", "cpu", "e5m2-cpu", 8, _multiply_few),
    Backend("float rows", "cpu", "narrow", 8, _multiply_few),
    Backend("decoded", "cpu", "int4-cpu", math.inf, _multiply_decoded),
    Backend("decoded", "cpu", "int8-cpu", math.inf, _multiply_decoded),
    Backend("decoded", "cpu", "int6-cpu", math.inf, _multiply_decoded),
    Backend("decoded", "cpu", "table4-cpu", math.inf, _multiply_decoded),
    Backend("decoded", "cpu", "e4m3-cpu", math.inf, _multiply_decoded),
    Backend("decoded", "cpu", "e5m2-cpu", math.inf, _multiply_decoded),
    Backend("decoded", "any", "narrow", math.inf, _multiply_decoded),
    # A kernel for another device belongs here, above the reference that takes any number of rows.
    Backend("reference", "any", "int4", math.inf, _multiply_decoded),
    Backend("reference", "any", "int8", math.inf, _multiply_decoded),
    Backend("reference", "any", "encoded", math.inf, _multiply_decoded),
)
"""The first row that fits is used; the last ones fit everything."""
