"""The training run of the embedded model: its data order, its schedule, its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from evals.embedded_model import train  # noqa: E402


def test_every_step_reads_its_own_windows_and_a_pass_covers_the_text() -> None:
    stream = np.arange(100 * train.TOKENS_PER_STEP)
    batches = [train.batch(stream, step, window=512).numpy() for step in range(100)]
    assert all(b.shape == (4, 512) and (np.diff(b) == 1).all() for b in batches)
    assert np.array_equal(train.batch(stream, 57, window=512).numpy(), batches[57])
    assert len(np.unique(np.concatenate(batches))) > 0.7 * len(stream)
    assert train.batch(stream, 99, window=2048).shape == (1, 2048)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    rates = np.array([train.schedule(share) for share in np.linspace(0, 1, 201)])
    peak = int(rates.argmax())
    assert 0 < rates[0] < rates[peak] <= 1
    assert (np.diff(rates[: peak + 1]) > 0).all()
    assert (np.diff(rates[peak:]) < 0).all()
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_a_run_resumed_from_its_checkpoint_takes_the_same_step(tmp_path: Path) -> None:
    def step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        model(torch.ones(3, 4)).square().sum().backward()
        train.update(model, optimizers, factor=0.5)

    torch.manual_seed(0)
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    optimizers, others = train.make_optimizers(model), train.make_optimizers(other)
    step(model, optimizers)
    train.save_checkpoint(tmp_path / "c.pt", model, optimizers, train.Progress(7, 1.5, ["a line"]))
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    assert train.load_checkpoint(tmp_path / "c.pt", other, others) == train.Progress(7, 1.5, ["a line"])
    before = model.weight.clone()
    step(model, optimizers)
    step(other, others)
    assert torch.equal(model.weight, other.weight)
    assert not torch.equal(model.weight, before)


def test_the_unigram_level_of_even_frequencies_is_the_vocabulary() -> None:
    windows = torch.arange(8).view(2, 4)
    assert train.unigram_perplexity(np.arange(4096), windows) == pytest.approx(4096)
