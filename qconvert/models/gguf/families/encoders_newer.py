"""Declares XLM-RoBERTa and RoBERTa, which are BERT to llama.cpp, ModernBERT, and Nomic's BERT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import (
    NOT_WRITTEN,
    Facts,
    GGUFModel,
    Written,
    derived,
    implying,
    positive,
    read_by,
)
from qconvert.models.gguf.families.encoders import BERT, sees_everything
from qconvert.models.gguf.metadata import Metadata


def _unused(facts: Facts) -> int:
    """Returns how many positions no token has: the class counts from the one after the padding token's."""
    return facts.count("pad_token_id") + 1


def _used_positions(facts: Facts) -> Iterable[range]:
    return (range(_unused(facts), facts.size("max_position_embeddings")),)


@derived
def _token_types(facts: Facts) -> Iterator[KV]:
    """Writes how many types of tokens there are, which the loader wants of every BERT."""
    yield KV.u32("tokenizer.ggml.token_type_count", facts.size("type_vocab_size"))


# A file is read back as BERT, whose positions begin with 0, as those of the file.
XLM_ROBERTA = replace(
    BERT,
    keys=(
        k.block_count,
        k.counted("context_length", lambda facts: facts.size("max_position_embeddings") - _unused(facts)),
        *BERT.keys[2:],
    ),
    late=(*BERT.late, _token_types),
    defaults={"layer_norm_eps": 1e-5, "pad_token_id": 1},
    roles={**BERT.roles, "positions": Written("position_embd", rows=_used_positions)},
)


def _step(facts: Facts) -> int:
    """Returns how many layers there are from one with full attention to the next."""
    stated = facts.optional("global_attn_every_n_layers")
    kinds = facts.settings.get("layer_types")
    if stated or not isinstance(kinds, list):
        return stated or 3
    later = (layer for layer, kind in enumerate(kinds) if layer and kind == "full_attention")
    return next(later, facts.layers)


def _kinds(layers: int, step: int) -> list[str]:
    return ["sliding_attention" if layer % step else "full_attention" for layer in range(layers)]


@implying(lambda file: {"layer_types": _kinds(file.layers, 3)})
def _every_third_layer_is_full(facts: Facts) -> str | None:
    """Refuses full attention in other layers than every third: older graphs have no key for it."""
    kinds = facts.settings.get("layer_types") or _kinds(facts.layers, _step(facts))
    if kinds == _kinds(facts.layers, 3):
        return None
    return (
        "layer_types is not the pattern of llama.cpp's modern-bert: every 3rd layer full, from the first on"
    )


def _read_bases(file: Metadata) -> Json:
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base")},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.number("rope.freq_base_swa", 10000.0),
            },
        }
    }


@read_by(_read_bases)
def _bases(facts: Facts) -> Iterator[KV]:
    """Writes the bases of the rotary embeddings of both kinds of layers."""
    rope = facts.settings.get("rope_parameters") or {}
    for kind, older, name in (
        ("full_attention", "global_rope_theta", "rope.freq_base"),
        ("sliding_attention", "local_rope_theta", "rope.freq_base_swa"),
    ):
        stated = rope.get(kind) or {}
        yield facts.f32(name, positive({older: facts.settings[older], **_based(stated, older)}, older))


def _based(rope: Json, key: str) -> Json:
    return {key: rope["rope_theta"]} if "rope_theta" in rope else {}


@read_by(lambda file: {"norm_eps": file.number("attention.layer_norm_epsilon")})
def _epsilons(facts: Facts) -> Iterator[KV]:
    """Writes the epsilon under the names of both kinds of norms, as of published configs."""
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        yield facts.f32(f"attention.{name}", facts.number("norm_eps"))


@derived
def _activation(facts: Facts) -> Iterator[KV]:
    yield facts.text("hidden_activation", "gelu")


MODERN_BERT = GGUFModel(
    "modern-bert",
    keys=(*k.SIZES, _bases, _epsilons),
    late=(
        sees_everything,
        k.size("attention.sliding_window", "local_attention"),
        k.counted("attention.sliding_window_pattern", _step),
        k.scaling_none,
        k.vocab_size,
        _activation,
    ),
    defaults={
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    },
    roles={
        "embed.norm": Written("token_embd_norm"),
        "mlp.gate_up": Written("ffn_up"),
        **dict.fromkeys(("head.dense", "head.norm", "head.bias", "lm_head"), NOT_WRITTEN),
    },
    whole=("attn.qkv", "mlp.gate_up"),
    checks=(
        c.computes("hidden_activation", "gelu"),
        c.computes("attention_bias", False),
        c.computes("mlp_bias", False),
        c.computes("norm_bias", False),
        _every_third_layer_is_full,
    ),
)

# What the published models were trained for, which is less than their config says.
_TRAINED = {8192: 2048, 2048: 512}


def _nomic_context(facts: Facts) -> int:
    stated, trained = facts.size("max_position_embeddings"), facts.settings.get("max_trained_positions")
    return _TRAINED.get(stated, stated) if trained == 2048 else stated


def _newer_or_older(facts: Facts, newer: object, older: str, default: float) -> float:
    """Returns a number under the key of the class, or under that of the published configs."""
    stated = default if newer is None else newer
    found = facts.settings[older] if newer is None and facts.settings.get(older) is not None else stated
    return positive({older: found}, older)


@read_by(lambda file: {"layer_norm_eps": file.number("attention.layer_norm_epsilon")})
def _nomic_epsilon(facts: Facts) -> Iterator[KV]:
    found = _newer_or_older(facts, facts.settings.get("layer_norm_eps"), "layer_norm_epsilon", 1e-12)
    yield facts.f32("attention.layer_norm_epsilon", found)


def _read_nomic_base(file: Metadata) -> Json:
    theta = file.number("rope.freq_base")
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "hidden_act": "silu"}


@read_by(_read_nomic_base)
def _nomic_base(facts: Facts) -> Iterator[KV]:
    stated = (facts.settings.get("rope_parameters") or {}).get("rope_theta")
    yield facts.f32("rope.freq_base", _newer_or_older(facts, stated, "rotary_emb_base", 1000.0))


def _read_both_names(file: Metadata) -> Json:
    """Reads sizes under the names of published configs, too: the class of transformers 5 has others."""
    return {
        "n_layer": file.layers,
        "n_embd": file.size("embedding_length"),
        "n_inner": file.size("feed_forward_length"),
        "n_head": file.size("attention.head_count"),
        "n_positions": file.size("context_length"),
    }


NOMIC_BERT = GGUFModel(
    "nomic-bert",
    keys=(
        k.block_count,
        k.counted(
            "context_length",
            _nomic_context,
            lambda file: {"max_position_embeddings": file.size("context_length")},
        ),
        *k.SIZES[2:],
        _nomic_base,
        _nomic_epsilon,
        k.head_sizes,
        k.read_only(_read_both_names),
    ),
    late=(sees_everything,),
    roles={each: BERT.roles[each] for each in ("types", "embed.norm", "attn.norm", "mlp.norm")},
    whole=("attn.qkv",),
    checks=(
        c.computes("activation_function", "swiglu"),
        c.computes("hidden_act", "silu"),
        *(c.computes(key, False) for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm")),
        c.computes("rotary_emb_fraction", 1.0, 1),
        c.computes("rotary_emb_interleaved", False),
        c.computes("moe_every_n_layers", 0, None),
        c.square_attention,
    ),
)

MODELS = {
    "xlm-roberta": XLM_ROBERTA,
    "roberta": XLM_ROBERTA,
    "modernbert": MODERN_BERT,
    "nomic_bert": NOMIC_BERT,
}
