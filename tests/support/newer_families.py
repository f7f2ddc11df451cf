"""Small models of families from OLMoE to Mamba-2, which transformers saves and llama.cpp runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.gguf_families import add_tokenizer, scatter
from tests.support.gguf_models import SIZES

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
STRETCHED = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0, "factor": 1.0}
PARTIAL = {"rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.5}
SCALES = {
    "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}  # fmt: skip
GRANITE4 = {
    **SCALES, "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 16, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
ATTENTION_ALONE = {**GRANITE4, "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope"}
DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
LIQUID = {
    "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "tie_word_embeddings": True,
}  # fmt: skip
ERNIE = {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
HUNYUAN_MOE = {
    "head_dim": 16, "num_experts": 4, "moe_topk": [2, 2], "num_shared_expert": [1, 1],
    "moe_intermediate_size": [96, 96],
}  # fmt: skip
FALCON_H1 = {
    "head_dim": 16, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 16, "mamba_chunk_size": 16, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
    "key_multiplier": 0.7, "attention_out_multiplier": 0.8, "attention_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.6], "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.9,
    "mlp_multipliers": [0.9, 0.7],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
NO_HEADS = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16}
# The type of each model, llama.cpp's name of its graph, and what its config says beside SIZES.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "olmoe": ("olmoe", "olmoe", {**EXPERTS, "num_key_value_heads": 4}),
    "granite-moe": ("granitemoe", "granitemoe", {**SCALES, "num_local_experts": 4}),
    "granite-moe-shared": (
        "granitemoeshared", "granitemoe", {**SCALES, "num_local_experts": 4, "shared_intermediate_size": 32}
    ),
    "granite4": ("granitemoehybrid", "granitehybrid", {**GRANITE4, "num_local_experts": 4}),
    "granite4-without-experts": ("granitemoehybrid", "granitehybrid", {**GRANITE4, **DENSE}),
    "granite4-rotated": (
        "granitemoehybrid", "granitehybrid", {**GRANITE4, **DENSE, "position_embedding_type": "rope"}
    ),
    "granite4-attention": ("granitemoehybrid", "granitemoe", {**ATTENTION_ALONE, "num_local_experts": 4}),
    "granite4-dense": ("granitemoehybrid", "granite", {**ATTENTION_ALONE, **DENSE}),
    "granite4-unrotated": (
        "granitemoehybrid", "granite", {**ATTENTION_ALONE, **DENSE, "position_embedding_type": "nope"}
    ),
    "phi": ("phi", "phi2", {"num_key_value_heads": 4}),
    "gpt-neox": ("gpt_neox", "gptneox", {}),
    "gpt-neox-serial": ("gpt_neox", "gptneox", {"use_parallel_residual": False, "rope_parameters": PARTIAL}),
    "starcoder2": ("starcoder2", "starcoder2", {}),
    "stablelm": ("stablelm", "stablelm", {}),
    "stablelm-parallel": ("stablelm", "stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "exaone4": (
        "exaone4", "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3},
    ),
    "exaone4-32b": ("exaone4", "exaone4", {"sliding_window": 8, "num_hidden_layers": 64}),
    "hunyuan": ("hunyuan_v1_dense", "hunyuan-dense", {"head_dim": 32}),
    "hunyuan-stretched": (
        "hunyuan_v1_dense", "hunyuan-dense",
        {"head_dim": 32, "rope_parameters": STRETCHED, "max_position_embeddings": 32768},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", "hunyuan-moe", HUNYUAN_MOE),
    "arcee": ("arcee", "arcee", {"head_dim": 32, "rope_parameters": YARN}),
    "ernie4.5-moe": ("ernie4_5_moe", "ernie4_5-moe", {**ERNIE, "tie_word_embeddings": True}),
    "ernie4.5-moe-alone": ("ernie4_5_moe", "ernie4_5-moe", {**ERNIE, "moe_num_shared_experts": 0}),
    "lfm2": ("lfm2", "lfm2", LIQUID),
    "lfm2-moe": (
        "lfm2_moe", "lfm2moe", {**LIQUID, **EXPERTS, "num_dense_layers": 1, "moe_intermediate_size": 32}
    ),
    "falcon-h1": ("falcon_h1", "falcon-h1", FALCON_H1),
    "falcon-h1-normed": (
        "falcon_h1", "falcon-h1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    ),
    "mamba": ("mamba", "mamba", NO_HEADS),
    "mamba2": (
        "mamba2", "mamba2", {**NO_HEADS, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
    ),
}  # fmt: skip


def sizes_of(name: str, **changes: Any) -> dict[str, Any]:
    """What the config of a model says."""
    more = CONFIGS[name][2]
    shared = {} if name.startswith("mamba") else {**SIZES, "vocab_size": 320, "pad_token_id": None}
    return {**shared, **more, **changes}


def made(folder: Path, name: str, **changes: Any) -> Any:
    """A random model of a class, saved by transformers in float32 with a tokenizer, and loaded again."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(CONFIGS[name][0], **sizes_of(name, **changes))
    spread = 0.12 if name.startswith("falcon") else 0.08
    scatter(transformers.AutoModelForCausalLM.from_config(config), spread).save_pretrained(folder)
    add_tokenizer(folder)
    eager = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **eager).eval()


def restated(folder: Path, **changes: Any) -> None:
    """Other words in the config of a saved model; None takes an entry out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
