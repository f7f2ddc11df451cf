"""Logits are float32 whatever the decoder computes in, and a rounded head is what it says."""

from __future__ import annotations

import pytest
import torch

from qconvert.core.activations import INT8_GROUPS
from qconvert.errors import BadRecipe
from qconvert.quant.packed_codes import codes_of
from qconvert.runtime.device_layout import Layout, place_table
from qconvert.runtime.head import logit_blocks, multiply_float32, rounded_head
from qconvert.runtime.input_rounding import round_inputs
from qconvert.runtime.linear import Table
from qconvert.runtime.storage import DenseWeight

GENERATOR = torch.Generator().manual_seed(0)
W = torch.randn(2100, 96, generator=GENERATOR).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("words", [(0, 2100), (10, 30), (1000, 2050)])
def test_logits_of_bfloat16_weights_are_not_rounded(rows: int, words: tuple[int, int]) -> None:
    x = torch.randn(rows, 96, generator=GENERATOR).bfloat16()
    got = multiply_float32(x, DenseWeight(W), *words)
    assert got.dtype == torch.float32 and got.shape == (rows, words[1] - words[0])
    assert torch.allclose(got.double(), x.double() @ W.double()[slice(*words)].T, atol=1e-5)


def head_of(w: torch.Tensor, bits: int) -> Table:
    return place_table(rounded_head(DenseWeight(w), bits), torch.device("cpu"), torch.float32, Layout.AUTO)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rounded_head_is_within_half_a_step(bits: int) -> None:
    value = rounded_head(DenseWeight(W), bits)
    top = 2 ** (bits - 1) - 1
    w_VGS = W.float().view(2100, 1 if bits == 8 else 3, -1)
    steps = w_VGS.abs().amax(2, keepdim=True) / top
    assert (codes_of(value).min(), codes_of(value).max()) == (1, 2 * top + 1)
    got = head_of(W, bits).rows(slice(None)).view_as(w_VGS)
    assert bool(((got - w_VGS).abs() <= steps * 0.5001).all())


def test_a_row_of_zeros_stays_zero() -> None:
    assert not head_of(torch.zeros(3, 32), 8).rows(slice(None)).any()


def test_a_head_of_no_whole_groups_is_refused() -> None:
    with pytest.raises(BadRecipe, match="48 columns are not a multiple of 32"):
        rounded_head(DenseWeight(torch.zeros(3, 48)), 4)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_a_rounded_head_are_not_rounded_to_16_bits(
    bits: int, rows: int, threads: int, use_threads: None
) -> None:
    head = head_of(W, bits)
    x = torch.randn(rows, 96, generator=GENERATOR).bfloat16() * 100
    torch.set_num_threads(threads)
    got = multiply_float32(x, head, 7, 1500)
    w = head.rows(slice(7, 1500)).double()
    # Half a step of the 16-bit input of few rows, and float32 sums.
    bound = (x.double().abs().amax(1, keepdim=True) * w.abs().sum(1)) * (0.5 / 32767 + 96 * 2.0**-24)
    assert got.dtype == torch.float32
    assert bool(((got.double() - x.double() @ w.T).abs() <= bound).all())


@pytest.mark.parametrize("width", [48, 64, 96, 100])
def test_widths_that_fill_no_registers(width: int) -> None:
    w = torch.randn(9, width, generator=GENERATOR).bfloat16()
    x = torch.randn(1, width, generator=GENERATOR)
    assert torch.allclose(multiply_float32(x, DenseWeight(w), 0, 9), x @ w.float().T, atol=1e-5)


class Spy(DenseWeight):
    """A head that notes under which switches it is read."""

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        matmul = torch.backends.cuda.matmul
        SEEN.append((matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction))
        return super().rows(index)


SEEN: list[tuple[str, bool]] = []


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="the switch is of torch 2.9"
)
def test_switches_that_round_products_do_not_reach_logits() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        multiply_float32(torch.ones(3, 96), Spy(W), 0, 2100)
        assert matmul.fp32_precision == "tf32" and matmul.allow_bf16_reduced_precision_reduction
    finally:
        matmul.fp32_precision = before
    assert set(SEEN) == {("ieee", False)}


@pytest.mark.parametrize("words", [(0, 2100), (10, 30), (2050, 2100)])
def test_a_head_of_codes_multiplies_rounded_states_where_it_may(words: tuple[int, int]) -> None:
    head, x = head_of(W, 8), torch.randn(40, 96, generator=GENERATOR)
    w = head.rows(slice(*words)).double()
    exact, rounded = (logit_blocks(x, head, inputs)(*words) for inputs in (None, INT8_GROUPS))
    assert torch.equal(exact, multiply_float32(x, head, *words))
    want = round_inputs(x, INT8_GROUPS).double() @ w.T
    assert rounded.dtype == torch.float32 and rounded.shape == exact.shape
    assert torch.allclose(rounded.double(), want, atol=1e-5) and not torch.allclose(rounded, exact, atol=1e-3)


def test_other_heads_and_few_rows_are_exact() -> None:
    x, dense, head = torch.randn(40, 96, generator=GENERATOR), DenseWeight(W), head_of(W, 8)
    assert torch.equal(logit_blocks(x, dense, INT8_GROUPS)(0, 99), multiply_float32(x, dense, 0, 99))
    few = x[:16]
    assert torch.equal(logit_blocks(few, head, INT8_GROUPS)(0, 99), multiply_float32(few, head, 0, 99))
