"""Declares GPT-2: learned positions, norms and linears with biases, fused q, k and v."""

from __future__ import annotations

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

MODELS = {"gpt2": GPT2}
