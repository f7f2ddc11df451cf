"""Holds weights in forms that every device can read, and multiplies by them.

A quantized weight stays packed: two codes to a byte up to 4 bits, one above, beside its scales and
zeros as stored; every other form stays as it was read. `rows` says what they are worth: a block of
rows in the compute dtype, decoded on the fly and the caller's to forget.
Legend: O out features (rows), I in features, G groups, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows, Value
from qconvert.quant.simd import processor
from qconvert.runtime.cpu.kernel_args import LINEAR
from qconvert.runtime.cpu.kernels import compiled
from qconvert.runtime.cpu.products import multiply_few
from qconvert.runtime.cpu.simd import LINE
from qconvert.runtime.weight_source import HeldRows, RowSource

_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}


def as_tensor(array: np.ndarray, dtype: DType) -> Tensor:
    """An array in its carrier type as a torch tensor of the type it stands for; no copy."""
    return torch.from_numpy(array).view(_TORCH[dtype])


def aligned(x: Tensor) -> Tensor:
    """The same numbers in memory that begins at a whole cache line, on which sums of products depend."""
    return x if x.data_ptr() % LINE == 0 else x.clone()


SCRATCH_BYTES = 32 << 20
"""The size of the float32 block that dequantizing may hold."""
# From so many rows on, widening bfloat16 weights pays where `processor.widens_bf16`: products per second of
# widened and of torch's bfloat16 ones at 32 / 64 / 128 / 256 rows, 9728 x 896, a core of an Emerald Rapids
# without AMX, 10**9: 33 / 44 / 55 / 60 and 33 / 38 / 42 / 42. Widening 2**23 numbers at a time: 20 to 54.
LEAST_WIDE_ROWS = 64
_WIDE_NUMBERS = 1 << 18
"""Numbers of a weight that are widened at a time: 1 MiB, which stays in the second-level cache."""
_CLOSE_ROWS, _MOST_ROWS = 4, 256  # of rows that are read in one call: how far apart, and how many
# The last number of rows at which float rows are not behind decoding + torch's float32 matmul, milliseconds
# of processor time at rows 1 / 4 / 8, one core of an AMD EPYC without AVX-512:
#   bf16,  9728 x 896   float rows 0.69 / 2.0 / 4.4   decoded 5.9 / 8.0 / 8.8
MOST_FLOAT_ROWS = 8


class Decodable(Protocol):
    """A weight whose rows can be decoded a block at a time."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def rows(self, index: slice) -> Tensor: ...


def multiply_decoded(x: Tensor, weight: Decodable, bias_O: Tensor | None) -> Tensor:
    """`x W^T + b`, [..., O] in the dtype of x: the reference, a bounded block of decoded rows at a time.

    Its arithmetic is the definition of what a checkpoint's weights are worth: `scale * (code - zero)` in
    float32, rounded once to the compute dtype.
    """
    x_NI = x.reshape(-1, x.shape[-1])
    out, width = weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width))
    y_NO = x.new_empty(len(x_NI), out)
    if widened(x_NI):
        _multiply_widened(x_NI.float(), weight, bias_O, rows, y_NO)
        return y_NO.view(*x.shape[:-1], out)
    for start in range(0, out, rows):
        block = slice(start, start + rows)
        if bias_O is None:
            torch.mm(x_NI, weight.rows(block).T, out=y_NO[:, block])
        else:
            torch.addmm(bias_O[block], x_NI, weight.rows(block).T, out=y_NO[:, block])
    return y_NO.view(*x.shape[:-1], out)


def widened(x_NI: Tensor) -> bool:
    """Whether products with so many rows are fastest in float32, though their operands are bfloat16."""
    narrow = x_NI.dtype == torch.bfloat16 and x_NI.device.type == "cpu"
    return narrow and len(x_NI) >= LEAST_WIDE_ROWS and processor.widens_bf16()


def _multiply_widened(
    x_NI: Tensor, weight: Decodable, bias_O: Tensor | None, rows: int, y_NO: Tensor
) -> None:
    """`x W^T + b` in float32, rounded once to the dtype of y; a block of rows is widened in the cache."""
    out, width = weight.shape
    few = max(1, _WIDE_NUMBERS // width)
    for start in range(0, out, rows):
        w_RI = weight.rows(slice(start, start + rows))
        for first in range(0, len(w_RI), few):
            w_wide = w_RI[first : first + few].float()
            block = slice(start + first, start + first + len(w_wide))
            if bias_O is None:
                y_NO[:, block] = torch.mm(x_NI, w_wide.T)
            else:
                y_NO[:, block] = torch.addmm(bias_O[block].float(), x_NI, w_wide.T)


class _Decoded:
    """Products by decoded rows: what a weight without a kernel does."""

    __slots__ = ()

    def multiplies_codes(self, rows: int) -> bool:
        """No: codes are decoded first."""
        return False

    def multiply(self: Decodable, x: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b`, [..., O] in the dtype of x."""
        return multiply_decoded(x, self, bias_O)


@dataclass(frozen=True, slots=True)
class DenseWeight(_Decoded):
    """A weight as numbers, [O, I]; computed with as `dtype` where that is not its own.

    So bf16 weights that are computed with in float32 stay bf16: the same numbers in half the memory.
    """

    w_OI: Tensor
    dtype: torch.dtype | None = None

    @property
    def kind(self) -> str:
        """`dense`, or `bf16` where it is widened when it is computed with."""
        return "bf16" if self.widens else "dense"

    @property
    def widens(self) -> bool:
        """Whether numbers are converted when they are computed with."""
        return self.dtype is not None and self.dtype != self.w_OI.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.w_OI.shape[0], self.w_OI.shape[1]

    @property
    def nbytes(self) -> int:
        return self.w_OI.nbytes

    def rows(self, index: slice | Tensor) -> Tensor:
        """Rows of the weight, [R, I] in the compute dtype."""
        return self.w_OI[index].to(self.dtype or self.w_OI.dtype)

    def part(self, index: slice) -> DenseWeight:
        """Some of the rows as a weight of their own; no copy."""
        return DenseWeight(self.w_OI[index], self.dtype)

    def multiply(self, x: Tensor, bias_O: Tensor | None) -> Tensor:
        """`x W^T + b`, [..., O] in the dtype of x."""
        if not self.widens and not widened(x.reshape(-1, x.shape[-1])):
            return F.linear(x, self.w_OI, bias_O)
        if not self.widens or x.device.type != "cpu" or x.numel() // x.shape[-1] > MOST_FLOAT_ROWS:
            return multiply_decoded(x, self, bias_O)
        return multiply_few(x, self, bias_O)

    def kernel_args(self, bias_O: Tensor | None = None, *, bytes_: bool = False) -> np.ndarray:
        """Its fields of LINEAR, of float32 or bf16; the caller keeps weight and bias alive."""
        args = np.zeros(1, LINEAR)
        args["rows"], args["width"] = self.w_OI.shape
        args["kernel"] = compiled(str(self.w_OI.dtype).removeprefix("torch.")).address
        args["codes"], args["bias"] = self.w_OI.data_ptr(), 0 if bias_O is None else bias_O.data_ptr()
        return args


@dataclass(frozen=True, slots=True)
class IntWeight(_Decoded):
    """A group-quantized weight, computed with as `dtype`.

    `codes_OB` uint8 [O, bytes]. Of kind `int4`, byte j holds column j in its low bits and column
    `j + bytes` in its high bits, so that unpacking is two contiguous copies; of kind `int8`, byte j
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

    @property
    def nbytes(self) -> int:
        zeros = 0 if isinstance(self.zeros_OG, int) else self.zeros_OG.nbytes
        return self.codes_OB.nbytes + self.scales_OG.nbytes + zeros

    def codes(self) -> Tensor:
        """All codes, uint8 [O, I]: unpacked, for another layout to be made of them."""
        if self.kind != "int4":
            return self.codes_OB
        return torch.cat((self.codes_OB & 15, self.codes_OB >> 4), dim=1)[:, : self.width]

    def rows(self, index: slice | Tensor) -> Tensor:
        """Dequantized rows, [R, I] in the compute dtype; float32 scratch of the same shape."""
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


@dataclass(frozen=True, slots=True)
class EncodedWeight(_Decoded):
    """A weight in any other form, as it was read: GGML blocks, code tables, grids of another kind.

    The value stays in main memory; its rows are decoded there in float32 and moved to `device`.
    """

    value: Value
    width: int
    device: torch.device
    dtype: torch.dtype
    kind: str = "encoded"

    @property
    def shape(self) -> tuple[int, int]:
        return self.value.rows, self.width

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.value.arrays)

    def rows(self, index: slice | Tensor) -> Tensor:
        """Decoded rows, [R, I] in the compute dtype; float32 scratch of the same shape."""
        from qconvert.quant.dequantize import numbers

        chosen = index if isinstance(index, slice) else index.cpu().numpy()
        arrays = tuple(np.ascontiguousarray(array[chosen]) for array in self.value.arrays)
        w_RI = numbers(self.value.with_arrays(arrays), DType.F32).rows_RI
        return aligned(torch.from_numpy(w_RI).to(self.device, self.dtype))


@dataclass(frozen=True, slots=True)
class StreamedWeight(_Decoded):
    """A weight that is not held: rows are read whenever they are multiplied by, a block at a time.

    `place` makes of rows the weight (`linear.Table`) that they would be if they were held.
    """

    source: RowSource
    device: torch.device
    dtype: torch.dtype
    place: Callable[[Value], Decodable] | None = None
    kind: str = "streamed"
    nbytes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    def rows(self, index: slice | Tensor) -> Tensor:
        """Rows of the weight, [R, I] in the compute dtype."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.shape[0])
            return self._read(start, stop)
        wanted_N, place_R = torch.unique(index.flatten().cpu(), return_inverse=True)
        # Rows that lie close together are read at once: a call costs more than a few rows.
        runs = np.split(wanted_N.numpy(), np.flatnonzero(np.diff(wanted_N.numpy()) > _CLOSE_ROWS) + 1)
        found = torch.empty(len(wanted_N), self.shape[1], device=self.device, dtype=self.dtype)
        done = 0
        for run in runs:
            for part in np.array_split(run, -(-len(run) // _MOST_ROWS)) if len(run) else ():
                rows = self._read(int(part[0]), int(part[-1]) + 1)
                found[done : done + len(part)] = rows[torch.from_numpy(part - part[0]).to(self.device)]
                done += len(part)
        return found[place_R.to(self.device)]

    def placed(self, start: int, stop: int) -> Decodable:
        """Rows [start, stop) as a weight of their own (`linear.Table`), which is held."""
        assert self.place is not None
        with torch.inference_mode(False):  # weights are packed in other threads, which are in no such mode
            return self.place(self.source.read(start, stop))

    def as_stored(self) -> StreamedWeight:
        """The same weight, its rows held in the form in which they are stored."""
        value = self.source.read(0, self.shape[0])
        return replace(self, source=HeldRows(value), nbytes=sum(array.nbytes for array in value.arrays))

    def _read(self, start: int, stop: int) -> Tensor:
        from qconvert.quant.dequantize import numbers

        value = self.source.read(start, stop)
        if isinstance(value, DenseRows):
            return aligned(as_tensor(value.rows_RI, value.dtype).to(self.device, self.dtype))
        return aligned(torch.from_numpy(numbers(value, DType.F32).rows_RI).to(self.device, self.dtype))


Readable = DenseWeight | IntWeight | EncodedWeight | StreamedWeight
"""Weights whose rows can be read on any device, by slice or by index."""
