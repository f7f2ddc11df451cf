"""Declares GPT-2 and StarCoder: learned positions, norms and linears with biases, fused q, k and v."""

from __future__ import annotations

from dataclasses import replace

from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import GGUFModel

GPT2 = GGUFModel(
    "gpt2",
    keys=(
        k.block_count,
        k.size("context_length", "n_positions"),
        k.size("embedding_length", "n_embd"),
        k.inner_width("n_inner"),
        k.size("attention.head_count", "n_head"),
        k.norm_epsilon("layer_norm_epsilon"),
    ),
    defaults={"layer_norm_epsilon": 1e-5},
    whole=("attn.qkv",),
    checks=(
        c.computes("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        c.computes("scale_attn_weights", True),
        c.computes("scale_attn_by_inverse_layer_idx", False),
    ),
)

STARCODER = replace(
    GPT2,
    arch="starcoder",
    keys=(
        k.size("context_length", "n_positions"),
        k.size("embedding_length", "n_embd"),
        k.inner_width("n_inner"),
        k.block_count,
        k.size("attention.head_count", "n_head"),
        k.counted("attention.head_count_kv", lambda facts: 1),
        k.norm_epsilon("layer_norm_epsilon"),
    ),
    checks=(
        c.computes("activation_function", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
        c.computes("scale_attn_weights", True),
        c.computes("multi_query", True),
    ),
)

MODELS = {"gpt2": GPT2, "gpt_bigcode": STARCODER}
