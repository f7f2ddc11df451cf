"""The table of transcodings: codes stay, and no weight moves further than the step says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, GgmlBlocks
from qconvert.core.ggml_types import GRIDS
from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows, GgmlRows, Value
from qconvert.ops import NestScales, Transcode
from qconvert.ops.transcode import STEPS, Step
from qconvert.quant.codebook import TABLES, wide
from qconvert.quant.dequantize import column_scales, zeros_of
from qconvert.quant.nested_scales import RUN, TABLE, offset_of, rows_together, sums
from qconvert.quant.packed_codes import codes_of, words_of
from tests.support.values import WIDTH, applied, blocks, decoded, encoding_of, same, value_of

NVFP4 = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16)
DIVIDED = replace(NVFP4, second="divided")
INT8_ROWS = Codebook("int8", None, DType.F32, DType.F16)
WHOLE = Codebook("e4m3", None, DType.F32, DType.BF16, group_rows=None)
SYMMETRIC = AffineInt(4, 32, True, DType.BF16)
ASYMMETRIC = AffineInt(4, 32, False, DType.BF16)

# Every step of the table, with an encoding that it takes and its argument.
CASES: tuple[tuple[Step, Encoding, Any], ...] = (
    ("zeros_to_mins", SYMMETRIC, WIDTH),
    ("zeros_to_mins", ASYMMETRIC, WIDTH),
    ("zeros_to_mins", AffineInt(3, None, False, DType.F16), WIDTH),
    ("mins_to_zeros", AffineMin(4, 32, DType.BF16), WIDTH),
    ("mins_to_zeros", AffineMin(8, WIDTH, DType.F32), WIDTH),
    ("mins_to_zeros", AffineMin(4, 32, DType.F32, "zero"), WIDTH),
    ("mins_to_zeros", AffineMin(4, 32, DType.F16, "middle"), WIDTH),
    ("offsets_to_mins", AffineMin(4, 32, DType.BF16, "zero"), None),
    ("offsets_to_mins", AffineMin(8, 32, DType.F16, "middle"), None),
    ("zeros_to_floats", SYMMETRIC, WIDTH),
    ("zeros_to_floats", AffineInt(8, None, False, DType.BF16), WIDTH),
    ("offsets_to_zeros", AffineMin(4, 32, DType.BF16), None),
    ("offsets_to_zeros", AffineMin(8, 32, DType.F16, "middle"), None),
    ("to_middles", SYMMETRIC, None),
    ("to_middles", AffineInt(4, 64, False, DType.F32), None),
    ("to_middles", AffineMin(4, 32, DType.F16), None),
    ("cast_scales", SYMMETRIC, DType.F16),
    ("cast_scales", AffineInt(4, 32, False, DType.F32), DType.BF16),
    ("cast_scales", replace(SYMMETRIC, signless_zero=True), DType.BF16),
    ("cast_scales", AffineInt(4, 32, False, DType.F32, act_order=True), DType.F16),
    ("split_groups", AffineInt(4, 128, False, DType.F16), 32),
    ("split_groups", AffineInt(8, None, True, DType.F32), 64),
    ("from_int8_rows", INT8_ROWS, None),
    ("to_int8_rows", AffineInt(8, None, True, DType.BF16), DType.F16),
    ("repeat_tensor_scale", WHOLE, Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128)),
    ("divide_by_one", NVFP4, None),
    ("round_divisor", DIVIDED, None),
    ("divisor_to_factor", DIVIDED, None),
    ("divisor_to_factor", NVFP4, None),
    ("factor_to_divisor", replace(NVFP4, second="multiplied"), None),
    ("widen_scales", WHOLE, DType.F32),
    ("widen_scales", Codebook("e4m3", 128, DType.F8_E8M0, DType.BF16, group_rows=128), DType.F32),
    ("resolve_nested_scales", Codebook("nf4", 64, DType.F32, DType.BF16, second="nested"), None),
    ("to_ggml_blocks", AffineInt(4, 128, True, DType.BF16), blocks("Q4_0")),
    ("to_ggml_blocks", AffineInt(8, 32, True, DType.F32), blocks("Q8_0")),
    ("to_ggml_blocks", AffineInt(4, 64, False, DType.F16), blocks("Q4_1")),
    ("to_ggml_blocks", AffineMin(4, 32, DType.F32), blocks("Q4_1")),
    ("to_ggml_blocks", Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16), blocks("MXFP4")),
    ("to_ggml_blocks", NVFP4, blocks("NVFP4")),
    *(("from_ggml_blocks", blocks(name), grid) for name, grid in GRIDS.items()),
)


def spelled(part: object) -> str:
    return part.label if hasattr(part, "label") else str(part or "")


def codes(value: Value) -> np.ndarray:
    assert not isinstance(value, GgmlRows) and hasattr(value, "encoding")
    return codes_of(value)


def exact(value: Value) -> np.ndarray:
    """The numbers that a value stands for, float64; of minimums without the roundings that MLX makes."""
    if not isinstance(value, AffineMinRows):
        return decoded(value).astype(np.float64)
    scales, mins = (
        np.repeat(wide(array, value.encoding.scale_dtype), value.encoding.group_size, axis=1).astype(float)
        for array in value.arrays[1:]
    )
    codes_RI = codes_of(value).astype(float)
    if value.encoding.offset == "zero":
        return np.asarray((codes_RI - mins) * scales)
    middle = 1 << (value.encoding.bits - 1) if value.encoding.offset == "middle" else 0
    return np.asarray((codes_RI - middle) * scales + mins)


@pytest.mark.parametrize(("step", "encoding", "argument"), CASES, ids=spelled)
def test_no_weight_moves_further_than_is_told(step: Step, encoding: Encoding, argument: Any) -> None:
    op = Transcode(step, argument)
    assert op.keeps_codes and op.certificate(encoding) == "exact"
    for seed in range(5):
        before = value_of(encoding, seed=seed)
        made, found = op.apply(before)
        assert encoding_of(made) == op.infer(encoding) and (made.rows, made.width) == (8, WIDTH)
        assert (found.nonfinite, found.overflow, found.bad_row) == (-1, 0, -1)
        graded = before if isinstance(made, GgmlRows) else made
        assert isinstance(graded, AffineIntRows | AffineMinRows | CodebookRows)
        gaps = np.abs(exact(made) - exact(before))
        steps = np.abs(np.broadcast_to(column_scales(graded), gaps.shape))
        # A float32 product of up to 255 steps is rounded once on either side.
        assert (gaps <= (found.code_error * (1 + 1e-6) + 2.0**-15) * steps).all()


def test_every_step_is_among_the_cases_or_has_a_test_of_its_own() -> None:
    own = {"absorb_divisor", "take_factor", "invert"}
    assert {step for step, *_ in CASES} | own == set(STEPS)


@pytest.mark.parametrize(
    ("step", "encoding", "argument"), [case for case in CASES if "ggml" not in case[0]], ids=spelled
)
def test_the_codes_are_those_that_were_there(step: Step, encoding: Encoding, argument: Any) -> None:
    before = value_of(encoding)
    made = applied(Transcode(step, argument), before)
    turned = np.uint8(0x80) if "int8_rows" in step else np.uint8(0)
    np.testing.assert_array_equal(codes(made), codes(before) ^ turned)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), bits=st.sampled_from([2, 3, 4, 8]), size=st.sampled_from([16, 32, 64]))
def test_zero_points_come_back_from_minimums(seed: int, bits: int, size: int) -> None:
    """With float32 scales both ways are exact up to one rounding, so the zero points are the same."""
    before = value_of(AffineInt(bits, size, False, DType.F32), rows=2, seed=seed)
    assert isinstance(before, AffineIntRows)
    mins, moved = Transcode("zeros_to_mins", WIDTH).apply(before)
    back, again = Transcode("mins_to_zeros", WIDTH).apply(mins)
    assert same(back, before) and moved.code_error < 1e-4 and again.code_error < 1e-4


def test_a_minimum_that_no_code_places_costs_at_most_what_is_told() -> None:
    value = value_of(AffineMin(4, 32, DType.F32))
    assert isinstance(value, AffineMinRows)
    value.mins_RG[0, 0] = 5 * value.scales_RG[0, 0]  # above 0: the nearest zero point is 0
    made, found = Transcode("mins_to_zeros", WIDTH).apply(value)
    assert isinstance(made, AffineIntRows) and made.zeros_RG is not None
    assert made.zeros_RG[0, 0] == 0 and found.code_error >= 5 - 1e-6


def test_a_scale_of_zero_that_moves_a_weight_is_infinitely_far() -> None:
    value = value_of(AffineMin(4, 32, DType.F32))
    assert isinstance(value, AffineMinRows)
    value.scales_RG[2, 1], value.mins_RG[2, 1] = 0, -1
    assert Transcode("mins_to_zeros", WIDTH).apply(value)[1].code_error == np.inf


def test_scales_beyond_float16_are_counted_and_not_measured() -> None:
    value = value_of(AffineInt(4, 32, True, DType.F32))
    assert isinstance(value, AffineIntRows)
    value.scales_RG[1, 3] = 7e4
    found = Transcode("cast_scales", DType.F16).apply(value)[1]
    assert (found.overflow, found.code_error) == (1, 0.0)
    assert Transcode("to_ggml_blocks", blocks("Q4_0")).apply(value)[1].overflow == 1


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_packed_codes_are_carried_packed(bits: int) -> None:
    """A step that leaves codes alone does not unpack them either, and decodes to the same numbers."""
    plain = value_of(AffineInt(bits, 32, False, DType.F16))
    assert isinstance(plain, AffineIntRows)
    packed = replace(plain, codes_RX=words_of(plain))
    assert packed.width == WIDTH
    for step, argument in (("zeros_to_mins", WIDTH), ("cast_scales", DType.F32), ("split_groups", 16)):
        made, found = Transcode(step, argument).apply(packed)  # type: ignore[arg-type]
        loose, told = Transcode(step, argument).apply(plain)  # type: ignore[arg-type]
        assert made.arrays[0] is packed.codes_RX and found == told
        np.testing.assert_array_equal(decoded(made), decoded(loose))


@pytest.mark.parametrize("name", list(GRIDS))
def test_blocks_hold_the_numbers_of_their_grid_to_the_bit(name: str) -> None:
    value = value_of(blocks(name), rows=16)
    made = applied(Transcode("from_ggml_blocks", GRIDS[name]), value)
    np.testing.assert_array_equal(exact(made).astype(np.float32), decoded(value))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_1", "MXFP4", "NVFP4"])
def test_blocks_come_back_from_their_grid_to_the_byte(name: str) -> None:
    value = value_of(blocks(name), rows=16, seed=4)
    grid = applied(Transcode("from_ggml_blocks", GRIDS[name]), value)
    back, found = Transcode("to_ggml_blocks", blocks(name)).apply(grid)
    assert same(back, value) and found.code_error == 0


def test_blocks_with_a_scale_that_is_none_name_their_row() -> None:
    value = value_of(blocks("Q8_0"))
    assert isinstance(value, GgmlRows)
    value.bytes_RB[6, :2] = np.array([np.nan], "<f2").view(np.uint8)
    assert Transcode("from_ggml_blocks", GRIDS["Q8_0"]).apply(value)[1].bad_row == 6


@pytest.mark.parametrize("divisor", [2.0, 0.5, 1.0, 64.0])
def test_a_divisor_that_is_a_power_of_two_is_absorbed_exactly(divisor: float) -> None:
    value = value_of(DIVIDED)
    assert isinstance(value, CodebookRows)
    middle = np.random.default_rng(0).integers(0x38, 0x48, value.scales_RG.shape, np.uint8)
    before = replace(value, scales_RG=middle, divisor=divisor)
    made = applied(Transcode("absorb_divisor"), before)
    assert encoding_of(made) == NVFP4 == Transcode("absorb_divisor").infer(DIVIDED)
    np.testing.assert_array_equal(decoded(made), decoded(before))


@pytest.mark.parametrize("divisor", [3.0, 2.0**40, 1.1])
def test_a_divisor_whose_quotients_are_no_e4m3_is_not_absorbed(divisor: float) -> None:
    from qconvert.quant.transcode import fold_divisor

    value = value_of(DIVIDED)
    assert isinstance(value, CodebookRows)
    assert fold_divisor(replace(value, divisor=divisor)) is None


@settings(max_examples=30)
@given(divisor=st.floats(1e-6, 1e6))
def test_the_factor_of_a_block_tensor_is_one_over_its_divisor(divisor: float) -> None:
    """What llama.cpp multiplies, times what compressed-tensors divides by, is 1 up to the told distance."""
    value = value_of(DIVIDED, rows=2)
    assert isinstance(value, CodebookRows)
    value = replace(value, divisor=divisor)
    factor = applied(Transcode("take_factor"), value)
    assert factor.arrays[0].shape == (2, 1) and len(set(factor.arrays[0].ravel().tolist())) == 1
    moved = Transcode("to_ggml_blocks", blocks("NVFP4")).apply(value)[1].code_error
    assert abs(float(factor.arrays[0][0, 0]) * divisor - 1) * 6 <= moved + 1e-11
    rounded = Transcode("round_divisor").apply(value)
    assert isinstance(rounded[0], CodebookRows) and rounded[0].divisor == float(np.float32(divisor))
    assert rounded[1].code_error <= 6 * 2.0**-24


def test_a_scale_of_the_whole_tensor_serves_every_block() -> None:
    wanted = Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128)
    value = value_of(WHOLE)
    made = applied(Transcode("repeat_tensor_scale", wanted), value)
    assert made.arrays[1].shape == (8, 2) and len(np.unique(made.arrays[1])) == 1
    np.testing.assert_array_equal(decoded(made), decoded(value))


@settings(max_examples=20)
@given(rows=st.integers(1, 40), width=st.sampled_from([64, 128, 192, 320]), seed=st.integers(0, 99))
def test_nested_scales_stand_for_numbers_near_those_that_they_replace(
    rows: int, width: int, seed: int
) -> None:
    """Held against the definition: a table's number times the largest distance of a run, and the mean."""
    value = value_of(Codebook("nf4", 64, DType.F32, DType.BF16), rows, width, seed)
    op = NestScales(width)
    made, found = op.finalize(op.reduce(value)).apply(value)
    assert isinstance(made, CodebookRows) and made.nested is not None and isinstance(value, CodebookRows)
    np.testing.assert_array_equal(made.codes_RI, value.codes_RI)
    flat = value.scales_RG.ravel()
    mean = np.float32(flat.astype(np.float64).mean())
    assert made.nested.offset == pytest.approx(float(mean), rel=1e-6)
    wanted = np.empty_like(flat)
    for start in range(0, flat.size, RUN):
        away = flat[start : start + RUN] - np.float32(made.nested.offset)
        most = np.abs(away).max()
        nearest = np.abs(away[:, None] / most - TABLE).min(axis=1) if most else np.zeros(len(away))
        held = made.scales_RG.ravel()[start : start + RUN] - np.float32(made.nested.offset)
        np.testing.assert_allclose(np.abs(held - away), nearest * most, atol=1e-6 * max(most, 1e-3))
        wanted[start : start + RUN] = held
    steps = np.abs(made.scales_RG - value.scales_RG.astype(np.float64)) / made.scales_RG
    assert found.code_error == pytest.approx(steps.max(), rel=1e-6)


@settings(max_examples=20)
@given(width=st.integers(1, 40).map(lambda groups: 64 * groups), times=st.integers(1, 3))
def test_rows_of_whole_runs_may_be_nested_apart(width: int, times: int) -> None:
    together = rows_together(width)
    assert together * (width // 64) % RUN == 0
    scales_RG = np.random.default_rng(0).uniform(0, 1, (times * together, width // 64)).astype(np.float32)
    parts = [sums(part) for part in np.split(scales_RG, times)]
    assert offset_of(np.concatenate(parts)) == offset_of(sums(scales_RG))


def test_integers_of_one_scale_a_row_are_bitsandbytes_s() -> None:
    """Through absmax and back the numbers stay within the rounding of two float32 products."""
    value = value_of(AffineInt(8, None, True, DType.BF16))
    assert isinstance(value, AffineIntRows)
    rows, found = Transcode("to_int8_rows", DType.F16).apply(value)
    back, again = Transcode("from_int8_rows").apply(rows)
    np.testing.assert_allclose(decoded(back), decoded(value), rtol=1e-6)
    assert found.code_error <= 2**-15 and again.code_error <= 2**-15
    assert isinstance(rows, CodebookRows)
    signed = codes_of(value).astype(int) - zeros_of(value)
    np.testing.assert_array_equal(TABLES["int8"][rows.codes_RI], signed)


def test_zero_points_reach_every_number_of_q8_0_and_q4_0() -> None:
    """A zero point other than the middle is subtracted from the codes, where the difference fits."""
    value = value_of(AffineInt(3, 32, False, DType.F16))
    assert isinstance(value, AffineIntRows)
    for name in ("Q4_0", "Q8_0"):
        made, found = Transcode("to_ggml_blocks", blocks(name)).apply(value)
        assert isinstance(made.encoding, GgmlBlocks) and found.code_error == 0  # type: ignore[union-attr]
        np.testing.assert_array_equal(decoded(made), decoded(value))


def test_steps_are_the_scales_that_numbers_are_multiples_of() -> None:
    value = value_of(AffineInt(4, 32, True, DType.F16))
    assert isinstance(value, AffineIntRows)
    quotients = decoded(value) / column_scales(value)
    np.testing.assert_allclose(quotients, np.rint(quotients), atol=1e-3)
