"""Runs interpreted_step.py in a process of its own, and compiles the same kernels for a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from qconvert.runtime.cuda import attention, head, norm, swiglu
from qconvert.runtime.cuda.activation import Parts, empty_rows
from qconvert.runtime.cuda.attention import HeadNorms, HeadShape, Place, empty_softmaxes, stretches_for
from qconvert.runtime.cuda.head import HiddenStates, score_hidden_states
from tests.support.commands import check_interpreted
from tests.support.machine_code import Launches, MachineCode

META = torch.device("meta")


def test_kernels_in_the_interpreter(shared: Path) -> None:
    check_interpreted("interpreted_step.py", shared)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def parts_of(splits: int, rows: int, width: int, *, bias: bool = False) -> Parts:
    return Parts(empty(splits, rows, width), empty(width, dtype=torch.bfloat16) if bias else None)


def check(launches: Launches, registers: int) -> MachineCode:
    """Nothing in local memory, where registers spill to, and no more registers than expected."""
    (code,) = launches.codes
    assert code.local == 0 and code.registers <= registers, code
    return code


@pytest.mark.parametrize(("hidden", "splits"), [(896, 1), (1536, 4), (4096, 4), (8192, 8)])
def test_norms_keep_to_registers(hidden: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(norm._add_norm)
    monkeypatch.setattr(norm, "_add_norm", launches)
    weight = empty(hidden, dtype=torch.bfloat16)
    norm.add_norm(
        parts_of(splits, 1, hidden), empty(1, hidden), weight, 1e-6, empty_rows(1, hidden, 128, META)
    )
    check(launches, 64)


@pytest.mark.parametrize(("width", "splits", "rows"), [(4864, 4, 1), (18944, 2, 16)])
def test_gates_keep_to_registers(width: int, splits: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(swiglu._swiglu)
    monkeypatch.setattr(swiglu, "_swiglu", launches)
    swiglu.swiglu(parts_of(splits, rows, 2 * width), empty_rows(rows, width, 128, META))
    check(launches, 48)


@pytest.mark.parametrize(
    ("heads", "bias", "norms"),
    [
        (HeadShape(14, 2, 64, None), True, False),  # Qwen2.5-0.5B
        (HeadShape(28, 4, 128, None), True, False),  # Qwen2.5-7B
        (HeadShape(32, 8, 128, None), False, True),  # Qwen3-8B
        (HeadShape(32, 8, 128, 4096), False, False),  # Mistral-7B
    ],
    ids=["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-8b", "mistral-7b"],
)
def test_attention_keeps_to_registers(
    heads: HeadShape, bias: bool, norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attends, combines = Launches(attention._attend), Launches(attention._combine)
    monkeypatch.setattr(attention, "_attend", attends)
    monkeypatch.setattr(attention, "_combine", combines)
    room, width = 4096, (heads.heads + 2 * heads.kv_heads) * heads.head_dim
    weight = empty(heads.head_dim, dtype=torch.bfloat16)
    place = Place(empty(1, dtype=torch.int64), empty(room, heads.head_dim), empty(room, heads.head_dim))
    cache = empty(2, 1, heads.kv_heads, room, heads.head_dim, dtype=torch.bfloat16)
    softmaxes = empty_softmaxes(1, heads, stretches_for(heads, 1, 132), META)
    qkv = parts_of(4, 1, width, bias=bias)
    attention.attend(qkv, HeadNorms(weight, weight, 1e-6) if norms else None, heads, place, cache, softmaxes)
    attention.combine(softmaxes, empty_rows(1, heads.heads * heads.head_dim, 128, META))
    code = check(attends, 168)
    assert code.instructions["HMMA"] >= 16 and code.instructions["LDGSTS"] >= 8
    check(combines, 168)


@pytest.mark.parametrize("models", [1, 2])
def test_scores_keep_to_registers(models: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(head._fold)
    monkeypatch.setattr(head, "_fold", launches)
    bf16 = torch.bfloat16
    spoken = HiddenStates(empty(16376, 896, dtype=bf16), empty(151936, 896, dtype=bf16))
    score_hidden_states([spoken] * models, empty(16376, dtype=torch.int64))
    code = check(launches, 255)
    assert code.instructions["HGMMA"] >= 4 * models and code.instructions["LDGSTS"] >= 24


def test_stretches_fill_a_device_with_about_a_program_each() -> None:
    for kv_heads, rows, want in ((2, 1, 64), (4, 1, 32), (8, 1, 16), (8, 4, 4), (8, 16, 1), (1, 1, 64)):
        assert stretches_for(HeadShape(8, kv_heads, 128, None), rows, 132) == want
