"""Declares MiniCPM3: latent attention that is not absorbed, and fixed scales around the blocks."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, implying, read_by
from qconvert.models.gguf.families.fused import LONG, rope_factors
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata


def _read_heads(file: Metadata) -> Json:
    rotary = file.size("rope.dimension_count")
    return {"qk_nope_head_dim": file.size("attention.key_length") - rotary, "qk_rope_head_dim": rotary}


@read_by(_read_heads)
def _heads(facts: Facts) -> Iterator[KV]:
    """Writes the size of a key, and how much of it is rotated."""
    rotary = facts.size("qk_rope_head_dim")
    yield facts.u32("attention.key_length", facts.size("qk_nope_head_dim") + rotary)
    yield facts.u32("rope.dimension_count", rotary)


def _read_values(file: Metadata) -> Json:
    return {"v_head_dim": file.size("embedding_length") // file.size("attention.head_count")}


@implying(_read_values)
def _square_values(facts: Facts) -> str | None:
    """Refuses heads of values whose sizes do not make up the hidden size, from which the loader has them."""
    heads, hidden = facts.size("num_attention_heads"), facts.size("hidden_size")
    size = facts.optional("v_head_dim") or hidden // heads
    if heads * size == hidden:
        return None
    return f"v_head_dim is {size}, but llama.cpp's minicpm3 has {hidden // heads}: the hidden size by heads"


@implying(lambda file: {"rope_theta": 10000.0})
def _plain_rope(facts: Facts) -> str | None:
    """Refuses a rotary embedding of another base or scaling: the file has nothing but divisors for it."""
    rope, context = k.rope_of(facts), facts.size("max_position_embeddings")
    same = rope.get("original_max_position_embeddings", context) == context
    if rope["rope_theta"] == 10000.0 and (
        rope["rope_type"] == "default" or (rope["rope_type"] in LONG and same)
    ):
        return None
    return (
        f"rope_type is {rope['rope_type']}, its base {rope['rope_theta']}; llama.cpp's minicpm3 has "
        "10000 and divisors of it for the context that the model was made for"
    )


MINICPM3 = GGUFModel(
    "minicpm3",
    keys=(),
    late=(
        k.context_length,
        k.embedding_length,
        k.block_count,
        k.feed_forward_length,
        k.head_count,
        k.head_count_kv,
        k.rms_epsilon,
        k.vocab_size,
        k.size("attention.q_lora_rank", "q_lora_rank"),
        k.size("attention.kv_lora_rank", "kv_lora_rank"),
        _heads,
    ),
    defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    constants=rope_factors,
    roles={"attn.kv_b": Written("attn_kv_b")},
    checks=(
        SILU,
        _square_values,
        _plain_rope,
        c.computes("scale_emb", 12),
        c.computes("scale_depth", 1.4),
        c.computes("dim_model_base", 256),
        c.computes("attention_bias", False),
    ),
)

MODELS = {"minicpm3": MINICPM3}
