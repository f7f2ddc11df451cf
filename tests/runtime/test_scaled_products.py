"""Products of bfloat16 inputs with codes whose sums are scaled, and with AMX, against float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from qconvert.core.dtypes import DType
from qconvert.core.encodings import Codebook
from qconvert.core.values import Value
from qconvert.quant.simd import processor
from qconvert.runtime import head as heads
from qconvert.runtime.cpu.packed_weights import PackedGrid, pack_grid
from qconvert.runtime.cpu.scaled_products import codes_and_scales, multiplies_scaled, multiply_scaled
from qconvert.runtime.head import multiply_float32
from qconvert.runtime.storage import DenseWeight
from tests.runtime.test_decoder_cpu import BF16, inputs, relative_error
from tests.runtime.test_decoder_grids import blocks, coded, unrounded
from tests.runtime.test_tile_products import FLOAT32, VALUES, bf16_only
from tests.support.same_bits import asked

FLOATS = [
    (encoding.label, coded(encoding, 70, 256))
    for encoding in (
        Codebook("e4m3", None, DType.BF16, DType.BF16),
        Codebook("e5m2", 32, DType.BF16, DType.BF16),
        Codebook("int8", 64, DType.F32, DType.BF16),
    )
]
DECODED = ("Q4_1", "Q2_K", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS", "MXFP4", "mlx")
"""Those with mins or a table."""
SCALED = [(name, value) for name, value in VALUES if name not in DECODED]


def packed(value: Value) -> PackedGrid:
    weight = pack_grid(value, torch.float32)
    assert weight is not None
    return weight


@bf16_only
@pytest.mark.parametrize(("name", "value"), SCALED + FLOATS, ids=[name for name, _ in SCALED + FLOATS])
def test_sums_of_exact_products_are_scaled(name: str, value: Value) -> None:
    weight = packed(value)
    x_NI = inputs(11, weight.shape[1]).to(BF16)
    assert multiplies_scaled(x_NI, weight)
    known = name in dict(FLOATS)
    want_OI = weight.rows(slice(None)).double() if known else torch.from_numpy(unrounded(value)).double()
    assert relative_error(multiply_scaled(x_NI, weight), x_NI.double() @ want_OI.T) < FLOAT32


@bf16_only
def test_threads_and_parts_change_no_bit(use_threads: None) -> None:
    weight, x_NI = packed(blocks("Q6_K", 200, 512)), inputs(33, 512).to(BF16)
    torch.set_num_threads(1)
    want_NO = multiply_scaled(x_NI, weight)
    torch.set_num_threads(3)
    assert torch.equal(multiply_scaled(x_NI, weight), want_NO)
    assert torch.equal(multiply_scaled(x_NI, weight.part(slice(70, 190))), want_NO[:, 70:190])


def test_what_has_mins_or_a_table_or_other_inputs_is_decoded() -> None:
    by_name = dict(VALUES)
    for name in DECODED:
        weight = packed(by_name[name])
        assert not multiplies_scaled(inputs(11, weight.shape[1]).to(BF16), weight)
    weight = packed(by_name["Q6_K"])
    x_NI = inputs(11, weight.shape[1])
    assert not multiplies_scaled(x_NI, weight) and not multiplies_scaled(x_NI[:5].to(BF16), weight)
    assert not multiplies_scaled(x_NI.to(BF16), weight.part(slice(0, 63)))


HEADS = {
    "bf16": DenseWeight(inputs(300, 256).to(BF16)),
    "int8": packed(dict(VALUES)["int8-channel"]),
    "e4m3": packed(FLOATS[0][1]),
    "Q6_K": packed(dict(VALUES)["Q6_K"]),
}


@pytest.mark.parametrize("tiles", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_are_multiplied_exactly_by_kernels_and_by_torch(
    name: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, seen = HEADS[name], []
    x_NI = inputs(40, head.shape[1]).to(BF16)
    stop = head.shape[0] - 1
    want_NO = x_NI.double() @ head.rows(slice(1, stop)).double().T
    monkeypatch.setattr(processor, "multiplies_tiles", lambda: tiles)
    plain = heads._multiply_blocks

    def spy(*args: object) -> torch.Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(heads, "_multiply_blocks", spy)
    before = torch.backends.mkldnn.matmul.fp32_precision
    got_NO = multiply_float32(x_NI, head, 1, stop)
    assert got_NO.dtype == torch.float32 and relative_error(got_NO, want_NO) < FLOAT32
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    if not processor.multiplies_bf16() or processor.widens_bf16():
        return
    rounds = {"Q6_K": [before]}.get(name, ["bf16"])  # its groups are smaller than rows
    assert seen == (rounds if tiles else [])


def test_a_weight_comes_apart_into_codes_and_scales_of_rows() -> None:
    for name in ("int8", "e4m3"):
        weight = HEADS[name]
        assert isinstance(weight, PackedGrid)
        apart = codes_and_scales(weight)
        assert apart is not None
        codes_OI = apart[0].rows(slice(None))
        assert torch.equal(codes_OI.to(BF16).float(), codes_OI)  # bfloat16 holds them
        assert torch.equal(codes_OI * apart[1][:, None], weight.rows(slice(None)))
    assert codes_and_scales(packed(VALUES[0][1])) is None


TILES = """
import torch
from qconvert.quant.simd import processor
processor.multiplies_tiles = lambda: True
from qconvert.runtime.head import multiply_float32
from qconvert.runtime.storage import DenseWeight
x_NI, head = torch.randn(64, 512).bfloat16(), DenseWeight(torch.randn(1024, 512).bfloat16())
multiply_float32(x_NI, head, 0, 1024)
"""


@bf16_only
def test_torch_multiplies_bfloat16_by_the_kernels_that_have_amx() -> None:
    """oneDNN says which of its kernels run; with AMX the same call ends in `avx512_core_amx`."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", TILES], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line for line in ran.stdout.splitlines() if "exec,cpu,matmul" in line]
    assert [line for line in lines if "brg_matmul" in line and "attr-fpmath:bf16" in line], ran.stdout


def test_amx_is_a_choice_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = asked("amx", "from qconvert.quant.simd import processor as p; print(p.in_words())")
    if processor.multiplies_tiles():
        assert "bfloat16 by torch's AMX tiles" in ran.stdout
    else:
        assert ran.returncode and "this processor lacks amx-tile, amx-bf16" in ran.stderr
    monkeypatch.setattr(processor, "multiplies_tiles", lambda: True)
    assert "bfloat16 by torch's AMX tiles" in processor.in_words()
