"""What fast reading computes between products, against torch's own passes and float64."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from qconvert.core.activations import INT8_GROUPS, InputQuantization
from qconvert.quant.simd import processor
from qconvert.runtime import layer as layer_module
from qconvert.runtime import norm as norm_module
from qconvert.runtime.attention import attend, attend_widened
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cpu.row_passes import (
    normalise_rows,
    passes_rows,
    rotate_rows,
    rotates_whole,
    swiglu_rows,
)
from qconvert.runtime.load import load_decoder
from qconvert.runtime.rope import rotate
from tests.support.decoder_models import StateDict, tiny, tokens
from tests.support.instruction_sets import lesser
from tests.support.same_bits import digests_by_threads

BF16 = torch.bfloat16


SETS = lesser("avx2", "vnni")
"""AVX-512 in whole registers, and bfloat16 numbers by instructions of their own or not."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two halves that lie side by side, as those of one product do."""
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def one_rounding(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether bfloat16 numbers are the nearest to float64 ones, but for the few that are as near to two."""
    near = torch.allclose(got.double(), want, rtol=2.0**-8 * 1.001, atol=1e-5)
    return got.dtype == BF16 and near and float((got != want.to(BF16)).double().mean()) < 0.002


def test_swiglu_is_rounded_once() -> None:
    gate, up = parts(numbers(2, 20, 96))
    gate[0, 0, :4] = torch.tensor([-1000.0, 1000.0, -80.0, 0.0])
    assert passes_rows(gate, 48) and one_rounding(swiglu_rows(gate, up), F.silu(gate.double()) * up.double())


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
def test_norms_are_rounded_once(weight_dtype: torch.dtype) -> None:
    x, _ = parts(numbers(3, 20, 128))
    weight = numbers(64, seed=1).to(weight_dtype) / 3
    want = F.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    assert one_rounding(normalise_rows(x, weight, 1e-6), want)


def angles(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    turn = torch.outer(torch.arange(5.0, 5 + length), torch.linspace(1, 0.01, width // 2))
    cos, sin = turn.cos(), turn.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_rotations_are_those_of_torch(width: int) -> None:
    x = numbers(2, 21, 5 * width)[..., : 3 * width].unflatten(-1, (3, width))
    cos, sin = angles(21, width)
    assert rotates_whole(x, cos)
    got = rotate_rows(x, cos, sin)
    assert one_rounding(got, rotate(x.double(), cos.double(), sin.double()))
    assert one_rounding(got, rotate(x, cos, sin).double())


def test_parts_of_heads_and_odd_widths_are_left_to_torch() -> None:
    x = numbers(2, 20, 3 * 48).unflatten(-1, (3, 48))
    assert not rotates_whole(x, angles(20, 48)[0])
    assert not rotates_whole(numbers(2, 20, 3, 64), angles(20, 32)[0])
    assert not passes_rows(numbers(40, 40), 40) and not passes_rows(numbers(16, 48), 48)
    assert not passes_rows(numbers(40, 48).float(), 48)
    assert not passes_rows(numbers(40, 48).requires_grad_(), 48)


def test_what_is_no_number_stays_none() -> None:
    gate, up = parts(numbers(20, 96))
    gate[3, 7] = torch.nan
    assert swiglu_rows(gate, up).isnan().nonzero().tolist() == [[3, 7]]
    assert normalise_rows(gate, torch.ones(48), 1e-6).isnan().any(1).nonzero().tolist() == [[3]]


def digest() -> str:
    """All passes over some rows, hashed."""
    gate, up = parts(numbers(2, 20, 128))
    made = (
        swiglu_rows(gate, up),
        normalise_rows(gate, torch.linspace(-1, 3, 64), 1e-6),
        rotate_rows(gate.unflatten(-1, (1, 64)), *angles(20, 64)),
    )
    return hashlib.sha256(b"".join(x.view(torch.int16).numpy().tobytes() for x in made)).hexdigest()


def test_threads_change_no_bit(use_threads: None) -> None:
    assert len(digests_by_threads(digest)) == 1


@pytest.mark.parametrize("choice", SETS)
def test_instruction_sets_change_no_bit(choice: str, digest_with: Callable[[str, str], str]) -> None:
    assert digest_with(choice, "row_passes") == digest()


@pytest.mark.parametrize("widens", [True, False])
def test_attention_in_float32_is_rounded_once(monkeypatch: pytest.MonkeyPatch, widens: bool) -> None:
    q, k, v = numbers(2, 6, 70, 16), numbers(2, 2, 70, 16, seed=1), numbers(2, 2, 70, 16, seed=2)
    monkeypatch.setattr(processor, "widens_bf16", lambda: widens)
    got, narrow = attend_widened(q, k, v, None), attend(q, k, v, None)
    want = attend(q.double(), k.double(), v.double(), None)
    assert got.dtype == BF16 and torch.equal(got, narrow) is not widens
    if widens:
        assert torch.allclose(got.double(), want, rtol=2.0**-8, atol=1e-5)
    assert torch.equal(attend_widened(q[:, :, :9], k, v, None), attend(q[:, :, :9], k, v, None))


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "max_position_embeddings": 128}


@pytest.mark.parametrize("inputs", [INT8_GROUPS, None])
def test_reading_takes_these_passes_and_loses_no_more_than_with_torch(
    inputs: InputQuantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3", **SIZES, head_dim=32)
    config, weights = DecoderConfig.from_hf(model.config.to_dict()), StateDict(model.state_dict())
    used: set[str] = set()

    def spy(module: object, name: str) -> None:
        pass_: Callable[..., torch.Tensor] = getattr(module, name)

        def noted(*args: object) -> torch.Tensor:
            used.add(name)
            return pass_(*args)

        monkeypatch.setattr(module, name, noted)

    spy(norm_module, "normalise_rows")
    for name in ("swiglu_rows", "rotate_rows", "attend_widened"):
        spy(layer_module, name)
    decoder = load_decoder(config, weights, dtype=BF16, inputs=lambda role, i: inputs)
    read = decoder.hidden(tokens(1, 100)).double()
    assert used == {"normalise_rows", "swiglu_rows", "rotate_rows", "attend_widened"}
    monkeypatch.setattr(norm_module, "passes_rows", lambda *_: False)
    monkeypatch.setattr(layer_module, "passes_rows", lambda *_: False)
    plain = decoder.hidden(tokens(1, 100)).double()
    exact = load_decoder(config, weights, inputs=lambda role, i: inputs).hidden(tokens(1, 100)).double()
    assert (read - exact).norm() < 1.1 * (plain - exact).norm() < 0.1 * exact.norm()
