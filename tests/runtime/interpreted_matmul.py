"""The matmul kernels in Triton's interpreter, against the numbers that the packed weights stand for.

Run by test_cuda_matmul.py in a process of its own: TRITON_INTERPRET counts only before the first import.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.quant.packed_codes import codes_of
from qconvert.runtime.cuda.dequantize import dequantize
from qconvert.runtime.cuda.matmul import most_rows, multiply_partials
from qconvert.runtime.cuda.packing import FewRowWeight, mma_weight
from qconvert.runtime.cuda.tiles import sums_for
from qconvert.runtime.cuda.triton_language import INTERPRET
from qconvert.runtime.device_layout import Layout, place_weight
from qconvert.runtime.linear import Linear
from qconvert.runtime.storage import DenseWeight
from tests.runtime.test_decoder_linear import random_value, worth
from tests.support import cuda_reference as reference

CPU = torch.device("cpu")
BF16 = torch.bfloat16
assert INTERPRET


def rounding(bits: int) -> float:
    """Bound on the relative error of a product of exact numbers that is summed in float32.

    A code of 4 bits is summed with 128 beside it, 30 times its distance from the zero, of 8 bits with
    twice that distance; each bit less halves the distance.
    """
    return 3e-6 * 2.0 ** (4 - bits) if bits <= 4 else 3e-7 * 2.0 ** (8 - bits)


def random_rows(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(BF16)


def check(weight: FewRowWeight, w_NK: torch.Tensor, rows: int, splits: int, most: float) -> None:
    """The sum of the parts is the product, and every part is what the reference says it is."""
    x_MK = random_rows(rows, w_NK.shape[1])
    sums_GM = sums_for(x_MK, weight)
    parts = multiply_partials(x_MK, sums_GM, weight, splits)
    assert parts.shape == (splits, rows, w_NK.shape[0]) and parts.dtype == torch.float32
    want = x_MK.double() @ w_NK.double().T
    assert (parts.double().sum(0) - want).norm() <= most * want.norm()
    parts_wanted = reference.multiply_partials(x_MK, sums_GM, weight, splits)
    assert (parts - parts_wanted).norm() <= 2 * most * want.norm()


def check_grid(encoding: AffineInt, shape: tuple[int, int], rows: int, splits: int) -> None:
    value = random_value(encoding, *shape)
    weight = mma_weight(value, CPU)
    assert weight is not None
    check(weight, torch.from_numpy(worth(value)), rows, splits, rounding(encoding.bits))


@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 2)])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_grids(bits: int, symmetric: bool, group: int | None, rows: int, splits: int) -> None:
    check_grid(AffineInt(bits, group, symmetric, DType.BF16), (128, 256), rows, splits)


@pytest.mark.parametrize(
    ("encoding", "shape", "rows", "splits"),
    [
        # as many rows as there may be, in one or several instructions' widths
        (AffineInt(4, 128, True, DType.BF16), (128, 128), 64, 1),
        (AffineInt(4, 128, False, DType.BF16), (128, 128), 17, 1),
        (AffineInt(4, 32, False, DType.BF16), (128, 128), 16, 1),
        (AffineInt(8, 64, True, DType.BF16), (128, 128), 16, 1),
        (AffineInt(8, 64, False, DType.BF16), (128, 128), 32, 1),
        (AffineInt(8, None, True, DType.BF16), (128, 128), 64, 1),
        # sides that are no whole tiles, fewer bits, other scales, more splits than tiles
        (AffineInt(3, 32, False, DType.F16), (130, 160), 5, 2),
        (AffineInt(2, 64, True, DType.F32), (70, 320), 2, 1),
        (AffineInt(5, 64, False, DType.F32), (130, 192), 3, 1),
        (AffineInt(6, None, False, DType.F16), (70, 100), 3, 8),
        (AffineInt(4, 256, True, DType.BF16), (64, 1024), 1, 8),
        (AffineInt(4, 128, False, DType.BF16), (128, 896), 16, 4),
    ],
    ids=str,
)
def test_edges(encoding: AffineInt, shape: tuple[int, int], rows: int, splits: int) -> None:
    check_grid(encoding, shape, rows, splits)


@pytest.mark.parametrize(
    ("shape", "rows", "splits"), [((128, 256), 1, 2), ((130, 300), 5, 2), ((70, 128), 40, 1)]
)
def test_dense(shape: tuple[int, int], rows: int, splits: int) -> None:
    w_NK = random_rows(*shape)
    check(DenseWeight(w_NK), w_NK, rows, splits, 3e-7)


def test_codes_at_both_ends_of_a_byte_and_a_nibble() -> None:
    """Every code beside every zero, alone in its row: one code times one number is exact."""
    for bits in (4, 8):
        value = random_value(AffineInt(bits, 128, False, DType.F32), 1 << bits, 128)
        codes_of(value)[:] = torch.arange(1 << bits, dtype=torch.uint8)[:, None].numpy()
        value.scales_RG[:] = 1
        value.zeros_RG[:, 0] = codes_of(value)[::-1, 0]
        weight = mma_weight(value, CPU)
        assert weight is not None
        x_MK = torch.zeros(1, 128, dtype=BF16)
        x_MK[0, 77] = 3
        got = multiply_partials(x_MK, sums_for(x_MK, weight), weight, 1)
        assert torch.equal(got[0, 0], 3.0 * (2 * torch.arange(1 << bits) - (1 << bits) + 1))


def test_the_result_goes_where_it_is_asked_to_and_only_there() -> None:
    value = random_value(AffineInt(4, 64, True, DType.BF16), 130, 256)
    weight = mma_weight(value, CPU)
    assert weight is not None and most_rows(weight) == 32
    x_MK = random_rows(3, 512)[:, 128:384]  # rows that lie apart
    room = torch.full((4, 3, 130), torch.nan)
    out = room[1:3]
    assert multiply_partials(x_MK, sums_for(x_MK, weight), weight, 2, out) is out
    want = x_MK.double() @ torch.from_numpy(worth(value)).double().T
    assert (out.double().sum(0) - want).norm() <= rounding(4) * want.norm()
    assert room[0].isnan().all() and room[3].isnan().all()
    again = multiply_partials(x_MK, sums_for(x_MK, weight), weight, 2)
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [
        (AffineInt(4, 128, True, DType.BF16), (256, 256)),
        (AffineInt(4, 32, False, DType.F16), (130, 160)),
        (AffineInt(4, None, True, DType.F32), (128, 128)),
        (AffineInt(8, 128, True, DType.BF16), (128, 256)),
        (AffineInt(8, 64, False, DType.F32), (70, 192)),
        (AffineInt(8, None, False, DType.BF16), (128, 100)),
    ],
    ids=str,
)
def test_dequantized_rows_are_exact(encoding: AffineInt, shape: tuple[int, int]) -> None:
    """In float32, because the interpreter truncates where a GPU rounds to bfloat16."""
    value = random_value(encoding, *shape)
    weight = mma_weight(value, CPU)
    assert weight is not None
    want = torch.from_numpy(worth(value))
    room = torch.full((shape[0] + 2, shape[1] + 3), torch.nan)
    assert torch.equal(dequantize(weight, 0, shape[0], room[1:-1, : shape[1]]), want)
    assert room.isnan().sum() == room.numel() - want.numel()
    if shape[0] > 128:
        rest = torch.empty(shape[0] - 128, shape[1])
        assert torch.equal(dequantize(weight, 128, shape[0], rest), want[128:])


@pytest.mark.parametrize("rows", [1, 50, 65])
@pytest.mark.parametrize(
    "encoding", [AffineInt(4, 64, True, DType.BF16), AffineInt(8, 64, False, DType.BF16)]
)
def test_a_linear_layer_of_any_number_of_rows(
    encoding: AffineInt, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias; many rows by blocks of the weight."""
    monkeypatch.setattr("qconvert.runtime.cuda.dequantize.SCRATCH_BYTES", 1)
    value = random_value(encoding, 192, 128)
    bias_O = random_rows(1, 192)[0]
    linear = Linear(place_weight(value, CPU, BF16, Layout.AUTO), bias_O)
    assert linear.weight.multiplies_codes(rows) == (rows <= 64)
    x = random_rows(rows, 128).view(1, rows, 128)
    want = x.double() @ torch.from_numpy(worth(value)).double().T + bias_O.double()
    got = linear(x)
    assert got.dtype == BF16 and got.shape == (1, rows, 192)
    # Once rounded; by the interpreter, which truncates, the weight as well.
    assert (got.double() - want).norm() <= 2.0**-7 * want.norm()


@triton.jit
def _doubled(x, y):  # type: ignore[no-untyped-def]
    tl.store(y, tl.load(x) * 2)


def test_an_overflow_of_integers_is_seen() -> None:
    """Which the interpreter is told to look for at less cost than by its own operations."""
    most = torch.iinfo(torch.int32).max
    for dtype in (torch.int32, torch.int64):
        y_1 = torch.zeros(1, dtype=dtype)
        _doubled[(1,)](torch.tensor([most // 2], dtype=dtype), y_1)
        assert int(y_1) == most - 1
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation mul"):
        _doubled[(1,)](torch.tensor([most // 2 + 1], dtype=torch.int32), y_1)
