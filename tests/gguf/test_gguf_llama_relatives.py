"""`to-gguf` of Llama's newer relatives: llama.cpp computes what transformers does, and files go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, add_tokenizer, logits_of, scatter, written
from tests.support.gguf_models import SIZES, llama_cpp_logits, log_probabilities
from tests.support.models import stored

YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "rope_theta": 1e6, "original_max_position_embeddings": 32,
}  # fmt: skip
GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}  # fmt: skip
# The type of each model, llama.cpp's name of its graph, and what its config says beside SIZES.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "seed-oss": ("seed_oss", "seed_oss", {"head_dim": 32, "attention_out_bias": False}),
    "olmo3": ("olmo3", "olmo2", {"num_hidden_layers": 5, "sliding_window": 8}),
    "granite": ("granite", "granite", GRANITE),
    "ernie4.5": ("ernie4_5", "ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
    "ministral3": (
        "ministral3", "mistral3", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
    ),
}  # fmt: skip


def made(folder: Path, name: str, **changes: Any) -> Any:
    """A random model of a class, saved by transformers in float32 with a tokenizer."""
    import transformers

    model_type, _, more = CONFIGS[name]
    sizes = {**SIZES, "vocab_size": 320, "pad_token_id": None, **more, **changes}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = scatter(transformers.AutoModelForCausalLM.from_config(config), 0.08).eval()
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    expected, gguf = logits_of(made(tmp_path, name)), written(tmp_path)
    assert expected.std() > 0.3
    found = log_probabilities(llama_cpp_logits(gguf, IDS, expected.shape[-1]))
    assert np.abs(found - expected).max() < 0.01


LONGER = [(7 * i + i * i) % 300 for i in range(100)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ministral3", {}),
        ("olmo3", {}),
        ("olmo3", {"rope_parameters": {key: YARN[key] for key in YARN if "mscale" not in key}}),
        ("smollm3", {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}}),
    ],
)
def test_texts_beyond_the_first_context_and_the_window(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    import torch

    model, gguf = made(tmp_path, name, **changes), written(tmp_path)
    with torch.no_grad():
        expected = log_probabilities(model(torch.tensor([LONGER])).logits[0].numpy())
    found = log_probabilities(llama_cpp_logits(gguf, LONGER, expected.shape[-1]))
    assert np.abs(found - expected).max() < 0.01


def test_the_language_model_of_mistral_small_is_its_own_type_s(tmp_path: Path) -> None:
    """Mistral Small 3.1 has a Mistral inside, Ministral 3 a Ministral3; towers are left out."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    import torch
    import transformers

    tower = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    for inner, arch in (("mistral", "llama"), ("ministral3", "mistral3")):
        folder = tmp_path / inner
        rope = {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}} if inner == "ministral3" else {}
        text = {**SIZES, "model_type": inner, "vocab_size": 320, "head_dim": 16, **rope}
        config = transformers.Mistral3Config(
            text_config={**text, "sliding_window": None}, vision_config=tower, tie_word_embeddings=False
        )
        model = scatter(transformers.Mistral3ForConditionalGeneration(config), 0.08).eval()
        model.save_pretrained(folder)
        add_tokenizer(folder)
        gguf = written(folder)
        with GGUFFile(gguf) as file:
            assert file.kv["general.architecture"].value == arch
        with torch.no_grad():
            expected = log_probabilities(model(torch.tensor([IDS])).logits[0].numpy())
        found = log_probabilities(llama_cpp_logits(gguf, IDS, expected.shape[-1]))
        assert np.abs(found - expected).max() < 0.01
        out = tmp_path / f"{inner}-int4"
        ran = qconvert("quantize", folder, "--bits", 4, "--group-size", 32, "-o", out)
        assert ran.code == 0, ran.err
        assert not any("_packed" in n and "vision" in n for n in stored(out))


@pytest.mark.parametrize("name", CONFIGS)
def test_files_go_back_to_the_same_weights(tmp_path: Path, name: str) -> None:
    made(tmp_path, name)
    gguf = written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == CONFIGS[name][1]
    back = qconvert("from-gguf", gguf, "-o", tmp_path / "back", "-q", "--dtype", "f32")
    assert back.code == 0, back.err
    assert stored(tmp_path / "back") == stored(tmp_path)
