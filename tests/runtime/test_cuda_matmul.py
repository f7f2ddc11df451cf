"""Runs interpreted_matmul.py in a process of its own, and reads the machine code of its kernels.

A weight that is multiplied by a row or two is read once, so the kernels are as fast as memory if they
spend few instructions on it. On an H200, 4.3 TB/s are 8.3e12 int4 or 4.2e12 int8 weights a second, and
its 132 multiprocessors start 33.4e12 instructions of one thread: 4.0 to an int4 weight, 7.9 to an int8.
Counted here: instructions of the main loop, times threads, over the weights of one turn of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.runtime.cuda import dequantize, matmul, tuning
from qconvert.runtime.cuda.packing import FewRowWeight, mma_weight
from qconvert.runtime.cuda.tiles import sums_for
from qconvert.runtime.storage import DenseWeight
from tests.runtime.test_decoder_linear import random_value
from tests.support.commands import check_interpreted
from tests.support.machine_code import Launches, MachineCode

CPU = torch.device("cpu")


def test_kernels_in_the_interpreter(shared: Path) -> None:
    check_interpreted("interpreted_matmul.py", shared)


def code_of(
    weight: FewRowWeight, rows: int, monkeypatch: pytest.MonkeyPatch, width: int
) -> tuple[MachineCode, float]:
    """The kernel for this weight and so many rows, and its instructions per weight."""
    name = "multiply_rows" if isinstance(weight, DenseWeight) else "multiply_tiles"
    launches = Launches(getattr(matmul, name))
    monkeypatch.setattr(matmul, name, launches)
    x_MK = torch.zeros(rows, width, dtype=torch.bfloat16)
    matmul.multiply_partials(x_MK, sums_for(x_MK, weight), weight, 2)
    (code,) = launches.codes
    chosen = tuning.config(weight.kind, rows * matmul.groups_of(weight))
    threads, columns = 32 * chosen.warps, 64 if isinstance(weight, DenseWeight) else 128
    # As many programs fit a multiprocessor as the table says; a program's 1 KB more is CUDA's own.
    assert chosen.resident * threads * -(-code.registers // 8) * 8 <= 65536, code.registers
    assert chosen.resident * (code.shared + 1024) <= 227 << 10, code.shared
    return code, len(code.loop) * threads / (chosen.rows * columns)


FEW = [
    (AffineInt(4, 128, True, DType.BF16), 1, 3.0),
    (AffineInt(4, 128, True, DType.F16), 5, 3.0),
    (AffineInt(4, 64, False, DType.BF16), 1, 3.0),
    (AffineInt(4, 32, False, DType.F32), 4, 3.0),
    (AffineInt(4, None, True, DType.BF16), 1, 3.0),
    (AffineInt(8, 128, True, DType.BF16), 1, 6.0),
    (AffineInt(8, 32, False, DType.BF16), 4, 6.0),
]


@pytest.mark.parametrize(("encoding", "rows", "most"), FEW, ids=str)
def test_few_instructions_go_to_a_weight(
    encoding: AffineInt, rows: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = mma_weight(random_value(encoding, 256, 512), CPU)
    assert weight is not None
    code, per_weight = code_of(weight, rows, monkeypatch, 512)
    assert per_weight <= most, code.loop
    assert code.local == 0 and code.registers <= 168, code  # three programs to a multiprocessor
    # Codes go from memory to shared memory 16 bytes at a time, behind the tensor cores' back; from there
    # to registers as the tensor cores want them, and never back.
    assert code.in_loop("HGMMA") == 16
    assert code.in_loop(r"LDGSTS.*\.128") >= 6 and not code.in_loop(r"\bLDG\b")
    assert not code.in_loop(r"\bST[SL]\b|\bLDL\b")
    # The interpreter does not see the assembly: (a & b) | c is table 0xea of three inputs.
    masks = ("0xf000f",) if encoding.bits == 4 else ("0x7f007f", "0x800080")
    assert sum(code.in_loop(rf"LOP3\.LUT .*{mask}, R\w+(\.reuse)?, 0xea") for mask in masks) == 64


@given(st.sampled_from(["int4-mma", "int8-mma", "dense"]), st.integers(1, 40_000), st.integers(1, 20_000))
def test_every_split_has_a_tile_and_a_small_weight_many_splits(kind: str, out: int, width: int) -> None:
    parts = tuning.splits(kind, (out, width))
    assert 1 <= parts <= min(tuning.MOST_SPLITS, -(-width // 128))
    small = tuning.splits(kind, (128, width))  # one program or two: a GPU for each of its tiles
    assert small == min(tuning.MOST_SPLITS, -(-width // 128)) or small >= 5


def test_measured_splits_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = tuning.splits("int4-mma", (128, 1024))
    monkeypatch.setitem(tuning.SPLITS, ("int4-mma", 128, 1024), predicted + 1)
    assert tuning.splits("int4-mma", (128, 1024)) == predicted + 1


def test_many_columns_stay_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, rows, most in ((4, 32, 3.0), (4, 64, 4.0), (8, 32, 6.0), (8, 64, 6.0)):
        weight = mma_weight(random_value(AffineInt(bits, 128, True, DType.BF16), 256, 512), CPU)
        assert weight is not None
        with monkeypatch.context() as patch:
            code, per_weight = code_of(weight, rows, patch, 512)
        assert per_weight <= most and code.local == 0 and code.in_loop("HGMMA"), code


def test_a_dense_weight_goes_from_shared_memory_to_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = DenseWeight(torch.zeros(256, 512, dtype=torch.bfloat16))
    code, per_weight = code_of(weight, 1, monkeypatch, 512)
    assert per_weight <= 2.0 and code.local == 0 and code.registers <= 168, code
    assert code.in_loop("HGMMA") and code.in_loop(r"LDGSTS.*\.128") >= 8
    assert not code.in_loop(r"^(?!@!PT).*\b(LD[GSL]|LDSM|ST[SL])\b")


@pytest.mark.parametrize(
    "encoding", [AffineInt(4, 128, True, DType.BF16), AffineInt(8, 32, False, DType.BF16)]
)
def test_dequantizing_moves_16_bytes_at_a_time(encoding: AffineInt, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5 or 3 bytes a weight leave 17 instructions for it; these are of the whole kernel."""
    weight = mma_weight(random_value(encoding, 256, 512), CPU)
    assert weight is not None
    launches = Launches(dequantize.dequantize_tile)
    monkeypatch.setattr(dequantize, "dequantize_tile", launches)
    dequantize.dequantize(weight)
    (code,) = launches.codes
    texts = [text for _, text in code.listing]
    assert len(texts) * 256 / 128**2 <= 12 and code.local == 0, code
    assert sum("STG" in text for text in texts) == sum("STG.E.128" in text for text in texts) == 8
    assert sum(text.startswith("LDG.E.128") for text in texts) == encoding.bits // 2
