"""Declares llama.cpp's `llama`, the models that it runs in that graph, and those with heads permuted alike.

Their rotary embedding rotates neighbouring rows, not halves, so the rows of q and k are permuted.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, Written, implying
from qconvert.models.gguf.metadata import Metadata


def head_rows(facts: Facts) -> int:
    """Returns the rows of one head."""
    return k.head_size(facts.settings)


ROTATED = dict.fromkeys(("attn.q", "attn.k"), Written(change="interleave_halves", block=head_rows))
SILU = c.computes("hidden_act", "silu", "swish")

LLAMA = GGUFModel(
    "llama",
    keys=(*k.decoder(rope=k.llama_rope)[:-1], k.stated_head_sizes),
    late=(k.vocab_size, k.rope_dimensions()),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    roles=ROTATED,
    constants=k.rope_freqs,
    checks=(SILU,),
    remarks=(c.window_left_out,),
)
MISTRAL = replace(
    LLAMA, defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
)
MIXTRAL = replace(
    MISTRAL,
    keys=k.decoder(rope=k.llama_rope, more=(k.expert_counts,)),
    defaults={**MISTRAL.defaults, "rms_norm_eps": 1e-5},
)

# Their dynamic scaling begins beyond the context in the file.
_DYNAMIC = k.rope_kinds(*k.ROPES, "dynamic")
INTERNLM = replace(LLAMA, keys=(*k.decoder(rope=_DYNAMIC)[:-1], k.stated_head_sizes))
INTERNLM2 = GGUFModel(
    "internlm2",
    keys=k.decoder(rope=_DYNAMIC),
    defaults=LLAMA.defaults,
    roles=ROTATED,
    head="required",
    checks=(SILU, c.square_attention),
)


@implying(lambda file: {"use_qk_norm": file.size("expert_count") != 128})
def _known_norms(facts: Facts) -> str | None:
    """Refuses norms of queries and keys that the loader does not expect: it goes by the number of experts."""
    stated, many = facts.flag("use_qk_norm", default=True), facts.size("num_local_experts") == 128
    if stated != many:
        return None
    return (
        f"use_qk_norm is {str(stated).lower()} in a model of {facts.size('num_local_experts')} experts, but "
        "llama.cpp's llama4 has these norms in every model but that of 128 experts"
    )


def _steps(layers: int, step: int) -> list[int]:
    return list(range(step - 1, layers, step))


@implying(lambda file: {"moe_layers": _steps(file.layers, file.size("interleave_moe_layer_step"))})
def _every_nth_layer_is_sparse(facts: Facts) -> str | None:
    """Refuses experts in other layers than every n-th."""
    stated, step = facts.settings.get("moe_layers"), facts.size("interleave_moe_layer_step")
    if stated is None or stated == _steps(facts.layers, step):
        return None
    return f"moe_layers is not every layer of {step}, as llama.cpp's llama4 has it"


def _unrotated(layers: int) -> list[int]:
    return [int((layer + 1) % 4 != 0) for layer in range(layers)]


@implying(lambda file: {"no_rope_layers": _unrotated(file.layers)})
def every_fourth_layer_is_unrotated(facts: Facts) -> str | None:
    """Refuses layers without a rotary embedding that are not every fourth."""
    stated = facts.settings.get("no_rope_layers")
    if not stated or stated == _unrotated(facts.layers):
        return None
    return "no_rope_layers is not every fourth layer, as in llama.cpp's graph"


# Neighbouring rows are rotated by the class, too.
LLAMA4 = replace(
    LLAMA,
    arch="llama4",
    keys=(
        *k.SIZES[:3],
        k.size("feed_forward_length", "intermediate_size_mlp"),
        k.head_count,
        k.head_count_kv,
        k.llama_rope,
        k.rms_epsilon,
        k.size("expert_count", "num_local_experts"),
        k.size("expert_used_count", "num_experts_per_tok"),
        k.stated_head_sizes,
    ),
    late=(
        k.vocab_size,
        k.rope_dimensions(),
        k.size("interleave_moe_layer_step", "interleave_moe_layer_step"),
        k.size("expert_feed_forward_length", "intermediate_size"),
    ),
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    roles={},
    checks=(
        SILU,
        _known_norms,
        _every_nth_layer_is_sparse,
        every_fourth_layer_is_unrotated,
        c.every_nth_layer_is_full(4, "chunked_attention"),
        c.computes("attention_chunk_size", 8192),
        c.computes("attn_temperature_tuning", True, 1, 4),
        c.computes("floor_scale", 8192),
        c.computes("attn_scale", 0.1),
    ),
    remarks=(),
)


# Norms stand behind the blocks; its file has a head of its own.
OLMO2 = GGUFModel(
    "olmo2",
    keys=k.decoder(),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    head="required",
    checks=(SILU, c.square_attention, c.computes("attention_bias", False)),
)

# Its norms have no weights, and no config has their epsilon.
_FIXED_EPSILON = k.fixed("attention.layer_norm_epsilon", 1e-5)
OLMO = GGUFModel(
    "olmo",
    keys=tuple(keys for keys in k.decoder() if keys is not k.rms_epsilon),
    late=(_FIXED_EPSILON, k.optional_number("attention.clamp_kqv", "clip_qkv")),
    defaults={"max_position_embeddings": 2048},
    roles=ROTATED,
    checks=(SILU, c.square_attention, c.computes("attention_bias", False)),
)


# llama.cpp's graph tells the 7B model, which is rotary, from the 13B one, which has ALiBi, by their layers.
_BAICHUAN_LAYERS = (32, 40)


def _context(file: Metadata) -> Json:
    rotary = file.layers == _BAICHUAN_LAYERS[0]
    return {"max_position_embeddings" if rotary else "model_max_length": file.size("context_length")}


BAICHUAN = GGUFModel(
    "baichuan",
    keys=(k.block_count, Keys(k.context_length.write, _context), *k.decoder()[2:]),
    late=(k.fixed("tensor_data_layout", "Meta AI original pth"), k.rope_dimensions()),
    defaults={"rms_norm_eps": 1e-6},
    roles=ROTATED,
    head="required",
    checks=(SILU, c.square_attention),
)


def baichuan(config: Json) -> GGUFModel:
    """Returns Baichuan's declaration for one config.

    Baichuan 2, recognized by its vocabulary (as in vLLM's `baichuan.py`), normalizes every row of its head to
    length 1. A rotary model of another depth than the 7B is a Llama, and written as one.
    """
    rotary = config.get("max_position_embeddings") is not None
    model = BAICHUAN if config.get("num_hidden_layers") in _BAICHUAN_LAYERS or not rotary else LLAMA
    defaults = {**BAICHUAN.defaults, "max_position_embeddings": config.get("model_max_length") or 4096}
    roles = dict(ROTATED)
    if config.get("vocab_size") == 125696 or "z_loss_weight" in config:
        roles["lm_head"] = Written(change="unit_rows")
    return replace(model, defaults=defaults, roles=roles)


def _known_depth(facts: Facts) -> str | None:
    if facts.layers in _BAICHUAN_LAYERS:
        return None
    return f"{facts.layers} layers with ALiBi, which llama.cpp's baichuan has in models of 40"


BAICHUAN = replace(BAICHUAN, variant=baichuan, checks=(*BAICHUAN.checks, _known_depth))

MODELS = {
    "llama": LLAMA,
    "Yi": LLAMA,
    "skywork": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "internlm": INTERNLM,
    "internlm2": INTERNLM2,
    "llama4_text": LLAMA4,  # the type of the language model alone; a file is read back as this one
    "llama4": LLAMA4,
    "olmo": OLMO,
    "olmo2": OLMO2,
    "baichuan": BAICHUAN,
}
