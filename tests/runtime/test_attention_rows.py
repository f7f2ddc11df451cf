"""Compiled attention of many bfloat16 queries: as near to float64 as torch's, for any number of threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.quant.simd import processor
from qconvert.runtime.attention import attend
from qconvert.runtime.cpu.attention_rows import attend_rows, attends_rows
from tests.runtime.test_tile_products import bf16_only
from tests.support.same_bits import digests_by_threads

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = [
    (1, 256, 256, 14, 2, 64, 64),
    (2, 100, 170, 4, 4, 128, 128),
    (1, 64, 64, 2, 1, 64, 64),
    (1, 71, 300, 2, 1, 192, 128),
]
"""Sequences, tokens, positions seen, heads, key-value heads, width of keys and of values."""


def parts(shape: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys and values, as the decoder gives them."""
    batch, tokens, seen, heads, kv_heads, width, out_width = shape
    sizes = ((tokens, heads, width), (seen, kv_heads, width), (seen, kv_heads, out_width))
    return [torch.randn(batch, *size, generator=GENERATOR).bfloat16().transpose(1, 2) for size in sizes]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The definition, in float64."""
    tokens, seen, shared = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(shared, 1) for x in (k, v))
    hidden = torch.arange(seen - tokens, seen)[:, None] < torch.arange(seen)
    return (q.double() @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@bf16_only
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_as_exact_as_torch_has_it(shape: tuple[int, ...]) -> None:
    q, k, v = parts(shape)
    seen_TS = torch.arange(shape[2] - shape[1], shape[2])[:, None] >= torch.arange(shape[2])
    for scale in (None, 0.3):
        want = attended(q, k, v, scale or shape[5] ** -0.5)
        got = attend_rows(q, k, v, scale)
        torchs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, scale=scale, enable_gqa=True)
        assert got.shape == torchs.shape and got.dtype == torch.bfloat16
        # Of values that are narrower than keys, torch leaves the weights in float32.
        most = 1.02 * error(torchs, want) if shape[5] == shape[6] else 2**-8.5
        assert error(got, want) < most


@bf16_only
def test_threads_change_no_bit(use_threads: None) -> None:
    q, k, v = parts(SHAPES[1])
    assert len(digests_by_threads(lambda: attend_rows(q, k, v, None).float().numpy().tobytes().hex())) == 1


@bf16_only
def test_later_positions_change_nothing() -> None:
    q, k, v = parts(SHAPES[0])
    whole = attend_rows(q, k, v, None)
    assert torch.equal(attend_rows(q[:, :, :150], k[:, :, :150], v[:, :, :150], None), whole[:, :, :150])


@bf16_only
def test_broken_queries_are_not_hidden() -> None:
    q, k, v = parts(SHAPES[2])
    q[0, 1, 7, 3] = float("nan")
    made = attend_rows(q, k, v, None)
    assert made[0, 1, 7].isnan().all() and made[0, 1, [6, 8]].isfinite().all() and made[0, 0].isfinite().all()


def test_the_processor_and_the_inputs_decide_who_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = parts(SHAPES[0])
    for pairs, widens, tiles in (
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (False,) * 3,
    ):
        monkeypatch.setattr(processor, "multiplies_bf16", lambda pairs=pairs: pairs)
        monkeypatch.setattr(processor, "widens_bf16", lambda widens=widens: widens)
        monkeypatch.setattr(processor, "multiplies_tiles", lambda tiles=tiles: tiles)
        assert attends_rows(q, k, v) == (pairs and not widens and not tiles)
    monkeypatch.undo()
    assert not attends_rows(q.float(), k.float(), v.float())
    assert not attends_rows(q[:, :, :63], k, v)
    assert not attends_rows(q[..., :32], k[..., :32], v)
    assert not attends_rows(q.detach().requires_grad_(), k, v)


@bf16_only
def test_windows_that_hide_something_caps_and_sinks_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = parts(SHAPES[2])
    calls: list[int] = []

    def spy(*_: object) -> Tensor:
        calls.append(1)
        return q

    monkeypatch.setattr("qconvert.runtime.attention.attends_rows", lambda *_: True)
    monkeypatch.setattr("qconvert.runtime.attention.attend_rows", spy)
    attend(q, k, v, None)
    attend(q, k, v, 64)
    assert len(calls) == 2
    attend(q, k, v, 63)
    attend(q, k, v, None, cap=30.0)
    attend(q, k, v, None, sinks_H=torch.zeros(2))
    assert len(calls) == 2
