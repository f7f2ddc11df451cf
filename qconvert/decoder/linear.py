"""Weights on a device, and the one table that says which kernel multiplies by them.

A quantized weight stays packed: two codes to a byte up to 4 bits, one above, beside its scales and
zeros as stored. The reference kernel dequantizes a bounded block of rows, multiplies, and forgets
it. Its arithmetic is the definition of what a checkpoint's weights are worth:
`scale * (code - zero)` in float32, rounded once to the compute dtype.
Legend: O out features (rows), I in features, G groups, N rows of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.errors import UnsupportedModel
from qconvert.tensors import Dense, DType, IntAffine, Value

SCRATCH_BYTES = 32 << 20
"""The size of the float32 block that dequantizing may hold."""

_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A weight in the compute dtype."""

    w_OI: Tensor
    kind: str = "dense"

    @property
    def shape(self) -> tuple[int, int]:
        return self.w_OI.shape[0], self.w_OI.shape[1]

    def rows(self, index: slice | Tensor) -> Tensor:
        """Rows of the weight, [rows, I]."""
        return self.w_OI[index]


@dataclass(frozen=True, slots=True)
class IntWeight:
    """A group-quantized weight, computed with as `dtype`.

    `codes_OB` uint8 [O, bytes]. Of kind `int4`, byte j holds column j in its low half and column
    `j + bytes` in its high half, so that unpacking is two contiguous copies; of kind `int8`, byte j
    is column j. Scales are as stored; zeros uint8 [O, G], or one number for a symmetric grid.
    """

    codes_OB: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | int
    width: int
    dtype: torch.dtype
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OB.shape[0], self.width

    def rows(self, index: slice | Tensor) -> Tensor:
        """Dequantized rows, [rows, I] in the compute dtype; float32 scratch of the same shape."""
        codes_RB, scales_RG = self.codes_OB[index], self.scales_OG[index].float()
        w_RI = torch.empty(codes_RB.shape[0], self.width, device=codes_RB.device)
        if self.kind == "int4":
            half = codes_RB.shape[1]
            w_RI[:, :half] = codes_RB & 15
            w_RI[:, half:] = (codes_RB >> 4)[:, : self.width - half]
        else:
            w_RI.copy_(codes_RB)
        w_RGS = w_RI.view(w_RI.shape[0], scales_RG.shape[1], -1)
        w_RGS -= self.zeros_OG if isinstance(self.zeros_OG, int) else self.zeros_OG[index][..., None]
        w_RGS *= scales_RG[..., None]
        return w_RI.to(self.dtype)


Weight = DenseWeight | IntWeight


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


def place_vector(value: Value, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A norm's weight or a bias: [n, 1] rows as a vector of the compute dtype on the device."""
    assert isinstance(value, Dense)
    return _tensor(value.rows_RI, value.dtype).flatten().to(device, dtype)


def place_weight(value: Value, device: torch.device, dtype: torch.dtype) -> Weight:
    """A whole weight on the device: dense in the compute dtype, or packed as it is quantized."""
    if isinstance(value, Dense):
        return DenseWeight(_tensor(value.rows_RI, value.dtype).to(device, dtype))
    if not isinstance(value, IntAffine):
        raise UnsupportedModel(
            f"{value.form.label} blocks: the decoder runs 16-bit and group-quantized weights only",
            "measure the checkpoint that the blocks were made from, or run them in llama.cpp",
        )
    packs = value.form.bits <= 4
    return IntWeight(
        codes_OB=torch.from_numpy(_pack(value.codes_RI) if packs else value.codes_RI).to(device),
        scales_OG=_tensor(value.scales_RG, value.form.scale_dtype).to(device),
        zeros_OG=_zeros(value, device),
        width=value.codes_RI.shape[1],
        dtype=dtype,
        kind="int4" if packs else "int8",
    )


def multiply_float32(x_NI: Tensor, weight: Weight, start: int, stop: int) -> Tensor:
    """`x W[start:stop]^T` in float32 whatever the compute dtype, [N, stop - start].

    For logits: rounding them to bfloat16 alone costs 4e-4 to 6e-4 nats of KL divergence, as much as
    a good 8-bit quantization.
    """
    return x_NI.float() @ weight.rows(slice(start, stop)).float().T


def _multiply_dense(x: Tensor, linear: Linear) -> Tensor:
    assert isinstance(linear.weight, DenseWeight)
    return F.linear(x, linear.weight.w_OI, linear.bias_O)


def _multiply_dequantized(x: Tensor, linear: Linear) -> Tensor:
    """The reference for every quantized kind: one bounded block of rows after the other."""
    out, width = linear.weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width))
    y = x.new_empty(*x.shape[:-1], out)
    for start in range(0, out, rows):
        block = slice(start, start + rows)
        bias = None if linear.bias_O is None else linear.bias_O[block]
        y[..., block] = F.linear(x, linear.weight.rows(block), bias)
    return y


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


BACKENDS: tuple[Backend, ...] = (
    Backend("torch", "any", "dense", math.inf, _multiply_dense),
    # Packed kernels that win for few rows belong here, above the reference that takes any number.
    Backend("reference", "any", "int4", math.inf, _multiply_dequantized),
    Backend("reference", "any", "int8", math.inf, _multiply_dequantized),
)
"""The first row that fits is used; the last ones fit everything."""


def _tensor(array: np.ndarray, dtype: DType) -> Tensor:
    """An array in its carrier type as a torch tensor of the type it stands for; no copy."""
    return torch.from_numpy(array).view(_TORCH[dtype])


def _zeros(value: IntAffine, device: torch.device) -> Tensor | int:
    if value.zeros_RG is None:
        return 1 << (value.form.bits - 1)
    return torch.from_numpy(value.zeros_RG).to(device)


def _pack(codes_RI: np.ndarray) -> np.ndarray:
    """Two codes of at most 4 bits to a byte, as IntWeight describes."""
    half = (codes_RI.shape[1] + 1) // 2
    packed: np.ndarray = codes_RI[:, :half].copy()
    packed[:, : codes_RI.shape[1] - half] |= codes_RI[:, half:] << 4
    return packed
