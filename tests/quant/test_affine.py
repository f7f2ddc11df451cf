"""The group quantizer: its laws, its arithmetic against compressed-tensors, its search against a grid's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, DenseRows
from qconvert.quant.affine import QuantError, dequantize, quantize
from qconvert.quant.casts import cast
from qconvert.quant.packed_codes import codes_of
from qconvert.quant.simd.packing import unpack_rows, unpack_stream

BITS = range(2, 9)
BOTH = (True, False)


def encoding(
    bits: int = 4, group_size: int | None = 128, symmetric: bool = True, scale_dtype: DType = DType.BF16
) -> AffineInt:
    return AffineInt(bits, group_size, symmetric, scale_dtype)


def block(numbers_RI: np.ndarray, dtype: DType = DType.BF16) -> DenseRows:
    return cast(DenseRows(np.asarray(numbers_RI, np.float64), DType.F64), dtype)[0]


def wide(dense: DenseRows) -> np.ndarray:
    return cast(dense, DType.F32)[0].rows_RI


def grid_RG(value: AffineIntRows) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zeros of a value as float32."""
    scales_RG = wide(DenseRows(value.scales_RG, value.encoding.scale_dtype))
    middle = np.full(scales_RG.shape, 2 ** (value.encoding.bits - 1))
    return scales_RG, (middle if value.zeros_RG is None else value.zeros_RG).astype(np.float32)


def gaussian(rows: int = 16, width: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)) * 0.02


def heavy_tailed(rows: int = 16, width: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, (rows, width)) * 0.02


def same(a: AffineIntRows, b: AffineIntRows) -> bool:
    pairs = zip(a.arrays, b.arrays, strict=True)
    return a.encoding == b.encoding and all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in pairs)


@pytest.mark.parametrize(("bits", "symmetric"), list(product(BITS, BOTH)))
@pytest.mark.parametrize("search", BOTH)
def test_codes_are_the_nearest_on_the_stored_grid(bits: int, symmetric: bool, search: bool) -> None:
    weights = block(heavy_tailed())
    value, error = quantize(weights, encoding(bits, 64, symmetric), search=search)
    scales_RG, zeros_RG = grid_RG(value)
    w_RGS = wide(weights).reshape(16, 4, 64)
    scales_RG1, zeros_RG1 = scales_RG[..., None], zeros_RG[..., None]
    steps_RGS = w_RGS / scales_RG1 + zeros_RG1
    codes_RGS = codes_of(value).reshape(w_RGS.shape)
    np.testing.assert_array_equal(codes_RGS, np.clip(np.rint(w_RGS / scales_RG1) + zeros_RG1, 0, 2**bits - 1))
    # Inside the clip range no weight moves by more than half a step.
    loss_RGS = np.abs(w_RGS - wide(dequantize(value, DType.F32)).reshape(w_RGS.shape))
    inside = (steps_RGS > -0.5) & (steps_RGS < 2**bits - 0.5)
    assert (loss_RGS <= scales_RG1 / 2 * (1 + 1e-6))[inside].all()
    assert inside.mean() > (0.98 if bits > 3 else 0.8)
    assert error.max_steps == pytest.approx((loss_RGS / scales_RG1).max(), rel=1e-5)


@pytest.mark.parametrize(("bits", "symmetric"), list(product(BITS, BOTH)))
def test_plain_quantization_hardly_clips(bits: int, symmetric: bool) -> None:
    """Half a step, and what rounding the scale to eight bits moves the outermost code."""
    for scale_dtype, slack in ((DType.F32, 2**bits / 2**22), (DType.BF16, 2**bits / 256)):
        _, error = quantize(
            block(heavy_tailed(), DType.F32), encoding(bits, 32, symmetric, scale_dtype), search=False
        )
        assert error.max_steps <= 0.5 + slack


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32, DType.F64])
def test_errors_are_those_of_the_decoded_numbers(dtype: DType) -> None:
    weights = block(gaussian(), dtype)
    value, error = quantize(weights, encoding(4, 32), search=True)
    w_RI = cast(weights, DType.F64)[0].rows_RI
    loss_RI = w_RI - dequantize(value, DType.F64).rows_RI
    assert error.sum_sq_error == pytest.approx((loss_RI**2).sum(), rel=1e-5)
    assert error.sum_sq == pytest.approx((w_RI**2).sum(), rel=1e-5)
    assert error.max_abs == pytest.approx(np.abs(loss_RI).max(), rel=1e-5)
    assert (error.count, error.nonfinite, error.overflow) == (w_RI.size, -1, 0)


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
def test_the_input_dtype_does_not_matter_where_it_holds_the_numbers(dtype: DType) -> None:
    weights = block(gaussian())
    value, _ = quantize(weights, encoding(), search=True)
    assert same(value, quantize(cast(weights, dtype)[0], encoding(), search=True)[0])


@pytest.mark.parametrize("group_size", [32, 24, None])
def test_blocks_and_threads_do_not_matter(group_size: int | None) -> None:
    weights = block(heavy_tailed(37, 216 if group_size == 24 else 192))
    scheme = encoding(3, group_size, symmetric=False)
    whole, total = quantize(weights, scheme, search=True)
    cuts = [0, 1, 8, 9, 20, 37]
    parts = [DenseRows(weights.rows_RI[a:b], weights.dtype) for a, b in pairwise(cuts)]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda part: quantize(part, scheme, search=True), parts))
    arrays = zip(*(value.arrays for value, _ in done), strict=True)
    assert same(whole, whole.with_arrays(tuple(np.concatenate(kind) for kind in arrays)))
    error = sum((error for _, error in done[1:]), done[0][1])
    assert error.sum_sq_error == pytest.approx(total.sum_sq_error, rel=1e-12)
    assert (error.max_abs, error.max_steps, error.count) == (total.max_abs, total.max_steps, total.count)


def test_errors_add_up() -> None:
    first = QuantError(1.0, 4.0, 0.5, 0.25, 10, -1, 1)
    assert first + QuantError(2.0, 5.0, 0.25, 0.5, 20, 7, 2) == QuantError(3.0, 9.0, 0.5, 0.5, 30, 7, 3)


@pytest.mark.parametrize(("bits", "symmetric"), list(product(BITS, BOTH)))
def test_plain_scales_and_zeros_are_those_of_compressed_tensors(bits: int, symmetric: bool) -> None:
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    args = quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=32
    )
    weights = block(heavy_tailed(), DType.F32)
    value, _ = quantize(weights, encoding(bits, 32, symmetric, DType.F32), search=False)
    w_RGS = torch.from_numpy(weights.rows_RI).reshape(16, 8, 32)
    scales, zeros = helpers.calculate_qparams(w_RGS.amin(2), w_RGS.amax(2), args)
    np.testing.assert_allclose(value.scales_RG, scales.numpy(), rtol=2**-23)
    if value.zeros_RG is not None:
        np.testing.assert_array_equal(value.zeros_RG - 2.0 ** (bits - 1), zeros.numpy())


@pytest.mark.parametrize(
    "folder", ["ct-w4a16-sym-g128", "cut-ct-w4a16-asym-g128", "cut-ct-w3a16-g32", "cut-ct-w8a16-channel"]
)
def test_decodes_what_the_field_wrote_bit_for_bit(folder: str, assets: Path) -> None:
    path = assets / "fixtures" / "quantized" / folder
    golden = json.loads((path / "golden.json").read_text())["dequantized"]
    decoded = dict(_decoded(path / "model.safetensors"))
    assert len(decoded) >= 14
    for name, numbers in decoded.items():
        assert hashlib.sha256(numbers.rows_RI.tobytes()).hexdigest() == golden[name]["sha256"], name


def _decoded(path: Path) -> Iterator[tuple[str, DenseRows]]:
    torch = pytest.importorskip("torch")
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            if key.endswith("weight_packed"):
                name = key.removesuffix("_packed")
                rows, width = file.get_tensor(f"{name}_shape").tolist()
                scales = file.get_tensor(f"{name}_scale")
                packed = file.get_tensor(key).numpy()
                bits = next(b for b in BITS if packed.shape[1] == -(-width * b // 32))
                zeros = None
                if f"{name}_zero_point" in file.keys():  # noqa: SIM118
                    zeros = unpack_rows(file.get_tensor(f"{name}_zero_point").numpy(), bits, rows)
                scheme = encoding(bits, width // scales.shape[1], zeros is None)
                scales_RG = scales.view(torch.int16).numpy().view(np.uint16)
                codes_RI = unpack_stream(packed, bits, width)
                yield name, dequantize(AffineIntRows(codes_RI, scales_RG, zeros, scheme), DType.BF16)


@pytest.mark.parametrize(
    ("scale_dtype", "target"), list(product((DType.BF16, DType.F16, DType.F32), repeat=2))
)
def test_decoding_rounds_the_float32_product_once(scale_dtype: DType, target: DType) -> None:
    value, _ = quantize(block(heavy_tailed()), encoding(8, 32, False, scale_dtype), search=False)
    scales_RG, zeros_RG = grid_RG(value)
    codes_RGS = codes_of(value).reshape(16, 8, 32).astype(np.float32)
    numbers_RI = ((codes_RGS - zeros_RG[..., None]) * scales_RG[..., None]).reshape(16, 256)
    expected, _ = cast(DenseRows(numbers_RI, DType.F32), target)
    np.testing.assert_array_equal(dequantize(value, target).rows_RI, expected.rows_RI)


def grid_search_error(weights: DenseRows, scheme: AffineInt, importance_I: np.ndarray | float = 1.0) -> float:
    """The squared error of the best of 80 scales per group: 1 to 0.21 times the largest one.

    That is `max|w| / (2**(bits-1) - 1)`, or `(max - min) / (2**bits - 1)` with the zero of min-max.
    """
    w_RGS = wide(weights).reshape(weights.rows, -1, scheme.group_size or weights.rows_RI.shape[1])
    importance_RGS = np.broadcast_to(importance_I, weights.rows_RI.shape).reshape(w_RGS.shape)
    top, middle = 2**scheme.bits - 1, 2 ** (scheme.bits - 1)
    low_RG1, high_RG1 = w_RGS.min(2, keepdims=True).clip(None, 0), w_RGS.max(2, keepdims=True).clip(0)
    if scheme.symmetric:
        largest_RG1, zero_RG1 = np.maximum(-low_RG1, high_RG1) / (middle - 1), np.float32(middle)
    else:
        largest_RG1 = (high_RG1 - low_RG1) / np.float32(top)
        zero_RG1 = np.rint(-low_RG1 / largest_RG1)
    best_RG = np.full(w_RGS.shape[:2], np.inf)
    for i in range(80):
        scale_RG1 = wide(block(largest_RG1 * (1 - 0.8 * i / 80), scheme.scale_dtype))
        q_RGS = np.clip(np.rint(w_RGS / scale_RG1), -zero_RG1, top - zero_RG1)
        error_RG = (importance_RGS * (w_RGS - q_RGS * scale_RG1) ** 2).sum(2, dtype=np.float64)
        best_RG = np.minimum(best_RG, error_RG)
    return float(best_RG.sum())


SHAPES: dict[str, Callable[[], np.ndarray]] = {
    "gaussian": lambda: gaussian(64, 512),
    "heavy tails": lambda: heavy_tailed(64, 512),
    "outliers": lambda: gaussian(64, 512) * np.where(np.arange(64 * 512).reshape(64, 512) % 199, 1, 30),
    "one-sided": lambda: np.random.default_rng(0).gamma(2, 1, (64, 512)),
}


@pytest.mark.parametrize("symmetric", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_search_is_as_good_as_eighty_scales(shape: str, symmetric: bool) -> None:
    weights = block(SHAPES[shape]())
    for bits, group_size in ((2, 128), (3, 64), (4, 32), (4, 128), (5, None), (6, 64), (8, 128)):
        scheme = encoding(bits, group_size, symmetric)
        _, searched = quantize(weights, scheme, search=True)
        _, plain = quantize(weights, scheme, search=False)
        assert searched.sum_sq_error <= 1.01 * grid_search_error(weights, scheme), scheme.label
        assert searched.sum_sq_error <= plain.sum_sq_error, scheme.label


@pytest.mark.parametrize("scale_dtype", [DType.BF16, DType.F16, DType.F32])
def test_importance_is_what_the_search_weighs_errors_by(scale_dtype: DType) -> None:
    weights = block(heavy_tailed(64, 512))
    importance_I = np.random.default_rng(1).lognormal(0, 1.5, 512)
    importance_I[:3] = 0, 0, 1e6
    for bits, symmetric in ((3, True), (4, True), (4, False)):
        scheme = encoding(bits, 128, symmetric, scale_dtype)

        def weighted(value: AffineIntRows) -> float:
            loss_RI = wide(weights).astype(np.float64) - dequantize(value, DType.F64).rows_RI
            return float((importance_I * loss_RI**2).sum())

        guided = weighted(quantize(weights, scheme, search=True, weights_I=importance_I)[0])
        assert guided <= 1.01 * grid_search_error(weights, scheme, importance_I)
        assert guided < 0.9 * weighted(quantize(weights, scheme, search=True)[0])


def test_only_the_ratio_of_importances_matters() -> None:
    weights = block(heavy_tailed())
    importance_I = np.random.default_rng(1).lognormal(0, 1.5, 256)
    value, _ = quantize(weights, encoding(), search=True, weights_I=importance_I)
    assert same(value, quantize(weights, encoding(), search=True, weights_I=importance_I * 2.0**100)[0])
    even, _ = quantize(weights, encoding(), search=True)
    for constant in (0.0, 3.0):
        given = np.full(256, constant)
        assert same(even, quantize(weights, encoding(), search=True, weights_I=given)[0])


@pytest.mark.parametrize(
    ("model", "width"), [("tiny-qwen3", 256), ("tiny-qwen3", 768), ("stories260K-hf", 64)]
)
def test_the_search_is_as_good_as_eighty_scales_on_trained_weights(
    model: str, width: int, assets: Path
) -> None:
    weights = _rows(assets / "models" / model / "model.safetensors", width)
    for bits, group_size, symmetric in product((2, 3, 4, 8), (32, None), BOTH):
        scheme = encoding(bits, group_size, symmetric)
        _, error = quantize(weights, scheme, search=True)
        assert error.sum_sq_error <= 1.01 * grid_search_error(weights, scheme), scheme.label


def _rows(path: Path, width: int) -> DenseRows:
    """Some rows of every matrix of this width."""
    with safe_open(path, "pt") as file:
        tensors = [file.get_tensor(key).float().numpy() for key in file.keys()]  # noqa: SIM118
    rows_RI = np.concatenate([t[:: max(1, len(t) // 16)] for t in tensors if t.shape[1:] == (width,)])
    return DenseRows(rows_RI, DType.F32)
