"""Declares Qwen3-Next and Qwen3.5: layers of gated DeltaNet with attention between them.

For Qwen3.5 llama.cpp repeats the heads of keys as a whole (k0 k1 k0 k1) where the class repeats each of
them (k0 k0 k1 k1), so everything indexed by value heads is permuted: the first value head of every key head,
the second of every one, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from qconvert.core.config_json import divide
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.qwen_hybrid import full_attention
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, derived, read_by
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata


def heads(facts: Facts) -> tuple[int, int]:
    """Returns the number of key heads, and of value heads per key head."""
    keys, values = facts.size("linear_num_key_heads"), facts.size("linear_num_value_heads")
    return keys, divide(values, keys, "linear_num_value_heads", "linear_num_key_heads")


def key_rows(facts: Facts) -> int:
    """Returns the rows of queries and keys, which are not permuted."""
    return 2 * facts.size("linear_num_key_heads") * facts.size("linear_key_head_dim")


def reordered(facts: Facts, size: int, first: int = 0) -> Iterator[range]:
    """Yields the rows of value heads of `size` rows each, in llama.cpp's order, after `first` others."""
    keys, share = heads(facts)
    starts = (first + (key * share + value) * size for value in range(share) for key in range(keys))
    return (range(start, start + size) for start in starts)


def value_rows(facts: Facts) -> Iterable[range]:
    """Returns the rows of a projection to values."""
    return reordered(facts, facts.size("linear_value_head_dim"))


def mixed_rows(facts: Facts) -> Iterable[range]:
    """Returns the rows of queries, keys and values."""
    first = key_rows(facts)
    return (range(first), *reordered(facts, facts.size("linear_value_head_dim"), first))


def head_rows(facts: Facts) -> Iterable[range]:
    """Returns one row for each value head."""
    return reordered(facts, 1)


def conv_shape(facts: Facts) -> tuple[int, ...]:
    """Returns the shape of the convolution over the last tokens, by channel."""
    values = facts.size("linear_num_value_heads") * facts.size("linear_value_head_dim")
    return key_rows(facts) + values, facts.size("linear_conv_kernel_dim")


def interval(facts: Facts) -> int:
    """Returns the first attention layer, counted from 1."""
    found = (i + 1 for i in range(facts.layers) if full_attention(facts.settings, i))
    return next(found, facts.layers + 1)


def _read_layers(file: Metadata) -> Json:
    step, layers = file.size("full_attention_interval"), range(1, file.layers + 1)
    return {"layer_types": ["linear_attention" if layer % step else "full_attention" for layer in layers]}


@derived
def recurrent_layers(facts: Facts) -> Iterator[KV]:
    """Writes the layers without attention, where the config lists them; they follow from the interval."""
    if facts.settings.get("layer_types") is not None:
        full = (full_attention(facts.settings, layer) for layer in range(facts.layers))
        yield facts.flags_by_layer("attention.recurrent_layers", (not each for each in full))


# The sizes of the DeltaNet, and which layers have attention instead.
STATE_SPACE = (
    k.size("ssm.conv_kernel", "linear_conv_kernel_dim"),
    k.size("ssm.state_size", "linear_key_head_dim"),
    k.size("ssm.group_count", "linear_num_key_heads"),
    k.size("ssm.time_step_rank", "linear_num_value_heads"),
    k.counted(
        "ssm.inner_size",
        lambda facts: facts.size("linear_value_head_dim") * facts.size("linear_num_value_heads"),
        lambda file: {
            "linear_value_head_dim": file.size("ssm.inner_size") // file.size("ssm.time_step_rank")
        },
    ),
    recurrent_layers,
    k.counted("full_attention_interval", interval, _read_layers),
)


def _read_sections(file: Metadata) -> Json:
    """Reads the whole rotary embedding, which the class has under its newer keys only."""
    parts = file.values("rope.dimension_sections")
    rope = {**k.read_rope(file), **k.rotated(file)}
    known = {"mrope_section": list(parts[:3]), "mrope_interleaved": True}
    return {"rope_parameters": {"rope_type": "default", **rope.pop("rope_scaling", {}), **rope, **known}}


@read_by(_read_sections)
def sections(facts: Facts) -> Iterator[KV]:
    """Writes how the rotated part is divided between time, height and width; equal for text."""
    stated = k.rope_of(facts).get("mrope_section") or facts.settings["mrope_section"]
    parts = [part for part in stated if isinstance(part, int)]
    yield facts.by_layer("rope.dimension_sections", (parts + [0] * 4)[:4])


def attention_at_intervals(facts: Facts) -> str | None:
    """Refuses attention layers that are not at regular intervals, which the loader assumes."""
    step = interval(facts)
    odd = (i for i in range(facts.layers) if full_attention(facts.settings, i) != ((i + 1) % step == 0))
    layer = next(odd, None)
    if layer is None:
        return None
    return f"layer_types has layer {layer} out of turn; llama.cpp takes every {step}th"


def heads_alike(facts: Facts) -> str | None:
    """Refuses heads of different sizes: the graph has one size."""
    keys, values = facts.size("linear_key_head_dim"), facts.size("linear_value_head_dim")
    if keys == values:
        return None
    return f"linear_key_head_dim is {keys}, linear_value_head_dim {values}; llama.cpp has one"


SHIFTED = Written(change="plus_one")
HYBRID = GGUFModel(
    "qwen35",
    keys=k.decoder(),
    late=(*STATE_SPACE, k.rope_dimensions(0.25), sections),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "mrope_section": [11, 11, 10],
    },
    roles={
        "attn.norm": SHIFTED,
        "mlp.norm": Written("post_attention_norm", "plus_one"),
        "attn.q_norm": SHIFTED,
        "attn.k_norm": SHIFTED,
        "final_norm": SHIFTED,
        "delta.qkv": Written("attn_qkv", rows=mixed_rows),
        "delta.z": Written("attn_gate", rows=value_rows),
        "delta.b": Written("ssm_beta", rows=head_rows),
        "delta.a": Written("ssm_alpha", rows=head_rows),
        "delta.A_log": Written("ssm_a", "minus_exp", rows=head_rows, suffix=""),
        "delta.dt_bias": Written("ssm_dt", rows=head_rows, suffix=".bias"),
        "delta.conv": Written("ssm_conv1d", rows=mixed_rows, shape=conv_shape),
        "delta.norm": Written("ssm_norm"),
        "delta.o": Written("ssm_out", "swap_groups", groups=heads),
    },
    checks=(SILU, heads_alike, attention_at_intervals),
)
HYBRID_MOE = replace(
    HYBRID,
    arch="qwen35moe",
    keys=tuple(keys for keys in k.decoder(more=(k.expert_counts,)) if keys is not k.feed_forward_length),
    late=(k.expert_widths, *HYBRID.late),
    defaults={**HYBRID.defaults, "num_key_value_heads": 2},
)


def joined_rows(parts: tuple[int, ...]) -> Callable[[Facts], Iterator[range]]:
    """Returns what yields these parts of `in_proj_qkvz` (q, k, v, z: 0 to 3), each over all key heads."""

    def rows(facts: Facts) -> Iterator[range]:
        keys, share = heads(facts)
        size, value = facts.size("linear_key_head_dim"), share * facts.size("linear_value_head_dim")
        bounds = (0, size, 2 * size, 2 * size + value, 2 * (size + value))
        for part in parts:
            for start in range(0, keys * bounds[4], bounds[4]):
                yield range(start + bounds[part], start + bounds[part + 1])

    return rows


# Its graph has the class's order of value heads, and experts in every layer.
QWEN3_NEXT = replace(
    HYBRID_MOE,
    arch="qwen3next",
    late=(k.expert_widths, *STATE_SPACE, k.rope_dimensions(0.25)),
    defaults={**HYBRID_MOE.defaults, "norm_topk_prob": True},
    keys=k.decoder(more=(k.expert_counts,)),
    roles={
        **{role: HYBRID.roles[role] for role in ("attn.norm", "mlp.norm", "attn.q_norm", "attn.k_norm")},
        "final_norm": SHIFTED,
        "delta.qkvz": (
            Written("attn_qkv", rows=joined_rows((0, 1, 2))),
            Written("attn_gate", rows=joined_rows((3,))),
        ),
        "delta.ba": Written("ssm_ba"),
        "delta.A_log": Written("ssm_a", "minus_exp", suffix=""),
        "delta.dt_bias": Written("ssm_dt", suffix=".bias"),
        "delta.conv": Written("ssm_conv1d", shape=conv_shape),
        "delta.norm": Written("ssm_norm"),
        "delta.o": Written("ssm_out"),
    },
    checks=(*HYBRID.checks, c.normalises_experts(True), c.experts_everywhere),
)

# The types of language models alone come first: a file is read back as one.
MODELS = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": HYBRID,
    "qwen3_5": HYBRID,
    "qwen3_5_moe_text": HYBRID_MOE,
    "qwen3_5_moe": HYBRID_MOE,
}
