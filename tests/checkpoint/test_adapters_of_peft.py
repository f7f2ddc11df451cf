"""Adapters that PEFT writes are merged as it computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.adapters import numbers, opened
from tests.support.commands import qconvert
from tests.support.models import HEAD, tiny


@pytest.fixture(scope="module")
def peft() -> Any:
    """Imported by whoever runs these tests, for 3 s, not by whoever collects them."""
    return pytest.importorskip("peft")


@pytest.mark.parametrize(
    "how", ["lora", "rslora", "dora", "embedding", "pattern", "bias", "whole head", "tokens"]
)
def test_peft_computes_the_same(tmp_path: Path, peft: Any, how: str) -> None:
    """Its own adapters, written and merged by it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = tiny(tmp_path / "base", "qwen2", dtype="f32", tied=how == "tokens")
    options: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    options |= {
        "rslora": {"use_rslora": True},
        "dora": {"use_dora": True},
        "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
        "pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        "bias": {"bias": "lora_only"},
        "whole head": {"modules_to_save": ["lm_head"]},
        "tokens": {"trainable_token_indices": [3, 318]},
    }.get(how, {})
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "lora")
    wanted = model.merge_and_unload().state_dict()
    checkpoint = opened(tmp_path / "lora")
    changed = 0
    for name, tensor in checkpoint.tensors.items():
        found = numbers(checkpoint, name).reshape(tensor.shape)
        np.testing.assert_allclose(found, wanted[name].numpy(), rtol=2e-5, atol=2e-6, err_msg=name)
        changed += not np.array_equal(found, load_file(base / "model.safetensors")[name])
    assert changed >= 2


@pytest.mark.parametrize(
    "how", ["lora of embedding", "lora of head", "whole embedding", "new words", "tokens"]
)
def test_a_tied_model_is_what_was_trained(tmp_path: Path, peft: Any, how: str) -> None:
    """The adapter beside its base, not merged, says what that is: PEFT's merging changes a tied head, too."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = tiny(tmp_path / "base", "qwen2", dtype="f32", tied=True)
    options: dict[str, Any] = {
        "lora of embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "lora of head": {"target_modules": ["lm_head", "q_proj"]},
        "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "new words": {"target_modules": ["q_proj"]},
        "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [320, 322]},
    }[how]
    resized = how in ("new words", "tokens")
    model = AutoModelForCausalLM.from_pretrained(base)
    if resized:
        model.resize_token_embeddings(323)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "lora")
    assert qconvert("merge", tmp_path / "lora", "-o", tmp_path / "out", "-q").code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (HEAD in load_file(tmp_path / "out" / "model.safetensors")) == (not resized)
    ids = torch.arange(len(merged.get_input_embeddings().weight)).flip(0)[None, :64]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("how", ["all-linear", "patterns"])
def test_products_of_all_experts(tmp_path: Path, peft: Any, family: str, how: str) -> None:
    """With transformers 5, PEFT changes stacks of experts, of which files have single matrices."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
    experts = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, **heads, **experts)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"target_modules": "all-linear"}
    if how == "patterns":
        options = {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.down_proj", "mlp.gate.weight"],
        }
        options |= {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {r".*\.down_proj": 3}}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "lora")
    model.merge_and_unload().save_pretrained(tmp_path / "wanted")
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    before = load_file(tmp_path / "base" / "model.safetensors")
    checkpoint = opened(tmp_path / "lora")
    assert checkpoint.tensors.keys() == wanted.keys()
    changed = 0
    for name, tensor in checkpoint.tensors.items():
        found = numbers(checkpoint, name).reshape(tensor.shape)
        np.testing.assert_allclose(found, wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)
        changed += "experts" in name and not np.array_equal(found, before[name])
    assert changed == 2 * 3 * (3 if how == "all-linear" else 1)
