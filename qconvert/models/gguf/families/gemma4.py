"""Declares Gemma 3n and Gemma 4: heads of two sizes, shared keys and values, inputs of each layer."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.gemma4 import FULL, SLIDING, kind_of
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import (
    Constant,
    Facts,
    GGUFModel,
    Written,
    derived,
    made_and_read,
    positive,
    read_by,
)
from qconvert.models.gguf.families.gemma import GEMMA3
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.gguf.names import ROPE_FREQS
from qconvert.models.rope import rope_fields

_PATTERN, _WIDTH = "attention.sliding_window_pattern", "feed_forward_length"
# A divisor so large that the angle is 0: what is not rotated. Source: Gemma4Model in llama.cpp's converter.
_STILL = 1e30


def layer_types(file: Metadata) -> list[str]:
    """Returns the kind of attention of every layer."""
    return [SLIDING if sliding else FULL for sliding in file.values(_PATTERN)]


def of_kind(file: Metadata, name: str, kind: str) -> int:
    """Returns the count that the first layer of a kind has under a key."""
    found = (count for count, each in zip(file.counts(name), layer_types(file), strict=True) if each == kind)
    return next(found, file.counts(name)[0])


def _read_widths(file: Metadata) -> Json:
    widths = file.counts(_WIDTH)
    if min(widths) == max(widths):
        return {"intermediate_size": widths[0], "use_double_wide_mlp": False}
    return {"intermediate_size": min(widths), "use_double_wide_mlp": True}


@read_by(_read_widths)
def _widths(facts: Facts) -> Iterator[KV]:
    """Writes the inner width of a dense block, by layer where layers that share keys are wider."""
    widths = [dims["intermediate"] for dims in facts.dimensions]
    if facts.flag("use_double_wide_mlp"):
        yield facts.by_layer(_WIDTH, widths)
    else:
        yield facts.u32(_WIDTH, widths[0])


def _read_kv_heads(file: Metadata) -> Json:
    name = "attention.head_count_kv"
    return {
        "num_key_value_heads": of_kind(file, name, SLIDING),
        "num_global_key_value_heads": of_kind(file, name, FULL),
    }


@read_by(_read_kv_heads)
def _kv_heads(facts: Facts) -> Iterator[KV]:
    """Writes the heads of keys, by layer where those with full attention have another number."""
    heads = [dims["kv_heads"] for dims in facts.dimensions]
    if len(set(heads)) > 1 or facts.settings.get("num_global_key_value_heads") is not None:
        yield facts.by_layer("attention.head_count_kv", heads)
    else:
        yield facts.u32("attention.head_count_kv", heads[0])


def _read_bases(file: Metadata) -> Json:
    share = 1.0
    if ROPE_FREQS in file.tensors:
        factors = file.numbers(ROPE_FREQS)
        share = factors.count(1.0) / len(factors)
    full = {"rope_type": "proportional", "partial_rotary_factor": share}
    return {
        "rope_parameters": {
            FULL: {**full, "rope_theta": file.number("rope.freq_base", 1e6)},
            SLIDING: {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 1e4)},
        }
    }


@read_by(_read_bases)
def _bases(facts: Facts) -> Iterator[KV]:
    """Writes the bases of the rotary embeddings of full and of sliding attention."""
    yield facts.f32("rope.freq_base", positive(rope_fields(facts.settings), "rope_theta"))
    yield facts.f32("rope.freq_base_swa", positive(rope_fields(facts.settings, SLIDING), "rope_theta"))


def _read_experts(file: Metadata) -> Json:
    if not file.count("expert_count"):
        return {"enable_moe_block": False, "num_experts": None, "top_k_experts": None}
    used = file.size("expert_used_count")
    return {"enable_moe_block": True, "num_experts": file.size("expert_count"), "top_k_experts": used}


@read_by(_read_experts)
def _experts(facts: Facts) -> Iterator[KV]:
    if facts.flag("enable_moe_block"):
        yield facts.u32("expert_count", facts.size("num_experts"))
        yield facts.u32("expert_used_count", facts.size("top_k_experts"))


def full_head(facts: Facts) -> int:
    """Returns the size of a head in layers with full attention."""
    sizes = (dims["head_dim"] for layer, dims in enumerate(facts.dimensions) if kind(facts, layer) == FULL)
    return next(sizes)


def kind(facts: Facts, layer: int) -> str:
    """Returns a layer's kind of attention."""
    return kind_of(facts.settings, layer, 6)


@read_by(lambda file: {"global_head_dim": file.size("attention.key_length")})
def _full_heads(facts: Facts) -> Iterator[KV]:
    yield facts.u32("attention.key_length", full_head(facts))
    yield facts.u32("attention.value_length", full_head(facts))


@read_by(lambda file: {"head_dim": file.size("attention.key_length_swa")})
def _sliding_heads(facts: Facts) -> Iterator[KV]:
    yield facts.u32("attention.key_length_swa", k.head_size(facts.settings))
    yield facts.u32("attention.value_length_swa", k.head_size(facts.settings))


@read_by(lambda file: {"layer_types": layer_types(file)})
def _pattern(facts: Facts) -> Iterator[KV]:
    """Writes which layers see a window alone."""
    sliding = (kind(facts, layer) == SLIDING for layer in range(facts.layers))
    yield facts.flags_by_layer(_PATTERN, sliding)


def _read_inputs(file: Metadata) -> Json:
    width = file.count("embedding_length_per_layer_input")
    return {
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": file.tensors["per_layer_token_embd.weight"].shape[0] if width else 0,
        "num_kv_shared_layers": file.count("attention.shared_kv_layers"),
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in file.tensors
            for layer, each in enumerate(layer_types(file))
            if each == FULL and f"blk.{layer}.attn_k.weight" in file.tensors
        ),
    }


@read_by(_read_inputs)
def _inputs(facts: Facts) -> Iterator[KV]:
    """Writes how many of the last layers take the keys of others, and the width of each layer's inputs."""
    yield facts.u32("attention.shared_kv_layers", facts.count("num_kv_shared_layers"))
    yield facts.u32("embedding_length_per_layer_input", facts.count("hidden_size_per_layer_input"))


def _read_expert_width(file: Metadata) -> Json:
    return {"moe_intermediate_size": file.optional("expert_feed_forward_length")}


@read_by(_read_expert_width)
def _expert_width(facts: Facts) -> Iterator[KV]:
    if facts.optional("moe_intermediate_size") is not None:
        yield facts.u32("expert_feed_forward_length", facts.size("moe_intermediate_size"))


@derived
def _rotated(facts: Facts) -> Iterator[KV]:
    """Writes the rotated dimensions: whole heads, the rest of which `_freqs` keeps still."""
    yield facts.u32("rope.dimension_count", full_head(facts))
    yield facts.u32("rope.dimension_count_swa", k.head_size(facts.settings))


@made_and_read(lambda file: {})
def _freqs(facts: Facts) -> Iterator[Constant]:
    """The divisors of the frequencies in full attention: 1, and for dimensions that stay, infinity almost."""
    head = full_head(facts)
    moved = int(head * positive(rope_fields(facts.settings), "partial_rotary_factor") / 2)
    yield Constant(ROPE_FREQS, (1.0,) * moved + (_STILL,) * (head // 2 - moved))


def known_ropes(facts: Facts) -> str | None:
    """Refuses other rotary embeddings than those of the graph."""
    kinds = (rope_fields(facts.settings)["rope_type"], rope_fields(facts.settings, SLIDING)["rope_type"])
    if kinds == ("proportional", "default"):
        return None
    return (
        f"rope_type is {kinds[0]!r} and {kinds[1]!r}, but llama.cpp's gemma4 has 'proportional' and 'default'"
    )


def any_full(facts: Facts) -> str | None:
    """Refuses a model without full attention, from whose heads llama.cpp takes the sizes."""
    if any(kind(facts, layer) == FULL for layer in range(facts.layers)):
        return None
    return "no layer has full attention, from which llama.cpp's gemma4 takes the sizes of its heads"


def keys_to_share(facts: Facts) -> str | None:
    """Refuses shared keys unless the graph takes the right ones: of the last two layers with their own."""
    shared = facts.count("num_kv_shared_layers")
    first = facts.layers - shared
    if not shared or (first >= 2 and [kind(facts, first - 2), kind(facts, first - 1)] == [SLIDING, FULL]):
        return None
    return (
        f"num_kv_shared_layers is {shared}, but the two layers before these are not sliding and full "
        "attention, whose keys llama.cpp's gemma4 takes"
    )


PER_LAYER = {
    "per_layer.table": Written("per_layer_token_embd"),
    "per_layer.model": Written("per_layer_model_proj"),
    "per_layer.model_norm": Written("per_layer_proj_norm"),
    "per_layer.gate": Written("inp_gate"),
    "per_layer.out": Written("proj"),
    "per_layer.norm": Written("post_norm"),
}
_CHECKS = (*GEMMA3.checks[:1], c.computes("attention_bias", False), any_full, known_ropes, keys_to_share)
GEMMA4 = GGUFModel(
    "gemma4",
    keys=(
        *k.SIZES[:3],
        _widths,
        k.head_count,
        _kv_heads,
        _bases,
        k.rms_epsilon,
        _experts,
        _full_heads,
    ),
    late=(
        k.optional_number("final_logit_softcapping", "final_logit_softcapping"),
        k.sliding_window,
        _inputs,
        _pattern,
        _sliding_heads,
        _expert_width,
        _rotated,
    ),
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    roles={
        **PER_LAYER,
        "mlp.norm_2": Written("pre_ffw_norm_2"),
        "mlp.post_norm_1": Written("post_ffw_norm_1"),
        "mlp.post_norm_2": Written("post_ffw_norm_2"),
        "mlp.router_scale": Written("ffn_gate_inp", suffix=".scale"),
        "mlp.expert_scale": Written("ffn_down_exps", suffix=".scale"),
        "layer_scale": Written("layer_output_scale"),
    },
    whole=("mlp.experts.gate_up",),
    constants=_freqs,
    checks=_CHECKS,
)

MODELS = {"gemma4_text": GEMMA4, "gemma4": GEMMA4}
