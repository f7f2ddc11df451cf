"""Codes of tables, and the numbers of every encoding, against their definitions in plain numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, DenseRows
from qconvert.ops import EncodeTable
from qconvert.quant.codebook import TABLES, wide
from qconvert.quant.codebook_encode import needs_whole, peaks
from qconvert.quant.dequantize import INT8_STEP, column_scales, numbers, reach
from qconvert.quant.llama3_rope import llama3_factors, llama3_parameters
from qconvert.quant.packed_codes import codes_of
from qconvert.quant.rotary_rows import interleave_halves, part_halves
from tests.support.commands import made
from tests.support.models import tiny
from tests.support.values import ENCODINGS, as_type, decoded, value_of

Q = "model.layers.0.self_attn.q_proj.weight"
WRITTEN = (
    Codebook("nf4", 64, DType.F32, DType.BF16),
    Codebook("fp4", 64, DType.F32, DType.BF16),
    Codebook("int8", None, DType.F32, DType.F16),
    Codebook("e4m3", None, DType.F32, DType.BF16),
    Codebook("e4m3", 64, DType.F32, DType.BF16, group_rows=4),
    Codebook("e4m3", None, DType.F32, DType.BF16, group_rows=None),
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16),
    Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16),
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided"),
)


def encoded(rows_RI: np.ndarray, encoding: Codebook) -> CodebookRows:
    value, op = DenseRows(rows_RI.astype(np.float32), DType.F32), EncodeTable(encoding)
    if op.needs_reduction:
        op = op.finalize(op.reduce(value))
    made, found = op.apply(value)
    assert isinstance(made, CodebookRows) and found.nonfinite == -1 and found.error is not None
    losses = (decoded(made).astype(np.float64) - rows_RI) ** 2
    assert found.error.sum_sq_error == pytest.approx(losses.sum(), rel=1e-3, abs=1e-12)
    return made


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([1e-4, 0.02, 1.0, 30.0]))
@pytest.mark.parametrize("encoding", WRITTEN, ids=lambda e: f"{e.label}-{e.scale_dtype.label}")
def test_every_code_is_the_nearest_entry_of_its_table(encoding: Codebook, seed: int, spread: float) -> None:
    """On the stored scale: no other entry of the table is nearer to the number, but for ties."""
    rows_RI = (np.random.default_rng(seed).standard_normal((8, 128)) * spread).astype(np.float32)
    made = encoded(rows_RI, encoding)
    scales = np.broadcast_to(column_scales(made), rows_RI.shape).astype(np.float64)
    table = TABLES[encoding.table].astype(np.float64)
    finite = table[np.isfinite(table)]
    places = np.divide(rows_RI, scales, out=np.zeros_like(scales), where=scales != 0)
    chosen = np.abs(places - table[made.codes_RI])
    least = np.abs(places[..., None] - finite).min(axis=-1)
    assert (chosen <= least * (1 + 1e-5) + 1e-6 * np.abs(places)).all()
    assert reach(made) * (1 + 2**-22) >= np.abs(decoded(made)).max()


@pytest.mark.parametrize("encoding", WRITTEN[:6], ids=lambda e: e.label)
def test_the_largest_number_of_a_block_meets_the_end_of_its_table(encoding: Codebook) -> None:
    """Scales are read off the largest magnitude, which is decoded to itself up to one rounding."""
    rows_RI = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    made = encoded(rows_RI, encoding)
    for start in range(0, 128, encoding.group_size or 128):
        block = rows_RI[:, start : start + (encoding.group_size or 128)]
        for row in range(0, 8, encoding.group_rows or 8):
            part = block[row : row + (encoding.group_rows or 8)]
            i, j = np.unravel_index(np.abs(part).argmax(), part.shape)
            assert decoded(made)[row + i, start + j] == pytest.approx(part[i, j], rel=1e-6)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 70),
    per=st.sampled_from([1, 3, 4, None]),
    seed=st.integers(0, 99),
)
def test_peaks_are_the_largest_magnitudes_of_blocks(
    rows: int, width: int, per: int | None, seed: int
) -> None:
    """Also of the last blocks, which may be smaller, and without NaN."""
    rows_RI = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    rows_RI[seed % rows, seed % width] = np.nan
    encoding = Codebook("e4m3", 16, DType.F32, DType.BF16, group_rows=per)
    found = peaks(DenseRows(rows_RI, DType.F32), encoding)
    step, clean = per or rows, np.where(np.isfinite(rows_RI), np.abs(rows_RI), 0)
    for block, group in np.ndindex(found.shape):
        part = clean[block * step : (block + 1) * step, group * 16 : (group + 1) * 16]
        assert found[block, group] == part.max()
    assert found.shape == (-(-rows // step), -(-width // 16))
    assert needs_whole(encoding) == (per is None)


def naive_numbers(value: AffineIntRows | AffineMinRows | CodebookRows) -> np.ndarray:
    """The numbers of a value, one at a time, by the definition of its encoding."""
    encoding, codes = value.encoding, codes_of(value)
    rows, width = codes.shape
    out, scales = np.zeros((rows, width), np.float32), wide(value.scales_RG, encoding.scale_dtype)
    size = encoding.group_size or width
    for r, i in np.ndindex(rows, width):
        if isinstance(value, AffineIntRows):
            group = i // size if value.groups_I is None else int(value.groups_I[i])
            zero = 2 ** (encoding.bits - 1) if value.zeros_RG is None else int(value.zeros_RG[r, group])
            out[r, i] = np.float32(int(codes[r, i]) - zero) * scales[r, group] + np.float32(0)
        elif isinstance(value, AffineMinRows):
            dtype = value.encoding.scale_dtype
            product = np.float32(codes[r, i]) * scales[r, i // size]
            product = wide(as_type(np.array([[product]]), dtype), dtype)[0, 0]
            least = wide(value.mins_RG[r : r + 1, i // size : i // size + 1], dtype)[0, 0]
            out[r, i] = wide(as_type(np.array([[product + least]], np.float32), dtype), dtype)[0, 0]
        else:
            assert isinstance(value, CodebookRows)
            scale = scales[r, i // size]
            scale = scale if value.divisor is None else scale / np.float32(value.divisor)
            scale = scale if value.factor is None else scale * np.float32(value.factor)
            out[r, i] = TABLES[value.encoding.table][codes[r, i]] * scale
            out[r, i] *= INT8_STEP if value.encoding.table == "int8" else np.float32(1)
    return out


CODED = [e for e in ENCODINGS if isinstance(e, AffineInt | AffineMin | Codebook)]


@pytest.mark.parametrize("encoding", CODED, ids=lambda e: e.label)
def test_numbers_are_those_of_the_definition(encoding: AffineInt | AffineMin | Codebook) -> None:
    value = value_of(encoding, rows=4)
    assert isinstance(value, AffineIntRows | AffineMinRows | CodebookRows)
    np.testing.assert_array_equal(decoded(value), naive_numbers(value))
    for dtype in (DType.BF16, DType.F16):
        rounded = numbers(value, dtype)
        np.testing.assert_array_equal(rounded.rows_RI, as_type(naive_numbers(value), dtype))
    assert reach(value) * (1 + 2**-22) >= np.abs(decoded(value)).max()


def test_a_format_without_a_negative_zero_has_none() -> None:
    encoding = AffineInt(4, 32, True, DType.F16)
    value = value_of(encoding)
    assert isinstance(value, AffineIntRows)
    turned = replace(value, scales_RG=-value.scales_RG)
    signless = replace(turned, encoding=replace(encoding, signless_zero=True))
    assert np.signbit(decoded(turned)[decoded(turned) == 0]).any()
    assert not np.signbit(decoded(signless)[decoded(signless) == 0]).any()
    np.testing.assert_array_equal(decoded(signless), decoded(turned))


@settings(max_examples=25)
@given(heads=st.integers(1, 4), half=st.integers(1, 9), width=st.integers(1, 5))
def test_rotary_halves_are_interleaved_by_their_definition(heads: int, half: int, width: int) -> None:
    """Row 2i of a head is row i of its first half, row 2i + 1 row i of its second."""
    rows_RI = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(-1, width)
    turned = interleave_halves(rows_RI, 2 * half)
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            np.testing.assert_array_equal(turned[start + 2 * i], rows_RI[start + i])
            np.testing.assert_array_equal(turned[start + 2 * i + 1], rows_RI[start + half + i])
    np.testing.assert_array_equal(part_halves(turned, 2 * half), rows_RI)


@settings(max_examples=25)
@given(
    head_dim=st.sampled_from([64, 80, 128]),
    theta=st.sampled_from([10000.0, 500000.0]),
    factor=st.sampled_from([4.0, 8.0, 32.0]),
    context=st.sampled_from([1024, 8192, 32768]),
)
def test_the_parameters_of_llama_3_are_found_in_its_factors(
    head_dim: int, theta: float, factor: float, context: int
) -> None:
    factors = llama3_factors(head_dim, theta, factor, 1.0, 4.0, context)
    assert factors.dtype == np.float32 and factors.min() == 1 and (np.diff(factors) >= 0).all()
    found = llama3_parameters(theta, factor, factors)
    assert found is not None
    again = llama3_factors(head_dim, theta, factor, *found)
    np.testing.assert_allclose(again, factors, rtol=1e-5)
    assert llama3_parameters(theta, factor, factors * np.linspace(1, 2, len(factors))) is None


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-tensor"])
def test_one_infinite_number_does_not_cost_the_whole_tensor(scheme: str, here: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    weight[0, 0] = np.inf
    tiny(here / "m", num_hidden_layers=1, changes={Q: weight})
    how = ("--to", "compressed-tensors", "--scheme", scheme, "--allow-nonfinite")
    out = made("convert", "m", *how, "-o", "out")
    plain = made("dequantize", out, "--allow-nonfinite", "--dtype", "f32", "-o", "plain")
    assert np.isfinite(load_file(plain / "model.safetensors")[Q][1:]).all()
