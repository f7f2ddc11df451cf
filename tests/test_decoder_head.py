"""Logits are float32 whatever the decoder computes in, and an int8 head is what it says."""

from __future__ import annotations

import pytest
import torch

from qconvert.decoder.head import int8_head, multiply_float32
from qconvert.decoder.storage import DenseWeight

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(2100, 96, generator=GENERATOR).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 40])
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
    assert (int(head.codes_OI.min()), int(head.codes_OI.max())) == (1, 255)
    assert bool(((head.rows(slice(None)) - W.float()).abs() <= steps * 0.5001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    assert not int8_head(DenseWeight(torch.zeros(3, 32))).rows(slice(None)).any()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_with_an_int8_head_are_float32_products(rows: int, threads: int) -> None:
    head = int8_head(DenseWeight(W))
    x = torch.randn(rows, 96, generator=GENERATOR).bfloat16() * 100
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    got = multiply_float32(x, head, 7, 1500)
    torch.set_num_threads(before)
    w = (head.codes_OI[7:1500].double() - 128) * head.scales_O[7:1500, None].double()
    # The sum over codes runs up to 255 / 127 further from zero than the sum over weights.
    bound = x.double().abs() @ w.abs().amax(1, keepdim=True).expand(-1, 96).T * 3 * 96 * 2.0**-24
    assert got.dtype == torch.float32
    assert bool(((got.double() - x.double() @ w.T).abs() <= bound).all())


@pytest.mark.parametrize("width", [48, 64, 96, 100])
def test_widths_that_fill_no_registers(width: int) -> None:
    w = torch.randn(9, width, generator=GENERATOR).bfloat16()
    x = torch.randn(1, width, generator=GENERATOR)
    assert torch.allclose(multiply_float32(x, DenseWeight(w), 0, 9), x @ w.float().T, atol=1e-5)
