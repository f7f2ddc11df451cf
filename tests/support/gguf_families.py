"""Small models of the families that llama.cpp runs, and what llama.cpp computes with their GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.commands import qconvert
from tests.support.gguf_models import SIZES, llama_cpp_logits, log_probabilities, qwen2_tokenizer

IDS = [3, 17, 250, 9, 9, 101, 0, 44, 260, 271, 5, 120, 33, 2, 199, 299]
# llama.cpp's float32 graphs round activations to half precision in places; its experts' outputs are
# added in another order. Measured: at most 0.01, and 0.017 for the one model of 26 layers.
CLOSE = 0.03


def add_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 301 tokens."""
    qwen2_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def scatter(model: Any, spread: float = 0.15) -> Any:
    """Random numbers far from the defaults for every weight, rounded to bf16, in float32."""
    import torch

    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        is_norm = weight.ndim == 1 and ("norm" in name.lower() or ".ln_" in name)
        torch.nn.init.normal_(weight, float(is_norm), spread)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            torch.nn.init.normal_(buffer, 0, 0.1)
    return model.to(torch.bfloat16).float()


def random_model(folder: Path, family: str, spread: float = 0.15, **changes: Any) -> Path:
    """A model of `<family>Config` and `<family>ForCausalLM`, saved by transformers, and a tokenizer."""
    import torch
    import transformers

    names = (f"{family}TextConfig", f"{family}Config")
    config_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**{**SIZES, **changes}))
    scatter(model, spread).to(torch.bfloat16).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def save(folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    """A model under names of our own, in bf16, with a tokenizer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config)))
    add_tokenizer(folder)
    return folder


def logits_of(model: Any) -> np.ndarray:
    """What a model in memory computes for IDS, as log probabilities."""
    import torch

    with torch.no_grad():
        return log_probabilities(model(torch.tensor([IDS])).logits[0].numpy())


def written(folder: Path, *flags: object) -> Path:
    """The folder's model as a GGUF file of type f32 (or of the flags')."""
    out = folder / "m.gguf"
    ran = qconvert("to-gguf", folder, "-o", out, "-q", "--overwrite", *(flags or ("--type", "f32")))
    assert ran.code == 0, ran.err
    return out


def distance(folder: Path, expected: np.ndarray, *flags: object, rows: int = 320) -> float:
    """The largest difference between log probabilities that llama.cpp finds and those expected."""
    found = log_probabilities(llama_cpp_logits(written(folder, *flags), IDS, rows))
    assert expected.std() > 0.3, "logits that say nothing"
    return float(np.abs(found - expected).max())


def saved_seeing(folder: Path, kind: str, text: dict[str, Any], *, eager: bool = False) -> Any:
    """A random model that sees, saved by transformers in float32 with a tokenizer.

    The norms of its class have 1 added to them. With `eager`, attention is the class's own code.
    """
    import transformers

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    if eager:
        config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = scatter(transformers.AutoModelForImageTextToText.from_config(config), 0.08).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data -= 1
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model
