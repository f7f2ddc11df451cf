"""Declares Step-3.5 and 3.7: windows in most layers, with other heads, gates on heads, clamped experts."""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.core.config_json import optional_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import shortest
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families.common import entry
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import (
    Constant,
    Facts,
    GGUFModel,
    Written,
    made_and_read,
    positive,
    read_by,
)
from qconvert.models.gguf.families.deepseek import gating, known_gating
from qconvert.models.gguf.families.gemma import PLUS_ONE
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.families.nemotron import listed_counts
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.rope import rope_fields

_HEADS, _PATTERN = "attention.head_count", "attention.sliding_window_pattern"
FULL, SLIDING = "full_attention", "sliding_attention"
_CLAMPS = (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp"))
# What the graph rotates of a head in layers with full attention, and in those with a window.
_SHARES = {FULL: 0.5, SLIDING: 1.0}


def _kind(facts: Facts, layer: int) -> str:
    return entry(facts.settings, "layer_types", layer) or FULL


def _windowed(file: Metadata) -> tuple[bool, ...]:
    return tuple(bool(mark) for mark in file.values(_PATTERN))


def _read_heads(file: Metadata) -> Json:
    heads = listed_counts(file, _HEADS)
    of = dict(zip(reversed(_windowed(file)), reversed(heads), strict=True))
    plain = of.get(False, heads[0])
    return {"num_attention_heads": plain, "num_sliding_attention_heads": of.get(True, plain)}


@read_by(_read_heads)
def _heads(facts: Facts) -> Iterator[KV]:
    yield facts.by_layer(_HEADS, (dims["heads"] for dims in facts.dimensions))


def _read_kv_heads(file: Metadata) -> Json:
    return {"num_key_value_heads": listed_counts(file, "attention.head_count_kv")[0]}


@read_by(_read_kv_heads)
def _kv_heads(facts: Facts) -> Iterator[KV]:
    size = k.head_size(facts.settings)
    yield facts.by_layer("attention.head_count_kv", (dims["kv_rows"] // size for dims in facts.dimensions))


def _rope(facts: Facts, kind: str) -> Json:
    """The rotary embedding of the layers of a kind, of configs with a set for each or a list by layer.

    `rope_scaling` is that of the layers with full attention alone (transformers' `Step3p7TextConfig`).
    """
    settings, layer = facts.settings, _first(facts, kind)
    if isinstance(settings.get("rope_parameters"), dict):
        found = rope_fields({**settings, "rope_scaling": None}, kind)
        return {"partial_rotary_factor": 1.0, **found}
    base, shares = settings.get("rope_theta", 10000.0), settings.get("partial_rotary_factors")
    scaling = settings.get("rope_scaling") if kind == FULL else None
    given = {"rope_theta": _of_layer(base, "rope_theta", layer)}
    given |= {"partial_rotary_factor": _of_layer(shares or 1.0, "partial_rotary_factors", layer)}
    return {**rope_fields({**given, "rope_scaling": scaling}), **given}


def _first(facts: Facts, kind: str) -> int:
    return next((layer for layer in range(facts.layers) if _kind(facts, layer) == kind), 0)


def _of_layer(value: object, key: str, layer: int) -> object:
    if not isinstance(value, list):
        return value
    if layer >= len(value):
        raise CorruptCheckpoint(f"config.json: {key} has no entry {layer}")
    return value[layer]


def _read_bases(file: Metadata) -> Json:
    kinds = {FULL: "rope.freq_base", SLIDING: "rope.freq_base_swa"}
    return {
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": file.number(name, 10000.0),
                "partial_rotary_factor": _SHARES[kind],
                **(_scaling(file) if kind == FULL else {}),
            }
            for kind, name in kinds.items()
        }
    }


def _scaling(file: Metadata) -> Json:
    if file.scaling is None:
        return {}
    return k.read_scaling(file, file.scaling(file.number("rope.freq_base", 10000.0), file.head_size // 4))


@read_by(_read_bases)
def _bases(facts: Facts) -> Iterator[KV]:
    """Writes the bases of the rotary embeddings of layers with full attention and with a window."""
    yield facts.f32("rope.freq_base", positive(_rope(facts, FULL), "rope_theta"))
    yield facts.f32("rope.freq_base_swa", positive(_rope(facts, SLIDING), "rope_theta"))


@made_and_read(lambda file: {})
def _freqs(facts: Facts) -> Iterator[Constant]:
    """The divisors of the frequencies of half a head in full attention; 1 to the end of the vector."""
    head = k.head_size(facts.settings)
    if _rope(facts, FULL)["rope_type"] == "llama3":
        yield k.llama3_divisors(_rope(facts, FULL), head // 2, head)


def known_ropes(facts: Facts) -> str | None:
    """Refuses other rotary embeddings than those of the graph."""
    for kind in (FULL, SLIDING):
        if kind not in {_kind(facts, layer) for layer in range(facts.layers)}:
            continue
        rope = _rope(facts, kind)
        if rope["rope_type"] not in ("default", *(["llama3"] if kind == FULL else [])):
            return f"rope_type of {kind} is {rope['rope_type']!r}, which llama.cpp's step35 does not have"
        if rope["partial_rotary_factor"] != _SHARES[kind]:
            return (
                f"partial_rotary_factor of {kind} is {rope['partial_rotary_factor']}, but llama.cpp's step35 "
                f"rotates {_SHARES[kind]:g} of a head there"
            )
    return None


@read_by(lambda file: {"sliding_window": file.size("attention.sliding_window")})
def _window(facts: Facts) -> Iterator[KV]:
    yield facts.u32("attention.sliding_window", facts.size("sliding_window"))


@read_by(lambda file: {"layer_types": [SLIDING if each else FULL for each in _windowed(file)]})
def _pattern(facts: Facts) -> Iterator[KV]:
    yield facts.flags_by_layer(_PATTERN, (_kind(facts, layer) == SLIDING for layer in range(facts.layers)))


def _used(facts: Facts) -> int:
    """The experts of a token, under either of the names that published configs have."""
    return optional_int(facts.settings, "moe_top_k") or facts.size("num_experts_per_tok")


_expert_counts = k.together(
    k.size("expert_count", "num_experts"),
    k.counted(
        "expert_used_count", _used, lambda file: {"num_experts_per_tok": file.size("expert_used_count")}
    ),
    k.size("expert_feed_forward_length", "moe_intermediate_size"),
    k.size("expert_shared_feed_forward_length", "share_expert_dim"),
    k.number("expert_weights_scale", "moe_router_scaling_factor", 1.0),
    k.flag("expert_weights_norm", "norm_expert_weight"),
)


def _read_dense(file: Metadata) -> Json:
    sparse = (f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(file.layers))
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in sparse]}


@read_by(_read_dense)
def _dense(facts: Facts) -> Iterator[KV]:
    """Writes the dense layers before the first with experts; the loader goes by the tensors of a layer."""
    experts = (layer for layer, dims in enumerate(facts.dimensions) if dims["experts"])
    yield facts.u32("leading_dense_block_count", next(experts, 0))
    yield facts.u32("moe_every_n_layers", 1)


def _read_clamps(file: Metadata) -> Json:
    return {
        key: [shortest(float(str(number))) for number in file.values(name)]
        for key, name in _CLAMPS
        if file.has(name)
    }


@read_by(_read_clamps)
def _clamps(facts: Facts) -> Iterator[KV]:
    """Writes the bounds of the gates of experts, and of dense and shared blocks: 0 for none."""
    for key, name in _CLAMPS:
        stated = facts.settings.get(key)
        if stated is None:
            continue
        if not isinstance(stated, list) or len(stated) < facts.layers:
            raise CorruptCheckpoint(f"config.json: {key} is not a number for each layer")
        bounds = [positive({key: value}, key) if value else 0.0 for value in stated[: facts.layers]]
        yield KV.f32s(f"{facts.model.arch}.{name}", bounds)


STEP = GGUFModel(
    "step35",
    keys=(*k.SIZES[:4], _heads, _bases, k.rms_epsilon, gating("sigmoid"), k.stated_head_sizes),
    late=(_kv_heads, _window, _pattern, _expert_counts, _dense, _clamps),
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "num_experts_per_tok": 8,
        "moe_router_scaling_factor": 1.0,
        "norm_expert_weight": True,
        "scoring_func": "sigmoid",
        "head_dim": 128,
    },
    roles={
        **PLUS_ONE,
        "attn.head_gate": Written("attn_gate"),
        "mlp.router_correction": Written("exp_probs_b", suffix=".bias"),
    },
    head="required",
    constants=_freqs,
    checks=(
        SILU,
        known_gating,
        known_ropes,
        c.computes("scoring_func", "sigmoid"),
        c.computes("moe_router_activation", "sigmoid"),
        c.computes("norm_expert_weight", True),
        c.computes("attention_bias", False),
        c.computes("mlp_bias", False),
        c.computes("gating", True),
        c.computes("use_bidirectional_attention", False),
    ),
)

MODELS = {"step3p7": STEP, "step3p5": STEP}
