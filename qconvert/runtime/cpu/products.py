"""Multiplies few rows of input by weights, with the CPU kernels.

Legend: O out features (rows), I in features, N rows of the input.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qconvert.runtime.cpu.step_kernel import multiply


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
    multiply(weight.kernel_args(bias_O, bytes_=bytes_), x_NI.data_ptr(), y_NO.data_ptr(), len(x_NI))
    return y_NO.to(x.dtype).view(*x.shape[:-1], -1)
