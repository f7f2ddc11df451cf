"""Multiplies by a weight and adds a bias, and shows observers what is multiplied.

Legend: O out features (rows), I in features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qconvert.core.activations import INT8_GROUPS, InputQuantization
from qconvert.runtime.cpu.byte_products import multiplies_bytes, multiply_bytes
from qconvert.runtime.cpu.packed_weights import MOST_INTEGER_ROWS, PackedGrid
from qconvert.runtime.cuda.packing import MmaWeight
from qconvert.runtime.input_rounding import round_inputs
from qconvert.runtime.observers import Tap
from qconvert.runtime.storage import Readable

Table = Readable | PackedGrid
"""Weights whose rows can be read, one by one or in blocks."""
Weight = Table | MmaWeight
"""Weights multiply themselves: `multiply(x, bias)` chooses the kernel by the number of rows."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`; observers see x first, then it is rounded to what is multiplied, if that is quantized.

    Of linears that share an input, one has the tap of all. `INT8_GROUPS` is for speed: codes of quantized
    weights are multiplied without decoding them. Of few rows, inputs of a table's codes are not rounded.
    """

    weight: Weight
    bias_O: Tensor | None = None
    tap: Tap | None = None
    inputs: InputQuantization | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] in the dtype of x."""
        if self.tap is not None and self.tap.observers:
            self.tap.show(x)
        if self.inputs == INT8_GROUPS and isinstance(self.weight, PackedGrid):
            rows = x.numel() // x.shape[-1]
            if rows <= MOST_INTEGER_ROWS:
                return self.weight.multiply(x, self.bias_O, bytes_=True)
            if multiplies_bytes(rows, self.weight):
                return multiply_bytes(x, self.weight, self.bias_O)
        if self.inputs is not None:
            x = round_inputs(x, self.inputs)
        return self.weight.multiply(x, self.bias_O)
