"""GPT-2: positions that were learned, norms and linears with biases, q, k and v in one."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.architecture.gguf import keys as k
from qconvert.architecture.gguf.model import Facts, GGUFModel
from qconvert.gguf_types import KV


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
        k.computes("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        k.computes("scale_attn_weights", True),
        k.computes("scale_attn_by_inverse_layer_idx", False),
    ),
)

MODELS = {"gpt2": GPT2}
