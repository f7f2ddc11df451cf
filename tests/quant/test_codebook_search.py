"""Scales of tables by importance: never worse than the layout's own, and the best of what is tried."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook
from qconvert.core.layout_traits import NEAREST, RoundingRules
from qconvert.core.statistics import RowStatistics
from qconvert.core.values import CodebookRows, DenseRows
from qconvert.formats.layouts import registry
from qconvert.ops import EncodeTable
from qconvert.quant.codebook_encode import encode
from qconvert.quant.codebook_search import weighs
from tests.support.ggml_blocks import WIDTH, importances, kinds
from tests.support.values import as_type, decoded, same

KINDS = kinds()
SCHEMES = [
    (f"{traits.name} {scheme.name}", scheme.encoding(DType.F32), traits.rounding)
    for traits in map(registry.traits_of, registry.written())
    for scheme in traits.codebooks
]
WEIGHED = [pytest.param(*rest, id=name) for name, *rest in SCHEMES if weighs(rest[0])]
MXFP4 = Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16)
NVFP4 = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided")
NF4 = Codebook("nf4", 64, DType.F32, DType.BF16)
LAPLACE = np.random.default_rng(0).laplace(size=(24, WIDTH)).astype(np.float32)


def made(
    rows_RI: np.ndarray,
    encoding: Codebook,
    weights_I: np.ndarray | None,
    rounding: RoundingRules = NEAREST,
    dtype: DType = DType.F32,
) -> CodebookRows:
    value = DenseRows(as_type(rows_RI, dtype), dtype)
    whole = float(np.abs(decoded(value)[np.isfinite(decoded(value))]).max(initial=0))
    return encode(value, encoding, rounding=rounding, whole=whole, weights_I=weights_I)[0]


def loss(value: CodebookRows, rows_RI: np.ndarray, weights_I: np.ndarray) -> float:
    gaps_RI = decoded(value).astype(np.float64) - rows_RI
    return float((gaps_RI**2 * weights_I).sum())


def losses_of_groups(value: CodebookRows, rows_RI: np.ndarray, weights_I: np.ndarray) -> np.ndarray:
    gaps_RI = (decoded(value).astype(np.float64) - rows_RI) ** 2 * weights_I
    return np.asarray(gaps_RI.reshape(*value.scales_RG.shape, -1).sum(axis=2))


def test_all_tables_but_those_of_one_scale_are_weighed() -> None:
    assert {name for name, encoding, _ in SCHEMES if not weighs(encoding)} == {
        "compressed-tensors fp8-tensor",
        "quark fp8-tensor",
        "torchao fp8-tensor",
    }
    assert len(WEIGHED) >= 10


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize(("encoding", "rounding"), WEIGHED)
def test_the_weighted_error_falls(encoding: Codebook, rounding: RoundingRules, dtype: DType) -> None:
    weights_I = np.random.default_rng(1).lognormal(0, 1.5, WIDTH).astype(np.float32)
    rows_RI = decoded(DenseRows(as_type(LAPLACE, dtype), dtype))
    plain, weighed = (made(rows_RI, encoding, w, rounding, dtype) for w in (None, weights_I))
    assert loss(weighed, rows_RI, weights_I) < 0.98 * loss(plain, rows_RI, weights_I)
    assert weighed.divisor == plain.divisor and weighed.encoding == plain.encoding
    assert weighed.scales_RG.dtype == plain.scales_RG.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("encoding", "rounding"), WEIGHED)
@pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value):RuntimeWarning")
def test_the_weighted_error_never_rises(encoding: Codebook, rounding: RoundingRules, kind: str) -> None:
    """Also where columns weigh nothing, for blocks of zeros, and where scales are at an end of their type."""
    rows_RI, weights_I = KINDS[kind], importances()
    assert (weights_I == 0).any()
    plain, weighed = (made(rows_RI, encoding, w, rounding) for w in (None, weights_I))
    assert np.isfinite(decoded(weighed)).all()
    assert loss(weighed, rows_RI, weights_I) <= (1 + 1e-5) * loss(plain, rows_RI, weights_I)


@pytest.mark.parametrize(("encoding", "rounding"), WEIGHED)
def test_groups_that_weigh_nothing_are_searched_evenly(encoding: Codebook, rounding: RoundingRules) -> None:
    none, ones = np.zeros(WIDTH, np.float32), np.ones(WIDTH, np.float32)
    even = made(LAPLACE, encoding, ones, rounding)
    assert same(made(LAPLACE, encoding, none, rounding), even)
    assert same(made(LAPLACE, encoding, 7 * ones, rounding), even)
    assert loss(even, LAPLACE, ones) < loss(made(LAPLACE, encoding, None, rounding), LAPLACE, ones)


@pytest.mark.parametrize(("encoding", "rounding"), WEIGHED)
def test_groups_of_zeros_keep_the_scale_of_the_layout(encoding: Codebook, rounding: RoundingRules) -> None:
    rows_RI = np.zeros((encoding.group_rows or 1, WIDTH), np.float32)
    weights_I = importances()
    assert same(made(rows_RI, encoding, weights_I, rounding), made(rows_RI, encoding, None, rounding))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("encoding", "rounding"), WEIGHED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_flaws_are_found_as_without_importance(
    encoding: Codebook, rounding: RoundingRules, bad: float
) -> None:
    rows_RI = LAPLACE.copy()
    rows_RI[3, 70] = rows_RI[9, 1] = bad
    value = DenseRows(rows_RI, DType.F32)
    weights_I = importances()
    plain, weighed = (
        encode(value, encoding, rounding=rounding, whole=8.0, weights_I=w) for w in (None, weights_I)
    )
    assert weighed[1].nonfinite == plain[1].nonfinite == 3 * WIDTH + 70
    group = 70 // (encoding.group_size or WIDTH)
    assert weighed[0].scales_RG[3, group] == plain[0].scales_RG[3, group]


def test_exponents_are_the_best_of_three() -> None:
    weights_I = np.random.default_rng(2).lognormal(0, 2, WIDTH)
    plain, weighed = (made(LAPLACE, MXFP4, w) for w in (None, weights_I))
    each = [
        losses_of_groups(
            encode_with(LAPLACE, replace(plain, scales_RG=plain.scales_RG + np.uint8(by % 256))),
            LAPLACE,
            weights_I,
        )
        for by in (-1, 0, 1)
    ]
    np.testing.assert_allclose(
        losses_of_groups(weighed, LAPLACE, weights_I), np.min(each, axis=0), rtol=1e-5, atol=1e-12
    )
    assert {-1, 0} <= set(np.unique(weighed.scales_RG.astype(int) - plain.scales_RG).tolist())


def test_scales_of_nvfp4_are_the_best_of_sixteen_neighbours() -> None:
    weights_I = np.random.default_rng(2).lognormal(0, 2, WIDTH)
    plain, weighed = (made(LAPLACE, NVFP4, w) for w in (None, weights_I))
    each = [
        losses_of_groups(
            encode_with(
                LAPLACE,
                replace(plain, scales_RG=(plain.scales_RG.astype(int) + by).clip(1, 126).astype(np.uint8)),
            ),
            LAPLACE,
            weights_I,
        )
        for by in range(-5, 11)
    ]
    np.testing.assert_allclose(
        losses_of_groups(weighed, LAPLACE, weights_I), np.min(each, axis=0), rtol=1e-5, atol=1e-12
    )
    assert weighed.scales_RG.max() <= 126


def encode_with(rows_RI: np.ndarray, scales: CodebookRows) -> CodebookRows:
    """The nearest codes beside these scales."""
    from qconvert.quant.point_grid import point_grid, with_codes

    grid = point_grid(scales)
    steps_RI = np.repeat(grid.steps_RG, grid.size, axis=1)
    middles = (grid.levels_T[1:] + grid.levels_T[:-1]) / 2
    made_ = with_codes(scales, np.searchsorted(middles, rows_RI / steps_RI).astype(np.uint8))
    assert isinstance(made_, CodebookRows)
    return made_


def test_scales_of_nf4_come_near_the_best_of_a_fine_ladder() -> None:
    weights_I = np.random.default_rng(2).lognormal(0, 2, WIDTH)
    plain, weighed = (made(LAPLACE, NF4, w) for w in (None, weights_I))
    each = [
        losses_of_groups(
            encode_with(LAPLACE, replace(plain, scales_RG=plain.scales_RG * np.float32(by))),
            LAPLACE,
            weights_I,
        )
        for by in np.geomspace(0.5, 1.4, 200)
    ]
    best = np.min(each, axis=0).sum()
    assert losses_of_groups(weighed, LAPLACE, weights_I).sum() < 1.05 * best


@pytest.mark.parametrize(("encoding", "rounding"), WEIGHED)
def test_any_split_into_rows_gives_the_same_bytes(encoding: Codebook, rounding: RoundingRules) -> None:
    per = encoding.group_rows or 1
    rows_RI = np.random.default_rng(3).laplace(size=(5 * per, 256)).astype(np.float32)
    weights_I = importances()[:256]
    op = EncodeTable(encoding, rounding, whole=float(np.abs(rows_RI).max()))

    def of(first: int, last: int) -> CodebookRows:
        given = [RowStatistics(0, last - first, weights_I)]
        value, _ = op.apply(DenseRows(rows_RI[first:last], DType.F32), given)
        assert isinstance(value, CodebookRows)
        return value

    together, parts = of(0, 5 * per), (of(0, 2 * per), of(2 * per, 5 * per))
    for i, array in enumerate(together.arrays):
        np.testing.assert_array_equal(array, np.concatenate([part.arrays[i] for part in parts]))


def test_many_groups_are_searched_piece_by_piece() -> None:
    rows_RI = np.random.default_rng(3).laplace(size=(700, 256)).astype(np.float32)
    weights_I = importances()[:256]
    together = made(rows_RI, MXFP4, weights_I)
    for first in (0, 341, 699):
        alone = made(rows_RI[first : first + 1], MXFP4, weights_I)
        np.testing.assert_array_equal(together.codes_RI[first : first + 1], alone.codes_RI)
        np.testing.assert_array_equal(together.scales_RG[first : first + 1], alone.scales_RG)


def test_every_expert_is_weighed_by_its_own_inputs() -> None:
    random = np.random.default_rng(5)
    rows_RI = random.laplace(size=(6, WIDTH)).astype(np.float32)
    rows_RI[4, 7] = np.nan
    each = [random.lognormal(0, 2, WIDTH).astype(np.float32) for _ in range(2)]
    op = EncodeTable(NF4)
    given = [RowStatistics(0, 2, each[0]), RowStatistics(2, 6, each[1])]
    together, found = op.apply(DenseRows(rows_RI, DType.F32), given)
    assert found.nonfinite == 4 * WIDTH + 7 and found.error is not None and found.error.count == rows_RI.size
    for (first, last), weights_I in zip(((0, 2), (2, 6)), each, strict=True):
        alone, _ = op.apply(
            DenseRows(rows_RI[first:last], DType.F32), [RowStatistics(0, last - first, weights_I)]
        )
        for a, b in zip(together.arrays, alone.arrays, strict=True):
            np.testing.assert_array_equal(a[first:last], b)
    other, _ = op.apply(DenseRows(rows_RI, DType.F32), [replace(given[0], last=6)])
    assert not same(other, together)


def test_experts_that_share_a_scale_are_not_weighed() -> None:
    op = EncodeTable(Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=4))
    value = DenseRows(LAPLACE, DType.F32)
    weights_I = importances()
    odd = [RowStatistics(0, 6, weights_I), RowStatistics(6, 24, weights_I)]
    even = [RowStatistics(0, 8, weights_I), RowStatistics(8, 24, weights_I)]
    assert same(op.apply(value, odd)[0], op.apply(value)[0])
    assert not same(op.apply(value, even)[0], op.apply(value)[0])


def test_a_narrower_last_group_is_weighed() -> None:
    encoding = Codebook("e4m3", 128, DType.F32, DType.BF16)
    rows_RI, weights_I = LAPLACE[:, :300], importances()[:300]
    plain, weighed = (made(rows_RI, encoding, w) for w in (None, weights_I))
    assert weighed.scales_RG.shape == (24, 3)
    last = [np.abs(decoded(v)[:, 256:] - rows_RI[:, 256:]) ** 2 * weights_I[256:] for v in (plain, weighed)]
    assert last[1].sum() < last[0].sum()
