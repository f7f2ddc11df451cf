"""Places values as checkpoints hold them on a device, in the layout that its kernels want.

`Layout.REFERENCE` is the same for every device: the arithmetic that all others are measured
against. `Layout.AUTO` is what this device multiplies by fastest, `Layout.DENSE` a copy of what the
weights are worth in the compute dtype, bit for bit the reference's arithmetic. None is ever saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from qconvert.core.dtypes import DType
from qconvert.core.values import AffineIntRows, DenseRows, Value
from qconvert.errors import BadRecipe
from qconvert.quant.packed_codes import codes_of
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime.cpu.packed_weights import pack_grid
from qconvert.runtime.cpu.weight_memory import LARGE_BY_ITSELF, Allocate, one_by_one
from qconvert.runtime.cuda.packing import mma_weight
from qconvert.runtime.cuda.triton_language import available
from qconvert.runtime.linear import Table, Weight
from qconvert.runtime.storage import (
    SCRATCH_BYTES,
    DenseWeight,
    EncodedWeight,
    IntWeight,
    Readable,
    aligned,
    as_tensor,
)


class Layout(Enum):
    """How weights are laid out in memory: for reading, or for speed."""

    REFERENCE = "reference"
    AUTO = "auto"
    DENSE = "dense"


def find_device(name: torch.device | str) -> torch.device:
    """The device of this name: `cpu`, `cuda` or `cuda:1`, the last made the current one.

    Triton launches kernels on the current device, wherever their arguments are. Raises BadRecipe for a
    device that is not here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadRecipe(f"device {str(name)!r}: no such device", "use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise BadRecipe(f"device {str(name)!r}: not supported", "use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadRecipe(
            f"device {str(name)!r}: this torch ({torch.__version__}) finds no CUDA device",
            "use --device cpu, or install a torch with CUDA; `qconvert env` shows what is found",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadRecipe(
            f"device {str(name)!r}: there are {torch.cuda.device_count()} CUDA devices", "write cuda:0"
        )
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def preferred_dtype(device: torch.device) -> torch.dtype:
    """What a device computes in fastest: bfloat16, but float32 on processors without it."""
    if device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def evaluation_layout(
    parameters: int, device: torch.device, dtype: torch.dtype, *, by_codes: bool = False
) -> Layout:
    """The layout for reading thousands of tokens at a time.

    On a GPU, a dense copy where it takes no more than half of the memory that is free, which leaves the
    other half to activations and to a second model; weights that are dequantized whenever they are
    used, as AUTO has them, where it does not. In main memory weights stay packed: in bfloat16 as AUTO has
    them, which decode to the same numbers as the reference's, faster; and where codes themselves are
    multiplied (`by_codes`).
    """
    if device.type != "cuda":
        return Layout.AUTO if dtype == torch.bfloat16 or by_codes else Layout.REFERENCE
    free, _ = torch.cuda.mem_get_info(device)
    return Layout.DENSE if parameters * dtype.itemsize <= free // 2 else Layout.AUTO


def place_vector(value: Value, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A norm's weight or a bias: [n, 1] rows as a vector of the compute dtype on the device."""
    assert isinstance(value, DenseRows)
    return as_tensor(value.rows_RI, value.dtype).flatten().to(device, dtype)


def place_rows(value: Value, device: torch.device, dtype: torch.dtype) -> Readable:
    """A whole weight in a form whose rows can be read: dense in the compute dtype, or as it is packed."""
    if isinstance(value, DenseRows):
        return DenseWeight(aligned(as_tensor(value.rows_RI, value.dtype).to(device, dtype)))
    if _is_grid(value):
        return _place_codes(value, device, dtype)
    return EncodedWeight(value, value.width, device, dtype)


def place_weight(
    value: Value,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    allocate: Allocate = one_by_one,
) -> Weight:
    """A whole weight: for speed, in the layout of the device's kernels.

    The reference layout stands for what they cannot hold.
    """
    if layout is Layout.AUTO and dtype == torch.bfloat16 and _is_grid(value) and available(device):
        packed = mma_weight(value, device)
        if packed is not None:
            return packed
    return place_table(value, device, dtype, layout, allocate)


def place_table(
    value: Value,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    allocate: Allocate = one_by_one,
) -> Table:
    """A whole weight whose rows can be read too; for speed, in the layout of the CPU's kernels.

    Those are made in memory that `allocate` gives.
    """
    if layout is Layout.DENSE:
        return decoded(place_rows(value, device, dtype))
    if layout is Layout.REFERENCE or device.type != "cpu" or available(device):
        return place_rows(value, device, dtype)
    fills_lanes = value.width % LANES == 0  # which the kernel reads whole
    if isinstance(value, DenseRows) and value.dtype is DType.BF16 and dtype == torch.float32 and fills_lanes:
        return DenseWeight(_copied(as_tensor(value.rows_RI, DType.BF16), allocate), dtype)
    packed = pack_grid(value, dtype, allocate)
    if packed is not None:
        return packed
    placed = place_rows(value, device, dtype)
    return DenseWeight(_copied(placed.w_OI, allocate)) if isinstance(placed, DenseWeight) else placed


def _copied(w_OI: Tensor, allocate: Allocate) -> Tensor:
    """The same numbers in memory that is allocated so, unless they are so many that it does not matter."""
    if allocate is one_by_one or w_OI.nbytes >= LARGE_BY_ITSELF:
        return w_OI
    return allocate(w_OI.numel(), w_OI.dtype).view(w_OI.shape).copy_(w_OI)


def decoded(weight: Readable) -> DenseWeight:
    """A copy of what a weight is worth in the compute dtype, made a bounded block of rows at a time."""
    if isinstance(weight, DenseWeight) and not weight.widens:
        return weight
    out, width = weight.shape
    rows = max(1, SCRATCH_BYTES // (4 * width))
    return DenseWeight(torch.cat([weight.rows(slice(i, i + rows)) for i in range(0, out, rows)]))


def stack(values: Sequence[Value]) -> Value | None:
    """The rows of several weights as one weight, which takes one launch; None for unlike forms."""
    first = values[0]
    if not all(isinstance(value, DenseRows) or _is_grid(value) for value in values):
        return None
    if len({value.dtype if isinstance(value, DenseRows) else value.encoding for value in values}) > 1:
        return None
    columns = zip(*(value.arrays for value in values), strict=True)
    return first.with_arrays(tuple(np.concatenate(column) for column in columns))


def _is_grid(value: Value) -> TypeGuard[AffineIntRows]:
    """Whether it is a grid of integer zeros with groups of consecutive columns."""
    return isinstance(value, AffineIntRows) and value.groups_I is None


def _place_codes(value: AffineIntRows, device: torch.device, dtype: torch.dtype) -> IntWeight:
    packs = value.encoding.bits <= 4
    zeros: Tensor | int = 1 << (value.encoding.bits - 1)
    if value.zeros_RG is not None:
        zeros = torch.from_numpy(value.zeros_RG).to(device)
    codes_OB = codes_of(value)
    if packs:  # two codes to a byte, as IntWeight describes
        half = (value.width + 1) // 2
        low, high = codes_OB[:, :half].copy(), codes_OB[:, half:]
        low[:, : high.shape[1]] |= high << 4
        codes_OB = low
    return IntWeight(
        codes_OB=torch.from_numpy(codes_OB).to(device),
        scales_OG=as_tensor(value.scales_RG, value.encoding.scale_dtype).to(device),
        zeros_OG=zeros,
        width=value.width,
        dtype=dtype,
        kind="int4" if packs else "int8",
    )
