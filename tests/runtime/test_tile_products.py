"""Products of many rows, a panel of a weight at a time, against float64, on every set of instructions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from qconvert.core.activations import INT8_GROUPS
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook
from qconvert.core.values import Value
from qconvert.quant.simd import processor
from qconvert.runtime.cpu.byte_products import multiplies_bytes, multiply_bytes
from qconvert.runtime.cpu.packed_weights import pack_grid
from qconvert.runtime.cpu.tile_products import multiplies_bf16, multiply_bf16
from qconvert.runtime.head import multiply_float32
from qconvert.runtime.input_rounding import round_inputs
from qconvert.runtime.linear import Linear
from qconvert.runtime.storage import DenseWeight
from tests.runtime.test_decoder_cpu import BF16, inputs, relative_error
from tests.runtime.test_decoder_grids import blocks, coded, unrounded, with_mins
from tests.runtime.test_decoder_linear import random_value
from tests.support.instruction_sets import lesser
from tests.support.same_bits import asked

FLOAT32 = 1e-6
"""What sums of a few thousand products lose in float32."""
bf16_only = pytest.mark.skipif(not processor.multiplies_bf16(), reason="the processor widens bfloat16")


SETS = lesser("avx2", "avx512")
"""As in test_byte_tiles.py."""


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


@pytest.mark.parametrize("choice", processor.instruction_sets())
def test_less_than_the_processor_has_can_be_asked_for(choice: str) -> None:
    ran = asked(choice, "from qconvert.quant.simd import processor as p; print(*p.instruction_sets())")
    sets = processor.instruction_sets()
    assert ran.stdout.split() == list(sets[: sets.index(choice) + 1]), ran.stderr


def test_an_unknown_choice_is_an_error() -> None:
    ran = asked("best", "from qconvert.quant.simd import processor as p; p.choose()")
    assert ran.returncode and "QCONVERT_CPU=best: no such choice" in ran.stderr


INTEGERS = [
    AffineInt(4, 128, True, DType.BF16),
    AffineInt(4, 32, False, DType.BF16),
    AffineInt(4, 16, False, DType.F16),
    AffineInt(8, None, True, DType.F32),
    AffineInt(8, 32, False, DType.F16),
    AffineInt(6, 128, True, DType.BF16),
]
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
VALUES = [
    *((each.label, random_value(each, 70, 256 if each.group_size == 128 else 224)) for each in INTEGERS),
    *((name, blocks(name, 70, 512)) for name in BLOCKS),
    ("mlx", with_mins(AffineMin(4, 64, DType.BF16), 70, 512)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[name for name, _ in VALUES])
def test_integer_products_are_those_of_rounded_inputs(name: str, value: Value) -> None:
    weight = pack_grid(value, torch.float32)
    assert weight is not None and multiplies_bytes(5, weight)
    x_NI, bias_O = inputs(5, weight.shape[1]), torch.arange(70.0)
    x_NI[2, :32] = 0
    exact_OI = torch.from_numpy(unrounded(value))
    want_NO = round_inputs(x_NI, INT8_GROUPS).double() @ exact_OI.T + bias_O
    got_NO = multiply_bytes(x_NI, weight, bias_O)
    assert relative_error(got_NO, want_NO) < FLOAT32
    narrow_NO = multiply_bytes(x_NI.to(BF16), weight, bias_O)
    want_NO = round_inputs(x_NI.to(BF16).float(), INT8_GROUPS).double() @ exact_OI.T + bias_O
    assert narrow_NO.dtype == BF16 and relative_error(narrow_NO, want_NO) < 2.0**-8


def test_threads_change_no_bit_of_integer_products(use_threads: None) -> None:
    weight, x_NI = pack_grid(random_value(INTEGERS[0], 200, 256), torch.float32), inputs(33, 256)
    assert weight is not None
    made = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made.append(multiply_bytes(x_NI, weight, None))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_broken_inputs_are_not_hidden() -> None:
    weight = pack_grid(random_value(INTEGERS[0], 64, 256), torch.float32)
    assert weight is not None
    for broken in (float("nan"), float("inf")):
        x_NI = inputs(4, 256)
        x_NI[1, 7] = broken
        y_NO = multiply_bytes(x_NI, weight, None)
        assert not y_NO[1].isfinite().any() and y_NO[[0, 2, 3]].isfinite().all()


def test_codes_beyond_8_bits_are_decoded() -> None:
    for encoding in (
        Codebook("nf4", 64, DType.F32, DType.BF16),
        Codebook("e4m3", None, DType.BF16, DType.BF16),
    ):
        weight = pack_grid(coded(encoding, 70, 256), torch.float32)
        assert weight is not None and not multiplies_bytes(64, weight)
        x_NI = inputs(20, 256)
        want_NO = round_inputs(x_NI, INT8_GROUPS).double() @ weight.rows(slice(None)).double().T
        assert relative_error(Linear(weight, inputs=INT8_GROUPS)(x_NI), want_NO) < FLOAT32


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[name for name, _ in VALUES])
@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_are_rounded_too_where_codes_are_no_table(name: str, value: Value, rows: int) -> None:
    weight = pack_grid(value, torch.float32)
    assert weight is not None
    x_NI, bias_O = inputs(rows, weight.shape[1]), torch.arange(70.0)
    x_NI[0, 32:64] = 0
    got_NO = Linear(weight, bias_O, inputs=INT8_GROUPS)(x_NI)
    if weight.recipe.kind in ("int4", "int6", "int8"):
        x_NI = round_inputs(x_NI, INT8_GROUPS)
        want_NO = x_NI.double() @ torch.from_numpy(unrounded(value)).T + bias_O
        assert relative_error(got_NO, want_NO) < FLOAT32
    else:
        assert torch.equal(got_NO, Linear(weight, bias_O)(x_NI))


def test_broken_inputs_of_few_rows_are_not_hidden() -> None:
    weight = pack_grid(random_value(INTEGERS[0], 64, 256), torch.float32)
    for broken in (float("nan"), float("inf")):
        x_NI = inputs(2, 256)
        x_NI[1, 7] = broken
        y_NO = Linear(weight, inputs=INT8_GROUPS)(x_NI)
        assert not y_NO[1].isfinite().any() and y_NO[0].isfinite().all()


def test_more_rows_are_multiplied_by_tiles() -> None:
    weight = pack_grid(random_value(INTEGERS[0], 64, 256), torch.float32)
    assert weight is not None
    more_NI = inputs(17, 256)
    assert torch.equal(Linear(weight, inputs=INT8_GROUPS)(more_NI), multiply_bytes(more_NI, weight, None))


def digest() -> str:
    """What few and more rows of inputs give with three weights, hashed; both are held against float64."""
    made = []
    for encoding in (INTEGERS[0], INTEGERS[2], INTEGERS[4]):
        weight, x_NI = pack_grid(random_value(encoding, 70, 256), torch.float32), inputs(7, 256)
        assert weight is not None
        want_NO = round_inputs(x_NI, INT8_GROUPS).double() @ weight.rows(slice(None)).double().T
        many_NO = multiply_bytes(x_NI, weight, None)
        few_NO = Linear(weight, inputs=INT8_GROUPS)(x_NI)
        assert relative_error(many_NO, want_NO) < FLOAT32
        assert weight.recipe.kind == "int8" or relative_error(few_NO, want_NO) < FLOAT32
        made += [many_NO, few_NO]
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in made)).hexdigest()


def test_every_instruction_set_gives_the_same_bits(digest_with: Callable[[str, str], str]) -> None:
    """Sums of integers are exact, and what follows is the same chain of float32 operations."""
    choices = [*SETS, *processor.instruction_sets()[-1:]]
    assert len({digest_with(choice, "tile_products") for choice in choices}) <= 1
