"""Half precision by integer arithmetic against numpy's, over every half and every upper half of a float."""

from __future__ import annotations

import numpy as np

from qconvert.quant.ggml import scalars
from qconvert.quant.simd.lanes import kernel


@kernel
def halves(numbers, bits, values):
    for index in range(numbers.size):
        bits[index] = scalars.half_bits(numbers[index])
        values[index] = scalars.half_value(bits[index])


@kernel
def stored(numbers, out, values):
    for index in range(numbers.size):
        values[index] = scalars.put_half(out, 2 * index, numbers[index])


def awkward_numbers() -> np.ndarray:
    """Every half, the middles between neighbours and what is next to those, every bfloat16, random floats."""
    every_half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(every_half[np.isfinite(every_half)])
    middles = (finite[1:] + finite[:-1]) / 2
    above, below = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))
    every_bfloat = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    ends = np.array([65504, 65519.996, 65520, 2.0**-24, 2.0**-25, 2.0**-26], np.float32)
    return np.concatenate([every_half, middles, above, below, every_bfloat, random, ends, -ends])


def test_rounding_to_half_and_back() -> None:
    numbers = awkward_numbers()
    bits, values = np.empty(numbers.size, np.uint16), np.empty(numbers.size, np.float32)
    halves(numbers, bits, values)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(np.float16)
    known = ~np.isnan(numbers)
    np.testing.assert_array_equal(bits[known], expected.view(np.uint16)[known])
    back = expected.astype(np.float32)
    np.testing.assert_array_equal(values[known].view(np.uint32), back[known].view(np.uint32))
    assert set(np.unique(bits[~known])) == {0x7E00, 0xFE00}
    assert np.isnan(values[~known]).all()


def test_halves_are_stored_little_endian() -> None:
    numbers = np.array([0.1, -3.0, 1e-7, 1e9], np.float32)
    out, values = np.empty(8, np.uint8), np.empty(4, np.float32)
    stored(numbers, out, values)
    with np.errstate(over="ignore"):
        expected = numbers.astype("<f2")
    assert out.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(values, expected.astype(np.float32))
