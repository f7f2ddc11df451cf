"""Tiles of bytes where sums are largest, on every set of instructions, and what they are compiled to."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from qconvert.core.activations import INT8_GROUPS
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin
from qconvert.core.values import AffineIntRows, AffineMinRows, GgmlRows, Value
from qconvert.quant.simd import processor
from qconvert.runtime.cpu.byte_products import multiply_bytes
from qconvert.runtime.cpu.byte_tiles import chain_of
from qconvert.runtime.cpu.packed_weights import pack_grid
from qconvert.runtime.input_rounding import round_inputs
from tests.runtime.test_decoder_grids import blocks, carried, unrounded
from tests.runtime.test_decoder_linear import random_value
from tests.runtime.test_tile_products import FLOAT32, relative_error
from tests.support.instruction_sets import lesser

ROWS, WIDTH = 128, 512


SETS = lesser("avx2", "avx512")
"""Sums of bytes in registers of 256 bits or 512, by VNNI or not; bfloat16 has no part in them."""


def extremes(bits: int) -> np.ndarray:
    """Rows whose codes are the least, rows whose codes are the highest, and rows of either, in turn."""
    codes_RI = np.zeros((ROWS, WIDTH), np.uint8)
    codes_RI[1::3] = (1 << bits) - 1
    codes_RI[2::3, ::2] = (1 << bits) - 1
    return codes_RI


def symmetric(bits: int) -> Value:
    value = random_value(AffineInt(bits, 32, True, DType.F16), ROWS, WIDTH)
    return AffineIntRows(extremes(bits), value.scales_RG, None, value.encoding)


def with_zeros(bits: int, zero: int) -> Value:
    value = random_value(AffineInt(bits, 32, False, DType.F16), ROWS, WIDTH)
    assert value.zeros_RG is not None
    return AffineIntRows(extremes(bits), value.scales_RG, np.full_like(value.zeros_RG, zero), value.encoding)


def with_mins(bits: int) -> Value:
    encoding = AffineMin(bits, 32, DType.F16)
    scales = np.full((ROWS, WIDTH // 32), 0.03)
    return AffineMinRows(extremes(bits), carried(scales, DType.F16), carried(-scales, DType.F16), encoding)


def filled(name: str, byte: int) -> Value:
    """Blocks whose codes are all made of one byte."""
    value = blocks(name, ROWS, WIDTH)
    scale = 2 if name in ("Q4_0", "IQ4_NL") else 0
    raw = value.arrays[0].copy().reshape(ROWS, -1, 18 if scale else 210)
    codes = slice(2, None) if scale else slice(0, 192)
    raw[:, :, codes] = byte
    return GgmlRows(raw.reshape(ROWS, -1), value.encoding)


CASES = {
    "int4 symmetric": lambda: symmetric(4),
    "int4 zero 0": lambda: with_zeros(4, 0),
    "int4 zero 15": lambda: with_zeros(4, 15),
    "int4 zero 16": lambda: with_zeros(4, 16),
    "int4 mins": lambda: with_mins(4),
    "int6 symmetric": lambda: symmetric(6),
    "int8 symmetric": lambda: symmetric(8),
    "int8 zero 255": lambda: with_zeros(8, 255),
    **{f"{name} {byte}": lambda name=name, byte=byte: filled(name, byte)
       for name in ("Q4_0", "IQ4_NL", "Q6_K") for byte in (0, 255)},
}  # fmt: skip


def largest_inputs(rows: int) -> torch.Tensor:
    """Rows that become the codes 127 or -127 throughout, or both in turn."""
    x_NI = torch.ones(rows, WIDTH)
    x_NI[1::3] = -1
    x_NI[2::3, ::2] = -1
    return x_NI


def digest() -> str:
    """The products of the largest inputs and codes, held against float64."""
    x_NI = largest_inputs(7)
    for name, made in CASES.items():
        value = made()
        weight = pack_grid(value, torch.float32)
        assert weight is not None
        want_NO = round_inputs(x_NI, INT8_GROUPS).double() @ torch.from_numpy(unrounded(value)).T
        error = relative_error(multiply_bytes(x_NI, weight, None), want_NO)
        assert error < FLOAT32, (name, error)
    return "as in float64"


@pytest.mark.parametrize("choice", [*SETS, *processor.instruction_sets()[-1:]])
def test_the_largest_sums_fit(choice: str, digest_with: Callable[[str, str], str]) -> None:
    assert digest_with(choice, "byte_tiles") == "as in float64"


@pytest.mark.skipif(chain_of(64, 32) == 0, reason="this processor adds products to 32 bits")
def test_as_many_sums_are_chained_as_fit_16_bits() -> None:
    for reach in range(1, 129):
        chain = chain_of(reach, 32)
        assert chain * 2 * 255 * reach < 1 << 15
        assert chain == 8 or 2 * max(chain, 0.5) * 2 * 255 * reach >= 1 << 15
    assert [chain_of(reach, 32) for reach in (8, 16, 32, 64, 128)] == [8, 4, 2, 1, 0]
