"""The compiled pass over the vocabulary, against the torch one and float64, on every instruction set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from qconvert.quant.simd.lanes import LANES, kernel
from qconvert.runtime.cpu.exponential import exp
from qconvert.runtime.cpu.simd import address, floats, store_f32
from qconvert.runtime.cpu.softmax_rows import CompiledSoftmax
from qconvert.runtime.running_softmax import RunningSoftmax
from tests.support.instruction_sets import lesser
from tests.support.same_bits import digests_by_threads

TOKENS, WORDS = 7, 2500
"""Words that fill neither registers nor the parts of a row that are taken in together."""


SETS = lesser("avx2")
"""Passes over floats: in registers of 256 bits or 512."""


def logits(seed: int) -> torch.Tensor:
    return 5 * torch.randn(TOKENS, WORDS, generator=torch.Generator().manual_seed(seed))


def targets() -> torch.Tensor:
    return torch.arange(TOKENS) * 400


def folded(
    softmax: type[RunningSoftmax], x_NV: torch.Tensor, a_NV: torch.Tensor, block: int
) -> tuple[RunningSoftmax, RunningSoftmax]:
    """A reference and a model beside it, after all blocks."""
    reference, model = softmax.start(targets()), softmax.start(targets())
    for start in range(0, WORDS, block):
        a_NW, x_NW = a_NV[:, start : start + block], x_NV[:, start : start + block]
        reference.fold(a_NW, start)
        model.fold_beside(x_NW, start, a_NW, reference)
    return reference, model


@pytest.mark.parametrize("block", [1, 5, 1024, 1030, WORDS])
def test_both_passes_give_what_float64_gives(block: int) -> None:
    a_NV, x_NV = logits(1), logits(2)
    log_p, log_q = (each.double().log_softmax(-1) for each in (a_NV, x_NV))
    kl_N = (log_p.exp() * (log_p - log_q)).sum(-1)
    for softmax in (RunningSoftmax, CompiledSoftmax):
        reference, model = folded(softmax, x_NV, a_NV, block)
        assert torch.allclose(model.logsumexp, x_NV.double().logsumexp(-1), atol=1e-6, rtol=0)
        assert torch.equal(model.top_N, x_NV.argmax(-1))
        assert torch.equal(model.target_N, x_NV.gather(1, targets()[:, None])[:, 0])
        assert torch.allclose(model.kl(reference), kl_N, atol=2e-6, rtol=1e-6)


def test_what_is_no_number_is_not_hidden() -> None:
    for place in (0, 1000, WORDS - 1):
        a_NV = logits(1)
        a_NV[2, place] = torch.nan
        reference, model = folded(CompiledSoftmax, a_NV, a_NV, 1030)
        assert reference.logsumexp.isnan().tolist() == [False] * 2 + [True] + [False] * (TOKENS - 3)
        assert model.kl(reference).isnan().tolist() == reference.logsumexp.isnan().tolist()
        assert int(reference.top_N.max()) < WORDS


def test_rows_need_not_be_contiguous() -> None:
    x_NV = logits(1)
    plain, _ = folded(CompiledSoftmax, x_NV, x_NV, 1030)
    turned, _ = folded(CompiledSoftmax, x_NV.T.contiguous().T, x_NV, 1030)
    assert torch.equal(plain.logsumexp, turned.logsumexp)


def digest() -> str:
    """All that a compiled pass keeps, hashed."""
    reference, model = folded(CompiledSoftmax, logits(2), logits(1), 1030)
    kept = reference.logsumexp, model.logsumexp, model.kl(reference), model.top_N, model.target_N
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in kept)).hexdigest()


def test_threads_change_no_bit(use_threads: None) -> None:
    assert len(digests_by_threads(digest)) == 1


@pytest.mark.parametrize("choice", SETS)
def test_instruction_sets_change_no_bit(choice: str, digest_with: Callable[[str, str], str]) -> None:
    assert digest_with(choice, "running_softmax") == digest()


@kernel
def _exp_of_all(x, y):  # type: ignore[no-untyped-def]
    for i in range(0, x.size, LANES):
        store_f32(address(y) + 4 * i, exp(floats(address(x) + 4 * i)))


def exp_of(x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    _exp_of_all(x, y)
    return y


@pytest.mark.parametrize("end", [-87, 88])
def test_exponentials_are_within_1_01_units_in_the_last_place(end: int) -> None:
    bits = np.arange(np.float32(np.copysign(1e-9, end)).view(np.uint32), np.float32(end).view(np.uint32), 311)
    x = bits[: bits.size // LANES * LANES].astype(np.uint32).view(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(exp_of(x) - want) / np.spacing(want.astype(np.float32))).max() < 1.01


def test_exponentials_end_where_they_say() -> None:
    x = np.zeros(LANES, np.float32)
    x[:5] = np.nan, np.inf, -np.inf, 1000, -1000
    least, most = np.exp(np.float32(-87)), np.exp(np.float32(88))
    assert np.allclose(exp_of(x)[:5], [np.nan, most, least, most, least], rtol=1e-6, atol=0, equal_nan=True)
    assert (exp_of(x)[5:] == 1).all()
