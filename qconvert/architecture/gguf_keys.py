"""The metadata of a GGUF model file from its config.json: every key, in the order it is written.

Pure. Keys, types and order are those of llama.cpp's convert_hf_to_gguf.py at commit 0c1e57098 (with the
defaults that transformers fills in); what its loader would read as another model is an error here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.architecture.config import MAX_LAYERS, flag, optional_int, positive_int
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.gguf_types import KV
from qconvert.tensors import Json

if TYPE_CHECKING:
    import numpy as np

QUANTIZATION_VERSION = KV.u32("general.quantization_version", 2)  # GGML_QNT_VERSION
FILE_TYPE = "general.file_type"


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """How llama.cpp knows a model type.

    `keyed_heads` tells whether the head size is always written; `defaults` are what transformers'
    config class assumes. `normalises_experts` is what llama.cpp's graph does to the chosen experts'
    weights, None where there are no experts or no choice; `needs_head` that its loader refuses a
    model whose head is the embedding.
    """

    arch: str
    defaults: Json
    keyed_heads: bool = False
    normalises_experts: bool | None = None
    needs_head: bool = False


_LLAMA_DEFAULTS: Json = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_MISTRAL_DEFAULTS: Json = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
_QWEN_DEFAULTS: Json = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "rms_norm_eps": 1e-6}
MODELS = {
    "llama": GGUFModel("llama", _LLAMA_DEFAULTS, keyed_heads=True),
    "mistral": GGUFModel("llama", _MISTRAL_DEFAULTS, keyed_heads=True),
    "mixtral": GGUFModel("llama", {**_MISTRAL_DEFAULTS, "rms_norm_eps": 1e-5}),
    "qwen2": GGUFModel("qwen2", _QWEN_DEFAULTS),
    "qwen3": GGUFModel("qwen3", {**_QWEN_DEFAULTS, "head_dim": 128}),
    "qwen2_moe": GGUFModel(
        "qwen2moe", {**_QWEN_DEFAULTS, "num_key_value_heads": 16}, normalises_experts=False, needs_head=True
    ),
    "qwen3_moe": GGUFModel("qwen3moe", {**_QWEN_DEFAULTS, "num_key_value_heads": 4}, normalises_experts=True),
}
ARCHITECTURES = frozenset(model.arch for model in MODELS.values())


def gguf_model(config: Json) -> GGUFModel:
    """How llama.cpp knows the model of this config. Raises UnsupportedModel for other types."""
    found = MODELS.get(str(config.get("model_type")))
    if found is None:
        raise UnsupportedModel(
            f"config.json: model_type {config.get('model_type')!r} cannot be written as GGUF here",
            f"known: {', '.join(MODELS)}",
        )
    return found


def file_keys(
    config: Json, *, file_type: int, general: Sequence[KV], tokenizer: Sequence[KV], requantized: bool
) -> tuple[KV, ...]:
    """All metadata of a model file.

    `file_type` is the number of the mixture, `general` the keys that say what the model is called,
    `tokenizer` those of its vocabulary. With `requantized` the order is that of llama-quantize, which
    writes what it sets last; without, that of the converter.
    """
    head = [KV.text("general.architecture", gguf_model(config).arch), KV.text("general.type", "model")]
    model, after_type = list(_model_keys(config)), list(_late_keys(config))
    kind = KV.u32(FILE_TYPE, file_type)
    if requantized:
        return (*head, *general, *model, *after_type, *tokenizer, QUANTIZATION_VERSION, kind)
    return (*head, *general, *model, kind, *after_type, QUANTIZATION_VERSION, *tokenizer)


def _model_keys(config: Json) -> Iterator[KV]:
    """What the converter writes for every model, between the general keys and the file type."""
    model = gguf_model(config)
    full = {**model.defaults, **{key: value for key, value in config.items() if value is not None}}
    arch = model.arch
    heads = positive_int(full, "num_attention_heads")
    kv_heads = optional_int(full, "num_key_value_heads") or heads
    yield KV.u32(f"{arch}.block_count", positive_int(full, "num_hidden_layers", MAX_LAYERS))
    yield KV.u32(f"{arch}.context_length", positive_int(full, "max_position_embeddings"))
    yield KV.u32(f"{arch}.embedding_length", positive_int(full, "hidden_size"))
    yield KV.u32(f"{arch}.feed_forward_length", positive_int(full, "intermediate_size"))
    yield KV.u32(f"{arch}.attention.head_count", heads)
    yield KV.u32(f"{arch}.attention.head_count_kv", kv_heads)
    yield from _rope_keys(arch, full)
    yield KV.f32(f"{arch}.attention.layer_norm_rms_epsilon", _positive(full, "rms_norm_eps"))
    yield from _expert_keys(model, full)
    if model.keyed_heads or "head_dim" in full:
        yield KV.u32(f"{arch}.attention.key_length", head_size(full))
        yield KV.u32(f"{arch}.attention.value_length", head_size(full))


def _late_keys(config: Json) -> Iterator[KV]:
    """What the converter's family classes add after the file type."""
    model = gguf_model(config)
    for key, name in (
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        size = optional_int(config, key) if model.normalises_experts is not None else None
        if size is not None:
            yield KV.u32(f"{model.arch}.{name}", size)
    if model.arch == "llama":
        yield KV.u32("llama.vocab_size", positive_int(config, "vocab_size"))
        yield KV.u32("llama.rope.dimension_count", head_size(config))


def head_size(config: Json) -> int:
    """Elements of one attention head: `head_dim`, or the hidden size over the heads."""
    stated = optional_int(config, "head_dim")
    return stated or positive_int(config, "hidden_size") // positive_int(config, "num_attention_heads")


def _expert_keys(model: GGUFModel, config: Json) -> Iterator[KV]:
    """The number of experts, once it is sure that llama.cpp's graph computes what the config says."""
    key = (
        "num_local_experts" if "num_local_experts" in config else "num_experts"
    )  # the first by transformers 5
    experts = optional_int(config, key)
    if experts is None and model.normalises_experts is None:
        return
    yield KV.u32(f"{model.arch}.expert_count", positive_int(config, key))
    yield KV.u32(f"{model.arch}.expert_used_count", positive_int(config, "num_experts_per_tok"))
    if model.normalises_experts is None:
        return
    normalises = flag(config, "norm_topk_prob")
    if normalises != model.normalises_experts:
        raise UnsupportedModel(
            f"config.json: norm_topk_prob is {str(normalises).lower()}, but llama.cpp's {model.arch} "
            f"{'always' if model.normalises_experts else 'never'} normalises the chosen experts' weights",
            "the GGUF would load and compute another model; keep this one in safetensors",
        )
    if config.get("mlp_only_layers") or optional_int(config, "decoder_sparse_step") not in (None, 1):
        raise UnsupportedModel(
            f"config.json: some layers have no experts, which llama.cpp's {model.arch} does not know",
            "keep this model in safetensors",
        )


def rope_parameters(config: Json) -> Json:
    """The rotary embedding's parameters: `rope_parameters`, or `rope_scaling` with its older spelling."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stated, dict):
        raise CorruptCheckpoint(f"config.json: rope_scaling is {stated!r}, not an object", "correct the file")
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", config.get("rope_theta"))
    return {**stated, "rope_type": kind, "rope_theta": 10000.0 if theta is None else theta}


def _rope_keys(arch: str, config: Json) -> Iterator[KV]:
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    scaling = f"{arch}.rope.scaling"
    if kind in ("linear", "yarn"):
        yield KV.text(f"{scaling}.type", kind)
        yield KV.f32(f"{scaling}.factor", _positive(rope, "factor"))
    elif kind not in ("default", "llama3"):
        raise UnsupportedModel(
            f"config.json: rope scaling {kind!r}, which llama.cpp's {arch} does not have",
            "known: linear, yarn, llama3",
        )
    if kind == "yarn":
        context = {"original_max_position_embeddings": config.get("max_position_embeddings"), **rope}
        original = positive_int(context, "original_max_position_embeddings")
        yield KV.u32(f"{scaling}.original_context_length", original)
        for key, name in (
            ("extrapolation_factor", "yarn_ext_factor"),
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if rope.get(key) is not None:
                yield KV.f32(f"{scaling}.{name}", _positive(rope, key))
    yield KV.f32(f"{arch}.rope.freq_base", _positive(rope, "rope_theta"))


def rope_factors(config: Json) -> np.ndarray | None:
    """The values of `rope_freqs.weight`, float32 [head_dim / 2], by which llama.cpp divides frequencies.

    None for models without Llama 3's scaling. In float32 throughout, like the converter, whose bits
    these are. Source: Llama 3.1's apply_scaling.
    """
    import numpy as np

    rope = rope_parameters(config)
    if str(rope["rope_type"]).lower() != "llama3":
        return None
    f32 = np.float32
    given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **rope}
    factor, low, high = (_positive(given, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = positive_int(
        {"original_max_position_embeddings": 8192, **rope}, "original_max_position_embeddings"
    )
    dim = head_size(config)
    frequencies = f32(1) / f32(_positive(rope, "rope_theta")) ** (np.arange(0, dim, 2, dtype=f32) / f32(dim))
    lengths = f32(2 * math.pi) / frequencies
    with np.errstate(divide="ignore", invalid="ignore"):  # equal bounds leave nothing between them
        smooth = (f32(context) / lengths - f32(low)) / f32(high - low)
        between = f32(1) / ((f32(1) - smooth) / f32(factor) + smooth)
    long = np.where(lengths > context / low, f32(factor), between)
    factors: np.ndarray = np.where(lengths < context / high, f32(1), long).astype(f32)
    return factors


def _positive(config: Json, key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CorruptCheckpoint(f"config.json: {key} is {value!r}, not a positive number", "correct the file")
    return float(value)
