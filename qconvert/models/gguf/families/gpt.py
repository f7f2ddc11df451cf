"""Declares GPT-2: learned positions, norms and linears with biases, fused q, k and v."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, read_by
from qconvert.models.gguf.metadata import Metadata


def _read_sizes(file: Metadata) -> Json:
    return {
        "n_positions": file.size("context_length"),
        "n_embd": file.size("embedding_length"),
        "n_inner": file.size("feed_forward_length"),
        "n_head": file.size("attention.head_count"),
    }


@read_by(_read_sizes)
def _sizes(facts: Facts) -> Iterator[KV]:
    dims = facts.dimensions[0]
    yield facts.u32("context_length", dims["positions"])
    yield facts.u32("embedding_length", dims["hidden"])
    yield facts.u32("feed_forward_length", dims["intermediate"])
    yield facts.u32("attention.head_count", facts.size("n_head"))


GPT2 = GGUFModel(
    "gpt2",
    keys=(k.block_count, _sizes, k.norm_epsilon("layer_norm_epsilon")),
    defaults={"layer_norm_epsilon": 1e-5},
    whole=("attn.qkv",),
    checks=(
        c.computes("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        c.computes("scale_attn_weights", True),
        c.computes("scale_attn_by_inverse_layer_idx", False),
    ),
)

MODELS = {"gpt2": GPT2}
