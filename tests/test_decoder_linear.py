"""Packed weights are worth scale * (code - zero), however they are stored, cut or multiplied by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qconvert.decoder import linear
from qconvert.decoder.linear import BACKENDS, IntWeight, Linear, multiply_float32, place_vector, place_weight
from qconvert.errors import UnsupportedModel
from qconvert.tensors import BlockRows, Blocks, Dense, DType, GroupInt, IntAffine

CPU = torch.device("cpu")
FORMS = [
    (GroupInt(2, 8, False, DType.F32), 24),
    (GroupInt(3, None, True, DType.F16), 7),
    (GroupInt(4, 32, True, DType.BF16), 64),
    (GroupInt(4, None, False, DType.BF16), 33),
    (GroupInt(5, 16, False, DType.F16), 48),
    (GroupInt(8, 32, True, DType.BF16), 64),
    (GroupInt(8, None, False, DType.F32), 5),
]


def random_value(form: GroupInt, rows: int, width: int) -> IntAffine:
    rng = np.random.default_rng(form.bits)
    shape = (rows, form.groups(width))
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    carried = {
        DType.F32: scales,
        DType.F16: scales.astype(np.float16),
        DType.BF16: (scales.view(np.uint32) >> 16).astype(np.uint16),
    }
    zeros = None if form.symmetric else rng.integers(0, 2**form.bits, shape, dtype=np.uint8)
    codes = rng.integers(0, 2**form.bits, (rows, width), dtype=np.uint8)
    return IntAffine(codes, carried[form.scale_dtype], zeros, form)


def worth(value: IntAffine) -> np.ndarray:
    """The definition, in numpy float32."""
    scales = value.scales_RG
    if value.form.scale_dtype is DType.BF16:
        scales = (scales.astype(np.uint32) << 16).view(np.float32)
    zeros = 2 ** (value.form.bits - 1) if value.zeros_RG is None else value.zeros_RG.astype(np.float32)
    size = value.codes_RI.shape[1] // scales.shape[1]
    spread = [
        np.repeat(part, size, axis=1) for part in (scales.astype(np.float32), zeros * np.ones_like(scales))
    ]
    return (value.codes_RI.astype(np.float32) - spread[1].astype(np.float32)) * spread[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "width"), FORMS, ids=lambda case: getattr(case, "label", case))
def test_rows_are_exact(form: GroupInt, width: int, dtype: torch.dtype) -> None:
    value = random_value(form, 11, width)
    weight = place_weight(value, CPU, dtype)
    want = torch.from_numpy(worth(value)).to(dtype)
    assert weight.shape == (11, width)
    assert torch.equal(weight.rows(slice(None)), want)
    assert torch.equal(weight.rows(slice(3, 8)), want[3:8])
    assert torch.equal(weight.rows(torch.tensor([10, 0, 0])), want[[10, 0, 0]])


def test_up_to_four_bits_take_half_a_byte() -> None:
    sizes = {}
    for bits in (2, 4, 5, 8):
        weight = place_weight(random_value(GroupInt(bits, 32, True, DType.F16), 4, 64), CPU, torch.float32)
        assert isinstance(weight, IntWeight)
        sizes[bits] = weight.codes_OB.numel()
    assert sizes == {2: 128, 4: 128, 5: 256, 8: 256}


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_rows_make_the_whole_product(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    value = random_value(GroupInt(bits, 32, False, DType.F32), 37, 64)
    monkeypatch.setattr(linear, "SCRATCH_BYTES", 5 * 64 * 4)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    bias = torch.arange(37, dtype=torch.float32)
    y = Linear(place_weight(value, CPU, torch.float32), bias)(x)
    want = x.double() @ torch.from_numpy(worth(value)).double().T + bias
    assert y.shape == (2, 3, 37)
    assert torch.allclose(y.double(), want, atol=1e-5)


@pytest.mark.parametrize("carrier", [DType.F64, DType.F32, DType.F16, DType.BF16])
def test_stored_floats_are_read_as_numbers(carrier: DType) -> None:
    numbers = np.array([[1.5], [-0.25], [3.0]])
    stored = {
        DType.F64: numbers,
        DType.F32: numbers.astype(np.float32),
        DType.F16: numbers.astype(np.float16),
        DType.BF16: (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
    }
    vector = place_vector(Dense(stored[carrier], carrier), CPU, torch.float32)
    assert vector.tolist() == [1.5, -0.25, 3.0]


def test_ggml_blocks_are_refused() -> None:
    blocks = BlockRows(np.zeros((2, 18), np.uint8), Blocks("Q4_0", 32, 18))
    with pytest.raises(UnsupportedModel, match="q4_0 blocks"):
        place_weight(blocks, CPU, torch.float32)


def test_logits_of_bfloat16_weights_are_not_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(50, 32, generator=generator).bfloat16()
    x = torch.randn(4, 32, generator=generator).bfloat16()
    weight = linear.DenseWeight(w)
    got = multiply_float32(x, weight, 10, 30)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), x.double() @ w.double()[10:30].T, atol=1e-5)


def test_every_kind_has_a_backend_for_any_number_of_rows() -> None:
    for kind in ("dense", "int4", "int8"):
        for device in ("cpu", "cuda"):
            assert any(backend.runs(device, kind, 10**9) for backend in BACKENDS), (device, kind)
