"""Gradients of a streamed backward pass are those of transformers' whole model."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.backward import backward_pass, measure_gradients
from qconvert.calibrate.gradients import GradientSums
from qconvert.calibrate.sampled_gradient import sample_gradient
from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.statistics import StatisticsKey
from qconvert.errors import CheckFailed, QConvertError
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey
from qconvert.runtime.reverse import TracedLinear, differentiable
from tests.runtime.test_decoder_families import CASES, deepseek, saved
from tests.runtime.test_decoder_observers import MODULES
from tests.support.decoder_models import decoder_of, tiny

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = CASES | {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen2-moe": ("qwen2_moe", {"shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 5}),
}


def distinct_tokens(windows: int = 2, length: int = 24) -> torch.Tensor:
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3))
    return order[: windows * length].view(windows, length)


def opened(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    config = DecoderConfig.of(checkpoint.architecture)
    return load_decoder(config, CheckpointWeights(checkpoint), on_demand=True)


def model_of(case: str, folder: Path) -> Any:
    """A tiny model of transformers, saved in a folder."""
    if case == "deepseek":
        return deepseek(folder)
    model_type, changes = FAMILIES[case]
    model = tiny(model_type, **({"deviation": 0.1} | changes))
    saved(model, folder)
    return model


def log_probability(model: torch.nn.Module, ids: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.double().log_softmax(-1).gather(-1, words[..., None]).sum()


def weight_gradients(
    decoder: Decoder, ids: torch.Tensor, scratch: Path
) -> tuple[dict[StatisticsKey, np.ndarray], torch.Tensor]:
    """g^T x of every linear, summed over the text in batches of one window, and the sampled words."""
    found: dict[StatisticsKey, np.ndarray] = {}
    inputs: dict[InputKey, torch.Tensor] = {}

    def keep_input(key: InputKey, x_NI: torch.Tensor) -> None:
        inputs[key] = x_NI

    def add(key: StatisticsKey, g_NO: torch.Tensor) -> None:
        same = (InputKey(k.roles, key.layer, key.expert) for k in inputs if key.role in k.roles)
        x_NI = next(inputs[k] for k in same if k in inputs)
        found[key] = found.get(key, 0) + (g_NO.T @ x_NI).numpy()

    with backward_pass(decoder, ids, scratch=scratch, batch_tokens=1) as run:
        run.forward()
        head = run.top()
        with decoder.observing(keep_input):
            for i in reversed(range(len(decoder.layers))):
                run.follow(i, add)
    return found, head.words_WT


def linears_of(part: object) -> Iterator[TracedLinear]:
    """All linears of a layer through which gradients are followed."""
    if isinstance(part, TracedLinear):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from linears_of(each)
    elif dataclasses.is_dataclass(part):
        for each in dataclasses.fields(part):
            yield from linears_of(getattr(part, each.name))


def wanted_gradients(model: Any, folder: Path, like: Path) -> dict[StatisticsKey, np.ndarray]:
    """Autograd's gradients of all weights, stored in their place so that they are read by role."""
    for parameter in model.parameters():
        found = parameter.grad
        parameter.data = torch.zeros_like(parameter) if found is None else found.clone()
    saved(model, folder)
    (folder / "config.json").write_text((like / "config.json").read_text())
    decoder, wanted = opened(folder), {}

    def keep(key: StatisticsKey, w_IO: torch.Tensor) -> None:
        wanted[key] = w_IO.T.numpy()

    for layer in decoder.layers:
        for linear in linears_of(differentiable(layer, keep)):
            linear.show(linear.weight.rows(slice(None)).T)
    return wanted


@pytest.mark.parametrize("case", [*FAMILIES, "deepseek"])
def test_gradients_of_all_linears_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    model, ids = model_of(case, tmp_path / "model"), distinct_tokens()
    decoder = opened(tmp_path / "model")
    found, words = weight_gradients(decoder, ids, tmp_path)
    log_probability(model, ids, words).backward()
    wanted = wanted_gradients(model, tmp_path / "gradients", tmp_path / "model")
    idle = [key for key in wanted if key not in found]  # experts that no token was routed to
    assert all(key.expert is not None and not wanted[key].any() for key in idle)
    assert found.keys() <= wanted.keys() and len(found) >= 6 * decoder.config.layers
    for key, gradient_OI in found.items():
        largest = np.abs(wanted[key]).max()
        assert largest > 0
        np.testing.assert_allclose(gradient_OI, wanted[key], atol=1e-4 * largest)


def hooked_squares(model: Any, ids: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mean square of the gradient to every output of transformers' linears, by module."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, into: Any, out: tuple[torch.Tensor]) -> None:
            found[name] = out[0].flatten(0, -2).double().square().sum(0) / ids.numel()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_full_backward_hook(keep(name))
    log_probability(model, ids, words).backward()
    return found


def sampled_words(decoder: Decoder, ids: torch.Tensor, scratch: Path) -> torch.Tensor:
    with backward_pass(decoder, ids, scratch=scratch) as run:
        run.forward()
        return run.top().words_WT


def test_squares_are_means_over_all_tokens_an_experts_too(tmp_path: Path) -> None:
    model, ids = deepseek(tmp_path / "model"), distinct_tokens()
    decoder = opened(tmp_path / "model")
    found = measure_gradients(decoder, ids, scratch=tmp_path)
    want = hooked_squares(model, ids, sampled_words(decoder, ids, tmp_path))
    experts = 0
    for key, gradients in found.linears.items():
        module = f"model.layers.{key.layer}." + MODULE_OF_ROLE[key.role].format(expert=key.expert)
        np.testing.assert_allclose(gradients.squares_O, want[module].float(), rtol=2e-4, atol=1e-9)
        experts += gradients.rows if key.role == "mlp.experts.down" else 0
    assert experts == 2 * 3 * ids.numel() and found.tokens == ids.numel()  # two layers, three of six each


MODULE_OF_ROLE = {role: module for roles, module in MODULES.items() for role in roles} | {
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.experts.up": "mlp.experts.{expert}.up_proj",
}


@pytest.mark.parametrize(("case", "factor"), [("llama", 1.0), ("gemma2-low-caps", 48**0.5)])
def test_embedding_and_head_are_those_of_the_whole_model(case: str, factor: float, tmp_path: Path) -> None:
    model, ids = model_of(case, tmp_path / "model"), distinct_tokens()
    decoder = opened(tmp_path / "model")
    assert decoder.embed_scale == factor
    found = measure_gradients(decoder, ids, scratch=tmp_path).tables
    log_probability(model, ids, sampled_words(decoder, ids, tmp_path)).backward()
    # Every word is there once, so that its row's gradient is that of one token.
    want_D = model.model.embed_tokens.weight.grad.square().sum(0) / ids.numel()
    np.testing.assert_allclose(found.embedding_D, want_D, rtol=1e-3)
    assert found.counts_V.tolist() == [int(word in ids) for word in range(160)]
    with torch.no_grad():
        h_BTD = model.model(ids).last_hidden_state
        raw_NV = (h_BTD @ model.lm_head.weight.T).flatten(0, 1).double().requires_grad_()
    np.testing.assert_allclose(found.head_inputs_D, h_BTD.flatten(0, 1).square().mean(0), rtol=1e-4)
    # The expected square of d log p(y) / dz over y of p, word by word.
    cap = model.config.final_logit_softcapping if case.startswith("gemma") else None
    with torch.enable_grad():
        logits_NV = raw_NV if cap is None else cap * torch.tanh(raw_NV / cap)
        logs_NV = logits_NV.log_softmax(-1)
    expected_V = torch.zeros(160, dtype=torch.float64)
    for word in range(160):
        (g_NV,) = torch.autograd.grad(logs_NV[:, word].sum(), raw_NV, retain_graph=True)
        expected_V += (logs_NV[:, word, None].detach().exp() * g_NV.square()).mean(0)
    np.testing.assert_allclose(found.head_V, expected_V, rtol=1e-3)


def test_blocks_are_products_of_neighbouring_outputs() -> None:
    g_NO = torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
    key, sums = StatisticsKey("mlp.up", 0), GradientSums(4)
    sums(key, g_NO[:12])
    sums(key, g_NO[12:])
    found = dict(sums.means(40))[key]
    full_OO = (g_NO.T @ g_NO / 40).numpy()
    assert found.blocks_BRR is not None and found.blocks_BRR.shape == (3, 4, 4)
    for block in range(3):
        rows = slice(4 * block, min(4 * block + 4, 10))
        size = rows.stop - rows.start
        np.testing.assert_allclose(found.blocks_BRR[block, :size, :size], full_OO[rows, rows], rtol=1e-5)
        assert not found.blocks_BRR[block, size:].any() and not found.blocks_BRR[block, :, size:].any()
    np.testing.assert_allclose(found.squares_O, np.diag(full_OO), rtol=1e-5)


def squares(decoder: Decoder, scratch: Path, **options: Any) -> np.ndarray:
    found = measure_gradients(decoder, distinct_tokens(), scratch=scratch, **options)
    return np.concatenate([each.squares_O for each in found.linears.values()])


def test_a_seed_decides_the_result(tmp_path: Path) -> None:
    decoder = decoder_of(tiny("qwen3", head_dim=16))
    first = squares(decoder, tmp_path, seed=1)
    assert squares(decoder, tmp_path, seed=1).tobytes() == first.tobytes()
    assert not np.allclose(squares(decoder, tmp_path, seed=2), first)
    rounded = squares(decoder, tmp_path, seed=1, stored_as=torch.bfloat16)
    assert (rounded != first).all() and abs(np.log(rounded / first).mean()) < 0.1
    assert not list(tmp_path.iterdir())  # the activations are gone


def test_words_are_drawn_from_the_models_own_distribution() -> None:
    decoder = decoder_of(tiny("llama", deviation=0.1))
    h_1D = torch.randn(1, 48, generator=torch.Generator().manual_seed(0))
    p_V = decoder.logits(h_1D)[0].double().softmax(-1)
    uniform_N = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    found = sample_gradient(decoder.outputs(h_1D.expand(20_000, -1)), uniform_N)
    np.testing.assert_allclose(found.words_N.bincount(minlength=160) / 20_000, p_V, atol=1e-4)
    score_D = found.g_ND.double().mean(0)  # the expected gradient of log p is zero
    assert float(score_D.abs().max()) < 1e-4 < float(found.g_ND.abs().max())


def test_hidden_states_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(CheckFailed, match="NaN or Inf"):
        measure_gradients(decoder_of(model), distinct_tokens(), scratch=tmp_path)


def test_a_disk_that_is_too_small_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(QConvertError, match="needs 36,864 bytes"):
        measure_gradients(decoder_of(tiny("llama")), distinct_tokens(), scratch=tmp_path)
