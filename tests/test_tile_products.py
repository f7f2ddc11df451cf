"""Products of many rows, a panel of a weight at a time, against float64; what they are made of by processor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from qconvert.quant.simd import processor
from qconvert.runtime.cpu.tile_products import multiplies_bf16, multiply_bf16
from qconvert.runtime.head import multiply_float32
from qconvert.runtime.storage import DenseWeight
from tests.test_decoder_cpu import BF16, inputs, relative_error

FLOAT32 = 1e-6
"""What sums of a few thousand products lose in float32."""
bf16_only = pytest.mark.skipif(not processor.multiplies_bf16(), reason="the processor widens bfloat16")


@bf16_only
@pytest.mark.parametrize("shape", [(6, 64, 32), (7, 65, 64), (64, 128, 896), (255, 200, 4864)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_bfloat16_products_are_exact_and_summed_in_float32(
    shape: tuple[int, int, int], threads: int, use_threads: None
) -> None:
    tokens, rows, width = shape
    x_NI, w_OI = inputs(tokens, width).to(BF16), inputs(rows + 3, width)[3:].to(BF16)
    torch.set_num_threads(threads)
    assert multiplies_bf16(x_NI, w_OI)
    got_NO = multiply_bf16(x_NI, w_OI)
    assert got_NO.dtype == torch.float32
    assert relative_error(got_NO, x_NI.double() @ w_OI.double().T) < FLOAT32
    step = max(1, rows // 2)
    if step >= 64:  # rows of the weight are rows of a larger one; the threads' shares change no bit
        assert torch.equal(multiply_bf16(x_NI, w_OI[:step]), got_NO[:, :step])


@pytest.fixture
def use_threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_other_products_are_left_to_torch() -> None:
    x_NI, w_OI = inputs(64, 96).to(BF16), inputs(128, 96).to(BF16)
    assert not multiplies_bf16(x_NI.float(), w_OI)
    assert not multiplies_bf16(x_NI[:5], w_OI)
    assert not multiplies_bf16(x_NI, w_OI[:63])
    assert not multiplies_bf16(x_NI[:, :48], w_OI[:, :48])


def test_logits_of_bfloat16_states_are_float32_on_every_path() -> None:
    x_NI, head = inputs(40, 96).to(BF16), DenseWeight(inputs(300, 96).to(BF16))
    want_NO = x_NI.double() @ head.w_OI[17:290].double().T
    got_NO = multiply_float32(x_NI, head, 17, 290)
    assert got_NO.dtype == torch.float32 and relative_error(got_NO, want_NO) < FLOAT32


def asked(choice: str, code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process whose kernels use these instructions."""
    variables = os.environ | {processor.VARIABLE: choice}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)


@pytest.mark.parametrize("choice", processor.instruction_sets())
def test_less_than_the_processor_has_can_be_asked_for(choice: str) -> None:
    ran = asked(choice, "from qconvert.quant.simd import processor as p; print(*p.instruction_sets())")
    sets = processor.instruction_sets()
    assert ran.stdout.split() == list(sets[: sets.index(choice) + 1]), ran.stderr


def test_an_unknown_choice_is_an_error() -> None:
    ran = asked("best", "from qconvert.quant.simd import processor as p; p.choose()")
    assert ran.returncode and "QCONVERT_CPU=best: no such choice" in ran.stderr
