"""Defines the metadata keys that declarations of GGUF models consist of, and a whole file's metadata.

Pure. Keys, types and order are those of llama.cpp's convert_hf_to_gguf.py at commit 0c1e57098 (with the
defaults that transformers fills in). `Keys` write a group of entries and read config.json back from them;
`decoder` has the converter's order for models without special cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from qconvert.core.config_json import optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.errors import UnsupportedModel
from qconvert.models.gguf.declaration import (
    Constant,
    Facts,
    Keys,
    Read,
    RopeFactors,
    made_and_read,
    nothing,
    positive,
    read_by,
)
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.gguf.names import ROPE_FREQS
from qconvert.models.rope import Llama3Scaling, rope_fields

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
    """Returns all metadata of a model file.

    `file_type` is the number of the mixture, `general` the keys of the model's identity, `tokenizer` those of
    its vocabulary, `pooling` llama.cpp's number of the pooling type of an embedding model. With `requantized`
    the order is that of llama-quantize, which writes what it sets last; without, that of the converter.
    """
    head = [KV.text("general.architecture", facts.model.arch), KV.text("general.type", facts.model.kind)]
    model, after_type = model_keys(facts), list(_yielded(facts, facts.model.late))
    if pooling is not None:
        after_type.append(facts.u32("pooling_type", pooling))
    kind = KV.u32(FILE_TYPE, file_type)
    if requantized:
        return (*head, *general, *model, *after_type, *tokenizer, QUANTIZATION_VERSION, kind)
    return (*head, *general, *model, kind, *after_type, QUANTIZATION_VERSION, *tokenizer)


def model_keys(facts: Facts) -> tuple[KV, ...]:
    """Returns the architecture's keys between the general keys and the file type."""
    return tuple(_yielded(facts, facts.model.keys))


def _yielded(facts: Facts, keys: Sequence[Keys]) -> Iterator[KV]:
    for each in keys:
        yield from each(facts)


def counted(name: str, value: Callable[[Facts], int], read: Read = nothing) -> Keys:
    """Declares an integer, from the facts of a model."""
    return Keys(lambda facts: iter([facts.u32(name, value(facts))]), read)


def fixed(name: str, value: str | float) -> Keys:
    """Declares a text or a number that never changes."""
    return Keys(lambda f: iter([f.text(name, value) if isinstance(value, str) else f.f32(name, value)]))


def size(name: str, key: str) -> Keys:
    """Declares a positive integer that a config key holds, too."""
    return counted(name, lambda facts: facts.size(key), lambda file: {key: file.size(name)})


def count(name: str, key: str) -> Keys:
    """Declares an integer that a config key holds, too: 0 where it is absent."""
    return counted(name, lambda facts: facts.count(key), lambda file: {key: file.count(name)})


def inner_width(key: str) -> Keys:
    """Declares the inner width of the dense blocks, which a config need not state under its key."""
    name = "feed_forward_length"
    return counted(
        name, lambda facts: facts.dimensions[0]["intermediate"], lambda file: {key: file.size(name)}
    )


def number(name: str, key: str, default: float | None = None) -> Keys:
    """Declares a positive number that a config key holds, too; files without it have the default."""

    @read_by(lambda file: {key: file.number(name, default)})
    def keys(facts: Facts) -> Iterator[KV]:
        yield facts.f32(name, facts.number(key))

    return keys


def optional_number(name: str, key: str) -> Keys:
    """Declares a positive number that a config may leave out, or have as null."""

    @read_by(lambda file: {key: file.number(name) if file.has(name) else None})
    def keys(facts: Facts) -> Iterator[KV]:
        if facts.settings.get(key) is not None:
            yield facts.f32(name, facts.number(key))

    return keys


def flag(name: str, key: str) -> Keys:
    """Declares a boolean that a config key holds, too."""

    @read_by(lambda file: {key: file.flag(name)})
    def keys(facts: Facts) -> Iterator[KV]:
        yield facts.flagged(name, value=facts.flag(key))

    return keys


def read_only(read: Read) -> Keys:
    """Declares config entries of a file that no metadata key holds."""
    return Keys(lambda facts: iter(()), read)


def together(*parts: Keys, read: Read | None = None) -> Keys:
    """Declares several groups of keys in order, read one by one or by `read`."""

    def write(facts: Facts) -> Iterator[KV]:
        return (entry for part in parts for entry in part(facts))

    def read_all(file: Metadata) -> Json:
        return {key: value for part in parts for key, value in part.read(file).items()}

    return Keys(write, read or read_all)


# The number of layers, the maximum context, the hidden width, the inner width of a dense block, query heads.
block_count = counted(
    "block_count", lambda facts: facts.layers, lambda file: {"num_hidden_layers": file.layers}
)
context_length = size("context_length", "max_position_embeddings")
embedding_length = size("embedding_length", "hidden_size")
feed_forward_length = size("feed_forward_length", "intermediate_size")
head_count = size("attention.head_count", "num_attention_heads")


SIZES = (block_count, context_length, embedding_length, feed_forward_length, head_count)


def kv_heads(file: Metadata) -> int:
    """Returns the number of key and value heads: as many as query heads where the file has no key."""
    return file.optional("attention.head_count_kv") or file.size("attention.head_count")


# As many as query heads where the config has no key.
head_count_kv = counted(
    "attention.head_count_kv",
    lambda facts: facts.optional("num_key_value_heads") or facts.size("num_attention_heads"),
    lambda file: {"num_key_value_heads": kv_heads(file)},
)
sliding_window = size("attention.sliding_window", "sliding_window")


def rms_epsilon_of(key: str) -> Keys:
    """Declares the epsilon of an RMS norm, from the config key that holds it."""
    return number("attention.layer_norm_rms_epsilon", key)


rms_epsilon = rms_epsilon_of("rms_norm_eps")


def norm_epsilon(key: str) -> Keys:
    """Declares the epsilon of a layer norm, from the config key that holds it."""
    return number("attention.layer_norm_epsilon", key)


def _stated_head(file: Metadata) -> Json:
    stated = file.optional("attention.key_length")
    if stated != (file.optional("attention.value_length") or stated):
        raise UnsupportedModel(
            f"{file.file}: {file.arch}.attention.key_length is {stated}, attention.value_length "
            f"{file.optional('attention.value_length')}; its class has one size of heads",
            "keep this model as GGUF: config.json cannot say it",
        )
    return {"head_dim": stated} if stated else {}


@read_by(_stated_head)
def head_sizes(facts: Facts) -> Iterator[KV]:
    """Writes the size of a head, where the config has it."""
    if "head_dim" in facts.settings:
        yield from stated_head_sizes(facts)


@read_by(_stated_head)
def stated_head_sizes(facts: Facts) -> Iterator[KV]:
    """Writes the size of a head, always."""
    yield facts.u32("attention.key_length", head_size(facts.settings))
    yield facts.u32("attention.value_length", head_size(facts.settings))


def rope_dimensions(share: float | None = None) -> Keys:
    """How much of a head is rotated.

    All of it, or the config's `partial_rotary_factor` (`share` where it has none) of it.
    """

    @read_by(lambda file: rotated(file) if share is not None else {})
    def keys(facts: Facts) -> Iterator[KV]:
        stated = {"partial_rotary_factor": share, **facts.settings, **rope_of(facts)}
        factor = 1.0 if share is None else positive(stated, "partial_rotary_factor")
        yield facts.u32("rope.dimension_count", int(head_size(facts.settings) * factor))

    return keys


def rotated(file: Metadata) -> Json:
    """The share of a head that is rotated, so that the class rounds it to the file's dimensions."""
    dimensions = file.optional("rope.dimension_count")
    if dimensions is None:
        return {}
    share = dimensions / file.head_size
    if int(file.head_size * share) < dimensions:  # rounded down, and so would the product be
        share = math.nextafter(share, 2)
    return {"partial_rotary_factor": share}


vocab_size = counted("vocab_size", lambda facts: facts.size("vocab_size"))
# The number of experts of a layer, and of those each token uses.
expert_counts = together(
    size("expert_count", "num_experts"), size("expert_used_count", "num_experts_per_tok")
)


def _widths(file: Metadata) -> Json:
    expert = file.optional("expert_feed_forward_length") or file.rows("blk.0.ffn_up_exps.weight")
    shared = file.optional("expert_shared_feed_forward_length")
    if shared is None and "blk.0.ffn_up_shexp.weight" in file.tensors:
        shared = file.rows("blk.0.ffn_up_shexp.weight")
    both = {"moe_intermediate_size": expert, "shared_expert_intermediate_size": shared}
    return {key: width for key, width in both.items() if width}


@read_by(_widths)
def expert_widths(facts: Facts) -> Iterator[KV]:
    """Writes the inner widths of an expert, and of the shared one, where the config has them.

    Qwen3-Coder's config says 0 of experts that its model does not have.
    """
    names = {"moe_intermediate_size": "expert", "shared_expert_intermediate_size": "expert_shared"}
    for key, name in names.items():
        if facts.count(key):
            yield facts.u32(f"{name}_feed_forward_length", facts.size(key))


def head_size(settings: Json) -> int:
    """Returns the elements of one attention head: `head_dim`, or the hidden size over the heads."""
    stated = optional_int(settings, "head_dim")
    return stated or positive_int(settings, "hidden_size") // positive_int(settings, "num_attention_heads")


def rope_of(facts: Facts) -> Json:
    """The rotary embedding's parameters: `rope_parameters`, or `rope_scaling` with its older spelling.

    Of models with two, those of the layers with full attention.
    """
    return rope_fields(facts.settings)


# What llama.cpp computes from keys for any model.
ROPES = ("default", "linear", "yarn")


def rope_kinds(*known: str) -> Keys:
    """The base and scaling of the rotary embedding, of these kinds: UnsupportedModel for any other."""
    return Keys(lambda facts: rope_entries(facts, rope_of(facts), known), read_rope)


def read_rope(file: Metadata) -> Json:
    """What config.json says of a rotary embedding that keys scale, in the older spelling of the two."""
    theta = file.number("rope.freq_base", 10000.0)
    kind = file.word("rope.scaling.type")
    if kind in (None, "none"):
        return {"rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{file.file}: {file.arch}.rope.scaling.type is {kind!r}, which is not read here",
            "known: none, linear, yarn, and the kinds that a file has tensors for",
        )
    scaling: Json = {"rope_type": kind, "factor": file.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.size("rope.scaling.original_context_length")
        scaling |= {key: file.number(name) for key, name in _YARN if file.has(name)}
    return {"rope_theta": theta, "rope_scaling": scaling}


_YARN = (
    ("extrapolation_factor", "rope.scaling.yarn_ext_factor"),
    ("attention_factor", "rope.scaling.yarn_attn_factor"),
    ("beta_fast", "rope.scaling.yarn_beta_fast"),
    ("beta_slow", "rope.scaling.yarn_beta_slow"),
)


def rope_entries(facts: Facts, found: Json, known: Sequence[str] = ROPES) -> Iterator[KV]:
    """Yields the scaling and the base of a rotary embedding, whose parameters are `found`."""
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
        context = {"original_max_position_embeddings": facts.settings.get("max_position_embeddings"), **found}
        original = positive_int(context, "original_max_position_embeddings")
        yield facts.u32("rope.scaling.original_context_length", original)
        for key, name in _YARN:
            if found.get(key) is not None:
                yield facts.f32(name, positive(found, key))
    yield facts.f32("rope.freq_base", positive(found, "rope_theta"))


rope = rope_kinds(*ROPES)
# Llama 3's scaling comes as a tensor (`rope_freqs`).
llama_rope = rope_kinds(*ROPES, "llama3")


@read_by(lambda file: {"rope_theta": file.number("rope.freq_base", 10000.0)})
def unscaled_rope_unless_default(facts: Facts) -> Iterator[KV]:
    """The base of the rotary embedding where it is not the one that llama.cpp assumes."""
    yield from (entry for entry in rope_kinds("default")(facts) if entry.value != 10000.0)


def _read_freqs(file: Metadata) -> Json:
    if file.scaling is None:
        return {}
    return {"rope_scaling": read_scaling(file, file.scaling(file.number("rope.freq_base", 10000.0)))}


def read_scaling(file: Metadata, found: Json | None) -> Json:
    """Returns the scaling that a file's divisors were found to be; UnsupportedModel for None."""
    if found is None:
        raise UnsupportedModel(
            f"{file.file}: {ROPE_FREQS} scales frequencies in a way that config.json cannot say",
            "keep this model as GGUF: of these, only Llama 3's scaling is read",
        )
    return found


@made_and_read(_read_freqs)
def rope_freqs(facts: Facts) -> Iterator[Constant]:
    """`rope_freqs.weight`, by which llama.cpp divides frequencies, for models with Llama 3's scaling."""
    found = rope_of(facts)
    if str(found["rope_type"]).lower() != "llama3":
        return
    yield llama3_divisors(found, head_size(facts.settings))


def llama3_divisors(found: Json, rotated: int, room: int = 0) -> Constant:
    """Returns `rope_freqs.weight` of Llama 3's scaling of `rotated` dimensions, for a head of `room`."""
    given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **found}
    context = {"original_max_position_embeddings": 8192, **found}
    factors = RopeFactors(
        rotated,
        positive(found, "rope_theta"),
        Llama3Scaling(
            positive(given, "factor"),
            positive(given, "low_freq_factor"),
            positive(given, "high_freq_factor"),
            positive_int(context, "original_max_position_embeddings"),
        ),
        room,
    )
    return Constant(ROPE_FREQS, rope=factors)


def decoder(*, rope: Keys = rope, norm: Keys = rms_epsilon, more: Sequence[Keys] = ()) -> tuple[Keys, ...]:
    """Returns the keys of a decoder in the converter's usual order, with `more` before the head sizes."""
    return (*SIZES, head_count_kv, rope, norm, *more, head_sizes)


# That the rotary embedding is not scaled, which the converter states for Cohere.
scaling_none = fixed("rope.scaling.type", "none")
