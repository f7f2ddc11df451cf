"""Declares llama.cpp's `llama`, the models that it runs in that graph, and those with heads permuted alike.

Their rotary embedding rotates neighbouring rows, not halves, so the rows of q and k are permuted.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, Written
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
    "olmo": OLMO,
    "baichuan": BAICHUAN,
}
