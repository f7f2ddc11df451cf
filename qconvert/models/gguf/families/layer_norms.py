"""Declares GPT-NeoX, Phi-1.5 and 2, StarCoder 2 and StableLM: rotary decoders whose norms have biases."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, positive, read_by
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata

_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_PARALLEL = k.flag("use_parallel_residual", "use_parallel_residual")


def _read_neox_rope(file: Metadata) -> Json:
    share = k.rotated(file)["partial_rotary_factor"] if file.has("rope.dimension_count") else 1.0
    return {"rotary_pct": share, "rotary_emb_base": file.number("rope.freq_base", 10000.0)}


def _neox_rope(facts: Facts) -> Json:
    """The share of a head that is rotated, and the base, under the class's older names or the newer ones."""
    older = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    stated = {new: facts.settings[old] for new, old in older.items() if old in facts.settings}
    newer = facts.settings.get("rope_parameters")
    return {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, **stated, **(newer or {})}


@read_by(_read_neox_rope)
def _neox_dimensions(facts: Facts) -> Iterator[KV]:
    """Writes how much of a head is rotated; the base only where it is not the one that llama.cpp assumes."""
    rope = _neox_rope(facts)
    share = positive(rope, "partial_rotary_factor")
    yield facts.u32("rope.dimension_count", int(k.head_size(facts.settings) * share))


@read_by(lambda file: {})
def _neox_base(facts: Facts) -> Iterator[KV]:
    theta = positive(_neox_rope(facts), "rope_theta")
    if theta != 10000.0:
        yield facts.f32("rope.freq_base", theta)


GPT_NEOX = GGUFModel(
    "gptneox",
    keys=(
        k.context_length,
        k.embedding_length,
        k.block_count,
        k.feed_forward_length,
        _neox_dimensions,
        k.head_count,
        _PARALLEL,
        k.norm_epsilon("layer_norm_eps"),
        _neox_base,
    ),
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
    },
    whole=("attn.qkv",),
    head="required",
    checks=(c.computes("hidden_act", "gelu", *_GELU), c.computes("attention_bias", True)),
)

PHI = GGUFModel(
    "phi2",
    keys=(
        k.context_length,
        k.embedding_length,
        k.feed_forward_length,
        k.block_count,
        k.head_count,
        k.head_count_kv,
        k.norm_epsilon("layer_norm_eps"),
        k.rope_dimensions(0.5),
        k.unscaled_rope_unless_default,
    ),
    defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5},
    head="required",
    checks=(
        c.computes("hidden_act", *_GELU, "gelu"),
        c.computes("qk_layernorm", False),
        c.square_attention,
    ),
)

STARCODER2 = GGUFModel(
    "starcoder2",
    keys=k.decoder(norm=k.norm_epsilon("norm_epsilon")),
    defaults={"max_position_embeddings": 4096, "norm_epsilon": 1e-5},
    checks=(
        c.computes("hidden_act", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
        c.computes("use_bias", True),
        c.square_attention,
    ),
    remarks=(c.window_left_out,),
)

STABLELM = GGUFModel(
    "stablelm",
    keys=(
        k.context_length,
        k.embedding_length,
        k.block_count,
        k.feed_forward_length,
        k.rope_dimensions(0.25),
        k.head_count,
        k.head_count_kv,
        _PARALLEL,
        k.norm_epsilon("layer_norm_eps"),
        k.unscaled_rope_unless_default,
    ),
    defaults={
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "use_parallel_residual": False,
    },
    head="required",
    checks=(SILU, c.computes("qk_layernorm", False), c.square_attention),
)

MODELS = {"gpt_neox": GPT_NEOX, "phi": PHI, "starcoder2": STARCODER2, "stablelm": STABLELM}
