"""Packed CPU kernels against the reference, on the layer shapes of real models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qconvert.decoder import aten
from qconvert.decoder.aten import PackedInt4, PackedInt8, pack_int4, tile_rows
from qconvert.decoder.linear import BACKENDS, Linear
from qconvert.decoder.place import Layout, place_rows, place_weight
from qconvert.tensors import DType, GroupInt, IntAffine
from tests.test_decoder_linear import CPU, random_value, worth

BF16 = torch.bfloat16
ROUNDING = 2.0**-8
"""The most that rounding to bfloat16 changes a number, relative to it."""

# Rows and columns of every linear of Qwen2.5-0.5B (qkv and o, gate_up, down), and 64 rows at the
# widths of Qwen2.5-1.5B and 7B, Qwen3-0.6B and 8B.
SHAPES = [(1152, 896), (896, 896), (9728, 896), (896, 4864)]
SHAPES += [(64, width) for width in (1536, 8960, 3584, 18944, 1024, 2048, 3072, 4096, 12288)]
FORMS = [
    GroupInt(4, 128, True, DType.BF16),
    GroupInt(4, 32, False, DType.BF16),
    GroupInt(8, 128, True, DType.BF16),
    GroupInt(8, None, True, DType.BF16),
]

needs_kernel = pytest.mark.skipif(tile_rows() is None, reason="torch has no packed int4 kernel here")


def relative_error(linear: Linear, value: IntAffine, rows: int) -> float:
    """The norm of the error of a product against float64, relative to the norm of the product."""
    x = torch.randn(rows, value.codes_RI.shape[1], generator=torch.Generator().manual_seed(rows)).to(BF16)
    want = (x.float() @ torch.from_numpy(worth(value)).T).double()
    return float((linear(x).double() - want).norm() / want.norm())


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.label)
def test_error_is_within_the_rounding_of_the_output(form: GroupInt, shape: tuple[int, int]) -> None:
    """Rounding the result alone costs 1.7e-3 on average. A weight decoded for many rows was rounded
    too, an offset once more, and sums of groups of 8 bits are sums of rounded numbers: all of it
    together stays below one bfloat16 rounding, 3.9e-3."""
    value = random_value(form, *shape)
    linear = Linear(place_weight(value, CPU, BF16, Layout.AUTO))
    assert isinstance(linear.weight, PackedInt4 | PackedInt8)
    assert relative_error(linear, value, 3) < ROUNDING
    assert relative_error(linear, value, 40) < ROUNDING


@needs_kernel
@pytest.mark.parametrize("form", [FORMS[0], GroupInt(2, 64, True, DType.BF16), FORMS[2], FORMS[3]])
def test_symmetric_weights_decode_to_the_reference_exactly(form: GroupInt) -> None:
    value = random_value(form, 192, 256)
    want = place_rows(value, CPU, BF16).rows(slice(None))
    weight = place_weight(value, CPU, BF16, Layout.AUTO)
    if isinstance(weight, PackedInt4):
        assert torch.equal(weight.columns(0, 192).T, want)
        assert torch.equal(weight.columns(64, 128).T, want[64:128])
    else:
        assert isinstance(weight, PackedInt8)
        assert torch.equal(weight.rows(slice(None)), want)
        assert torch.equal(weight.rows(slice(5, 17)), want[5:17])


@needs_kernel
def test_zeros_cost_a_rounding_of_the_offset_beside_that_of_the_number() -> None:
    value = random_value(GroupInt(4, 32, False, DType.BF16), 128, 128)
    weight = place_weight(value, CPU, BF16, Layout.AUTO)
    assert isinstance(weight, PackedInt4)
    scales = np.repeat(worth_of_scales(value), 32, axis=1)
    error = np.abs(weight.columns(0, 128).T.float().numpy() - worth(value)) / scales
    assert error.max() <= (8 + 15) * ROUNDING


def worth_of_scales(value: IntAffine) -> np.ndarray:
    return (value.scales_RG.astype(np.uint32) << 16).view(np.float32)


@needs_kernel
def test_memory_is_the_packed_codes_and_their_scales() -> None:
    value = random_value(GroupInt(4, 128, True, DType.BF16), 256, 512)
    assert place_weight(value, CPU, BF16, Layout.AUTO).nbytes == 256 * 512 // 2 + 256 * 4 * 4
    value = random_value(GroupInt(8, 128, True, DType.BF16), 256, 512)
    assert place_weight(value, CPU, BF16, Layout.AUTO).nbytes == 256 * 512 + 256 * 4 * 2


@needs_kernel
def test_a_channel_scale_is_spelled_as_groups() -> None:
    weight = pack_int4(random_value(GroupInt(4, None, True, DType.BF16), 64, 896))
    assert weight is not None and weight.grid_GO2.shape == (7, 64, 2)


def test_what_the_kernels_cannot_hold_stays_in_the_reference_layout() -> None:
    cases = [
        (GroupInt(4, 32, True, DType.BF16), 63, 64, BF16),
        (GroupInt(4, 16, True, DType.BF16), 64, 64, BF16),
        (GroupInt(8, 32, False, DType.BF16), 64, 64, BF16),
        (GroupInt(8, 16, True, DType.BF16), 64, 64, BF16),
        (GroupInt(4, 32, True, DType.BF16), 64, 64, torch.float32),
    ]
    for form, rows, width, dtype in cases:
        value = random_value(form, rows, width)
        assert place_weight(value, CPU, dtype, Layout.AUTO).kind in ("int4", "int8"), form
    value = random_value(GroupInt(4, 32, True, DType.BF16), 64, 64)
    assert place_weight(value, CPU, BF16, Layout.REFERENCE).kind == "int4"


def test_an_unknown_tile_layout_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_pack", lambda codes: torch.zeros(64, 16, dtype=torch.uint8))
    assert tile_rows.__wrapped__() is None

    def missing(codes: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such op")

    monkeypatch.setattr(aten, "_pack", missing)
    assert tile_rows.__wrapped__() is None


def test_few_rows_take_the_packed_kernel_and_many_do_not() -> None:
    for kind in ("int4-aten", "int8-aten"):
        chosen = [next(b for b in BACKENDS if b.runs("cpu", kind, rows)).name for rows in (1, 1000)]
        assert chosen[0].startswith("aten") and chosen[1].startswith("decoded")
