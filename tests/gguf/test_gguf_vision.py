"""`to-gguf` of models that see, and of newer mixtures: llama.cpp computes what transformers does on text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, add_tokenizer, logits_of
from tests.support.gguf_models import SIZES, llama_cpp_logits, log_probabilities

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_attention_heads": 2,
    "depth": 2,
    "num_hidden_layers": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 1],
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
LATENT = {
    "num_key_value_heads": SIZES["num_attention_heads"],
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# The type, llama.cpp's name for it, and the language model's config.
SEEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2-vl": ("qwen2_vl", "qwen2vl", {**MROPE}),
    "qwen2.5-vl": ("qwen2_5_vl", "qwen2vl", {**MROPE}),
    "qwen3-vl": ("qwen3_vl", "qwen3vl", {"head_dim": 16, **MROPE}),
    "qwen3-vl-moe": ("qwen3_vl_moe", "qwen3vlmoe", {"head_dim": 16, **MROPE, **EXPERTS}),
    "kimi-k2.5": ("kimi_k25", "deepseek2", {"model_type": "deepseek_v3", **LATENT}),
}
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "glm-4.7-flash": (
        "glm4_moe_lite",
        "deepseek2",
        {**LATENT, "mlp_layer_types": ["dense", "sparse"], "pad_token_id": 0},
    ),
    "minimax-m2": (
        "minimax_m2",
        "minimax-m2",
        {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16},
    ),
}


STORED = "model.safetensors"
# transformers saves the language model's layers under the tower's word for them.
KIMI = (r"^language_model\.model\.blocks", "language_model.model.layers")


def saved(folder: Path, model_type: str, config: dict[str, Any], auto: str) -> Any:
    """A random model of a class, saved by transformers in float32 with a tokenizer; the model."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)  # with 0, one token of GLM-4.7-Flash has a tie of two experts
    made = transformers.AutoConfig.for_model(model_type, **config)
    model = getattr(transformers, auto).from_config(made)
    for weight in model.parameters():  # far from the defaults, so that a forgotten or turned one shows
        torch.nn.init.normal_(weight, float(weight.ndim == 1), 0.08)
    model.save_pretrained(folder)
    weights = {re.sub(*KIMI, name): weight for name, weight in load_file(folder / STORED).items()}
    save_file(weights, folder / STORED, {"format": "pt"})
    add_tokenizer(folder)
    return model


def seeing(folder: Path, name: str) -> Any:
    model_type, _, text = SEEING[name]
    inner = {**SIZES, "tie_word_embeddings": False, **text}
    config = {"text_config": inner, "vision_config": VISION, "tie_word_embeddings": False}
    return saved(folder, model_type, config, "AutoModelForImageTextToText")


def distance(model: Any, gguf: Path) -> float:
    """The largest |delta log p| between transformers in float32 and llama.cpp."""
    expected = logits_of(model)
    assert expected.std() > 0.3
    return float(np.abs(log_probabilities(llama_cpp_logits(gguf, IDS, expected.shape[-1])) - expected).max())


def as_gguf(folder: Path) -> tuple[Path, str]:
    ran = qconvert("to-gguf", folder, "--type", "f32", "-o", folder / "m.gguf")
    assert ran.code == 0, ran.err
    return folder / "m.gguf", ran.err


@pytest.mark.parametrize("name", SEEING)
def test_the_language_model_of_one_that_sees(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    model = seeing(tmp_path, name)
    weights = json.loads((tmp_path / "config.json").read_text())
    assert "vision_config" in weights
    gguf, said = as_gguf(tmp_path)
    assert "vision: " in said and "left out; the GGUF holds the language model" in said
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == SEEING[name][1]
    assert distance(model, gguf) < 0.01


@pytest.mark.parametrize("name", MIXTURES)
def test_newer_mixtures(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    model_type, arch, config = MIXTURES[name]
    model = saved(tmp_path, model_type, {**SIZES, **config}, "AutoModelForCausalLM")
    gguf, _ = as_gguf(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == arch
    assert distance(model, gguf) < 0.01
