"""The one table that says which kernel multiplies by a weight.

The reference dequantizes a bounded block of rows, multiplies, and forgets it. Its arithmetic is the
definition of what a checkpoint's weights are worth: `scale * (code - zero)` in float32, rounded
once to the compute dtype. Legend: O out features (rows), I in features, N rows of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from qconvert.decoder.aten import PackedInt4, PackedInt8
from qconvert.decoder.cuda.packing import MmaInt4, MmaInt8
from qconvert.decoder.storage import DenseWeight, Readable

SCRATCH_BYTES = 32 << 20
"""The size of the float32 block that dequantizing may hold."""

Weight = Readable | PackedInt4 | PackedInt8 | MmaInt4 | MmaInt8


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`."""

    weight: Weight
    bias_O: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] in the dtype of x."""
        rows = x.numel() // x.shape[-1]
        backend = next(b for b in BACKENDS if b.runs(x.device.type, self.weight.kind, rows))
        return backend.multiply(x, self)


def _multiply_dense(x: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, DenseWeight)
    return F.linear(x, linear.weight.w_OI, linear.bias_O)


def _multiply_decoded(x: Tensor, linear: Linear) -> Tensor:
    """The reference for every kind that decodes rows: one bounded block of them after the other."""
    weight = linear.weight
    assert not isinstance(weight, PackedInt4)
    out, width = weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width))
    y = x.new_empty(*x.shape[:-1], out)
    for start in range(0, out, rows):
        block = slice(start, start + rows)
        bias = None if linear.bias_O is None else linear.bias_O[block]
        y[..., block] = F.linear(x, weight.rows(block), bias)
    return y


def _multiply_tiles(x: Tensor, linear: Linear) -> Tensor:
    """The same for tiles of int4, which decode to columns of W^T."""
    weight = linear.weight
    assert isinstance(weight, PackedInt4)
    out, width = weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width * 64)) * 64
    y = x.new_empty(*x.shape[:-1], out)
    for start in range(0, out, rows):
        stop = min(start + rows, out)
        y[..., start:stop] = x @ weight.columns(start, stop)
    return y if linear.bias_O is None else y.add_(linear.bias_O)


def _multiply_packed(x: Tensor, linear: Linear) -> Tensor:
    """A packed kernel that takes the input as a matrix."""
    assert isinstance(linear.weight, PackedInt4 | PackedInt8)
    y_NO = linear.weight.multiply(x.reshape(-1, x.shape[-1]))
    if linear.bias_O is not None:
        y_NO += linear.bias_O
    return y_NO.view(*x.shape[:-1], -1)


def _multiply_tensor_core(x: Tensor, linear: Linear) -> Tensor:
    from qconvert.decoder.cuda.matmul import multiply

    return multiply(x, linear)


def _multiply_dequantized(x: Tensor, linear: Linear) -> Tensor:
    from qconvert.decoder.cuda.dequantize import multiply_many

    return multiply_many(x, linear)


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel, and when it is the one to use: device type, kind of weight, most rows of x."""

    name: str
    device: str
    kind: str
    most_rows: float
    multiply: Callable[[Tensor, Linear], Tensor]

    def runs(self, device: str, kind: str, rows: int) -> bool:
        return self.device in (device, "any") and self.kind == kind and rows <= self.most_rows


# Thresholds: the last number of rows at which the packed kernel is not behind decoding + bfloat16
# matmul, on one core of an AMD EPYC (Zen 4), milliseconds at rows 1 / 16 / 32 / 64:
#   int4 g128,  9728 x 896   packed 0.4 / 3.2 / 10.3 / 23.4   decoded 13 / 13 / 16 / 18.5
#   int8 g128,  9728 x 896   packed 0.6 / 5.4 / 10.7          decoded  6 / 6.0 / 7.2
#   int8 g128,  896 x 4864   packed 0.5 / 2.9 / 5.5           decoded 1.8 / 2.4 / 3.1
BACKENDS: tuple[Backend, ...] = (
    Backend("torch", "any", "dense", math.inf, _multiply_dense),
    Backend("aten int4pack", "cpu", "int4-aten", 32, _multiply_packed),
    Backend("decoded tiles", "cpu", "int4-aten", math.inf, _multiply_tiles),
    Backend("aten int8pack", "cpu", "int8-aten", 12, _multiply_packed),
    Backend("decoded rows", "cpu", "int8-aten", math.inf, _multiply_decoded),
    # The layouts of the next four are made only where their kernels run. Computed for an H200 (4.3 TB/s,
    # 790 TFLOP/s), not measured: at 64 rows, dequantizing takes 0.59 ps of a weight and the product of
    # what it gives 0.47; the kernel 0.16 at full rate, so it wins if it reaches 15 % of that. Wider ones
    # are not built.
    Backend("tensor core", "any", "int4-mma", 64, _multiply_tensor_core),
    Backend("dequantized", "any", "int4-mma", math.inf, _multiply_dequantized),
    Backend("tensor core", "any", "int8-mma", 64, _multiply_tensor_core),
    Backend("dequantized", "any", "int8-mma", math.inf, _multiply_dequantized),
    # A kernel for another device belongs here, above the reference that takes any number of rows.
    Backend("reference", "any", "int4", math.inf, _multiply_decoded),
    Backend("reference", "any", "int8", math.inf, _multiply_decoded),
    Backend("reference", "any", "encoded", math.inf, _multiply_decoded),
)
"""The first row that fits is used; the last ones fit everything."""
