"""Families of more than plain attention: from GGUF files, quantized, in every way that layers are passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.collect import collect_statistics
from qconvert.checkpoint.open import open_checkpoint
from qconvert.models.gguf.families import MODELS, NoGraph
from qconvert.models.statistics_keys import inputs_of
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.delta_net import CHUNK, delta_rule
from qconvert.runtime.layer_passes import HeldStates, pass_layers
from tests.runtime.test_decoder_families import (
    CASES,
    GEMMA4,
    HEADS,
    HYBRID,
    HYBRID_EXPERTS,
    LLAMA4,
    SHARED_KEYS,
    TOLERANCE,
    largest_difference,
    one_by_one,
    opened,
    saved,
)
from tests.support.commands import qconvert
from tests.support.decoder_models import tiny, tokens
from tests.support.gguf_families import add_tokenizer

# Divided by 32 where a GGUF file is to hold quantized rows; one size of heads in llama.cpp's delta nets.
SIZES = {"vocab_size": 320, "vocab_size_per_layer_input": 320, "hidden_size": 64, "intermediate_size": 96}
ONE_SIZE = {"linear_value_head_dim": 8}
GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", HEADS | {"sliding_window": 5, "query_pre_attn_scalar": 16}),
    "glm4": ("glm4", HEADS | {"pad_token_id": 0}),
    "phi3": ("phi3", HEADS | {"pad_token_id": 0, "sliding_window": 5}),
    "qwen3.5": ("qwen3_5_text", HYBRID | ONE_SIZE),
    "qwen3.5-moe": ("qwen3_5_moe_text", HYBRID_EXPERTS | ONE_SIZE),
    "qwen3-next": ("qwen3_next", HYBRID_EXPERTS | ONE_SIZE),
    "llama-4": (
        "llama4_text",
        LLAMA4 | {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    ),
    "gemma4-small": ("gemma4_text", GEMMA4 | SHARED_KEYS),
    "gemma4": CASES["gemma4"],
    "gemma4-moe": CASES["gemma4-moe"],
}
NEW = ("llama-4-scout", "qwen3-next", "qwen3.5", "gemma4-small", "gemma4-moe")


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_file_computes_what_its_model_does(case: str, tmp_path: Path) -> None:
    model_type, changes = GGUF[case]
    if isinstance(MODELS.get(model_type, NoGraph("none here")), NoGraph):
        pytest.skip(f"{model_type} is not written as GGUF")
    tied = {"tie_word_embeddings": True} if model_type.startswith("gemma") else {}
    model = tiny(model_type, **({"deviation": 0.05} | changes | SIZES | tied))
    ids = tokens(2, 24)
    with torch.no_grad():
        want = model(ids).logits
    add_tokenizer(saved(model, tmp_path))
    ran = qconvert("to-gguf", tmp_path, "-o", tmp_path / "m.gguf", "--type", "f32", "-q")
    assert ran.code == 0, ran.err
    decoder = opened(tmp_path / "m.gguf")
    assert largest_difference(decoder.logits(decoder.hidden(ids)), want) < TOLERANCE
    assert largest_difference(one_by_one(decoder, ids), want) < TOLERANCE


@pytest.mark.parametrize("case", NEW)
def test_a_quantized_model_computes_what_its_dequantized_copy_does(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    model, ids = tiny(model_type, **({"deviation": 0.1} | changes)), tokens(2, 24)
    saved(model, tmp_path / "m")
    flags = ("--bits", 8, "--group-size", "channel", "-q")
    for step in (
        ("quantize", tmp_path / "m", "-o", tmp_path / "q", *flags),
        ("dequantize", tmp_path / "q", "-o", tmp_path / "d", "--dtype", "f32", "-q"),
    ):
        ran = qconvert(*step)
        assert ran.code == 0, ran.err
    quantized, plain = opened(tmp_path / "q"), opened(tmp_path / "d")
    got, want = (each.logits(each.hidden(ids)) for each in (quantized, plain))
    assert largest_difference(got, want) < 5 * TOLERANCE
    with torch.no_grad():
        assert largest_difference(got, model(ids).logits) > 1e-4  # it is quantized


@pytest.mark.parametrize("case", NEW)
def test_layers_in_turn_give_the_same_and_show_every_input(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    saved(tiny(model_type, **({"deviation": 0.1} | changes)), tmp_path / "m")
    decoder = opened(tmp_path / "m")
    batches = [tokens(1, 12, seed=1), tokens(2, 12, seed=2)]
    states = HeldStates.empty(36, decoder.config.stream, decoder.dtype)
    pass_layers(decoder, batches, states)
    got = decoder.normalised(states.x_ND)
    want = torch.cat([decoder.hidden(batch).flatten(0, 1) for batch in batches])
    assert torch.equal(got, want)
    found = collect_statistics(decoder, torch.cat(batches).numpy(), scratch=tmp_path).inputs
    seen = {(role, key.layer) for key in found for role in key.roles}
    of_model = inputs_of(open_checkpoint(tmp_path / "m").architecture).values()
    assert seen == {(role, key.layer) for key in of_model for role in key.roles}
    alone = [moments for key, moments in found.items() if key.expert is None]
    assert {moments.count for moments in alone} == {36}


def test_the_delta_rule_by_chunks_is_that_of_one_token_after_the_other() -> None:
    generator = torch.Generator().manual_seed(3)
    length, heads, width, value = CHUNK + 7, 3, 5, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, heads, length, *shape, generator=generator)

    q, v = draw(width), draw(value)
    k = torch.nn.functional.normalize(draw(width), dim=-1)
    decay, write = -draw().abs(), draw().sigmoid()
    state = torch.randn(2, heads, width, value, generator=generator)
    got, last = delta_rule(q, k, v, decay, write, state)
    for t in range(length):
        state = state * decay[:, :, t, None, None].exp()
        missing = write[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0])
        state = state + k[:, :, t, :, None] * missing[:, :, None]
        torch.testing.assert_close(got[:, :, t], (q[:, :, t, None] @ state)[:, :, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=1e-5, rtol=1e-4)


def test_layers_that_share_keys_keep_none_of_their_own() -> None:
    config = DecoderConfig.from_hf(tiny("gemma4_text", **(GEMMA4 | SHARED_KEYS)).config.to_dict())
    assert config.sources == (0, 1, 2, 3, 2, 3)
    assert config.cached == ((2, 2, 8), (2, 2, 16), (2, 2, 8), (2, 2, 16), (0, 0, 0), (0, 0, 0))
    # Hidden states, inputs of six layers, and keys and values of two.
    assert config.stream == 48 + 6 * 12 + 2 * 2 * 8 + 2 * 2 * 16
    assert np.prod(config.cached, axis=1).sum() == 2 * (2 * 2 * 8 + 2 * 2 * 16)
