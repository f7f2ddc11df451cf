"""What operations say of themselves against what they do: inverses, encodings, granules, certificates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, Unquantized
from qconvert.core.row_transforms import RowTransform
from qconvert.core.values import AffineIntRows, DenseRows, GgmlRows
from qconvert.ops import (
    Cast,
    CastIntegers,
    ChangeNumbers,
    CheckFinite,
    CutRows,
    Dequantize,
    EncodeBlocks,
    EncodeTable,
    InterleaveHalves,
    InterleaveMembers,
    Multiply,
    NestScales,
    Op,
    PadColumns,
    PermuteColumns,
    PermuteRows,
    Quantize,
    Scale,
    ScaleSegments,
    SwapGroups,
    TransposeBlocks,
    op_of,
)
from tests.support.values import ENCODINGS, WIDTH, applied, blocks, decoded, encoding_of, same, value_of

F32 = Unquantized(DType.F32)
PLAIN = tuple(e for e in ENCODINGS if isinstance(e, Unquantized))
REVERSED = tuple(reversed(range(8)))
TABLES = tuple(e for e in ENCODINGS if isinstance(e, Codebook) and e.second != "nested" and e.table != "e5m2")
# Operations that take plain numbers alone.
ON_NUMBERS: tuple[Op, ...] = (
    *(Cast(dtype) for dtype in (DType.F32, DType.F16, DType.BF16)),
    ChangeNumbers("plus_one"),
    ChangeNumbers("minus_exp"),
    ChangeNumbers("unit_rows"),
    Scale(3.0),
    ScaleSegments(((1, 3.0), (3, 0.5))),
    SwapGroups(4, 2),
    TransposeBlocks(4, WIDTH),
    *(
        Quantize(AffineInt(4, 32, symmetric, dtype), search)
        for symmetric, dtype, search in ((True, DType.BF16, True), (False, DType.F16, False))
    ),
    *(EncodeBlocks(blocks(name)) for name in ("Q4_0", "Q6_K", "IQ4_NL")),
    *map(EncodeTable, TABLES),
)
# Operations on rows of every encoding, each with one that is known to change something.
ON_ROWS: tuple[Op, ...] = (
    CheckFinite(),
    PermuteRows(REVERSED),
    InterleaveHalves(4),
    InterleaveMembers(8),
    Dequantize(DType.F32),
    Dequantize(DType.BF16),
    Dequantize(DType.F16),
)


# Every operation, with the encodings that it takes.
OPS: tuple[tuple[Op, tuple[Encoding, ...]], ...] = (
    *((op, PLAIN) for op in ON_NUMBERS),
    *((op, ENCODINGS) for op in ON_ROWS),
    (PadColumns(2 * WIDTH), tuple(e for e in ENCODINGS if getattr(e, "group_size", None) or e in PLAIN)),
    (PermuteColumns(tuple(range(WIDTH))), tuple(e for e in ENCODINGS if getattr(e, "act_order", False))),
    (NestScales(WIDTH), (Codebook("nf4", 64, DType.F32, DType.BF16),)),
)


def named(op: object) -> str:
    return type(op).__name__ if isinstance(op, Op) else ""


@pytest.mark.parametrize(("op", "encodings"), OPS, ids=named)
def test_an_operation_makes_the_encoding_that_it_infers(op: Op, encodings: tuple[Encoding, ...]) -> None:
    for encoding in encodings:
        made = applied(op, value_of(encoding))
        assert encoding_of(made) == op.infer(encoding)
        assert made.width * made.rows == (op.padded_width or WIDTH) * 8
        assert op.padded_width in (None, made.width)


@pytest.mark.parametrize(("op", "encodings"), OPS, ids=named)
def test_whole_granules_may_be_made_apart(op: Op, encodings: tuple[Encoding, ...]) -> None:
    """Rows cut at a multiple of the granule and put together again are those of the whole tensor."""
    for encoding in encodings:
        whole, step = value_of(encoding, rows=3 * max(op.granule, 4)), op
        first = max(op.granule, 4) if isinstance(op, TransposeBlocks) else op.granule
        if isinstance(op, PermuteRows) or getattr(encoding, "group_rows", 1) is None:
            continue  # the whole tensor is the granule
        parts = [
            whole.with_arrays(tuple(a[start:stop] for a in whole.arrays))
            for start, stop in ((0, first), (first, whole.rows))
        ]
        if op.needs_reduction:
            step = op.finalize(np.concatenate([op.reduce(part) for part in parts]))
        apart, together = [step.apply(part)[0] for part in parts], step.apply(whole)[0]
        for i, array in enumerate(together.arrays):
            np.testing.assert_array_equal(np.concatenate([part.arrays[i] for part in apart]), array)


@pytest.mark.parametrize(("op", "encodings"), OPS, ids=named)
def test_exact_means_that_no_number_changes(op: Op, encodings: tuple[Encoding, ...]) -> None:
    """An operation that calls itself exact decodes to the same bits, in their places or in others."""
    if isinstance(op, ChangeNumbers | Scale | ScaleSegments | NestScales | PermuteColumns):
        return  # other numbers on purpose, a distance of their own, or an order that fits one tensor
    for encoding in encodings:
        if op.certificate(encoding) != "exact":
            continue
        before, after = decoded(value_of(encoding)), decoded(applied(op, value_of(encoding)))
        if op.padded_width:
            assert not after[:, WIDTH:].any()
            after = after[:, :WIDTH]
        if isinstance(op, Cast | CheckFinite | PadColumns):
            np.testing.assert_array_equal(after, before)
        np.testing.assert_array_equal(np.sort(after.ravel()), np.sort(before.ravel()))


@pytest.mark.parametrize("source", PLAIN, ids=lambda e: e.label)
@pytest.mark.parametrize("dtype", [DType.F64, DType.F32, DType.F16, DType.BF16])
def test_a_cast_calls_itself_exact_just_where_it_can_be_undone(source: Unquantized, dtype: DType) -> None:
    """Over numbers of every magnitude that the source type holds."""
    random = np.random.default_rng(1)
    exponents = random.uniform(-12, 4, (4, 64))
    numbers_RI = random.standard_normal((4, 64)) * 10.0**exponents
    value, _ = Cast(source.dtype).apply(DenseRows(numbers_RI, DType.F64))
    assert isinstance(value, DenseRows)
    back, _ = Cast(source.dtype).apply(Cast(dtype).apply(value)[0])
    assert same(back, value) == (Cast(dtype).certificate(source) == "exact")


def test_rows_are_cut_one_after_another() -> None:
    whole = DenseRows(np.arange(24, dtype=np.float32).reshape(2, 12), DType.F32)
    cut, _ = CutRows(3).apply(whole)
    assert isinstance(cut, DenseRows) and cut.rows_RI.shape == (6, 4) and CutRows(3).granule == 3
    np.testing.assert_array_equal(cut.rows_RI.ravel(), np.arange(24))


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_blocks_of_rows_in_turns_are_multiplied(dtype: DType) -> None:
    """A block of one tensor, one of the other, and so on: in float32, and alike in parts."""
    random = np.random.default_rng(2)
    one, other = (random.standard_normal((6, 5), np.float32) for _ in range(2))
    in_turns = np.concatenate([one[:3], other[:3], one[3:], other[3:]])
    value, _ = Cast(dtype).apply(DenseRows(in_turns, DType.F32))
    op = Multiply(3)
    whole = op.apply(value)[0]
    assert op.granule == 3 and encoding_of(whole) == op.infer(Unquantized(dtype)) == Unquantized(DType.F32)
    rounded = decoded(value)
    expected = np.concatenate([rounded[:3] * rounded[3:6], rounded[6:9] * rounded[9:]])
    np.testing.assert_array_equal(decoded(whole), expected)
    parts = [value.with_arrays(tuple(a[i : i + 6] for a in value.arrays)) for i in (0, 6)]
    np.testing.assert_array_equal(np.concatenate([decoded(op.apply(part)[0]) for part in parts]), expected)


def test_integers_go_into_32_bits_and_back() -> None:
    """Those of 64 bits as far as they fit; other numbers pass."""
    whole = DenseRows(np.array([[0, -1, 2**31 - 1, -(2**31)]]), DType.I64)
    narrow, found = CastIntegers(DType.I32).apply(whole)
    assert encoding_of(narrow) == Unquantized(DType.I32) and found.overflow == 0
    back = CastIntegers(DType.I32).inverse()
    assert same(back.apply(narrow)[0], whole) and back.inverse() == CastIntegers(DType.I32)
    beyond = DenseRows(np.array([[2**31, -(2**31) - 1, 5]]), DType.I64)
    assert CastIntegers(DType.I32).apply(beyond)[1].overflow == 2
    for encoding in ENCODINGS:
        value = value_of(encoding)
        assert CastIntegers(DType.I32).apply(value)[0] is value
        assert CastIntegers(DType.I32).infer(encoding) == encoding


def test_a_cast_leaves_everything_else_as_it_is() -> None:
    for encoding in (e for e in ENCODINGS if not isinstance(e, Unquantized)):
        value = value_of(encoding)
        assert Cast(DType.F16).apply(value)[0] is value
        assert Cast(DType.F16).certificate(encoding) == "cast"
    whole = DenseRows(np.arange(6, dtype=np.int64).reshape(2, 3), DType.I64)
    assert Cast(DType.F16).apply(whole)[0] is whole
    assert Cast(DType.F16).infer(Unquantized(DType.I64)) == Unquantized(DType.I64)


@settings(max_examples=40)
@given(
    heads=st.integers(1, 4),
    half=st.integers(1, 8),
    width=st.integers(1, 9),
    blocks_=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_an_inverse_undoes_its_operation(heads: int, half: int, width: int, blocks_: int, seed: int) -> None:
    """On random shapes; and the inverse of the inverse is the operation again."""
    random = np.random.default_rng(seed)

    def value(rows: int, columns: int) -> DenseRows:
        return DenseRows(random.standard_normal((rows, columns), np.float32), DType.F32)

    # The granule of a transpose is what comes out of one block; here all of them go in at once.
    turned: list[tuple[Op, DenseRows]] = [
        (InterleaveHalves(2 * half), value(heads * 2 * half, width)),
        (InterleaveMembers(2 * half), value(heads * 2 * half, width)),
        (SwapGroups(heads, half), value(blocks_, heads * half * width)),
        (TransposeBlocks(half, width), value(blocks_ * half, width)),
    ]
    for op, before in turned:
        inverse = op.inverse()
        assert inverse is not None
        assert same(inverse.apply(op.apply(before)[0])[0], before), op
        again = inverse.inverse()
        assert again is not None and same(again.apply(before)[0], op.apply(before)[0]), op


@settings(max_examples=30)
@given(seed=st.integers(0, 999), factor=st.sampled_from([0.5, 2.0, 3.0, 0.1, 7.25]))
def test_numbers_that_are_changed_come_back_as_far_as_float32_holds_them(seed: int, factor: float) -> None:
    random = np.random.default_rng(seed)
    before = DenseRows(random.standard_normal((3, 16), np.float32), DType.F32)
    scaled = Scale(factor)
    back = scaled.inverse().apply(scaled.apply(before)[0])[0]
    np.testing.assert_allclose(decoded(back), decoded(before), rtol=2**-22)
    if factor in (0.5, 2.0):
        assert same(back, before)
    segments = ScaleSegments(((2, factor), (1, 0.25)))
    once = segments.apply(before)[0]
    np.testing.assert_array_equal(decoded(once)[:2], decoded(scaled.apply(before)[0])[:2])
    np.testing.assert_array_equal(decoded(once)[2], decoded(before)[2] / 4)
    np.testing.assert_allclose(decoded(segments.inverse().apply(once)[0]), decoded(before), rtol=2**-22)
    plus = ChangeNumbers("plus_one")
    back = plus.inverse().apply(plus.apply(before)[0])[0]
    assert np.abs(decoded(back) - decoded(before)).max() <= 2**-22
    decay = ChangeNumbers("minus_exp")
    back = decay.inverse().apply(decay.apply(before)[0])[0]
    np.testing.assert_allclose(decoded(back), decoded(before), atol=2**-22)
    unit = ChangeNumbers("unit_rows")
    once = unit.apply(before)[0]
    np.testing.assert_allclose((decoded(once) ** 2).sum(1), 1, rtol=1e-5)
    assert same(unit.inverse().apply(once)[0], once)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.label)
def test_rows_in_another_order_are_the_same_rows(encoding: Encoding) -> None:
    random = np.random.default_rng(3)
    order = tuple(int(row) for row in random.permutation(8))
    op, value = PermuteRows(order), value_of(encoding)
    assert op.row_order == order and op.granule == 8
    np.testing.assert_array_equal(decoded(op.apply(value)[0]), decoded(value)[list(order)])
    longer = op.extended(11)
    assert longer.row_order == (*order, 8, 9, 10)
    assert CheckFinite().extended(11) == CheckFinite()


def test_columns_in_activation_order_are_sorted_by_their_groups() -> None:
    encoding = AffineInt(4, 32, False, DType.F16, act_order=True)
    value = value_of(encoding)
    assert isinstance(value, AffineIntRows) and value.groups_I is not None
    order = tuple(int(i) for i in np.argsort(value.groups_I, kind="stable"))
    made, _ = PermuteColumns(order).apply(value)
    assert made.encoding == replace(encoding, act_order=False) and made.groups_I is None
    np.testing.assert_array_equal(decoded(made), decoded(value)[:, list(order)])


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q8_0"])
def test_experts_with_their_own_importance_are_encoded_one_by_one(name: str) -> None:
    from qconvert.core.statistics import RowStatistics

    random = np.random.default_rng(5)
    value = DenseRows(random.standard_normal((6, WIDTH), np.float32), DType.F32)
    importance = [random.lognormal(0, 2, WIDTH).astype(np.float32) for _ in range(2)]
    spans = ((0, 2), (2, 6))
    statistics = [RowStatistics(*span, each) for span, each in zip(spans, importance, strict=True)]
    op = EncodeBlocks(blocks(name))
    together = op.apply(value, statistics)[0]
    for (first, last), each in zip(spans, importance, strict=True):
        rows = DenseRows(value.rows_RI[first:last], DType.F32)
        alone = op.apply(rows, [RowStatistics(0, last - first, each)])[0]
        np.testing.assert_array_equal(together.arrays[0][first:last], alone.arrays[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 300, 8 * WIDTH - 1])
def test_the_first_number_that_is_none_is_found_by_all_who_look(bad: float, place: int) -> None:
    rows_RI = np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)
    rows_RI.flat[place:] = bad
    value = DenseRows(rows_RI, DType.F32)
    looking: list[Op] = [
        CheckFinite(),
        Quantize(AffineInt(4, 32, True, DType.F32), True),
        EncodeBlocks(blocks("Q8_0")),
        EncodeTable(Codebook("nf4", 64, DType.F32, DType.BF16)),
    ]
    assert [op.apply(value)[1].nonfinite for op in looking] == [place] * 4


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if getattr(e, "scale_dtype", None) is DType.F32])
def test_the_row_of_a_scale_that_is_none_is_found(encoding: Encoding) -> None:
    value = value_of(encoding)
    assert CheckFinite().apply(value)[1].bad_row == -1
    arrays = [array.copy() for array in value.arrays]
    arrays[1][5:, 0] = np.nan
    assert CheckFinite().apply(value.with_arrays(tuple(arrays)))[1].bad_row == 5


def test_infinite_products_of_finite_scales_are_found() -> None:
    value = value_of(AffineInt(8, 32, True, DType.F32))
    assert isinstance(value, AffineIntRows)
    value.codes_RX[:] = 255
    value.scales_RG[3, 1] = 3e38
    assert Dequantize(DType.BF16).apply(value)[1].nonfinite == 3 * WIDTH + 32


def test_what_float16_is_too_narrow_for_is_counted() -> None:
    value = DenseRows(np.array([[1.0, 7e4, -1e6, 65504.0]], np.float32), DType.F32)
    assert Cast(DType.F16).apply(value)[1].overflow == 2
    assert Cast(DType.BF16).apply(value)[1].overflow == 0


@pytest.mark.parametrize(
    ("transform", "made"),
    [
        (RowTransform("interleave_halves", rows=8), InterleaveHalves(8)),
        (RowTransform("transpose", rows=4), TransposeBlocks(4, 16)),
        (RowTransform("scale", factor=0.5), Scale(0.5)),
        (RowTransform("scale", segments=((3, 0.5),)), ScaleSegments(((3, 0.5),))),
        (RowTransform("swap_groups", groups=(2, 4)), SwapGroups(2, 4)),
        (RowTransform("plus_one"), ChangeNumbers("plus_one")),
        (RowTransform("unit_rows"), ChangeNumbers("unit_rows")),
        (RowTransform("minus_exp"), ChangeNumbers("minus_exp")),
        (RowTransform("int32"), CastIntegers(DType.I32)),
    ],
)
def test_every_transform_of_a_gguf_family_has_its_operation(transform: RowTransform, made: Op) -> None:
    assert op_of(transform, 16) == made


def test_who_quantizes_says_so_and_nobody_else() -> None:
    encoders = {type(op) for op, _ in OPS if op.quantizes}
    assert encoders == {Quantize, EncodeBlocks, EncodeTable}
    for op, encodings in OPS:
        assert op.quantizes == all(op.certificate(encoding) == "quantized" for encoding in encodings)
    assert {type(op) for op, _ in OPS if op.joins_members} == {InterleaveMembers}
    assert not any(op.keeps_codes for op, _ in OPS)


def test_blocks_pass_a_look_for_numbers_that_are_none() -> None:
    value = value_of(blocks("Q4_K"))
    made, found = CheckFinite().apply(value)
    assert isinstance(made, GgmlRows) and made is value and (found.nonfinite, found.bad_row) == (-1, -1)
