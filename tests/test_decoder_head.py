"""Logits are float32 whatever the decoder computes in, and an int8 head is what it says."""

from __future__ import annotations

import pytest
import torch

from qconvert.decoder.head import Int8Head, int8_head, multiply_float32
from qconvert.decoder.storage import DenseWeight

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(2100, 96, generator=GENERATOR).bfloat16()


@pytest.mark.parametrize("rows", [1, 4, 40])
@pytest.mark.parametrize("words", [(0, 2100), (10, 30), (1000, 2050)])
def test_logits_of_bfloat16_weights_are_not_rounded(rows: int, words: tuple[int, int]) -> None:
    x = torch.randn(rows, 96, generator=GENERATOR).bfloat16()
    got = multiply_float32(x, DenseWeight(W), *words)
    assert got.dtype == torch.float32 and got.shape == (rows, words[1] - words[0])
    assert torch.allclose(got.double(), x.double() @ W.double()[slice(*words)].T, atol=1e-5)


def test_an_int8_head_is_within_half_a_step() -> None:
    head = int8_head(DenseWeight(W))
    steps = W.float().abs().amax(1, keepdim=True) / 127
    assert head.shape == (2100, 96) and head.nbytes == 2100 * 96 + 2100 * 4
    assert int(head.codes_OI.abs().max()) == 127
    assert bool(((head.rows(slice(None)) - W.float()).abs() <= steps * 0.5001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    assert not int8_head(DenseWeight(torch.zeros(3, 32))).rows(slice(None)).any()


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_products_with_an_int8_head_are_float32_products(rows: int) -> None:
    """Few rows are rounded to 2^-20 of their largest element, more are multiplied in float32."""
    head = int8_head(DenseWeight(W))
    x = torch.randn(rows, 96, generator=GENERATOR).bfloat16() * 100
    x[0, 3] = 0
    got = multiply_float32(x, head, 7, 1500)
    w = head.codes_OI[7:1500].double() * head.scales_O[7:1500, None].double()
    bound = x.double().abs().amax(1, keepdim=True) * 2.0**-21 * w.abs().sum(1) + 1e-3
    assert got.dtype == torch.float32
    assert bool(((got.double() - x.double() @ w.T).abs() <= bound).all())


def test_an_input_of_zeros_gives_zeros() -> None:
    head = Int8Head(torch.ones(8, 32, dtype=torch.int8), torch.ones(8))
    assert not multiply_float32(torch.zeros(2, 32), head, 0, 8).any()
