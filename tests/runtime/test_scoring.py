"""One pass over blocks of the vocabulary against log_softmax over all of it."""

from __future__ import annotations

import pytest
import torch

from qconvert.runtime.scoring import score

GENERATOR = torch.Generator().manual_seed(3)
TOKENS, VOCAB = 50, 101
REFERENCE = 6 * torch.randn(TOKENS, VOCAB, generator=GENERATOR)
MODELS = [REFERENCE + spread * torch.randn(TOKENS, VOCAB, generator=GENERATOR) for spread in (0.05, 1.0)]
TARGETS = torch.randint(0, VOCAB, (TOKENS,), generator=GENERATOR)
TARGETS[:3] = torch.tensor([0, VOCAB - 1, 7])


def blocks_of(logits_NV: torch.Tensor) -> object:
    return lambda start, stop: logits_NV[:, start:stop].clone()


def run(*models: torch.Tensor, block: int | None = None) -> list:
    return score([blocks_of(m) for m in models], TARGETS, VOCAB, block)


@pytest.mark.parametrize("block", [1, 7, 100, 101, 5000, None])
def test_matches_log_softmax_in_float64(block: int | None) -> None:
    log_p = REFERENCE.double().log_softmax(-1)
    results = run(REFERENCE, *MODELS, block=block)
    assert results[0].kl_N is None
    for result, logits in zip(results, [REFERENCE, *MODELS], strict=True):
        log_q = logits.double().log_softmax(-1)
        assert torch.allclose(result.nll_N, -log_q.gather(1, TARGETS[:, None])[:, 0], atol=2e-6)
        assert torch.equal(result.top_N, logits.argmax(-1))
        if result.kl_N is not None:
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            assert torch.allclose(result.kl_N, kl, rtol=2e-4, atol=1e-6)


def test_a_model_is_at_no_distance_from_itself() -> None:
    assert run(REFERENCE, REFERENCE.clone(), block=9)[1].kl_N.abs().max() == 0


def test_huge_logits_do_not_overflow() -> None:
    _, shifted = run(REFERENCE + 1e4, MODELS[1] - 1e4, block=13)
    _, plain = run(REFERENCE, MODELS[1], block=13)
    assert torch.allclose(shifted.kl_N, plain.kl_N, atol=2e-2)  # 1e4 costs 10 of float32's 24 bits
    assert shifted.nll_N.isfinite().all()


def test_a_later_block_wins_only_if_it_is_larger() -> None:
    tied = torch.zeros(TOKENS, VOCAB)
    assert run(tied, block=10)[0].top_N.max() < 10
