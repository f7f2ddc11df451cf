"""The keys that declarations of GGUF models are put together from, and the metadata of a whole file.

Pure. Keys, types and order are those of llama.cpp's convert_hf_to_gguf.py at commit 0c1e57098 (with the
defaults that transformers fills in). A `Keys` function yields the entries of one matter; `decoder` gives
the converter's order for models that it has no special words for. A `Check` says why llama.cpp would
compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qconvert.architecture.config import optional_int, positive_int
from qconvert.architecture.gguf.model import Check, Constant, Facts, Keys, Llama3Scaling, positive
from qconvert.architecture.gguf.names import ROPE_FREQS
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.gguf_types import KV
from qconvert.tensors import Json

QUANTIZATION_VERSION = KV.u32("general.quantization_version", 2)  # GGML_QNT_VERSION
FILE_TYPE = "general.file_type"


def file_keys(
    facts: Facts,
    *,
    file_type: int,
    general: Sequence[KV],
    tokenizer: Sequence[KV],
    requantized: bool,
    pooling: int | None = None,
) -> tuple[KV, ...]:
    """All metadata of a model file.

    `file_type` is the number of the mixture, `general` the keys that say what the model is called,
    `tokenizer` those of its vocabulary, `pooling` llama.cpp's number of how one embedding is made of a
    text's many. With `requantized` the order is that of llama-quantize, which
    writes what it sets last; without, that of the converter.
    """
    head = [KV.text("general.architecture", facts.model.arch), KV.text("general.type", "model")]
    model, after_type = model_keys(facts), list(_yielded(facts, facts.model.late))
    if pooling is not None:
        after_type.append(facts.u32("pooling_type", pooling))
    kind = KV.u32(FILE_TYPE, file_type)
    if requantized:
        return (*head, *general, *model, *after_type, *tokenizer, QUANTIZATION_VERSION, kind)
    return (*head, *general, *model, kind, *after_type, QUANTIZATION_VERSION, *tokenizer)


def model_keys(facts: Facts) -> tuple[KV, ...]:
    """What the architecture says of itself between the general keys and the file type."""
    return tuple(_yielded(facts, facts.model.keys))


def _yielded(facts: Facts, keys: Sequence[Keys]) -> Iterator[KV]:
    for each in keys:
        yield from each(facts)


def block_count(facts: Facts) -> Iterator[KV]:
    """The number of layers."""
    yield facts.u32("block_count", facts.layers)


def context_length(facts: Facts) -> Iterator[KV]:
    """The longest text the model was made for."""
    yield facts.u32("context_length", facts.size("max_position_embeddings"))


def embedding_length(facts: Facts) -> Iterator[KV]:
    """The hidden width."""
    yield facts.u32("embedding_length", facts.size("hidden_size"))


def feed_forward_length(facts: Facts) -> Iterator[KV]:
    """The inner width of a dense block."""
    yield facts.u32("feed_forward_length", facts.size("intermediate_size"))


def head_count(facts: Facts) -> Iterator[KV]:
    """The number of query heads."""
    yield facts.u32("attention.head_count", facts.size("num_attention_heads"))


def head_count_kv(facts: Facts) -> Iterator[KV]:
    """The number of key and value heads: as many as query heads where the config does not say."""
    yield facts.u32(
        "attention.head_count_kv",
        facts.optional("num_key_value_heads") or facts.size("num_attention_heads"),
    )


def rms_epsilon(facts: Facts) -> Iterator[KV]:
    """What an RMS norm adds to the mean square."""
    yield facts.f32("attention.layer_norm_rms_epsilon", facts.number("rms_norm_eps"))


def norm_epsilon(key: str) -> Keys:
    """What a layer norm adds to the variance, from the config key that holds it."""

    def keys(facts: Facts) -> Iterator[KV]:
        yield facts.f32("attention.layer_norm_epsilon", facts.number(key))

    return keys


def head_sizes(facts: Facts) -> Iterator[KV]:
    """The size of a head, where the config states it."""
    if "head_dim" in facts.settings:
        yield from stated_head_sizes(facts)


def stated_head_sizes(facts: Facts) -> Iterator[KV]:
    """The size of a head, always."""
    yield facts.u32("attention.key_length", head_size(facts.settings))
    yield facts.u32("attention.value_length", head_size(facts.settings))


def rope_dimensions(share: float | None = None) -> Keys:
    """How much of a head is rotated.

    All of it, or the config's `partial_rotary_factor` (`share` where it has none) of it.
    """

    def keys(facts: Facts) -> Iterator[KV]:
        factor = 1.0
        if share is not None:
            factor = positive(
                {"partial_rotary_factor": share, **facts.settings, **rope_of(facts)}, "partial_rotary_factor"
            )
        yield facts.u32("rope.dimension_count", int(head_size(facts.settings) * factor))

    return keys


def vocab_size(facts: Facts) -> Iterator[KV]:
    """The number of rows of the embedding."""
    yield facts.u32("vocab_size", facts.size("vocab_size"))


def expert_counts(facts: Facts) -> Iterator[KV]:
    """How many experts a layer has, and how many of them each token uses."""
    yield facts.u32("expert_count", facts.size("num_experts"))
    yield facts.u32("expert_used_count", facts.size("num_experts_per_tok"))


def expert_widths(facts: Facts) -> Iterator[KV]:
    """The inner widths of an expert, and of the shared one, where the config states them."""
    for key, name in (
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        size = facts.optional(key)
        if size is not None:
            yield facts.u32(name, size)


def head_size(settings: Json) -> int:
    """Elements of one attention head: `head_dim`, or the hidden size over the heads."""
    stated = optional_int(settings, "head_dim")
    return stated or positive_int(settings, "hidden_size") // positive_int(settings, "num_attention_heads")


def rope_of(facts: Facts) -> Json:
    """The rotary embedding's parameters: `rope_parameters`, or `rope_scaling` with its older spelling.

    Of models with two, those of the layers with full attention.
    """
    settings = facts.settings
    stated = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if isinstance(stated, dict) and isinstance(stated.get("full_attention"), dict):
        stated = stated["full_attention"]
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(f"config.json: rope_scaling is {stated!r}, not an object")
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", settings.get("rope_theta"))
    return {**stated, "rope_type": kind, "rope_theta": 10000.0 if theta is None else theta}


# What llama.cpp computes from keys for any model.
ROPES = ("default", "linear", "yarn")


def rope_kinds(*known: str) -> Keys:
    """The base and scaling of the rotary embedding, of these kinds: UnsupportedModel for any other."""
    return lambda facts: _rope(facts, known)


def _rope(facts: Facts, known: Sequence[str]) -> Iterator[KV]:
    found = rope_of(facts)
    kind = found["rope_type"]
    if kind not in known:
        raise UnsupportedModel(
            f"config.json: rope scaling {kind!r}, which llama.cpp's {facts.model.arch} does not have",
            "keep this model in safetensors; known: "
            + (", ".join(each for each in known if each != "default") or "none"),
        )
    if kind in ("linear", "yarn"):
        yield facts.text("rope.scaling.type", kind)
        yield facts.f32("rope.scaling.factor", positive(found, "factor"))
    if kind == "yarn":
        yield from _yarn(facts, found)
    yield facts.f32("rope.freq_base", positive(found, "rope_theta"))


rope = rope_kinds(*ROPES)
# Llama 3's scaling comes as a tensor (`rope_freqs`).
llama_rope = rope_kinds(*ROPES, "llama3")


def unscaled_rope_unless_default(facts: Facts) -> Iterator[KV]:
    """The base of the rotary embedding where it is not the one that llama.cpp assumes."""
    yield from (entry for entry in rope_kinds("default")(facts) if entry.value != 10000.0)


def _yarn(facts: Facts, found: Json) -> Iterator[KV]:
    context = {
        "original_max_position_embeddings": facts.settings.get("max_position_embeddings"),
        **found,
    }
    original = positive_int(context, "original_max_position_embeddings")
    yield facts.u32("rope.scaling.original_context_length", original)
    for key, name in (
        ("extrapolation_factor", "yarn_ext_factor"),
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if found.get(key) is not None:
            yield facts.f32(f"rope.scaling.{name}", positive(found, key))


def rope_freqs(facts: Facts) -> Iterator[Constant]:
    """`rope_freqs.weight`, by which llama.cpp divides frequencies, for models with Llama 3's scaling."""
    found = rope_of(facts)
    if str(found["rope_type"]).lower() != "llama3":
        return
    given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **found}
    context = {"original_max_position_embeddings": 8192, **found}
    scaling = Llama3Scaling(
        head_size(facts.settings),
        positive(found, "rope_theta"),
        positive(given, "factor"),
        positive(given, "low_freq_factor"),
        positive(given, "high_freq_factor"),
        positive_int(context, "original_max_position_embeddings"),
    )
    yield Constant(ROPE_FREQS, scaling=scaling)


def decoder(*, rope: Keys = rope, norm: Keys = rms_epsilon, more: Sequence[Keys] = ()) -> tuple[Keys, ...]:
    """The keys of a decoder in the converter's usual order, with `more` before the size of the heads."""
    return (
        block_count,
        context_length,
        embedding_length,
        feed_forward_length,
        head_count,
        head_count_kv,
        rope,
        norm,
        *more,
        head_sizes,
    )


def scaling_none(facts: Facts) -> Iterator[KV]:
    """That the rotary embedding is not scaled, which the converter spells out for Cohere."""
    yield facts.text("rope.scaling.type", "none")


def computes(key: str, *values: object) -> Check:
    """The graph computes these values of a config key, the first where the config does not say."""

    def check(facts: Facts) -> str | None:
        found = facts.settings.get(key, values[0])
        if found in values:
            return None
        return (
            f"{key} is {_shown(found)}, but llama.cpp's {facts.model.arch} computes "
            f"{' or '.join(map(_shown, values))}"
        )

    return check


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else repr(value)[:80]


def normalises_experts(value: bool) -> Check:
    """What the graph does to the weights of the chosen experts."""

    def check(facts: Facts) -> str | None:
        stated = facts.flag("norm_topk_prob")
        if stated == value:
            return None
        return (
            f"norm_topk_prob is {str(stated).lower()}, but llama.cpp's {facts.model.arch} "
            f"{'always' if value else 'never'} normalises the chosen experts' weights"
        )

    return check


def experts_everywhere(facts: Facts) -> str | None:
    """The graph has experts in every layer."""
    if not facts.settings.get("mlp_only_layers") and facts.optional("decoder_sparse_step") in (None, 1):
        return None
    return f"some layers have no experts, which llama.cpp's {facts.model.arch} does not know"


def square_attention(facts: Facts) -> str | None:
    """The loader takes the output projection for a square matrix."""
    heads, size, hidden = (
        facts.size("num_attention_heads"),
        head_size(facts.settings),
        facts.size("hidden_size"),
    )
    if heads * size == hidden:
        return None
    return f"{heads} heads of {size} are not the hidden {hidden} that llama.cpp's {facts.model.arch} expects"


def every_nth_layer_is_full(step: int) -> Check:
    """The graph has a sliding window in all layers but every `step`-th."""

    def check(facts: Facts) -> str | None:
        types = facts.settings.get("layer_types")
        expected = [
            "full_attention" if (layer + 1) % step == 0 else "sliding_attention"
            for layer in range(facts.layers)
        ]
        if types is None or types == expected:
            return None
        return f"layer_types is not the pattern of llama.cpp's {facts.model.arch}: every {step}th layer full"

    return check


def window_left_out(facts: Facts) -> str | None:
    """The graph attends to everything, where the class has a sliding window."""
    window, context = facts.count("sliding_window"), facts.optional("max_position_embeddings") or 0
    if not 0 < window < context or not facts.flag("use_sliding_window", default=True):
        return None
    return (
        f"sliding_window is {window}, which llama.cpp's {facts.model.arch} leaves out: "
        "texts of more tokens are computed otherwise there"
    )
