"""Observers see what the linears and norms of transformers' own model read."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.layer_step import SplitStep
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.observers import InputKey
from tests.runtime.test_decoder_families import deepseek, opened
from tests.support.decoder_models import StateDict, decoder_of, tiny, tokens

MODULES = {
    ("attn.q", "attn.k", "attn.v"): "self_attn.q_proj",
    ("attn.o",): "self_attn.o_proj",
    ("mlp.gate", "mlp.up"): "mlp.gate_proj",
    ("mlp.down",): "mlp.down_proj",
    ("attn.norm",): "input_layernorm",
    ("attn.q_norm",): "self_attn.q_norm",
    ("attn.k_norm",): "self_attn.k_norm",
    ("mlp.norm",): "post_attention_layernorm",
    ("mlp.router",): "mlp.gate",
    ("mlp.shared.gate", "mlp.shared.up"): "mlp.shared_experts.gate_proj",
    ("mlp.shared.down",): "mlp.shared_experts.down_proj",
    ("mlp.experts.gate", "mlp.experts.up"): "mlp.experts.{expert}.gate_proj",
    ("mlp.experts.down",): "mlp.experts.{expert}.down_proj",
}
OUTSIDE = {("lm_head",): "lm_head", ("final_norm",): "model.norm"}


def module_of(key: InputKey) -> str:
    if key.layer is None:
        return OUTSIDE[key.roles]
    return f"model.layers.{key.layer}." + MODULES[key.roles].format(expert=key.expert)


def hooked(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The input of every module that is called with one tensor, as rows."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if args and torch.is_tensor(args[0]):
                found[name] = args[0].reshape(-1, args[0].shape[-1]).clone()

        return hook

    handles = [m.register_forward_pre_hook(keep(name)) for name, m in model.named_modules()]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def observed(decoder: Decoder, ids: torch.Tensor, **options: Any) -> dict[InputKey, torch.Tensor]:
    found: dict[InputKey, torch.Tensor] = {}

    def keep(key: InputKey, x_NI: torch.Tensor) -> None:
        assert key not in found
        found[key] = x_NI.clone()

    with decoder.observing(keep, **options):
        decoder.hidden(ids)
    return found


def assert_same(found: dict[InputKey, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for key, x_NI in found.items():
        torch.testing.assert_close(x_NI, want[module_of(key)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_inputs_are_those_of_transformers_linears_and_norms(fused: bool) -> None:
    model, ids = tiny("qwen3", head_dim=16), tokens(2, 12)
    want = hooked(model, ids)
    decoder = decoder_of(model, fused=fused)
    linears = observed(decoder, ids)
    assert_same(linears, want)
    assert len(linears) == 4 * 3 + 1  # q, k and v read one input, as do gate and up; one for the head
    both = observed(decoder, ids, norms=True)
    assert_same(both, want)
    assert len(both) == len(linears) + 4 * 3 + 1


def test_an_expert_shows_the_rows_routed_to_it(tmp_path: Path) -> None:
    model, ids = deepseek(tmp_path / "deepseek"), tokens(2, 12)
    want = hooked(model, ids)
    found = observed(opened(tmp_path / "deepseek"), ids)
    assert_same(found, want)
    rows: dict[int | None, int] = defaultdict(int)
    for key, x_NI in found.items():
        if key.roles == ("mlp.experts.down",):
            assert key.expert is not None
            rows[key.layer] += len(x_NI)
    assert rows == {1: 3 * 24, 2: 3 * 24}  # three experts for each of 24 tokens


def test_observers_go_with_their_block_and_replace_the_compiled_step() -> None:
    model, ids = tiny("llama", head_dim=16), tokens(1, 8)
    config = DecoderConfig.from_hf(model.config.to_dict())
    decoder = load_decoder(config, StateDict(model.state_dict()), layout=Layout.AUTO)
    assert decoder.step is not None
    cache, seen = decoder.cache(1, 8), []
    decoder.prefill(ids[:, :6], cache)
    with pytest.raises(KeyboardInterrupt), decoder.observing(lambda key, x_NI: seen.append((key, len(x_NI)))):
        decoder.decode(ids[:, 6], cache)
        raise KeyboardInterrupt
    assert {rows for _, rows in seen} == {1} and len({key for key, _ in seen}) == len(seen) == 4 * 3 + 1
    decoder.decode(ids[:, 7], cache)
    assert len(seen) == 4 * 3 + 1 and not decoder.observers.present


def test_a_step_goes_on_from_what_its_last_linear_reads() -> None:
    decoder = decoder_of(tiny("qwen3"))
    rotations = decoder.rotations(0, 7)
    x_BTD = torch.randn(2, 7, decoder.config.hidden, generator=torch.Generator().manual_seed(0))
    for roles, step in zip((("attn.o",), ("mlp.down",)), decoder.layers[0].steps(rotations), strict=True):
        found: dict[InputKey, torch.Tensor] = {}
        with decoder.observing(lambda key, rows, found=found: found.setdefault(key, rows.clone())):
            want_BTD = step(x_BTD)
        assert isinstance(step, SplitStep)
        assert step.ends_with(roles) and not step.ends_with(("attn.v",))
        last_BTI = step.inner(x_BTD)
        assert last_BTI.shape == (2, 7, step.width)
        assert torch.equal(last_BTI.flatten(0, 1), found[InputKey(roles, 0)])
        assert torch.equal(step.outer(x_BTD, last_BTI), want_BTD)


def test_steps_of_experts_are_computed_in_one(tmp_path: Path) -> None:
    deepseek(tmp_path / "deepseek")
    *_, last = opened(tmp_path / "deepseek").layers
    assert [not isinstance(step, SplitStep) for step in last.steps([])] == [False, True]
