"""Lanes against numpy: every primitive is one IEEE operation on sixteen numbers, and none is fused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba.core.errors import TypingError

from qconvert.quant.simd import lanes
from qconvert.quant.simd.lanes import LANES, kernel, load, store, where

SPECIAL = np.array(
    [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        -2.5,
        0.49999997,
        127.5,
        -127.5,
        3e9,
        -3e9,
        1e-40,
        3.4e38,
        np.inf,
        -np.inf,
        np.nan,
    ],
    np.float32,
)
HALVES = np.arange(1 << 16, dtype=np.uint16)


@kernel
def widened(array, out):
    for at in range(0, out.size, LANES):
        store(out, at, load(array, at))


@pytest.mark.parametrize(
    ("stored", "numbers"),
    [
        (HALVES.view(np.int16), HALVES.view(np.float16).astype(np.float32)),
        (HALVES, (HALVES.astype(np.uint32) << 16).view(np.float32)),
        (HALVES.astype(np.uint8), HALVES.astype(np.uint8).astype(np.float32)),
    ],
    ids=["half", "bfloat16", "bytes"],
)
def test_every_pattern_is_widened_to_the_bit(stored: np.ndarray, numbers: np.ndarray) -> None:
    out = np.empty(stored.size, np.float32)
    widened(stored, out)
    np.testing.assert_array_equal(out.view(np.uint32), numbers.view(np.uint32))


@kernel
def rounded(array, out):
    x = load(array, 0)
    store(out, 0, lanes.truncated(x))
    store(out, 16, lanes.rounded_away(x))
    store(out, 32, lanes.absolute(x))
    store(out, 48, lanes.square_root(x))
    store(out, 64, -x)
    store(out, 80, lanes.clamp(x, np.float32(-1), np.float32(2)))


def test_one_operand() -> None:
    out = np.empty(96, np.float32)
    rounded(SPECIAL, out)
    truncated, away, absolute, root, negative, clamped = out.reshape(6, LANES)
    with np.errstate(invalid="ignore"):
        small = np.abs(SPECIAL) < 2**31
        np.testing.assert_array_equal(truncated, np.where(small, np.trunc(SPECIAL), 0))
        half_away = np.trunc(np.abs(SPECIAL.astype(np.float64)) + 0.5)
        np.testing.assert_array_equal(away, np.copysign(half_away, SPECIAL).astype(np.float32))
        np.testing.assert_array_equal(absolute, np.abs(SPECIAL))
        np.testing.assert_array_equal(root, np.sqrt(SPECIAL))
        np.testing.assert_array_equal(np.signbit(negative[:-1]), ~np.signbit(SPECIAL[:-1]))
        np.testing.assert_array_equal(clamped[:-1], np.clip(SPECIAL[:-1], -1, 2))


@kernel
def nearest(array, out):
    for at in range(0, array.size, LANES):
        store(out, at, lanes.nearest(load(array, at)))


def test_nearest_is_half_to_even_in_range_and_the_mantissa_trick_beyond() -> None:
    inside = np.arange(-4000, 4000, dtype=np.float32) / 4
    wild = np.ldexp(np.tile(inside[::100], 40), np.repeat(np.arange(40), 80)).astype(np.float32)
    x = np.concatenate([inside, wild, SPECIAL])
    out = np.empty(x.size, np.float32)
    nearest(x, out)
    np.testing.assert_array_equal(out[: inside.size], np.rint(inside))
    mantissas = (x + np.float32(12582912)).view(np.int32) & 0x7FFFFF
    np.testing.assert_array_equal(out, (mantissas - 0x400000).astype(np.float32))


@kernel
def folded(array):
    x = load(array, 0)
    marked = x > np.float32(1)
    return (
        lanes.peak(x),
        lanes.lowest(x),
        lanes.highest(x),
        lanes.lane(x, 5),
        lanes.first(marked),
        lanes.mask_bits(marked),
    )


def test_across_lanes() -> None:
    x = np.array([0, -9, 3, 0.5, 2, -7, 8, 1, 0, 0, 0, 0, 0, 0, 0, 1.5], np.float32)
    assert folded(x) == (9, -9, 8, -7, 2, 0b1000_0000_0101_0100)
    assert folded(np.zeros(LANES, np.float32))[4] == LANES


@kernel
def turned(array, starts, out):
    lanes.load_columns(array, starts, 4, out, 0, 20)


def test_columns_are_a_transposition_wherever_the_runs_lie() -> None:
    array = np.arange(1000, dtype=np.float32)
    starts = (np.arange(LANES, dtype=np.intp) * 389) % 900
    out = np.zeros(16 * 20, np.float32)
    turned(array, starts, out)
    runs = np.stack([array[start + 4 : start + 20] for start in starts])
    np.testing.assert_array_equal(out.reshape(16, 20)[:, :LANES], runs.T)
    assert not out.reshape(16, 20)[:, LANES:].any()


@kernel
def multiplied_and_added(a, b, c, out):
    x, y, z = load(a, 0), load(b, 0), load(c, 0)
    store(out, 0, where(x < y, x * y + z, x * y - z) / (z - x * x))


def test_nothing_is_fused() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, LANES)).astype(np.float32)
    out = np.empty(LANES, np.float32)
    multiplied_and_added(a, b, c, out)
    np.testing.assert_array_equal(out, np.where(a < b, a * b + c, a * b - c) / (c - a * a))
    (assembly,) = multiplied_and_added.inspect_asm().values()
    assert not re.search(r"\bv?fn?m(add|sub|la|ls)", assembly)


@kernel
def widening(array, out):
    store(out, 0, load(array, 0) * 0.1)


def test_wider_arithmetic_is_refused() -> None:
    with pytest.raises(TypingError):
        widening(SPECIAL, SPECIAL.copy())


def test_without_a_folder_for_the_cache_kernels_still_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])
    doubled = kernel(lambda number: number * 2)
    assert doubled(21) == 42


def test_a_changed_source_makes_every_cached_kernel_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = kernel(multiplied_and_added.py_func)._cache._cache_file._version
    assert kernel(multiplied_and_added.py_func)._cache._cache_file._version == stamp
    monkeypatch.setattr(lanes, "_sources", lambda folder: ())
    assert kernel(multiplied_and_added.py_func)._cache._cache_file._version != stamp
