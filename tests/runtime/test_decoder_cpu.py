"""The CPU's kernels against the reference: layouts, products on the layer shapes of real models, threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, DenseRows
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime import storage
from qconvert.runtime.cpu import packed_weights
from qconvert.runtime.cpu.packed_weights import PackedGrid, pack_grid
from qconvert.runtime.cpu.products import multiply_few
from qconvert.runtime.device_layout import Layout, place_rows, place_weight
from qconvert.runtime.linear import Linear
from qconvert.runtime.storage import Decodable, DenseWeight, multiply_decoded
from tests.runtime.test_decoder_linear import CPU, random_value, worth

BF16 = torch.bfloat16
BF16_ROUNDING = 2.0**-8
"""The most that rounding to bfloat16 changes a number, relative to it."""
FIXED_POINT = 1e-4
"""What 16-bit inputs may cost of a product of normal numbers: 2.4e-5 of its norm are expected, as their
largest of 128 is 2.7 standard deviations, its 32767th part the step, and an error a step / sqrt(12)."""

# Rows and columns of qkv, o, gate_up and down of every layer of these models.
SHAPES = {
    "qwen2.5-0.5b": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
    "qwen2.5-1.5b": [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)],
    "qwen2.5-7b": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "qwen3-8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
}
LAYERS = [(model, shape) for model, shapes in SHAPES.items() for shape in shapes]
FORMS = [
    AffineInt(4, 128, True, DType.BF16),
    AffineInt(4, 32, False, DType.BF16),
    AffineInt(4, None, True, DType.F16),
    AffineInt(3, 64, True, DType.F32),
    AffineInt(8, 128, True, DType.BF16),
    AffineInt(8, 32, False, DType.F16),
    AffineInt(8, None, False, DType.BF16),
    AffineInt(5, 64, False, DType.F32),
    AffineInt(4, 16, False, DType.F16),
    AffineInt(8, 48, False, DType.F32),
    AffineInt(6, 128, True, DType.BF16),
]


def packed(value: AffineIntRows, dtype: torch.dtype = torch.float32) -> PackedGrid:
    weight = pack_grid(value, dtype)
    assert weight is not None
    return weight


def inputs(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize(("model", "shape"), LAYERS, ids=str)
@pytest.mark.parametrize("encoding", [FORMS[0], FORMS[6]], ids=lambda encoding: encoding.label)
def test_products_on_every_layer_shape(encoding: AffineInt, model: str, shape: tuple[int, int]) -> None:
    """Packed whole, multiplied whole; float32 outputs to FIXED_POINT, bfloat16 ones to their rounding."""
    value = random_value(encoding, *shape)
    weight, x_NI = packed(value), inputs(2, shape[1])
    blocks = [slice(at, at + 4096) for at in range(0, shape[0], 4096)]
    exact = place_rows(value, CPU, torch.float32)
    want_NO = torch.cat([x_NI @ exact.rows(block).T for block in blocks], dim=1)
    assert weight.shape == shape
    got_NO = multiply_few(x_NI, weight)
    assert relative_error(got_NO, want_NO) < FIXED_POINT
    assert relative_error(got_NO.to(BF16), want_NO) < BF16_ROUNDING
    last = slice(shape[0] - 70, None)
    assert torch.equal(weight.rows(last), exact.rows(last))


@pytest.mark.parametrize("width", [32, 96, 128, 160, 384, 896])
@pytest.mark.parametrize("encoding", FORMS, ids=lambda encoding: encoding.label)
def test_every_form_at_widths_that_fill_blocks_or_do_not(encoding: AffineInt, width: int) -> None:
    if width % (encoding.group_size or width):
        pytest.skip("no whole groups")
    value = random_value(encoding, 37, width)
    x_NI, bias_O = inputs(3, width), torch.arange(37.0)
    want_NO = x_NI.double() @ torch.from_numpy(worth(value)).double().T + bias_O
    assert relative_error(multiply_few(x_NI, packed(value), bias_O), want_NO) < FIXED_POINT
    for dtype in (torch.float32, BF16):
        exact, weight = place_rows(value, CPU, dtype), packed(value, dtype)
        for index in (slice(None), slice(3, 8), torch.tensor([36, 0, 0])):
            assert torch.equal(weight.rows(index), exact.rows(index))
    assert torch.equal(packed(value).part(slice(5, 20)).rows(slice(None)), packed(value).rows(slice(5, 20)))


@pytest.mark.parametrize("encoding", [FORMS[0], FORMS[1], FORMS[6]], ids=lambda encoding: encoding.label)
def test_errors_stay_below_half_a_step_of_the_input_even_beside_outliers(encoding: AffineInt) -> None:
    value = random_value(encoding, 50, 256)
    x_NI = inputs(1, 256)
    x_NI[0, [3, 200]] = torch.tensor([1000.0, -1e4])
    step_I = x_NI[0].view(2, 128).abs().amax(1).div(32767).repeat_interleave(128)
    w_OI = torch.from_numpy(worth(value)).double()
    bound_O = w_OI.abs() @ step_I.double() / 2 + 1e-6 * (w_OI.abs() @ x_NI[0].double().abs())
    error_O = (multiply_few(x_NI, packed(value))[0] - w_OI @ x_NI[0].double()).abs()
    assert bool((error_O <= bound_O).all())


def test_inputs_that_are_no_numbers_are_not_hidden() -> None:
    for broken in (float("nan"), float("inf")):
        x_NI = torch.ones(1, 128)
        x_NI[0, 5] = broken
        assert not multiply_few(x_NI, packed(random_value(FORMS[0], 16, 128))).isfinite().any()
    assert not multiply_few(torch.zeros(1, 128), packed(random_value(FORMS[1], 16, 128))).any()


@pytest.mark.parametrize("width", [16, 48, 64, 112, 896])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_dense_rows_are_float32_products(width: int, dtype: torch.dtype) -> None:
    w_OI, x_NI = inputs(9, width).to(dtype), inputs(2, width)
    want_NO = x_NI.double() @ w_OI.double().T
    weight = DenseWeight(w_OI, torch.float32)
    assert torch.allclose(multiply_few(x_NI, weight).double(), want_NO, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_linears_take_any_number_of_rows(dtype: torch.dtype, rows: int) -> None:
    value, bias_O = random_value(FORMS[1], 70, 96), torch.arange(70.0).to(dtype)
    x = inputs(rows, 96).to(dtype).view(1, rows, 96)
    want = x.double() @ torch.from_numpy(worth(value)).double().T + bias_O.double()
    got = Linear(place_weight(value, CPU, dtype, Layout.AUTO), bias_O)(x)
    assert got.shape == (1, rows, 70) and got.dtype == dtype
    assert relative_error(got, want) < (FIXED_POINT if dtype == torch.float32 else 1.2 * BF16_ROUNDING)


def test_bfloat16_weights_stay_narrow_where_they_are_computed_with_in_float32() -> None:
    carried = (inputs(50, 64).to(BF16).view(torch.int16).numpy()).view(np.uint16)
    weight = place_weight(DenseRows(carried, DType.BF16), CPU, torch.float32, Layout.AUTO)
    assert isinstance(weight, DenseWeight) and weight.kind == "bf16" and weight.nbytes == 50 * 64 * 2
    want_OI = torch.from_numpy(carried.view(np.int16)).view(BF16).float()
    for rows in (1, 30):
        x_NI = inputs(rows, 64)
        assert torch.allclose(Linear(weight)(x_NI), x_NI @ want_OI.T, atol=1e-5)


def test_memory_is_the_codes_and_their_scales() -> None:
    for encoding, want in (
        (FORMS[0], 256 * 512 // 2 + 256 * 4 * 2),
        (AffineInt(4, 128, False, DType.BF16), 256 * 512 // 2 + 256 * 4 * 3),
        (FORMS[4], 256 * 512 + 256 * 4 * 2),
        (AffineInt(4, 32, True, DType.F16), 256 * 512 // 2 + 256 * 16 * 2),
    ):
        weight = place_weight(random_value(encoding, 256, 512), CPU, BF16, Layout.AUTO)
        held = [weight.codes_OB, weight.scales.stored_OG, weight.zeros_OG]  # type: ignore[union-attr]
        stored = sum(t.untyped_storage().nbytes() for t in held if t is not None)
        assert weight.nbytes == want and want <= stored <= want + 2 * LANES * 4


def test_what_the_kernels_cannot_hold_stays_in_the_reference_layout() -> None:
    value = random_value(AffineInt(4, 8, True, DType.BF16), 64, 64)
    assert place_weight(value, CPU, BF16, Layout.AUTO).kind == "int4"
    value = random_value(FORMS[1], 64, 64)
    assert place_weight(value, CPU, BF16, Layout.REFERENCE).kind == "int4"
    assert place_weight(value, CPU, BF16, Layout.AUTO).kind == "int4-cpu"


def test_few_rows_are_multiplied_packed_and_many_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def count(x: torch.Tensor, weight: Decodable, bias_O: torch.Tensor | None) -> torch.Tensor:
        decoded.append(len(x))
        return multiply_decoded(x, weight, bias_O)

    for module in (storage, packed_weights):
        monkeypatch.setattr(module, "multiply_decoded", count)
    integers = place_weight(random_value(FORMS[1], 70, 96), CPU, torch.float32, Layout.AUTO)
    floats = DenseWeight(inputs(70, 96).to(BF16), torch.float32)
    for rows in (1, 8, 9, 16, 17):
        Linear(integers)(inputs(rows, 96))
        Linear(floats)(inputs(rows, 96))
    assert decoded == [9, 16, 17, 17]
    assert [integers.multiplies_codes(rows) for rows in (16, 17)] == [True, False]
    assert not floats.multiplies_codes(1)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads: int, use_threads: None) -> None:
    value, x_NI = random_value(FORMS[0], 5, 256), inputs(2, 256)
    one_NO = multiply_few(x_NI, packed(value))
    torch.set_num_threads(threads)
    assert torch.equal(multiply_few(x_NI, packed(value)), one_NO)
