"""Declares Nemotron-H (Mamba-2, attention and MLP blocks, alternating) and Nemotron-NAS (`deci`).

The class of Nemotron-H takes steps of 0.001 at least; llama.cpp takes them as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.nemotron import nemotron_kind
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, derived, read_by
from qconvert.models.gguf.families.deepseek import expert_groups
from qconvert.models.gguf.families.llama import LLAMA, ROTATED
from qconvert.models.gguf.families.mamba2 import Mamba2Sizes
from qconvert.models.gguf.metadata import Metadata

_KV_HEADS, _WIDTH = "attention.head_count_kv", "feed_forward_length"
# What the converter writes for models of state spaces, whatever their config says.
_CONTEXT = 1 << 20


_context = k.counted(
    "context_length", lambda facts: _CONTEXT, lambda file: {"max_position_embeddings": _CONTEXT}
)


def kinds(facts: Facts) -> list[str]:
    """Returns what each layer is: mamba, attention, moe or mlp."""
    return [nemotron_kind(facts.settings, layer) for layer in range(facts.layers)]


def listed_counts(file: Metadata, name: str) -> tuple[int, ...]:
    """Returns a count for each layer, which may be 0."""
    found = file.values(name)
    whole = tuple(n for n in found if isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 31)
    if len(whole) != file.layers or len(found) != file.layers:
        raise file.wrong(name, f"a list of {len(found)}, not {file.layers} counts")
    return whole


@read_by(lambda file: {})
def _widths(facts: Facts) -> Iterator[KV]:
    """Writes the inner width of each layer's block, of each expert where it has some; 0 without a block."""
    widths = (dims["expert_rows"] or dims["intermediate"] for dims in facts.dimensions)
    yield facts.by_layer(_WIDTH, widths)


def _read_layers(file: Metadata) -> Json:
    heads, widths = listed_counts(file, _KV_HEADS), listed_counts(file, _WIDTH)
    block = "moe" if file.count("expert_count") else "mlp"
    words = [
        "full_attention" if kv else block if width else "linear_attention"
        for kv, width in zip(heads, widths, strict=True)
    ]
    return {
        "layers_block_type": words,
        "num_key_value_heads": max(*heads, 1),
        "intermediate_size": max(*widths, 1),
    }


@read_by(_read_layers)
def _kv_heads(facts: Facts) -> Iterator[KV]:
    """Writes the heads of keys in layers with attention, 0 in the others."""
    heads = (
        dims["kv_heads"] if kind == "attention" else 0
        for kind, dims in zip(kinds(facts), facts.dimensions, strict=True)
    )
    yield facts.by_layer(_KV_HEADS, heads)


@derived
def _rope_base(facts: Facts) -> Iterator[KV]:
    """Writes the base of a rotary embedding that the model does not have, where its config states one."""
    rope = facts.settings.get("rope_parameters")
    stated = facts.settings.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, dict) else None)
    if isinstance(stated, int | float):
        yield facts.f32("rope.freq_base", stated)


def _read_epsilon(file: Metadata) -> Json:
    rms = "attention.layer_norm_rms_epsilon"
    stated = rms if file.has(rms) else "attention.layer_norm_epsilon"
    return {"layer_norm_epsilon": file.number(stated)}


_RMS = ("rms_norm_eps", "norm_eps")


@read_by(_read_epsilon)
def _epsilons(facts: Facts) -> Iterator[KV]:
    """Writes the epsilon of the norms under the names of both kinds: which one is read depends on the age."""
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        yield facts.f32(f"attention.{name}", facts.number("layer_norm_epsilon"))


def one_epsilon(facts: Facts) -> str | None:
    """Refuses another epsilon under the names that the graph prefers than the class's own."""
    used = facts.number("layer_norm_epsilon")
    other = next((key for key in _RMS if facts.settings.get(key) not in (None, used)), None)
    if other is None:
        return None
    return f"{other} is {facts.settings[other]}, which llama.cpp would take for layer_norm_epsilon, {used}"


@derived
def _rope_dimensions(facts: Facts) -> Iterator[KV]:
    yield facts.u32("rope.dimension_count", facts.size("hidden_size") // facts.size("num_attention_heads"))


def _inner(facts: Facts) -> int:
    return facts.size("mamba_num_heads") * facts.size("mamba_head_dim")


def _read_inner(file: Metadata) -> Json:
    return {"mamba_head_dim": file.size("ssm.inner_size") // file.size("ssm.time_step_rank")}


_STATE_SPACE = (
    k.size("ssm.conv_kernel", "conv_kernel"),
    k.size("ssm.state_size", "ssm_state_size"),
    k.size("ssm.group_count", "n_groups"),
    k.counted("ssm.inner_size", _inner, _read_inner),
    k.size("ssm.time_step_rank", "mamba_num_heads"),
)


@derived
def _unrotated(facts: Facts) -> Iterator[KV]:
    yield facts.flagged("rope.scaling.finetuned", value=False)


_MAMBA2 = Mamba2Sizes(
    heads="mamba_num_heads",
    groups="n_groups",
    state="ssm_state_size",
    kernel="conv_kernel",
    inner=_inner,
    inner_name="mamba_num_heads x mamba_head_dim",
).roles()


def _declaration(config: Json) -> GGUFModel:
    """Returns the declaration of a model with experts, or of one without."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    words = next((config[key] for key in keys if config.get(key) is not None), ())
    sparse = isinstance(words, list | str) and bool({"E", "moe"} & set(words))
    return NEMOTRON_H_MOE if sparse else NEMOTRON_H


NEMOTRON_H = GGUFModel(
    "nemotron_h",
    keys=(
        k.block_count,
        _context,
        k.embedding_length,
        _widths,
        k.head_count,
        _kv_heads,
        _rope_base,
        _epsilons,
    ),
    late=(k.vocab_size, _rope_dimensions, *_STATE_SPACE, _unrotated, k.stated_head_sizes),
    defaults={
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    roles={
        **ROTATED,  # as the converter does, though nothing is rotated: it is the same for every pair of heads
        "norm": Written("attn_norm"),
        **_MAMBA2,
        "mlp.router_correction": Written("exp_probs_b", suffix=".bias"),
        "mlp.latent_in": Written("ffn_latent_down"),
        "mlp.latent_out": Written("ffn_latent_up"),
    },
    checks=(
        c.computes("mlp_hidden_act", "relu2"),
        c.computes("mamba_hidden_act", "silu"),
        c.computes("use_bias", False),
        c.computes("attention_bias", False),
        c.computes("mlp_bias", False),
        one_epsilon,
    ),
)


def _read_latent(file: Metadata) -> Json:
    return {"moe_latent_size": file.optional("moe_latent_size")}


@read_by(_read_latent)
def _latent(facts: Facts) -> Iterator[KV]:
    """Writes the width of the space in which experts work, where it is not the model's."""
    if facts.optional("moe_latent_size") is not None:
        yield facts.u32("moe_latent_size", facts.size("moe_latent_size"))


NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    arch="nemotron_h_moe",
    keys=(
        *NEMOTRON_H.keys,
        k.size("expert_count", "n_routed_experts"),
        k.size("expert_used_count", "num_experts_per_tok"),
        expert_groups,
    ),
    late=(
        *NEMOTRON_H.late,
        k.size("expert_feed_forward_length", "moe_intermediate_size"),
        k.size("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
        k.count("expert_shared_count", "n_shared_experts"),
        k.flag("expert_weights_norm", "norm_topk_prob"),
        k.number("expert_weights_scale", "routed_scaling_factor", 1.0),
        _latent,
    ),
)
NEMOTRON_H = replace(NEMOTRON_H, variant=_declaration, variants=(NEMOTRON_H_MOE,))


# Nemotron-NAS: every layer has its own heads and width.


def _nas_heads(facts: Facts) -> list[int]:
    """Returns each layer's heads: none where it has no attention, all where a linear stands for it."""
    heads = facts.size("num_attention_heads")
    return [heads if dims["attention"] else 0 for dims in facts.dimensions]


def _read_blocks(file: Metadata) -> Json:
    heads, kv_heads, widths = (
        listed_counts(file, name) for name in ("attention.head_count", _KV_HEADS, _WIDTH)
    )
    hidden = file.size("embedding_length")
    blocks = [
        {
            "attention": {
                "n_heads_in_group": each // kv if kv else None,
                "no_op": not each,
                "replace_with_linear": bool(each) and not kv,
            },
            "ffn": {
                "ffn_mult": width * 3 / (2 * hidden) if width else None,
                "no_op": not width,
                "replace_with_linear": False,
            },
        }
        for each, kv, width in zip(heads, kv_heads, widths, strict=True)
    ]
    return {"block_configs": blocks, "num_attention_heads": max(*heads, 1)}


@read_by(_read_blocks)
def _blocks(facts: Facts) -> Iterator[KV]:
    """Writes the heads and the inner width of every layer; 0 where it has none."""
    heads = _nas_heads(facts)
    plain = (dims["kv_heads"] if dims["kv_rows"] else 0 for dims in facts.dimensions)
    yield facts.by_layer(_KV_HEADS, plain)
    yield facts.by_layer("attention.head_count", heads)
    yield facts.by_layer(_WIDTH, (dims["intermediate"] for dims in facts.dimensions))


def known_blocks(facts: Facts) -> str | None:
    """Refuses a linear in place of a block, and attention without one: the graph leaves both out."""
    for layer, dims in enumerate(facts.dimensions):
        if dims["ffn_columns"]:
            what, does = f"a linear in place of layer {layer}'s ffn", "does not know"
        elif dims["attention"] and not dims["ffn"]:
            what, does = f"attention and no ffn in layer {layer}", "leaves out"
        else:
            continue
        return f"block_configs has {what}, which llama.cpp's deci {does}"
    return None


NEMOTRON_NAS = GGUFModel(
    "deci",
    keys=(
        k.llama_rope,
        _blocks,
        *k.SIZES[:3],
        k.rms_epsilon,
        k.stated_head_sizes,
    ),
    late=(k.vocab_size, k.rope_dimensions()),
    defaults=LLAMA.defaults,
    roles={**LLAMA.roles, "attn.linear": Written("attn_output")},
    constants=k.rope_freqs,
    checks=(*LLAMA.checks, c.square_attention, known_blocks),
)

MODELS = {"nemotron_h": NEMOTRON_H, "nemotron-nas": NEMOTRON_NAS, "deci": NEMOTRON_NAS}
