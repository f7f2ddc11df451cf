"""Declares Granite: dense, with experts, and with layers of Mamba-2 (Granite 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, read_by
from qconvert.models.gguf.families.llama import LLAMA, SILU
from qconvert.models.gguf.families.mamba2 import Mamba2Sizes, unlimited_steps
from qconvert.models.gguf.families.nemotron import listed_counts
from qconvert.models.gguf.metadata import Metadata

_SCALES = (
    k.number("attention.scale", "attention_multiplier"),
    k.number("embedding_scale", "embedding_multiplier"),
    k.number("residual_scale", "residual_multiplier"),
    k.number("logit_scale", "logits_scaling"),
)


def _read_rotated(file: Metadata) -> Json:
    """Reads nothing, and refuses files whose positions are not rotated: they are Granite 4's."""
    if file.flag("rope.scaling.finetuned", default=True):
        return {}
    raise file.wrong("rope.scaling.finetuned", "false: positions are not rotated, as in Granite 4")


GRANITE = replace(
    LLAMA,
    arch="granite",
    late=(k.vocab_size, k.rope_dimensions(), *_SCALES, k.read_only(_read_rotated)),
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    remarks=(),
)

_EXPERTS = k.together(
    k.size("expert_count", "num_local_experts"), k.size("expert_used_count", "num_experts_per_tok")
)
GRANITE_MOE = replace(
    GRANITE,
    arch="granitemoe",
    keys=k.decoder(rope=k.llama_rope, more=(_EXPERTS,)),
    defaults={**GRANITE.defaults, "num_experts_per_tok": 2},
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    late=(*GRANITE.late, k.size("expert_shared_feed_forward_length", "shared_intermediate_size")),
)


# What the converter writes for models of state spaces, whatever their config says.
_CONTEXT = 1 << 20


def _rotates(facts: Facts) -> bool:
    return facts.settings.get("position_embedding_type") == "rope"


def _read_kinds(file: Metadata) -> Json:
    heads = listed_counts(file, "attention.head_count_kv")
    kinds = ["attention" if each else "mamba" for each in heads]
    return {"layer_types": kinds, "num_key_value_heads": max(*heads, 1)}


@read_by(_read_kinds)
def _kv_heads(facts: Facts) -> Iterator[KV]:
    """Writes the heads of keys in layers with attention, 0 in the others."""
    heads = (dims["kv_heads"] if dims["kv_rows"] else 0 for dims in facts.dimensions)
    yield facts.by_layer("attention.head_count_kv", heads)


def _read_context(file: Metadata) -> Json:
    return {"max_position_embeddings": file.size("context_length")}


@read_by(_read_context)
def _context(facts: Facts) -> Iterator[KV]:
    """Writes the context, which nothing bounds where positions are not rotated."""
    yield facts.u32("context_length", facts.size("max_position_embeddings") if _rotates(facts) else _CONTEXT)


def _read_rotation(file: Metadata) -> Json:
    rotated = file.flag("rope.scaling.finetuned", default=True)
    return {"position_embedding_type": "rope" if rotated else "nope"}


@read_by(_read_rotation)
def _rotation(facts: Facts) -> Iterator[KV]:
    """Writes whether positions are rotated, under the key that the graph takes for it."""
    yield facts.flagged("rope.scaling.finetuned", value=_rotates(facts))


def inner(facts: Facts) -> int:
    """Returns the width inside a Mamba-2 mixer."""
    return (facts.optional("mamba_expand") or 2) * facts.size("hidden_size")


MAMBA2 = Mamba2Sizes(
    heads="mamba_n_heads",
    groups="mamba_n_groups",
    state="mamba_d_state",
    kernel="mamba_d_conv",
    inner=inner,
    inner_name="mamba_expand x hidden_size",
).roles()


def _read_head(file: Metadata) -> Json:
    heads, width = file.size("ssm.time_step_rank"), file.size("ssm.inner_size")
    expand = max(1, width // file.size("embedding_length"))
    return {"mamba_d_head": max(1, width // heads), "mamba_expand": expand}


def _twice_as_wide(facts: Facts) -> str | None:
    """Refuses mixers that are not twice as wide as the model: the loader stops at them."""
    expand = facts.optional("mamba_expand") or 2
    return None if expand == 2 else f"mamba_expand is {expand}, and llama.cpp's {facts.model.arch} has 2"


_COUNTS = k.together(
    k.count("expert_count", "num_local_experts"), k.count("expert_used_count", "num_experts_per_tok")
)
_WIDTH = "feed_forward_length"


def _read_widths(file: Metadata) -> Json:
    sparse = file.count("expert_count") > 0
    own, shared = file.size(_WIDTH), file.optional("expert_shared_feed_forward_length")
    return {"intermediate_size": own, "shared_intermediate_size": shared if sparse else own}


@read_by(_read_widths)
def _width(facts: Facts) -> Iterator[KV]:
    """Writes the inner width of an expert, or of the one block."""
    dims = facts.dimensions[0]
    yield facts.u32(_WIDTH, dims["expert_rows"] or dims["intermediate"])


_SHARED = k.size("expert_shared_feed_forward_length", "shared_intermediate_size")
_GRANITE4_KEYS = (k.head_count, k.llama_rope, k.rms_epsilon, _COUNTS)
GRANITE4 = GGUFModel(
    "granitehybrid",
    keys=(
        k.block_count,
        _context,
        k.embedding_length,
        _width,
        k.head_count,
        _kv_heads,
        *_GRANITE4_KEYS[1:],
        k.head_sizes,
    ),
    late=(
        k.vocab_size,
        k.rope_dimensions(),
        *_SCALES,
        Keys(_SHARED.write),
        k.size("ssm.conv_kernel", "mamba_d_conv"),
        k.size("ssm.state_size", "mamba_d_state"),
        k.size("ssm.group_count", "mamba_n_groups"),
        k.counted("ssm.inner_size", inner, _read_head),
        k.size("ssm.time_step_rank", "mamba_n_heads"),
        _rotation,
    ),
    defaults={**GRANITE.defaults, "num_experts_per_tok": 2},
    roles={**LLAMA.roles, **MAMBA2},
    constants=k.rope_freqs,
    checks=(SILU, _twice_as_wide, unlimited_steps, c.computes("mamba_proj_bias", False)),
)


def _rotates_everywhere(facts: Facts) -> str | None:
    if _rotates(facts):
        return None
    return "positions are not rotated in a model without Mamba, which llama.cpp's granitemoe does not know"


_KINDS = k.read_only(lambda file: {"layer_types": ["attention"] * file.layers})
_ATTENTION_ALONE = (_width, k.head_count, k.head_count_kv, *_GRANITE4_KEYS[1:], _KINDS)
# Without layers of Mamba-2 the model is a Granite of another graph.
GRANITE4_MOE = replace(
    GRANITE_MOE_SHARED,
    keys=(k.block_count, k.context_length, k.embedding_length, *_ATTENTION_ALONE, k.head_sizes),
    roles={**GRANITE.roles, **MAMBA2},
    checks=(SILU, _rotates_everywhere),
)
GRANITE4_DENSE = replace(
    GRANITE,
    keys=(k.block_count, _context, k.embedding_length, *_ATTENTION_ALONE, k.head_sizes),
    late=(*GRANITE.late[:-1], _rotation),
    roles={**GRANITE.roles, **MAMBA2},
    checks=(SILU,),
)


def _granite4(config: Json) -> GGUFModel:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if not {"attention", "full_attention"} >= set(kinds):
        return GRANITE4
    return GRANITE4_MOE if config.get("num_local_experts") else GRANITE4_DENSE


MODELS = {
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "granitemoeshared": GRANITE_MOE_SHARED,
    "granitemoehybrid": replace(GRANITE4, variant=_granite4, variants=(GRANITE4_MOE, GRANITE4_DENSE)),
}
