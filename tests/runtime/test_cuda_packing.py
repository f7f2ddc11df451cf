"""The GPU layouts hold what was packed, in the order they say, and are worth what the reference is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows
from qconvert.quant.packed_codes import codes_of
from qconvert.runtime.cuda.packing import (
    MmaWeight,
    mma_weight,
    pack_codes,
    pack_scales,
    pack_zeros,
    unpack_codes,
    unpack_scales,
    unpack_zeros,
)
from qconvert.runtime.cuda.tiles import group_sums, sums_for
from qconvert.runtime.device_layout import place_rows
from qconvert.runtime.storage import DenseWeight
from tests.runtime.test_decoder_linear import random_value, worth
from tests.support.cuda_reference import multiply_partials, split_columns

CPU = torch.device("cpu")
BF16 = torch.bfloat16
FORMS = [
    (AffineInt(4, 128, True, DType.BF16), (256, 256)),
    (AffineInt(4, 32, False, DType.F16), (130, 160)),
    (AffineInt(2, 64, True, DType.F32), (128, 192)),
    (AffineInt(3, 256, False, DType.BF16), (64, 256)),
    (AffineInt(4, None, True, DType.BF16), (200, 100)),
    (AffineInt(8, 128, True, DType.BF16), (128, 384)),
    (AffineInt(8, 32, False, DType.F16), (70, 96)),
    (AffineInt(5, 64, False, DType.F32), (130, 128)),
    (AffineInt(6, None, True, DType.BF16), (128, 129)),
    (AffineInt(8, None, False, DType.F32), (3, 40)),
]


def random_codes(bits: int, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, width), generator=generator, dtype=torch.uint8)


@given(
    bits=st.sampled_from([4, 8]),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_unpacking_undoes_packing(bits: int, tiles: tuple[int, int], seed: int) -> None:
    codes = random_codes(bits, 128 * tiles[0], 128 * tiles[1], seed)
    words = pack_codes(codes, bits)
    assert words.shape == (*tiles, bits, 128, 4) and words.dtype == torch.int32 and words.is_contiguous()
    assert torch.equal(unpack_codes(words), codes)
    assert torch.equal(pack_codes(unpack_codes(words.flip(3)), bits), words.flip(3))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_word_holds_the_columns_that_the_diagram_says(bits: int) -> None:
    """Every code written where its column belongs by the formula of the layout, one by one."""
    codes = random_codes(bits, 128, 256)
    words = pack_codes(codes, bits)
    block = 32 if bits == 4 else 16
    for row, column in ((0, 0), (1, 1), (5, 9), (77, 30), (127, 127), (3, 128), (90, 255), (64, 178)):
        tile, k = divmod(column, 128)
        inside = k % block
        word = int(words[0, tile, k // block, row, inside % 8 // 2]) & 0xFFFFFFFF
        found = word >> (inside // 8 * bits + 16 * (inside % 2)) & (2**bits - 1)
        assert found ^ (128 if bits == 8 else 0) == int(codes[row, column])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_scales_and_zeros_lie_by_the_rows_of_a_thread(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    grid = torch.randint(0, 256, (384, 3 * groups), generator=generator, dtype=torch.uint8)
    scales, zeros = pack_scales(grid, groups), pack_zeros(grid, groups)
    assert torch.equal(unpack_scales(scales), grid) and torch.equal(unpack_zeros(zeros), grid)
    tile = grid[256:].view(128, 3, groups)
    assert torch.equal(scales[2, 1, 8 * 3 + 5], torch.stack([tile[53, 1], tile[61, 1]], dim=-1))
    rows = [tile[row, 1] for row in (53, 61, 117, 125)]
    assert torch.equal(zeros[2, 1, 8 * 3 + 5], torch.stack(rows, dim=-1))


@pytest.mark.parametrize(("encoding", "shape"), FORMS, ids=str)
def test_rows_are_those_of_the_reference_layout(encoding: AffineInt, shape: tuple[int, int]) -> None:
    value = random_value(encoding, *shape)
    weight = mma_weight(value, CPU)
    assert isinstance(weight, MmaWeight) and weight.shape == shape
    assert weight.bits == (4 if encoding.bits <= 4 else 8)
    want = place_rows(value, CPU, BF16).rows(slice(None))
    assert torch.equal(weight.rows(slice(None)), want)
    assert torch.equal(weight.rows(slice(2, shape[0] - 1)), want[2:-1])


def test_memory_is_codes_scales_and_zeros() -> None:
    weight = mma_weight(random_value(AffineInt(4, 128, True, DType.BF16), 256, 512), CPU)
    assert weight is not None and weight.nbytes == 256 * 512 // 2 + 256 * 4 * 2
    weight = mma_weight(random_value(AffineInt(8, 64, False, DType.F32), 256, 512), CPU)
    assert weight is not None and weight.nbytes == 256 * 512 + 256 * 8 * 5


def test_blocks_of_rows_pack_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    value = random_value(AffineInt(4, 32, True, DType.BF16), 400, 256)
    whole = mma_weight(value, CPU)
    monkeypatch.setattr("qconvert.runtime.cuda.packing._PACK_BYTES", 1)
    parts = mma_weight(value, CPU)
    assert whole is not None and parts is not None and torch.equal(whole.words, parts.words)


def test_what_the_kernels_cannot_hold_is_not_packed() -> None:
    assert mma_weight(random_value(AffineInt(4, 16, True, DType.BF16), 128, 128), CPU) is None
    plain = random_value(AffineInt(4, 64, True, DType.BF16), 128, 128)
    order = AffineIntRows(
        codes_of(plain), plain.scales_RG, None, plain.encoding, np.arange(128, dtype=np.int32) % 2
    )
    assert mma_weight(order, CPU) is None


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("encoding", "shape"), FORMS, ids=str)
def test_the_partial_products_sum_to_the_product(
    encoding: AffineInt, shape: tuple[int, int], splits: int
) -> None:
    value = random_value(encoding, *shape)
    weight = mma_weight(value, CPU)
    assert weight is not None
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1)).to(BF16)
    partials = multiply_partials(x, sums_for(x, weight), weight, splits)
    assert partials.shape == (splits, 5, shape[0]) and partials.dtype == torch.float32
    want = x.double() @ torch.from_numpy(worth(value)).double().T
    assert (partials.double().sum(0) - want).norm() / want.norm() < 2e-6


def test_a_dense_weight_has_the_same_contract() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(3, 300, generator=generator).to(BF16),
        torch.randn(70, 300, generator=generator).to(BF16),
    )
    out = torch.empty(2, 3, 70)
    partials = multiply_partials(x, None, DenseWeight(w), 2, out)
    assert partials is out and sums_for(x, DenseWeight(w)) is None
    want = x.double() @ w.double().T
    assert (partials.double().sum(0) - want).norm() / want.norm() < 2e-6


@given(st.integers(1, 4000), st.integers(1, 8))
def test_splits_are_whole_tiles_that_cover_all_columns(width: int, splits: int) -> None:
    parts = split_columns(width, splits)
    assert len(parts) == splits and parts[0].start == 0 and parts[-1].stop == width
    assert all(a.stop == b.start and (b.start % 128 == 0 or b.start == width) for a, b in pairwise(parts))


def test_group_sums_are_the_sums_of_columns() -> None:
    x = torch.arange(20.0).view(2, 10).to(BF16)
    assert torch.equal(group_sums(x, 4), torch.tensor([[6.0, 46.0], [22.0, 62.0], [17.0, 37.0]]))
