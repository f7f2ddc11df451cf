"""Packed weights are worth scale * (code - zero), however they are stored, cut or multiplied by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, GgmlBlocks
from qconvert.core.values import AffineIntRows, AffineMinRows, DenseRows, GgmlRows
from qconvert.errors import BadRecipe
from qconvert.quant.packed_codes import codes_of
from qconvert.runtime import device_layout, storage
from qconvert.runtime.cpu.packed_weights import pack_grid
from qconvert.runtime.device_layout import (
    Layout,
    evaluation_layout,
    find_device,
    place_rows,
    place_vector,
    place_weight,
    stack,
)
from qconvert.runtime.linear import Linear
from qconvert.runtime.storage import DenseWeight, IntWeight

CPU = torch.device("cpu")
FORMS = [
    (AffineInt(2, 8, False, DType.F32), 24),
    (AffineInt(3, None, True, DType.F16), 7),
    (AffineInt(4, 32, True, DType.BF16), 64),
    (AffineInt(4, None, False, DType.BF16), 33),
    (AffineInt(5, 16, False, DType.F16), 48),
    (AffineInt(8, 32, True, DType.BF16), 64),
    (AffineInt(8, None, False, DType.F32), 5),
]


def random_value(encoding: AffineInt, rows: int, width: int) -> AffineIntRows:
    rng = np.random.default_rng(encoding.bits)
    shape = (rows, encoding.groups(width))
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    carried = {
        DType.F32: scales,
        DType.F16: scales.astype(np.float16),
        DType.BF16: (scales.view(np.uint32) >> 16).astype(np.uint16),
    }
    zeros = None if encoding.symmetric else rng.integers(0, 2**encoding.bits, shape, dtype=np.uint8)
    codes = rng.integers(0, 2**encoding.bits, (rows, width), dtype=np.uint8)
    return AffineIntRows(codes, carried[encoding.scale_dtype], zeros, encoding)


def worth(value: AffineIntRows) -> np.ndarray:
    """The definition, in numpy float32."""
    scales = value.scales_RG
    if value.encoding.scale_dtype is DType.BF16:
        scales = (scales.astype(np.uint32) << 16).view(np.float32)
    zeros = 2 ** (value.encoding.bits - 1) if value.zeros_RG is None else value.zeros_RG.astype(np.float32)
    size = value.width // scales.shape[1]
    spread = [
        np.repeat(part, size, axis=1) for part in (scales.astype(np.float32), zeros * np.ones_like(scales))
    ]
    return (codes_of(value).astype(np.float32) - spread[1].astype(np.float32)) * spread[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("encoding", "width"), FORMS, ids=lambda case: getattr(case, "label", case))
def test_rows_are_exact(encoding: AffineInt, width: int, dtype: torch.dtype) -> None:
    value = random_value(encoding, 11, width)
    weight = place_rows(value, CPU, dtype)
    want = torch.from_numpy(worth(value)).to(dtype)
    assert weight.shape == (11, width)
    assert torch.equal(weight.rows(slice(None)), want)
    assert torch.equal(weight.rows(slice(3, 8)), want[3:8])
    assert torch.equal(weight.rows(torch.tensor([10, 0, 0])), want[[10, 0, 0]])


def test_up_to_four_bits_take_half_a_byte() -> None:
    sizes = {}
    for bits in (2, 4, 5, 8):
        weight = place_rows(random_value(AffineInt(bits, 32, True, DType.F16), 4, 64), CPU, torch.float32)
        assert isinstance(weight, IntWeight)
        sizes[bits] = weight.codes_OB.numel()
    assert sizes == {2: 128, 4: 128, 5: 256, 8: 256}


@pytest.mark.parametrize("width", [172, 176, 8])
def test_bfloat16_rows_of_any_width_are_multiplied_whole(width: int) -> None:
    """Kernels read sixteen columns at once: a width that is no multiple would run into the next row."""
    w_OI = torch.randn(24, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    value = DenseRows(w_OI.view(torch.uint16).numpy(), DType.BF16)
    weight = place_weight(value, CPU, torch.float32, Layout.AUTO)
    x_1I = torch.linspace(-1, 1, width).reshape(1, -1)
    torch.testing.assert_close(Linear(weight)(x_1I), x_1I @ w_OI.float().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_rows_make_the_whole_product(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    value = random_value(AffineInt(bits, 32, False, DType.F32), 37, 64)
    monkeypatch.setattr(storage, "SCRATCH_BYTES", 5 * 64 * 4)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    bias = torch.arange(37, dtype=torch.float32)
    y = Linear(place_weight(value, CPU, torch.float32, Layout.REFERENCE), bias)(x)
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
    vector = place_vector(DenseRows(stored[carrier], carrier), CPU, torch.float32)
    assert vector.tolist() == [1.5, -0.25, 3.0]


def test_ggml_blocks_are_decoded_as_gguf_py_decodes_them() -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    w_OI = np.random.default_rng(0).standard_normal((70, 64)).astype(np.float32)
    bytes_OB = quants.quantize(w_OI, GGMLQuantizationType.Q4_0)
    weight = place_rows(GgmlRows(bytes_OB, GgmlBlocks("Q4_0", 32, 18)), CPU, torch.float32)
    want = torch.from_numpy(quants.dequantize(bytes_OB, GGMLQuantizationType.Q4_0))
    assert weight.shape == (70, 64) and weight.nbytes == 70 * 36
    assert torch.equal(weight.rows(slice(5, 9)), want[5:9])
    assert torch.equal(weight.rows(torch.tensor([69, 0])), want[[69, 0]])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(Linear(weight)(x), x @ want.T, atol=1e-5)


def test_other_forms_are_decoded_row_by_row() -> None:
    """A grid in activation order and one with mins, neither of which the packed forms hold."""
    rng = np.random.default_rng(0)
    encoding = AffineInt(4, 16, False, DType.F32, act_order=True)
    plain = random_value(AffineInt(4, 16, False, DType.F32), 70, 64)
    order = rng.permutation(64)
    groups = (order // 16).astype(np.int32)
    ordered = AffineIntRows(codes_of(plain)[:, order], plain.scales_RG, plain.zeros_RG, encoding, groups)
    mins = AffineMinRows(codes_of(plain), plain.scales_RG, -plain.scales_RG, AffineMin(4, 16, DType.F32))
    spread = np.repeat(plain.scales_RG, 16, axis=1)
    for value, want in ((ordered, worth(plain)[:, order]), (mins, codes_of(plain) * spread - spread)):
        weight, w = place_rows(value, CPU, torch.float32), torch.from_numpy(want)
        assert weight.shape == (70, 64) and weight.kind == "encoded"
        assert torch.equal(weight.rows(slice(5, 9)), w[5:9])
        assert torch.equal(weight.rows(torch.tensor([69, 0])), w[[69, 0]])
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(Linear(weight)(x), x @ w.T, atol=1e-5)


def test_like_forms_stack_and_others_do_not() -> None:
    encoding = AffineInt(4, 32, False, DType.BF16)
    a, b = random_value(encoding, 3, 64), random_value(encoding, 5, 64)
    whole = stack([a, b])
    assert isinstance(whole, AffineIntRows)
    assert np.array_equal(worth(whole), np.concatenate((worth(a), worth(b))))
    assert stack([a, random_value(AffineInt(4, 64, False, DType.BF16), 3, 64)]) is None
    assert stack([a, DenseRows(np.zeros((3, 64), np.float32), DType.F32)]) is None
    floats = [DenseRows(np.full((rows, 2), rows, np.float32), DType.F32) for rows in (1, 2)]
    joined = stack(floats)
    assert isinstance(joined, DenseRows) and joined.rows_RI.tolist() == [[1, 1], [2, 2], [2, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_copy_is_what_the_rows_are_worth(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_layout, "SCRATCH_BYTES", 5 * 64 * 4)
    value = random_value(AffineInt(4, 32, False, DType.F16), 37, 64)
    weight = place_weight(value, CPU, dtype, Layout.DENSE)
    assert isinstance(weight, DenseWeight) and weight.nbytes == 37 * 64 * dtype.itemsize
    assert torch.equal(weight.w_OI, place_rows(value, CPU, dtype).rows(slice(None)))


def test_evaluations_copy_weights_where_half_of_a_gpus_memory_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 9000))
    assert evaluation_layout(1000, gpu, torch.bfloat16) is Layout.DENSE
    assert evaluation_layout(1001, gpu, torch.bfloat16) is Layout.AUTO
    assert evaluation_layout(501, gpu, torch.float32) is Layout.AUTO
    assert evaluation_layout(1, CPU, torch.float32) is Layout.REFERENCE
    assert evaluation_layout(1, CPU, torch.bfloat16) is Layout.AUTO


def test_a_named_gpu_becomes_the_one_that_kernels_launch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [find_device(name).type for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda"]
    assert chosen == [torch.device("cuda:1")]
    with pytest.raises(BadRecipe, match="there are 2 CUDA devices"):
        find_device("cuda:2")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [63, 64, 130])
def test_bfloat16_products_may_be_widened(rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 is faster: the same products, sums rounded once, in blocks that cut rows anywhere."""
    monkeypatch.setattr(storage.processor, "widens_bf16", lambda: True)
    monkeypatch.setattr(storage, "_WIDE_NUMBERS", 96 * 7)
    monkeypatch.setattr(storage, "SCRATCH_BYTES", 4 * 96 * 20)
    generator = torch.Generator().manual_seed(rows)
    x_NI, w_OI = (torch.randn(count, 96, generator=generator).bfloat16() for count in (rows, 50))
    bias_O = torch.randn(50, generator=generator).bfloat16() if biased else None
    if rows >= storage.LEAST_WIDE_ROWS:
        monkeypatch.setattr(storage.F, "linear", None)
    packed = pack_grid(random_value(AffineInt(4, 32, True, DType.BF16), 50, 96), torch.bfloat16)
    assert packed is not None
    for weight in (DenseWeight(w_OI), packed):
        want_NO = x_NI.double() @ weight.rows(slice(None)).double().T
        want_NO = want_NO if bias_O is None else want_NO + bias_O.double()
        got_NO = weight.multiply(x_NI[None], bias_O)[0]
        assert got_NO.dtype == torch.bfloat16 and got_NO.shape == (rows, 50)
        assert ((got_NO.double() - want_NO).abs() <= 2.0**-8 * want_NO.abs() + 1e-4).all()
        assert storage.widened(x_NI) == (rows >= storage.LEAST_WIDE_ROWS)
