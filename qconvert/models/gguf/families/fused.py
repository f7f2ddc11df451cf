"""Declares models whose loaders in llama.cpp want linears fused: Phi-3, ChatGLM, GLM-4, Falcon, OpenELM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.config_json import positive_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.errors import CorruptCheckpoint
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import (
    Constant,
    Facts,
    GGUFModel,
    Keys,
    Written,
    derived,
    made_and_read,
    positive,
    read_by,
)
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.metadata import Metadata

QKV, GATE_UP = "attn.qkv", "mlp.gate_up"
# The loaders of these models split the tensor `ffn_up`.
_HALVED = {GATE_UP: Written("ffn_up")}


def _context_before(facts: Facts) -> int:
    settings = {"original_max_position_embeddings": facts.size("max_position_embeddings"), **facts.settings}
    return positive_int({**settings, **k.rope_of(facts)}, "original_max_position_embeddings")


def _read_context(file: Metadata) -> Json:
    context = file.size("context_length")
    before = file.optional("rope.scaling.original_context_length") or context
    return {"max_position_embeddings": context, "original_max_position_embeddings": before}


@read_by(_read_context)
def _phi3_context(facts: Facts) -> Iterator[KV]:
    yield from k.context_length(facts)
    yield facts.u32("rope.scaling.original_context_length", _context_before(facts))


# LongRoPE's names in configs.
LONG = ("su", "longrope")
_phi3_rope = k.together(k.rope_dimensions(1.0), k.rope_kinds("default", *LONG))


_phi3_window = k.counted(
    "attention.sliding_window",
    lambda facts: facts.count("sliding_window"),
    lambda file: {"sliding_window": file.optional("attention.sliding_window")},
)


@derived
def _phi3_attention_factor(facts: Facts) -> Iterator[KV]:
    """Writes the attention factor of long contexts: sqrt(1 + ln(growth) / ln(original context))."""
    if k.rope_of(facts)["rope_type"] == "default":
        return
    before = _context_before(facts)
    growth = facts.size("max_position_embeddings") / before
    factor = math.sqrt(1 + math.log(growth) / math.log(before)) if growth > 1 else 1.0
    yield facts.f32("rope.scaling.attn_factor", factor)


def _read_factors(file: Metadata) -> Json:
    names = {kind: f"rope_factors_{kind}.weight" for kind in ("long", "short")}
    if not all(name in file.tensors for name in names.values()):
        return {}
    factors = {f"{kind}_factor": list(file.numbers(name)) for kind, name in names.items()}
    return {"rope_scaling": {"rope_type": "longrope", "type": "longrope", **factors}}


@made_and_read(_read_factors)
def rope_factors(facts: Facts) -> Iterator[Constant]:
    """The divisors of frequencies in texts that are long, and that are not."""
    rope = k.rope_of(facts)
    if rope["rope_type"] == "default":
        return
    for kind in ("long", "short"):
        values = rope.get(f"{kind}_factor")
        if not isinstance(values, list) or len(values) * 2 > k.head_size(facts.settings):
            raise CorruptCheckpoint(
                f"config.json: {kind}_factor is not a list of divisors", "fetch the model's config.json again"
            )
        numbers = {str(i): value for i, value in enumerate(values)}
        yield Constant(f"rope_factors_{kind}.weight", tuple(positive(numbers, key) for key in numbers))


_USUAL = (k.embedding_length, k.feed_forward_length, k.block_count, k.head_count)
PHI3 = GGUFModel(
    "phi3",
    keys=(_phi3_attention_factor, _phi3_context, *_USUAL, k.head_count_kv, k.rms_epsilon, _phi3_rope),
    late=(_phi3_window,),
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    roles=_HALVED,
    whole=(QKV, GATE_UP),
    constants=rope_factors,
    checks=(SILU, c.square_attention),
    remarks=(c.window_left_out,),
)


@read_by(lambda file: {"num_key_value_heads": k.kv_heads(file), "head_dim": file.head_size})
def _kv_heads(facts: Facts) -> Iterator[KV]:
    dims = facts.dimensions[0]
    yield facts.u32("attention.head_count_kv", dims["kv_rows"] // dims["head_dim"])


@read_by(lambda file: {"rope_ratio": file.number("rope.freq_base", 10000.0) / 10000.0})
def _glm_base(facts: Facts) -> Iterator[KV]:
    yield facts.f32("rope.freq_base", 10000.0 * facts.number("rope_ratio"))


# GLM's tokens that end a turn or a tool call, which are in none of its files. Source: _set_vocab_glm in
# llama.cpp's converter.
GLM_SPECIAL = {"eos": "<|endoftext|>", "unk": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>"}
CHATGLM = GGUFModel(
    "chatglm",
    keys=(
        k.size("context_length", "seq_length"),
        *_USUAL,
        _kv_heads,
        k.rms_epsilon_of("layernorm_epsilon"),
        # All of q comes before all of k, so the heads are not grouped.
        k.read_only(lambda file: {"multi_query_attention": True}),
    ),
    late=(k.rope_dimensions(0.5), _glm_base),
    defaults={"seq_length": 2048, "layernorm_epsilon": 1e-5, "rope_ratio": 1.0, "rmsnorm": True},
    special=GLM_SPECIAL,
    roles=_HALVED,
    whole=(QKV, GATE_UP),
    checks=(
        c.square_attention,
        c.computes("rmsnorm", True),
        c.computes("add_bias_linear", False),
        c.computes("apply_residual_connection_post_layernorm", False),
        c.computes("post_layer_norm", True),
    ),
)
GLM = replace(
    CHATGLM,
    keys=(k.context_length, *_USUAL, k.head_count_kv, k.rms_epsilon),
    late=(k.rope_dimensions(0.5), k.rope_kinds("default")),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    whole=(GATE_UP,),
    checks=(SILU, c.square_attention),
)
GLM4 = replace(GLM, arch="glm4", keys=k.decoder(), late=(k.rope_dimensions(0.5),), checks=(SILU,))


def _generation(file: Metadata) -> Json:
    """Reads which generation of Falcon has these heads and norms; rows have the same order in all."""
    heads, kv = file.size("attention.head_count"), k.kv_heads(file)
    two = "blk.0.attn_norm_2.weight" in file.tensors
    if kv in (1, heads) and not two:
        return {"new_decoder_architecture": False, "multi_query": kv == 1}
    norms = 2 if two else 1
    return {"new_decoder_architecture": True, "num_kv_heads": kv, "num_ln_in_parallel_attn": norms}


FALCON = GGUFModel(
    "falcon",
    keys=(
        k.context_length,
        k.fixed("tensor_data_layout", "jploski"),
        k.embedding_length,
        k.inner_width("ffn_hidden_size"),
        k.block_count,
        k.head_count,
        Keys(_kv_heads.write, _generation),
        k.norm_epsilon("layer_norm_epsilon"),
        k.unscaled_rope_unless_default,
    ),
    defaults={"max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5},
    # With two norms, attention reads the second.
    roles={"mlp.norm_2": Written("attn_norm"), "attn.norm_2": Written("attn_norm_2")},
    whole=(QKV,),
    checks=(
        c.square_attention,
        c.computes("activation", "gelu"),
        c.computes("alibi", False),
        c.computes("parallel_attn", True),
        c.computes("bias", False),
    ),
)


def _by_layer(name: str, dimension: str, key: str) -> Keys:
    @read_by(lambda file: {key: list(file.counts(name))})
    def keys(facts: Facts) -> Iterator[KV]:
        per_head = facts.size("head_dim") if dimension.endswith("_rows") else 1
        yield facts.by_layer(name, (dims[dimension] // per_head for dims in facts.dimensions))

    return keys


def _multipliers(file: Metadata) -> Json:
    """Reads inner widths as multiples of the hidden one, rounded up to no more than an integer."""
    widths = file.counts("feed_forward_length")
    hidden = file.size("embedding_length")
    return {"ffn_multipliers": [width / hidden for width in widths], "ffn_dim_divisor": 1}


OPENELM = GGUFModel(
    "openelm",
    keys=(
        k.block_count,
        k.size("context_length", "max_context_length"),
        k.size("embedding_length", "model_dim"),
        Keys(_by_layer("feed_forward_length", "intermediate", "").write, _multipliers),
        _by_layer("attention.head_count", "q_rows", "num_query_heads"),
        _by_layer("attention.head_count_kv", "kv_rows", "num_kv_heads"),
        k.number("rope.freq_base", "rope_freq_constant"),
        k.rms_epsilon,
        k.rope_dimensions(),
        k.stated_head_sizes,
    ),
    defaults={"max_context_length": 2048, "rope_freq_constant": 10000, "rms_norm_eps": 1e-6},
    whole=(QKV,),
    head="tied",
    checks=(
        c.computes("normalize_qk_projections", True),
        c.computes("ffn_with_glu", True),
        c.computes("activation_fn_name", "swish", "silu"),
        c.computes("normalization_layer_name", "rms_norm"),
    ),
)

MODELS = {"phi3": PHI3, "chatglm": CHATGLM, "glm": GLM, "glm4": GLM4, "falcon": FALCON, "openelm": OPENELM}
