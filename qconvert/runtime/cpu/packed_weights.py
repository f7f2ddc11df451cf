"""Packs weights in the layout of the CPU kernels and multiplies by them; made at load, never saved.

Legend: O out features (rows), I in features, G groups, B bytes of a row, N rows of the input, R rows
asked for. Rows are padded to whole blocks of 128 columns; `coded_dots.py` says how a block lies in
memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qconvert.core.dtypes import DType
from qconvert.core.values import Value
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime.cpu.byte_dots import byte_kernel
from qconvert.runtime.cpu.coded_dots import TABLE_NUMBERS
from qconvert.runtime.cpu.kernel_args import BF16, F16, F32, I8, LINEAR
from qconvert.runtime.cpu.kernels import compiled
from qconvert.runtime.cpu.packed_spec import Levels, Recipe, recipe_for
from qconvert.runtime.cpu.products import multiply_few
from qconvert.runtime.cpu.row_decoding import decode_rows
from qconvert.runtime.cpu.simd import BLOCK, PART
from qconvert.runtime.cpu.weight_memory import Allocate, one_by_one
from qconvert.runtime.storage import as_tensor, multiply_decoded

_PACKED_CODES = 1 << 20
"""Codes that a thread unpacks at a time, a byte each, while a weight is packed."""
_BITS = {"int4": 4, "table4": 4, "int6": 6}
_MOST = 16383
"""The largest whole number of a table: sums of four products with inputs of 16 bits fit 32."""
_DENOMINATORS = (1, 2, 192)
"""Of E2M1 and the whole numbers of IQ4, and of bitsandbytes' FP4: what makes all numbers whole."""
_ROUNDING = {DType.F32: (0, 0.0), DType.BF16: (7, 2.0**-126), DType.F16: (10, 2.0**-14)}
"""Bits of fraction of a float type, and its smallest normal number."""


_NUMBER_TYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: I8}
_FLOAT_KINDS = ("e4m3", "e5m2")
# The last number of rows at which the kernels are not behind decoding + torch's float32 matmul (whose bf16
# one is faster where the processor has bf16), one core of an AMD EPYC without AVX-512, milliseconds of
# processor time at rows 1 / 4 / 8 / 16 / 32 (those of bf16 weights: `storage.py`):
#   int4 g128,  9728 x 896   integers 0.46 / 1.9 / 3.7 / 7.2 / 14.2   decoded 5.7 / 8.2 / 9.6 / 11.6 / 14.9
#   int4 g128,  896 x 4864   integers 0.20 / 0.7 / 1.5 / 3.0 /  5.8   decoded 2.3 / 3.1 / 3.8 /  4.7 /  6.3
#   int8 g128,  9728 x 896   integers 0.39 / 1.6 / 3.2 / 6.3 / 12.1   decoded 6.2 / 8.3 / 9.3 / 10.3 / 15.2
# Of the other kinds, codes of a table and codes of 6 bits take 1.4 to 1.6 times as long a row as int4 g128
# and 8-bit floats 2.4 times, where decoding takes as long as int4's (27 against 25 ms for 9728 x 1024).
# At 512 rows, decoding int4 and multiplying takes 123 ms, torch's matmul alone 124.
MOST_INTEGER_ROWS = 16
MOST_FLOAT_ROWS = 8


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """A number for each group, `stored_OG` float32, bfloat16, half precision; or int8, each to be
    multiplied by the float32 in `super_OS` of its run of groups.
    """

    stored_OG: Tensor
    super_OS: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.stored_OG.nbytes + (0 if self.super_OS is None else self.super_OS.nbytes)

    def part(self, index: slice) -> GroupNumbers:
        """Those of some rows; no copy."""
        return GroupNumbers(self.stored_OG[index], None if self.super_OS is None else self.super_OS[index])


@dataclass(frozen=True, slots=True)
class PackedGrid:
    """Codes worth `(code - zero) * scale / divisor * factor + min`, computed with as `dtype`.

    `codes_OB` uint8 [O, bytes]: nibbles of kind `int4-cpu`, or `table4-cpu` where a number of a table
    stands for `code - zero`; nibbles and pairs of bits (`int6-cpu`); else bytes, signed ones (`int8-cpu`)
    or floats (`e4m3-cpu`, `e5m2-cpu`). `table` is that of the kernels, uint8. `zeros_OG` int8, or None
    where `zero` is that of all groups. Decoding rounds product and sum to `rounding`, the type that the
    layout's own tools compute in.
    """

    codes_OB: Tensor
    scales: GroupNumbers
    mins: GroupNumbers | None
    zeros_OG: Tensor | None
    recipe: Recipe
    table: Tensor | None
    unit: float
    width: int
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        return f"{self.recipe.kind}-cpu"

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes_OB.shape[0], self.width

    @property
    def nbytes(self) -> int:
        held = [self.scales.nbytes, 0 if self.mins is None else self.mins.nbytes]
        return self.codes_OB.nbytes + sum(held) + (0 if self.zeros_OG is None else self.zeros_OG.nbytes)

    def part(self, index: slice) -> PackedGrid:
        return replace(
            self,
            codes_OB=self.codes_OB[index],
            scales=self.scales.part(index),
            mins=None if self.mins is None else self.mins.part(index),
            zeros_OG=None if self.zeros_OG is None else self.zeros_OG[index],
        )

    def rows(self, index: slice | Tensor) -> Tensor:
        """Dequantized rows, [R, I] in the compute dtype, rounded once."""
        rows_R = torch.arange(self.shape[0])[index].contiguous()
        out_RI = torch.empty(len(rows_R), self.width, dtype=self.dtype)
        decode_rows(self.record(), self.recipe.kind, rows_R, out_RI)
        return out_RI

    def multiplies_codes(self, rows: int) -> bool:
        """Whether products with so many rows are made of integer codes, not of floats or decoded rows."""
        return self.recipe.kind not in _FLOAT_KINDS and rows <= MOST_INTEGER_ROWS

    def multiply(self, x: Tensor, bias_O: Tensor | None, *, bytes_: bool = False) -> Tensor:
        """`x W^T + b`, [..., O] in the dtype of x: few rows one by one, more with decoded rows.

        With `bytes_`, few rows may be rounded to 8 bits (`kernel_args`).
        """
        rows = x.numel() // x.shape[-1]
        if rows > (MOST_FLOAT_ROWS if self.recipe.kind in _FLOAT_KINDS else MOST_INTEGER_ROWS):
            return multiply_decoded(x, self, bias_O)
        return multiply_few(x, self, bias_O, bytes_=bytes_)

    def kernel_args(self, bias_O: Tensor | None = None, *, bytes_: bool = False) -> np.ndarray:
        """Its fields of LINEAR; the caller keeps weight and bias (float32, contiguous) alive.

        With `bytes_`, inputs may be rounded to 8 bits, which they are where `byte_kernel` has a kernel.
        """
        args, recipe = self.record(), self.recipe
        args["bias"] = _address(bias_O)
        kernel = byte_kernel(args[0], recipe.kind) if bytes_ else None
        args["kernel"] = compiled(kernel or _kernel_of(recipe)).address
        return args

    def record(self) -> np.ndarray:
        """These fields without a bias, and without the kernel that multiplies few rows: only who calls it has
        it compiled. The caller keeps the weight alive.
        """
        args, recipe, mins = np.zeros(1, LINEAR), self.recipe, self.mins
        supers = self.scales.super_OS
        rounded_bits, least = _ROUNDING[recipe.rounding]
        fields = {
            "rows": self.shape[0],
            "width": self.width,
            "codes": self.codes_OB.data_ptr(),
            "table": _address(self.table),
            "group": recipe.group,
            "zeros": _address(self.zeros_OG),
            "zero": recipe.zero,
            "number_type": _NUMBER_TYPES[self.scales.stored_OG.dtype],
            "scales": self.scales.stored_OG.data_ptr(),
            "supers": _address(supers),
            "mins": 0 if mins is None else mins.stored_OG.data_ptr(),
            "super_mins": 0 if mins is None else _address(mins.super_OS),
            "shared": 0 if supers is None else self.scales.stored_OG.shape[1] // supers.shape[1],
            "divisor": recipe.divisor,
            "factor": recipe.factor,
            "unit": self.unit,
            "rounded_bits": rounded_bits,
            "least": least,
        }
        for name, number in fields.items():
            args[name] = number
        return args


def pack_grid(value: Value, dtype: torch.dtype, allocate: Allocate = one_by_one) -> PackedGrid | None:
    """A quantized weight in the layout of the kernels, packed some rows at a time.

    None for forms that are no grid (lattices, columns in activation order), groups that are no multiple
    of 16 columns, and widths that are none of 32.
    """
    recipe, rows = recipe_for(value), value.rows
    if recipe is None or not rows:
        return None
    first = recipe.take(value.with_arrays(tuple(array[:1] for array in value.arrays)))
    width = first.codes_RI.shape[1]
    whole = width % recipe.group == 0 or recipe.group % BLOCK == 0
    if width % PART or recipe.group % LANES or not whole:
        return None
    order = {"int4": _pack_int4, "table4": _pack_int4, "int6": _pack_int6}.get(recipe.kind, np.asarray)
    padded = (width + BLOCK - 1) // BLOCK * BLOCK
    row_bytes = padded * _BITS.get(recipe.kind, 8) // 8
    codes_OB = allocate(rows * row_bytes, torch.uint8).view(rows, row_bytes)
    scales = _room(first.scales, rows, allocate)
    mins = None if first.mins is None else _room(first.mins, rows, allocate)
    zeros_OG = None if first.zeros_RG is None else _slack(rows, first.zeros_RG.shape[1], torch.int8, allocate)

    def pack(start: int) -> None:
        block = slice(start, start + step)
        some = recipe.take(value.with_arrays(tuple(array[block] for array in value.arrays)))
        codes_RI = some.codes_RI
        if padded > width:
            codes_RI = np.pad(codes_RI, ((0, 0), (0, padded - width)))
        codes_OB[block] = torch.from_numpy(order(codes_RI))
        _fill(scales, block, some.scales)
        if mins is not None and some.mins is not None:
            _fill(mins, block, some.mins)
        if zeros_OG is not None:
            zeros_OG[block] = torch.from_numpy(some.zeros_RG)

    step = max(1, _PACKED_CODES // width)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(pack, range(0, rows, step)):
            pass
    table, unit = (None, 1.0) if recipe.table is None else _table(recipe.table)
    if recipe.kind == "e4m3":
        unit = 256.0
    return PackedGrid(codes_OB, scales, mins, zeros_OG, recipe, table, unit, width, dtype)


def _slack(rows: int, columns: int, dtype: torch.dtype, allocate: Allocate) -> Tensor:
    """An array with some numbers behind it, which the kernels may read and make nothing of."""
    return allocate(rows * columns + LANES, dtype).zero_()[: rows * columns].view(rows, columns)


def _room(levels: Levels, rows: int, allocate: Allocate) -> GroupNumbers:
    types = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.I8: torch.int8}
    dtype = types.get(levels.dtype, torch.float32)
    stored_OG = _slack(rows, levels.stored_RG.shape[1], dtype, allocate)
    if levels.super_RS is None:
        return GroupNumbers(stored_OG)
    return GroupNumbers(stored_OG, _slack(rows, levels.super_RS.shape[1], torch.float32, allocate))


def _fill(numbers: GroupNumbers, block: slice, levels: Levels) -> None:
    stored = np.ascontiguousarray(levels.stored_RG)
    numbers.stored_OG[block] = (
        torch.from_numpy(stored) if levels.dtype is DType.I8 else as_tensor(stored, levels.dtype)
    )
    if numbers.super_OS is not None and levels.super_RS is not None:
        numbers.super_OS[block] = torch.from_numpy(levels.super_RS)


def _pack_int4(codes_RI: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in the order of `coded_dots.py`: [rows, padded width / 2]."""
    rows, width = codes_RI.shape
    parts = _as_bytes_lie(codes_RI).reshape(rows, width // (2 * PART), 2, PART)
    packed: np.ndarray = parts[:, :, 0] | parts[:, :, 1] << 4
    return packed.reshape(rows, width // 2)


def _pack_int6(codes_RI: np.ndarray) -> np.ndarray:
    """Codes of 6 bits likewise: [rows, padded width * 3 / 4]."""
    rows, width = codes_RI.shape
    parts = _as_bytes_lie(codes_RI >> 4).reshape(rows, width // BLOCK, 4, PART)
    pairs = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    nibbles = _pack_int4(codes_RI & 15).reshape(rows, width // BLOCK, 2 * PART)
    return np.concatenate([nibbles, pairs], axis=2).reshape(rows, -1)


def _as_bytes_lie(codes_RI: np.ndarray) -> np.ndarray:
    """Columns of every part in the order of its bytes."""
    reordered: np.ndarray = codes_RI.reshape(len(codes_RI), -1, 2, 2, 8).swapaxes(2, 3)
    return reordered


def _table(numbers: np.ndarray) -> tuple[Tensor, float]:
    """Numbers as the kernels read them, uint8 [128], and what their whole numbers count in."""
    wholes = [(np.rint(numbers * d), 1 / d) for d in _DENOMINATORS]
    exact = [pair for pair in wholes if np.allclose(pair[0] * pair[1], numbers, rtol=1e-6, atol=0)]
    if not exact:
        # The unit that leaves the least: some count of steps to the largest number.
        tops = np.abs(numbers).max() / np.arange(_MOST // 2, _MOST + 1)
        rest = np.abs(np.rint(numbers / tops[:, None]) * tops[:, None] - numbers).max(axis=1)
        unit = float(tops[rest.argmin()])
        exact = [(np.rint(numbers / unit), unit)]
    whole, unit = exact[0]
    low_high = whole.astype("<i2").view(np.uint8).reshape(TABLE_NUMBERS, 2).T
    table = np.concatenate([np.repeat(low_high, 2, axis=0).ravel(), numbers.astype("<f4").view(np.uint8)])
    return torch.from_numpy(table), unit


def _kernel_of(recipe: Recipe) -> str:
    if recipe.kind in _FLOAT_KINDS:
        return recipe.kind
    whole = recipe.group % BLOCK == 0 and recipe.table is None
    by = "half_parts" if recipe.group % PART else "blocks" if whole else "parts"
    return f"{'lut' if recipe.kind == 'table4' else recipe.kind}_by_{by}"


def _address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()
